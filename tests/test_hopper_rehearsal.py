"""Calls rehearsed on tensors without memory: which launches they make, where everything lies, and what is refused."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openkda import hopper
from openkda.hopper import gradients
from openkda.hopper import launch as launch_of_forward
from openkda.hopper.backward_config import Scans, choose_scans, fitted, keeping
from openkda.hopper.rehearsal import ALIGNMENT, rehearse
from openkda.hopper.runtime import Launch, Matrix, Pointer, launch, on_device, start
from openkda.problem import Problem
from openkda.testing import make_case

ALL = (True,) * 8


class Nothing(TorchDispatchMode):
    """Refuses operations on tensors without memory that would have an effect in memory."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        harmless = function.is_view or function.name() in ("aten::empty.memory_format", "aten::empty_strided")
        if not harmless and isinstance(found, torch.Tensor) and found.device.type == "meta":
            raise RuntimeError(f"{function.name()}: only allocations, views and launches can be repeated")
        return found


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernel() -> None: ...


def touch(*operands: torch.Tensor | None) -> None:
    launch(SimpleNamespace(fn=kernel), (1, 1, 1), operands, (7,), ("constant",))


def places(script) -> list[list[tuple[int, int] | None]]:
    """Operand and offset of every pointer of every launch"""
    return [[x and (x.operand, x.offset) for x in one.args if x is None or isinstance(x, Pointer)] for one in script.launches]


def test_operands_are_numbered_as_the_call_gives_them():
    """Given, results, constants, the workspace; views by their place, absent ones absent."""

    def call(x, absent, y):
        table, out, scratch = on_device(torch.arange(6), x.device), meta(3, 8), torch.empty(5, device=x.device)
        touch(y[2:], absent, x, table[4:], out, scratch)
        return [None, out]

    found = rehearse(call, (meta(4), None, meta(3, 8)), True)
    assert places(found) == [[(2, 64), None, (0, 0), (5, 32), (4, 0), (6, 0)]]
    assert found.launches[0].args[-1] == 7 and found.launches[0].constants == ("constant",)
    assert torch.equal(found.constants[0], torch.arange(6)) and found.size == ALIGNMENT
    none, out = found.results
    assert none is None and out.shape == (3, 8) and out.dtype == torch.float32


def touch_beside(*operands: torch.Tensor | None) -> None:
    """A launch that starts beside the one before it"""
    make = lambda: Launch("kernel", (1, 1, 1), tuple(Pointer(n, x.dtype) for n, x in enumerate(operands)), (), 4, pdl=True)
    start(make, (), operands, operands[0].device)


def test_launches_side_by_side_share_nothing():
    """What the first of two launches is done with is still in use when the second, beside it, begins; not so what came before both."""

    def call(x):
        a, b, c, result = (torch.empty(64, device=x.device) for _ in range(4))
        touch(x, a)
        touch(x, b)
        touch_beside(c, result)
        return [result]

    (_, a), (_, b), (c, result) = places(rehearse(call, (meta(1),), False))
    assert a in (b, c) and b != c and result == (1, 0)
    *_, (c, result) = places(rehearse(call, (meta(1),), True))
    assert c != result == (1, 0)


@pytest.mark.parametrize("scratch", [True, False])
def test_memory_is_shared_by_what_is_not_needed_at_once(scratch):
    """a is done with when c comes, and fits into a result of later; b is still needed."""

    def call(x):
        a, b, c, result = (torch.empty(n, device=x.device) for n in (256, 128, 256, 512))
        touch(x, a, b)
        touch(b, c)
        touch(c, result)
        return [result]

    found = rehearse(call, (meta(1),), scratch)
    (_, a, b), (b_again, c), (c_again, result) = places(found)
    assert b == b_again and c == c_again and result == (1, 0)
    if scratch:
        assert {x[0] for x in (a, b)} == {1} and c == (2, 0) and found.size == 1024
    else:
        assert a[0] == b[0] == c[0] == 2 and a[1] != b[1] and c[1] != b[1] and found.size == 1536


