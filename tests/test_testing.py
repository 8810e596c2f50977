"""The shipped test kit: what its generators promise, and comparisons that fail when they should."""

import math

import pytest
import torch

from openkda import chunk_kda
from openkda.recorded import trained_gate_statistics
from openkda.reference import activate_gate
from openkda.testing import REGIMES, assert_close, gate_logits, make_case, relative_error


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bounded", [True, False])
def test_regimes_are_what_they_say(regime, bounded):
    gen = torch.Generator().manual_seed(0)
    logits, A_log, dt_bias = gate_logits(regime, 256, 4, 32, bounded=bounded, generator=gen)
    assert logits.shape == (256, 4, 32) and A_log.shape == (4,) and dt_bias.shape == (4, 32)
    g = activate_gate(logits, A_log, dt_bias, -5.0 if bounded else None)
    per_channel = g.mean(0)  # [HV, K]
    assert (g <= 0).all()
    if regime == "random":
        assert per_channel.max() < -0.2
    elif regime == "init":
        assert per_channel.max() > -0.1
    elif regime == "zero":
        assert not g.any()
    elif regime == "extreme":
        assert (g < -4.9).all() if bounded else ((g < -19.9).all() and (g < -500).any())
    elif regime == "mixed":
        assert per_channel[:, ::2].max() < -4.5 and per_channel[:, 1::2].min() > (-2.0 if bounded else -1.0)
    else:
        assert per_channel.min() < -0.1 and per_channel.max() > -0.01


def test_unknown_regime():
    with pytest.raises(ValueError, match="regime is 'fast'; it must be one of random"):
        make_case("fast")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(B=-1), "B is -1; it must be at least 0"),
        (dict(HV=0), "HV is 0; it must be at least 1"),
        (dict(T=2.5), "T is 2.5; it must be an int"),
        (dict(lengths=(3, -1)), r"lengths\[1\] is -1; it must be at least 0"),
        (dict(lengths=torch.tensor([3, 4])), r"lengths\[0\] is tensor\(3\); it must be an int"),
    ],
)
def test_impossible_sizes(sizes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_case(**sizes)


def test_trained_statistics():
    A_log, mean, spread = trained_gate_statistics()
    assert A_log.ndim == 1 and mean.shape == spread.shape == (A_log.shape[0], 128)
    assert (spread > 0).all() and A_log.dtype == mean.dtype == spread.dtype == torch.float32


def test_cases_are_reproducible():
    a, b, c = (make_case("random", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(a.args["q"], b.args["q"]) and not torch.equal(a.args["q"], c.args["q"])


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("lengths", [None, (5, 0, 9)])
@pytest.mark.parametrize("v_first", [True, False])
def test_contracts_and_oracle(bounded, lengths, v_first):
    """Raw and activated inputs have one oracle; ragged and V-first shapes are those of chunk_kda."""
    sizes = dict(T=14, lengths=lengths, bounded=bounded, state_v_first=v_first, K=8, V=4, qk_l2norm=False)
    raw, activated = make_case("init", raw=True, **sizes), make_case("init", raw=False, **sizes)
    for a, b, actual in zip(raw.oracle, activated.oracle, chunk_kda(**raw.args)):
        assert a.dtype == torch.float64 and a.shape == actual.shape
        assert relative_error(b, a) < 1e-6


def test_oracle_reports_progress():
    from openkda.testing import oracle

    seen = []
    oracle(*make_case("random", B=2, T=100, K=4).described(), progress=seen.append)
    assert sum(seen) == 200


def test_relative_error():
    a = torch.tensor([3.0, 4.0])
    assert relative_error(a, a) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5]), a) == pytest.approx(0.1)
    assert relative_error(torch.tensor([float("nan"), 4.0]), a) == math.inf
    nan = torch.tensor([float("nan"), 4.0])
    assert relative_error(nan, nan) == 0.0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert relative_error(torch.ones(1), torch.zeros(1)) == math.inf
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(torch.zeros(2), torch.zeros(3))


def test_assert_close_fails_beyond_twice_the_twin():
    exact = torch.ones(100, dtype=torch.float64)
    twin = exact + 1e-3
    assert_close("o", exact + 1.9e-3, exact, twin)
    with pytest.raises(AssertionError, match="o: relative error"):
        assert_close("o", exact + 2.1e-3, exact, twin)
    broken = exact.clone()
    broken[3] = float("nan")
    with pytest.raises(AssertionError, match="inf"):
        assert_close("o", broken, exact, twin)
