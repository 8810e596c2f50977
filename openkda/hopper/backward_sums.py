"""The gradients of A_log and dt_bias from what every chunk added to them.

    dA_log[h] = sum_{chunk, n} partial[chunk, h, n]      ddt_bias[h, c] = sum_{chunk} partial[chunk, h, c]

Grid (head, K / COLUMNS + 1): the last program of a head adds A_log's. Sums in fp32, ROWS chunks at a time, in one order: no atomics. Chunks
without rows have written nothing and count as zero."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.hopper.runtime import launch
from openkda.plan import Plan
from openkda.problem import Inputs, Problem

COLUMNS = 32
ROWS = 128


@triton.jit(do_not_specialize=["NC", "HV"])
def sums_kernel(
    of_A_log_ptr, of_dt_bias_ptr,  # [NC, HV, N], [NC, HV, K] fp32, or None
    dA_log_ptr, ddt_bias_ptr,  # [HV], [HV, K], or None
    chunks_ptr,  # [NC, 4] int32
    NC, HV,
    N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    block = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    if block < K // COLUMNS:
        if ddt_bias_ptr is not None:
            cols = block * COLUMNS + tl.arange(0, COLUMNS)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for base in range(0, NC, ROWS):
                at = base + rows
                used = has_rows(chunks_ptr, at, NC)[:, None]
                total += tl.load(of_dt_bias_ptr + (at.to(tl.int64) * HV + h)[:, None] * K + cols[None, :], mask=used, other=0.0)
            tl.store(ddt_bias_ptr + h * K + cols, tl.sum(total, 0).to(ddt_bias_ptr.dtype.element_ty))
    elif dA_log_ptr is not None:
        rates = tl.zeros([ROWS], tl.float32)
        for base in range(0, NC, ROWS):
            at = base + rows
            used = has_rows(chunks_ptr, at, NC)
            for n in tl.static_range(N):
                rates += tl.load(of_A_log_ptr + (at.to(tl.int64) * HV + h) * N + n, mask=used, other=0.0)
        tl.store(dA_log_ptr + h, tl.sum(rates, 0).to(dA_log_ptr.dtype.element_ty))


@triton.jit
def has_rows(chunks_ptr, at, NC):
    """Whether the chunks `at` have rows"""
    first = tl.load(chunks_ptr + 4 * at + 1, mask=at < NC, other=0)
    return tl.load(chunks_ptr + 4 * at + 2, mask=at < NC, other=0) > first


def parameter_gradients(
    problem: Problem, plan: Plan, inputs: Inputs, of_A_log: torch.Tensor | None, of_dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of A_log [HV] and dt_bias [HV, K] in their dtypes from the chunks' terms [NC, HV, n] and [NC, HV, K]; None if absent."""
    like = lambda x, *shape: None if x is None else torch.empty(shape, dtype=x.dtype, device=x.device)
    dA_log, ddt_bias = like(inputs.A_log, problem.HV), like(inputs.dt_bias, problem.HV, problem.K)
    if dA_log is not None or ddt_bias is not None:
        n = 1 if of_A_log is None else of_A_log.shape[2]
        operands = (of_A_log, of_dt_bias, dA_log, ddt_bias, plan.chunks)
        grid = (problem.HV, problem.K // COLUMNS + 1, 1)
        launch(sums_kernel, grid, operands, (plan.num_chunks, problem.HV), (n, problem.K, COLUMNS, ROWS))
    return dA_log, ddt_bias
