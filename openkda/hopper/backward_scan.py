"""The two scans over chunks, forward for the states and in reverse for their gradients (steps: backward_steps.py).

Grid (2 V / BV, head, segment): half of the blocks scan forward, half in reverse; neither needs the other. A segment is a sequence, or a
part of one where sequences and heads alone do not fill the chip (backward_config.py decides, backward_segments.py finds the states at which
parts begin)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.hopper.backward_config import Scans
from openkda.hopper.backward_prepare import C, Prepared
from openkda.hopper.backward_segments import segment_states, segment_table
from openkda.hopper.backward_steps import forward_steps, locate, reverse_steps, state_offsets
from openkda.hopper.launch import dense, packed_rows
from openkda.hopper.runtime import launch
from openkda.plan import Plan
from openkda.problem import Inputs, Problem

BLOCK_V = 64  # rows of V per block: one warpgroup's product
STAGES = {torch.bfloat16: 4, torch.float32: 2}  # chunks in flight, by the dtype of the tiles


@triton.jit
def begin(state_ptr, at_end, inner_ptr, s, n, h, vv, kk, HV, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Where a scan begins: at an end of its sequence the state given there or zero, else the segment's own."""
    S = tl.zeros([vv.shape[0], K], tl.float32)
    if state_ptr is not None:
        S = tl.load(state_ptr + state_offsets(n, h, vv, kk, HV, K, V, V_FIRST), mask=at_end, other=0.0).to(tl.float32)
    if inner_ptr is not None:
        S += tl.load(inner_ptr + (s.to(tl.int64) * HV + h) * (K * V) + vv[:, None] * K + kk[None, :], mask=~at_end, other=0.0)
    return S


@triton.jit(do_not_specialize=["v_eights", "do_eights", "HV"])
def scans_kernel(
    Aqk_ptr, T_ptr, w_ptr, kg_ptr, qg_ptr, decay_ptr,  # as Prepared
    v_ptr, do_ptr,  # [R, HV, V], rows 8 v_eights and 8 do_eights elements apart
    S0_ptr, dS_final_ptr,  # [N, HV, K, V] or None
    entry_ptr, exit_ptr,  # [NS, HV, V, K] fp32 where sequences are cut, else None
    h_ptr, dh_ptr,  # [NC, HV, V, K]: entry states, gradients of exit states
    r_ptr, dr_ptr,  # [NC, HV, V, C]
    dv_ptr,  # [R, HV, V], or None; dr_ptr may be None too
    dS0_ptr,  # [N, HV, K, V] or None
    segments_ptr,  # [NS, 8] int32
    sequences_ptr,  # [N, 4] int32
    v_eights, do_eights, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    s = tl.program_id(2)
    n, first, length, chunk, count, is_first, is_last = locate(segments_ptr, sequences_ptr, s, C)
    if n < 0:
        return
    kk = tl.arange(0, K)
    if block < V // BV:
        vv = block * BV + tl.arange(0, BV)
        dS = begin(dS_final_ptr, is_last, exit_ptr, s, n, h, vv, kk, HV, K, V, V_FIRST)
        dS = reverse_steps(
            dS, Aqk_ptr, T_ptr, w_ptr, kg_ptr, qg_ptr, decay_ptr, do_ptr, 8 * do_eights, dh_ptr, dr_ptr, dv_ptr, first, length, chunk,
            count, h, vv, HV, K, V, C, BV, STAGES,
        )  # fmt: skip
        if dS0_ptr is not None:
            tl.store(dS0_ptr + state_offsets(n, h, vv, kk, HV, K, V, V_FIRST), dS.to(dS0_ptr.dtype.element_ty), mask=is_first)
    elif TOKENS:
        vv = (block - V // BV) * BV + tl.arange(0, BV)
        S = begin(S0_ptr, is_first, entry_ptr, s, n, h, vv, kk, HV, K, V, V_FIRST)
        forward_steps(
            S, T_ptr, w_ptr, kg_ptr, decay_ptr, v_ptr, 8 * v_eights, h_ptr, r_ptr, first, length, chunk, count, h, vv, HV, K, V, C, BV,
            STAGES,
        )  # fmt: skip


def both_scans(
    problem: Problem, plan: Plan, inputs: Inputs, p: Prepared, do: torch.Tensor, dfinal_state: torch.Tensor | None, *, tokens: bool,
    initial_state: bool, scans: Scans, dv: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The states of every chunk and their gradients.

    Args: do [B, T, HV, V]; dfinal_state (problem.state_shape) or None for zero. tokens: return what token gradients need; initial_state:
    return its gradient; scans: how to run; dv [B, T, HV, V], contiguous: filled with the gradient of v, in place of dr.
    Returns: h, dh [NC, HV, V, K] (entry states, gradients of exit states), r, dr [NC, HV, V, C], all in w's dtype; dS0
    (problem.state_shape, state_dtype); None where not asked for."""
    HV, K, V, NC = problem.HV, problem.K, problem.V, plan.num_chunks
    new = lambda *shape: torch.empty(NC, HV, *shape, dtype=p.w.dtype, device=do.device) if tokens else None
    h, dh, r, dr = new(V, K), new(V, K), new(V, C), new(V, C) if dv is None else None
    dS0 = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=do.device) if initial_state else None
    (v, v_row), (do, do_row) = packed_rows(inputs.v), packed_rows(do)
    S0, dS_final = (None if x is None else dense(x) for x in (inputs.initial_state, dfinal_state))
    table = segment_table(problem, inputs, scans.steps)
    if NS := len(table.segments):
        entry = exit_ = None
        if scans.steps:
            entry, exit_ = segment_states(problem, plan, table, scans.tail, p, v, v_row, S0, do, do_row, dS_final, tokens)
        operands = (*p[:6], v, do, S0, dS_final, entry, exit_, h, dh, r, dr, dv, dS0, table.segments, plan.sequences)
        grid = ((2 if tokens else 1) * V // BLOCK_V, HV, NS)
        constants = (K, V, C, BLOCK_V, problem.state_v_first, tokens, STAGES[p.w.dtype])
        launch(scans_kernel, grid, operands, (v_row // 8, do_row // 8, HV), constants)
    return h, dh, r, dr, dS0
