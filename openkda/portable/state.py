"""Stage 5: the state scan, serial over the chunks of a sequence, and (fused) the output.

    r  = u - w S                                 values minus what the state predicts
    o  = qg S + Aqk r                            when the output is fused
    S' = Diag(2^G_C) S + kg^T r                  G_C: the row of G at the chunk's last token

Grid: one program per (block of BV value columns, head, sequence), flat. S [K, BV] lives in fp32 registers, as a tuple of blocks of KB keys
so that a product's operands need not be in registers all at once; products take it rounded to the inputs' dtype. Loads of the next chunks
are pipelined by the compiler. A sequence without tokens writes its initial state, or zero.

AFFINE scans the state map itself, for segment summaries: the columns past V start as the identity and have no values, so they end as M
of S_out = M S_in + b, while the first V start at zero and end as b.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.plan import Plan
from openkda.portable.config import Config, pad
from openkda.portable.tile import contiguous, load_tile, load_vector, place, sequence_bounds, store_tile, tile_mask
from openkda.problem import Problem


@triton.jit
def state_pointers(ptr, n, HV: tl.constexpr, h, kk, vv, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """[KP, BV] pointers into a state [N, HV, K, V], or [N, HV, V, K] when V_FIRST."""
    base = ptr + (n * HV + h) * (K * V)
    if V_FIRST:
        return base + vv[None, :] * K + kk[:, None]
    else:
        return base + kk[:, None] * V + vv[None, :]


@triton.jit
def store_state(
    ptr, S, n, HV: tl.constexpr, h, vv, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr,
):  # fmt: skip
    """Write the key blocks S of state n, cast to the pointer's element type."""
    for j in tl.static_range(KP // KB):
        kk = j * KB + tl.arange(0, KB)
        target = state_pointers(ptr, n, HV, h, kk, vv, K, V, V_FIRST)
        tl.store(target, S[j].to(ptr.dtype.element_ty), mask=tile_mask(kk < K, vv, V, BV))


@triton.jit
def scan_kernel(
    w_ptr, kg_ptr, u_ptr,  # [R, HV, K], [R, HV, K], [R, HV, V]
    G_ptr,  # [R, HV, K] fp32
    qg_ptr, Aqk_ptr, o_ptr,  # [R, HV, K], [R, HV, C], [R, HV, V]; None unless the output is fused
    S0_ptr,  # [N, HV, K, V] or None
    h_ptr, r_ptr,  # [NC, HV, K, V], [R, HV, V]; None unless asked
    S_final_ptr,  # [N, HV, K, V] or None
    M_ptr,  # [N, HV, K, K] fp32; None unless AFFINE
    sequences_ptr,  # [N, 4] int32
    entries_ptr,  # [N, 4] int32: where in h a sequence's states go; None: as sequences_ptr says
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr,
    BV: tl.constexpr, V_FIRST: tl.constexpr, EVERY: tl.constexpr, P: tl.constexpr,
    STAGES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, h, n = place(BLOCKS, HV)
    first, length, chunk, count = sequence_bounds(sequences_ptr, n)
    if entries_ptr is not None:
        chunk = tl.load(entries_ptr + n * 4 + 2).to(tl.int64)
    rows = tl.arange(0, C)
    vv = block * BV + tl.arange(0, BV)
    vu = vv  # columns of u
    if M_ptr is not None:
        summary = block * BV >= tl.cdiv(V, BV) * BV
        vm = vv - tl.cdiv(V, BV) * BV
        vu = tl.where(summary, V, vv)  # masked off: zero values
    S = ()
    for j in tl.static_range(KP // KB):
        kk = j * KB + tl.arange(0, KB)
        part = tl.zeros([KB, BV], tl.float32)
        if S0_ptr is not None:
            pointers = state_pointers(S0_ptr, n, HV, h, kk, vv, K, V, V_FIRST)
            part = tl.load(pointers, mask=tile_mask(kk < K, vv, V, BV), other=0.0).to(tl.float32)
        if M_ptr is not None:
            part = tl.where(summary & (kk[:, None] == vm[None, :]), 1.0, 0.0)
        S = S + (part,)  # noqa: RUF005  Triton knows no *S

    for c in tl.range(0, count, num_stages=STAGES):
        at = (first + c * C) * HV + h
        live = rows < length - c * C
        last = tl.minimum(length - c * C, C) - 1
        if M_ptr is not None:
            u = tl.load(u_ptr + at * V + rows[:, None] * (HV * V) + vu[None, :], mask=live[:, None] & (vu < V)[None, :], other=0.0)
        else:
            u = load_tile(u_ptr + at * V, rows, HV * V, vv, live, V, BV)
        if h_ptr is not None:  # noqa: SIM102  known at compile time; the next is not
            if c % EVERY == 0:
                store_state(h_ptr, S, chunk + c // EVERY, HV, h, vv, K, V, KP, KB, BV, False)
        read = tl.zeros([C, BV], tl.float32)
        o = tl.zeros([C, BV], tl.float32)
        for j in tl.static_range(KP // KB):
            kk = j * KB + tl.arange(0, KB)
            w = load_tile(w_ptr + at * K, rows, HV * K, kk, live, K, KB)
            Sb = S[j].to(w.dtype)
            read = tl.dot(w, Sb, acc=read, input_precision=P)
            if o_ptr is not None:
                qg = load_tile(qg_ptr + at * K, rows, HV * K, kk, live, K, KB)
                o = tl.dot(qg, Sb, acc=o, input_precision=P)
        r = u.to(tl.float32) - read
        rb = r.to(u.dtype)
        if r_ptr is not None:
            store_tile(r_ptr + at * V, r, rows, HV * V, vv, live, V, BV)
        if o_ptr is not None:
            Aqk = load_tile(Aqk_ptr + at * C, rows, HV * C, rows, live, C, C)
            o = tl.dot(Aqk, rb, acc=o, input_precision=P)
            store_tile(o_ptr + at * V, o, rows, HV * V, vv, live, V, BV)
        written = ()
        for j in tl.static_range(KP // KB):
            kk = j * KB + tl.arange(0, KB)
            kg = load_tile(kg_ptr + at * K, rows, HV * K, kk, live, K, KB)
            decay = tl.exp2(load_vector(G_ptr + at * K + last * (HV * K), kk, K, KB))
            part = tl.dot(tl.trans(kg), rb, acc=S[j] * decay[:, None], input_precision=P)
            written = written + (part,)  # noqa: RUF005
        S = written

    if S_final_ptr is not None:
        store_state(S_final_ptr, S, n, HV, h, vv, K, V, KP, KB, BV, V_FIRST)
    if M_ptr is not None:
        for j in tl.static_range(KP // KB):
            kk = j * KB + tl.arange(0, KB)
            target = M_ptr + (n * HV + h) * (K * K) + kk[:, None] * K + vm[None, :]
            tl.store(target, S[j], mask=(kk < K)[:, None] & ((vm >= 0) & (vm < K))[None, :])


def launch_scan(
    problem: Problem, config: Config, sequences: torch.Tensor, C: int, w: torch.Tensor, kg: torch.Tensor, u: torch.Tensor, G: torch.Tensor,
    *, qg: torch.Tensor | None = None, Aqk: torch.Tensor | None = None, o: torch.Tensor | None = None, S0: torch.Tensor | None = None,
    h: torch.Tensor | None = None, r: torch.Tensor | None = None, S_final: torch.Tensor | None = None, M: torch.Tensor | None = None,
    v_first: bool = False, entries: torch.Tensor | None = None, every: int = 1,
) -> None:  # fmt: skip
    """Run `scan_kernel` over the rows of `sequences` [N, 4]; tensors as the kernel's parameters, absent ones None.

    h takes the entry state of every `every`-th chunk of a sequence, from row entries[n, 2] on (by default sequences[n, 2])."""
    N, K, V, BV = sequences.shape[0], problem.K, problem.V, config.scan_block_v
    blocks = triton.cdiv(V, BV) + (0 if M is None else triton.cdiv(K, BV))
    if N == 0:
        return
    scan_kernel[(blocks * problem.HV * N,)](
        w, kg, u, G, qg, Aqk, o, S0, h, r, S_final, M, sequences, entries, HV=problem.HV, K=K, V=V, C=C, KP=pad(K),
        KB=config.scan_block_k, BV=BV, V_FIRST=v_first, EVERY=every, P=config.scan_precision, STAGES=config.scan_stages,
        BLOCKS=blocks, num_warps=config.scan_warps,
    )  # fmt: skip


def state_scan(
    problem: Problem, config: Config, plan: Plan, w: torch.Tensor, kg: torch.Tensor, u: torch.Tensor, G: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The recurrence over chunks alone.

    Args: w, kg [B, T, HV, K], u [B, T, HV, V] from wy; G [B, T, HV, K] fp32; initial_state problem.state_shape or None (zero).
    Returns: h [NC, HV, K, V] chunk-entry states in w's dtype (entry c of the plan's table; unused entries are not written),
    r [B, T, HV, V] in w's dtype, S_final (problem.state_shape, state_dtype)."""
    h = torch.empty(plan.num_chunks, problem.HV, problem.K, problem.V, dtype=w.dtype, device=w.device)
    r = torch.empty_like(u)
    S_final = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=w.device)
    launch_scan(
        problem, config, plan.sequences, plan.chunk_size, w, kg, u, G, S0=contiguous(initial_state), h=h, r=r, S_final=S_final,
        v_first=problem.state_v_first,
    )  # fmt: skip
    return h, r, S_final


def scan_output(
    problem: Problem, config: Config, plan: Plan, w: torch.Tensor, kg: torch.Tensor, u: torch.Tensor, G: torch.Tensor, qg: torch.Tensor,
    Aqk: torch.Tensor, o: torch.Tensor, initial_state: torch.Tensor | None = None, h: torch.Tensor | None = None,
    entries: Plan | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """state_scan and output in one pass: writes o [B, T, HV, V] ; returns S_final, None unless problem.output_final_state.

    h [NC, HV, K, V], where given, takes the entry states of the chunks of the plan `entries` (chunk size: a multiple of `plan`'s)."""
    S_final = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=w.device) if problem.output_final_state else None
    launch_scan(
        problem, config, plan.sequences, plan.chunk_size, w, kg, u, G, qg=qg, Aqk=Aqk, o=o, S0=contiguous(initial_state), h=h,
        S_final=S_final, v_first=problem.state_v_first, entries=None if entries is None else entries.sequences,
        every=1 if entries is None else entries.chunk_size // plan.chunk_size,
    )  # fmt: skip
    return S_final