def test_a_part_is_no_result():
    def call(x):
        both = torch.empty(2, 4, device=x.device)
        touch(both)
        return [both[1]]

    with pytest.raises(RuntimeError, match="part of another tensor"):
        rehearse(call, (meta(4),), True)


def problem(**options: object) -> Problem:
    found = make_case("init", **{**dict(T=70, H=2, K=128, V=128, dtype=torch.bfloat16, bounded=True), **options}).described()[0]
    return found.replace(device_type="cuda", capability=(9, 0), needs_grad=True)


def kinds_of(p: Problem) -> tuple[torch.dtype | None, ...]:
    """dtypes of A_log, dt_bias and cu_seqlens"""
    there = (p.has_A_log, torch.float32), (p.has_dt_bias, torch.float32), (p.varlen, torch.int64)
    return tuple(dtype if given else None for given, dtype in there)


SCANS = {"whole": Scans(), "cut": Scans(1, 1), "walks": Scans(walks=True), "beside": Scans(walks=True, beside=True)}
OPTIONS = {
    "plain": dict(), "float16": dict(dtype=torch.float16, bounded=False), "no states": dict(initial_state=False),
    "ragged": dict(lengths=(70, 3), H=1, HV=2), "unbounded": dict(bounded=False), "gate computed outside": dict(raw=False, B=3),
}  # fmt: skip


