"""Sequences cut into segments in the Hopper backward: the same gradients, and when it is done."""

import pytest
import torch
from gradients_case import run
from offline import SHARED_LIMIT, in_subprocess
from offline_hopper_backward import SCANS

from openkda import hopper
from openkda.hopper import backward_scan, gradients
from openkda.hopper.backward_config import Scans, choose_scans, expected
from openkda.hopper.backward_prepare import C, prepare_chunks
from openkda.hopper.backward_segments import segment_table
from openkda.hopper.config import batches
from openkda.problem import Problem
from openkda.testing import Case, assert_close, cotangents, gradient_triples, make_case

SMALL = dict(T=200, H=2, K=64, V=64, dtype=torch.bfloat16, bounded=True)
REGIMES = ("random", "init", "zero", "mixed")
CUTS = {"one chunk": Scans(1, 1), "two chunks": Scans(2, 1), "a tail of two": Scans(3, 2)}


@pytest.fixture
def cut(monkeypatch):
    """Run the scans by the given configuration."""

    def use(scans: Scans) -> None:
        monkeypatch.setattr(gradients, "choose_scans", lambda problem, lengths: scans)

    return use


def small(regime: str, device: torch.device, **options: object) -> Case:
    return make_case(regime, **{**SMALL, **options}, device=device)


def check(case: Case) -> None:
    """All gradients but A_log's (one number per head) within the earned tolerance."""
    for triple in gradient_triples(case, {n: x for n, x in run(case).items() if n != "A_log"}):
        assert_close(*triple)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("scans", CUTS.values(), ids=CUTS)
def test_gradients(device, cut, regime, scans):
    cut(scans)
    check(small(regime, device))


@pytest.mark.parametrize("options", [dict(lengths=(5, 0, 130, 64, 1, 33), H=1, pad_to=240), dict(B=2, T=97), dict(H=1, HV=2, T=100),
                                     dict(initial_state=False), dict(K=128, T=100, H=1, state_v_first=True),
                                     dict(V=128, T=100, H=1, state_dtype=torch.bfloat16)])  # fmt: skip
def test_options(device, cut, options):
    cut(Scans(1, 1))
    check(small("init", device, **options))


@pytest.mark.parametrize("regime", REGIMES)
def test_states_equal_those_of_one_piece(device, regime):
    """Where the gate forgets within the tail nothing moves by a bit; else by what rounding moves."""
    problem, inputs = small(regime, device).described()
    do, dfinal = cotangents(small(regime, device))
    plan = inputs.plan(problem, C)
    p = prepare_chunks(problem, plan, inputs)
    whole, parts, again = (
        backward_scan.both_scans(problem, plan, inputs, p, do, dfinal, tokens=True, initial_state=True, scans=scans)
        for scans in (Scans(), Scans(3, 2), Scans(3, 2))
    )
    for one, other, third in zip(whole, parts, again, strict=True):
        assert torch.equal(other, third)
        if regime == "random":
            assert torch.equal(one, other)
        assert (one.float() - other.float()).norm() <= 2.0**-8 * one.float().norm()


def test_only_what_is_needed(device, cut):
    cut(Scans(1, 1))
    case = small("init", device, T=100, H=1)
    full = run(case)
    for wanted in (("v",), ("initial_state",)):
        assert all(torch.equal(x, full[name]) for name, x in run(case, wanted=wanted).items())


@pytest.mark.parametrize("t0", [41, 64, 100])
@pytest.mark.parametrize("regime", ["random", "init"])
def test_causality(device, cut, regime, t0):
    """A loss on o[:t0] gives later tokens gradients that are exactly zero, and earlier ones do not move by a bit when those change, to
    tokens that forget everything included."""
    cut(Scans(1, 1))
    case = small(regime, device, T=140, H=1, initial_state=False)
    found = []
    for change in (None, "flip", "forget"):
        for name in ("q", "k", "v", "g", "beta") if change else ():
            case.args[name] = case.args[name].clone()
            case.args[name][:, t0:] = case.args[name][:, t0:].flip(1) * 3 - 1
        if change == "forget":
            case.args["g"][:, t0:] = 30.0
        do = cotangents(case)[0]
        do[:, t0:] = 0.0
        found.append(run(case, do))
    for name in ("q", "k", "v", "g", "beta"):
        for gradient in found:
            assert (gradient[name][:, t0:] == 0).all(), name
            assert torch.equal(found[0][name], gradient[name]), name


