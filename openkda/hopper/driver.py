"""Launches and tensor maps straight from the CUDA driver, by ctypes.

Triton's own launcher is C code compiled once per signature (.3 to .5 s of a first call) that parses some forty arguments per launch. Here
the arguments of a launch lie ready in memory as the driver wants them, and launching is one foreign call with four pointers."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache, lru_cache

import torch

MAP_BYTES = 128  # of a tensor map
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PAIRS = (1 | 2 << 32, 1)  # its value, three 32-bit numbers: (1, 2, 1)
SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PROMOTION_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: a tagged union of 64 bytes"""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int64 * 8))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's library"""
    return ctypes.CDLL("libcuda.so.1")


def failure(what: str, code: int) -> RuntimeError:
    """The error that the driver's code names."""
    text = ctypes.c_char_p()
    driver().cuGetErrorString(code, ctypes.byref(text))
    return RuntimeError(f"{what} failed with {code}: {(text.value or b'unknown').decode()}")


def kernel_name(function: ctypes.c_void_p) -> str:
    """What a kernel on the device is called; drivers before CUDA 12.3 cannot tell."""
    name, find = ctypes.c_char_p(), getattr(driver(), "cuFuncGetName", None)
    known = find is not None and find(ctypes.byref(name), function) == 0
    return name.value.decode() if known else "a kernel"


@lru_cache(maxsize=4096)
def tensor_map(address: int, dtype: int, size: int, swizzle: int, box: tuple[int, int], rows: int, columns: int, stride: int) -> bytes:
    """The copy engine's description of a matrix [rows, columns] of elements of `size` bytes, `stride` elements from row to row, read and
    written in boxes [rows, columns]. dtype and swizzle as the driver numbers them."""
    memory = ctypes.create_string_buffer(MAP_BYTES + 64)
    offset = -ctypes.addressof(memory) % 64
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    code = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(memory) + offset), dtype, 2, ctypes.c_void_p(address), (u64 * 2)(columns, rows),
        (u64 * 1)(stride * size), (u32 * 2)(box[1], box[0]), (u32 * 2)(1, 1), 0, swizzle, PROMOTION_128, 0,
    )  # fmt: skip
    if code:
        raise failure(f"a tensor map of [{rows}, {columns}] at {address:#x}, stride {stride}, boxes of {list(box)},", code)
    return memory.raw[offset : offset + MAP_BYTES]


class Parameters:
    """Where each parameter of a kernel lies in the memory that is handed to the driver: pointers to all of them, then the values."""

    def __init__(self, codes: Sequence[str]):
        """codes: struct's letters, one string a parameter, such as Q, i, f or 128s"""
        self.sizes = [struct.calcsize("<" + code) for code in codes]
        self.offsets = [8 * len(codes) + sum(self.sizes[:n]) for n in range(len(codes))]
        self.layout = struct.Struct(f"<{len(codes)}Q" + "".join(codes))

    def pack(self, values: Sequence[object]) -> ctypes.Array:
        """That memory, filled."""
        memory = ctypes.create_string_buffer(self.layout.size)
        base = ctypes.addressof(memory)
        self.layout.pack_into(memory, 0, *[base + offset for offset in self.offsets], *values)
        return memory


Call = tuple[object, ctypes.c_void_p, ctypes.Array, None]  # the arguments of cuLaunchKernelEx; what they point to lives as long as they do


def prepared(
    function: int, grid: tuple[int, int, int], threads: int, shared: int, pdl: bool, cluster: bool, stream: int, parameters: ctypes.Array
) -> Call:
    """A launch that needs nothing but to be made, any number of times. cluster: every two blocks along the grid's y are one."""
    wanted = [Attribute(SERIALIZATION, (1,))] * pdl + [Attribute(CLUSTER, PAIRS)] * cluster
    config = LaunchConfig(grid, (threads, 1, 1), shared, stream, (Attribute * 2)(*wanted), len(wanted))
    return ctypes.byref(config), ctypes.c_void_p(function), parameters, None


def launch(calls: Sequence[Call], device: int) -> None:
    """Make launches one after the other, on a device that is the current one."""
    start = driver().cuLaunchKernelEx
    for call in calls:
        code = start(*call)
        if code == INVALID_CONTEXT:  # a thread that has not touched the device yet has no context
            torch.cuda.set_device(device)
            code = start(*call)
        if code:
            raise failure(f"the launch of {kernel_name(call[1])}", code)
