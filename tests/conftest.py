"""Markers by hardware, the Triton interpreter on machines without a GPU, and fresh memory filled with NaN."""

import fcntl
import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    import quick_interpreter

    quick_interpreter.install()
torch.set_num_threads(1)  # the tensors are small: threads that wait for each other on a busy machine take ten times as long


def pytest_addoption(parser):
    parser.addoption("--thin", type=int, metavar="N", help="of each file's tests that take `device`, only about N, at even distances")


def spread(items, count):
    """About `count` of the tests of each file, the last among them."""
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    odd = lambda n: n + 1 - n % 2  # two backends in turn are both met
    return [item for tests in files.values() for item in tests[:: -odd(len(tests) // count)]]


@pytest.hookimpl(tryfirst=True)  # before -m looks at markers
def pytest_collection_modifyitems(config, items):
    for item in items:
        if "device" in item.fixturenames:
            item.add_marker("device")
    if config.getoption("--thin"):
        runnable = [x for x in items if x.get_closest_marker("device") and not x.get_closest_marker("gpu")]
        dropped = set(runnable) - set(spread(runnable, config.getoption("--thin")))
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]
    capability = torch.cuda.get_device_capability() if HAS_GPU else (0, 0)
    missing = {
        "gpu": not HAS_GPU,
        "hopper": capability[0] != 9,
        "multi_gpu": torch.cuda.device_count() < 2,
    }
    for item in items:
        for name, absent in missing.items():
            if absent and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"no device for marker {name}"))


@pytest.fixture
def device():
    """The device kernels run on: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if HAS_GPU else "cpu")


KERNELS = ["portable", pytest.param("hopper", marks=[pytest.mark.hopper, pytest.mark.gpu])]


@pytest.fixture(params=["torch", *KERNELS])
def backend(request):
    """Every backend in turn."""
    return request.param


@pytest.fixture
def much_memory():
    """For tests that take tens of GiB of a GPU: one at a time over all workers, and the memory given back."""
    with open(Path(tempfile.gettempdir()) / f"openkda-much-memory-{os.getuid()}", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def poisoned_empties(monkeypatch):
    """torch.empty and its relatives return NaN, so that an element nobody writes shows."""

    def poison(create):
        def created(*args, **kwargs):
            out = create(*args, **kwargs)
            if out.is_floating_point() and out.device.type != "meta" and not torch.compiler.is_compiling():
                with torch.no_grad():
                    out.fill_(float("nan"))
            return out

        return created

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
