"""Launching compiled kernels with little host work: what a launch needs besides addresses is worked out once and kept.

Triton's own launch path rebuilds a tensor map per descriptor and call (10 us each), binds arguments anew (20 to 40 us a launch) and asks
the driver about every pointer. Here a `Launch` describes one kernel launch with its arguments by name; `load` compiles what is missing,
all kernels at once, and `Ready.bind` puts addresses in. Launching what is bound is one call into Triton's compiled launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from openkda.hopper.compat import MockTensor, TensorDescriptor, driver_utils, gl, raw_launch, tensor_map


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

    def descriptor(self) -> TensorDescriptor:
        """The same as Triton's host descriptor, of memory that is not there"""
        layout = gl.NVMMASharedLayout(min(128, self.box_columns * self.dtype.itemsize), 8 * self.dtype.itemsize, 2)
        shape, box = [self.rows, self.columns], [self.box_rows, self.box_columns]
        return TensorDescriptor(MockTensor(self.dtype), shape, [self.stride, 1], box, layout)


@dataclass(frozen=True)
class Launch:
    """One launch: kernel[grid](*args, *constants). args: Pointers, Matrices, None, ints, floats; constants: what the kernel is compiled
    for, its last parameters. Kernels do not specialise on the values of ints."""

    kernel: triton.JITFunction
    grid: tuple[int, int, int]
    args: tuple
    constants: tuple
    num_warps: int
    pdl: bool = False
    registers: int | None = None  # at most so many a thread

    @property
    def key(self) -> tuple:
        """What the compiled kernel depends on"""
        kinds = tuple(_kind(x) for x in self.args)
        return (self.kernel, self.constants, self.num_warps, self.pdl, self.registers, kinds)

    def compile(self) -> object:
        """Triton's compiled kernel, from its caches where it is there"""
        args = [x.descriptor() if isinstance(x, Matrix) else MockTensor(x.dtype) if isinstance(x, Pointer) else x for x in self.args]
        options = dict(num_warps=self.num_warps, launch_pdl=self.pdl, maxnreg=self.registers)
        return self.kernel.warmup(*args, *self.constants, grid=self.grid, **options)


def _kind(x: object) -> object:
    if isinstance(x, Matrix):
        return (x.dtype, x.box_rows, x.box_columns)
    return x.dtype if isinstance(x, Pointer) else type(x)


class Ready(NamedTuple):
    """A launch whose kernel is on the device"""

    launch: Launch
    run: Callable[..., None]  # Triton's compiled launcher: run(x, y, z, stream, *fixed, *arguments)
    fixed: tuple  # function, launch attributes, metadata
    maps: tuple[tuple, ...]  # what `tensor_map` needs for each Matrix
    unused: tuple  # trailing parameters that are given as options

    def bind(self, addresses: Sequence[int]) -> tuple[Callable[..., None], tuple[int, int, int], tuple]:
        """(run, grid, rest): run(*grid, stream, *rest) launches it on operands at these addresses."""
        flat: list[object] = []
        kinds = iter(self.maps)
        for x in self.launch.args:
            if isinstance(x, Matrix):
                found = _tensor_map(addresses[x.operand], next(kinds), x.rows, x.columns, x.stride)
                flat += (found, x.rows, x.columns, x.stride, 1)
            else:
                flat.append(addresses[x.operand] + x.offset if isinstance(x, Pointer) else x)
        return self.run, self.launch.grid, (*self.fixed, *flat, *self.launch.constants, *self.unused)


_loaded: dict[tuple, tuple] = {}
_tensor_map = lru_cache(maxsize=4096)(tensor_map)


def load(launches: Sequence[Launch], device: int) -> list[Ready]:
    """The launches with their kernels loaded on a device. Kernels that were never needed before are compiled side by side: most of a
    compilation runs outside Python's lock, so that three take little longer than one."""
    missing = {(device, x.key): x for x in launches}
    missing = {key: x for key, x in missing.items() if key not in _loaded}

    def fetch(x: Launch) -> tuple:
        with torch.cuda.device(device):  # the current device is a thread's own
            return raw_launch(x.compile())

    if len(missing) > 1:
        driver_utils()  # compiled by whoever needs it first: once, before the threads
        # A kernel's first fifth is Python. Taken in turns, all of them would come to the rest late.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1.0)
        try:
            with ThreadPoolExecutor(len(missing)) as pool:
                _loaded.update(zip(missing, pool.map(fetch, missing.values())))
        finally:
            sys.setswitchinterval(interval)
    else:
        _loaded.update((key, fetch(x)) for key, x in missing.items())
    return [Ready(x, *_loaded[device, x.key]) for x in launches]


@lru_cache(maxsize=1024)
def _ready(make: Callable[..., Launch], key: tuple, device: int) -> Ready:
    return load([make(*key)], device)[0]


def start(make: Callable[..., Launch], key: tuple, operands: Sequence[torch.Tensor | None], device: torch.device) -> None:
    """Launch make(*key) on these operands. key holds all that the launch depends on besides addresses: it is made once."""
    run, grid, rest = _ready(make, key, device.index).bind([0 if x is None else x.data_ptr() for x in operands])
    run(*grid, torch._C._cuda_getCurrentRawStream(device.index), *rest)
