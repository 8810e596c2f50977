"""From a `Problem` to the launch of the Hopper forward: pure functions and frozen dataclasses, no device needed.

`Tiles` is what a kernel is compiled for; `Config` is what one call launches. The thresholds come from docs/hopper_prefill.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod

import torch

from openkda.problem import Problem

STEP = 32  # tokens per pipeline step: two blocks of 16
BLOCK = 16  # tokens per block, the chunk size of the algebra


@dataclass(frozen=True)
class Tiles:
    """Everything a kernel is specialised on, besides the dtypes of its tensors. Part of the compile cache's key."""

    K: int
    V: int
    R: int  # rows of V (of the transposed state) per block
    wide: int  # blocks of a group
    prep_warps: int  # of a preparation partition
    spread: bool  # all of these turn a step at a time (spread.py), not each one a block
    groups: int  # groups held in shared memory
    preps: int  # preparation partitions
    prep_regs: int
    scan_warps: int
    outputs: bool  # True: the forward; False: state only (segment summaries)
    kg: bool  # True: a separate k * exp(G_C - G) tile for the state; False: the decay follows the product (bounded gates)
    gate: str  # "none", "softplus", "bounded"
    form: str  # of the scores: "product", "steps" (bounded gates; steps.py), "halves" (any gate), "levels" (fp16, which has no range)
    l2norm: bool
    beta: str  # "given", "sigmoid", "twice" (2 * sigmoid)
    state_v_first: bool
    chunk: int  # tokens from one chunk-entry state to the next; 0: none are written
    split: str  # which work a block takes from the segment table: "none", "lanes", "turns", "tails", ... (locate in segments.py)
    pdl: bool
    cluster: bool  # two blocks, the halves of V, share the preparation of their head (cluster.py)
    fixed: bool  # the segment table lies ready: no launch of the call writes it
    located: bool  # the block finds its work before it hands over to its roles, not each role

    def without_outputs(self) -> Tiles:
        """Those of a preparation for the state alone"""
        return replace(self, outputs=False)


@dataclass(frozen=True)
class Config:
    """The launches of one call."""

    forward: Tiles
    steps: int = 0  # at most so many steps a segment; 0: sequences are not split
    tail: int = 0  # blocks before a segment from which its entry state is tried
    state: Tiles | None = None  # of the state-only passes
    whole: Tiles | None = None  # where a tail does not suffice: the sequence runs unsplit with these tiles; None: summaries of its segments
    reason: str = ""
    lanes: tuple[int, ...] = (0,)  # where the lanes of what runs unsplit begin, in 1024 parts of a sequence; up to four

    @property
    def later(self) -> bool:
        """Whether sequences are cut a block of 16 later: a first segment has no tail of its own, a last one a final state to write."""
        return self.forward.split == "tails"


# What a block looks like: rows of V, preparation partitions and their registers, warps of the scan, groups in the ring.
FULL = dict(R=128, preps=2, prep_regs=120, scan_warps=4, groups=3)  # most work per block: enough heads to fill the chip
HALF = dict(R=64, preps=2, prep_regs=160, scan_warps=4, groups=3)  # two blocks share a head
WIDE = dict(R=128, wide=8, preps=1, prep_regs=128, scan_warps=4, groups=1)  # up to eight blocks with a tail of their own
# The same, tiles of bf16. With 248 registers the scan's loops have no spills, which go to the second cache beside a full shared memory.
SPREAD = dict(R=128, spread=True, prep_warps=8, preps=1, prep_regs=120, scan_warps=4, groups=2)
ALONE = dict(R=128, preps=1, prep_regs=160, scan_warps=4, groups=3)  # short segments, unbounded gates
PAIRS = dict(R=128, preps=1, prep_regs=72, scan_warps=8, groups=3)  # summaries: two chains of 128 rows


