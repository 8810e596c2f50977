"""Stage 4: the WY form of a chunk, and `prepare`, which chains stages 2 to 4.

    w  = Linv (beta * 2^G * k)      [C, K]
    u  = Linv (beta * v)            [C, V]
    kg = 2^(G_C - G) * k            [C, K]
    qg = scale * 2^G * q            [C, K]

beta and the L2 norm of k multiply the columns of Linv in fp32; the matrix products then take v as given and 2^G * k rounded once.

Grid (chunk, head), K and V walked in blocks.

`prepare` runs stages 2 to 4 as three kernels. One kernel for all of them reads q, k and G once, but holds 190 to 255 registers, so that 8
warps per multiprocessor wait for each other's loads and barriers: 937 us on an H200 for T = 8192, H = 64, K = V = 128 (1 warp a chunk).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.plan import Plan
from openkda.portable.config import Config
from openkda.portable.intra import launch_intra, norm_factor
from openkda.portable.solve import invert_in_place
from openkda.portable.tile import as_rows, chunk_bounds, load_beta, load_tile, load_vector, nonzero_beta, store_tile
from openkda.problem import Problem


@triton.jit
def write_wy(
    T,  # [C, C] fp32, the inverse with its columns scaled by beta
    rq, rk,  # [C] fp32 row factors of q (with scale) and k
    q_ptr, k_ptr, v_ptr, G_ptr, w_ptr, u_ptr, kg_ptr, qg_ptr,  # at the chunk's first row and head
    q_row, k_row, v_row, rows, live, length,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Form and store w, kg, qg [C, K] and u [C, V]."""
    Tk = (T * rk[None, :]).to(k_ptr.dtype.element_ty)
    for v0 in tl.range(0, V, BV, num_stages=1):
        cols = v0 + tl.arange(0, BV)
        v = load_tile(v_ptr, rows, v_row, cols, live, V, BV)
        store_tile(u_ptr, tl.dot(T.to(v.dtype), v, input_precision=P), rows, HV * V, cols, live, V, BV)
    for k0 in tl.range(0, K, BK, num_stages=1):
        cols = k0 + tl.arange(0, BK)
        q = load_tile(q_ptr, rows, q_row, cols, live, K, BK)
        k = load_tile(k_ptr, rows, k_row, cols, live, K, BK)
        G = load_tile(G_ptr, rows, HV * K, cols, live, K, BK)
        last = load_vector(G_ptr + (length - 1) * (HV * K), cols, K, BK)[None, :]
        kf = k.to(tl.float32)
        x = tl.exp2(G)
        w = tl.dot(Tk, (kf * x).to(k.dtype), input_precision=P)
        store_tile(w_ptr, w, rows, HV * K, cols, live, K, BK)
        kg = kf * rk[:, None] * tl.exp2(tl.where(live[:, None], last - G, 0.0))
        store_tile(kg_ptr, kg, rows, HV * K, cols, live, K, BK)
        store_tile(qg_ptr, q.to(tl.float32) * rq[:, None] * x, rows, HV * K, cols, live, K, BK)


