"""Timing of the forward: shapes, inputs, memory floor, and one `Row` per implementation and cell. The clocks are in timing.py.

A cell is a shape, a gate regime and a gate form. Every implementation of a cell runs on the same tensors in the same process:

    first   wall time of the first call, compilation and tuning included
    graph   GPU time per call: median over replays of a CUDA graph that holds many calls, inputs warm in L2 where they fit
    cold    the same, the calls rotating over input sets that together exceed twice the L2
    eager   time per call of back-to-back calls, by events (wall time on a CPU)
    host    wall time until an eager call returns, the device left to work

The floor is every input byte read once and every output byte written once at the bandwidth that a copy kernel reached in the same run.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from openkda import backends
from openkda.ops import chunk_kda
from openkda.peers import Args, Call, Peer
from openkda.problem import Problem
from openkda.testing import Case, gate_logits, relative_error
from openkda.timing import eager_ms, graph_ms, host_us

GPU_SHAPES = (
    "T8192_H96", "T8192_H64", "mix6_H64", "8x1024_H64", "T8192_H16", "T32768_H8", "T2048_H12", "T1024_H4", "T8192_H12_N4",
)  # fmt: skip
CPU_SHAPES = ("T512_H2", "T2048_H4")
GATES = ("bounded", "softplus")
LOWER_BOUND = -5.0
ORACLE_HEADS = 2  # heads whose results are held against the fp64 recurrence
ORACLE_TOKENS = 8192  # longest call that is held against it
_MIXED = (1300, 547, 2048, 963, 271, 3063)  # sequence lengths of mix6
_NAME = re.compile(r"(?:T(\d+)|(\d+)x(\d+)|(mix6))_H(\d+)(?:_HV(\d+))?(?:_N(\d+))?(?:_D(\d+))?")


@dataclass(frozen=True)
class Shape:
    """Sizes of one benchmark problem. Several sequences are packed along T."""

    name: str
    lengths: tuple[int, ...]
    H: int
    HV: int
    D: int  # K and V

    @staticmethod
    def parse(name: str) -> Shape:
        """T8192_H64: one sequence. T8192_H12_N4 or 4x2048_H12: four of 2048 tokens. mix6_H64: six of uneven length, 8192 tokens in all.
        _HV sets the value heads (default H), _D the head dimension (default 128). ValueError for anything else."""
        found = _NAME.fullmatch(name)
        if not found:
            raise ValueError(f"shape is {name!r}; it must look like T8192_H64, T8192_H12_N4, 8x1024_H64 or mix6_H64")
        T, n, each, mixed, H, HV, N, D = found.groups()
        if mixed:
            lengths = _MIXED
        elif n:
            lengths = (int(each),) * int(n)
        else:
            N = int(N or 1)
            if N < 1 or int(T) % N:
                raise ValueError(f"shape is {name!r}; its {T} tokens must divide into {N} sequences")
            lengths = (int(T) // N,) * N
        H, D = int(H), int(D or 128)
        HV = int(HV or H)
        if min(H, HV, D, *lengths) < 1 or HV % H or D > 256:
            raise ValueError(f"shape is {name!r}; every size must be at least 1, HV a multiple of H, D at most 256")
        return Shape(name, lengths, H, HV, D)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


def make_inputs(shape: Shape, regime: str, gate: str, device: torch.device, seed: int = 0) -> Case:
    """Raw bf16 inputs of a cell, made on the device; fp32 V-first initial states; l2norm, gate and sigmoid left to the call."""
    gen = torch.Generator(device).manual_seed(seed)
    randn = lambda *size, dtype=torch.bfloat16: torch.randn(*size, generator=gen, device=device, dtype=dtype)
    T, H, HV, D, N = shape.tokens, shape.H, shape.HV, shape.D, len(shape.lengths)
    args: Args = dict(q=randn(1, T, H, D), k=randn(1, T, H, D), v=randn(1, T, HV, D), beta=randn(1, T, HV))
    args["initial_state"] = 0.1 * randn(N, HV, D, D, dtype=torch.float32)
    logits, args["A_log"], args["dt_bias"] = gate_logits(regime, T, HV, D, bounded=gate == "bounded", generator=gen)
    args["g"] = logits.to(torch.bfloat16).unsqueeze(0)
    if gate == "bounded":
        args["lower_bound"] = LOWER_BOUND
    if N > 1:
        args["cu_seqlens"] = torch.tensor([0, *torch.tensor(shape.lengths).cumsum(0).tolist()], device=device)
    for flag in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "output_final_state", "state_v_first"):
        args[flag] = True
    return Case(args, regime, shape.lengths if N > 1 else None)


def first_heads(case: Case, heads: int) -> Case:
    """The same call on its first `heads` q/k heads alone; the heads are independent, so this is what they must give."""
    args = dict(case.args)
    values = heads * (args["v"].shape[2] // args["q"].shape[2])
    for name, count in (("q", heads), ("k", heads), ("v", values), ("g", values), ("beta", values)):
        args[name] = args[name][:, :, :count]
    args["initial_state"] = args["initial_state"][:, :values]
    args["A_log"], args["dt_bias"] = args["A_log"][:values], args["dt_bias"][:values]
    return Case(args, case.regime, case.lengths)


def floor_bytes(p: Problem) -> int:
    """Bytes of every input read once and every output written once."""
    tokens = p.B * p.T
    per_token = (2 * p.H * p.K + 2 * p.HV * p.V) * p.dtype.itemsize + p.HV * p.K * p.gate_dtype.itemsize + p.HV * p.beta_dtype.itemsize
    states = math.prod(p.state_shape) * p.state_dtype.itemsize * (p.has_initial_state + p.output_final_state)
    parameters = 4 * p.HV * (p.has_A_log + p.K * p.has_dt_bias)
    return tokens * per_token + states + parameters


@dataclass(frozen=True)
class Implementation:
    """What a row times: one of our backends or a peer."""

    name: str
    ours: bool
    why_not: Callable[[Problem], str | None]
    bind: Callable[[Args], Call]
    shapes: tuple[str, ...] | None = None  # names of the shapes it is limited to


def our(name: str) -> Implementation:
    """A backend of this library, through the public function."""

    def bind(args: Args) -> Call:
        return torch.inference_mode()(partial(chunk_kda, **args, backend=name))

    return Implementation(name, True, partial(backends.why_not, name), bind)


def foreign(peer: Peer, shapes: tuple[str, ...] | None = None) -> Implementation:
    """A peer, on all shapes or on some."""
    return Implementation(peer.name, False, peer.why_not, peer.bind, shapes)


@dataclass(frozen=True)
class Row:
    """One implementation on one cell. Times are None where they do not apply; `error` says in one line why a row has none."""

    shape: str
    tokens: int
    sequences: int
    H: int
    HV: int
    D: int
    regime: str
    gate: str
    impl: str
    ours: bool
    floor_ms: float
    first_s: float | None = None
    graph_ms: float | None = None
    cold_ms: float | None = None
    eager_ms: float | None = None
    host_us: float | None = None
    host_split_us: dict[str, float] | None = None
    peak_mib: float | None = None  # memory of one call above its inputs
    err_o: float | None = None
    err_state: float | None = None
    bit_equal: bool | None = None
    error: str | None = None

    @property
    def best_ms(self) -> float | None:
        """Time per call as free of host cost as was measured: cold, else graph, else eager."""
        return next((t for t in (self.cold_ms, self.graph_ms, self.eager_ms) if t is not None), None)

    @property
    def over_floor(self) -> float | None:
        """best_ms over the memory floor."""
        return None if self.best_ms is None else self.best_ms / self.floor_ms


@dataclass
class Cell:
    """Inputs of one cell and what every implementation of it is compared with."""

    shape: Shape
    regime: str
    gate: str
    device: torch.device
    bandwidth: float  # bytes per second
    case: Case = field(init=False)

    def __post_init__(self):
        self.case = make_inputs(self.shape, self.regime, self.gate, self.device)

    @cached_property
    def problem(self) -> Problem:
        return self.case.described()[0]

    @cached_property
    def oracle(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """o and final states of the first heads in fp64, None for a call too long for a token loop."""
        if self.shape.tokens > ORACLE_TOKENS:
            return None
        with torch.inference_mode():
            return first_heads(self.case, min(ORACLE_HEADS, self.shape.H)).oracle

    def rotated(self) -> list[Args]:
        """As many copies of the inputs as exceed twice the L2 together, at least two."""
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        copies = 1 + math.ceil(2 * l2 / floor_bytes(self.problem))
        return [{n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in self.case.args.items()} for _ in range(copies)]

    def errors(self, result: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
        """Relative L2 errors of o and of the final states against the oracle."""
        if self.oracle is None:
            return {}
        o, S = self.oracle
        heads = o.shape[2]
        mine = result[0].reshape(self.case.args["v"].shape)[:, :, :heads], result[1][:, :heads]
        return dict(err_o=relative_error(mine[0], o), err_state=relative_error(mine[1], S))


def measure(cell: Cell, impl: Implementation, *, split_host: bool = False) -> Row:
    """Every clock on one implementation. A failure becomes the row's `error`; only an interrupt passes through."""
    shape = cell.shape
    row = Row(shape.name, shape.tokens, len(shape.lengths), shape.H, shape.HV, shape.D, cell.regime, cell.gate, impl.name, impl.ours,
              1e3 * floor_bytes(cell.problem) / cell.bandwidth)  # fmt: skip
    values = dict(row.__dict__)
    try:
        reason = impl.why_not(cell.problem)
        if reason is None and impl.shapes is not None and shape.name not in impl.shapes:
            reason = "left out of this run for this shape"
        if reason is not None:
            return Row(**values | dict(error=reason))
        _measure(cell, impl, split_host, values)
    except Exception as failure:
        lines = [line for line in str(failure).splitlines() if line.strip()] or [""]
        values["error"] = f"{type(failure).__name__}: {lines[0].strip()[:200]}"
    return Row(**values)


