"""Reverse scan: the gradient of the state, serial over the chunks of a sequence from the last to the first (docs/backward.md).

    dr  = Aqk^T do + kg dS'                      gradient of r = u - w S
    dS  = Diag(2^G_C) dS' + qg^T do - w^T dr     dS': gradient of the chunk's exit state, dS: of its entry state

Grid: one program per (block of BV value columns, head, sequence), flat. dS [K, BV] lives in fp32 registers, in blocks of KB keys;
products take it rounded to the inputs' dtype, and that rounded tile is what leaves as dh, so that all later sums use the very numbers that
entered dr. Starts from the gradient of the final state, or zero; ends as the gradient of the initial state. A sequence without tokens hands
the one to the other.

The reverse scan needs nothing of the forward scan (state.py) that the backward recomputes: `both_scans` runs the two in one launch, side by
side, because each alone is a chain of dependent steps that leaves most of the device idle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.plan import Plan
from openkda.portable.backward_config import BackwardConfig
from openkda.portable.config import pad
from openkda.portable.state import scan_kernel, state_pointers, store_state
from openkda.portable.tile import as_rows, contiguous, load_tile, load_vector, place, sequence_bounds, store_tile, tile_mask
from openkda.problem import Problem


@triton.jit
def reverse_steps(
    w_ptr, kg_ptr, qg_ptr,  # [R, HV, K]
    G_ptr,  # [R, HV, K] fp32
    Aqk_ptr,  # [R, HV, C]
    do_ptr,  # [R, HV, V], row stride do_row, head stride do_head
    dS_final_ptr,  # [N, HV, K, V] or None
    dh_ptr, dr_ptr,  # [NC, HV, K, V], [R, HV, V]; None unless asked
    dS0_ptr,  # [N, HV, K, V] or None
    sequences_ptr,  # [N, 4] int32
    block, h, n,  # which block of value columns, head and sequence
    do_row, do_head,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first, length, chunk, count = sequence_bounds(sequences_ptr, n)
    rows = tl.arange(0, C)
    vv = block * BV + tl.arange(0, BV)
    dS = ()
    for j in tl.static_range(KP // KB):
        kk = j * KB + tl.arange(0, KB)
        part = tl.zeros([KB, BV], tl.float32)
        if dS_final_ptr is not None:
            pointers = state_pointers(dS_final_ptr, n, HV, h, kk, vv, K, V, V_FIRST)
            part = tl.load(pointers, mask=tile_mask(kk < K, vv, V, BV), other=0.0).to(tl.float32)
        dS = dS + (part,)  # noqa: RUF005

    for back in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - back
        token = first + c * C
        at = token * HV + h
        live = rows < length - c * C
        last = tl.minimum(length - c * C, C) - 1
        do = load_tile(do_ptr + token * do_row + h * do_head, rows, do_row, vv, live, V, BV)
        Aqk = load_tile(Aqk_ptr + at * C, rows, HV * C, rows, live, C, C)
        if dh_ptr is not None:
            store_state(dh_ptr, dS, chunk + c, HV, h, vv, K, V, KP, KB, BV, False)
        dr = tl.dot(tl.trans(Aqk), do, input_precision=P)
        for j in tl.static_range(KP // KB):
            kk = j * KB + tl.arange(0, KB)
            kg = load_tile(kg_ptr + at * K, rows, HV * K, kk, live, K, KB)
            dr = tl.dot(kg, dS[j].to(kg.dtype), acc=dr, input_precision=P)
        if dr_ptr is not None:
            store_tile(dr_ptr + at * V, dr, rows, HV * V, vv, live, V, BV)
        erased = (-dr).to(do.dtype)
        entry = ()
        for j in tl.static_range(KP // KB):
            kk = j * KB + tl.arange(0, KB)
            qg = load_tile(qg_ptr + at * K, rows, HV * K, kk, live, K, KB)
            w = load_tile(w_ptr + at * K, rows, HV * K, kk, live, K, KB)
            decay = tl.exp2(load_vector(G_ptr + at * K + last * (HV * K), kk, K, KB))
            part = tl.dot(tl.trans(qg), do, acc=dS[j] * decay[:, None], input_precision=P)
            entry = entry + (tl.dot(tl.trans(w), erased, acc=part, input_precision=P),)  # noqa: RUF005
        dS = entry

    if dS0_ptr is not None:
        store_state(dS0_ptr, dS, n, HV, h, vv, K, V, KP, KB, BV, V_FIRST)


@triton.jit
def reverse_scan_kernel(
    w_ptr, kg_ptr, qg_ptr, G_ptr, Aqk_ptr, do_ptr, dS_final_ptr, dh_ptr, dr_ptr, dS0_ptr, sequences_ptr, do_row, do_head,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block, h, n = place((V + BV - 1) // BV, HV)
    reverse_steps(
        w_ptr, kg_ptr, qg_ptr, G_ptr, Aqk_ptr, do_ptr, dS_final_ptr, dh_ptr, dr_ptr, dS0_ptr, sequences_ptr, block, h, n, do_row,
        do_head, HV, K, V, C, KP, KB, BV, V_FIRST, P, STAGES,
    )  # fmt: skip


@triton.jit
def both_scans_kernel(
    w_ptr, kg_ptr, qg_ptr, u_ptr, G_ptr, Aqk_ptr, do_ptr, S0_ptr, dS_final_ptr, h_ptr, r_ptr, dh_ptr, dr_ptr, dS0_ptr, sequences_ptr,
    do_row, do_head,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (V + BV - 1) // BV
    block, h, n = place(2 * blocks, HV)
    if block < blocks:
        scan_kernel(
            w_ptr, kg_ptr, u_ptr, G_ptr, None, None, None, S0_ptr, h_ptr, r_ptr, None, None, sequences_ptr, None,
            HV=HV, K=K, V=V, C=C, KP=KP, KB=KB, BV=BV, V_FIRST=V_FIRST, EVERY=1, P=P, STAGES=STAGES,
            BLOCKS=2 * blocks,
        )  # fmt: skip
    else:
        reverse_steps(
            w_ptr, kg_ptr, qg_ptr, G_ptr, Aqk_ptr, do_ptr, dS_final_ptr, dh_ptr, dr_ptr, dS0_ptr, sequences_ptr, block - blocks, h, n,
            do_row, do_head, HV, K, V, C, KP, KB, BV, V_FIRST, P, STAGES,
        )  # fmt: skip


def reverse_scan(
    problem: Problem, config: BackwardConfig, plan: Plan, w: torch.Tensor, kg: torch.Tensor, qg: torch.Tensor, G: torch.Tensor,
    Aqk: torch.Tensor, do: torch.Tensor, dfinal_state: torch.Tensor | None, *, tokens: bool, initial_state: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The gradients that flow backwards through the state.

    Args: w, kg, qg, Aqk from `prepare`; G from gate_cumsum; do [B, T, HV, V]; dfinal_state problem.state_shape or None (zero).
    tokens: return what token gradients need; initial_state: return its gradient.
    Returns: dh [NC, HV, K, V] gradients of chunk-exit states and dr [B, T, HV, V], both in w's dtype; dS0 (problem.state_shape,
    state_dtype); None where not asked for."""
    HV, K, V, BV, N = problem.HV, problem.K, problem.V, config.scan_block_v, plan.sequences.shape[0]
    dh, dr = empty_gradients(problem, plan, w, do) if tokens else (None, None)
    dS0 = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=w.device) if initial_state else None
    rows = as_rows(do)
    if N:
        reverse_scan_kernel[(triton.cdiv(V, BV) * HV * N,)](
            w, kg, qg, G, Aqk, rows, contiguous(dfinal_state), dh, dr, dS0, plan.sequences, rows.stride(0), rows.stride(1), HV=HV, K=K,
            V=V, C=plan.chunk_size, KP=pad(K), KB=config.scan_block_k, BV=BV, V_FIRST=problem.state_v_first, P=config.precision,
            STAGES=config.scan_stages, num_warps=config.scan_warps,
        )  # fmt: skip
    return dh, dr, dS0


