"""Compiled kernels, kept beside Triton's from process to process.

Triton finds a kernel in its cache by a hash of itself, 415 MB, and of the source of everything that the kernel calls, which it must import:
most of a second. Here one folder holds the kernels of one version of openkda/hopper and of what their functions come from, openkda/portable
and openkda/tables.py; the release of Triton, size and date of its library and every variable that may be the compiler's stand for the rest.
In the folder a kernel is found by what its launch depends on, so that a process which finds all of its kernels imports neither Triton nor
their sources."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

# Triton's and LLVM's variables: those that change what is compiled are among them (`get_cache_invalidating_env_vars` in Triton).
VARIABLES = ("TRITON_", "MLIR_", "LLVM_", "AMDGCN_", "NVPTX_", "PTXAS_", "DISABLE_", "ENABLE_", "ALLOW_", "USE_")
WHERE = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_ALWAYS_COMPILE")  # these change nothing in a kernel


class Compiled(NamedTuple):
    """A compiled kernel"""

    cubin: bytes
    ptx: str
    metadata: dict[str, object]  # name, threads, shared memory, tensor maps: what `compat.METADATA` names

    @property
    def asm(self) -> dict[str, object]:
        """As Triton calls it"""
        return {"cubin": self.cubin, "ptx": self.ptx}


@cache
def place() -> Path:
    """The folder, one for each version of the sources and each state of the compiler"""
    library = [x.stat() for x in sorted((Path(find_spec("triton").origin).parent / "_C").glob("libtriton*"))]
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES) and name not in WHERE)
    state = (version("triton"), [(x.st_size, x.st_mtime_ns) for x in library], variables)
    found = hashlib.sha256(repr(state).encode())
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *here.parent.glob("portable/*.py"), *here.parent.glob("tables.py")]):
        found.update(source.read_bytes())
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # as it stands for a user without a home, where Path.home() raises
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")) / f"openkda-{found.hexdigest()[:32]}"


def path(launch: str, kind: str) -> Path:
    """The file of a launch's kernel: json, the last one written, cubin or ptx"""
    return place() / f"{hashlib.sha256(launch.encode()).hexdigest()[:32]}.{kind}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def find(launch: str) -> Compiled | None:
    """The kernel that was compiled for a launch, None where there is none or its files are damaged"""
    if os.environ.get("TRITON_ALWAYS_COMPILE", "0").lower() in ("1", "true", "on", "yes", "y"):
        return None
    try:
        metadata = json.loads(path(launch, "json").read_text())
        cubin, ptx = path(launch, "cubin").read_bytes(), path(launch, "ptx").read_text()
    except (OSError, ValueError):
        return None
    return Compiled(cubin, ptx, metadata["kernel"]) if metadata["cubin"] == digest(cubin) else None


def keep(launch: str, kernel: Compiled) -> None:
    """Keep a launch's kernel, where that is possible: no file is ever seen half-written, and of two processes the last one's counts."""
    metadata = dict(launch=launch, cubin=digest(kernel.cubin), kernel=kernel.metadata)
    with suppress(OSError):
        place().mkdir(parents=True, exist_ok=True)
        for kind, data in (("cubin", kernel.cubin), ("ptx", kernel.ptx.encode()), ("json", json.dumps(metadata).encode())):
            aside = path(launch, f"{kind}.{uuid4().hex}")
            try:
                aside.write_bytes(data)
                aside.replace(path(launch, kind))
            finally:
                aside.unlink(missing_ok=True)  # still there where the disk is full