def base_tiles(problem: Problem, shape: dict, **changes: object) -> Tiles:
    """Tiles of a problem for one block shape; `changes` win."""
    p = problem
    gate = p.gate
    form = "levels" if p.dtype == torch.float16 else "product" if p.bounded else "halves"
    fields = dict(
        K=p.K, V=p.V, outputs=True, gate=gate, l2norm=p.qk_l2norm, state_v_first=p.state_v_first, split="none", pdl=False, spread=False,
        fixed=not p.varlen, cluster=False, located=False,
        chunk=p.chunk_size if p.return_intermediate_states and changes.get("outputs", True) else 0,
        beta="given" if not p.beta_sigmoid else "twice" if p.neg_eigval else "sigmoid",
        form=form, kg=form != "product",
    )  # fmt: skip
    if (form == "halves" or changes.get("split") == "tails") and shape["prep_regs"] == FULL["prep_regs"] and "spread" not in shape:
        shape = {**shape, "prep_regs": shape["prep_regs"] + 8}  # all that the scan can spare where it has no tail to run
    fields = {"wide": 4, **fields, **shape, **changes}
    tiles = Tiles(**{"prep_warps": fields["wide"], **fields})
    # Where the scan of 128 rows under unbounded gates finds its work itself, its loop is short of registers and 10 % slower. A block of a
    # cluster that has nothing to do had better know it before it sets up barriers and meets the other one (below): 1.5 us of a call.
    tiles = replace(tiles, located=form == "halves" and tiles.outputs and tiles.R == 128 and tiles.split != "tails")
    left = SHARED_BYTES - 2 * BLOCK * tiles.R * 2 - spread_bytes(tiles) - RESERVED_BYTES
    tiles = replace(tiles, groups=min(tiles.groups, left // group_bytes(tiles, p.gate_dtype.itemsize)))
    # Two blocks that share a head share its preparation where a place of the ring can be spared. Blocks that take turns do not. Two blocks
    # of 16 tokens go together in bounded gates, but not where segments whose blocks have all of V do the same work without (`locate`).
    if tiles.outputs and 2 * tiles.R == p.V == p.K and tiles.split in ("none", "lanes", "rest", "whole") and tiles.groups == 3:
        form = "steps" if form == "product" and tiles.split != "whole" else form
        tiles = replace(tiles, cluster=True, preps=1, prep_regs=168, form=form, located=tiles.split in ("rest", "whole"))
    return tiles


SHARED_BYTES = 227 * 1024  # shared memory of a block
RESERVED_BYTES = 4096  # exchanges between warps, barriers, alignment


def group_bytes(tiles: Tiles, gate_bytes: int) -> int:
    """Shared memory of a group (tiles.py, Ring)"""
    t = tiles
    block = 2 * BLOCK * t.K * 2 + BLOCK * t.K * gate_bytes + BLOCK * t.R * 2 + 2 * BLOCK * BLOCK * 2 + t.K * 4 + 3 * BLOCK * 4
    return t.wide * (block + BLOCK * BLOCK * 2 * (t.form == "steps"))


def spread_bytes(tiles: Tiles) -> int:
    """Shared memory beside the groups (tiles.py, Spread)"""
    t = tiles
    edges = 4 * t.K * 4
    return 0 if not t.spread else edges if t.form == "product" else 3 * edges + t.wide * t.K * 2 * (2 * BLOCK + 1)


MULTIPROCESSORS = 132
TAIL = 4  # most blocks of a tail: 64 tokens
LANES = 3  # of a head at most; a fourth would gain 1 %, for more blocks that have to leave where tails suffice
PARTS = (2, 3, 4, 5, 6, 8, 11, 12, 16, 22, 24, 32)  # into how many segments the longest sequence may be cut
SAMPLE = 64  # lengths that stand for all of a larger batch in the choice
WORKSPACE = 512 * 2**20  # bytes that entry states and summaries may take


def own_tail_blocks(tiles: Tiles) -> int:
    """How many blocks of 16 tokens the ring holds: as many as a segment has at most with its own tail, whose tiles stay there (own.py)"""
    return tiles.wide * tiles.groups


def own_tail_tiles(problem: Problem, blocks: int) -> Tiles:
    """Of segments with tails of their own, `blocks` of 16 tokens in all: of those that hold as many, the ones whose first group is ready
    soonest (docs/hopper_prefill.md)."""
    shapes = ((4, {**SPREAD, "groups": 1}), (6, {**SPREAD, "wide": 8, "groups": 1}), (8, SPREAD))
    if base_tiles(problem, FULL).form == "levels":
        shapes = ((4, {**FULL, "groups": 1}), (8, WIDE))
    for most, shape in shapes:
        tiles = base_tiles(problem, shape, split="tails", pdl=True)
        if blocks <= min(most, own_tail_blocks(tiles)):
            return tiles
    return base_tiles(problem, FULL, split="tails", pdl=True)


@dataclass(frozen=True)
class Costs:
    """What the choice knows of the kernels: microseconds on an H200, most multiprocessors at work (tools/tune_hopper.py measures them).
    A block takes a start, so much a step, and a turn between two items."""

    full: float  # a step of the forward, all of V in a block
    half: float  # V in two, its blocks in clusters
    own: float  # of the forward with its own tail
    state: float  # of the state-only passes
    start: float = 11.6
    turn: float = 5.0  # from an item to the next; where each block takes one, a start
    half_start: float = 12.5
    apart: float = 1.14  # how much longer a step of V in two takes where its blocks do not share their preparation
    whole: float = 1.0  # the same for the launch of what segments could not do
    quiet: float = 0.75  # of a step of V in two, in a cluster, that goes through the state alone
    whole_quiet: float = 0.75  # the same for the launch of what segments could not do
    own_start: float = 6.2  # of a forward block with its own tail
    entry_start: float = 13.5  # of one that reads its entry state
    tail_start: float = 6.0  # of the pass over the tails
    summary_start: float = 11.0  # of the pass over segments, which writes (b, M)
    idle: float = 1.3  # a launch whose blocks leave at once, per wave of them
    leave: float = 5.9  # the same in clusters
    link: float = 1.56  # a link of the chain of summaries
    overlap: float = 4.0  # what of an unsplit block's start lies under own tails

    def slower(self, factor: float) -> Costs:
        """The same with all steps slower."""
        return replace(self, **{name: factor * getattr(self, name) for name in ("full", "half", "own", "state")})


PRODUCT = Costs(full=1.83, half=1.15, own=2.45, state=2.33)
COSTS = {
    "product": replace(PRODUCT, whole=1.09, whole_quiet=0.66),
    "halves": replace(PRODUCT.slower(1.18), half=1.32, own=3.2, own_start=6.3, state=3.15, turn=11.6, leave=1.3),
    "levels": replace(PRODUCT.slower(2.85), half=2.5, own=5.1, own_start=9.5, apart=1.5, turn=11.6, leave=1.3),
}  # fmt: skip
WORTH = 0.95  # of the time of an unsplit run: what a cut must promise


def makespan(blocks: list[tuple[float, float]]) -> float:
    """Time that blocks, (time, how many) by falling time, need on the whole chip: a lower bound that blocks started in this order meet
    closely, one block a multiprocessor."""
    bound = work = count = 0.0
    for time, copies in blocks:
        work += time * copies
        count += copies
        bound = max(bound, time * -(-count // MULTIPROCESSORS))  # so many equal blocks at least
    return max(bound, work / MULTIPROCESSORS)


@dataclass(frozen=True)
class Cut:
    """A way to run a batch."""

    how: str  # "unsplit"; "tails": own tails, else unsplit; "summaries", "whole": a pass over tails, else summaries or unsplit
    shape: str  # blocks of what runs unsplit: "full" or "half"
    steps: int = 0  # of a segment at most, 0: not cut
    tail: int = 0  # steps of the tails before segments
    lanes: int = 1  # of what runs unsplit in blocks of half of V


def lane_parts(lanes: int, quiet: float) -> tuple[int, ...]:
    """Where the lanes of a sequence begin, in 1024 parts of it, such that they end together: each goes through what lies before its part in
    `quiet` of the time that the part itself takes."""
    kept = 1.0 - quiet
    return tuple(round(1024 * (1.0 - kept**n) / (1.0 - kept**lanes)) for n in range(lanes))


Batch = Sequence[tuple[int, float]]  # (steps, how many sequences) by falling steps


def expected(cut: Cut, batch: Batch, HV: int, costs: Costs) -> tuple[float, float]:
    """Microseconds where tails give all entry states, and where they give none."""
    c = costs

    def forward(blocks: Iterable[tuple[float, float]], step: float = c.full, start: float = c.start) -> float:
        return makespan([(start + step * n, copies * HV) for n, copies in blocks])

    def unsplit(blocks: Batch) -> float:
        if cut.shape == "full":
            return forward(blocks)
        step, quiet = (c.half * c.whole, c.whole_quiet) if cut.how == "whole" else (c.half, c.quiet)
        parts = lane_parts(cut.lanes, quiet)
        times = []
        for n, copies in blocks:
            cuts = [2 * (-(-n // 2) * part // 1024) for part in parts] + [n]
            times += [(c.half_start + step * (quiet * a + b - a), copies * 2 * HV) for a, b in pairwise(cuts) if a < b]
        return makespan(sorted(times, reverse=True))

    def idle(blocks: Batch, each: float = c.idle) -> float:
        return each * -(-sum(copies for _, copies in blocks) * HV // MULTIPROCESSORS)

    if cut.how == "unsplit":
        turns = c.start - c.turn + makespan([(c.turn + c.full * n, copies * HV) for n, copies in batch])
        time = turns if cut.shape == "full" else unsplit(batch)
        return time, time
    long, short = ([x for x in batch if (x[0] > cut.steps) == above] for above in (True, False))
    parts = [-(-n // cut.steps) for n, _ in long]
    pieces = [(-(-n // k), copies * k) for (n, copies), k in zip(long, parts)]
    if cut.how == "tails":
        first = max(forward([(n + cut.tail / 2, copies) for n, copies in pieces], c.own, c.own_start), forward(short))
        return first + c.idle, first - c.overlap + unsplit(long)
    inner = [(n, copies * (k - 1) / k * HV) for (n, copies), k in zip(pieces, parts)]  # all segments but the last of each sequence
    tails = makespan([(c.tail_start + c.state * cut.tail / 2, copies) for _, copies in inner])
    every = forward(sorted(pieces + short, reverse=True), start=c.entry_start)
    if cut.how == "whole":
        left = idle(long, c.leave if cut.shape == "half" else c.idle)
        return tails + left + every, tails + unsplit(long) + max(forward(short), idle(pieces))
    summaries = makespan([(c.summary_start + c.state * n, copies) for n, copies in inner])
    chain = c.idle + c.link * (max(parts, default=1) - 1)
    return tails + 2 * c.idle + every, tails + summaries + chain + every


def batches(problem: Problem, lengths: tuple[int, ...] | None) -> list[Batch]:
    """What the batch may be. One guess where lengths are known or all the same, else two: that they are, and that one sequence holds half
    of the tokens."""
    p = problem
    steps = lambda tokens: max(1, -(-tokens // STEP))
    if lengths is None:
        tokens = -(-p.T // p.N) if p.varlen and p.N else p.T
        even = [(steps(tokens), max(1, p.N))]
        return [even] if not p.varlen or p.N < 2 else [even, [(steps(p.T // 2), 1), (steps(p.T // (2 * p.N)), p.N - 1)]]
    found = sorted(map(steps, lengths), reverse=True) or [1]
    every = -(-len(found) // SAMPLE)
    return [[(n, copies * len(found) / len(found[::every])) for n, copies in Counter(found[::every]).items()]]


@lru_cache(maxsize=1024)
def choose(problem: Problem, lengths: tuple[int, ...] | None = None) -> Config:
    """The launches of a problem whose sequences have `lengths` tokens (None: the host does not know them, or they are all the same).

    Where sequences times heads do not fill the chip, sequences are cut. Which of the prepared ways a head takes, the device decides: its
    segments at once where tails give their entry states, else from summaries, or unsplit. Taken is the cut of least expected time, the
    geometric mean of where tails suffice and where they do not."""
    p = problem
    guesses = batches(p, lengths)
    longest = max(batch[0][0] for batch in guesses)
    costs = COSTS[base_tiles(p, FULL).form]
    if not base_tiles(p, HALF).cluster:
        costs = replace(costs, half=costs.apart * costs.half, whole=1.0)
    shapes = ("half",) if p.V == 64 else ("full", "half")
    found = [Cut("unsplit", shape) for shape in shapes]
    if p.K == p.V == 128:
        held = own_tail_blocks(base_tiles(p, FULL, split="tails"))
        for steps in dict.fromkeys(-(-longest // parts) for parts in PARTS if parts <= longest):
            # A bounded gate that forgets at all does so in 32 tokens; one of softplus form in 48.
            tail = min(TAIL, max(2 if p.bounded else 3, 2 * (steps // 4)))
            if 2 * steps + tail <= held:
                found += [Cut("tails", shape, steps, tail) for shape in shapes]
            tail = min(tail, 2 * steps)
            found += [Cut("whole", shape, steps, tail) for shape in shapes]
            if 3 * (p.N + p.B * p.T // (STEP * steps)) * p.HV * p.K * p.V * 4 <= WORKSPACE:
                found.append(Cut("summaries", "full", steps, tail))
    if base_tiles(p, HALF).cluster:
        for cut in [cut for cut in found if cut.shape == "half"]:
            count = max(sum(copies for n, copies in batch if n > cut.steps) for batch in guesses)  # of sequences that may run unsplit
            lanes = min(LANES, MULTIPROCESSORS // max(1, 2 * p.HV * round(count)))
            found += [replace(cut, lanes=lanes)] * (lanes > 1)
    times = {cut: [expected(cut, batch, p.HV, costs) for batch in guesses] for cut in found}
    alone = lambda cut: WORTH if cut.how == "unsplit" and cut.lanes == 1 else 1.0
    worth = {cut: prod(time * alone(cut) for pair in times[cut] for time in pair) for cut in found}
    best = min(found, key=worth.__getitem__)
    return config_of(p, best, times[best][0])


def config_of(problem: Problem, cut: Cut, times: tuple[float, float]) -> Config:
    """The launches of a cut, for which `times` are expected."""
    p = problem
    unsplit = FULL if cut.shape == "full" else HALF
    blocks = "one block a head" if unsplit is FULL else "64 rows of V a block"
    blocks += f", {cut.lanes} lanes a head" * (cut.lanes > 1)
    costs = COSTS[base_tiles(p, FULL).form]
    lanes = lane_parts(cut.lanes, costs.whole_quiet if cut.how == "whole" else costs.quiet)
    fast, slow = times
    if cut.how == "unsplit":
        # More items than blocks: in turn, where that is faster. Unbounded gates lose 2 to 5 % by it (docs/hopper_prefill.md).
        count = p.N * p.HV * (p.V // unsplit["R"])
        turns = count > MULTIPROCESSORS and base_tiles(p, unsplit).form == "product"
        # Where there may be lanes, kernels have them whatever the lengths: these compile nothing.
        single = 2 * count > MULTIPROCESSORS or not base_tiles(p, unsplit).cluster
        split = "turns" if turns else "none" if single else "lanes"
        return Config(base_tiles(p, unsplit, split=split), reason=f"unsplit, {blocks}: about {slow:.0f} us", lanes=lanes)
    whole = base_tiles(p, unsplit, split="rest" if cut.how == "tails" else "whole", pdl=True)
    state = base_tiles(p, PAIRS, outputs=False, split="state", pdl=True)
    split, where, otherwise = {
        "tails": ("tails", "each from its own tail", f"unsplit, {blocks}"),
        "whole": ("segments_all", "entry states from a pass over tails", f"unsplit, {blocks}"),
        "summaries": ("segments", "entry states from a pass over tails", "from summaries"),
    }[cut.how]
    reason = f"segments of {cut.steps} steps, {where}, about {fast:.0f} us where those suffice; else {otherwise}, {slow:.0f} us"
    # Two groups of an unbounded gate prepared side by side take half as long again: what a short segment, which is mostly start, waits for.
    short = base_tiles(p, FULL).form == "halves" and cut.how == "summaries" and 2 * cut.steps <= own_tail_blocks(base_tiles(p, FULL))
    full = ALONE if short else FULL
    first = own_tail_tiles(p, 2 * cut.steps + cut.tail) if split == "tails" else base_tiles(p, full, split=split, pdl=True)
    state, whole = None if cut.how == "tails" else state, None if cut.how == "summaries" else whole
    return Config(first, cut.steps, cut.tail, state, whole, reason, lanes)
