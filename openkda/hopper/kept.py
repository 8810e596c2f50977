"""Which of Triton's compiled kernels belongs to a launch, kept beside Triton's cache from process to process.

To find a kernel in its cache Triton hashes itself, 415 MB, and the source of everything that the kernel calls: half a second of a first
call. Here one file names the kernels of this version of openkda/hopper, and of openkda/portable, whose functions they call, by what a
launch depends on; the release of Triton, size and date of its library, all TRITON_ variables and the others that Triton puts into its own
keys stand for the rest. What is not named, or no longer in the cache, is compiled as ever."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import triton
from triton import knobs
from triton._C import libtriton
from triton.runtime.cache import CacheManager, get_cache_manager

FILE = "openkda.json"


@cache
def place() -> CacheManager:
    """Where the file lies: one for each version of the sources and each state of the compiler"""
    library = os.stat(libtriton.__file__)
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("TRITON_") and name != "TRITON_CACHE_DIR")
    others = sorted(libtriton.get_cache_invalidating_env_vars().items())
    found = hashlib.sha256(repr((triton.__version__, library.st_size, library.st_mtime_ns, variables, others)).encode())
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *(here.parent / "portable").glob("*.py")]):
        found.update(source.read_bytes())
    return get_cache_manager(found.hexdigest())


def names() -> dict[str, str]:
    """By what a launch depends on, the name of its kernel in Triton's cache; none if the file is damaged, which the next `keep` mends, or
    out of reach, as in a cache that others filled and this process may not write"""
    try:
        path = place().get_file(FILE)
        return json.loads(Path(path).read_text()) if path else {}
    except (OSError, ValueError):
        return {}


def find(key: str, name: str) -> tuple[bytes, dict[str, object]] | None:
    """Binary and metadata of the kernel `name` that was compiled for `key`, None where there is none"""
    known = None if knobs.compilation.always_compile else names().get(key)
    files = known and get_cache_manager(known).get_group(f"{name}.json")
    if not files or not {f"{name}.json", f"{name}.cubin"} <= files.keys():
        return None
    return Path(files[f"{name}.cubin"]).read_bytes(), json.loads(Path(files[f"{name}.json"]).read_text())


def keep(compiled: dict[str, str]) -> None:
    """Add names, where that is possible. Another process that adds some at the same moment may lose them, and will compile anew or find
    Triton's own entry."""
    with suppress(OSError):
        place().put(json.dumps({**names(), **compiled}, indent=0), FILE, binary=False)
