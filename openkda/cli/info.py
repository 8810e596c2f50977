"""`openkda info`: versions, devices, backends and caches of this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from openkda import backends
from openkda.problem import Problem

PACKAGES = ("openkda", "torch", "triton", "numpy", "safetensors", "transformers", "typer", "rich", "matplotlib")
PEERS = ("flash-linear-attention", "fla-core", "flash-kda", "nvidia-cudnn-frontend")


def info() -> None:
    """Print versions, devices, what each backend says to a plain call on this machine, and the caches."""
    console = Console()
    table = Table(title="openkda on this machine", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    for name in PACKAGES:
        table.add_row(name, version(name) or "not installed")
    table.add_row("peers for bench", ", ".join(f"{name} {version(name)}" for name in PEERS if version(name)) or "none installed")
    for row in devices():
        table.add_row(*row)
    for name in backends.NAMES:
        table.add_row(f"backend {name}", backends.why_not(name, plain_problem()) or "serves a plain bfloat16 call here")
    for row in caches():
        table.add_row(*row)
    console.print(table)


def version(package: str) -> str | None:
    """The installed version, None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[tuple[str, str]]:
    """One line per device."""
    rows = [("CPU", f"{torch.get_num_threads()} threads")]
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        kind = p.gcnArchName if torch.version.hip else f"compute capability {p.major}.{p.minor}"
        rows.append((f"GPU {index}", f"{p.name}, {kind}, {p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} multiprocessors"))
    return rows if len(rows) > 1 else [*rows, ("GPU", "none that torch can use")]


def caches() -> list[tuple[str, str]]:
    """Triton's compiled kernels on disk."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    sizes = [entry.stat().st_size for entry in folder.rglob("*") if entry.is_file()] if folder.is_dir() else []
    kernels = sum(1 for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else 0
    return [("Triton cache", f"{folder}: {kernels} entries, {sum(sizes) / 2**20:.1f} MiB")]


def plain_problem() -> Problem:
    """A call without options: bf16, B=1, T=1024, H=4, K=V=128, on this machine's best device."""
    from openkda.cli.explain import describe_call, this_device

    return describe_call(device=this_device())
