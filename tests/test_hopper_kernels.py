"""How the kernels of the Hopper backend are kept, loaded and launched, without a GPU."""

import ctypes
import importlib
import json
import pkgutil
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

import openkda.hopper
import openkda.portable
from openkda.hopper import config, driver, kept, launch, runtime
from openkda.hopper.driver import ELEMENTS, Loaded, loaded
from openkda.hopper.kept import Compiled
from openkda.hopper.runtime import Launch, Matrix, Pointer, Ready
from openkda.testing import make_case


class Library:
    """The driver's part that loads kernels: remembers its calls"""

    def __init__(self, threads=512, static=16, optin=232448):
        self.calls, self.attributes, self.optin, self.code = [], {driver.MAX_THREADS: threads, driver.STATIC_SHARED: static}, optin, 0

    def cuModuleLoadData(self, module, binary):
        self.calls.append(binary)
        return self.code

    def cuModuleGetFunction(self, function, module, name):
        self.calls.append(name)
        function._obj.value = 77
        return 0

    def cuFuncGetAttribute(self, value, which, function):
        value._obj.value = self.attributes[which]
        return 0

    def cuDeviceGetAttribute(self, value, which, device):
        assert (which, device) == (driver.SHARED_OPTIN, 3)
        value._obj.value = self.optin
        return 0

    def cuFuncSetCacheConfig(self, function, config):
        self.calls.append((function.value, config))
        return 0

    def cuFuncSetAttribute(self, function, which, size):
        self.calls.append((which, size))
        return 0

    def cuGetErrorString(self, code, text):
        return 0