@pytest.mark.parametrize("scans", SCANS.values(), ids=SCANS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_lie_apart(options, scans):
    """No launch, or two that run side by side, find two of their operands in one place, except as it was described: memory of a tensor
    that they see in two ways."""
    p = problem(**options)
    if (scans.walks and p.dtype != torch.bfloat16) or (scans.beside and (p.varlen or not p.bounded)):
        return
    with Nothing():
        found = gradients.script(p, ALL, scans, None, kinds_of(p), torch.float32, False)
    work = 14 + 8 + len(found.constants)  # what is given, the gradients
    extents: set[tuple[int, int, int]] = set()
    for one in found.launches:
        extents = extents if one.pdl else set()
        for x in one.args:
            if isinstance(x, Matrix):
                extents.add((x.operand, x.offset, x.offset + x.rows * x.columns * x.dtype.itemsize))
            assert not isinstance(x, (Matrix, Pointer)) or 0 <= x.operand <= work
            assert not isinstance(x, (Matrix, Pointer)) or x.operand != work or x.offset < found.size
        for (a, a0, a1), (b, b0, b1) in combinations(extents, 2):
            assert a != b or a1 <= b0 or b1 <= a0, one.kernel


def test_tiles_wait_in_the_gradients():
    """What only the scans read lies in results that are written after them: the workspace holds states, r and little else."""
    p = problem().replace(T=8192, H=32, HV=32)
    row = p.T * p.HV * p.K * p.dtype.itemsize
    for scans in (Scans(), Scans(walks=True)):
        found = gradients.script(p, ALL, scans, None, kinds_of(p), None, False)
        assert found.size <= 10 * row
        assert found.size + 3 * row <= gradients.script(p, ALL, scans, None, kinds_of(p), None, True).size + row // 8
    assert gradients.script(p, ALL, Scans(walks=True, beside=True), None, kinds_of(p), None, False).size <= 13 * row


def kernels(launches) -> list[str]:
    return [x.kernel.rpartition(".")[2] for x in launches]


@pytest.mark.parametrize("beside", [False, True])
def test_what_a_forward_keeps_is_not_computed_anew(beside):
    """The two parts of a call make the launches of the whole, and what the first leaves is what the second is given."""
    p = problem()
    call = p, ALL, Scans(walks=True, beside=beside), None, kinds_of(p), torch.float32, False
    with Nothing():
        whole, first, rest = (gradients.script(*call, part) for part in ("all", "forward", "rest"))
    assert kernels(first.launches) + kernels(rest.launches) == kernels(whole.launches)
    assert kernels(first.launches) == ["forward_walk_kernel"] * beside + ["prepare_operands_kernel", "forward_walk_kernel"]
    o, final_state, h, r, *tiles = first.results
    assert o.shape == (p.B, p.T, p.HV, p.V) and final_state.shape == p.state_shape
    assert h.shape == (2 if beside else 3, p.HV, p.V, p.K) and r.shape == (3, p.HV, p.V, 32) and len(tiles) == 8
    second = kernels(x for x in (*first.launches, *rest.launches) if x.pdl)
    assert second == ["prepare_operands_kernel", "fused_gradients_kernel"] * beside


@pytest.mark.parametrize(
    "options",
    [*OPTIONS.values(), dict(H=32), dict(H=32, T=0), dict(T=2**17), dict(B=4, H=32), dict(H=32, bounded=False), dict(B=0)],
    ids=str,
)
def test_which_calls_keep(options):
    """Those of many heads in fixed batches in bf16 whose sequences are not cut for the scans; side by side where the walks leave room."""
    p = problem(**options)
    blocks = p.N * p.HV * p.V // 64
    scans = keeping(p)
    serves = p.dtype == torch.bfloat16 and not p.varlen and p.T > 0 and blocks >= 64
    assert (scans is not None) == (serves and not choose_scans(p).steps)
    assert scans is None or (scans.walks and scans.beside == (p.bounded and blocks <= 96))


def test_the_initial_state_s_gradient_needs_no_forward_walk():
    needs = (*(False,) * 7, True)
    script = gradients.script(problem(), needs, Scans(walks=True, beside=True), None, kinds_of(problem()), None, False)
    assert kernels(script.launches) == ["prepare_operands_kernel", "reverse_walk_kernel"] and not any(x.pdl for x in script.launches)


@pytest.mark.parametrize("options, walks", [(dict(H=32), True), (dict(B=2, H=16), True), (dict(H=40), False), (dict(H=30), False),
                                            (dict(H=32, bounded=False), False), (dict(H=32, lengths=(70,)), False)], ids=str)  # fmt: skip
def test_where_recomputing_walks(options, walks):
    scans = choose_scans(problem(**options))
    assert scans.walks == scans.beside == walks and not scans.steps


def test_what_is_foreseen_is_what_is_launched():
    """A forward under autograd compiles the kernels that its gradients will be launched with."""
    for options in OPTIONS.values():
        p = problem(**options)
        kinds = kinds_of(p)
        of_state = p.state_dtype if p.output_final_state else None
        needs = (*(True,) * 5, p.has_A_log, p.has_dt_bias, p.has_initial_state)
        strides = (2 * p.H * p.K, p.H * p.K, p.HV * p.V, p.HV * p.K, p.HV * p.V)
        ours = gradients.script(p, needs, choose_scans(p), strides, kinds, of_state, p.varlen)
        assert [x.key for x in gradients.ahead(p, kinds)] == [x.key for x in ours.launches]


def test_only_what_has_gradients_is_foreseen():
    p = problem()
    if hopper.why_not(p) is None:
        assert launch_of_forward.gradients_of(p, kinds_of(p))
        for change in (dict(needs_grad=False), dict(return_intermediate_states=True), dict(N=2**16)):
            assert launch_of_forward.gradients_of(p.replace(**change), kinds_of(p)) == []


def test_nothing_else_is_imported():
    """A rehearsal is a part of the first call, and importing what torch has for tensors without memory takes seconds."""
    code = (
        "import sys, torch\nsys.path.append('tests')\nimport test_hopper_rehearsal as t\nfrom openkda.hopper.backward_config import Scans\n"
        "p, before = t.problem(lengths=(70, 3)), set(sys.modules)\n"
        "t.gradients.script(p, t.ALL, Scans(1, 1), None, t.kinds_of(p), torch.float32, False)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("count, H, beside", [(132, 32, True), (132, 48, True), (114, 32, True), (114, 48, False), (78, 32, False)])
def test_nothing_runs_beside_walks_that_fill_a_smaller_chip(count, H, beside):
    p = problem(H=H)
    scans = keeping(p)
    assert scans.beside
    found = fitted(scans, p, count)
    assert found.walks and found.beside == beside
    assert found == scans if beside else "in turn" in found.reason
