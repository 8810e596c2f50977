"""Gradients of the pairs that rows of a fast gate take by levels (docs/backward.md, (6) to (8) and numerics 3), added to the others.

A row from `cut` on, where some channel has left the span of one pair factor (backward_prepare.py), meets each row before it at the level
where the two lie in the odd and the even block of S rows of one block of 2S, with x = 2^(G_r - G_a) and 2^(G_a - G_i), a the even block's
last row: no factor is above 1. With the rows of q and k times x, rounded like the tiles in memory:

    dq_r += x (dZ kx)        dk_r += x (dA kx)        dk_i += x (dZ^T qx + dA^T kx)        dG = q dq + k dk_read - k dk_written

and the diagonal of dZ without a factor. dG multiplies by the tiles as rounded and its sums stay within this kernel: both ends of a pair
cancel to fp32 rounding. All that follows is linear, the norms' projection and the gate's chain too: results are read, added to, written.

Grid (head times chunk,); a chunk without such rows ends at once. Tiles [C, K]: fp32 q, k, G and the sums dq, dk, dG.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.hopper.backward_chunk import gate_chain
from openkda.hopper.backward_prepare import C, decay_bits, gate_rate, in_units, level_factor, load_rows, pair_mask
from openkda.hopper.instructions import rounded
from openkda.hopper.runtime import launch
from openkda.plan import Plan
from openkda.portable.tile import chunk_bounds, contiguous
from openkda.problem import Inputs, Problem


@triton.jit
def add_tile(ptr, x, mask):
    """Add x to what is in memory."""
    tl.store(ptr, (tl.load(ptr, mask=mask, other=0.0).to(tl.float32) + x).to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def level_pairs(q, k, G, dZ, dA, C: tl.constexpr, K: tl.constexpr):
    """Of normalised rows q, k [C, K] fp32 and dZ, dA [C, C] as rounded: dq, dk, dG [C, K]."""
    element: tl.constexpr = dZ.dtype
    r = tl.arange(0, C)[:, None]
    i = tl.arange(0, C)[None, :]
    own = tl.where(r == i, dZ, 0.0)
    qx = rounded(q, element)
    kx = rounded(k, element)
    dq = tl.dot(own, kx)
    dk = tl.dot(own, qx)
    dG = tl.zeros([C, K], tl.float32)
    for level in tl.static_range(5):
        pairs = pair_mask(r, i, 2**level)
        Z = tl.where(pairs, dZ, 0.0)
        A = tl.where(pairs, dA, 0.0)
        x = level_factor(G, 2**level, C, K)
        qx = rounded(q * x, element)
        kx = rounded(k * x, element)
        by_q = tl.dot(Z, kx)
        dq += x * by_q
        by_k = tl.dot(A, kx)
        to_k = tl.dot(tl.trans(A), kx, acc=tl.dot(tl.trans(Z), qx))
        dk += x * (by_k + to_k)
        dG += qx.to(tl.float32) * by_q + kx.to(tl.float32) * (by_k - to_k)
    return dq, dk, dG


@triton.jit(do_not_specialize=["q_units", "k_units", "g_units", "HV", "group"])
def level_gradients_kernel(
    q_ptr, k_ptr,  # [R, H, K], rows q_units, k_units apart
    g_ptr,  # [R, HV, K] as given, rows g_units apart
    A_log_ptr, dt_bias_ptr,  # [HV], [HV, K] or None
    norms_ptr, cut_ptr,  # as Prepared
    pairs_ptr, size_ptr,  # [NC, HV, 2, C, C] dZ, dA over size; size fp32, SIZES apart
    dq_ptr, dk_ptr, dg_ptr,  # [R, HV, K], added to
    dA_log_ptr, ddt_bias_ptr,  # [NC, HV, N], [NC, HV, K] fp32, added to, or None
    chunks_ptr,  # [NC, 4] int32
    q_units, k_units, g_units, HV, group,
    N: tl.constexpr, SIZES: tl.constexpr, K: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    h = entry % HV
    first, length = chunk_bounds(chunks_ptr, entry // HV)
    if length <= 0:
        return
    cut = tl.load(cut_ptr + entry)
    if cut >= C:
        return
    hq = h // group
    rows = tl.arange(0, C)
    cols = tl.arange(0, K)
    live = rows < length
    nq = tl.load(norms_ptr + entry * (2 * C) + rows)
    nk = tl.load(norms_ptr + entry * (2 * C) + C + rows)
    q = load_rows(q_ptr, q_units, first, hq, rows, cols, live, K).to(tl.float32) * nq[:, None]
    k = load_rows(k_ptr, k_units, first, hq, rows, cols, live, K).to(tl.float32) * nk[:, None]
    x = load_rows(g_ptr, g_units, first, h, rows, cols, live, K).to(tl.float32)
    if dt_bias_ptr is not None:
        x += tl.load(dt_bias_ptr + h * K + cols).to(tl.float32)[None, :]
    rate = gate_rate(A_log_ptr, h)
    G = tl.cumsum(tl.where(live[:, None], decay_bits(x, rate, 0.0, GATE, True), 0.0), axis=0)
    pairs_ptr += entry * (2 * C * C) + rows[:, None] * C + rows[None, :]
    late = (rows >= cut)[:, None]
    dZ = tl.where(late, tl.load(pairs_ptr), 0.0)
    dA = tl.where(late, tl.load(pairs_ptr + C * C), 0.0)
    size = tl.load(size_ptr + entry * SIZES)
    dq, dk, dG = level_pairs(q, k, G, dZ, dA, C, K)
    tile = (first * HV + h) * K + rows[:, None] * (HV * K) + cols[None, :]
    mask = live[:, None]
    add_tile(dq_ptr + tile, dq * (nq * size)[:, None], mask)
    add_tile(dk_ptr + tile, dk * (nk * size)[:, None], mask)
    dg = tl.where(mask, tl.cumsum(dG, axis=0, reverse=True) * size, 0.0)
    dg, dA_log = gate_chain(dg, x, rate, 0.0, GATE, True)
    add_tile(dg_ptr + tile, dg, mask)
    if dA_log_ptr is not None:
        at = dA_log_ptr + entry * N
        tl.store(at, tl.load(at) + tl.sum(tl.sum(tl.where(mask, dA_log, 0.0), 0), 0))
    if ddt_bias_ptr is not None:
        add_tile(ddt_bias_ptr + entry * K + cols, tl.sum(dg, 0), cols < K)


def level_gradients(
    problem: Problem, plan: Plan, inputs: Inputs, norms: torch.Tensor, cut: torch.Tensor, pairs: torch.Tensor, size: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dg: torch.Tensor, dA_log: torch.Tensor | None, ddt_bias: torch.Tensor | None,
) -> None:  # fmt: skip
    """Add to dq, dk (per value head), dg [B, T, HV, K] and the partial sums dA_log [NC, HV, n], ddt_bias [NC, HV, K].

    Args: norms, cut as Prepared; pairs [NC, HV, 2, C, C] over size; size [NC, HV, n] fp32, the first of the last axis."""
    HV, K, NC = problem.HV, problem.K, plan.num_chunks
    rows, units = in_units(inputs.q, inputs.k, inputs.g)
    if NC:
        operands = (
            *rows, contiguous(inputs.A_log), contiguous(inputs.dt_bias), norms, cut, pairs, size, dq, dk, dg, dA_log, ddt_bias, plan.chunks
        )  # fmt: skip
        constants = (1 if dA_log is None else dA_log.shape[2], size.stride(1), K, C, problem.gate)
        launch(level_gradients_kernel, (NC * HV, 1, 1), operands, (*units, HV, problem.group), constants, warps=8)