def test_kernels_are_loaded_as_they_were_compiled(monkeypatch):
    """Threads and shared memory from the metadata, tensor maps in the driver's numbers; what the launcher does not provide is refused."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    use = lambda library: monkeypatch.setattr(driver, "driver", lambda: library) or library
    metadata = dict(name="kernel", shared=1000, num_warps=16, num_ctas=1, global_scratch_size=0, profile_scratch_size=0)
    maps = dict(swizzle=3, elem_size=2, elem_type=10, block_size=[16, 64])
    load = lambda **change: loaded(Compiled(b"binary", "", metadata | dict(tensordesc_meta=[]) | change), 3)
    library = use(Library())
    assert load(tensordesc_meta=[maps]) == Loaded(77, 512, 1000, ((3, (16, 64)),)) and library.calls == [b"binary", b"kernel"]
    assert load().maps == load(tensordesc_meta=None).maps == ()
    library = use(Library())
    assert load(shared=200000).shared == 200000  # more than a block has unasked
    assert library.calls[2:] == [(77, driver.PREFER_SHARED), (driver.DYNAMIC_SHARED, 232432)]
    for change, word in (
        (dict(num_ctas=2), "clusters"), (dict(global_scratch_size=8), "scratch"), (dict(num_warps=32), "threads"),
        (dict(shared=232433), "wants 232433 bytes of shared memory a block; the device has 232432"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=word):
            load(**change)
    library.code = 209
    with pytest.raises(RuntimeError, match="loading kernel failed with 209"):
        load()


def test_tensor_maps_have_the_element_types_of_the_compiler():
    """Triton's table from its own numbers, which are in the metadata, to the driver's"""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    assert [TMA_DTYPE_DEVICE_TO_HOST[n] for n in (6, 7, 10)] == [ELEMENTS[x] for x in (torch.float16, torch.float32, torch.bfloat16)]


def test_bound_arguments_lie_as_the_driver_reads_them(monkeypatch):
    monkeypatch.setattr(runtime, "tensor_map", lambda *a: repr(a).encode().ljust(128)[:128])
    matrix = Matrix(1, torch.bfloat16, rows=40, columns=256, stride=512, box_rows=16, box_columns=128)
    one = Launch(None, (3, 2, 1), (matrix, Pointer(0, torch.float32, 64), None, 7, 0.5), ("tiles",), 4, True)
    ready = Ready(one, Loaded(99, 512, 1000, ((3, (16, 64)),)), one.parameters())
    reference, function, memory, extra = ready.bind((1000, 2000), 55)
    config = reference._obj
    assert (tuple(config.grid), tuple(config.block), config.shared, config.stream) == ((3, 2, 1), (512, 1, 1), 1000, 55)
    assert config.count == 1 and config.attributes.contents.id == driver.SERIALIZATION and config.attributes.contents.value[0] == 1
    pair = ready._replace(launch=replace(one, cluster=True)).bind((1000, 2000), 55)[0]._obj
    assert pair.count == 2 and pair.attributes[1].id == driver.CLUSTER
    assert struct.unpack("3I", ctypes.string_at(ctypes.addressof(pair.attributes[1].value), 12)) == (1, 2, 1)
    assert function.value == 99 and extra is None
    codes = ["128s", "i", "i", "q", "q", "Q", "i", "f", "Q", "Q"]
    pointers = struct.unpack_from(f"{len(codes)}Q", memory)
    found = [struct.unpack("<" + code, ctypes.string_at(at, struct.calcsize("<" + code)))[0] for code, at in zip(codes, pointers)]
    assert found[0].strip() == b"(2000, torch.bfloat16, 3, (16, 64), 40, 256, 512)"
    assert found[1:] == [40, 256, 512, 1, 1064, 7, 0.5, 0, 0]


def test_a_launch_in_a_thread_without_a_context_is_made_again(monkeypatch):
    answers, devices = [201, 0, 0, 700], []
    library = SimpleNamespace(cuLaunchKernelEx=lambda *call: answers.pop(0), cuGetErrorString=lambda code, text: 0)
    library.cuFuncGetName = lambda name, function: setattr(name._obj, "value", b"scan_kernel") or 0
    monkeypatch.setattr(driver, "driver", lambda: library)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    driver.launch([(1, 2, 3, None), (4, 5, 6, None)], 3)
    assert devices == [3] and answers == [700]
    with pytest.raises(RuntimeError, match="the launch of scan_kernel failed with 700: unknown"):
        driver.launch([(1, 2, 3, None)], 3)
    del library.cuFuncGetName  # an older driver
    answers.append(700)
    with pytest.raises(RuntimeError, match="the launch of a kernel failed with 700"):
        driver.launch([(1, 2, 3, None)], 3)


KERNEL = Compiled(b"binary", "text", dict(shared=3))


def test_kernels_compiled_before_are_found_by_what_a_launch_depends_on(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kept, "place", kept.place.__wrapped__)
    assert kept.find("launch") is None
    kept.keep("launch", KERNEL)
    kept.keep("another", KERNEL._replace(cubin=b"other"))
    assert kept.find("launch")[:2] == (b"binary", "text") and kept.find("another").cubin == b"other" and kept.find("third") is None
    assert kept.find("launch") == KERNEL and json.loads(kept.path("launch", "json").read_text())["launch"] == "launch"  # says whose it is
    assert len(list(kept.place().iterdir())) == 6  # nothing half-written is left
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    assert kept.find("launch") is None
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "0")
    assert kept.find("launch").asm == {"cubin": b"binary", "ptx": "text"}
    (tmp_path / "source.py").write_text("changed")
    monkeypatch.setattr(kept, "__file__", str(tmp_path / "kept.py"))
    assert kept.find("launch") is None  # of other sources


def test_kept_kernels_hold_for_all_sources_and_every_state_of_the_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "place", kept.place.__wrapped__)
    monkeypatch.setattr(kept, "__file__", str(tmp_path / "hopper" / "kept.py"))
    for folder in ("hopper", "portable"):
        (tmp_path / folder).mkdir()
    for source in ("hopper/source.py", "portable/source.py", "tables.py"):
        kept.keep("launch", KERNEL)
        assert kept.find("launch")
        (tmp_path / source).write_text("changed")
        assert kept.find("launch") is None
    kept.keep("launch", KERNEL)
    for name in ("DISABLE_LLVM_OPT", "TRITON_DEFAULT_FP_FUSION", "PTXAS_OPTIONS"):
        with monkeypatch.context() as other:
            other.setenv(name, "1")  # yet another kernel
            assert kept.find("launch") is None
    for kind, data in (("json", '{"launch": '), ("cubin", "bina"), ("ptx", None)):  # damaged, cut short, lost
        file = kept.path("launch", kind)
        file.write_text(data) if data else file.unlink()
        assert kept.find("launch") is None
        kept.keep("launch", KERNEL)
        assert kept.find("launch")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "hopper" / "source.py"))  # no folder can be made there
    kept.keep("launch", KERNEL)
    assert kept.find("launch") is None


def test_a_user_without_a_home_has_a_place_too(monkeypatch):
    """A container may run under a number that no user has; Triton's cache lies in a folder called ~ then."""
    monkeypatch.setattr(kept.os.path, "expanduser", lambda path: path)
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert kept.place.__wrapped__().parent == Path("~/.triton/cache")


