"""The Hopper backend: one fused forward for compute capability 9.0 (docs/hopper_prefill.md)."""

from __future__ import annotations

from importlib.metadata import version

import torch

from openkda.problem import Inputs, Problem

__all__ = ["forward", "why_not"]

VERIFIED = ("3.6",)  # Gluon is young: the Triton releases that the kernels are verified with


def why_not(problem: Problem) -> str | None:
    """None when this backend serves the problem, else one sentence saying what it lacks."""
    p = problem
    if p.capability is None or p.capability[0] != 9:
        return f"the hopper backend needs a GPU of compute capability 9.0, the device is {p.device_type} {p.capability}"
    triton = version("triton")
    if ".".join(triton.split(".")[:2]) not in VERIFIED:
        return f"the hopper backend is verified with Triton {', '.join(VERIFIED)}, this is {triton}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return f"the hopper backend takes bfloat16 or float16 inputs, not {p.dtype}"
    if p.K not in (64, 128) or p.V not in (64, 128):
        return f"the hopper backend takes K and V of 64 or 128, not {p.K} and {p.V}"
    if p.return_intermediate_states:
        return "the hopper backend does not write chunk-entry states"
    if p.B * p.T >= 2**31:
        return f"the hopper backend takes fewer than 2^31 tokens, not {p.B * p.T}"
    return None


def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """o [B, T, HV, V], final_state (Problem.state_shape, None unless asked for), and None for the chunk-entry states"""
    from openkda.hopper.launch import forward as launch

    if torch.cuda.current_device() == inputs.q.device.index:
        return *launch(problem, inputs), None
    with torch.cuda.device(inputs.q.device):
        return *launch(problem, inputs), None
