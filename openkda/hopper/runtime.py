"""Launching compiled kernels with little host work: what a launch needs besides addresses is worked out once and kept.

Triton's own launch path rebuilds a tensor map per descriptor and call (10 us each), binds arguments anew (20 to 40 us a launch) and asks
the driver about every pointer. Here a `Launch` describes one kernel launch with its arguments by name; `load` compiles what is missing,
all kernels at once, and `Ready.bind` puts addresses in. What is bound is one call into the driver (driver.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from threading import Event
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from openkda.hopper import kept
from openkda.hopper.driver import MAP_BYTES, Call, Loaded, Parameters, loaded, prepared, tensor_map
from openkda.hopper.driver import launch as run

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


class Pointer(NamedTuple):
    """A kernel's pointer argument: `offset` bytes into an operand, 16-byte aligned"""

    operand: int  # its number in the addresses of a call
    dtype: torch.dtype
    offset: int = 0


class Matrix(NamedTuple):
    """A kernel's tensor-map argument: an operand as a matrix [rows, columns] that the copy engine reads or writes in boxes"""

    operand: int
    dtype: torch.dtype
    rows: int
    columns: int
    stride: int  # elements from row to row
    box_rows: int
    box_columns: int
    offset: int = 0  # bytes into the operand


# Kernels that are long in the compiler once Python is done with them, 3.6 to 1.2 seconds on one core: the longest first.
ORDER = (
    "forward_kernel", "state_kernel", "scans_kernel", "reverse_walk_kernel", "forward_walk_kernel", "fused_gradients_kernel",
    "prepare_operands_kernel",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch: kernel[grid](*args, *constants). args: Pointers, Matrices, None, ints, floats; constants: what the kernel is compiled
    for, its last parameters. Kernels do not specialise on the values of ints."""

    kernel: str  # its full name; its module is imported where it is compiled
    grid: tuple[int, int, int]
    args: tuple
    constants: tuple
    num_warps: int
    pdl: bool = False
    cluster: bool = False  # every two blocks along the grid's y are one; the first constant is their Tiles
    registers: int | None = None  # at most so many a thread

    @property
    def key(self) -> tuple:
        """What the compiled kernel depends on"""
        kinds = tuple(_kind(x) for x in self.args)
        return (self.kernel, self.constants, self.num_warps, self.pdl, self.registers, kinds)

    @property
    def rank(self) -> tuple:
        """Sorts those first that take longest in the compiler: by ORDER, then clusters that take two blocks a step (3.6 s where the same
        call's other kernel takes 2.5), then variants with more columns of tiles"""
        name = self.kernel.rpartition(".")[2]
        steps = self.cluster and self.constants[0].form == "steps"
        columns = sum(x.box_columns for x in self.args if isinstance(x, Matrix))
        return (ORDER.index(name) if name in ORDER else len(ORDER), not steps, -columns)

    def function(self) -> JITFunction:
        """The kernel itself"""
        module, _, name = self.kernel.rpartition(".")
        return getattr(import_module(module), name)

    def compile(self, read: Callable[[], None] = lambda: None) -> kept.Compiled:
        """The compiled kernel, as an earlier process kept it or anew. read: called when its source has been read."""
        key = repr(self.key)
        found = kept.find(key)
        if found is None:
            from openkda.hopper import cluster, compat

            args = [compat.stand_in(x) for x in self.args]
            options = dict(num_warps=self.num_warps, launch_pdl=self.pdl, maxnreg=self.registers)
            check = partial(cluster.check_addresses, T=self.constants[0]) if self.cluster else None
            found = compat.compiled(self.function(), (*args, *self.constants), options, read, check)
            kept.keep(key, found)
        return found

    def parameters(self) -> Parameters:
        """The kernel's parameters: None and constants are none, a tensor map comes with its sizes and strides, and two addresses of scratch
        memory, which these kernels do not have, are the last"""
        codes: list[str] = []
        for x in self.args:
            if isinstance(x, Matrix):
                codes += (f"{MAP_BYTES}s", "i", "i", "q", "q")
            elif x is not None:
                codes.append("Q" if isinstance(x, Pointer) else "f" if isinstance(x, float) else "i")
        return Parameters([*codes, "Q", "Q"])


def _kind(x: object) -> object:
    if isinstance(x, Matrix):
        return (x.dtype, x.box_rows, x.box_columns)
    return x.dtype if isinstance(x, Pointer) else type(x)


class Ready(NamedTuple):
    """A launch whose kernel is on the device"""

    launch: Launch
    loaded: Loaded
    parameters: Parameters

    def bind(self, addresses: Sequence[int], stream: int) -> Call:
        """What launches it on operands at these addresses"""
        values: list[object] = []
        kinds = iter(self.loaded.maps)
        for x in self.launch.args:
            if isinstance(x, Matrix):
                found = tensor_map(addresses[x.operand] + x.offset, x.dtype, *next(kinds), x.rows, x.columns, x.stride)
                values += (found, x.rows, x.columns, x.stride, 1)
            elif x is not None:
                values.append(addresses[x.operand] + x.offset if isinstance(x, Pointer) else x)
        memory = self.parameters.pack([*values, 0, 0])
        x, kernel = self.launch, self.loaded
        return prepared(kernel.function, x.grid, kernel.threads, kernel.shared, x.pdl, x.cluster, stream, memory)


_loaded: dict[tuple, tuple[Loaded, Parameters]] = {}


def load(launches: Sequence[Launch], device: int, soon: Callable[[], Sequence[Launch]] = tuple) -> list[Ready]:
    """The launches with their kernels loaded on a device, the current one. Kernels that were never needed before are compiled side by side,
    so that three take little longer than one: in ORDER, each as soon as Python is done with the one before. With them, where there are any,
    what `soon` says will be needed next."""
    find = lambda them: {key: kept.find(repr(key)) for key in them}
    missing = {x.key: x for x in launches if (device, x.key) not in _loaded}
    found = find(missing)
    if None in found.values():
        others = {x.key: x for x in soon() if (device, x.key) not in _loaded and x.key not in missing}
        missing |= others
        found |= find(others)
    order = sorted((x for key, x in missing.items() if found[key] is None), key=lambda x: x.rank)

    def compiled(x: Launch, turn: Event, next_turn: Event) -> kept.Compiled:
        turn.wait()
        try:
            return x.compile(next_turn.set)
        finally:
            next_turn.set()

    if order:
        turns = [Event() for _ in range(len(order) + 1)]
        turns[0].set()
        with ThreadPoolExecutor(len(order)) as pool:
            kernels = pool.map(compiled, order, turns, turns[1:])
            found |= {x.key: kernel for x, kernel in zip(order, kernels)}
    for key, x in missing.items():
        _loaded[device, key] = loaded(found[key], device), x.parameters()
    return [Ready(x, *_loaded[device, x.key]) for x in launches]


@dataclass(frozen=True)
class Program:
    """Launches to be made one after the other, any number of times"""

    ready: list[Ready]
    bound: dict[tuple[int, ...], list[Call]] = field(default_factory=dict)  # by stream and addresses of the operands

    def run(self, addresses: Sequence[int], device: int) -> None:
        """Make them on operands at these addresses of a device, the current one, in its current stream."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        key = (stream, *addresses)
        found = self.bound.get(key)
        if found is None:
            if len(self.bound) >= 256:  # a model of many layers has that many
                self.bound.clear()
            found = self.bound[key] = [x.bind(addresses, stream) for x in self.ready]
        run(found, device)


class Listener(Protocol):
    """Takes what is launched on tensors without memory (rehearsal.py)"""

    def add(self, launch: Launch, operands: Sequence[torch.Tensor | None]) -> None:
        """A launch on these operands."""

    def constant(self, table: torch.Tensor) -> torch.Tensor:
        """What stands for a table of the host's, copied to the device."""


listener: ContextVar[Listener] = ContextVar("listener")


def on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A table of the host's on a device"""
    return listener.get().constant(table) if device.type == "meta" else table.to(device)


@lru_cache(maxsize=1024)
def _ready(make: Callable[..., Launch], key: tuple, device: int) -> Ready:
    return load([make(*key)], device)[0]


def start(make: Callable[..., Launch], key: tuple, operands: Sequence[torch.Tensor | None], device: torch.device) -> None:
    """Launch make(*key) on these operands. key holds all that the launch depends on besides addresses: it is made once."""
    if device.type == "meta":
        listener.get().add(make(*key), operands)
        return
    if device.type == "cpu":  # Triton's interpreter, which takes tensors
        x = make(*key)
        args = [operands[a.operand] if isinstance(a, Pointer) else a for a in x.args]
        x.function()[x.grid](*args, *x.constants, num_warps=x.num_warps, maxnreg=x.registers)
        return
    addresses = [0 if x is None else x.data_ptr() for x in operands]
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    run([_ready(make, key, device.index).bind(addresses, stream)], device.index)


def full_name(kernel: JITFunction) -> str:
    """Of a kernel defined in a module"""
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def plain(
    kernel: JITFunction, grid: tuple[int, int, int], dtypes: tuple, numbers: tuple, constants: tuple, warps: int,
    registers: int | None,
) -> Launch:  # fmt: skip
    """A launch whose parameters are its operands in order (dtypes; None: absent), then numbers, then constants."""
    args = (*(None if x is None else Pointer(i, x) for i, x in enumerate(dtypes)), *numbers)
    return Launch(full_name(kernel), grid, args, constants, warps, registers=registers)


def launch(
    kernel: JITFunction, grid: tuple[int, int, int], operands: Sequence[torch.Tensor | None], numbers: tuple, constants: tuple,
    *, warps: int = 4, registers: int | None = None,
) -> None:  # fmt: skip
    """Launch a `plain` kernel. Operands are 16-byte aligned."""
    device = next(x.device for x in operands if x is not None)
    dtypes = tuple(x if x is None else x.dtype for x in operands)
    start(plain, (kernel, grid, dtypes, numbers, constants, warps, registers), operands, device)
