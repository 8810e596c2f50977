"""Every Triton and Gluon name that has moved between releases, imported in one place; `why_not` names the releases verified."""

from __future__ import annotations

import triton
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import MockTensor

__all__ = [
    "MockTensor",
    "TensorDescriptor",
    "driver_utils",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "raw_launch",
    "tensor_map",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


def raw_launch(compiled: object) -> tuple[object, tuple, tuple, tuple]:
    """(run, fixed, maps, unused) of a compiled kernel: run(x, y, z, stream, *fixed, *arguments, *unused) launches it without Triton's
    argument handling: a pointer is passed as an integer, a tensor descriptor as its tensor map, sizes and strides. maps holds what
    `tensor_map` needs for each descriptor; unused stands for parameters that the kernel names but that are given as options."""
    launcher = compiled.run
    launch = launcher.launch
    # A wrapper that builds tensor maps closes over the compiled launcher.
    if getattr(launch, "__closure__", None) is not None:
        launch = launch.__closure__[launch.__code__.co_freevars.index("launcher")].cell_contents
    fixed = (
        compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata, None, None, None,
    )  # fmt: skip
    maps = tuple(
        (m["swizzle"], m["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]], tuple(m["block_size"]))
        for m in (getattr(compiled.metadata, "tensordesc_meta", None) or ())
    )
    unused = (None,) * sum(name == "num_warps" for name in compiled.src.fn.arg_names)
    return launch, fixed, maps, unused


def driver_utils() -> object:
    """Triton's helper module for the CUDA driver"""
    return triton.runtime.driver.active.utils


def tensor_map(pointer: int, kind: tuple, rows: int, columns: int, stride: int) -> object:
    """The copy engine's description of a matrix"""
    swizzle, size, dtype, box = kind
    return driver_utils().fill_tma_descriptor(pointer, swizzle, size, dtype, list(box), [rows, columns], [stride, 1], 0)
