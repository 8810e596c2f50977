"""Kernels, launches and tensor maps straight from the CUDA driver, by ctypes.

Triton's own launcher is C code compiled once per signature (.3 to .5 s of a first call) that parses some forty arguments per launch; what
loads its kernels is C code compiled once per machine. Here the arguments of a launch lie ready in memory as the driver wants them,
launching is one foreign call with four pointers, and neither needs a compiler."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from openkda.hopper.kept import Compiled

MAP_BYTES = 128  # of a tensor map
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PAIRS = (1 | 2 << 32, 1)  # its value, three 32-bit numbers: (1, 2, 1)
SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PROMOTION_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
ELEMENTS = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
MAX_THREADS, STATIC_SHARED, DYNAMIC_SHARED = 0, 1, 8  # CUfunction_attribute
SHARED_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
PLAIN_SHARED = 48 * 1024  # bytes of a block that need not be asked for


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


def check(what: str, code: int) -> None:
    """Raise the error that a code of the driver names, if any."""
    if code:
        raise failure(what, code)


class Loaded(NamedTuple):
    """A kernel on the device"""

    function: int  # the driver's handle
    threads: int  # of a block
    shared: int  # bytes of a block
    maps: tuple[tuple, ...]  # what `tensor_map` needs of each tensor map besides the matrix: swizzle, box


def loaded(kernel: Compiled, device: int) -> Loaded:
    """A compiled kernel, loaded on a device, the current one"""
    found = kernel.metadata
    name, shared, threads = found["name"], found["shared"], 32 * found["num_warps"]
    if found["global_scratch_size"] or found["profile_scratch_size"] or found["num_ctas"] != 1:
        raise RuntimeError(f"{name} wants scratch memory or clusters, which its launcher does not provide")
    torch.cuda.set_device(device)  # a thread that has not touched the device yet has no context
    library, module, function, value = driver(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    check(f"loading {name}", library.cuModuleLoadData(ctypes.byref(module), kernel.cubin))
    check(f"finding {name}", library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))

    def attribute(which: int) -> int:
        check(f"asking about {name}", library.cuFuncGetAttribute(ctypes.byref(value), which, function))
        return value.value

    most = attribute(MAX_THREADS)
    if threads > most:
        raise RuntimeError(f"{name} has {threads} threads a block; its registers allow {most}")
    if shared > PLAIN_SHARED:
        check("asking for shared memory", library.cuDeviceGetAttribute(ctypes.byref(value), SHARED_OPTIN, device))
        room = value.value - attribute(STATIC_SHARED)
        if shared > room:
            raise RuntimeError(f"{name} wants {shared} bytes of shared memory a block; the device has {room}")
        check(f"shared memory for {name}", library.cuFuncSetCacheConfig(function, PREFER_SHARED))
        check(f"shared memory for {name}", library.cuFuncSetAttribute(function, DYNAMIC_SHARED, room))
    maps = tuple((x["swizzle"], tuple(x["block_size"])) for x in found["tensordesc_meta"] or ())
    return Loaded(function.value, threads, shared, maps)


@lru_cache(maxsize=4096)
def tensor_map(address: int, dtype: torch.dtype, swizzle: int, box: tuple[int, int], rows: int, columns: int, stride: int) -> bytes:
    """The copy engine's description of a matrix [rows, columns], `stride` elements from row to row, read and written in boxes
    [rows, columns]. swizzle as the driver numbers it."""
    memory = ctypes.create_string_buffer(MAP_BYTES + 64)
    offset = -ctypes.addressof(memory) % 64
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    code = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(memory) + offset), ELEMENTS[dtype], 2, ctypes.c_void_p(address), (u64 * 2)(columns, rows),
        (u64 * 1)(stride * dtype.itemsize), (u32 * 2)(box[1], box[0]), (u32 * 2)(1, 1), 0, swizzle, PROMOTION_128, 0,
    )  # fmt: skip
    check(f"a tensor map of [{rows}, {columns}] at {address:#x}, stride {stride}, boxes of {list(box)},", code)
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
