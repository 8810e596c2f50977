"""The Hopper backward: prepare_operands -> both scans in one launch -> the gradients of each chunk in one kernel (fused_gradients), and
what rows of very fast gates add (fused_levels). Under the interpreter, which knows no Gluon: prepare_chunks -> scans -> score_gradients ->
chunk_gradients -> level_gradients. See docs/backward.md.

Shaped for Hopper's matrix unit: chunks of 32 tokens, states transposed. What passes through memory, per token and value head: w, kg, qg (K
each), Aqk (C), T (2 C), r, dv (V each) in bf16, and per chunk h and dh [V, K].
"""

from __future__ import annotations

import torch

from openkda.hopper.backward_chunk import chunk_gradients
from openkda.hopper.backward_fused import fused_gradients
from openkda.hopper.backward_fused_levels import fused_levels
from openkda.hopper.backward_levels import level_gradients
from openkda.hopper.backward_operands import prepare_operands
from openkda.hopper.backward_prepare import C, prepare_chunks
from openkda.hopper.backward_scan import both_scans
from openkda.hopper.backward_scores import score_gradients
from openkda.portable.forward import interpreted
from openkda.problem import Inputs, Problem


def fuses(problem: Problem) -> bool:
    """Whether one kernel takes scores and channels: on a device, because the interpreter knows no Gluon."""
    return problem.dtype == torch.bfloat16 and not interpreted()


def gradients(
    problem: Problem, inputs: Inputs, needs: tuple[bool, ...], o: torch.Tensor, do: torch.Tensor | None, dfinal_state: torch.Tensor | None
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, g, beta, A_log, dt_bias, initial_state; None where `needs` is False.

    Args: o [B, T, HV, V], the forward's result; do (o's shape), dfinal_state (problem.state_shape), either None for zero. Gradients come
    in their inputs' dtypes; sums over tokens run in fp32 in a fixed order."""
    do = torch.zeros_like(o) if do is None else do.to(problem.dtype)
    plan = inputs.plan(problem, C)
    tokens, fused = any(needs[:7]), fuses(problem)
    covered = not problem.varlen or (inputs.lengths is not None and sum(inputs.lengths) == problem.T)
    create = torch.empty_like if covered else torch.zeros_like  # rows outside every sequence have gradient zero
    contiguous_like = lambda x, dtype: create(x, dtype=dtype, memory_format=torch.contiguous_format)
    dv = contiguous_like(inputs.v, problem.dtype) if tokens else None
    p = (prepare_operands if fused else prepare_chunks)(problem, plan, inputs)
    h, dh, r, dr, dS0 = both_scans(
        problem, plan, inputs, p, do, dfinal_state, tokens=tokens, initial_state=needs[7], dv=dv if fused else None
    )
    found = [None] * 7
    if tokens:
        p = p._replace(w=None, kg=None, qg=None, Aqk=None)  # what only the scans read
        of_heads = torch.float32 if problem.group > 1 else problem.dtype
        dq, dk, dg = (contiguous_like(inputs.g, dtype) for dtype in (of_heads, of_heads, problem.gate_dtype))
        dbeta = contiguous_like(inputs.beta, problem.beta_dtype)
        if fused:
            dA_log, ddt_bias, pairs, size = fused_gradients(problem, plan, inputs, p.norms, do, h, dh, r, dv, dq, dk, dg, dbeta, p.cut)
            if p.cut is not None:
                fused_levels(problem, plan, inputs, p.norms, p.cut, pairs, size, dq, dk, dg, dA_log, ddt_bias)
        else:
            scores = score_gradients(problem, plan, inputs, p, o, do, r, dr, dv, dbeta)
            dA_log, ddt_bias = chunk_gradients(problem, plan, inputs, p, scores, do, h, dh, r, dv, dq, dk, dg)
            if p.cut is not None:
                level_gradients(problem, plan, inputs, p.norms, p.cut, scores.pairs, scores.sums[:, :, 2], dq, dk, dg, dA_log, ddt_bias)
        total = lambda x, *axes: None if x is None else x.sum((0, *axes))
        dA_log, ddt_bias = total(dA_log, 2), total(ddt_bias)
        if problem.group > 1:
            dq, dk = (x.unflatten(2, (problem.H, problem.group)).sum(3) for x in (dq, dk))
        found = [dq, dk, dv, dg, dbeta, dA_log, ddt_bias]
    like = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, inputs.initial_state)
    return [dx.to(x.dtype) if need else None for x, need, dx in zip(like, needs, [*found, dS0], strict=True)]
