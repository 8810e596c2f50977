"""Stage 1: gate activation and chunk prefix sum.

    g = gate                                                        "none": the log decay itself
    g = -exp(A_log[h]) * softplus(gate + dt_bias)                   "softplus", unbounded below
    g = lower_bound * sigmoid(exp(A_log[h]) * (gate + dt_bias))     "bounded"
    G_r = log2(e) * sum_{i <= r} g_i                                inside each chunk

Grid (chunk, head, block of BK channels); one [C, BK] tile per program, everything in fp32. The sum over rows is a scan, so G_r depends
on rows up to r alone, bit for bit. This is the only place where the natural logarithm becomes base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.plan import Plan
from openkda.portable.config import Config
from openkda.portable.tile import LOG2E, as_rows, chunk_bounds, contiguous, load_tile, load_vector, sigmoid, store_tile
from openkda.problem import Problem


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + 2 atanh(y / (2 + y)), y = e^-|x| <= 1, by the odd series of atanh.

    The series argument is at most 1/3: seven terms leave 2e-8, and nothing cancels however small the result is. log(1 + y) would lose
    all digits below y = 1e-7, where slow gates live."""
    y = tl.exp2(tl.abs(x) * -LOG2E)
    z = y / (2.0 + y)
    s = z * z
    p = 1.0 / 15
    p = p * s + 1.0 / 13
    p = p * s + 1.0 / 11
    p = p * s + 1.0 / 9
    p = p * s + 1.0 / 7
    p = p * s + 1.0 / 5
    p = p * s + 1.0 / 3
    return tl.maximum(x, 0.0) + 2.0 * z * (1.0 + s * p)


@triton.jit
def log_decay(x, A_log_ptr, dt_bias_ptr, lower_bound, h, cols, K: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr):
    """[C, BK] natural-log decay from gate logits x (fp32); pointers are None where the argument is absent."""
    if GATE == "none":
        return x
    else:
        if dt_bias_ptr is not None:
            x += load_vector(dt_bias_ptr + h * K, cols, K, BK)[None, :]
        rate = 1.0
        if A_log_ptr is not None:
            rate = tl.exp(tl.load(A_log_ptr + h).to(tl.float32))
        if GATE == "softplus":
            return -rate * softplus(x)
        else:
            return lower_bound * sigmoid(rate * x)


@triton.jit
def gate_cumsum_kernel(
    g_ptr,  # [R, HV, K] logits or log decay, row stride g_row, head stride g_head
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV, K] fp32 or None
    G_ptr,  # [R, HV, K] fp32
    chunks_ptr,  # [NC, 4] int32
    g_row,
    g_head,
    lower_bound,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    first, length = chunk_bounds(chunks_ptr, tl.program_id(0))
    if length <= 0:
        return
    rows = tl.arange(0, C)
    live = rows < length
    cols = tl.program_id(2) * BK + tl.arange(0, BK)
    x = load_tile(g_ptr + first * g_row + h * g_head, rows, g_row, cols, live, K, BK).to(tl.float32)
    g = log_decay(x, A_log_ptr, dt_bias_ptr, lower_bound, h, cols, K, BK, GATE)
    G = tl.cumsum(tl.where(live[:, None], g, 0.0) * LOG2E, axis=0)
    store_tile(G_ptr + (first * HV + h) * K, G, rows, HV * K, cols, live, K, BK)


def gate_cumsum(
    problem: Problem, config: Config, plan: Plan, g: torch.Tensor, A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Activate the gate (problem.gate) and sum it over each chunk of the plan.

    Args: g [B, T, HV, K] logits, or natural-log decay for gate "none"; A_log [HV]; dt_bias [HV, K].
    Returns: G [B, T, HV, K] fp32, base 2; rows outside every sequence are not written."""
    B, T, HV, K = g.shape
    G = torch.empty(B, T, HV, K, dtype=torch.float32, device=g.device)
    x = as_rows(g)
    grid = (plan.num_chunks, HV, triton.cdiv(K, config.gate_block_k))
    if x.shape[0] and plan.num_chunks:
        gate_cumsum_kernel[grid](
            x, contiguous(A_log), contiguous(dt_bias), G, plan.chunks, x.stride(0), x.stride(1),
            float(problem.lower_bound or 0.0), HV=HV, K=K, C=plan.chunk_size, BK=config.gate_block_k, GATE=problem.gate,
            num_warps=config.gate_warps,
        )  # fmt: skip
    return G
