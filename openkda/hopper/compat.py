"""Every Triton and Gluon name that has moved between releases, imported in one place; `why_not` names the releases verified."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from typing import NamedTuple

import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction, MockTensor

__all__ = [
    "Loaded",
    "MockTensor",
    "TensorDescriptor",
    "buffer_offsets",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "loaded",
    "mbarrier",
    "mma_v2",
    "tell",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


class Loaded(NamedTuple):
    """A kernel on the device"""

    function: int  # the driver's handle
    threads: int  # of a block
    shared: int  # bytes of a block
    maps: tuple[tuple, ...]  # what `driver.tensor_map` needs of each tensor map: dtype, bytes of an element, swizzle, box


def loaded(name: str, binary: bytes, metadata: dict[str, object], device: int) -> Loaded:
    """A compiled kernel, loaded on a device, the current one"""
    if metadata["global_scratch_size"] or metadata["profile_scratch_size"] or metadata["num_ctas"] != 1:
        raise RuntimeError(f"{name} wants scratch memory or clusters, which its launcher does not provide")
    shared, threads = metadata["shared"], 32 * metadata["num_warps"]
    _, function, _, _, most = triton.runtime.driver.active.utils.load_binary(name, binary, shared, device)
    if threads > most:
        raise RuntimeError(f"{name} has {threads} threads a block; its registers allow {most}")
    maps = tuple(
        (TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]], m["elem_size"], m["swizzle"], tuple(m["block_size"]))
        for m in (metadata.get("tensordesc_meta") or ())
    )
    return Loaded(function, threads, shared, maps)


def buffer_offsets(ttgir: str) -> dict[str, int]:
    """Where the compiler puts the buffers of a kernel, by their names in its source: bytes from the beginning of shared memory"""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 80)
    manager.run(module, "buffer_offsets")
    return {name: int(at) for name, at in re.findall(r"%(\w+) = ttg.local_alloc {allocation.offset = (\d+)", str(module))}


class _Reader(threading.local):
    read: Callable[[], None] = staticmethod(lambda: None)  # in a thread that did not ask: any plain launch of such a kernel


_reader = _Reader()


class TellingSource:
    """Before one of Triton's classes of sources: tells its thread when it has been read"""

    def make_ir(self, *args: object) -> object:
        found = super().make_ir(*args)
        _reader.read()
        return found


def tell(kernel: JITFunction, read: Callable[[], None]) -> None:
    """Have `read` called when a source of the kernel, compiled in this thread, has been read. That is a fifth of a compilation and all of
    it that is Python; the rest runs outside Python's lock."""
    _ = kernel.device_caches[triton.runtime.driver.active.get_current_device()]  # names the class of its source when first looked at
    source = kernel.ASTSource  # read once: another thread may replace it
    if not issubclass(source, TellingSource):
        kernel.ASTSource = type("Source", (TellingSource, source), {})
    _reader.read = read
