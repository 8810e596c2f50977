"""What both scans of the backward read, per chunk of 32 tokens and value head (docs/backward.md, "The Hopper kernels").

    Aqk = tril(qx ky^T) scale        L = beta tril(kx ky^T, -1)        T = (I + L)^-1 Diag(beta)
    w = -T (2^G k)        kg = 2^(G_C - G) k        qg = scale 2^G q        decay = 2^G_C

x = 2^(G + shift) and y = 2^(-G - shift) split the factor of a pair (row r, column i) about the chunk's entry, for bounded gates: 32 tokens
at g = -5 span 2^231, and shift, half of that, keeps both factors within 2^-116 and 2^116. Rows are normalised first, with or without an L2
norm in the problem, so that what falls below bf16's smallest number is below 2^-10 of its row. w is negative, so that both scans only add.

A gate without a bound takes the same form inside segments of a chunk (`segments`): rows are cut, from the first on, wherever some channel
would leave the span, so almost always there is one segment. A token is held at the span, which leaves nothing in fp32 either. Rows of a
later segment meet all rows before it about the state at the segment's entry, both factors at most 1. A cut depends on its own row and on
rows before it: causality is bit-exact.

The inverse doubles its blocks, 1, 2, 4, 8, 16 rows: X <- X - X L_s X, where L_s holds the pairs of an odd and an even block of s rows;
every iterate is the exact inverse of a block-diagonal part of I + L, so nothing grows.

All results are tiles of one chunk and head, [NC, HV, rows, columns], contiguous and written in full: rows past the end of a sequence are
zero. Grid (chunk times head,), heads first: blocks that run together share rows of memory. Tiles [C, K] bf16 in registers, fp32 [C, C].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from openkda.hopper.instructions import divide, exp2, to_fp32
from openkda.plan import Plan
from openkda.portable.tile import LOG2E, as_rows, chunk_bounds, contiguous, load_beta, load_tile, nonzero_beta
from openkda.problem import Inputs, Problem

C = 32  # tokens per chunk: the span of the pair factors allows no more
SPAN = tl.constexpr(32 * 5 * 1.4427)  # bits that two pair factors share at most: 32 tokens at the lowest bound there is


class Prepared(NamedTuple):
    """Tiles of every chunk and value head, bf16 unless said otherwise."""

    Aqk: torch.Tensor  # [NC, HV, C, C]
    T: torch.Tensor  # [NC, HV, 2, C, C]: rounded to bf16, and what the rounding took: an error here is one of a whole row of r and dv
    w: torch.Tensor  # [NC, HV, C, K]
    kg: torch.Tensor  # [NC, HV, C, K]
    qg: torch.Tensor  # [NC, HV, C, K]
    decay: torch.Tensor  # [NC, HV, K] fp32
    norms: torch.Tensor  # [NC, HV, 2, C] fp32: 1 / |q|, 1 / |k|; zero on rows past the end
    starts: torch.Tensor | None  # [NC, HV, C] int32: first row of each row's segment; None for bounded gates, which have one


@triton.jit
def gate_rate(A_log_ptr, h):
    """exp(A_log[h]), or 1."""
    rate = 1.0
    if A_log_ptr is not None:
        rate = tl.exp(tl.load(A_log_ptr + h).to(tl.float32))
    return rate


@triton.jit
def bounded_sigmoid(x, rate):
    """(s, 1 - s) for s = sigmoid(rate x), both with small relative error; both 0 where s is below 2^-127."""
    e = exp2(x * (rate * -LOG2E))
    s = divide(1.0, 1.0 + e)
    return s, tl.minimum(e, 2.0**126) * s


@triton.jit
def softplus_sigmoid(x):
    """(softplus(x), sigmoid(x)), both with small relative error: portable/gate.py has the series."""
    y = exp2(tl.abs(x) * -LOG2E)
    z = divide(y, 2.0 + y)
    s = z * z
    p = 1.0 / 15
    for n in tl.static_range(13, 1, -2):
        p = p * s + 1.0 / n
    return tl.maximum(x, 0.0) + 2.0 * z * (1.0 + s * p), divide(tl.where(x < 0.0, y, 1.0), 1.0 + y)


@triton.jit
def decay_bits(x, rate, lower_bound, GATE: tl.constexpr, ANY: tl.constexpr):
    """log2 of the decay from the gate as given plus its bias; without a bound held at -SPAN."""
    if GATE == "none":
        bits = x * LOG2E
    elif GATE == "softplus":
        bits = softplus_sigmoid(x)[0] * (rate * -LOG2E)
    else:
        bits = bounded_sigmoid(x, rate)[0] * (lower_bound * LOG2E)
    if ANY:
        bits = tl.where(bits < -SPAN, -SPAN, bits)  # NaN stays
    return bits


@triton.jit
def wide(x):
    """x in fp32"""
    if x.dtype == tl.bfloat16:
        return to_fp32(x)
    else:
        return x.to(tl.float32)


@triton.jit
def reciprocal_norm(x, live, L2NORM: tl.constexpr):
    """1 / |x| of live rows, else 0; the L2 norm's, or for rows that no norm is asked of"""
    EPS: tl.constexpr = 1e-6 if L2NORM else 1e-30
    x = wide(x)
    return tl.where(live, tl.rsqrt(tl.sum(x * x, 1) + EPS), 0.0)


