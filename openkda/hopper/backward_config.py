"""From a `Problem` to the launches of the Hopper backward's scans: pure functions and a frozen dataclass, no device needed.

The constants are microseconds on an H200 at K = V = 128 (docs/backward.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from openkda.hopper.config import MULTIPROCESSORS, PARTS, WORKSPACE, Batch, batches, makespan
from openkda.problem import Problem

ROWS = 64  # rows of V, or of M, per block
TAIL = 4  # most chunks of a tail
CHUNK = 1.05  # a chunk of a scan in a block that has its multiprocessor to itself
SUMMARY = 0.9  # a chunk of a summary, two blocks a multiprocessor
START = 5.0  # of a launch with its first chunks
LINK = 1.65  # a link of the chain of summaries
RATE = 3.8e6  # bytes per microsecond that the scans move at most
WORTH = 40.0  # what a cut must promise: it adds three launches, and small calls wait for the host already
BESIDE = 96  # most blocks of a walk that leave enough of the chip to the kernel beside it
FEWEST = 64  # blocks of a walk below which the fused forward gains more by parallelism than the gradients by what is kept
MOST = 72  # blocks of a walk up to which gradients that recompute are faster by walks


@dataclass(frozen=True)
class Scans:
    """How the scans over chunks run."""

    steps: int = 0  # at most so many chunks a segment; 0: sequences are not cut
    tail: int = 0  # chunks from which the state at a segment's end is tried
    walks: bool = False  # each way by a kernel of its own (backward_walk.py)
    beside: bool = False  # beside the kernel that makes their tiles, or takes their states
    reason: str = ""


def expected(steps: int, batch: Batch, problem: Problem) -> tuple[float, float]:
    """Microseconds of the scans with segments of at most `steps` chunks (0: none), where tails give all states and where they give none."""
    p = problem
    blocks = 2 * p.V // ROWS * p.HV  # of a scan of one sequence, both ways
    cells = p.HV * sum(n * copies for n, copies in batch)
    moved = cells * (4 * p.K * p.V + 32 * (8 * p.V + 12 * p.K))  # h, dh; v, do, r, dv and w, kg, qg, the first two in both directions
    waves = lambda count: -(-count // MULTIPROCESSORS)

    def scan(pieces: Batch) -> float:
        chains = makespan([(START + CHUNK * n, copies * blocks) for n, copies in pieces])
        return max(moved / RATE + START * waves(sum(copies for _, copies in pieces) * blocks), chains)

    if not steps:
        return scan(batch), scan(batch)
    parts = [max(1, -(-n // steps)) for n, _ in batch]
    pieces = [(-(-n // k), copies * k) for (n, copies), k in zip(batch, parts)]
    maps = p.K // ROWS * p.HV
    inner = [(n, copies / k * ((k - 1) * blocks + (k - 2) * maps)) for (n, copies), k in zip(pieces, parts) if k > 1]
    summaries = makespan([(START + SUMMARY * n, count / 2) for n, count in inner])
    chains = sum(copies for (_, copies), k in zip(batch, parts) if k > 1) * 2 * p.V // 16 * p.HV
    chain = (0.5 * START + LINK * max(0, max(parts) - 2)) * waves(chains)
    known = 2 * START + SUMMARY * TAIL + scan(sorted(pieces, reverse=True))
    return known, known + summaries + chain


@lru_cache(maxsize=1024)
def choose_scans(problem: Problem, lengths: tuple[int, ...] | None = None) -> Scans:
    """How the scans of a problem run whose sequences have `lengths` tokens (None: the host does not know them, or they are all the same).

    Where sequences times heads do not fill the chip, sequences are cut. Whether a tail gives the state at a segment's end, the device
    decides; taken is the cut of least expected time, the geometric mean of where tails suffice and where they do not."""
    p = problem
    guesses = batches(p, lengths)
    longest = max(batch[0][0] for batch in guesses)
    cuts = dict.fromkeys(-(-longest // parts) for parts in PARTS if 4 * parts <= longest)
    fits = [steps for steps in cuts if (p.N + p.B * p.T // (32 * steps)) * p.HV * (8 * p.V * p.K + 8 * p.K * p.K) <= WORKSPACE]
    times = {steps: [expected(steps, batch, p) for batch in guesses] for steps in (0, *fits)}
    mean = lambda steps: prod(time for pair in times[steps] for time in pair) ** (0.5 / len(guesses)) + (WORTH if steps else 0.0)
    steps = min(times, key=mean)
    fast, slow = times[steps][0]
    if not steps:
        blocks = walk_blocks(p)
        if not p.varlen and p.dtype == torch.bfloat16 and p.bounded and p.T and FEWEST <= blocks <= MOST:
            return walks(p)
        return Scans(reason=f"sequences are not cut: about {slow:.0f} us")
    tail = max(1, min(TAIL, steps // 4))
    reason = f"segments of {steps} chunks: about {fast:.0f} us where {tail} chunks forget all before them, else {slow:.0f} us"
    return Scans(steps, tail, reason=reason)


@lru_cache(maxsize=1024)
def keeping(problem: Problem) -> Scans | None:
    """How the scans of a call run whose forward keeps what its gradients would else compute anew: as walks over whole sequences. None where
    it does not: ragged batches, fp16, few heads, and sequences that are cut for the scans."""
    p = problem
    if p.varlen or p.dtype != torch.bfloat16 or p.T == 0 or walk_blocks(p) < FEWEST or choose_scans(p).steps:
        return None
    return walks(p)


def walk_blocks(problem: Problem) -> int:
    """Blocks of a walk of 64 rows each"""
    return problem.N * problem.HV * problem.V // ROWS


def walks(problem: Problem) -> Scans:
    """Scans as walks over whole sequences of a fixed batch"""
    blocks = walk_blocks(problem)
    beside = problem.bounded and blocks <= BESIDE
    where = "beside the kernels that make their tiles and take their states" if beside else "by themselves"
    return Scans(walks=True, beside=beside, reason=f"walks of {blocks} blocks each way, {where}")


def fitted(scans: Scans, problem: Problem, multiprocessors: int) -> Scans:
    """`scans` for a device of so many multiprocessors. Nothing runs beside walks that leave it fewer than the most that are allowed leave
    the whole chip (an H20, a part of a chip): their blocks would wait, 10 ms each, for a launch that finds no place."""
    if scans.beside and multiprocessors - walk_blocks(problem) < MULTIPROCESSORS - BESIDE:
        return replace(scans, beside=False, reason=scans.reason + ", in turn on this device")
    return scans
