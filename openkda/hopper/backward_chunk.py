"""Gradients of q, k and the gate, parallel over chunks and blocks of channels (docs/backward.md, (6) to (8)).

    dq = scale 2^G (do S^T)           + x (dZ ky)             S: entry state h, dS': gradient of the exit state dh
    dk = -2^G (dD S^T)                + x (dA ky)             as the row that reads
         + 2^(G_C - G) (r dS'^T)      + y (dZ^T qx + dA^T kx) as the row that is written
    dG = q dq + k dk_read - k dk_written
    dg_t = 2^G_C rowsum(S dS') + sum_j (k dk_written)_j [state part] + sum_{j >= t} dG_j

x = 2^(G + shift), y = 2^(-G - shift) and the normalised rows are those of backward_prepare.py; qx, kx, ky are rounded like the tiles in
memory, and dG multiplies by them as rounded: inside the suffix sum the two ends of a pair must cancel. A bounded gate cancels no term
above e^5 times the result. Gates that may forget everything keep the state part apart, as portable/backward_inputs.py does:

    dg_t = 2^G_C rowsum(S dS') + sum_{j < t} (k dk_written)_j [state part] + sum_{j >= t} dG_j [written: pairs only]

and leave the pairs of the rows from `cut` on to backward_levels.py, which adds them to the results.

Sums over tokens are products with triangles of ones, the summand split into parts of 8 bits: they run where the accumulators already
are. All tiles stand transposed, channels by tokens: an accumulator then is the next product's left operand.

Grid (blocks of BK channels times head times chunk,), in this order, so that blocks which run together share rows of memory. BK = 64 is the
least that the matrix unit takes. fp32 tiles take 143 KB of shared memory: one block a multiprocessor, which may have all registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.hopper.backward_prepare import (
    C,
    Prepared,
    at_least,
    bounded_sigmoid,
    decay_bits,
    elements,
    gate_rate,
    half_span,
    in_units,
    load_rows,
    softplus_sigmoid,
)
from openkda.hopper.backward_scores import ScoreGradients
from openkda.hopper.instructions import exp2, rounded
from openkda.hopper.runtime import launch
from openkda.plan import Plan
from openkda.portable.backward_inputs import CUT, load_channels, store_channels
from openkda.portable.tile import chunk_bounds, contiguous
from openkda.problem import Inputs, Problem

BLOCK_K = 64


@triton.jit
def sum_tokens(x, ones, element: tl.constexpr):
    """x [BK, C] fp32 times a matrix of zeros and ones [C, C] bf16, as exact as an fp32 sum."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)  # 8 bits of the mantissa: a bf16 number
    x -= high
    middle = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    low = x - middle
    return tl.dot(low.to(element), ones, acc=tl.dot(middle.to(element), ones, acc=tl.dot(high.to(element), ones)))


@triton.jit
def with_bias(x, bias):
    """The gate as given [BK, C] plus its bias [BK], fp32."""
    return x.to(tl.float32) + bias[:, None]


@triton.jit
def load_pairs(pairs_ptr, cut_ptr, entry, rows, C: tl.constexpr):
    """dZ and dA [C, C] of a chunk; 0 in the rows from `cut` on, which are backward_levels.py's."""
    pairs_ptr += entry * (2 * C * C) + rows[:, None] * C + rows[None, :]
    dZ = tl.load(pairs_ptr)
    dA = tl.load(pairs_ptr + C * C)
    if cut_ptr is not None:
        whole = (rows < tl.load(cut_ptr + entry))[:, None]
        dZ = tl.where(whole, dZ, 0.0)
        dA = tl.where(whole, dA, 0.0)
    return dZ, dA


@triton.jit
def load_bias(dt_bias_ptr, offsets, BK: tl.constexpr):
    """The bias of BK channels in fp32, 0 where there is none."""
    bias = tl.zeros([BK], tl.float32)
    if dt_bias_ptr is not None:
        bias = tl.load(dt_bias_ptr + offsets).to(tl.float32)
    return bias


@triton.jit
def store_terms(dA_log_ptr, place, dA_log, ddt_bias_ptr, places, dg):
    """This block's terms of A_log's gradient, the sum of dA_log [BK, C], and of dt_bias's, the sums over tokens of dg [BK, C]."""
    if dA_log_ptr is not None:
        tl.store(dA_log_ptr + place, tl.sum(tl.sum(dA_log, 0), 0))
    if ddt_bias_ptr is not None:
        tl.store(ddt_bias_ptr + places, tl.sum(dg, 1))