@triton.jit
def times(x, n, f):
    """Rows x [C, K] times n [C] and f [C, K], fp32"""
    return wide(x) * (f * n[:, None])


@triton.jit
def store_state_tiles(qg_ptr, kg_ptr, q, k, fq, fk, L2NORM: tl.constexpr):
    """Write qg, kg from normalised rows that have their decay."""
    tl.store(qg_ptr, (q * fq[:, None]).to(qg_ptr.dtype.element_ty))
    if not L2NORM:
        k *= fk[:, None]
    tl.store(kg_ptr, k.to(kg_ptr.dtype.element_ty))


@triton.jit
def segments(G, rows, span, C: tl.constexpr):
    """The first row of each row's segment [C], and the prefix sum G [C, K] counted from there."""
    start = tl.zeros([C], tl.int32)
    N = G
    cut = tl.sum(tl.where(tl.min(G, 1) >= -span, 1, 0), 0)  # rows from the last cut on that fit, and all before it
    while cut < C:
        start = tl.where(rows >= cut, cut, start)
        entry = tl.sum(tl.where((rows == cut - 1)[:, None], G, 0.0), 0)
        N = tl.where((rows >= cut)[:, None], G - entry[None, :], N)
        cut = tl.maximum(tl.sum(tl.where(tl.min(G - entry[None, :], 1) >= -span, 1, 0), 0), cut + 1)  # a row of NaN fits nowhere
    return start, N


@triton.jit
def segment_scores(Aqk, L, q, k, nq, nk, G, start, rows, C: tl.constexpr, element: tl.constexpr):
    """Aqk, L [C, C] with the pairs of every segment's rows and the rows before it; q, k [C, K] and nq, nk [C] their factors."""
    s = tl.min(tl.where(start > 0, start, C), 0)
    while s < C:
        entry = tl.sum(tl.where((rows == s - 1)[:, None], G, 0.0), 0)
        f = exp2(-tl.abs(G - entry[None, :]))
        kf = times(k, nk, f).to(element)
        pairs = (start == s)[:, None] & (rows < s)[None, :]
        Aqk = tl.where(pairs, tl.dot(times(q, nq, f).to(element), tl.trans(kf)), Aqk)
        L = tl.where(pairs, tl.dot(kf, tl.trans(kf)), L)
        s = tl.min(tl.where(start > s, start, C), 0)
    return Aqk, L


