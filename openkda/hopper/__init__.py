"""The Hopper backend: kernels for compute capability 9.0, one fused forward (docs/hopper_prefill.md) and gradients (docs/backward.md)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version

import torch

from openkda.backends import on_its_device
from openkda.problem import Inputs, Problem

Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

__all__ = ["backward", "forward", "keep", "why_not", "why_not_backward"]

VERIFIED = ("3.6",)  # Gluon is young: the Triton releases that the kernels are verified with
installed = cache(version)  # each look reads files, and every new length asks


def why_not(problem: Problem) -> str | None:
    """None when this backend serves the problem, else one sentence saying what it lacks."""
    p = problem
    if p.capability is None or p.capability[0] != 9:
        found = p.device_type if p.capability is None else "one of {}.{}".format(*p.capability)
        return f"the hopper backend needs a GPU of compute capability 9.0, the device is {found}"
    triton = installed("triton")
    if ".".join(triton.split(".")[:2]) not in VERIFIED:
        return f"the hopper backend is verified with Triton {', '.join(VERIFIED)}, this is {triton}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return f"the hopper backend takes bfloat16 or float16 inputs, not {p.dtype}"
    if p.K not in (64, 128) or p.V not in (64, 128):
        return f"the hopper backend takes K and V of 64 or 128, not {p.K} and {p.V}"
    if p.B * p.T >= 2**31:
        return f"the hopper backend takes fewer than 2^31 tokens, not {p.B * p.T}"
    return None


@on_its_device
def forward(problem: Problem, inputs: Inputs) -> Results:
    """o [B, T, HV, V], final_state (Problem.state_shape) and chunk-entry states ([B, NT, HV, K, V] or V first, in o's dtype), the last two
    None unless asked for; NT as launch.chunks says"""
    return _launcher()(problem, inputs)


@cache
def _launcher() -> Callable[[Problem, Inputs], Results]:
    """launch.forward, imported once"""
    from openkda.hopper.launch import forward as launch

    return launch


@on_its_device
def keep(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
    """o, final_state and what `backward` would else compute anew, nothing where keeping it is no gain"""
    from openkda.hopper.gradients import keep

    return keep(problem, inputs)


def why_not_backward(problem: Problem) -> str | None:
    """None when this backend has kernels for the problem's gradients, else one sentence saying what they lack."""
    p = problem
    if why_not(p) is not None:
        return why_not(p)
    if p.N >= 2**16:
        return f"the hopper backend's gradients take fewer than 2^16 sequences, an axis of their grids, not {p.N}"
    return None


@on_its_device
def backward(
    problem: Problem, inputs: Inputs, needs: tuple[bool, ...], o: torch.Tensor, do: torch.Tensor | None,
    dfinal_state: torch.Tensor | None, kept: tuple[torch.Tensor, ...] = (),
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, g, beta, A_log, dt_bias, initial_state; None where `needs` is False. Arguments as portable.backward's."""
    from openkda.hopper.gradients import gradients

    return gradients(problem, inputs, needs, o, do, dfinal_state, kept)
