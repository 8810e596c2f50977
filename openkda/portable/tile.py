"""Bounds and masked tiles: the one place of the portable kernels that knows where a chunk begins and which of its rows are alive.

A tile is C consecutive token rows of one head times some columns. The tables of openkda/plan.py give its first row and the end of its
sequence; rows at or past the end are never read or written, whatever lies there, and read as zero. The first row is int64, so that
row * stride cannot wrap; offsets inside a tile fit int32 (`as_rows` copies a tensor whose row stride is too large for that).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MAX_ROW_STRIDE = 2**24  # elements; 64 rows of it stay below 2^31


@triton.jit
def place(BLOCKS: tl.constexpr, HV: tl.constexpr):
    """(block, head, sequence) of a program, the latter two int64, on a flat grid, the block fastest: a grid's other axes end at 65535."""
    pid = tl.program_id(0)
    return pid % BLOCKS, (pid // BLOCKS % HV).to(tl.int64), (pid // (BLOCKS * HV)).to(tl.int64)


@triton.jit
def chunk_bounds(chunks_ptr, i):
    """First row (int64), number of live rows of chunk i; a padding entry of the table has none."""
    first = tl.load(chunks_ptr + i * 4 + 1)
    end = tl.load(chunks_ptr + i * 4 + 2)
    return first.to(tl.int64), end - first


@triton.jit
def sequence_bounds(sequences_ptr, n):
    """First row (int64), number of rows, first chunk (int64), number of chunks of sequence n."""
    first = tl.load(sequences_ptr + n * 4)
    end = tl.load(sequences_ptr + n * 4 + 1)
    first_chunk = tl.load(sequences_ptr + n * 4 + 2)
    count = tl.load(sequences_ptr + n * 4 + 3)
    return first.to(tl.int64), end - first, first_chunk.to(tl.int64), count


@triton.jit
def tile_mask(live, cols, N: tl.constexpr, BN: tl.constexpr):
    """[C, BN] mask from the live rows [C]; the column test is left out where N is a multiple of the tile width BN."""
    if N % BN == 0:
        return live[:, None]
    else:
        return live[:, None] & (cols < N)[None, :]


@triton.jit
def load_tile(ptr, rows, row_stride, cols, live, N: tl.constexpr, BN: tl.constexpr):
    """[C, BN] tile at ptr + rows * row_stride + cols; zero where the row is dead or the column is past N."""
    return tl.load(ptr + rows[:, None] * row_stride + cols[None, :], mask=tile_mask(live, cols, N, BN), other=0.0)


@triton.jit
def store_tile(ptr, x, rows, row_stride, cols, live, N: tl.constexpr, BN: tl.constexpr):
    """Write the live part of the [C, BN] tile x, cast to the pointer's element type."""
    mask = tile_mask(live, cols, N, BN)
    tl.store(ptr + rows[:, None] * row_stride + cols[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(ptr, cols, N: tl.constexpr, BN: tl.constexpr):
    """[BN] values of one row as fp32; zero past N."""
    if N % BN == 0:
        return tl.load(ptr + cols).to(tl.float32)
    else:
        return tl.load(ptr + cols, mask=cols < N, other=0.0).to(tl.float32)


@triton.jit
def load_beta(ptr, rows, row_stride, live, SIGMOID: tl.constexpr, NEG: tl.constexpr):
    """[C] write strengths in fp32, after the optional sigmoid (doubled where negative eigenvalues are allowed); 0 on dead rows."""
    b = tl.load(ptr + rows * row_stride, mask=live, other=0.0).to(tl.float32)
    if SIGMOID:
        b = sigmoid(b)
        if NEG:
            b = 2.0 * b
    return tl.where(live, b, 0.0)


@triton.jit
def nonzero_beta(b):
    """b, or 2^-30 where it is smaller: the gradient of beta is found by dividing by it, and 2^-30 changes nothing else above 1e-9."""
    return tl.where(tl.abs(b) < 2.0**-30, 2.0**-30, b)


@triton.jit
def sigmoid(x):
    """1 / (1 + 2^(-x log2 e)) in fp32: a relative error of a few ulp even where the result is tiny, which tanh.approx has not."""
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, ...] as [B * T, ...] rows whose last dimension is contiguous; copied only where strides do not allow a view.

    The two leading dimensions must form one arithmetic sequence of rows, and a row stride must keep tile offsets within int32."""
    B, T = x.shape[:2]
    flat = x.shape[2:]
    one_axis = B == 1 or T == 0 or x.stride(0) == T * x.stride(1)
    if not (one_axis and (x.stride(-1) == 1 or x.shape[-1] == 1) and 0 < x.stride(1) < MAX_ROW_STRIDE):
        x = x.contiguous()
    return x.as_strided((B * T, *flat), x.stride()[1:], x.storage_offset())


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """x.contiguous(), or None for an absent argument."""
    return None if x is None else x.contiguous()
