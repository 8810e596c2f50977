"""What the tests of faults share: every backend in turn, and the tolerance that is earned."""

import mmap
import re

import pytest
import torch

from openkda import backends, chunk_kda
from openkda.testing import Case, assert_close, gradient_triples, gradients, relative_error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOKENWISE = ("q", "k", "v", "g", "beta")


def vast(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`count` zeros; on a CPU the system gives memory to the pages that are written to alone."""
    if device.type == "cuda":
        return torch.zeros(count, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)


def sizes(small: dict, full: dict):
    """The reported sizes on a GPU, small ones everywhere."""
    return pytest.mark.parametrize("size", [small, pytest.param(full, marks=pytest.mark.gpu)], ids=["small", "full"])


def width(backend: str, K: int = 16) -> int:
    """K and V of a small case: K, or the narrowest that the backend serves."""
    return max(K, 64) if backend == "hopper" else K


def finest(backend: str) -> torch.dtype:
    """The dtype with the most digits that the backend serves."""
    return BF16 if backend == "hopper" else F32


def serving(case: Case, backend: str) -> str | None:
    """The backend to ask for: `backend`, or after a refusal by name None, whatever dispatch chooses instead."""
    reason = backends.why_not(backend, case.described()[0])
    if reason is None:
        return backend
    with pytest.raises(ValueError, match=re.escape(reason)):
        chunk_kda(**case.args, backend=backend)
    return None


def run(case: Case, backend: str, **changes):
    """(o, final_state) of one backend, or of the one that dispatch chooses where this one refuses."""
    case.args.update(changes)
    return chunk_kda(**case.args, backend=serving(case, backend))


def check(case: Case, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results within twice the error of the same algorithm in torch at the inputs' dtype."""
    o, S = run(case, backend)
    assert o.isfinite().all() and S.isfinite().all()
    assert_close("o", o, case.oracle[0], case.twin[0])
    assert_close("final_state", S, case.oracle[1], case.twin[1])
    return o, S


def with_gate(case: Case, g: torch.Tensor, **changes) -> Case:
    """The case with its log decay (or logits) replaced, cast to the dtype it had."""
    case.args.update(g=g.to(case.args["g"]).expand_as(case.args["g"]).contiguous(), **changes)
    return case


def check_gradients(case: Case, backend: str, bound: float) -> dict[str, torch.Tensor]:
    """Every gradient within `bound` of fp64 autograd in fp32, and within twice the error of the same algorithm in torch below that."""
    found = gradients(case, backend=serving(case, backend))
    for name, gradient, exact, twin in gradient_triples(case, found):
        if case.args["q"].dtype == F32:
            assert relative_error(gradient, exact) < bound, name
        else:
            assert_close(name, gradient, exact, twin)
    return found
