"""Stage 3: the inverse of a chunk's unit lower-triangular matrix.

    Linv = (I + L)^-1        L strictly lower [C, C] fp32

In place on the chunk's [C, C] rows in memory (they stay in cache): the 16-blocks on the diagonal by forward substitution, all of them at
once, one column of the inverse per lane,

    x_r = e_r - sum_{i < r} L[r, i] x_i

then blocks merged in pairs, s = 16, 32, from

    [ A 0 ]^-1   [  A^-1             0   ]
    [ B D ]    = [ -D^-1 B A^-1   D^-1   ]

with matrix products at precision P ("ieee", or "tf32x3" on NVIDIA matrix units). fp32 throughout. Memory, not registers, carries L between
the steps because a lane needs single entries of L: from memory that is one load for four entries, from registers a reduction per row.
Substitution takes 36 loads and 120 multiply-adds per lane; merging [C, C] tiles from 1 x 1 upwards took 3000 instructions per warp.

Grid (chunk, head), one warp: its memory operations are ordered among themselves on every target, and no barrier costs anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.plan import Plan
from openkda.portable.config import Config
from openkda.portable.tile import chunk_bounds, load_tile, store_tile


@triton.jit
def substitute_row(x, L_ptr, at, live, r: tl.constexpr, rows, C: tl.constexpr):
    """x [C] minus L[r, i] times the finished rows i < r; `at` [C] are the offsets of row r of each lane's block."""
    for j in tl.static_range(0, r, 4):
        four = tl.load(L_ptr + at[:, None] + j + tl.arange(0, 4)[None, :], mask=live[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(four, [C, 2, 2]))
        l0, l2 = tl.split(even)
        l1, l3 = tl.split(odd)
        x -= l0 * rows[j]
        if j + 1 < r:
            x -= l1 * rows[j + 1]
        if j + 2 < r:
            x -= l2 * rows[j + 2]
        if j + 3 < r:
            x -= l3 * rows[j + 3]
    return x


@triton.jit
def substitute_blocks(L_ptr, row, length, C: tl.constexpr):
    """Replace the diagonal 16-blocks of L by the inverses of I + block. L_ptr: the chunk's first row, row stride `row`."""
    c = tl.arange(0, C)
    base = c // 16 * 16
    x = ()
    for r in tl.static_range(16):
        unit = tl.where(c == base + r, 1.0, 0.0)
        x = x + (substitute_row(unit, L_ptr, (base + r) * row + base, base + r < length, r, x, C),)  # noqa: RUF005  Triton knows no *x
    tl.debug_barrier()  # every warp has read L
    for r in tl.static_range(16):
        tl.store(L_ptr + (base + r) * row + c, x[r], mask=base + r < length)


@triton.jit
def merge_blocks(L_ptr, row, length, C: tl.constexpr, S: tl.constexpr, P: tl.constexpr):
    """Inverses of the diagonal 2S-blocks from those of the S-blocks."""
    i = tl.arange(0, S)
    for b in tl.static_range(0, C, 2 * S):
        live = b + S + i < length
        D = load_tile(L_ptr + (b + S) * row + b + S, i, row, i, live, S, S)
        B = load_tile(L_ptr + (b + S) * row + b, i, row, i, live, S, S)
        A = load_tile(L_ptr + b * row + b, i, row, i, b + i < length, S, S)
        X = tl.dot(tl.dot(D, B, input_precision=P), A, input_precision=P)
        tl.debug_barrier()  # every warp has read B
        store_tile(L_ptr + (b + S) * row + b, -X, i, row, i, live, S, S)


@triton.jit
def invert_unit_lower(L_ptr, row, length, C: tl.constexpr, P: tl.constexpr):
    """Replace strictly lower L [C, C] fp32, its live rows in memory, by (I + L)^-1; C = 32 or 64."""
    substitute_blocks(L_ptr, row, length, C)
    tl.debug_barrier()
    merge_blocks(L_ptr, row, length, C, 16, P)
    if C == 64:
        tl.debug_barrier()
        merge_blocks(L_ptr, row, length, C, 32, P)


@triton.jit
def solve_kernel(
    L_ptr,  # [R, HV, C] fp32, strictly lower per chunk; replaced by the inverse
    chunks_ptr,  # [NC, 4] int32
    HV: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
):
    h = tl.program_id(1)
    first, length = chunk_bounds(chunks_ptr, tl.program_id(0))
    if length <= 0:
        return
    invert_unit_lower(L_ptr + (first * HV + h) * C, HV * C, length, C, P)


def invert_in_place(config: Config, plan: Plan, L: torch.Tensor) -> None:
    """Replace L [B, T, HV, C] fp32 by (I + L)^-1, chunk by chunk."""
    B, T, HV, C = L.shape
    if B * T and plan.num_chunks:
        solve_kernel[(plan.num_chunks, HV)](L, plan.chunks, HV=HV, C=C, P=config.precision, num_warps=1)


def solve(config: Config, plan: Plan, L: torch.Tensor) -> torch.Tensor:
    """(I + L)^-1 of every chunk. Args: L [B, T, HV, C] fp32 from intra_diagonal and intra_offdiagonal. Returns: Linv, same shape, fp32."""
    Linv = L.clone()
    invert_in_place(config, plan, Linv)
    return Linv
