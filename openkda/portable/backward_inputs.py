"""Gradients of q, k and the gate, parallel over chunks and channels (docs/backward.md, (6) to (8)).

With x the pair's factor, split about an anchor exactly as in intra.py (form "any": levels and the diagonal; "matrix": blocks of 16):

    dq = scale rq 2^G (do S^T) + sum x dZ k                   S: the chunk's entry state h, dS': gradient of its exit state dh
    dk = -rk 2^G (dD S^T) + sum x dA k                        as the row that reads
       + rk 2^(G_C - G) (r dS'^T) + sum x (dZ q + dA k)       as the row that is written
    dG = q dq + k dk_read - k dk_written [pairs only]
    dg_t = 2^G_C rowsum(S dS') + sum_{j < t} (k dk_written)_j [state part] + sum_{j >= t} dG_j

The state part of dk_written stays out of dG: as a sum over earlier rows it never cancels, while inside the suffix sum the chunk's last
key, which has not decayed, would leave fp32 noise far above the true dg of a gate that forgets everything. Every pair adds to dG at its
row and subtracts at its column; inside the suffix sum both must cancel to fp32 rounding, so dG multiplies by the very tiles that entered
the products, rounded as they were. dG, its sums and the gate's chain stay in fp32.

|dg_t| <= e^g_t |S| |dS|, but the sums leave fp32 noise, which g multiplies in dA_log: dg = 0 where g < CUT.

All tiles stand transposed, channels by tokens: a decayed q or k is then the left operand, which goes from the registers it was computed
in to the matrix unit, and the right operand is a tile of score_gradients as it lies in memory.

Grid (block of BK channels and chunk, head), the block fastest; V is walked in blocks of BV. fp32 accumulators: dq, dk, dG, dg and three
products, [BK, C] each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.plan import Plan
from openkda.portable.backward_config import BackwardConfig
from openkda.portable.gate import softplus
from openkda.portable.tile import as_rows, chunk_bounds, contiguous, load_tile, load_vector, sigmoid, tile_mask
from openkda.problem import Problem

CUT = tl.constexpr(-24.0)  # e^-24 = 4e-11, far below half an ulp (6e-8) of the fp32 sums whose difference dg is
SHIFT = tl.constexpr(54.0)  # splits the span of 16 tokens at g = -5, 2^108, evenly between row and column factor


@triton.jit
def load_channels(ptr, rows, row_stride, cols, live, N: tl.constexpr, BN: tl.constexpr):
    """[BN, C] tile: the transpose of tile.load_tile."""
    mask = live[None, :] if N % BN == 0 else live[None, :] & (cols < N)[:, None]
    return tl.load(ptr + rows[None, :] * row_stride + cols[:, None], mask=mask, other=0.0)


@triton.jit
def store_channels(ptr, x, rows, row_stride, cols, live, N: tl.constexpr, BN: tl.constexpr):
    """Write the live part of the [BN, C] tile x."""
    mask = live[None, :] if N % BN == 0 else live[None, :] & (cols < N)[:, None]
    tl.store(ptr + rows[None, :] * row_stride + cols[:, None], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def beside(x, acc, length):
    """x, unchanged, where the accumulator acc lives: a select by a condition that always holds makes the compiler place x in acc's
    layout once, instead of carrying every tile of the element-wise part in two layouts."""
    return tl.where(length > 0, x, acc)


@triton.jit
def level_gradients(
    dq, dk, dG, q, k, G, tiles_ptr, at, G_ptr, G_row, rows, live, length, cols, S, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """Add level S: pairs of an odd and an even block of S rows. All [BK, C]."""
    anchor = tl.minimum(rows // (2 * S) * (2 * S) + S - 1, length - 1)
    Ga = beside(load_channels(G_ptr, anchor, G_row, cols, live, K, BK), G, length)
    odd = (rows // S % 2 == 1)[None, :]
    x = tl.exp2(tl.where(odd, G - Ga, Ga - G))
    element = tiles_ptr.dtype.element_ty
    qx = (q.to(tl.float32) * x).to(element)
    kx = (k.to(tl.float32) * x).to(element)
    by_q = tl.dot(kx, tl.load(tiles_ptr + at), input_precision=P)  # Zu: odd rows
    dq += x * by_q
    dG += qx.to(tl.float32) * by_q
    to_q = tl.dot(qx, tl.load(tiles_ptr + C * C + at), input_precision=P)  # Zl: even rows, k as q reads it
    dk += x * to_q
    dG -= kx.to(tl.float32) * to_q
    both = tl.dot(kx, tl.load(tiles_ptr + 2 * C * C + at), input_precision=P)  # Au + Al: odd rows, k as it reads; even, as it is read
    dk += x * both
    both *= kx.to(tl.float32)
    return dq, dk, dG + tl.where(odd, both, -both)


@triton.jit
def matrix_gradients(
    dq, dk, dG, q, k, G, tiles_ptr, at, G_ptr, G_row, rows, live, length, cols, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """Add the pairs within blocks of 16, the diagonal too, about the block's first row. All [BK, C]."""
    Ga = beside(load_channels(G_ptr, rows // 16 * 16, G_row, cols, live, K, BK), G, length)
    x = tl.exp2(G - Ga + SHIFT)
    y = tl.exp2(Ga - G - SHIFT)
    element = tiles_ptr.dtype.element_ty
    qx = (q.to(tl.float32) * x).to(element)
    kx = (k.to(tl.float32) * x).to(element)
    ky = (k.to(tl.float32) * y).to(element)
    by_q = tl.dot(ky, tl.load(tiles_ptr + at), input_precision=P)  # Zu
    dq += x * by_q
    dG += qx.to(tl.float32) * by_q
    to_q = tl.dot(qx, tl.load(tiles_ptr + C * C + at), input_precision=P)  # Zl
    dk += y * to_q
    dG -= ky.to(tl.float32) * to_q
    by_k = tl.dot(ky, tl.load(tiles_ptr + 2 * C * C + at), input_precision=P)  # Au
    dk += x * by_k
    dG += kx.to(tl.float32) * by_k
    to_k = tl.dot(kx, tl.load(tiles_ptr + 3 * C * C + at), input_precision=P)  # Al
    return dq, dk + y * to_k, dG - ky.to(tl.float32) * to_k


@triton.jit
def pair_gradients(
    dq, dk, dG, q, k, G, tiles_ptr, G_ptr, G_row, rows, live, length, cols,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Add every pair of the chunk to dq, dk, dG [BK, C]."""
    at = rows[:, None] * C + rows[None, :]
    if FORM == "any":
        own = tl.load(tiles_ptr + at)  # the diagonal: factor 1, no part of dG
        dq += tl.dot(k.to(own.dtype), own, input_precision=P)
        dk += tl.dot(q.to(own.dtype), own, input_precision=P)
        tiles_ptr += C * C
        first: tl.constexpr = 0
    else:
        dq, dk, dG = matrix_gradients(dq, dk, dG, q, k, G, tiles_ptr, at, G_ptr, G_row, rows, live, length, cols, K, C, BK, P)
        tiles_ptr += 4 * C * C
        first: tl.constexpr = 4
    for level in tl.range(first, 6 if C > 32 else 5, num_stages=1):
        dq, dk, dG = level_gradients(
            dq, dk, dG, q, k, G, tiles_ptr, at, G_ptr, G_row, rows, live, length, cols, 1 << level, K, C, BK, P
        )  # fmt: skip
        tiles_ptr += 3 * C * C
    return dq, dk, dG


@triton.jit
def state_products(
    h_ptr, dh_ptr, r_ptr, do_ptr, dv_ptr, do_row, rows, live, cols,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """S do^T, S dD^T, dS' r^T [BK, C] and rowsum(S dS') [BK]."""
    by_q = tl.zeros([BK, C], tl.float32)
    by_k = tl.zeros([BK, C], tl.float32)
    to_k = tl.zeros([BK, C], tl.float32)
    rho = tl.zeros([BK], tl.float32)
    for v0 in range(0, V, BV):
        vv = v0 + tl.arange(0, BV)
        mask = tile_mask(cols < K, vv, V, BV)
        at = cols[:, None] * V + vv[None, :]
        S = tl.load(h_ptr + at, mask=mask, other=0.0)
        dS = tl.load(dh_ptr + at, mask=mask, other=0.0)
        do = load_tile(do_ptr, rows, do_row, vv, live, V, BV)
        dD = load_tile(dv_ptr, rows, HV * V, vv, live, V, BV)
        r = load_tile(r_ptr, rows, HV * V, vv, live, V, BV)
        rho += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        by_q = tl.dot(S, tl.trans(do), acc=by_q, input_precision=P)
        by_k = tl.dot(S, tl.trans(dD), acc=by_k, input_precision=P)
        to_k = tl.dot(dS, tl.trans(r), acc=to_k, input_precision=P)
    return by_q, by_k, to_k, rho


@triton.jit
def gate_gradient(dg, x, A_log_ptr, dt_bias_ptr, lower_bound, h, cols, K: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr):
    """From dg [BK, C] and the gate as given: its gradient, and the terms of A_log's."""
    if GATE == "none":
        dg = tl.where(x < CUT, 0.0, dg)
        return dg, dg
    else:
        if dt_bias_ptr is not None:
            x += load_vector(dt_bias_ptr + h * K, cols, K, BK)[:, None]
        rate = 1.0
        if A_log_ptr is not None:
            rate = tl.exp(tl.load(A_log_ptr + h).to(tl.float32))
        if GATE == "softplus":
            g = -rate * softplus(x)
            dg = tl.where(g < CUT, 0.0, dg)
            return -rate * dg * sigmoid(x), dg * g
        else:
            dx = dg * (lower_bound * sigmoid(rate * x)) * sigmoid(-rate * x) * rate
            return dx, dx * x


@triton.jit
def input_gradients_kernel(
    q_ptr, k_ptr,  # [R, H, K], row strides q_row, k_row, head strides q_head, k_head
    g_ptr,  # [R, HV, K] as given, row stride g_row, head stride g_head
    A_log_ptr, dt_bias_ptr,  # [HV], [HV, K] or None
    G_ptr,  # [R, HV, K] fp32
    factors_ptr,  # [R, HV, 4] fp32: rq, rk, rq^2 q.dq, rk^2 k.dk
    h_ptr, dh_ptr,  # [NC, HV, K, V]
    r_ptr, do_ptr, dv_ptr,  # [R, HV, V]; do with row stride do_row, head stride do_head
    groups_ptr,  # [NC, HV, groups, C, C] from score_gradients
    dq_ptr, dk_ptr, dg_ptr,  # [R, HV, K]
    dA_log_ptr, ddt_bias_ptr,  # [NC, HV, K / BK], [NC, HV, K] fp32 partial sums, or None
    chunks_ptr,  # [NC, 4] int32
    q_row, q_head, k_row, k_head, g_row, g_head, do_row, do_head,
    scale, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, GROUPS: tl.constexpr, FORM: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    block = tl.program_id(0) % BLOCKS
    c = (tl.program_id(0) // BLOCKS).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    cols = block * BK + tl.arange(0, BK)
    first, length = chunk_bounds(chunks_ptr, c)
    entry = c * HV + h
    if length <= 0:
        if dA_log_ptr is not None:
            tl.store(dA_log_ptr + entry * BLOCKS + block, 0.0)
        if ddt_bias_ptr is not None:
            tl.store(ddt_bias_ptr + entry * K + cols, tl.zeros([BK], tl.float32), mask=cols < K)
        return
    rows = tl.arange(0, C)
    live = rows < length
    at = first * HV + h
    hq = h // (HV // H)
    q = load_channels(q_ptr + first * q_row + hq * q_head, rows, q_row, cols, live, K, BK)
    k = load_channels(k_ptr + first * k_row + hq * k_head, rows, k_row, cols, live, K, BK)
    G_ptr += at * K
    G = load_channels(G_ptr, rows, HV * K, cols, live, K, BK)
    last = load_vector(G_ptr + (length - 1) * (HV * K), cols, K, BK)
    factors_ptr += at * 4 + rows * (HV * 4)
    rq = tl.load(factors_ptr, mask=live, other=0.0) * scale
    rk = tl.load(factors_ptr + 1, mask=live, other=0.0)
    by_q, by_k, to_k, rho = state_products(
        h_ptr + entry * (K * V), dh_ptr + entry * (K * V), r_ptr + at * V, do_ptr + first * do_row + h * do_head, dv_ptr + at * V, do_row,
        rows, live, cols, HV, K, V, C, BK, BV, P,
    )  # fmt: skip
    G = beside(G, by_q, length)
    q = beside(q, by_q.to(q.dtype), length)
    k = beside(k, by_q.to(k.dtype), length)
    kf = k.to(tl.float32)
    x = tl.exp2(G)
    dq = rq[None, :] * x * by_q
    read = -rk[None, :] * x * by_k
    written = rk[None, :] * tl.exp2(tl.where(live[None, :], last[:, None] - G, 0.0)) * to_k
    before = tl.where(rows[:, None] < rows[None, :], 1.0, 0.0)  # [C, C]: sums over earlier rows, none of which cancels
    dg = tl.exp2(last)[:, None] * rho[:, None] + tl.dot(kf * written, before, input_precision=P)
    dk = read + written
    dG = q.to(tl.float32) * dq + kf * read
    groups_ptr += entry * (GROUPS * C * C)
    dq, dk, dG = pair_gradients(dq, dk, dG, q, k, G, groups_ptr, G_ptr, HV * K, rows, live, length, cols, K, C, BK, FORM, P)
    if L2NORM:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        if K <= BK:  # all channels are here, and q.dq, k.dk of the very same numbers cancel best (one channel: all but 1e-6)
            rq = tl.load(factors_ptr, mask=live, other=0.0)
            dq -= (rq * rq * tl.sum(q * dq, 0))[None, :] * q
            dk -= (rk * rk * tl.sum(k * dk, 0))[None, :] * k
        else:
            dq -= tl.load(factors_ptr + 2, mask=live, other=0.0)[None, :] * q
            dk -= tl.load(factors_ptr + 3, mask=live, other=0.0)[None, :] * k
    store_channels(dq_ptr + at * K, dq, rows, HV * K, cols, live, K, BK)
    store_channels(dk_ptr + at * K, dk, rows, HV * K, cols, live, K, BK)

    dg += tl.cumsum(dG, axis=1, reverse=True)
    x = load_channels(g_ptr + first * g_row + h * g_head, rows, g_row, cols, live, K, BK).to(tl.float32)
    dx, dA_log = gate_gradient(tl.where(live[None, :], dg, 0.0), x, A_log_ptr, dt_bias_ptr, lower_bound, h, cols, K, BK, GATE)
    store_channels(dg_ptr + at * K, dx, rows, HV * K, cols, live, K, BK)
    if dA_log_ptr is not None:
        tl.store(dA_log_ptr + entry * BLOCKS + block, tl.sum(tl.sum(dA_log, 0), 0))
    if ddt_bias_ptr is not None:
        tl.store(ddt_bias_ptr + entry * K + cols, tl.sum(dx, 1), mask=cols < K)


def input_gradients(
    problem: Problem, config: BackwardConfig, plan: Plan, q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, G: torch.Tensor, factors: torch.Tensor, h: torch.Tensor, dh: torch.Tensor, r: torch.Tensor,
    do: torch.Tensor, dv: torch.Tensor, groups: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dg: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Write dq, dk (per value head) and dg [B, T, HV, K]; return the gradients of A_log [HV] and dt_bias [HV, K] in fp32 (None if absent).

    Args: q, k [B, T, H, K]; g [B, T, HV, K] as given; h, r from state_scan; dh from reverse_scan; factors, dv, groups from
    score_gradients. Partial sums over the tokens of a chunk are written per chunk and then summed in one order: no atomics."""
    HV, K, BK, NC = problem.HV, problem.K, config.block_k, plan.num_chunks
    blocks = triton.cdiv(K, BK)
    partial = lambda present, n: torch.empty(NC, HV, n, dtype=torch.float32, device=q.device) if present else None
    dA_log, ddt_bias = partial(problem.has_A_log, blocks), partial(problem.has_dt_bias, K)
    q, k, g, do = as_rows(q), as_rows(k), as_rows(g), as_rows(do)
    if NC:
        input_gradients_kernel[(blocks * NC, HV)](
            q, k, g, contiguous(A_log), contiguous(dt_bias), G, factors, h, dh, r, do, dv, groups, dq, dk, dg, dA_log, ddt_bias,
            plan.chunks, q.stride(0), q.stride(1), k.stride(0), k.stride(1), g.stride(0), g.stride(1), do.stride(0), do.stride(1),
            float(problem.scale), float(problem.lower_bound or 0.0), H=problem.H, HV=HV, K=K, V=problem.V, C=plan.chunk_size, BK=BK,
            BV=config.input_block_v, GATE=problem.gate, L2NORM=problem.qk_l2norm, GROUPS=groups.shape[2], FORM=config.forward.form,
            P=config.precision, num_warps=config.input_warps,
        )  # fmt: skip
    return None if dA_log is None else dA_log.sum((0, 2)), None if ddt_bias is None else ddt_bias.sum(0)
