"""What both scans of the backward read, per chunk of 32 tokens and value head (docs/backward.md, "The Hopper kernels").

    Aqk = tril(qx ky^T) scale        L = beta tril(kx ky^T, -1)        T = (I + L)^-1 Diag(beta)
    w = -T (2^G k)        kg = 2^(G_C - G) k        qg = scale 2^G q        decay = 2^G_C

x = 2^(G + shift) and y = 2^(-G - shift) split the factor of a pair (row r, column i) about the chunk's entry, for bounded gates: 32 tokens
at g = -5 span 2^231, and shift, half of that, keeps both factors within 2^-116 and 2^116. Rows are normalised first, with or without an L2
norm in the problem, so that what falls below bf16's smallest number is below 2^-10 of its row. w is negative, so that both scans only add.

A gate without a bound takes the same form in every row up to the first in which some channel has left that span; an initialised layer never
does, nor do random gates. From that row on, `cut`, rows take their pairs by levels (docs/backward.md, numerics 3): every factor is at most
1. Which form a row takes depends on it and on rows before it: causality is bit-exact. A second launch, LEVELS, writes what those rows have
of Aqk, T and w, and kg, and ends at once where a chunk is not cut: levels cost the registers that the one pair factor is fast with.

The inverse doubles its blocks, 1, 2, 4, 8, 16 rows: X <- X - X L_s X, where L_s holds the pairs of an odd and an even block of s rows;
every iterate is the exact inverse of a block-diagonal part of I + L, so nothing grows.

All results are tiles of one chunk and head, [NC, HV, rows, columns], contiguous and written in full: rows past the end of a sequence are
zero. Grid (chunk times head,), heads first: blocks that run together share rows of memory. Tiles [C, K] rounded in registers, fp32 [C, C].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from openkda.hopper.instructions import divide, exp2, rounded
from openkda.hopper.launch import packed_rows
from openkda.hopper.runtime import launch
from openkda.plan import Plan
from openkda.portable.tile import LOG2E, chunk_bounds, contiguous, load_beta, load_tile, nonzero_beta
from openkda.problem import Inputs, Problem

C = 32  # tokens per chunk: the span of the pair factors allows no more
SPAN = tl.constexpr(32 * 5 * 1.4427)  # bits that two pair factors share at most: 32 tokens at the lowest bound there is


class Prepared(NamedTuple):
    """Tiles of every chunk and value head, of `tile_dtype` unless said otherwise. The matrix unit reads tf32 along the summed axis only:
    where tiles are fp32, w and kg are followed by their transpose, [NC, HV, 2, C K], and Aqk and qg are transposed."""

    Aqk: torch.Tensor  # [NC, HV, C, C]
    T: torch.Tensor  # [NC, HV, 2, C, C]: rounded, and what the rounding took: an error here is one of a whole row of r and dv
    w: torch.Tensor  # [NC, HV, C, K]
    kg: torch.Tensor  # [NC, HV, C, K]
    qg: torch.Tensor  # [NC, HV, C, K]
    decay: torch.Tensor  # [NC, HV, K] fp32
    norms: torch.Tensor  # [NC, HV, 2, C] fp32: 1 / |q|, 1 / |k|; zero on rows past the end
    cut: torch.Tensor | None  # [NC, HV] int32: first row that takes its pairs by levels, C if none does; None for bounded gates


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
    """log2 of the decay from the gate as given plus its bias; without a bound held at -SPAN, which leaves nothing in fp32."""
    if GATE == "none":
        bits = x * LOG2E
    elif GATE == "softplus":
        bits = softplus_sigmoid(x)[0] * (rate * -LOG2E)
    else:
        bits = bounded_sigmoid(x, rate)[0] * (lower_bound * LOG2E)
    return at_least(bits, -SPAN) if ANY else bits


@triton.jit
def at_least(x, low):
    """x, or low where x is below; NaN stays."""
    return tl.where(x < low, low, x)


@triton.jit
def elements(units, ptr):
    """Elements of ptr's type in so many units of 16 bytes: that rows are whole units, a kernel need not be compiled anew to know."""
    return units * (128 // ptr.dtype.element_ty.primitive_bitwidth)


@triton.jit
def load_rows(ptr, units, first, h, rows, cols, live, D: tl.constexpr):
    """Rows from `first` of head h of a tensor [R, heads, D] with packed heads, rows `units` of 16 bytes apart, as a tile [C, D]"""
    row = elements(units, ptr)
    return load_tile(ptr + first * row + h * D, rows, row, cols, live, D, D)


@triton.jit
def level_factor(G, S: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """2^(G_r - G_a) in rows of odd blocks of S rows, 2^(G_a - G_i) in rows of even ones, a the even block's last row; G [C, K]"""
    odd = (tl.arange(0, C) // S % 2 == 1)[:, None]
    even = tl.reshape(tl.where(odd, float("inf"), G), [C // (2 * S), 2 * S, K])
    Ga = tl.min(even, 1)[:, None, :] + tl.zeros([C // (2 * S), 2 * S, K], tl.float32)  # the last row's: G never rises
    Ga = tl.reshape(Ga, [C, K])
    return exp2(tl.where(odd, G - Ga, Ga - G))


@triton.jit
def level_scores(q, k, G, C: tl.constexpr, K: tl.constexpr, element: tl.constexpr):
    """The decayed q k^T and k k^T [C, C] by levels, of normalised rows q, k [C, K]"""
    r = tl.arange(0, C)[:, None]
    i = tl.arange(0, C)[None, :]
    Aqk = tl.where(r == i, tl.dot(rounded(q, element), tl.trans(rounded(k, element))), 0.0)
    L = tl.zeros([C, C], tl.float32)
    for level in tl.static_range(5):
        x = level_factor(G, 2**level, C, K)
        kx = rounded(k * x, element)
        pairs = pair_mask(r, i, 2**level)
        Aqk = tl.where(pairs, tl.dot(rounded(q * x, element), tl.trans(kx)), Aqk)
        L = tl.where(pairs, tl.dot(kx, tl.trans(kx)), L)
    return Aqk, L


@triton.jit
def pair_mask(r, i, S: tl.constexpr):
    """Pairs of row r in the odd and column i in the even block of S rows of one block of 2S."""
    return (r // (2 * S) == i // (2 * S)) & (r // S % 2 == 1) & (i // S % 2 == 0)


@triton.jit
def invert_blocks(L, C: tl.constexpr, P: tl.constexpr):
    """(I + L)^-1 of the strictly lower L [C, C] fp32."""
    r = tl.arange(0, C)[:, None]
    i = tl.arange(0, C)[None, :]
    X = tl.where(r == i, 1.0, tl.where(pair_mask(r, i, 1), -L, 0.0))
    X = merge_blocks(X, L, r, i, 2, P)
    X = merge_blocks(X, L, r, i, 4, P)
    X = merge_blocks(X, L, r, i, 8, P)
    return merge_blocks(X, L, r, i, 16, P)


@triton.jit
def merge_blocks(X, L, r, i, S: tl.constexpr, P: tl.constexpr):
    """Inverses of the diagonal blocks of 2S rows from those of S rows."""
    below = tl.where(pair_mask(r, i, S), L, 0.0)
    return X - tl.dot(tl.dot(X, below, input_precision=P), X, input_precision=P)


@triton.jit
def store_tile(ptr, entry, x, mask, AGAIN: tl.constexpr):
    """Write the tile x [C, D]. An fp32 tile is transposed; AGAIN: both, as it is and then transposed."""
    C: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    element: tl.constexpr = ptr.dtype.element_ty
    x = rounded(x, element)
    rows = tl.arange(0, C)[:, None]
    cols = tl.arange(0, D)[None, :]
    if element != tl.float32:
        tl.store(ptr + entry * (C * D) + rows * D + cols, x, mask=mask)
    elif AGAIN:
        ptr += entry * (2 * C * D)
        tl.store(ptr + rows * D + cols, x, mask=mask)
        tl.store(ptr + C * D + rows + cols * C, x, mask=mask)
    else:
        tl.store(ptr + entry * (C * D) + rows + cols * C, x, mask=mask)


@triton.jit(do_not_specialize=["q_units", "k_units", "g_units", "HV", "group"], do_not_specialize_on_alignment=["beta_ptr"])
def prepare_chunk_kernel(
    q_ptr, k_ptr,  # [R, H, K], rows q_units, k_units apart
    g_ptr,  # [R, HV, K] as given, rows g_units apart
    beta_ptr,  # [R, HV]
    A_log_ptr, dt_bias_ptr,  # [HV], [HV, K] or None
    Aqk_ptr, T_ptr, w_ptr, kg_ptr, qg_ptr, decay_ptr, norms_ptr, cut_ptr,  # as Prepared
    chunks_ptr,  # [NC, 4] int32
    q_units, k_units, g_units, HV, group, scale, lower_bound, shift,
    K: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    h = entry % HV
    first, length = chunk_bounds(chunks_ptr, entry // HV)
    if length <= 0:
        return
    if LEVELS:
        cut = tl.load(cut_ptr + entry)
        if cut >= C:
            return
    hq = h // group
    ANY: tl.constexpr = cut_ptr is not None
    rows = tl.arange(0, C)
    cols = tl.arange(0, K)
    live = rows < length
    q = load_rows(q_ptr, q_units, first, hq, rows, cols, live, K).to(tl.float32)
    k = load_rows(k_ptr, k_units, first, hq, rows, cols, live, K).to(tl.float32)
    x = load_rows(g_ptr, g_units, first, h, rows, cols, live, K).to(tl.float32)
    beta = nonzero_beta(load_beta(beta_ptr + first * HV + h, rows, HV, live, SIGMOID, NEG))
    if dt_bias_ptr is not None:
        x += tl.load(dt_bias_ptr + h * K + cols).to(tl.float32)[None, :]
    bits = tl.where(live[:, None], decay_bits(x, gate_rate(A_log_ptr, h), lower_bound, GATE, ANY), 0.0)
    G = tl.cumsum(bits, axis=0)
    last = tl.sum(bits, 0)
    EPS: tl.constexpr = 1e-6 if L2NORM else 2.0**-40  # a row of zeros has a gradient: its factors must stay in range
    nq = tl.where(live, tl.rsqrt(tl.sum(q * q, 1) + EPS), 0.0)
    nk = tl.where(live, tl.rsqrt(tl.sum(k * k, 1) + EPS), 0.0)
    fq = tl.where(live, scale, 0.0)  # what the normalised rows are multiplied with
    fk = tl.where(live, 1.0, 0.0)
    if not L2NORM:
        fq = tl.where(live, scale / nq, 0.0)
        fk = tl.where(live, 1.0 / nk, 0.0)
    element: tl.constexpr = w_ptr.dtype.element_ty
    k *= nk[:, None]
    N = G
    if ANY:
        N = at_least(G, -2.0 * shift)  # where that is not G, 2^G is zero and the pairs come by levels
        if not LEVELS:
            tl.store(cut_ptr + entry, tl.min(tl.where(tl.min(G, 1) < -2.0 * shift, rows, C), 0))
    up = exp2(N + shift)  # 2^G = up 2^-shift
    kx = rounded(k * up, element)
    mask = None
    if LEVELS:
        mask = rows[:, None] >= cut
        Aqk, L = level_scores(q * nq[:, None], k, G, C, K, element)
        kg = k * exp2(last[None, :] - G)
    else:
        down = exp2(-N - shift)  # 2^(G_C - G) = down 2^(G_C + shift)
        qx = q * nq[:, None] * up  # in this order: up nq may leave the range
        ky = k * down
        kg = ky * exp2(last + shift)[None, :]
        store_tile(qg_ptr, entry, qx * (fq * exp2(-shift))[:, None], None, False)
        tl.store(decay_ptr + entry * K + cols, exp2(last))
        tl.store(norms_ptr + entry * (2 * C) + rows, nq)
        tl.store(norms_ptr + entry * (2 * C) + C + rows, nk)
        ky = tl.trans(rounded(ky, element))
        Aqk = tl.dot(rounded(qx, element), ky)
        L = tl.dot(kx, ky)
    if not L2NORM:
        kg *= fk[:, None]
    store_tile(kg_ptr, entry, kg, None, True)
    r = rows[:, None]
    i = rows[None, :]
    store_tile(Aqk_ptr, entry, tl.where(r >= i, Aqk * fq[:, None] * fk[None, :], 0.0), mask, False)
    X = invert_blocks(tl.where(r > i, L * (beta * fk)[:, None] * fk[None, :], 0.0), C, "tf32x3" if element == tl.float32 else "tf32")
    live_beta = tl.where(live, beta, 0.0)
    T = X * live_beta[None, :]
    high = rounded(T, element)
    square = entry * (2 * C * C) + r * C + i
    tl.store(T_ptr + square, high, mask=mask)
    tl.store(T_ptr + C * C + square, rounded(T - high.to(tl.float32), element), mask=mask)
    # 2^G k = kx 2^-shift; half of that factor now, so that a small beta stays a normal number.
    T = X * (live_beta * fk * -exp2(-0.5 * shift))[None, :]
    high = rounded(T, element)
    w = tl.dot(rounded(T - high.to(tl.float32), element), kx, acc=tl.dot(high, kx)) * exp2(-0.5 * shift)
    store_tile(w_ptr, entry, w, mask, True)


def in_units(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """Tensors [B, T, heads, D] as rows with packed heads, copied where they must be, and units of 16 bytes from row to row."""
    rows, strides = zip(*map(packed_rows, tensors))
    return list(rows), [stride * x.element_size() // 16 for x, stride in zip(rows, strides)]


def tile_dtype(problem: Problem) -> torch.dtype:
    """Of the tiles in memory. fp16 has neither the range of the pair factors nor that of gradients times a loss scale: its tiles are fp32
    rounded to tf32, as fine as fp16."""
    return torch.bfloat16 if problem.dtype == torch.bfloat16 else torch.float32


def half_span(problem: Problem) -> float:
    """Half of the bits that a chunk can decay by, or may before it is cut: `shift` of the pair factors."""
    return 0.5 * (C * 1.4427 * -problem.lower_bound if problem.bounded else SPAN.value)


def prepare_chunks(problem: Problem, plan: Plan, inputs: Inputs) -> Prepared:
    """The tiles of every chunk of a plan with C tokens a chunk; unused rows of the plan's table are not written."""
    HV, K, NC, dtype, device = problem.HV, problem.K, plan.num_chunks, tile_dtype(problem), inputs.q.device
    new = lambda *shape, dtype=dtype: torch.empty(NC, HV, *shape, dtype=dtype, device=device)
    n = 2 if dtype == torch.float32 else 1
    p = Prepared(
        new(C, C), new(2, C, C), new(n * C, K), new(n * C, K), new(C, K), new(K, dtype=torch.float32), new(2, C, dtype=torch.float32),
        None if problem.bounded else new(dtype=torch.int32),
    )  # fmt: skip
    rows, units = in_units(inputs.q, inputs.k, inputs.g)
    operands = (*rows, inputs.beta.contiguous(), contiguous(inputs.A_log), contiguous(inputs.dt_bias), *p, plan.chunks)
    numbers = (*units, HV, problem.group, float(problem.scale), float(problem.lower_bound or 0.0), half_span(problem))
    for levels in ((False,) if problem.bounded else (False, True)) if NC else ():
        constants = (K, C, problem.gate, problem.qk_l2norm, problem.beta_sigmoid, problem.neg_eigval, levels)
        launch(prepare_chunk_kernel, (NC * HV, 1, 1), operands, numbers, constants, registers=168)
    return p
