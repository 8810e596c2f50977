"""Stage 3: the inverse of a chunk's unit lower-triangular matrix.

    Linv = (I + L)^-1        L strictly lower [C, C] fp32

Blocked inverse by merging from the bottom: T holds the exact inverses of the diagonal s-blocks of I + L, and

    [ A 0 ]^-1   [  A^-1             0   ]
    [ B D ]    = [ -D^-1 B A^-1   D^-1   ]

makes those of the 2s-blocks, s = 1, 2, 4, ... C/2. On whole tiles: T <- T - T (L under the mask of B) T. Every iterate is the true
inverse of a diagonal part, so nothing grows that the result does not hold (a power series would). fp32 throughout; the products run at
precision P ("ieee", or "tf32x3" on NVIDIA matrix units).

Grid (chunk, head); one [C, C] tile per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.plan import Plan
from openkda.portable.config import Config
from openkda.portable.tile import chunk_bounds, load_tile, store_tile


@triton.jit
def merge_level(T, L, r, i, S: tl.constexpr, P: tl.constexpr):
    """Inverses of the 2S-blocks from those of the S-blocks."""
    below = tl.where((r // (2 * S) == i // (2 * S)) & (r // S != i // S), L, 0.0)
    return T - tl.dot(tl.dot(T, below, input_precision=P), T, input_precision=P)


@triton.jit
def invert_unit_lower(L, C: tl.constexpr, P: tl.constexpr):
    """(I + L)^-1 for strictly lower L [C, C] fp32, C = 32 or 64."""
    r = tl.arange(0, C)[:, None]
    i = tl.arange(0, C)[None, :]
    T = tl.where(r == i, 1.0, 0.0) - tl.where(r // 2 == i // 2, L, 0.0)
    T = merge_level(T, L, r, i, 2, P)
    T = merge_level(T, L, r, i, 4, P)
    T = merge_level(T, L, r, i, 8, P)
    T = merge_level(T, L, r, i, 16, P)
    if C == 64:
        T = merge_level(T, L, r, i, 32, P)
    return T


@triton.jit
def solve_kernel(
    L_ptr,  # [R, HV, C] fp32, strictly lower per chunk
    Linv_ptr,  # [R, HV, C] fp32
    chunks_ptr,  # [NC, 4] int32
    HV: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
):
    h = tl.program_id(1)
    first, length = chunk_bounds(chunks_ptr, tl.program_id(0))
    if length <= 0:
        return
    rows = tl.arange(0, C)
    live = rows < length
    offset = (first * HV + h) * C
    L = load_tile(L_ptr + offset, rows, HV * C, rows, live, C, C)
    T = invert_unit_lower(L, C, P)
    store_tile(Linv_ptr + offset, T, rows, HV * C, rows, live, C, C)


def solve(config: Config, plan: Plan, L: torch.Tensor) -> torch.Tensor:
    """(I + L)^-1 of every chunk. Args: L [B, T, HV, C] fp32 from intra_diagonal and intra_offdiagonal. Returns: Linv, same shape, fp32."""
    B, T, HV, C = L.shape
    Linv = torch.empty_like(L)
    if B * T and plan.num_chunks:
        solve_kernel[(plan.num_chunks, HV)](L, Linv, plan.chunks, HV=HV, C=C, P=config.precision, num_warps=config.intra_warps)
    return Linv