def both_scans(
    problem: Problem, config: BackwardConfig, plan: Plan, w: torch.Tensor, kg: torch.Tensor, qg: torch.Tensor, u: torch.Tensor,
    G: torch.Tensor, Aqk: torch.Tensor, S0: torch.Tensor | None, do: torch.Tensor, dfinal_state: torch.Tensor | None, *,
    initial_state: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """state_scan and reverse_scan side by side. Returns: h, r as state_scan; dh, dr, dS0 as reverse_scan with tokens=True."""
    HV, K, V, BV, N = problem.HV, problem.K, problem.V, config.scan_block_v, plan.sequences.shape[0]
    dh, dr = empty_gradients(problem, plan, w, do)
    h, r = torch.empty_like(dh), torch.empty_like(u)
    dS0 = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=w.device) if initial_state else None
    rows = as_rows(do)
    if N:
        both_scans_kernel[(2 * triton.cdiv(V, BV) * HV * N,)](
            w, kg, qg, u, G, Aqk, rows, contiguous(S0), contiguous(dfinal_state), h, r, dh, dr, dS0, plan.sequences, rows.stride(0),
            rows.stride(1), HV=HV, K=K, V=V, C=plan.chunk_size, KP=pad(K), KB=config.scan_block_k, BV=BV,
            V_FIRST=problem.state_v_first, P=config.precision, STAGES=config.scan_stages, num_warps=config.scan_warps,
        )  # fmt: skip
    return h, r, dh, dr, dS0


def empty_gradients(problem: Problem, plan: Plan, w: torch.Tensor, do: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unwritten dh [NC, HV, K, V] and dr [B, T, HV, V] in w's dtype."""
    dh = torch.empty(plan.num_chunks, problem.HV, problem.K, problem.V, dtype=w.dtype, device=w.device)
    return dh, torch.empty(do.shape, dtype=w.dtype, device=w.device)
