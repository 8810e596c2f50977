"""Timing of the forward: shapes, inputs, memory floor, and one `Row` per implementation and cell. The clocks are in timing.py.

A cell is a shape, a gate regime and a gate form. Every implementation of a cell runs on the same tensors in the same process:

    first   wall time of the first call, compilation and tuning included
    graph   GPU time per call: median over replays of a CUDA graph that holds many calls, inputs warm in L2 where they fit
    cold    the same, the calls rotating over input sets that together exceed twice the L2
    eager   time per call of back-to-back calls, by events (wall time on a CPU)
    host    wall time until an eager call returns, the device left to work: the least of several windows of calls

The floor is every input byte read once and every output byte written once at the bandwidth that a copy kernel reached in the same run.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from openkda import backends
from openkda.ops import chunk_kda
from openkda.peers import Args, Call, Peer
from openkda.problem import Problem, describe
from openkda.reference import naive_chunk_kda, prepare
from openkda.testing import Case, gate_logits, relative_error
from openkda.timing import eager_ms, graph_ms, host_us, host_windows_us

GPU_SHAPES = (
    "T8192_H96", "T8192_H64", "mix6_H64", "8x1024_H64", "T8192_H16", "T32768_H8", "T2048_H12", "T1024_H4", "T8192_H12_N4",
)  # fmt: skip
CPU_SHAPES = ("T512_H2", "T2048_H4")
GATES = ("bounded", "softplus")
LOWER_BOUND = -5.0
ORACLE_HEADS = 2  # heads whose results are held against fp64
ORACLE_TOKENS = 32768  # longest call that is held against it
_MIXED = (1300, 547, 2048, 963, 271, 3063)  # sequence lengths of mix6
_DOCUMENTS = tuple(round(20 * 200 ** (i * 37 % 64 / 63)) for i in range(64))  # of docs64: 20 to 4000 tokens, log-uniform, shuffled
_SHORT = tuple(7 + 11 * i % 293 for i in range(60))  # of short60: 7 to 297 tokens
_NAMED = {"mix6": _MIXED, "docs64": _DOCUMENTS, "short60": _SHORT, "longtail": (*_SHORT[:30], 16384, *_SHORT[30:])}
_NAME = re.compile(rf"(?:T(\d+)|(\d+)x(\d+)|({'|'.join(_NAMED)}))_H(\d+)(?:_HV(\d+))?(?:_N(\d+))?(?:_D(\d+))?")


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
        docs64_H32: 64 of 20 to 4000 tokens. short60_H16: sixty of 7 to 297 tokens; longtail_H16: one of 16384 tokens among them.
        _HV sets the value heads (default H), _D the head dimension (default 128). ValueError for anything else."""
        found = _NAME.fullmatch(name)
        if not found:
            raise ValueError(f"shape is {name!r}; it must look like T8192_H64, T8192_H12_N4, 8x1024_H64 or mix6_H64")
        T, n, each, named, H, HV, N, D = found.groups()
        if named:
            lengths = _NAMED[named]
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


def make_cases(shape: Shape, gates: Sequence[tuple[str, str]], device: torch.device, seed: int = 0) -> list[Case]:
    """Raw bf16 inputs on the device for each (gate form, regime), all but the gate shared; fp32 V-first initial states; L2 norm, gate and
    sigmoid left to the call."""
    gen = torch.Generator(device).manual_seed(seed)
    randn = lambda *size, dtype=torch.bfloat16: torch.randn(*size, generator=gen, device=device, dtype=dtype)
    T, H, HV, D, N = shape.tokens, shape.H, shape.HV, shape.D, len(shape.lengths)
    shared: Args = dict(q=randn(1, T, H, D), k=randn(1, T, H, D), v=randn(1, T, HV, D), beta=randn(1, T, HV))
    shared["initial_state"] = 0.1 * randn(N, HV, D, D, dtype=torch.float32)
    if N > 1:
        shared["cu_seqlens"] = torch.tensor([0, *torch.tensor(shape.lengths).cumsum(0).tolist()], device=device)
    for flag in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "output_final_state", "state_v_first"):
        shared[flag] = True
    cases = []
    for gate, regime in gates:
        gen.manual_seed(seed + 1)  # a gate does not depend on which others are made
        logits, A_log, dt_bias = gate_logits(regime, T, HV, D, bounded=gate == "bounded", generator=gen)
        args = shared | dict(g=logits.to(torch.bfloat16).unsqueeze(0), A_log=A_log, dt_bias=dt_bias)
        if gate == "bounded":
            args["lower_bound"] = LOWER_BOUND
        cases.append(Case(args, regime, shape.lengths if N > 1 else None))
    return cases