def test_variables_of_the_compiler_count(monkeypatch):
    """All of those that Triton lists where they are set"""
    from triton._C import libtriton

    names = re.findall(rb"\b[A-Z][A-Z0-9]+(?:_[A-Z0-9x]+)+\b", Path(libtriton.__file__).read_bytes())
    for name in {x.decode() for x in names}:
        monkeypatch.setenv(name, "1")
    listed = libtriton.get_cache_invalidating_env_vars()
    assert len(listed) > 20 and [x for x in listed if not x.startswith(kept.VARIABLES) or x in kept.WHERE] == []


def test_a_process_that_finds_its_kernels_imports_neither_triton_nor_their_sources():
    code = """
import sys, torch
from openkda.hopper import driver, kept, launch, runtime
from openkda.hopper.config import choose
from openkda.testing import make_case
p, _ = make_case("init", T=64, H=4, K=128, dtype=torch.bfloat16).described()
p = p.replace(device_type="cuda", capability=(9, 0), T=1024)
metadata = dict(name="kernel", shared=9, num_warps=4, num_ctas=1, global_scratch_size=0, profile_scratch_size=0, tensordesc_meta=[])
kept.find = lambda key: kept.Compiled(b"", "", metadata)
runtime.loaded = lambda kernel, device: driver.Loaded(1, 128, 9, ())
plan = launch.plan(p, choose(p), None, (torch.float32, torch.float32, None), torch.device("cpu", 0))
assert len(plan.program.ready) == 2
assert not [x for x in sys.modules if x.split(".")[0] == "triton" or x in ("openkda.hopper.prefill", "openkda.hopper.segments")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_call_nothing_whose_source_does_not_count():
    """Functions that kernels of openkda/hopper may call come from the files that `kept.place` reads."""
    for package in (openkda.hopper, openkda.portable):
        for name in (m.name for m in pkgutil.iter_modules(package.__path__)):
            module = importlib.import_module(f"{package.__name__}.{name}")
            for x in vars(module).values():
                home = x.fn.__module__ if isinstance(x, JITFunction) else "triton"
                assert home.startswith(("openkda.hopper.", "openkda.portable.", "openkda.tables", "triton")), f"{module.__name__}: {home}"


def test_a_program_keeps_what_it_bound(monkeypatch):
    bound, ran, stream = [], [], [7]

    class Counting:
        def bind(self, addresses, stream):
            bound.append((stream, addresses))
            return addresses

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream[0], raising=False)
    monkeypatch.setattr(runtime, "run", lambda calls, device: ran.append((calls, device)))
    program = runtime.Program([Counting()])
    program.run([1, 2], 3)
    program.run([1, 2], 3)
    assert bound == [(7, [1, 2])] and ran == [([[1, 2]], 3)] * 2 and ran[0][0] is ran[1][0]
    stream[0] = 8
    program.run([1, 2], 3)
    assert bound[1:] == [(8, [1, 2])]
    for n in range(600):
        program.run([n], 3)
    assert len(program.bound) <= 256


def test_what_takes_longest_in_the_compiler_is_compiled_first():
    """Of T1024 H4 with a bounded gate the clusters; of T8192 H64 with a softplus gate the blocks with all of V"""
    for bounded, T, H, first in ((True, 1024, 4, True), (False, 8192, 64, False)):
        p, _ = make_case("init", T=64, H=H, K=128, dtype=torch.bfloat16, bounded=bounded).described()
        p = p.replace(device_type="cuda", capability=(9, 0), T=T)
        found = sorted(launch.launches(p, config.choose(p), None, (torch.float32, torch.float32, None))[0], key=lambda x: x.rank)
        forward = [x for x in found if x.kernel.endswith("forward_kernel")]
        assert found[: len(forward)] == forward and len(forward) == 2 and forward[0].cluster == first


def test_kernels_needed_soon_are_compiled_with_those_that_are_missing(monkeypatch):
    """Only where something is compiled anyway, and each once."""

    class Compiling:
        def __init__(self, name):
            self.key = self.kernel = self.rank = name

        def compile(self, read):
            compiled.append(self.key)
            return KERNEL

        def parameters(self):
            return None

    compiled, stored = [], {repr("known"): KERNEL}
    monkeypatch.setattr(runtime, "_loaded", {})
    monkeypatch.setattr(runtime, "loaded", lambda *args: args)
    monkeypatch.setattr(kept, "find", stored.get)
    a, b, c, known = map(Compiling, ("a", "b", "c", "known"))
    runtime.load([known], 0, lambda: [c])
    assert compiled == []
    assert [x.launch for x in runtime.load([a, known], 0, lambda: [a, b])] == [a, known]
    assert sorted(compiled) == ["a", "b"]
    runtime.load([b, a], 0, lambda: [c])
    assert sorted(compiled) == ["a", "b"]
