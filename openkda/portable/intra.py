"""Stage 2: scores of the pairs within a chunk.

    Aqk[r,i] = scale * sum_c q[r,c] k[i,c] 2^(G[r,c] - G[i,c])     i <= r
    L[r,i]   = beta_r * sum_c k[r,c] k[i,c] 2^(G[r,c] - G[i,c])    i <  r

A pair's factor is split about an anchor row a: 2^(G_r - G_a) on the row, 2^(G_a - G_i) on the column, so that the sums become matrix
products of whole [C, BK] tiles under a mask. Which anchor serves a pair:

    level s      r in the odd, i in the even s-rows of one block of 2s; a = last row of the even half. i <= a < r: both factors are at
                 most 1, whatever the gate, and a forgotten key contributes 0.
    matrix       r, i in one block of 16; a = its first row. The column factor may grow to 2^(15 * 5 * log2 e) = 2^108: bounded gates only.

"any" covers a 16-block by levels 1, 2, 4, 8 and the diagonal itself (factor 1, fp32); "matrix" by the matrix group; levels 16 (and 32)
do the rest in both. No anchor lies after a row that it serves, so earlier results never depend on later tokens. An anchor past the end
of the sequence moves to the last live row, which only rows of weight 0 notice.

q and k enter raw. Their L2 norms, scale and beta multiply rows and columns of the [C, C] results in fp32, never the tiles' elements.

Grid (chunk, head); K is walked in blocks of BK. fp32 accumulators: two [C, C].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.plan import Plan
from openkda.portable.config import Config
from openkda.portable.tile import as_rows, chunk_bounds, load_beta, load_tile, nonzero_beta, store_tile
from openkda.problem import Problem


@triton.jit
def level_scores(
    Aqk, Akk, q, k, G, G_ptr, G_row, rows, live, length, cols, S: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, P: tl.constexpr
):
    """Add the pairs of level S to Aqk, Akk [C, C] fp32 (raw sums over the columns of this tile). q, k, G: [C, BK]."""
    anchor = tl.minimum(rows // (2 * S) * (2 * S) + S - 1, length - 1)
    Ga = load_tile(G_ptr, anchor, G_row, cols, live, K, BK)
    odd = (rows // S % 2 == 1)[:, None]
    x = tl.exp2(tl.where(odd, G - Ga, Ga - G))  # dead rows have q = k = G = Ga = 0
    kx = k.to(tl.float32) * x
    rq = tl.where(odd, q.to(tl.float32) * x, 0.0).to(q.dtype)
    rk = tl.where(odd, kx, 0.0).to(k.dtype)
    ck = tl.trans(tl.where(odd, 0.0, kx).to(k.dtype))
    same = (rows // (2 * S))[:, None] == (rows // (2 * S))[None, :]
    Aqk += tl.where(same, tl.dot(rq, ck, input_precision=P), 0.0)
    Akk += tl.where(same, tl.dot(rk, ck, input_precision=P), 0.0)
    return Aqk, Akk


@triton.jit
def matrix_scores(Aqk, Akk, q, k, G, G_ptr, G_row, rows, live, cols, K: tl.constexpr, BK: tl.constexpr, P: tl.constexpr):
    """Add the pairs within blocks of 16 about the block's first row. The lower-triangular mask is the caller's."""
    Ga = load_tile(G_ptr, rows // 16 * 16, G_row, cols, live, K, BK)
    x = tl.exp2(G - Ga)
    y = tl.exp2(Ga - G)
    kf = k.to(tl.float32)
    ck = tl.trans((kf * y).to(k.dtype))
    same = (rows // 16)[:, None] == (rows // 16)[None, :]
    Aqk += tl.where(same, tl.dot((q.to(tl.float32) * x).to(q.dtype), ck, input_precision=P), 0.0)
    Akk += tl.where(same, tl.dot((kf * x).to(k.dtype), ck, input_precision=P), 0.0)
    return Aqk, Akk


@triton.jit
def chunk_scores(
    q_ptr, k_ptr, G_ptr, q_row, k_row, G_row, rows, live, length, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    DIAGONAL: tl.constexpr, OFFDIAGONAL: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Raw scores of one chunk: Aqk, Akk [C, C] fp32 (not yet scaled; Akk strictly lower), and the row sums q.q, k.k, [C] each.

    DIAGONAL: "any", "matrix" or "" for the 16-blocks on the diagonal; OFFDIAGONAL adds the rest."""
    Aqk = tl.zeros([C, C], tl.float32)
    Akk = tl.zeros([C, C], tl.float32)
    qq = tl.zeros([C], tl.float32)
    kk = tl.zeros([C], tl.float32)
    qk = tl.zeros([C], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        cols = k0 + tl.arange(0, BK)
        q = load_tile(q_ptr, rows, q_row, cols, live, K, BK)
        k = load_tile(k_ptr, rows, k_row, cols, live, K, BK)
        G = load_tile(G_ptr, rows, G_row, cols, live, K, BK)
        qf = q.to(tl.float32)
        kf = k.to(tl.float32)
        qq += tl.sum(qf * qf, 1)
        kk += tl.sum(kf * kf, 1)
        if DIAGONAL == "any":
            qk += tl.sum(qf * kf, 1)
            Aqk, Akk = level_scores(Aqk, Akk, q, k, G, G_ptr, G_row, rows, live, length, cols, 1, K, BK, P)
            Aqk, Akk = level_scores(Aqk, Akk, q, k, G, G_ptr, G_row, rows, live, length, cols, 2, K, BK, P)
            Aqk, Akk = level_scores(Aqk, Akk, q, k, G, G_ptr, G_row, rows, live, length, cols, 4, K, BK, P)
            Aqk, Akk = level_scores(Aqk, Akk, q, k, G, G_ptr, G_row, rows, live, length, cols, 8, K, BK, P)
        if DIAGONAL == "matrix":
            Aqk, Akk = matrix_scores(Aqk, Akk, q, k, G, G_ptr, G_row, rows, live, cols, K, BK, P)
        if OFFDIAGONAL:
            Aqk, Akk = level_scores(Aqk, Akk, q, k, G, G_ptr, G_row, rows, live, length, cols, 16, K, BK, P)
            if C == 64:
                Aqk, Akk = level_scores(Aqk, Akk, q, k, G, G_ptr, G_row, rows, live, length, cols, 32, K, BK, P)
    r = rows[:, None]
    i = rows[None, :]
    if DIAGONAL == "any":
        Aqk = tl.where(r == i, qk[:, None], Aqk)
    return tl.where(r >= i, Aqk, 0.0), tl.where(r > i, Akk, 0.0), qq, kk


@triton.jit
def norm_factor(xx, live, L2NORM: tl.constexpr):
    """[C] row factor of the optional L2 norm, from the rows' sums of squares; 0 on dead rows."""
    if L2NORM:
        return tl.where(live, tl.rsqrt(xx + 1e-6), 0.0)
    else:
        return tl.where(live, 1.0, 0.0)


@triton.jit
def intra_kernel(
    q_ptr, k_ptr,  # [R, H, K]
    G_ptr,  # [R, HV, K] fp32
    beta_ptr,  # [R, HV]
    Aqk_ptr, L_ptr,  # [R, HV, C] fp32
    chunks_ptr,  # [NC, 4] int32
    q_row, q_head, k_row, k_head, beta_row,
    scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG: tl.constexpr, DIAGONAL: tl.constexpr, OFFDIAGONAL: tl.constexpr,
    NONZERO: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    hq = h // (HV // H)
    first, length = chunk_bounds(chunks_ptr, tl.program_id(0))
    if length <= 0:
        return
    rows = tl.arange(0, C)
    live = rows < length
    Aqk, Akk, qq, kk = chunk_scores(
        q_ptr + first * q_row + hq * q_head, k_ptr + first * k_row + hq * k_head, G_ptr + (first * HV + h) * K,
        q_row, k_row, HV * K, rows, live, length, K, C, BK, DIAGONAL, OFFDIAGONAL, P, STAGES,
    )  # fmt: skip
    rk = norm_factor(kk, live, L2NORM)
    beta = load_beta(beta_ptr + first * beta_row + h, rows, beta_row, live, SIGMOID, NEG)
    if NONZERO:
        beta = nonzero_beta(beta)
    Aqk *= (norm_factor(qq, live, L2NORM) * scale)[:, None] * rk[None, :]
    L = Akk * (beta * rk)[:, None] * rk[None, :]
    Aqk_ptr += (first * HV + h) * C
    L_ptr += (first * HV + h) * C
    if DIAGONAL == "":
        Aqk += load_tile(Aqk_ptr, rows, HV * C, rows, live, C, C)
        L += load_tile(L_ptr, rows, HV * C, rows, live, C, C)
    store_tile(Aqk_ptr, Aqk, rows, HV * C, rows, live, C, C)
    store_tile(L_ptr, L, rows, HV * C, rows, live, C, C)


def launch_intra(
    problem: Problem, config: Config, plan: Plan, q: torch.Tensor, k: torch.Tensor, G: torch.Tensor, beta: torch.Tensor,
    Aqk: torch.Tensor, L: torch.Tensor, *, diagonal: str, offdiagonal: bool, nonzero: bool = False,
) -> None:  # fmt: skip
    """Run `intra_kernel` for one of the two groups of pairs (or both); nonzero: with |beta| at least 2^-30, for the backward."""
    q, k, beta = as_rows(q), as_rows(k), as_rows(beta)
    if q.shape[0] == 0 or plan.num_chunks == 0:
        return
    intra_kernel[(plan.num_chunks, problem.HV)](
        q, k, G, beta, Aqk, L, plan.chunks, q.stride(0), q.stride(1), k.stride(0), k.stride(1), beta.stride(0), float(problem.scale),
        H=problem.H, HV=problem.HV, K=problem.K, C=plan.chunk_size, BK=config.block_k, L2NORM=problem.qk_l2norm,
        SIGMOID=problem.beta_sigmoid, NEG=problem.neg_eigval, DIAGONAL=diagonal, OFFDIAGONAL=offdiagonal, NONZERO=nonzero,
        P=config.precision, STAGES=config.intra_stages, num_warps=config.intra_warps,
    )  # fmt: skip


def intra_diagonal(
    problem: Problem, config: Config, plan: Plan, q: torch.Tensor, k: torch.Tensor, G: torch.Tensor, beta: torch.Tensor, *, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores within the 16-blocks on the diagonal of each chunk, zero elsewhere.

    Args: q, k [B, T, H, K]; G [B, T, HV, K] fp32 from gate_cumsum; beta [B, T, HV]; form "any" or "matrix" (bounded gates only).
    Returns: Aqk, L [B, T, HV, C] fp32."""
    if form not in ("any", "matrix"):
        raise ValueError(f'form is {form!r}; it must be "any" or "matrix"')
    B, T, HV, _ = G.shape
    Aqk = torch.empty(B, T, HV, plan.chunk_size, dtype=torch.float32, device=q.device)
    L = torch.empty_like(Aqk)
    launch_intra(problem, config, plan, q, k, G, beta, Aqk, L, diagonal=form, offdiagonal=False)
    return Aqk, L


def intra_offdiagonal(
    problem: Problem, config: Config, plan: Plan, q: torch.Tensor, k: torch.Tensor, G: torch.Tensor, beta: torch.Tensor,
    Aqk: torch.Tensor, L: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Add the scores below the diagonal 16-blocks to Aqk, L [B, T, HV, C] fp32, in place, and return them."""
    launch_intra(problem, config, plan, q, k, G, beta, Aqk, L, diagonal="", offdiagonal=True)
    return Aqk, L