@triton.jit
def wy_kernel(
    q_ptr, k_ptr, v_ptr,  # [R, H, K], [R, H, K], [R, HV, V]
    G_ptr,  # [R, HV, K] fp32
    beta_ptr,  # [R, HV]
    Linv_ptr,  # [R, HV, C] fp32
    w_ptr, u_ptr, kg_ptr, qg_ptr,  # [R, HV, K or V]
    T_ptr, factors_ptr,  # [R, HV, C], [R, HV, 4] fp32; None unless the backward asks
    chunks_ptr,  # [NC, 4] int32
    q_row, q_head, k_row, k_head, v_row, v_head, beta_row,
    scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L2NORM: tl.constexpr, SIGMOID: tl.constexpr, NEG: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    hq = h // (HV // H)
    first, length = chunk_bounds(chunks_ptr, tl.program_id(0))
    if length <= 0:
        return
    rows = tl.arange(0, C)
    live = rows < length
    q_ptr += first * q_row + hq * q_head
    k_ptr += first * k_row + hq * k_head
    qq = tl.zeros([C], tl.float32)
    kk = tl.zeros([C], tl.float32)
    if L2NORM:
        for k0 in tl.range(0, K, BK, num_stages=1):
            cols = k0 + tl.arange(0, BK)
            q = load_tile(q_ptr, rows, q_row, cols, live, K, BK).to(tl.float32)
            k = load_tile(k_ptr, rows, k_row, cols, live, K, BK).to(tl.float32)
            qq += tl.sum(q * q, 1)
            kk += tl.sum(k * k, 1)
    rk = norm_factor(kk, live, L2NORM)
    beta = load_beta(beta_ptr + first * beta_row + h, rows, beta_row, live, SIGMOID, NEG)
    at = first * HV + h
    if T_ptr is not None:
        beta = nonzero_beta(beta)
    T = load_tile(Linv_ptr + at * C, rows, HV * C, rows, live, C, C) * beta[None, :]
    rq = norm_factor(qq, live, L2NORM)
    if T_ptr is not None:
        store_tile(T_ptr + at * C, T, rows, HV * C, rows, live, C, C)
        factors_ptr += at * 4 + rows * (HV * 4)
        tl.store(factors_ptr, rq, mask=live)
        tl.store(factors_ptr + 1, rk, mask=live)
    write_wy(
        T, rq * scale, rk,
        q_ptr, k_ptr, v_ptr + first * v_row + h * v_head, G_ptr + at * K, w_ptr + at * K, u_ptr + at * V, kg_ptr + at * K, qg_ptr + at * K,
        q_row, k_row, v_row, rows, live, length, HV, K, V, BK, BV, P,
    )  # fmt: skip


def wy(
    problem: Problem, config: Config, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, G: torch.Tensor, beta: torch.Tensor,
    Linv: torch.Tensor, T: torch.Tensor | None = None, factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The WY form of every chunk.

    Args: q, k [B, T, H, K]; v [B, T, HV, V]; G [B, T, HV, K] fp32; beta [B, T, HV]; Linv [B, T, HV, C] fp32. For the backward, also
    written: T [B, T, HV, C] = Linv Diag(beta) in its own dtype, with |beta| at least 2^-30; the L2 norms' row factors of q and k in the
    first two of factors [B, T, HV, 4] fp32.
    Returns: w [B, T, HV, K], u [B, T, HV, V], kg, qg [B, T, HV, K] in q's dtype (qg holds scale)."""
    w, u, kg, qg = empty_wy(problem, v)
    q, k, v, beta = as_rows(q), as_rows(k), as_rows(v), as_rows(beta)
    if q.shape[0] and plan.num_chunks:
        wy_kernel[(plan.num_chunks, problem.HV)](
            q, k, v, G, beta, Linv, w, u, kg, qg, T, factors, plan.chunks, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0),
            v.stride(1), beta.stride(0), float(problem.scale), H=problem.H, HV=problem.HV, K=problem.K, V=problem.V, C=plan.chunk_size,
            BK=config.wy_block, BV=config.wy_block, L2NORM=problem.qk_l2norm, SIGMOID=problem.beta_sigmoid, NEG=problem.neg_eigval,
            P=config.precision, num_warps=config.wy_warps,
        )  # fmt: skip
    return w, u, kg, qg


def prepare(
    problem: Problem, config: Config, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, G: torch.Tensor, beta: torch.Tensor,
    T: torch.Tensor | None = None, factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Scores, inverse and WY form of every chunk: stages 2 to 4 in three kernels.

    Args: as `wy`, without Linv.
    Returns: Aqk [B, T, HV, C], w [B, T, HV, K], u [B, T, HV, V], kg, qg [B, T, HV, K], all in q's dtype."""
    Aqk = torch.empty(*v.shape[:3], plan.chunk_size, dtype=v.dtype, device=v.device)
    L = torch.empty(Aqk.shape, dtype=torch.float32, device=v.device)
    launch_intra(problem, config, plan, q, k, G, beta, Aqk, L, diagonal=config.form, offdiagonal=True, nonzero=T is not None)
    invert_in_place(config, plan, L)
    return Aqk, *wy(problem, config, plan, q, k, v, G, beta, L, T, factors)


def empty_wy(problem: Problem, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unwritten w, u, kg, qg for v [B, T, HV, V]."""
    of_k = (*v.shape[:3], problem.K)
    w, kg, qg = (torch.empty(of_k, dtype=v.dtype, device=v.device) for _ in range(3))
    return w, torch.empty(v.shape, dtype=v.dtype, device=v.device), kg, qg
