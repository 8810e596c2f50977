"""Stage 7: affine summaries of segments, for context parallelism and for splitting a sequence inside one GPU.

    S_out = M S_in + b          M [K, K], b [K, V]: the map of one segment (a run of whole chunks)
    S[p+1] = M[p] S[p] + b[p]   entry states along a chain of segments

`segment_summary` runs the state scan (state.py) from the identity and from zero; `combine_segments` walks a chain in fp32: grid (block of
BV columns, head, chain), the products at precision P.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.portable.config import Config, pad
from openkda.portable.state import launch_scan, state_pointers
from openkda.portable.tile import contiguous, place, tile_mask
from openkda.problem import Problem


@triton.jit
def combine_kernel(
    M_ptr,  # [P, HV, K, K] fp32
    b_ptr,  # [P, HV, K, V] fp32
    S0_ptr,  # [N, HV, K, V] or None
    entry_ptr,  # [P, HV, K, V] fp32
    S_final_ptr,  # [N, HV, K, V] or None
    chains_ptr,  # [N, 2] int32: first segment, number of segments
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    P: tl.constexpr,
):
    block, h, n = place((V + BV - 1) // BV, HV)
    first = tl.load(chains_ptr + n * 2).to(tl.int64)
    count = tl.load(chains_ptr + n * 2 + 1)
    kk = tl.arange(0, KP)
    vv = block * BV + tl.arange(0, BV)
    mask = tile_mask(kk < K, vv, V, BV)
    S = tl.zeros([KP, BV], tl.float32)
    if S0_ptr is not None:
        S = tl.load(state_pointers(S0_ptr, n, HV, h, kk, vv, K, V, V_FIRST), mask=mask, other=0.0).to(tl.float32)
    for p in range(count):
        segment = first + p
        tl.store(state_pointers(entry_ptr, segment, HV, h, kk, vv, K, V, False), S, mask=mask)
        out = tl.load(state_pointers(b_ptr, segment, HV, h, kk, vv, K, V, False), mask=mask, other=0.0)
        blocks = tl.reshape(S, [KP // BK, BK, BV])
        for j in tl.static_range(KP // BK):
            kb = j * BK + tl.arange(0, BK)
            M = tl.load(M_ptr + (segment * HV + h) * (K * K) + kk[:, None] * K + kb[None, :], mask=tile_mask(kk < K, kb, K, BK), other=0.0)
            part = tl.sum(tl.where((tl.arange(0, KP // BK) == j)[:, None, None], blocks, 0.0), 0)  # rows kb of S: exact, one nonzero term
            out = tl.dot(M, part, acc=out, input_precision=P)
        S = out
    if S_final_ptr is not None:
        tl.store(state_pointers(S_final_ptr, n, HV, h, kk, vv, K, V, V_FIRST), S.to(S_final_ptr.dtype.element_ty), mask=mask)


def segment_summary(
    problem: Problem, config: Config, segments: torch.Tensor, C: int, w: torch.Tensor, kg: torch.Tensor, u: torch.Tensor, G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The affine maps of segments.

    Args: segments [P, 4] int32 in the form of Plan.sequences (whole chunks of C tokens, except at a sequence's end); w, kg, u, G as for
    state_scan.
    Returns: M [P, HV, K, K], b [P, HV, K, V] fp32. A segment without tokens has M = 1, b = 0."""
    P, HV, K, V = segments.shape[0], problem.HV, problem.K, problem.V
    M = torch.empty(P, HV, K, K, dtype=torch.float32, device=w.device)
    b = torch.empty(P, HV, K, V, dtype=torch.float32, device=w.device)
    launch_scan(problem, config, segments, C, w, kg, u, G, S_final=b, M=M)
    return M, b


def combine_segments(
    problem: Problem, config: Config, chains: torch.Tensor, M: torch.Tensor, b: torch.Tensor, initial_state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entry states of segments and final states of their chains.

    Args: chains [N, 2] int32 (first segment, number of segments); M [P, HV, K, K], b [P, HV, K, V] fp32; initial_state
    (problem.state_shape, one per chain) or None (zero).
    Returns: entry states [P, HV, K, V] fp32, final states (problem.state_shape, state_dtype)."""
    N, K, V, BV = chains.shape[0], problem.K, problem.V, 16
    entry = torch.empty_like(b)
    S_final = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=b.device)
    if N:
        combine_kernel[(triton.cdiv(V, BV) * problem.HV * N,)](
            M, b, contiguous(initial_state), entry, S_final, chains, HV=problem.HV, K=K, V=V, KP=pad(K), BK=min(pad(K), 32), BV=BV,
            V_FIRST=problem.state_v_first, P=config.precision, num_warps=4,
        )  # fmt: skip
    return entry, S_final