def test_almost_nothing(device, cut):
    cut(Scans(1, 1))
    for shape in (dict(T=0), dict(lengths=()), dict(lengths=(0, 0)), dict(T=1)):
        assert all(x.isfinite().all() for x in run(small("init", device, **shape)).values())


def shape(T: int, H: int, **options: object) -> Problem:
    case = make_case("init", T=64, H=H, K=128, V=128, dtype=torch.bfloat16)
    return case.described()[0].replace(**{**dict(T=T, device_type="cuda", capability=(9, 0)), **options})


def test_choice():
    """Cut where sequences and heads do not fill the chip and a sequence is long; each piece several times its tail."""
    assert not choose_scans(shape(32768, 32)).steps
    assert not choose_scans(shape(1024, 4)).steps
    assert not choose_scans(shape(0, 4)).steps
    assert not choose_scans(shape(32768, 4, N=0, varlen=True), ()).steps
    for T, H in ((32768, 16), (32768, 4), (8192, 8), (131072, 1)):
        scans = choose_scans(shape(T, H))
        assert 4 * scans.tail <= scans.steps <= T // C // 2
        assert f"segments of {scans.steps} chunks" in scans.reason
    one_long = shape(21000, 8, N=4, varlen=True)
    assert choose_scans(one_long, (400, 20000, 300, 300)).steps
    assert not choose_scans(one_long.replace(N=300), (70,) * 300).steps


# Microseconds of the scans: T, heads, parts, where tails suffice, where they do not; None: not measured.
MEASURED = (
    (32768, 4, 1, 1080, 1080), (32768, 4, 8, 181, 298), (32768, 4, 6, 205, 329), (32768, 4, 22, 206, 321), (32768, 16, 4, 660, 908),
    (32768, 8, 4, None, 554), (32768, 8, 12, None, 528), (8192, 8, 1, 274, 274), (8192, 8, 4, 99, 156), (8192, 8, 12, None, 170),
    (131072, 2, 16, None, 590),
)  # fmt: skip


def test_expected_times():
    """The model against what was measured."""
    for T, H, parts, *measured in MEASURED:
        p = shape(T, H)
        found = expected(-(-T // C // parts) if parts > 1 else 0, batches(p, None)[0], p)
        for time, known in zip(found, measured):
            assert known is None or abs(time - known) <= 0.12 * known, (T, H, parts, found)


def test_table_of_whole_sequences(device):
    """Uncut ragged batches run longest first; cut ones from the longest, unused rows marked."""
    lengths = (40, 0, 130, 64)
    problem, inputs = small("init", device, lengths=lengths).described()
    table = segment_table(problem, inputs, 0)
    assert table.segments[:, :3].tolist() == [[2, 40, 170], [3, 170, 234], [0, 0, 40], [1, 40, 40]]
    table = segment_table(problem, inputs, 2)
    rows = table.segments.tolist()
    assert [row[0] for row in rows] == [2, 2, 2, 3, 0, 1, -1]
    assert table.whole[:, 6].tolist()[: table.cut] == [3, 1, 1]
    assert all(row[6] == 1 for row in rows[table.inner :] if row[0] >= 0)


def test_offline_compile():
    kernels = in_subprocess("sm_90", "offline_hopper_backward:compile_segments")
    assert {k.name for k in kernels} == set(SCANS)
    for k in kernels:
        assert k.spills == 0, k
        assert k.shared <= SHARED_LIMIT["sm_90"], k


def test_explain_says_how_the_scans_run():
    from openkda.cli.explain import choices

    problem = shape(32768, 4)
    if hopper.why_not_backward(problem) is None:
        assert any("segments of 128 chunks" in sentence for sentence in choices(problem, "hopper"))
