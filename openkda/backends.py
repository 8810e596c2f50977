"""The backends, in the order dispatch tries them, and the choice between them.

A backend is a module with `why_not(problem)` (None, or one sentence) and `forward(problem, inputs) -> (o, final_state, h)`. It may also
have `why_not_backward(problem)` and `backward`. Dispatch takes the first that serves the problem; an exception raised inside a backend is
an error and stays one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from types import ModuleType

import torch

from openkda.problem import Inputs, Problem, fail

MODULES = {"hopper": "openkda.hopper", "portable": "openkda.portable", "torch": "openkda.torch_backend"}
NAMES = tuple(MODULES)


def on_its_device(function: Callable) -> Callable:
    """`function` with the device of its tensors current, for that is where Triton launches. Its first argument is a tensor, or a Problem
    and the second its Inputs."""

    @wraps(function)
    def call(first: torch.Tensor | Problem, *rest: object, **options: object) -> object:
        device = first.device if isinstance(first, torch.Tensor) else rest[0].q.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(first, *rest, **options)
        with torch.cuda.device(device):
            return function(first, *rest, **options)

    return call


def _why_no_kernel(name: str, problem: Problem) -> str | None:
    """What any backend made of kernels refuses."""
    if name == "torch":
        return None
    if importlib.util.find_spec("triton") is None:
        return f"the {name} backend needs Triton, which is not installed"
    if problem.transform != "none":
        return f"the {name} backend's kernels know nothing of torch.func's transforms and forward-mode derivatives; the torch backend does"
    return None


@cache
def module(name: str) -> ModuleType:
    """The backend's module, imported on first use."""
    return importlib.import_module(MODULES[name])


def why_not(name: str, problem: Problem) -> str | None:
    """None when backend `name` serves the problem, else one sentence saying what it lacks."""
    return _why_no_kernel(name, problem) or module(name).why_not(problem)


def why_not_backward(name: str, problem: Problem) -> str | None:
    """None when backend `name` has kernels for the problem's gradients, else one sentence."""
    if name == "torch":
        return None
    no_kernels = lambda _: f"the {name} backend has no backward kernels"
    return _why_no_kernel(name, problem) or getattr(module(name), "why_not_backward", no_kernels)(problem)


def check_name(backend: object) -> None:
    """ValueError for what names no backend; None is any."""
    if backend is not None and backend not in NAMES:
        raise fail("backend", repr(backend), "None or one of " + ", ".join(NAMES))


def _first(reason_of: Callable[[str, Problem], str | None], problem: Problem, backend: str | None) -> str:
    if backend is None:
        # The Triton interpreter lets kernels run on a CPU when they are asked for by name; nobody wants it to be chosen.
        names = NAMES if problem.device_type == "cuda" else ("torch",)
        return next(name for name in names if reason_of(name, problem) is None)
    check_name(backend)
    reason = reason_of(backend, problem)
    if reason is not None:
        raise ValueError(f"backend is {backend!r}, which cannot serve this call: {reason}")
    return backend


@lru_cache(maxsize=1024)
def choose(problem: Problem, backend: str | None = None) -> str:
    """Name of the backend that runs the problem. ValueError when `backend` names none, or one that cannot serve it."""
    return _first(why_not, problem, backend)


@lru_cache(maxsize=1024)
def choose_backward(problem: Problem, forward: str) -> str:
    """Name of the backend that computes the gradients of a call whose forward ran on `forward`."""
    names = NAMES[NAMES.index(forward) :]
    return next(name for name in names if why_not_backward(name, problem) is None)


def why_not_recurrent(name: str, problem: Problem) -> str | None:
    """None when backend `name` runs the problem token by token, else one sentence."""
    if name == "torch":
        return None
    if name == "hopper":
        return "the hopper backend has no token-by-token form of its own; portable serves it"
    reason = _why_no_kernel(name, problem)
    return reason or importlib.import_module("openkda.portable.decode").why_not(problem)


def choose_recurrent(problem: Problem, backend: str | None = None) -> str:
    """As `choose`, for the token-by-token form."""
    return _first(why_not_recurrent, problem, backend)


def recurrent(name: str) -> Callable[[Problem, Inputs], tuple[torch.Tensor, torch.Tensor | None]]:
    """The token-by-token function of a backend: (problem, inputs) -> (o, final_state)."""
    return importlib.import_module("openkda.portable.decode" if name == "portable" else MODULES[name]).recurrent