@triton.jit
def gate_chain(dg, x, rate, lower_bound, GATE: tl.constexpr, ANY: tl.constexpr):
    """From dg and the gate as given plus its bias: the gate's gradient, and the terms of A_log's."""
    if GATE == "bounded":
        s, rest = bounded_sigmoid(x, rate)
        dg *= s * rest * (lower_bound * rate)
        return dg, dg * x
    elif GATE == "softplus":
        s, slope = softplus_sigmoid(x)
        dg = tl.where(s * rate > -CUT, 0.0, dg) * -rate
        return dg * slope, dg * s
    else:
        dg = tl.where(x < CUT, 0.0, dg) if ANY else dg
        return dg, dg


@triton.jit(do_not_specialize=["q_units", "k_units", "g_units", "do_units", "HV", "group"])
def chunk_gradients_kernel(
    q_ptr, k_ptr,  # [R, H, K], rows q_units, k_units apart
    g_ptr,  # [R, HV, K] as given, rows g_units apart
    A_log_ptr, dt_bias_ptr,  # [HV], [HV, K] or None
    do_ptr, dD_ptr,  # [R, HV, V], rows do_units apart; [NC, HV, V, C]
    norms_ptr, cut_ptr,  # as Prepared
    h_ptr, dh_ptr,  # [NC, HV, V, K]
    r_ptr,  # [NC, HV, V, C]
    pairs_ptr, sums_ptr,  # as ScoreGradients
    dq_ptr, dk_ptr, dg_ptr,  # [R, HV, K]
    dA_log_ptr, ddt_bias_ptr,  # [NC, HV, K / BK], [NC, HV, K] fp32 partial sums, or None
    chunks_ptr,  # [NC, 4] int32
    q_units, k_units, g_units, do_units, HV, group, scale, lower_bound, shift,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = K // BK
    entry = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    h = entry % HV
    first, length = chunk_bounds(chunks_ptr, entry // HV)
    cols = block * BK + tl.arange(0, BK)
    if length <= 0:
        return
    rows = tl.arange(0, C)
    vv = tl.arange(0, V)
    live = rows < length
    ANY: tl.constexpr = cut_ptr is not None
    at = first * HV + h
    hq = h // group
    state = entry * (K * V) + vv[:, None] * K + cols[None, :]
    S = tl.load(h_ptr + state)
    dS = tl.load(dh_ptr + state)
    do = load_rows(do_ptr, do_units, first, h, rows, vv, live, V)
    dD = tl.load(dD_ptr + entry * (C * V) + vv[:, None] * C + rows[None, :])
    r = tl.load(r_ptr + entry * (C * V) + vv[:, None] * C + rows[None, :])
    dZ, dA = load_pairs(pairs_ptr, cut_ptr, entry, rows, C)
    q_row = elements(q_units, q_ptr)
    k_row = elements(k_units, k_ptr)
    g_row = elements(g_units, g_ptr)
    g_ptr += first * g_row + h * K
    x = load_channels(g_ptr, rows, g_row, cols, live, K, BK)
    k = load_channels(k_ptr + first * k_row + hq * K, rows, k_row, cols, live, K, BK)
    q = load_channels(q_ptr + first * q_row + hq * K, rows, q_row, cols, live, K, BK)
    norms_ptr += entry * (2 * C) + rows
    sums_ptr += entry * (3 * C)
    size = tl.load(sums_ptr + 2 * C)
    rate = gate_rate(A_log_ptr, h)
    bias = load_bias(dt_bias_ptr, h * K + cols, BK)
    nq = tl.load(norms_ptr)
    nk = tl.load(norms_ptr + C)
    per_size = 1.0 / size
    element: tl.constexpr = h_ptr.dtype.element_ty

    rho = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
    bits = decay_bits(with_bias(x, bias), rate, lower_bound, GATE, ANY)
    bits = tl.where(live[None, :], bits, 0.0)
    G = sum_tokens(bits, tl.where(rows[:, None] <= rows[None, :], 1.0, 0.0).to(element), element)
    last = tl.sum(bits, 1)
    N = at_least(G, -2.0 * shift) if ANY else G
    up = exp2(N + shift)
    down = exp2(-N - shift)
    kf = k.to(tl.float32) * nk[None, :]
    kx = rounded(kf * up, element)
    ky = rounded(kf * down, element)
    qx = rounded(q.to(tl.float32) * nq[None, :] * up, element)

    if L2NORM:
        along_q = tl.load(sums_ptr + rows)
        along_k = tl.load(sums_ptr + C + rows)
    # Gradients over size and the tile's factor: dq = up sum_q, dk = up read + stored + down written. 2^G = up 2^-shift.
    sum_q = tl.dot(tl.trans(S), tl.trans(do.to(element))) * (exp2(-shift) * scale * per_size)
    if not L2NORM:
        sum_q /= tl.where(live, nq, 1.0)[None, :]
    sum_q = tl.dot(ky, tl.trans(dZ), acc=sum_q)
    dG = qx.to(tl.float32) * sum_q
    dq = up * sum_q * (nq * size)[None, :]
    if L2NORM:
        dq -= qx.to(tl.float32) * down * along_q[None, :]
    store_channels(dq_ptr + at * K, dq, rows, HV * K, cols, live, K, BK)

    read = tl.dot(tl.trans(S), dD) * (exp2(-shift) * -per_size)
    if not L2NORM:
        read /= tl.where(live, nk, 1.0)[None, :]
    read = tl.dot(ky, tl.trans(dA), acc=read)
    dG += kx.to(tl.float32) * read
    dk = up * read
    # The state's part of a key as it is written, over size: 2^(G_C - G) = down 2^(G_C + shift), at most 1, before anything else.
    to_end = exp2(last[:, None] - G) if ANY else down * exp2(last + shift)[:, None]
    stored = tl.dot(tl.trans(dS), r) * to_end * per_size
    if not L2NORM:
        stored /= tl.where(live, nk, 1.0)[None, :]
    dk += stored
    stored *= ky.to(tl.float32) * up
    if ANY:
        before = sum_tokens(stored, tl.where(rows[:, None] < rows[None, :], 1.0, 0.0).to(element), element)
        rho = exp2(last) * rho
    else:
        dG -= stored
        rho = exp2(last) * rho + tl.sum(stored, 1) * size
    x = load_channels(g_ptr, rows, g_row, cols, live, K, BK)  # again: from the cache, rather than in registers all the way
    written = tl.dot(kx, dA, acc=tl.dot(qx, dZ))
    dG -= ky.to(tl.float32) * written
    dk = (dk + down * written) * (nk * size)[None, :]
    if L2NORM:
        dk -= ky.to(tl.float32) * up * along_k[None, :]
    store_channels(dk_ptr + at * K, dk, rows, HV * K, cols, live, K, BK)

    dg = sum_tokens(dG, tl.where(rows[:, None] >= rows[None, :], 1.0, 0.0).to(element), element)
    if ANY:
        dg += before
    dg = tl.where(live[None, :], dg * size + rho[:, None], 0.0)
    dg, dA_log = gate_chain(dg, with_bias(x, bias), rate, lower_bound, GATE, ANY)
    store_channels(dg_ptr + at * K, dg, rows, HV * K, cols, live, K, BK)
    store_terms(dA_log_ptr, entry * BLOCKS + block, tl.where(live[None, :], dA_log, 0.0), ddt_bias_ptr, entry * K + cols, dg)


def chunk_gradients(
    problem: Problem, plan: Plan, inputs: Inputs, p: Prepared, scores: ScoreGradients, do: torch.Tensor, h: torch.Tensor,
    dh: torch.Tensor, r: torch.Tensor, dD: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dg: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Write dq, dk (per value head) and dg [B, T, HV, K]; return the terms of A_log's [NC, HV, n] and dt_bias's [NC, HV, K] gradient
    in fp32 (None if absent), to be added in one order: no atomics.

    Args: do [B, T, HV, V]; h, dh, r from both_scans; dD [NC, HV, V, C] from score_gradients."""
    HV, K, NC, device = problem.HV, problem.K, plan.num_chunks, do.device
    partial = lambda present, n: torch.empty(NC, HV, n, dtype=torch.float32, device=device) if present else None
    dA_log, ddt_bias = partial(problem.has_A_log, K // BLOCK_K), partial(problem.has_dt_bias, K)
    rows, units = in_units(inputs.q, inputs.k, inputs.g, do)
    if NC:
        q, k, g, do = rows
        operands = (
            q, k, g, contiguous(inputs.A_log), contiguous(inputs.dt_bias), do, dD, p.norms, p.cut, h, dh, r, scores.pairs, scores.sums,
            dq, dk, dg, dA_log, ddt_bias, plan.chunks,
        )  # fmt: skip
        numbers = (*units, HV, problem.group, float(problem.scale), float(problem.lower_bound or 0.0), half_span(problem))
        constants = (K, problem.V, C, BLOCK_K, problem.gate, problem.qk_l2norm)
        launch(chunk_gradients_kernel, (K // BLOCK_K * NC * HV, 1, 1), operands, numbers, constants)
    return dA_log, ddt_bias
