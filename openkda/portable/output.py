"""Stage 6: the output, parallel over chunks.

    o = qg S + Aqk r        S: the chunk's entry state h; qg and Aqk hold scale

Grid (block of BV value columns and chunk, head), the block fastest; one [C, BV] tile per program, K walked in blocks of BK.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.plan import Plan
from openkda.portable.config import Config
from openkda.portable.tile import chunk_bounds, load_tile, store_tile
from openkda.problem import Problem


@triton.jit
def output_kernel(
    qg_ptr,  # [R, HV, K]
    Aqk_ptr,  # [R, HV, C]
    r_ptr,  # [R, HV, V]
    h_ptr,  # [NC, HV, K, V]
    o_ptr,  # [R, HV, V]
    chunks_ptr,  # [NC, 4] int32
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    P: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    c = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(1)
    first, length = chunk_bounds(chunks_ptr, c)
    if length <= 0:
        return
    rows = tl.arange(0, C)
    live = rows < length
    vv = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    at = first * HV + head
    Aqk = load_tile(Aqk_ptr + at * C, rows, HV * C, rows, live, C, C)
    r = load_tile(r_ptr + at * V, rows, HV * V, vv, live, V, BV)
    o = tl.dot(Aqk.to(r.dtype), r, input_precision=P)
    for k0 in tl.range(0, K, BK, num_stages=1):
        kk = k0 + tl.arange(0, BK)
        qg = load_tile(qg_ptr + at * K, rows, HV * K, kk, live, K, BK)
        S = load_tile(h_ptr + (c * HV + head) * (K * V), kk, V, vv, kk < K, V, BV)
        o = tl.dot(qg, S, acc=o, input_precision=P)
    store_tile(o_ptr + at * V, o, rows, HV * V, vv, live, V, BV)


def output(
    problem: Problem, config: Config, plan: Plan, qg: torch.Tensor, Aqk: torch.Tensor, r: torch.Tensor, h: torch.Tensor, o: torch.Tensor
) -> torch.Tensor:
    """Write o [B, T, HV, V] and return it; rows outside every sequence keep what they hold.

    Args: qg [B, T, HV, K] from wy, Aqk [B, T, HV, C], r [B, T, HV, V] and h [NC, HV, K, V] from state_scan."""
    BV = config.output_block_v
    if o.numel() and plan.num_chunks:
        output_kernel[(triton.cdiv(problem.V, BV) * plan.num_chunks, problem.HV)](
            qg, Aqk, r, h, o, plan.chunks, HV=problem.HV, K=problem.K, V=problem.V, C=plan.chunk_size, BK=config.block_k, BV=BV,
            P=config.precision, num_warps=config.output_warps,
        )  # fmt: skip
    return o