@triton.jit
def pair_mask(r, i, S: tl.constexpr):
    """Pairs of row r in the odd and column i in the even block of S rows of one block of 2S."""
    return (r // (2 * S) == i // (2 * S)) & (r // S % 2 == 1) & (i // S % 2 == 0)


@triton.jit
def invert_blocks(L, C: tl.constexpr):
    """(I + L)^-1 of the strictly lower L [C, C] fp32."""
    r = tl.arange(0, C)[:, None]
    i = tl.arange(0, C)[None, :]
    X = tl.where(r == i, 1.0, tl.where(pair_mask(r, i, 1), -L, 0.0))
    X = merge_blocks(X, L, r, i, 2)
    X = merge_blocks(X, L, r, i, 4)
    X = merge_blocks(X, L, r, i, 8)
    return merge_blocks(X, L, r, i, 16)


@triton.jit
def merge_blocks(X, L, r, i, S: tl.constexpr):
    """Inverses of the diagonal blocks of 2S rows from those of S rows."""
    below = tl.where(pair_mask(r, i, S), L, 0.0)
    return X - tl.dot(tl.dot(X, below, input_precision="tf32"), X, input_precision="tf32")


@triton.jit(do_not_specialize=["beta_row", "HV", "group"])
def prepare_chunk_kernel(
    q_ptr, k_ptr,  # [R, H, K], row strides q_row, k_row, head strides q_head, k_head
    g_ptr,  # [R, HV, K] as given, row stride g_row, head stride g_head
    beta_ptr,  # [R, HV], row stride beta_row
    A_log_ptr, dt_bias_ptr,  # [HV], [HV, K] or None
    Aqk_ptr, T_ptr, w_ptr, kg_ptr, qg_ptr, decay_ptr, norms_ptr, starts_ptr,  # as Prepared
    chunks_ptr,  # [NC, 4] int32
    q_row, q_head, k_row, k_head, g_row, g_head, beta_row,
    scale, lower_bound, shift, HV, group,
    K: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    h = entry % HV
    first, length = chunk_bounds(chunks_ptr, entry // HV)
    if length <= 0:
        return
    hq = h // group
    ANY: tl.constexpr = starts_ptr is not None
    rows = tl.arange(0, C)
    cols = tl.arange(0, K)
    live = rows < length
    q = load_tile(q_ptr + first * q_row + hq * q_head, rows, q_row, cols, live, K, K)
    k = load_tile(k_ptr + first * k_row + hq * k_head, rows, k_row, cols, live, K, K)
    x = load_tile(g_ptr + first * g_row + h * g_head, rows, g_row, cols, live, K, K).to(tl.float32)
    beta = nonzero_beta(load_beta(beta_ptr + first * beta_row + h, rows, beta_row, live, SIGMOID, NEG))
    if dt_bias_ptr is not None:
        x += tl.load(dt_bias_ptr + h * K + cols).to(tl.float32)[None, :]
    bits = tl.where(live[:, None], decay_bits(x, gate_rate(A_log_ptr, h), lower_bound, GATE, ANY), 0.0)
    G = tl.cumsum(bits, axis=0)
    last = tl.sum(bits, 0)
    nq = reciprocal_norm(q, live, L2NORM)
    nk = reciprocal_norm(k, live, L2NORM)
    fq = tl.where(live, scale, 0.0)  # what the normalised rows are multiplied with
    fk = tl.where(live, 1.0, 0.0)
    if not L2NORM:
        fq = tl.where(live, scale / nq, 0.0)
        fk = tl.where(live, 1.0 / nk, 0.0)
    element: tl.constexpr = w_ptr.dtype.element_ty
    at = entry * (C * K) + rows[:, None] * K + cols[None, :]
    if ANY:
        start, N = segments(G, rows, 2.0 * shift, C)
        tl.store(starts_ptr + entry * C + rows, start)
    else:
        N = G
    up = exp2(N + shift)  # 2^G = up 2^-shift in the first segment
    qx = times(q, nq, up)
    kx = times(k, nk, up).to(element)
    ky = times(k, nk, exp2(-N - shift))
    if not ANY:  # 2^(G_C - G) = ky 2^(G_C + shift)
        store_state_tiles(qg_ptr + at, kg_ptr + at, qx * exp2(-shift), ky * exp2(last + shift)[None, :], fq, fk, L2NORM)
    tl.store(decay_ptr + entry * K + cols, exp2(last))
    tl.store(norms_ptr + entry * (2 * C) + rows, nq)
    tl.store(norms_ptr + entry * (2 * C) + C + rows, nk)
    ky = tl.trans(ky.to(element))
    Aqk = tl.dot(qx.to(element), ky)
    L = tl.dot(kx, ky)
    if ANY:
        Aqk, L = segment_scores(Aqk, L, q, k, nq, nk, G, start, rows, C, element)
        up = exp2(G)
        kd = times(k, nk, up).to(element)
        store_state_tiles(qg_ptr + at, kg_ptr + at, times(q, nq, up), times(k, nk, exp2(last[None, :] - G)), fq, fk, L2NORM)
        unit: tl.constexpr = 1.0
    else:
        kd = kx
        unit = exp2(-0.5 * shift)
    r = rows[:, None]
    i = rows[None, :]
    square = entry * (C * C) + r * C + i
    tl.store(Aqk_ptr + square, tl.where(r >= i, Aqk * fq[:, None] * fk[None, :], 0.0).to(element))
    X = invert_blocks(tl.where(r > i, L * (beta * fk)[:, None] * fk[None, :], 0.0), C)
    live_beta = tl.where(live, beta, 0.0)
    T = X * live_beta[None, :]
    high = T.to(element)
    square += entry * (C * C)
    tl.store(T_ptr + square, high)
    tl.store(T_ptr + C * C + square, (T - high.to(tl.float32)).to(element))
    # 2^G k = kd unit^2, one factor now, so that a small beta stays a normal number.
    T = X * (live_beta * fk * -unit)[None, :]
    high = T.to(element)
    w = tl.dot((T - high.to(tl.float32)).to(element), kd, acc=tl.dot(high, kd)) * unit
    tl.store(w_ptr + at, w.to(element))


def half_span(problem: Problem) -> float:
    """Half of the bits that a chunk, or a segment, can decay by: `shift` of the pair factors."""
    return 0.5 * (C * 1.4427 * -problem.lower_bound if problem.bounded else SPAN.value)


def prepare_chunks(problem: Problem, plan: Plan, inputs: Inputs) -> Prepared:
    """The tiles of every chunk of a plan with C tokens a chunk; unused rows of the plan's table are not written."""
    HV, K, NC, dtype, device = problem.HV, problem.K, plan.num_chunks, problem.dtype, inputs.q.device
    new = lambda *shape, dtype=dtype: torch.empty(NC, HV, *shape, dtype=dtype, device=device)
    p = Prepared(
        new(C, C), new(2, C, C), new(C, K), new(C, K), new(C, K), new(K, dtype=torch.float32), new(2, C, dtype=torch.float32),
        None if problem.bounded else new(C, dtype=torch.int32),
    )  # fmt: skip
    q, k, g, beta = (as_rows(x) for x in (inputs.q, inputs.k, inputs.g, inputs.beta))
    if NC:
        prepare_chunk_kernel[(NC * HV,)](
            q, k, g, beta, contiguous(inputs.A_log), contiguous(inputs.dt_bias), *p, plan.chunks, q.stride(0), q.stride(1), k.stride(0),
            k.stride(1), g.stride(0), g.stride(1), beta.stride(0), float(problem.scale), float(problem.lower_bound or 0.0),
            half_span(problem), HV, problem.group, K=K, C=C, GATE=problem.gate, L2NORM=problem.qk_l2norm, SIGMOID=problem.beta_sigmoid,
            NEG=problem.neg_eigval, num_warps=4, maxnreg=168 if problem.bounded else 255,
        )  # fmt: skip
    return p
