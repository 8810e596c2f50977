"""The two scans over chunks, both with the state transposed, [rows of V, K], in fp32 accumulators (docs/backward.md, (1) and (4)).

    forward, from the first chunk      r = v T^T + S w^T                 S = S Diag(decay) + r kg               (w is negative)
    reverse, from the last             dr = do Aqk + dS kg^T             dS = dS Diag(decay) + do qg + dr w      dv = dr T

with v, do, r, dr transposed too, [rows of V, C]. An accumulator then turns into the next product's left operand without leaving its
registers; the right operands are the tiles of backward_prepare.py as they lie in shared memory, and v and do are transposed by the matrix
unit. What flows through dS of one row of V needs no other row, so V is split over blocks.

Grid (2 V / BV, head, sequence): half of the blocks scan forward, half in reverse; neither needs the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.hopper.backward_prepare import C, Prepared
from openkda.plan import Plan
from openkda.portable.backward_inputs import store_channels
from openkda.portable.tile import as_rows, contiguous, load_tile, sequence_bounds
from openkda.problem import Problem

BLOCK_V = 64  # rows of V per block: one warpgroup's product
STAGES = 4  # chunks in flight


@triton.jit
def state_offsets(n, h, vv, kk, HV, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Offsets [rows of V, K] into a state [N, HV, K, V], or [N, HV, V, K] when V_FIRST."""
    base = (n * HV + h) * (K * V)
    if V_FIRST:
        return base + vv[:, None] * K + kk[None, :]
    else:
        return base + kk[None, :] * V + vv[:, None]


