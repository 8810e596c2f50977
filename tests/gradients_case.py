"""The Hopper backend's gradient kernels called by themselves, on a case of openkda.testing."""

import torch

from openkda import torch_backend
from openkda.autograd import TENSORS
from openkda.hopper.gradients import gradients
from openkda.testing import Case, cotangents


def run(case: Case, do: torch.Tensor | None = None, wanted: tuple[str, ...] = TENSORS) -> dict[str, torch.Tensor]:
    """Gradients from the kernels, in the shapes of the case's arguments; with `do` of o alone."""
    problem, inputs = case.described()
    needs = tuple(n in wanted and getattr(inputs, n) is not None for n in TENSORS)
    o = torch_backend.forward(problem, inputs)[0]
    upstream, dfinal = cotangents(case)
    found = gradients(problem, inputs, needs, o, upstream if do is None else do, dfinal if do is None else None)
    return {n: x.view(case.args[n].shape) for n, x in zip(TENSORS, found, strict=True) if x is not None}
