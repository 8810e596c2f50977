"""Every Triton and Gluon name that has moved between releases, imported in one place; `why_not` names the releases verified."""

from __future__ import annotations

import gc
import re
import tempfile
from collections.abc import Callable, Sequence

from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction, MockTensor, create_function_from_signature

from openkda.hopper.kept import Compiled
from openkda.hopper.runtime import Matrix, Pointer

__all__ = [
    "buffer_offsets",
    "compiled",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "stand_in",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
TARGET = GPUTarget("cuda", 90, 32)
METADATA = ("name", "num_warps", "shared", "num_ctas", "global_scratch_size", "profile_scratch_size", "tensordesc_meta")  # a launch's


def stand_in(x: object) -> object:
    """What an argument of a launch is to the compiler, of memory that is not there"""
    if isinstance(x, Matrix):
        layout = gl.NVMMASharedLayout(min(128, x.box_columns * x.dtype.itemsize), 8 * x.dtype.itemsize, 2)
        return TensorDescriptor(MockTensor(x.dtype), [x.rows, x.columns], [x.stride, 1], [x.box_rows, x.box_columns], layout)
    return MockTensor(x.dtype) if isinstance(x, Pointer) else x


def compiled(
    kernel: JITFunction, args: Sequence[object], options: dict[str, object], read: Callable[[], None], check: Callable[[str], None] | None
) -> Compiled:
    """A kernel compiled for Hopper by Triton's stages, as `kernel.warmup(*args, **options)` compiles it, without Triton's cache.

    Args: read: called when the source has been read, a fifth of the whole and all of it that is Python, the rest runs outside Python's
    lock; check: given the kernel in Triton's GPU dialect."""
    backend = make_backend(TARGET)
    debug = knobs.runtime.debug
    options = dict(options, debug=debug, sanitize_overflow=debug)  # Triton builds the checks either way and drops them unless in debug
    arguments = create_function_from_signature(kernel.signature, kernel.params, backend)(*args, **options)
    options, *signature = kernel._pack_args(backend, options, *arguments)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *signature)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    collecting = gc.isenabled()
    gc.disable()  # what is made here lives until the end: looking for garbage in it takes an eighth of the time
    try:
        module = source.make_ir(TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    finally:
        if collecting:
            gc.enable()
    read()
    stages: dict[str, Callable] = {}
    backend.add_stages(stages, options, source.language)
    metadata = dict(options.__dict__)
    for name, stage in stages.items():
        module = stage(module, metadata)
        if name == "ttgir" and check is not None:
            check(str(module))
        if name == "ptx":
            ptx = module
    return Compiled(module, ptx, {name: metadata.get(name) for name in METADATA})


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
