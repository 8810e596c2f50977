"""Launching compiled kernels with little host work: argument checks, specialisation keys and tensor maps are looked up, not rebuilt.

Triton's own launch path rebuilds a tensor map per descriptor and call (10 us each) and binds arguments anew (20 to 40 us). Here a call
looks up the compiled kernel by the dtypes of its arguments and the tensor maps by address and shape."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from openkda.hopper.compat import TensorDescriptor, gl, raw_launch, tensor_map


class Box(NamedTuple):
    """A matrix [rows, columns] in memory, read or written in boxes of [box_rows, box_columns] by the copy engine"""

    tensor: torch.Tensor  # its storage; row r starts `stride` elements after row r - 1
    rows: int
    columns: int
    stride: int
    box_rows: int
    box_columns: int

    def descriptor(self) -> TensorDescriptor:
        """The same as Triton's host descriptor"""
        layout = gl.NVMMASharedLayout(128, 8 * self.tensor.element_size(), 2)
        return TensorDescriptor(self.tensor, [self.rows, self.columns], [self.stride, 1], [self.box_rows, self.box_columns], layout)


def _kind(x: object) -> object:
    """What a kernel is specialised on in argument x"""
    if isinstance(x, Box):
        return (x.tensor.dtype, x.box_rows, x.box_columns)
    if isinstance(x, torch.Tensor):
        return (x.dtype, x.data_ptr() % 16 == 0)
    return type(x)


_compiled: dict[tuple, object] = {}
_raw_launch = lru_cache(maxsize=None)(raw_launch)
_tensor_map = lru_cache(maxsize=4096)(tensor_map)


def launch(
    kernel: triton.JITFunction, grid: tuple[int, int, int], args: tuple, constants: tuple, *, device: int, num_warps: int, pdl: bool
) -> None:
    """kernel[grid](*args, *constants) on the device's current stream. args: tensors, Boxes, None, ints, floats; constants: what the kernel
    is compiled for, its last parameters."""
    key = (kernel, constants, num_warps, pdl, device, *map(_kind, args))
    compiled = _compiled.get(key)
    if compiled is None:
        plain = [x.descriptor() if isinstance(x, Box) else x for x in args]
        _compiled[key] = kernel[grid](*plain, *constants, num_warps=num_warps, launch_pdl=pdl)
        return
    run, maps = _raw_launch(compiled)
    flat: list[object] = []
    box = iter(maps)
    for x in args:
        if isinstance(x, Box):
            flat += (_tensor_map(x.tensor.data_ptr(), next(box), x.rows, x.columns, x.stride), x.rows, x.columns, x.stride, 1)
        else:
            flat.append(x)
    run(*grid, torch._C._cuda_getCurrentRawStream(device), (*flat, *constants))