@triton.jit
def forward_steps(
    T_ptr, w_ptr, kg_ptr, decay_ptr, v_ptr, v_row, v_head, S0_ptr, h_ptr, r_ptr, first, length, chunk, count, n, h, vv, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write every chunk's entry state and r."""
    rows = tl.arange(0, C)
    kk = tl.arange(0, K)
    tile = rows[:, None] * K + kk[None, :]
    square = rows[:, None] * C + rows[None, :]
    S = tl.zeros([BV, K], tl.float32)
    if S0_ptr is not None:
        S = tl.load(S0_ptr + state_offsets(n, h, vv, kk, HV, K, V, V_FIRST)).to(tl.float32)
    for c in tl.range(0, count, num_stages=STAGES):
        entry = (chunk + c) * HV + h
        v = load_tile(v_ptr + (first + c * C) * v_row + h * v_head, rows, v_row, vv, rows < length - c * C, V, BV)
        T = tl.load(T_ptr + entry * (2 * C * C) + square)
        rest = tl.load(T_ptr + entry * (2 * C * C) + C * C + square)
        w = tl.load(w_ptr + entry * (C * K) + tile)
        kg = tl.load(kg_ptr + entry * (C * K) + tile)
        decay = tl.load(decay_ptr + entry * K + kk)
        Sb = S.to(w.dtype)
        tl.store(h_ptr + entry * (K * V) + vv[:, None] * K + kk[None, :], Sb)
        r = tl.dot(tl.trans(v), tl.trans(rest), acc=tl.dot(tl.trans(v), tl.trans(T)))
        r = tl.dot(Sb, tl.trans(w), acc=r).to(w.dtype)
        tl.store(r_ptr + entry * (C * V) + vv[:, None] * C + rows[None, :], r)
        S = tl.dot(r, kg, acc=S * decay[None, :])


@triton.jit
def reverse_steps(
    Aqk_ptr, T_ptr, w_ptr, kg_ptr, qg_ptr, decay_ptr, do_ptr, do_row, do_head, dS_final_ptr, dh_ptr, dr_ptr, dv_ptr, dS0_ptr, first, length,
    chunk, count, n, h, vv, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of every chunk's exit state, dr or dv, and the gradient of the initial state."""
    rows = tl.arange(0, C)
    kk = tl.arange(0, K)
    tile = rows[:, None] * K + kk[None, :]
    square = rows[:, None] * C + rows[None, :]
    state = state_offsets(n, h, vv, kk, HV, K, V, V_FIRST)
    dS = tl.zeros([BV, K], tl.float32)
    if dS_final_ptr is not None:
        dS = tl.load(dS_final_ptr + state).to(tl.float32)
    for back in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - back
        entry = (chunk + c) * HV + h
        do = load_tile(do_ptr + (first + c * C) * do_row + h * do_head, rows, do_row, vv, rows < length - c * C, V, BV)
        Aqk = tl.load(Aqk_ptr + entry * (C * C) + square)
        kg = tl.load(kg_ptr + entry * (C * K) + tile)
        qg = tl.load(qg_ptr + entry * (C * K) + tile)
        w = tl.load(w_ptr + entry * (C * K) + tile)
        decay = tl.load(decay_ptr + entry * K + kk)
        dSb = dS.to(w.dtype)
        if dh_ptr is not None:
            tl.store(dh_ptr + entry * (K * V) + vv[:, None] * K + kk[None, :], dSb)
        dr = tl.dot(tl.trans(do), Aqk)
        dr = tl.dot(dSb, tl.trans(kg), acc=dr).to(w.dtype)
        if dr_ptr is not None:
            tl.store(dr_ptr + entry * (C * V) + vv[:, None] * C + rows[None, :], dr)
        if dv_ptr is not None:
            T = tl.load(T_ptr + entry * (2 * C * C) + square)
            rest = tl.load(T_ptr + entry * (2 * C * C) + C * C + square)
            dv = tl.dot(dr, rest, acc=tl.dot(dr, T))
            store_channels(dv_ptr + ((first + c * C) * HV + h) * V, dv, rows, HV * V, vv, rows < length - c * C, V, BV)
        dS = tl.dot(tl.trans(do), qg, acc=dS * decay[None, :])
        dS = tl.dot(dr, w, acc=dS)
    if dS0_ptr is not None:
        tl.store(dS0_ptr + state, dS.to(dS0_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["HV"])
def scans_kernel(
    Aqk_ptr, T_ptr, w_ptr, kg_ptr, qg_ptr, decay_ptr,  # as Prepared
    v_ptr, do_ptr,  # [R, HV, V], row strides v_row, do_row, head strides v_head, do_head
    S0_ptr, dS_final_ptr,  # [N, HV, K, V] or None
    h_ptr, dh_ptr,  # [NC, HV, V, K]: entry states, gradients of exit states
    r_ptr, dr_ptr,  # [NC, HV, V, C]
    dv_ptr,  # [R, HV, V], or None; dr_ptr may be None too
    dS0_ptr,  # [N, HV, K, V] or None
    sequences_ptr,  # [N, 4] int32
    v_row, v_head, do_row, do_head, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    first, length, chunk, count = sequence_bounds(sequences_ptr, n)
    block = tl.program_id(0)
    if block < V // BV:
        vv = block * BV + tl.arange(0, BV)
        reverse_steps(
            Aqk_ptr, T_ptr, w_ptr, kg_ptr, qg_ptr, decay_ptr, do_ptr, do_row, do_head, dS_final_ptr, dh_ptr, dr_ptr, dv_ptr, dS0_ptr, first,
            length, chunk, count, n, h, vv, HV, K, V, C, BV, V_FIRST, STAGES,
        )  # fmt: skip
    elif TOKENS:
        vv = (block - V // BV) * BV + tl.arange(0, BV)
        forward_steps(
            T_ptr, w_ptr, kg_ptr, decay_ptr, v_ptr, v_row, v_head, S0_ptr, h_ptr, r_ptr, first, length, chunk, count, n, h, vv, HV, K, V, C,
            BV, V_FIRST, STAGES,
        )  # fmt: skip


def both_scans(
    problem: Problem, plan: Plan, p: Prepared, v: torch.Tensor, S0: torch.Tensor | None, do: torch.Tensor,
    dfinal_state: torch.Tensor | None, *, tokens: bool, initial_state: bool, dv: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The states of every chunk and their gradients.

    Args: v, do [B, T, HV, V]; S0, dfinal_state (problem.state_shape) or None for zero. tokens: return what token gradients need;
    initial_state: return its gradient; dv [B, T, HV, V], contiguous: filled with the gradient of v, in place of dr.
    Returns: h, dh [NC, HV, V, K] (entry states, gradients of exit states), r, dr [NC, HV, V, C], all bf16; dS0 (problem.state_shape,
    state_dtype); None where not asked for."""
    HV, K, V, N, NC = problem.HV, problem.K, problem.V, plan.sequences.shape[0], plan.num_chunks
    new = lambda *shape: torch.empty(NC, HV, *shape, dtype=problem.dtype, device=v.device) if tokens else None
    h, dh, r, dr = new(V, K), new(V, K), new(V, C), new(V, C) if dv is None else None
    dS0 = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=v.device) if initial_state else None
    v, do = as_rows(v), as_rows(do)
    if N:
        scans_kernel[((2 if tokens else 1) * V // BLOCK_V, HV, N)](
            *p[:6], v, do, contiguous(S0), contiguous(dfinal_state), h, dh, r, dr, dv, dS0, plan.sequences, v.stride(0), v.stride(1),
            do.stride(0), do.stride(1), HV, K=K, V=V, C=C, BV=BLOCK_V, V_FIRST=problem.state_v_first, TOKENS=tokens, STAGES=STAGES,
            num_warps=4,
        )  # fmt: skip
    return h, dh, r, dr, dS0
