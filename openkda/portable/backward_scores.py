"""Gradients of a chunk's scores, of v and of beta, parallel over chunks (docs/backward.md, (2) and (5)).

    dD = dv = T^T dr              T = Linv Diag(beta)
    dZ =  tril(do r^T, 0)         N = dD r^T          dA = -tril(N, -1)
    dbeta_r = N_rr / beta_r^2
    q.dq = o.do                   k.dk = 2 beta dbeta - v.dv       the row sums that the L2 norms' gradients need

dZ and dA leave as scores of the raw q and k (norms and scale multiplied in), mirrored into both triangles: what the next stage multiplies
from either side is then a mask of one stored tile, never a transpose.

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
def score_gradients_kernel(
    T_ptr,  # [R, HV, C]
    r_ptr, dr_ptr,  # [R, HV, V]
    v_ptr, do_ptr,  # [R, HV, V], row strides v_row, do_row, head strides v_head, do_head
    o_ptr,  # [R, HV, V]; None without the L2 norm
    beta_ptr,  # [R, HV], row stride beta_row
    factors_ptr,  # [R, HV, 4] fp32: reads the norms' factors of q and k, writes factor^2 times the row sums q.dq and k.dk
    dv_ptr,  # [R, HV, V]
    dbeta_ptr,  # [R, HV]
    dZ_ptr, dA_ptr,  # [R, HV, C]
    chunks_ptr,  # [NC, 4] int32
    v_row, v_head, do_row, do_head, beta_row,
    scale,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    SIGMOID: tl.constexpr, NEG: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    first, length = chunk_bounds(chunks_ptr, tl.program_id(0))
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
    dZ += tl.trans(tl.where(rows[:, None] > i, dZ, 0.0))
    dA += tl.trans(dA)
    store_tile(dZ_ptr + at * C, dZ, rows, HV * C, rows, live, C, C)
    store_tile(dA_ptr + at * C, dA, rows, HV * C, rows, live, C, C)


def score_gradients(
    problem: Problem, config: BackwardConfig, plan: Plan, T: torch.Tensor, r: torch.Tensor, dr: torch.Tensor, v: torch.Tensor,
    o: torch.Tensor, do: torch.Tensor, beta: torch.Tensor, factors: torch.Tensor, dv: torch.Tensor, dbeta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Write dv [B, T, HV, V], dbeta [B, T, HV] and the last two of factors [B, T, HV, 4] fp32; return dZ, dA [B, T, HV, C].

    Args: T, factors from `prepare`; r from state_scan; dr from reverse_scan; v, o, do [B, T, HV, V]; beta [B, T, HV]."""
    dZ, dA = torch.empty_like(T), torch.empty_like(T)
    v, do, beta = as_rows(v), as_rows(do), as_rows(beta)
    if v.shape[0] and plan.num_chunks:
        score_gradients_kernel[(plan.num_chunks, problem.HV)](
            T, r, dr, v, do, o.contiguous() if problem.qk_l2norm else None, beta, factors, dv, dbeta, dZ, dA, plan.chunks, v.stride(0),
            v.stride(1), do.stride(0), do.stride(1), beta.stride(0), float(problem.scale), HV=problem.HV, V=problem.V, C=plan.chunk_size,
            BV=config.block_v, SIGMOID=problem.beta_sigmoid, NEG=problem.neg_eigval, P=config.precision, num_warps=config.scores_warps,
        )  # fmt: skip
    return dZ, dA
