"""Gradients of calls that run on kernels: what is saved, what is recomputed, who computes the backward.

The torch backend is differentiable as it stands and never comes here. For the others the forward saves its inputs and o, and with
disable_recompute the intermediates too, where the backend that will compute the gradients is the one that runs the forward and can `keep`
them. The backward runs on the first backend that has gradient kernels for the problem (`backends.choose_backward`); the torch backend,
which serves everything, recomputes the forward and lets autograd differentiate it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps

import torch

from openkda import backends
from openkda.problem import Inputs, Problem, transform_of

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
CONSTANTS = tuple(f.name for f in fields(Inputs) if f.name not in TENSORS)


def first_order(what: str, instead: str) -> Callable[[Callable], Callable]:
    """A decorator for the backward(ctx, saved tensors, *upstream gradients) of an autograd function made of kernels. what: its name in
    errors; instead: what to use instead.

    Gradients of its gradients are refused wherever they are asked for. (torch's once_differentiable does so along the upstream gradients
    alone: along the inputs the gradients would count as constants.)"""

    def decorate(backward: Callable) -> Callable:
        @wraps(backward)
        def call(ctx, *upstream: torch.Tensor | None):
            batched = any(isinstance(t, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(t) for t in upstream)
            if batched or transform_of(upstream) != "none":
                raise ValueError(f"the gradients of {what} take no batched, forward-mode or torch.func gradients from above; {instead}")
            saved = ctx.saved_tensors  # once: a checkpoint recomputes them for one reader
            with torch.no_grad():
                grads = backward(ctx, saved, *upstream)
            if not torch.is_grad_enabled():  # no create_graph
                return grads
            given = [g for g in grads if g is not None]
            tied = iter(_Tied.apply(what, instead, len(given), *given, *upstream, *saved) if given else ())
            return tuple(None if g is None else next(tied) for g in grads)

        return staticmethod(call)

    return decorate


class _Tied(torch.autograd.Function):
    """apply(what, instead, n, *n gradients, *tensors that they depend on) -> the gradients."""

    @staticmethod
    def forward(ctx, what: str, instead: str, n: int, *tensors: torch.Tensor | None):
        ctx.what, ctx.instead = what, instead
        return tuple(x.view_as(x) for x in tensors[:n])

    @staticmethod
    def backward(ctx, *upstream: torch.Tensor | None):
        raise ValueError(f"the gradients of {ctx.what} have no gradients of their own (create_graph=True); {ctx.instead}")


class ChunkKDA(torch.autograd.Function):
    """apply(problem, backend, disable_recompute, inputs, *[inputs.name for name in TENSORS]) -> (o, final_state or None)."""

    @staticmethod
    def forward(ctx, problem: Problem, backend: str, disable_recompute: bool, inputs: Inputs, *tensors: torch.Tensor | None):
        kept = ()
        run = backends.module(backend)
        if disable_recompute and hasattr(run, "keep") and backends.choose_backward(problem, backend) == backend:
            o, final_state, kept = run.keep(problem, inputs)
        else:
            o, final_state, _ = run.forward(problem, inputs)
        ctx.problem, ctx.backend = problem, backend
        ctx.constants = {name: getattr(inputs, name) for name in CONSTANTS}
        ctx.save_for_backward(*tensors, o, *kept)
        ctx.set_materialize_grads(False)
        return o, final_state

    @first_order("chunk_kda's kernels", 'backend="torch" has them')
    def backward(ctx, saved: tuple, do: torch.Tensor | None, dfinal_state: torch.Tensor | None):
        inputs = Inputs(**dict(zip(TENSORS, saved)), **ctx.constants)
        o, kept = saved[len(TENSORS)], saved[len(TENSORS) + 1 :]
        grads = gradients(ctx.problem, ctx.backend, inputs, ctx.needs_input_grad[4:], o, do, dfinal_state, kept)
        return None, None, None, None, *grads


def gradients(
    problem: Problem, forward: str, inputs: Inputs, needs: tuple[bool, ...], o: torch.Tensor, do: torch.Tensor | None,
    dfinal_state: torch.Tensor | None, kept: tuple[torch.Tensor, ...] = (),
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients of TENSORS (None where not needed) of a call whose forward ran on backend `forward` and gave o [B, T, HV, V].

    do, dfinal_state: gradients of o and final_state, None for zero; kept: what the backend's `keep` returned, if it ran."""
    if do is None and dfinal_state is None:
        return [None] * len(needs)
    name = backends.choose_backward(problem, forward)
    if name == "torch":
        return recompute_with_autograd(problem, inputs, needs, do, dfinal_state)
    return backends.module(name).backward(problem, inputs, needs, o, do, dfinal_state, kept)


def recompute_with_autograd(
    problem: Problem, inputs: Inputs, needs: tuple[bool, ...], do: torch.Tensor | None, dfinal_state: torch.Tensor | None
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
