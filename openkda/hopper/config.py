"""From a `Problem` to the launch of the Hopper forward: pure functions and frozen dataclasses, no device needed.

`Tiles` is what a kernel is compiled for; `Config` is what one call launches. The thresholds come from docs/hopper_prefill.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

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
    groups: int  # groups of four blocks held in shared memory
    preps: int  # preparation partitions of 4 warps
    prep_regs: int
    scan_warps: int
    outputs: bool  # True: the forward; False: state only (segment summaries)
    kg: bool  # True: a separate k * exp(G_C - G) tile for the state; False: the decay follows the product (bounded gates)
    gate: str  # "none", "softplus", "bounded"
    form: str  # of the scores: "product" (bounded gates), "halves" (any gate, halves.py), "levels" (fp16, which has no range; levels.py)
    l2norm: bool
    beta: str  # "given", "sigmoid", "twice" (2 * sigmoid)
    state_v_first: bool
    split: str  # which work a block takes from the segment table: "none", "segments", "tails", ... (locate in segments.py)
    pdl: bool


@dataclass(frozen=True)
class Config:
    """The launches of one call."""

    forward: Tiles
    steps: int = 0  # at most so many steps a segment; 0: sequences are not split
    tail: int = 0  # steps before a segment from which its entry state is tried
    state: Tiles | None = None  # of the state-only passes
    whole: Tiles | None = None  # where a tail does not suffice: the sequence runs unsplit with these tiles; None: summaries of its segments
    reason: str = ""


# What a block looks like: rows of V, preparation partitions and their registers, warps of the scan, groups in the ring.
FULL = dict(R=128, preps=2, prep_regs=120, scan_warps=4, groups=3)  # most work per block: enough heads to fill the chip
HALF = dict(R=64, preps=2, prep_regs=160, scan_warps=4, groups=3)  # two blocks share a head
PAIRS = dict(R=128, preps=1, prep_regs=72, scan_warps=8, groups=3)  # summaries: two chains of 128 rows


def base_tiles(problem: Problem, shape: dict, **changes: object) -> Tiles:
    """Tiles of a problem for one block shape; `changes` win."""
    p = problem
    gate = p.gate
    form = "levels" if p.dtype == torch.float16 else "product" if p.bounded else "halves"
    fields = dict(
        K=p.K, V=p.V, outputs=True, gate=gate, l2norm=p.qk_l2norm, state_v_first=p.state_v_first, split="none", pdl=False,
        beta="given" if not p.beta_sigmoid else "twice" if p.neg_eigval else "sigmoid",
        form=form, kg=form != "product",
    )  # fmt: skip
    if form == "halves" and changes.get("split") != "tails":  # all that the scan can spare, nothing where it has a tail to run first
        # The state pass spills least between both roles' needs.
        shape = {**shape, "prep_regs": shape["prep_regs"] + 8 if changes.get("outputs", True) else 120}
    tiles = Tiles(**{**fields, **shape, **changes})
    per_group = group_bytes(tiles, p.gate_dtype.itemsize)
    return replace(tiles, groups=min(tiles.groups, (SHARED_BYTES - 2 * BLOCK * tiles.R * 2 - RESERVED_BYTES) // per_group))


SHARED_BYTES = 227 * 1024  # shared memory of a block
RESERVED_BYTES = 4096  # exchanges between warps, barriers, alignment


def group_bytes(tiles: Tiles, gate_bytes: int) -> int:
    """Shared memory of a group of four blocks (tiles.py, Ring)"""
    t = tiles
    return 4 * (2 * BLOCK * t.K * 2 + BLOCK * t.K * gate_bytes + BLOCK * t.R * 2 + 2 * BLOCK * BLOCK * 2 + t.K * 4 + 2 * BLOCK * 4)


MULTIPROCESSORS = 132
SUMMARY_HEADS = 32  # rows of work up to which summaries beat running a sequence unsplit, where tails do not suffice
SHORT = 32  # steps up to which a sequence is better run unsplit than summarised
OWN_TAIL_STEPS = 4  # short sequences are cut where segments become so short; each begins with its own tail
LONG = 128  # steps from which sequences are cut although what tails do not serve runs unsplit: the pass over the tails costs 16 us
TAIL = 2  # most steps of a tail: 64 tokens
WORKSPACE = 512 * 2**20  # bytes that entry states and summaries may take


def segments_per_sequence(rows: int, steps: int) -> int:
    """Into how many segments sequences of `steps` steps are cut, `rows` of them times heads being in flight."""
    parts = max(1, MULTIPROCESSORS // rows)
    if rows > SUMMARY_HEADS:
        return parts if steps >= LONG else 1
    if steps > SHORT:
        # A link of the chain of summaries takes a third of what a step takes in the passes before and after it.
        return min(parts, round((3 * steps) ** 0.5))
    parts = min(parts, steps)
    return parts if steps > SHORT // 2 and -(-steps // parts) <= OWN_TAIL_STEPS else 1


@lru_cache(maxsize=1024)
def choose(problem: Problem, longest: int | None = None) -> Config:
    """The launches of a problem whose longest sequence has `longest` tokens (None: all have the same).

    Where sequences times heads do not fill the chip, sequences are cut. Which of the prepared ways a head takes, the device decides: its
    segments at once where tails give their entry states, else from summaries, or unsplit."""
    p = problem
    total = -(-p.B * p.T // STEP)
    steps = max(1, -(-(p.T if longest is None and not p.varlen else longest or -(-p.T // max(p.N, 1))) // STEP))
    rows = max(1, -(-total // steps)) * p.HV
    parts = segments_per_sequence(rows, steps) if p.K == p.V == 128 else 1
    length = -(-steps // parts)
    summaries = rows <= SUMMARY_HEADS and steps > SHORT
    bound = (p.N + total // length) * p.HV * p.K * p.V * 4 * (3 if summaries else 1)
    unsplit = HALF if p.V == 64 or rows <= MULTIPROCESSORS // 2 else FULL
    if parts == 1 or bound > WORKSPACE:
        blocks = "64 rows of V a block" if unsplit is HALF else "one block a head"
        return Config(base_tiles(p, unsplit), reason=f"{rows} heads times sequences, {steps} steps: unsplit, {blocks}")
    tail = max(1, min(TAIL, length // 4))
    whole = base_tiles(p, unsplit, split="whole", pdl=True)
    if steps <= SHORT:
        reason = f"{rows} heads times sequences, {steps} steps: {parts} segments, each from its own tail where that suffices, else unsplit"
        return Config(base_tiles(p, FULL, split="tails", pdl=True), length, tail, None, whole, reason)
    state = base_tiles(p, PAIRS, outputs=False, split="state", pdl=True)
    if summaries:
        reason = f"{rows} heads times sequences, {steps} steps: {parts} segments, entry states from tails or summaries"
        return Config(base_tiles(p, FULL, split="segments", pdl=True), length, tail, state, None, reason)
    reason = f"{rows} heads times sequences, {steps} steps: {parts} segments where tails give the entry states, else unsplit"
    return Config(base_tiles(p, FULL, split="segments_all", pdl=True), length, tail, state, whole, reason)
