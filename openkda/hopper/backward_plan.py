"""The chunk tables of a ragged batch (openkda/plan.py) in one launch, so that the gradients of one make no calls of torch's for them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.hopper.backward_prepare import C
from openkda.hopper.launch import dense
from openkda.hopper.runtime import launch
from openkda.hopper.segments import bound_at, larger
from openkda.plan import Plan
from openkda.problem import Problem

BLOCK = 64


@triton.jit(do_not_specialize=["N", "T", "NC"])
def plan_kernel(
    cu_ptr,  # [N + 1] int32 or int64
    chunks_ptr, sequences_ptr,  # [NC, 4], [N, 4] int32
    N, T, NC, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(NC / BLOCK),), NC at least N: a program holds its rows of `chunks` against all sequences, BLOCK at a time, and writes its
    rows of `sequences`. A fall of cu_seqlens counts as an empty sequence."""
    block = tl.program_id(0) * BLOCK
    r = block + tl.arange(0, BLOCK)
    number = tl.zeros([BLOCK], tl.int32)  # the sequence of chunk r
    begin = number
    end = number
    index = number
    reached = 0  # the largest bound so far
    before = 0  # chunks so far
    for b in range(0, N, BLOCK):
        n = b + tl.arange(0, BLOCK)
        lo = tl.maximum(tl.associative_scan(bound_at(cu_ptr, n, N, T), 0, larger), reached)
        hi = tl.maximum(bound_at(cu_ptr, n + 1, N, T), lo)
        reached = tl.max(hi, 0)
        count = tl.where(n < N, (hi - lo + C - 1) // C, 0)
        chunk = before + tl.cumsum(count, 0) - count
        before += tl.sum(count, 0)
        if b == block:
            row = sequences_ptr + 4 * n
            tl.store(row, lo, mask=n < N)
            tl.store(row + 1, hi, mask=n < N)
            tl.store(row + 2, chunk, mask=n < N)
            tl.store(row + 3, count, mask=n < N)
        inside = (r[:, None] >= chunk[None, :]) & (r[:, None] < (chunk + count)[None, :])
        number += tl.sum(tl.where(inside, n[None, :], 0), 1)
        begin += tl.sum(tl.where(inside, lo[None, :], 0), 1)
        end += tl.sum(tl.where(inside, hi[None, :], 0), 1)
        index += tl.sum(tl.where(inside, r[:, None] - chunk[None, :], 0), 1)
    begin += index * C
    row = chunks_ptr + 4 * r
    tl.store(row, number, mask=r < NC)
    tl.store(row + 1, begin, mask=r < NC)
    tl.store(row + 2, tl.minimum(begin + C, end), mask=r < NC)
    tl.store(row + 3, index, mask=r < NC)


def ragged_plan(problem: Problem, cu_seqlens: torch.Tensor) -> Plan:
    """The tables of a ragged batch with sequences from cu_seqlens [N + 1]"""
    N, T = problem.N, problem.T
    NC = T // C + N
    chunks, sequences = (torch.empty(rows, 4, dtype=torch.int32, device=cu_seqlens.device) for rows in (NC, N))
    if NC:
        launch(plan_kernel, (-(-NC // BLOCK), 1, 1), (dense(cu_seqlens), chunks, sequences), (N, T, NC), (C, BLOCK))
    return Plan(chunks, sequences, C)
