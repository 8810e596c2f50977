"""The chunk tables of a ragged batch (plan.py), made on a GPU in one launch, and the bounds of its sequences for whoever makes others.

By torch's operators they are some thirty calls, as much work for the host as all kernels of a small call. Plain Triton, any GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 64


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def bound_at(cu_ptr, i, N, T):
    """cu_seqlens[i] within [0, T]"""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + i, mask=i <= N, other=0), 0), T).to(tl.int32)


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


def ragged_tables(cu_seqlens: torch.Tensor, T: int, C: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`chunks` [T // C + N, 4] and `sequences` [N, 4] int32 of the sequences of cu_seqlens [N + 1] within T tokens"""
    N = cu_seqlens.shape[0] - 1
    NC = T // C + N
    chunks, sequences = (torch.empty(rows, 4, dtype=torch.int32, device=cu_seqlens.device) for rows in (NC, N))
    if NC:
        plan_kernel[(triton.cdiv(NC, BLOCK),)](cu_seqlens.contiguous(), chunks, sequences, N, T, NC, C, BLOCK)
    return chunks, sequences
