"""From a `Problem` to the launch of the Hopper forward: pure functions and frozen dataclasses, no device needed.

`Tiles` is what a kernel is compiled for; `Config` is what one call launches. The thresholds come from docs/hopper_prefill.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    slots: int  # steps held in shared memory
    preps: int  # preparation partitions of 4 warps
    prep_regs: int
    scan_warps: int
    outputs: bool  # True: the forward; False: state only (segment summaries)
    kg: bool  # True: a separate k * exp(G_C - G) tile for the state; False: the decay follows the product (bounded gates)
    gate: str  # "none", "softplus", "bounded"
    level: str  # "never": the product form; "guard": rows out of its range take the level form; "always": the level form (fp16)
    l2norm: bool
    beta: str  # "given", "sigmoid", "twice" (2 * sigmoid)
    state_v_first: bool
    split: str  # "none", "segments", "segments_all", "whole": which work a block takes from the segment table (segments.py)
    pdl: bool


@dataclass(frozen=True)
class Config:
    """The launches of one call."""

    forward: Tiles
    steps: int = 0  # at most so many steps a segment; 0: sequences are not split
    warm_limit: int = 0  # steps of warm-up tried before a segment is taken to need its entry state
    summary: Tiles | None = None  # segments without a warm-up: their entry states from summaries
    whole: Tiles | None = None  # or: their sequences run unsplit
    reason: str = ""


# What a block looks like: rows of V, preparation partitions and their registers, warps of the scan, ring slots.
FULL = dict(R=128, preps=2, prep_regs=120, scan_warps=4, slots=5)  # most work per block: enough heads to fill the chip
WIDE = dict(R=128, preps=2, prep_regs=112, scan_warps=8, slots=5)  # shorter steps: few blocks
HALF = dict(R=64, preps=3, prep_regs=120, scan_warps=4, slots=6)  # two blocks share a head
PAIRS = dict(R=128, preps=1, prep_regs=88, scan_warps=8, slots=5)  # summaries: two chains of 128 rows


def base_tiles(problem: Problem, shape: dict, **changes: object) -> Tiles:
    """Tiles of a problem for one block shape; `changes` win."""
    p = problem
    gate = p.gate
    exact = p.dtype == torch.float16
    fields = dict(
        K=p.K, V=p.V, outputs=True, gate=gate, l2norm=p.qk_l2norm, state_v_first=p.state_v_first, split="none", pdl=False,
        beta="given" if not p.beta_sigmoid else "twice" if p.neg_eigval else "sigmoid",
        level="always" if exact else "never" if p.bounded else "guard", kg=exact or not p.bounded,
    )  # fmt: skip
    tiles = Tiles(**{**fields, **shape, **changes})
    per_slot = slot_bytes(tiles, p.gate_dtype.itemsize)
    return replace(tiles, slots=min(tiles.slots, (SHARED_BYTES - 2 * BLOCK * tiles.R * 2 - RESERVED_BYTES) // per_slot))


SHARED_BYTES = 227 * 1024  # shared memory of a block
RESERVED_BYTES = 4096  # exchanges between warps, barriers, alignment


def slot_bytes(tiles: Tiles, gate_bytes: int) -> int:
    """Shared memory of one ring slot (tiles.py, Ring)"""
    t = tiles
    return 4 * BLOCK * t.K * 2 + STEP * t.K * gate_bytes + STEP * t.R * 2 + 4 * BLOCK * BLOCK * 2 + 2 * t.K * 4 + 4 * BLOCK * 4


def choose(problem: Problem) -> Config:
    """The launches of a problem. Lengths of a ragged batch are not known here; its mean stands for them."""
    p = problem
    if p.K != 128 or p.V != 128:
        shape = HALF if p.V == 64 or p.N * p.HV <= 66 else FULL
        return Config(base_tiles(p, shape), reason="K and V other than 128 run one block per sequence, head and 64 or 128 rows of V")
    heads = p.N * p.HV
    steps = -(-p.B * p.T // (STEP * max(p.N, 1)))  # of a sequence, on average
    droppable = p.qk_l2norm and p.beta_sigmoid  # the warm-up's bound needs |k| <= 1 and beta in [0, 2]
    warm = 16 if droppable else 0
    if heads <= SPLIT_HEADS:
        parts = min(MULTIPROCESSORS // heads, steps // MIN_STEPS)
        if parts > 1:
            summary = base_tiles(p, PAIRS, outputs=False, split="summary")
            forward = base_tiles(p, WIDE, split="segments")
            return Config(
                forward, -(-steps // parts), warm, summary, reason=f"{heads} heads and sequences: {parts} segments, exact by summaries"
            )
    if heads <= 66:
        return Config(base_tiles(p, HALF), reason=f"{heads} heads and sequences: two blocks of 64 rows of V share a head")
    return Config(base_tiles(p, FULL), reason=f"{heads} heads and sequences fill the chip: one block each")


MULTIPROCESSORS = 132
SPLIT_HEADS = 32  # heads times sequences up to which summaries beat a split of V
MIN_STEPS = 4  # steps of a segment that pay for its launch