@torch.inference_mode()
def oracles(cases: Sequence[Case], heads: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """o [1, T, *, V] and the final states of the first `heads` q/k heads of each case, in fp64.

    By the chunk algebra of reference.py, equal to the token recurrence within fp64 rounding (tests/test_bench.py) and many times quicker.
    Heads are independent, so one pass over the chunks serves all cases, their heads side by side. The cases share one shape."""
    values = heads * (cases[0].args["v"].shape[2] // cases[0].args["q"].shape[2])
    prepared, states = [], []
    for case in cases:
        x = {n: case.args[n][:, :, :values].double() for n in ("v", "g", "beta")}
        x |= {n: case.args[n][:, :, :heads].double() for n in ("q", "k")}
        lower_bound = case.args.get("lower_bound")
        prepared.append(prepare(
            **x, A_log=case.args["A_log"][:values], dt_bias=case.args["dt_bias"][:values], lower_bound=lower_bound,
            gate="softplus" if lower_bound is None else "bounded", qk_l2norm=True, beta_sigmoid=True, neg_eigval=False,
        ))  # fmt: skip
        states.append(case.args["initial_state"][:, :values].double().mT)
    lengths = cases[0].lengths or (cases[0].args["q"].shape[1],)
    sequences = zip(*(torch.cat(tensors, 2).split(lengths, 1) for tensors in zip(*prepared)), torch.cat(states, 1).split(1))
    found = [naive_chunk_kda(*tensors, initial_state=S, output_final_state=True, chunk_size=32) for *tensors, S in sequences]
    o, S = (torch.cat(parts, dim) for parts, dim in zip(zip(*found), (1, 0)))
    return list(zip(o.split(values, 2), S.mT.split(values, 1)))


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
        return partial(chunk_kda, **args, backend=name)

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
    host_median_us: float | None = None  # over the same windows of calls
    host_split_us: dict[str, float] | None = None
    forward_ms: float | None = None  # training: the forward alone, as eager_ms
    peak_mib: float | None = None  # memory of one call above its inputs
    err_o: float | None = None
    err_state: float | None = None
    err_grads: dict[str, float] | None = None  # training: by input
    gradients_by: str | None = None  # training, ours: the backend that computes the gradients
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


@dataclass(frozen=True)
class Cell:
    """Inputs of one cell and what every implementation of it is compared with."""

    shape: Shape
    gate: str
    regime: str
    device: torch.device
    bandwidth: float  # bytes per second
    case: Case
    oracle: tuple[torch.Tensor, torch.Tensor] | None  # fp64 o and final states of the first heads; None for a call too long for it

    @property
    def problem(self) -> Problem:
        """The call as backends see it."""
        return self.case.described()[0]

    @torch.inference_mode(False)  # what a call reads of cu_seqlens is remembered of tensors with a version alone
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


def row_of(cell: Cell, impl: Implementation, floor: int, fill: Callable[[dict[str, object]], None]) -> Row:
    """The row that `fill` completes, its fields given as a dictionary. A failure becomes the row's `error`; only an interrupt passes."""
    shape = cell.shape
    row = Row(shape.name, shape.tokens, len(shape.lengths), shape.H, shape.HV, shape.D, cell.regime, cell.gate, impl.name, impl.ours,
              1e3 * floor / cell.bandwidth)  # fmt: skip
    values = dict(row.__dict__)
    try:
        reason = impl.why_not(cell.problem)
        if reason is None and impl.shapes is not None and shape.name not in impl.shapes:
            reason = "left out of this run for this shape"
        if reason is not None:
            return Row(**values | dict(error=reason))
        fill(values)
    except Exception as failure:
        lines = [line for line in str(failure).splitlines() if line.strip()] or [""]
        values["error"] = f"{type(failure).__name__}: {lines[0].strip()[:200]}"
    return Row(**values)


def twice(call: Call, device: torch.device, values: dict[str, object]) -> tuple[torch.Tensor, ...]:
    """Results of the first call, its time, and whether a second one gives the same bits; on a GPU also the memory of a third."""
    cuda = device.type == "cuda"
    sync = torch.cuda.synchronize if cuda else lambda: None
    sync()
    start = time.perf_counter()
    result = call()
    sync()
    values["first_s"] = time.perf_counter() - start
    values["bit_equal"] = all(torch.equal(a, b) for a, b in zip(result, call()))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        values["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return result


def measure(cell: Cell, impl: Implementation, *, split_host: bool = False) -> Row:
    """Every clock on the forward of one implementation."""
    return row_of(cell, impl, floor_bytes(cell.problem), partial(_measure, cell, impl, split_host))


@torch.inference_mode()  # around the clocks, not inside them
def _measure(cell: Cell, impl: Implementation, split_host: bool, values: dict[str, object]) -> None:
    call = impl.bind(cell.case.args)
    values.update(cell.errors(twice(call, cell.device, values)))
    if cell.device.type == "cpu":
        values["eager_ms"] = eager_ms(call, cell.device, calls=1, repeats=5)
        return
    values["eager_ms"] = eager_ms(call, cell.device)
    windows = host_windows_us(call)
    values.update(host_us=min(windows), host_median_us=statistics.median(windows))
    if split_host and impl.ours:
        values["host_split_us"] = host_split(cell, impl.name)
    values["graph_ms"] = graph_ms([call], values["eager_ms"])
    values["cold_ms"] = graph_ms([impl.bind(args) for args in cell.rotated()], values["eager_ms"])


def host_split(cell: Cell, backend: str) -> dict[str, float]:
    """Where an eager call of ours spends the host's time, in microseconds: checking the arguments, choosing the backend, launching."""
    arguments = cell.case.arguments
    problem, inputs = describe(**arguments)
    forward = backends.module(backend).forward
    return dict(
        checks=host_us(lambda: describe(**arguments)),
        choice=host_us(lambda: backends.choose(problem, backend)),
        launches=host_us(lambda: forward(problem, inputs)),
    )


def cells_of(shape: Shape, regimes: Sequence[str], gates: Sequence[str], device: torch.device, bandwidth: float) -> list[Cell]:
    """The cells of one shape, gate form by gate form."""
    wanted = [(gate, regime) for gate in gates for regime in regimes]
    cases = make_cases(shape, wanted, device)
    known = oracles(cases, min(ORACLE_HEADS, shape.H)) if shape.tokens <= ORACLE_TOKENS else [None] * len(cases)
    return [Cell(shape, gate, regime, device, bandwidth, case, oracle) for (gate, regime), case, oracle in zip(wanted, cases, known)]


@dataclass(frozen=True)
class Benchmark:
    """One kind of run: what it times, on which shapes, and how."""

    name: str
    gpu_shapes: tuple[str, ...]
    cpu_shapes: tuple[str, ...]
    names: tuple[str, ...]  # of ours
    gpu_names: tuple[str, ...]  # those that a GPU is timed with unless others are asked for
    cells: Callable[[Shape, Sequence[str], Sequence[str], torch.device, float], list]  # (shape, regimes, gates, device, bandwidth)
    measure: Callable[..., Row]  # (cell, implementation, split_host=)
    ours: Callable[[str], Implementation]
    foreign: Callable[[Peer, tuple[str, ...] | None], Implementation]

    def run(
        self, shapes: Sequence[Shape], regimes: Sequence[str], gates: Sequence[str], impls: Sequence[Implementation], device: torch.device,
        bandwidth: float, *, split_host: bool = False, out_of_time: Callable[[], bool] = lambda: False,
    ) -> Iterator[Row]:  # fmt: skip
        """Rows of every cell, shape by shape. Stops before the next cell once out_of_time() is true."""
        for shape in shapes:
            if out_of_time():
                return
            for cell in self.cells(shape, regimes, gates, device, bandwidth):
                if out_of_time():
                    return
                for impl in impls:
                    yield self.measure(cell, impl, split_host=split_host)
            if device.type == "cuda":
                torch.cuda.empty_cache()


FORWARD = Benchmark("forward", GPU_SHAPES, CPU_SHAPES, backends.NAMES, ("hopper", "portable"), cells_of, measure, our, foreign)