def _measure(cell: Cell, impl: Implementation, split_host: bool, values: dict[str, object]) -> None:
    cuda = cell.device.type == "cuda"
    sync = torch.cuda.synchronize if cuda else lambda: None
    call = impl.bind(cell.case.args)
    sync()
    start = time.perf_counter()
    result = call()
    sync()
    values["first_s"] = time.perf_counter() - start
    values.update(cell.errors(result))
    again = call()
    values["bit_equal"] = all(torch.equal(a, b) for a, b in zip(result, again))
    del result, again
    if not cuda:
        values["eager_ms"] = eager_ms(call, cell.device, calls=1, repeats=5)
        return
    sync()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    values["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    values["eager_ms"] = eager_ms(call, cell.device)
    values["host_us"] = host_us(call)
    if split_host and impl.ours:
        values["host_split_us"] = host_split(cell, impl.name)
    values["graph_ms"] = graph_ms([call], values["eager_ms"])
    values["cold_ms"] = graph_ms([impl.bind(args) for args in cell.rotated()], values["eager_ms"])


@torch.inference_mode()
def host_split(cell: Cell, backend: str) -> dict[str, float]:
    """Where an eager call of ours spends the host's time, in microseconds: checking the arguments, choosing the backend, launching."""
    problem, inputs = cell.case.described()
    forward = backends.module(backend).forward
    return dict(
        checks=host_us(cell.case.described),
        choice=host_us(lambda: backends.choose(problem, backend)),
        launches=host_us(lambda: forward(problem, inputs)),
    )


def run(
    shapes: Sequence[Shape], regimes: Sequence[str], gates: Sequence[str], impls: Sequence[Implementation], device: torch.device,
    bandwidth: float, *, split_host: bool = False, out_of_time: Callable[[], bool] = lambda: False,
) -> Iterator[Row]:  # fmt: skip
    """Rows of every cell, shape by shape. Stops before the next cell once out_of_time() is true."""
    for shape in shapes:
        for gate in gates:
            for regime in regimes:
                if out_of_time():
                    return
                cell = Cell(shape, regime, gate, device, bandwidth)
                for impl in impls:
                    yield measure(cell, impl, split_host=split_host)
                del cell
                if device.type == "cuda":
                    torch.cuda.empty_cache()
