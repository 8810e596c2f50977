"""Compile kernels for a GPU that is not there, through the launchers' own code, and report what the compiler made of them.

    with compiling("sm_90") as kernels:
        forward(problem, inputs)            # tensors on the CPU; nothing runs, every launch compiles
    kernels[0].registers, kernels[0].spills, kernels[0].shared

Works in processes without TRITON_INTERPRET only, so tests call `in_subprocess("sm_90", "module:function")`: function(target) launches what
it wants compiled. `python tests/offline.py TARGET MODULE:FUNCTION...` does the same from a shell and prints a table."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from openkda.hopper.runtime import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024, "gfx942": 64 * 1024}
CAPABILITY = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0), "gfx942": None}


THOROUGH = ("sm_90", "sm_120", "gfx942")  # what most figures are of, and those with the least shared memory
RELEASE = "3.6."  # of Triton, which development is pinned to


def problems(target: str, every: dict[str, dict], few: tuple[str, ...]) -> list[dict]:
    """All problems, or a few that meet every kernel and the widest heads: each takes the compiler ten seconds."""
    return [every[name] for name in (every if target in THOROUGH and triton.__version__.startswith(RELEASE) else few)]


@dataclass(frozen=True)
class Compiled:
    """What the compiler reports of one kernel."""

    name: str
    registers: int
    spills: int  # bytes of stack or spill slots per thread
    shared: int  # bytes per block
    warps: int


class FakeDriver:
    """A driver of a device that is not there: it knows its target and launches nothing."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return list(TARGETS.values()).index(self.target)  # Triton keeps compiled kernels by device index

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        return None

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


def cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack and local memory per thread, of an NVIDIA binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def amdgcn_usage(text: str) -> tuple[int, int]:
    """Vector registers, and spilled registers plus scratch bytes per thread, of an AMD assembly text."""
    field = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))
    return field("vgpr_count"), field("vgpr_spill_count") + field("private_segment_fixed_size")


def describe_kernel(kernel: object) -> Compiled:
    """A `Compiled` from Triton's CompiledKernel or openkda's."""
    if "cubin" in kernel.asm:
        registers, spills = cubin_usage(kernel.asm["cubin"])
    else:
        registers, spills = amdgcn_usage(kernel.asm["amdgcn"])
    found = kernel.metadata if isinstance(kernel.metadata, dict) else kernel.metadata._asdict()
    return Compiled(found["name"], registers, spills, found["shared"], found["num_warps"])


@contextlib.contextmanager
def compiling(target: str) -> Iterator[list[Compiled]]:
    """Inside, every Triton launch compiles for `target` instead of running; the list fills with what was compiled, each kernel once, the
    Hopper backend's too, which are compiled past Triton's launches."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise RuntimeError("TRITON_INTERPRET is 1; offline compilation must be in a process without it")
    kernels: list[Compiled] = []
    seen: set[object] = set()
    run, compile_launch = JITFunction.run, Launch.compile

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        return noted(kernel, id(kernel))

    def noted(kernel: object, key: object) -> object:
        if key not in seen:
            seen.add(key)
            kernels.append(describe_kernel(kernel))
        return kernel

    previous = driver._active  # None where there is no GPU; `active` would try to find one
    driver.set_active(FakeDriver(TARGETS[target]))
    JITFunction.run = compile_only
    Launch.compile = lambda launch: noted(compile_launch(launch), launch.key)
    try:
        yield kernels
    finally:
        JITFunction.run, Launch.compile = run, compile_launch
        driver.set_active(previous)


def faults(target: str, kernels: list[Compiled]) -> list[str]:
    """One line per kernel that spills or wants more shared memory than the target has."""
    out = []
    for k in kernels:
        if k.spills:
            out.append(f"{target} {k.name}: {k.spills} bytes of spills ({k.registers} registers, {k.warps} warps)")
        if k.shared > SHARED_LIMIT[target]:
            out.append(f"{target} {k.name}: {k.shared} bytes of shared memory, limit {SHARED_LIMIT[target]}")
    return out


def in_subprocess(target: str, function: str) -> list[Compiled]:
    """What `function` ("module:name", called with the target) compiles, in a process of its own without the interpreter."""
    return each_in_subprocess(target, function)[0]


def each_in_subprocess(target: str, *functions: str) -> list[list[Compiled]]:
    """What each of several functions compiles, all in one process: to start one takes longer than most kernels.

    Compiled kernels are kept in a directory under the temporary one, so that a second run costs seconds."""
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), environment.get("PYTHONPATH", "")])
    environment["TRITON_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"openkda-offline-{os.getuid()}-{triton.__version__}")
    command = [sys.executable, str(here / "offline.py"), target, *functions, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling {', '.join(functions)} for {target} failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    return [[Compiled(**row) for row in rows] for rows in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    target, *functions = (x for x in sys.argv[1:] if x != "--json")
    found: list[list[Compiled]] = []
    for module, name in (x.split(":") for x in functions):
        compile_all = getattr(importlib.import_module(module), name)
        with compiling(target) as kernels:
            compile_all(target)
        found.append(kernels)
    if "--json" in sys.argv:
        print(json.dumps([[asdict(k) for k in kernels] for kernels in found]))
        return
    for k in chain(*found):
        print(f"{target} {k.name}: {k.registers} registers, {k.spills} spills, {k.shared} bytes shared, {k.warps} warps")


if __name__ == "__main__":
    main()
