"""Laws that hold for any input: drawn by hypothesis, the same examples in every run.

The torch backend takes many drawn shapes; the portable kernels, through the interpreter, a few small ones.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openkda import backends, chunk_kda, fused_recurrent_kda
from openkda.testing import REGIMES, Case, make_case, relative_error

TOKENWISE = ("q", "k", "v", "g", "beta")
EXAMPLES = {"torch": 25, "portable": 3}

both_backends = pytest.mark.parametrize("backend", ["torch", "portable"])
regimes = st.sampled_from(REGIMES)
shapes = st.fixed_dictionaries(
    dict(
        H=st.integers(1, 2),
        K=st.sampled_from([1, 3, 8, 16, 24]),
        V=st.sampled_from([1, 5, 16, 20]),
        bounded=st.booleans(),
        raw=st.booleans(),
        seed=st.integers(0, 1000),
    )
)


def examples(test):
    """Run a law on each backend's number of drawn examples."""

    def law(backend, device, **strategies):
        limits = settings(
            max_examples=EXAMPLES[backend], derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        limits(given(**strategies)(lambda **drawn: test(backend, device, **drawn)))()

    return law


def run(case: Case, backend: str, **changes) -> tuple[torch.Tensor, torch.Tensor]:
    return chunk_kda(**{**case.args, **changes}, backend=backend)


def rows(case: Case, part: slice, **changes) -> dict[str, object]:
    """Changes that cut a case to some of its tokens."""
    return {name: case.args[name][:, part] for name in TOKENWISE} | changes


@examples
def ragged_is_one_at_a_time(backend, device, lengths, spare, regime, shape):
    case = make_case(regime, lengths=tuple(lengths), pad_to=sum(lengths) + spare, device=device, **shape)
    o, S = run(case, backend)
    first = 0
    for n, length in enumerate(lengths):
        alone = rows(case, slice(first, first + length), cu_seqlens=None, initial_state=case.args["initial_state"][n : n + 1])
        o1, S1 = run(case, backend, **alone)
        assert torch.equal(o[:, first : first + length], o1) and torch.equal(S[n : n + 1], S1)
        first += length
    assert not o[:, first:].any()


@both_backends
def test_ragged_is_one_at_a_time(backend, device):
    """Bit for bit, and zero behind the last sequence."""
    longest, most = (150, 6) if backend == "torch" else (20, 2)
    lengths = st.lists(st.integers(0, longest), max_size=most)
    ragged_is_one_at_a_time(backend, device, lengths=lengths, spare=st.integers(0, 3), regime=regimes, shape=shapes)


@examples
def split_is_whole(backend, device, T, cut, regime, shape):
    case = make_case(regime, T=T, device=device, **shape)
    cut = min(cut, T)
    o, S = run(case, backend)
    o1, S1 = run(case, backend, **rows(case, slice(0, cut)))
    o2, S2 = run(case, backend, **rows(case, slice(cut, T), initial_state=S1))
    assert relative_error(torch.cat([o1, o2], 1), o) < 5e-6 and relative_error(S2, S) < 5e-6


@both_backends
def test_a_split_with_the_state_carried_is_the_whole(backend, device):
    longest = 150 if backend == "torch" else 50
    split_is_whole(backend, device, T=st.integers(1, longest), cut=st.integers(0, longest), regime=regimes, shape=shapes)


@examples
def later_tokens_do_not_matter(backend, device, T, t0, regime, other, shape):
    case, another = make_case(regime, T=T, device=device, **shape), make_case(other, T=T, device=device, **{**shape, "seed": 1001})
    t0 = min(t0, T)
    o, _ = run(case, backend)
    changed = {name: torch.cat([case.args[name][:, :t0], another.args[name][:, t0:]], 1) for name in TOKENWISE}
    assert torch.equal(run(case, backend, **changed)[0][:, :t0], o[:, :t0])
    assert torch.equal(run(case, backend, **rows(case, slice(0, t0)))[0], o[:, :t0])


@both_backends
def test_later_tokens_do_not_change_earlier_outputs(backend, device):
    """Bit for bit, whether they change or are cut off."""
    longest = 150 if backend == "torch" else 50
    drawn = dict(T=st.integers(1, longest), t0=st.integers(0, longest), regime=regimes, other=regimes, shape=shapes)
    later_tokens_do_not_matter(backend, device, **drawn)


@examples
def grouped_is_repeated(backend, device, T, group, regime, shape):
    case = make_case(regime, T=T, HV=shape["H"] * group, device=device, **shape)
    o, S = run(case, backend)
    o1, S1 = run(case, backend, **{name: case.args[name].repeat_interleave(group, 2) for name in ("q", "k")})
    assert torch.equal(o, o1) and torch.equal(S, S1)


@both_backends
def test_grouped_values_are_repeated_heads(backend, device):
    grouped_is_repeated(backend, device, T=st.integers(1, 20), group=st.integers(2, 3), regime=regimes, shape=shapes)


@examples
def layouts_agree(backend, device, T, regime, shape):
    case = make_case(regime, T=T, device=device, **shape)
    o, S = run(case, backend)
    o1, S1 = run(case, backend, state_v_first=True, initial_state=case.args["initial_state"].mT.contiguous())
    assert relative_error(o1, o) < 2e-6 and relative_error(S1.mT, S) < 2e-6


@both_backends
def test_state_layouts_agree(backend, device):
    layouts_agree(backend, device, T=st.integers(0, 40), regime=regimes, shape=shapes)


@examples
def contracts_agree(backend, device, T, regime, shape):
    """Also across lower bounds: a bound of the activated gate is a promise, not an operation."""
    sizes = dict(T=T, device=device, **{**shape, "raw": True})
    raw, activated = make_case(regime, **sizes), make_case(regime, **{**sizes, "raw": False})
    for a, b in zip(run(raw, backend), run(activated, backend)):
        assert relative_error(a, b) < 2e-5


@both_backends
def test_raw_and_activated_inputs_agree(backend, device):
    contracts_agree(backend, device, T=st.integers(0, 40), regime=regimes, shape=shapes)


@examples
def recurrent_is_chunked(backend, device, lengths, regime, shape):
    case = make_case(regime, lengths=tuple(lengths), device=device, **shape)
    o, S = run(case, backend)
    args = {name: value for name, value in case.args.items() if name != "safe_gate"}
    o1, S1 = fused_recurrent_kda(**args, backend=backend)
    assert relative_error(o1, o) < 5e-6 and relative_error(S1, S) < 5e-6


@both_backends
def test_the_recurrent_form_is_the_chunk_form(backend, device):
    lengths = st.lists(st.integers(0, 40 if backend == "torch" else 12), max_size=3)
    recurrent_is_chunked(backend, device, lengths=lengths, regime=regimes, shape=shapes)


def test_both_backends_serve_here(device):
    """The laws above are checked on the kernels, not on a fallback."""
    problem = make_case("random", T=8, device=device).described()[0]
    assert backends.choose(problem, "portable") == "portable" and backends.choose(problem, "torch") == "torch"
