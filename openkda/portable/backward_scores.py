"""Gradients of a chunk's scores, of v and of beta, parallel over chunks (docs/backward.md, (2) and (5)).

    dD = dv = T^T dr              T = Linv Diag(beta)
    dZ =  tril(do r^T, 0)         N = dD r^T          dA = -tril(N, -1)
    dbeta_r = N_rr / beta_r^2
    q.dq = o.do                   k.dk = 2 beta dbeta - v.dv       the row sums that the L2 norms' gradients need

dZ and dA leave as scores of the raw q and k (norms and scale multiplied in), once per group of pairs (intra.py) and masked to it, so that
the next stage multiplies tiles as they lie in memory. With i, j token rows of the chunk, a tile's element (i, j) is

    Zu  dZ[j,i], i <= j      Zl  dZ[i,j], i >= j      Au  dA[j,i], i < j      Al  dA[i,j], i > j

    "matrix"   Zu, Zl, Au, Al within blocks of 16, then Zu, Zl, Au + Al for level 16 (and 32)
    "any"      the diagonal of dZ, then Zu, Zl, Au + Al for levels 1, 2, 4, 8, 16 (and 32)

Grid (chunk, head); V is walked in blocks of BV. fp32 accumulators: two [C, C], one [C, BV].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.plan import Plan
from openkda.portable.backward_config import BackwardConfig
from openkda.portable.tile import as_rows, chunk_bounds, load_beta, load_tile, nonzero_beta, store_tile
from openkda.problem import Problem


@triton.jit
def store_groups(ptr, dZ, dA, rows, C: tl.constexpr, FORM: tl.constexpr):
    """Write the tiles of every group, [C, C] each, from the lower triangles dZ, dA."""
    i = rows[:, None]
    j = rows[None, :]
    at = i * C + j
    element = ptr.dtype.element_ty
    Zl = dZ.to(element)
    Zu = tl.trans(Zl)
    Al = dA.to(element)
    Au = tl.trans(Al)
    if FORM == "any":
        tl.store(ptr + at, tl.where(i == j, Zl, 0.0))
        ptr += C * C
        first: tl.constexpr = 0
    else:
        block = i // 16 == j // 16
        tl.store(ptr + at, tl.where(block, Zu, 0.0))
        tl.store(ptr + C * C + at, tl.where(block, Zl, 0.0))
        tl.store(ptr + 2 * C * C + at, tl.where(block, Au, 0.0))
        tl.store(ptr + 3 * C * C + at, tl.where(block, Al, 0.0))
        ptr += 4 * C * C
        first: tl.constexpr = 4
    for level in tl.range(first, 6 if C > 32 else 5, num_stages=1):
        pair = (i >> level + 1 == j >> level + 1) & (i >> level != j >> level)
        tl.store(ptr + at, tl.where(pair & (i < j), Zu, 0.0))
        tl.store(ptr + C * C + at, tl.where(pair & (i > j), Zl, 0.0))
        tl.store(ptr + 2 * C * C + at, tl.where(pair, tl.where(i < j, Au, Al), 0.0))
        ptr += 3 * C * C


@triton.jit
def score_gradients_kernel(
    T_ptr,  # [R, HV, C]
    r_ptr, dr_ptr,  # [R, HV, V]
    v_ptr, do_ptr,  # [R, HV, V], row strides v_row, do_row, head strides v_head, do_head
    o_ptr,  # [R, HV, V]; None where the next stage needs no row sums
    beta_ptr,  # [R, HV], row stride beta_row
    factors_ptr,  # [R, HV, 4] fp32: reads the norms' factors of q and k, writes factor^2 times the row sums q.dq and k.dk
    dv_ptr,  # [R, HV, V]
    dbeta_ptr,  # [R, HV]
    groups_ptr,  # [NC, HV, groups, C, C]
    chunks_ptr,  # [NC, 4] int32
    v_row, v_head, do_row, do_head, beta_row,
    scale,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    SIGMOID: tl.constexpr, NEG: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0).to(tl.int64)
    first, length = chunk_bounds(chunks_ptr, c)
    if length <= 0:
        return
    rows = tl.arange(0, C)
    live = rows < length
    at = first * HV + h
    Tt = tl.trans(load_tile(T_ptr + at * C, rows, HV * C, rows, live, C, C))
    dZ = tl.zeros([C, C], tl.float32)
    N = tl.zeros([C, C], tl.float32)
    v_dv = tl.zeros([C], tl.float32)
    o_do = tl.zeros([C], tl.float32)
    for v0 in range(0, V, BV):
        cols = v0 + tl.arange(0, BV)
        dr = load_tile(dr_ptr + at * V, rows, HV * V, cols, live, V, BV)
        r = tl.trans(load_tile(r_ptr + at * V, rows, HV * V, cols, live, V, BV))
        do = load_tile(do_ptr + first * do_row + h * do_head, rows, do_row, cols, live, V, BV)
        dD = tl.dot(Tt, dr, input_precision=P)
        store_tile(dv_ptr + at * V, dD, rows, HV * V, cols, live, V, BV)
        dZ = tl.dot(do, r, acc=dZ, input_precision=P)
        N = tl.dot(dD.to(r.dtype), r, acc=N, input_precision=P)
        if o_ptr is not None:
            v = load_tile(v_ptr + first * v_row + h * v_head, rows, v_row, cols, live, V, BV).to(tl.float32)
            o = load_tile(o_ptr + at * V, rows, HV * V, cols, live, V, BV).to(tl.float32)
            v_dv += tl.sum(v * dD, 1)
            o_do += tl.sum(o * do.to(tl.float32), 1)

    beta = load_beta(beta_ptr + first * beta_row + h, rows, beta_row, live, SIGMOID, NEG)
    floor = nonzero_beta(beta)
    i = rows[None, :]
    beta_dbeta = tl.sum(tl.where(rows[:, None] == i, N, 0.0), 1) / floor
    dbeta = beta_dbeta / floor
    if SIGMOID:
        dbeta *= beta * (1.0 - (0.5 * beta if NEG else beta))
    tl.store(dbeta_ptr + at + rows * HV, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)
    factors_ptr += at * 4 + rows * (HV * 4)
    rq = tl.load(factors_ptr, mask=live, other=0.0)
    rk = tl.load(factors_ptr + 1, mask=live, other=0.0)
    if o_ptr is not None:
        tl.store(factors_ptr + 2, rq * rq * o_do, mask=live)
        tl.store(factors_ptr + 3, rk * rk * (2.0 * beta_dbeta - v_dv), mask=live)
    dZ = tl.where(rows[:, None] >= i, dZ * (scale * rq)[:, None] * rk[None, :], 0.0)
    dA = tl.where(rows[:, None] > i, N * -rk[:, None] * rk[None, :], 0.0)
    store_groups(groups_ptr + (c * HV + h) * (GROUPS * C * C), dZ, dA, rows, C, FORM)


def group_tiles(form: str, C: int) -> int:
    """Tiles per chunk that score_gradients writes for a form of pairs."""
    levels = C.bit_length() - 1
    return 1 + 3 * levels if form == "any" else 4 + 3 * (levels - 4)


def score_gradients(
    problem: Problem, config: BackwardConfig, plan: Plan, T: torch.Tensor, r: torch.Tensor, dr: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, do: torch.Tensor, beta: torch.Tensor, factors: torch.Tensor, dv: torch.Tensor, dbeta: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write dv [B, T, HV, V], dbeta [B, T, HV] and the last two of factors [B, T, HV, 4] fp32; return groups [NC, HV, tiles, C, C].

    Args: T, factors from `prepare`; r from state_scan; dr from reverse_scan; v, o, do [B, T, HV, V]; beta [B, T, HV]."""
    form, C = config.forward.form, plan.chunk_size
    tiles = group_tiles(form, C)
    groups = torch.empty(plan.num_chunks, problem.HV, tiles, C, C, dtype=T.dtype, device=T.device)
    row_sums = problem.qk_l2norm and config.block_k < problem.K  # else one program of the next stage sees all channels
    v, do, beta = as_rows(v), as_rows(do), as_rows(beta)
    if v.shape[0] and plan.num_chunks:
        score_gradients_kernel[(plan.num_chunks, problem.HV)](
            T, r, dr, v, do, o.contiguous() if row_sums else None, beta, factors, dv, dbeta, groups, plan.chunks, v.stride(0),
            v.stride(1), do.stride(0), do.stride(1), beta.stride(0), float(problem.scale), HV=problem.HV, V=problem.V, C=C,
            BV=config.block_v, SIGMOID=problem.beta_sigmoid, NEG=problem.neg_eigval, GROUPS=tiles, FORM=form, P=config.precision,
            num_warps=config.scores_warps,
        )  # fmt: skip
    return groups
