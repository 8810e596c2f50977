"""The portable backward: recompute the chunk stages; state scan beside reverse scan -> score gradients -> input gradients.

docs/backward.md has the mathematics. What passes through memory: the forward's G, Aqk, w, u, kg, qg; T per token [C]; h and dh per chunk
[K, V]; dZ and dA per chunk [C, C]; r, dr and the gradients themselves. With kept intermediates (`keep`) only the reverse part runs.

fp16 problems run in fp32: products of two gradients-to-be leave fp16's range at the loss scales that fp16 training uses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from openkda.backends import on_its_device
from openkda.plan import Plan
from openkda.portable import forward as portable_forward
from openkda.portable.backward_config import BackwardConfig, configure_backward
from openkda.portable.backward_inputs import input_gradients
from openkda.portable.backward_scan import both_scans, reverse_scan
from openkda.portable.backward_scores import score_gradients
from openkda.portable.gate import gate_cumsum
from openkda.portable.state import launch_scan
from openkda.portable.tile import contiguous
from openkda.portable.wy import prepare
from openkda.problem import Inputs, Problem


class Prepared(NamedTuple):
    """The forward's chunk stages, at the backward's chunk size."""

    G: torch.Tensor  # [B, T, HV, K] fp32
    Aqk: torch.Tensor  # [B, T, HV, C]
    w: torch.Tensor  # [B, T, HV, K]
    kg: torch.Tensor  # [B, T, HV, K]
    qg: torch.Tensor  # [B, T, HV, K]
    u: torch.Tensor  # [B, T, HV, V]
    T: torch.Tensor  # [B, T, HV, C]
    factors: torch.Tensor  # [B, T, HV, 4] fp32; the backward writes the last two


def why_not_backward(problem: Problem) -> str | None:
    """None if the portable kernels compute `problem`'s gradients, else the reason in one sentence."""
    return portable_forward.why_not(problem)


def in_range(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """The problem in a dtype that holds its gradients: fp16 becomes fp32."""
    if problem.dtype != torch.float16:
        return problem, inputs
    wide = {name: getattr(inputs, name).float() for name in ("q", "k", "v")}
    return problem.replace(dtype=torch.float32), replace(inputs, **wide)


def prepared(problem: Problem, config: BackwardConfig, plan: Plan, inputs: Inputs) -> Prepared:
    """Run the forward's chunk stages."""
    v = inputs.v
    G = gate_cumsum(problem, config.forward, plan, inputs.g, inputs.A_log, inputs.dt_bias)
    T = torch.empty(*v.shape[:3], plan.chunk_size, dtype=v.dtype, device=v.device)
    factors = torch.empty(*v.shape[:3], 4, dtype=torch.float32, device=v.device)
    Aqk, w, u, kg, qg = prepare(problem, config.forward, plan, inputs.q, inputs.k, v, G, inputs.beta, T, factors)
    return Prepared(G, Aqk, w, kg, qg, u, T, factors)


@on_its_device
def keep(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """The forward at the backward's chunk size: o, final_state and all that the backward would otherwise recompute."""
    asked = problem
    problem, inputs = in_range(problem, inputs)
    config = configure_backward(problem)
    plan = inputs.plan(problem, config.forward.chunk)
    o = torch.zeros(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    h = torch.empty(plan.num_chunks, problem.HV, problem.K, problem.V, dtype=o.dtype, device=o.device)
    r = torch.empty_like(o)
    S_final = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=o.device) if problem.output_final_state else None
    p = prepared(problem, config, plan, inputs)
    launch_scan(
        problem, config.forward, plan.sequences, plan.chunk_size, p.w, p.kg, p.u, p.G, qg=p.qg, Aqk=p.Aqk, o=o,
        S0=contiguous(inputs.initial_state), h=h, r=r, S_final=S_final, v_first=problem.state_v_first,
    )  # fmt: skip
    return o.to(asked.dtype), S_final, (*p, h, r)


@on_its_device
def backward(
    problem: Problem, inputs: Inputs, needs: tuple[bool, ...], o: torch.Tensor, do: torch.Tensor | None,
    dfinal_state: torch.Tensor | None, kept: tuple[torch.Tensor, ...] = (),
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, g, beta, A_log, dt_bias, initial_state; None where `needs` is False.

    Args: o [B, T, HV, V], the forward's result; do (o's shape), dfinal_state (problem.state_shape), either None for zero; kept from
    `keep`, or nothing to recompute. Gradients come in their inputs' dtypes; sums over tokens run in fp32 in a fixed order."""
    given = inputs
    problem, inputs = in_range(problem, inputs)
    do = torch.zeros_like(o, dtype=problem.dtype) if do is None else do.to(problem.dtype)
    config = configure_backward(problem)
    plan = inputs.plan(problem, config.forward.chunk)
    need_q, need_k, need_v, need_g, need_beta, need_A, need_bias, need_state = needs
    pairs = need_q or need_k or need_g or need_A or need_bias
    tokens = pairs or need_v or need_beta
    p = Prepared(*kept[:-2]) if kept else prepared(problem, config, plan, inputs)
    if tokens and not kept:
        h, r, dh, dr, dS0 = both_scans(
            problem, config, plan, p.w, p.kg, p.qg, p.u, p.G, p.Aqk, inputs.initial_state, do, dfinal_state, initial_state=need_state
        )
    else:
        h, r = kept[-2:] if kept else (None, None)
        dh, dr, dS0 = reverse_scan(
            problem, config, plan, p.w, p.kg, p.qg, p.G, p.Aqk, do, dfinal_state, tokens=tokens, initial_state=need_state
        )
    G, T, factors = p.G, p.T, p.factors
    del p  # what only the scans read is a quarter of the memory in use here
    dv = dbeta = dq = dk = dg = dA_log = ddt_bias = None
    covered = not problem.varlen or (inputs.lengths is not None and sum(inputs.lengths) == problem.T)
    create = torch.empty if covered else torch.zeros  # rows outside every sequence have gradient zero
    new = lambda like, dtype: create(like.shape, dtype=dtype, device=like.device)
    if tokens:
        dv, dbeta = new(inputs.v, problem.dtype), new(inputs.beta, problem.beta_dtype)
        groups = score_gradients(problem, config, plan, T, r, dr, inputs.v, o, do, inputs.beta, factors, dv, dbeta)
        del dr
    if pairs:
        of_heads = torch.float32 if problem.group > 1 else problem.dtype
        dq, dk, dg = new(inputs.g, of_heads), new(inputs.g, of_heads), new(inputs.g, problem.gate_dtype)
        dA_log, ddt_bias = input_gradients(
            problem, config, plan, inputs.q, inputs.k, inputs.g, inputs.A_log, inputs.dt_bias, G, factors, h, dh, r, do, dv,
            groups, dq, dk, dg,
        )  # fmt: skip
        if problem.group > 1:
            dq, dk = (x.unflatten(2, (problem.H, problem.group)).sum(3) for x in (dq, dk))
    found = (dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dS0)
    like = (given.q, given.k, given.v, given.g, given.beta, given.A_log, given.dt_bias, given.initial_state)
    return [dx.to(x.dtype) if need else None for x, need, dx in zip(like, needs, found, strict=True)]
