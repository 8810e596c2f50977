"""Gradients of a chunk's scores, of v and of beta, parallel over chunks (docs/backward.md, (2) and (5)).

    dv = dD = T^T dr        dZ = tril(do r^T)        N = dD r^T        dA = -tril(N, -1)
    dbeta_r = N_rr / beta_r^2        q.dq = o.do        k.dk = 2 beta dbeta - v.dv: the row sums that the L2 norms' gradients need

dZ and dA leave as gradients of the scores of normalised rows (norms and scale multiplied in), over a power of two near their largest
element: backward_chunk.py multiplies them by factors of up to 2^116, and exact powers of two keep that finite for any gradient.

Grid (chunk times head,), heads first. fp32 accumulators [V, C] and two [C, C].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from openkda.hopper.backward_prepare import C, Prepared, elements, in_units, load_rows
from openkda.hopper.instructions import rounded
from openkda.hopper.runtime import launch
from openkda.plan import Plan
from openkda.portable.backward_inputs import load_channels, store_channels
from openkda.portable.tile import chunk_bounds, load_beta, load_tile, nonzero_beta
from openkda.problem import Inputs, Problem


class ScoreGradients(NamedTuple):
    """What the channels' gradients need of a chunk."""

    pairs: torch.Tensor  # [NC, HV, 2, C, C], of tile_dtype: dZ, dA over size
    sums: torch.Tensor  # [NC, HV, 3, C] fp32: q.dq / |q|, k.dk / |k|, size (in every element)


@triton.jit
def power_of_two(x):
    """The power of two in (x / 2, x], for x >= 0; at least 2^-60."""
    bits = tl.maximum(x, 2.0**-60).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def row_factors(nq, nk, live, scale, L2NORM: tl.constexpr):
    """What normalised rows of q (with scale) and k are multiplied with; 0 past the end."""
    fq = tl.where(live, scale, 0.0)
    fk = tl.where(live, 1.0, 0.0)
    if not L2NORM:
        fq = tl.where(live, scale / nq, 0.0)
        fk = tl.where(live, 1.0 / nk, 0.0)
    return fq, fk


@triton.jit(do_not_specialize=["v_units", "do_units", "HV"], do_not_specialize_on_alignment=["beta_ptr"])
def score_gradients_kernel(
    v_ptr, do_ptr,  # [R, HV, V], rows v_units, do_units apart
    o_ptr,  # [R, HV, V], contiguous
    beta_ptr,  # [R, HV]
    T_ptr, norms_ptr,  # as Prepared
    r_ptr, dr_ptr,  # [NC, HV, V, C]; dr is replaced by dD, rounded
    dv_ptr, dbeta_ptr,  # [R, HV, V], [R, HV]
    pairs_ptr, sums_ptr,  # as ScoreGradients
    chunks_ptr,  # [NC, 4] int32
    v_units, do_units, HV, scale,
    V: tl.constexpr, C: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    h = entry % HV
    first, length = chunk_bounds(chunks_ptr, entry // HV)
    if length <= 0:
        return
    at = first * HV + h
    rows = tl.arange(0, C)
    vv = tl.arange(0, V)
    live = rows < length
    square = rows[:, None] * C + rows[None, :]
    dr = tl.load(dr_ptr + entry * (C * V) + vv[:, None] * C + rows[None, :])
    T = tl.load(T_ptr + entry * (2 * C * C) + square)
    rest = tl.load(T_ptr + entry * (2 * C * C) + C * C + square)
    r = tl.load(r_ptr + entry * (C * V) + vv[:, None] * C + rows[None, :])
    do = load_rows(do_ptr, do_units, first, h, rows, vv, live, V)
    beta = load_beta(beta_ptr + first * HV + h, rows, HV, live, SIGMOID, NEG)
    nq = tl.load(norms_ptr + entry * (2 * C) + rows)
    nk = tl.load(norms_ptr + entry * (2 * C) + C + rows)
    fq, fk = row_factors(nq, nk, live, scale, L2NORM)
    if L2NORM:
        v_row = elements(v_units, v_ptr)
        v = load_channels(v_ptr + first * v_row + h * V, rows, v_row, vv, live, V, V)
        o = load_tile(o_ptr + at * V, rows, HV * V, vv, live, V, V)
        o_do = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)

    dD = tl.dot(dr, rest, acc=tl.dot(dr, T))  # [V, C]
    store_channels(dv_ptr + at * V, dD, rows, HV * V, vv, live, V, V)
    dZ = tl.dot(do.to(r.dtype), r)
    D = rounded(dD, r.dtype)
    tl.store(dr_ptr + entry * (C * V) + vv[:, None] * C + rows[None, :], D)
    N = tl.dot(tl.trans(D), r)
    i = rows[None, :]
    floor = nonzero_beta(beta)
    beta_dbeta = tl.sum(r.to(tl.float32) * dD, 0) / floor  # N_rr from the unrounded dD
    dbeta = beta_dbeta / floor
    if SIGMOID:
        dbeta *= beta * (1.0 - (0.5 * beta if NEG else beta))
    tl.store(dbeta_ptr + at + rows * HV, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)
    dZ = tl.where(rows[:, None] >= i, dZ * fq[:, None] * fk[None, :], 0.0)
    dA = tl.where(rows[:, None] > i, N * -fk[:, None] * fk[None, :], 0.0)
    size = power_of_two(tl.max(tl.max(tl.maximum(tl.abs(dZ), tl.abs(dA)), 1), 0))
    pairs_ptr += entry * (2 * C * C) + square
    tl.store(pairs_ptr, rounded(dZ / size, r.dtype))
    tl.store(pairs_ptr + C * C, rounded(dA / size, r.dtype))
    sums_ptr += entry * (3 * C) + rows
    tl.store(sums_ptr + 2 * C, size + tl.zeros([C], tl.float32))
    if L2NORM:
        tl.store(sums_ptr, nq * o_do)
        tl.store(sums_ptr + C, nk * (2.0 * beta_dbeta - tl.sum(v.to(tl.float32) * dD, 0)))


def score_gradients(
    problem: Problem, plan: Plan, inputs: Inputs, p: Prepared, o: torch.Tensor, do: torch.Tensor, r: torch.Tensor, dr: torch.Tensor,
    dv: torch.Tensor, dbeta: torch.Tensor,
) -> ScoreGradients:  # fmt: skip
    """Write dv [B, T, HV, V] and dbeta [B, T, HV]; return what backward_chunk.py needs.

    Args: o, do [B, T, HV, V]; r, dr [NC, HV, V, C] from both_scans; dr is replaced by dD, rounded."""
    HV, NC, device = problem.HV, plan.num_chunks, do.device
    pairs = torch.empty(NC, HV, 2, C, C, dtype=r.dtype, device=device)
    sums = torch.empty(NC, HV, 3, C, dtype=torch.float32, device=device)
    rows, units = in_units(inputs.v, do)
    if NC:
        operands = (*rows, o.contiguous(), inputs.beta.contiguous(), p.T, p.norms, r, dr, dv, dbeta, pairs, sums, plan.chunks)
        constants = (problem.V, C, problem.qk_l2norm, problem.beta_sigmoid, problem.neg_eigval)
        launch(score_gradients_kernel, (NC * HV, 1, 1), operands, (*units, HV, float(problem.scale)), constants)
    return ScoreGradients(pairs, sums)
