"""Timing of a training step: forward, then the gradients of q, k, v, gate, beta, A_log and dt_bias for a random gradient of o.

The columns mean what they mean for the forward (benchmarking.py); `forward_ms` is the forward alone, under autograd. No states are given
or asked for. A backend's name with `-kept` is the backend with disable_recompute. The floor counts the forward's bytes, the inputs a second
time, the gradient of o and the gradients written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from openkda import backends
from openkda.benchmarking import ORACLE_HEADS, Benchmark, Implementation, Row, Shape, floor_bytes, make_cases, row_of, twice
from openkda.ops import chunk_kda
from openkda.peers import Args, Peer, Training
from openkda.problem import Problem
from openkda.reference import naive_chunk_kda, prepare
from openkda.testing import Case, relative_error, with_gate_joined
from openkda.timing import eager_ms, graph_ms, host_us

GPU_SHAPES = ("T8192_H32", "T32768_H16", "2x4096_H64", "docs64_H32")
CPU_SHAPES = ("T512_H2",)
ORACLE_TOKENS = 8192  # longest call whose gradients are held against fp64
KEPT = "-kept"  # behind the name of a backend: its forward keeps what its gradients would else compute anew
NAMES = ("hopper", "hopper-kept", "portable", "portable-kept", "torch")
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


def leaves_of(args: Args) -> Args:
    """Copies of the tensors that get gradients."""
    return {name: args[name].detach().clone().requires_grad_() for name in LEAVES}


@dataclass(frozen=True)
class Cell:
    """Inputs of one training cell, the gradient of o that every step starts from, and the gradients that must come out."""

    shape: Shape
    gate: str
    regime: str
    device: torch.device
    bandwidth: float  # bytes per second
    case: Case
    do: torch.Tensor  # [1, T, HV, V] bf16
    oracle: dict[str, torch.Tensor] | None  # fp64 gradients of the first heads; None for a call too long for it

    @property
    def problem(self) -> Problem:
        """The call as backends see it."""
        args = self.case.args | leaves_of(self.case.args)
        return Case(args, self.regime).described()[0]

    def errors(self, grads: dict[str, torch.Tensor]) -> dict[str, float] | None:
        """Relative L2 errors of the gradients of the first heads, A_log's and dt_bias's together."""
        if self.oracle is None:
            return None
        first = {}
        for name, expected in self.oracle.items():
            mine = grads[name].reshape(self.case.args[name].shape)
            first[name] = mine[: len(expected)] if name in ("A_log", "dt_bias") else mine[:, :, : expected.shape[2]]
        found, expected = (with_gate_joined(x, self.shape.D) for x in (first, self.oracle))
        return {name: relative_error(found[name], expected[name]) for name in found}


def gradient_oracle(case: Case, do: torch.Tensor, heads: int) -> dict[str, torch.Tensor]:
    """fp64 gradients of sum(o * do) for the first `heads` q/k heads, by autograd through the chunk algebra of reference.py."""
    values = heads * (case.args["v"].shape[2] // case.args["q"].shape[2])
    leaves = {}
    for name in LEAVES:
        x, count = case.args[name], heads if name in ("q", "k") else values
        leaves[name] = (x[:count] if name in ("A_log", "dt_bias") else x[:, :, :count]).double().requires_grad_()
    lower_bound = case.args.get("lower_bound")
    tensors = prepare(**leaves, gate="softplus" if lower_bound is None else "bounded", lower_bound=lower_bound, qk_l2norm=True,
                      beta_sigmoid=True, neg_eigval=False)  # fmt: skip
    lengths = case.lengths or (do.shape[1],)
    o = torch.cat([naive_chunk_kda(*part, chunk_size=32)[0] for part in zip(*(x.split(lengths, 1) for x in tensors))], 1)
    return dict(zip(LEAVES, torch.autograd.grad(o, list(leaves.values()), do[:, :, :values].double())))


def cells_of(shape: Shape, regimes: Sequence[str], gates: Sequence[str], device: torch.device, bandwidth: float) -> list[Cell]:
    """The training cells of one shape, gate form by gate form."""
    wanted = [(gate, regime) for gate in gates for regime in regimes]
    cells = []
    for (gate, regime), case in zip(wanted, make_cases(shape, wanted, device)):
        for name in ("initial_state", "output_final_state", "state_v_first"):
            del case.args[name]
        generator = torch.Generator(device).manual_seed(2)
        do = torch.randn(case.args["v"].shape, generator=generator, device=device, dtype=torch.bfloat16)
        oracle = gradient_oracle(case, do, min(ORACLE_HEADS, shape.H)) if shape.tokens <= ORACLE_TOKENS else None
        cells.append(Cell(shape, gate, regime, device, bandwidth, case, do, oracle))
    return cells


def step_bytes(p: Problem) -> int:
    """Bytes of a step: the forward's, then inputs and the gradient of o read and the gradients written."""
    o = p.B * p.T * p.HV * p.V * p.dtype.itemsize
    forward = floor_bytes(p)
    return forward + (forward - o) + o + (forward - o)


def our(name: str) -> Implementation:
    """A backend of this library; its gradients come from the backend that dispatch chooses for them."""
    backend = name.removesuffix(KEPT)

    def bind(args: Args) -> Training:
        leaves = leaves_of(args)
        return Training(lambda: chunk_kda(**args | leaves, backend=backend, disable_recompute=name != backend)[0], leaves)

    return Implementation(name, True, partial(backends.why_not, backend), bind)


def foreign(peer: Peer, shapes: tuple[str, ...] | None = None) -> Implementation:
    """A peer, on all shapes or on some."""

    def why_not(problem: Problem) -> str | None:
        return f"{peer.name} has no training step here" if peer.train is None else peer.why_not(problem.replace(state_v_first=True))

    def bind(args: Args) -> Training:
        return peer.train(args, leaves_of(args))

    return Implementation(peer.name, False, why_not, bind, shapes)


def measure(cell: Cell, impl: Implementation, *, split_host: bool = False) -> Row:
    """Every clock on a training step of one implementation. split_host has no meaning here."""
    return row_of(cell, impl, step_bytes(cell.problem), partial(_measure, cell, impl))


def _measure(cell: Cell, impl: Implementation, values: dict[str, object]) -> None:
    training = impl.bind(cell.case.args)
    leaves = list(training.leaves.values())

    def step() -> tuple[torch.Tensor, ...]:
        o = training.forward()
        return torch.autograd.grad(o, leaves, cell.do.view(o.shape))

    if impl.ours:
        values["gradients_by"] = backends.choose_backward(cell.problem, impl.name.removesuffix(KEPT))
    grads = twice(step, cell.device, values)
    if training.raw:
        values["err_grads"] = cell.errors(dict(zip(training.leaves, grads)))
    del grads
    clock = dict(calls=1, repeats=5) if cell.device.type == "cpu" else {}
    values["forward_ms"] = eager_ms(lambda: training.forward(), cell.device, **clock)
    values["eager_ms"] = eager_ms(step, cell.device, **clock)
    if cell.device.type == "cuda":
        values["host_us"] = host_us(step)
        values["graph_ms"] = graph_ms([step], values["eager_ms"])


TRAINING = Benchmark("training", GPU_SHAPES, CPU_SHAPES, NAMES, NAMES[:3], cells_of, measure, our, foreign)
