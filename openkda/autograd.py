"""Gradients of calls that run on kernels: what is saved, what is recomputed, who computes the backward.

The torch backend is differentiable as it stands and never comes here. For the others the forward saves its inputs only. The backward runs
on the first backend that has gradient kernels for the problem (`backends.choose_backward`); the torch backend, which serves everything,
recomputes the forward and lets autograd differentiate it.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from openkda import backends
from openkda.problem import Inputs, Problem

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
CONSTANTS = tuple(f.name for f in fields(Inputs) if f.name not in TENSORS)


class ChunkKDA(torch.autograd.Function):
    """apply(problem, backend, inputs, *[inputs.name for name in TENSORS]) -> (o, final_state or None)."""

    @staticmethod
    def forward(ctx, problem: Problem, backend: str, inputs: Inputs, *tensors: torch.Tensor | None):
        o, final_state, _ = backends.module(backend).forward(problem, inputs)
        ctx.problem, ctx.backend = problem, backend
        ctx.constants = {name: getattr(inputs, name) for name in CONSTANTS}
        ctx.save_for_backward(*tensors)
        return o, final_state

    @staticmethod
    def backward(ctx, do: torch.Tensor, dfinal_state: torch.Tensor | None):
        problem = ctx.problem
        inputs = Inputs(**dict(zip(TENSORS, ctx.saved_tensors)), **ctx.constants)
        needs = ctx.needs_input_grad[3:]
        name = backends.choose_backward(problem, ctx.backend)
        if name == "torch":
            grads = recompute_with_autograd(problem, inputs, needs, do, dfinal_state)
        else:
            grads = backends.module(name).backward(problem, inputs, needs, do, dfinal_state)
        return None, None, None, *grads


def recompute_with_autograd(
    problem: Problem, inputs: Inputs, needs: tuple[bool, ...], do: torch.Tensor, dfinal_state: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Gradients of TENSORS (None where not needed) by running the torch backend under autograd."""
    leaves = [
        None if t is None else t.detach().requires_grad_(need) for t, need in zip((getattr(inputs, n) for n in TENSORS), needs, strict=True)
    ]
    detached = Inputs(**dict(zip(TENSORS, leaves)), **{name: getattr(inputs, name) for name in CONSTANTS})
    with torch.enable_grad():
        o, final_state, _ = backends.module("torch").forward(problem, detached)
    outputs = [(o, do), (final_state, dfinal_state)]
    outputs = [(y, dy.to(y.dtype)) for y, dy in outputs if y is not None and dy is not None]
    wanted = [t for t, need in zip(leaves, needs) if need]
    found = iter(torch.autograd.grad([y for y, _ in outputs], wanted, [dy for _, dy in outputs], allow_unused=True))
    return [next(found) if need else None for need in needs]
