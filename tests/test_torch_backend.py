"""The torch backend against the fp64 recurrence: regimes, shapes, dtypes, both scans, the level form, chunk-entry states."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from openkda import chunk_kda, fused_recurrent_kda, torch_forward, torch_scores
from openkda.reference import naive_chunk_kda, naive_recurrent_kda
from openkda.testing import REGIMES, assert_close, make_case, relative_error


def check(case, function=chunk_kda):
    o, S = function(**case.args)
    assert_close("o", o, case.oracle[0], case.twin[0])
    assert_close("final_state", S, case.oracle[1], case.twin[1])
    return o, S


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("raw", [True, False])
def test_regimes(regime, bounded, raw):
    """The scan under autograd and the one in place give the same bits."""
    case = make_case(regime, B=2, T=75, H=2, HV=4, K=24, V=40, bounded=bounded, raw=raw)
    o, S = check(case)
    case.args["q"].requires_grad_()
    o2, S2 = chunk_kda(**case.args)
    assert o2.requires_grad and torch.equal(o, o2) and torch.equal(S, S2)


@pytest.mark.parametrize("K, V", [(1, 1), (3, 256), (64, 128), (129, 17), (255, 1), (256, 256)])
def test_head_dims(K, V):
    check(make_case("init", T=35, H=1, K=K, V=V))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, gate_dtype):
    case = make_case("random", T=50, dtype=dtype, gate_dtype=gate_dtype, beta_dtype=gate_dtype)
    o, S = check(case)
    assert o.dtype == dtype and S.dtype == torch.float32


@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_lengths(T):
    check(make_case("mixed", T=T, H=1, K=8, bounded=False))


@pytest.mark.parametrize("T", [0, 32, 33])
def test_a_batch_of_none(T):
    case = make_case("random", T=T, H=1, K=8)
    empty = {name: case.args[name][:0] for name in ("q", "k", "v", "g", "beta", "initial_state")}
    o, S = chunk_kda(**case.args | empty)
    assert o.shape == (0, T, 1, 8) and S.shape == (0, 1, 8, 8)


def test_segments_join(monkeypatch):
    """A sequence cut into segments of one chunk_size is the sequence."""
    case = make_case("mixed", B=2, T=200, H=2, K=16)
    o, S = chunk_kda(**case.args)
    monkeypatch.setattr(torch_forward, "CPU_SEGMENT_ROWS", 1)
    o2, S2 = chunk_kda(**case.args)
    assert torch.equal(o, o2) and torch.equal(S, S2)


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("v_first", [True, False])
def test_chunk_entry_states(chunk_size, v_first):
    """h[:, n] is the state before token n * chunk_size; a ragged batch lists the chunks of its sequences in turn."""
    lengths = (chunk_size + 1, 0, 5)
    case = make_case("init", lengths=lengths, K=8, V=12, state_v_first=v_first, chunk_size=chunk_size, return_intermediate_states=True)
    o, S, h = chunk_kda(**case.args)
    assert h.shape[:3] == (1, 3, 2) and h.dtype == o.dtype
    S0 = case.args["initial_state"]
    assert torch.equal(h[0, 0], S0[0]) and torch.equal(h[0, 2], S0[2]) and torch.equal(S[1], S0[1])
    part = {**case.args, "cu_seqlens": None, "initial_state": S0[:1], "return_intermediate_states": False}
    part |= {name: case.args[name][:, :chunk_size] for name in ("q", "k", "v", "g", "beta")}
    assert relative_error(h[:, 1], chunk_kda(**part)[1]) < 1e-6


def test_adversarial_inverse():
    """Near-equal keys, beta = 1 (and 2), almost no decay: no further from fp64 than the chunk form of 64 tokens, by substitution, is."""
    torch.manual_seed(0)
    B, T, H, K = 1, 128, 2, 64
    u = torch.randn(B, 1, H, K)
    k = torch.nn.functional.normalize(u + 0.05 * torch.randn(B, T, H, K), dim=-1)
    q, v, g = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.full((B, T, H, K), -1e-3)
    for strength in (1.0, 2.0):
        tensors = (q, k, v, g, torch.full((B, T, H), strength))
        exact = naive_recurrent_kda(*(x.double() for x in tensors))[0]
        assert relative_error(chunk_kda(*tensors)[0], exact) <= relative_error(naive_chunk_kda(*tensors)[0], exact)


@pytest.mark.parametrize("speed", [1e-4, 1.0, 50.0, 1000.0])
def test_level_scores(speed):
    """Equal to the differences formed before the exponential, at any decay."""
    torch.manual_seed(0)
    q, k, g = torch.randn(3, 16, 8).double(), torch.randn(3, 16, 8).double(), -speed * torch.rand(3, 16, 8).double()
    G = g.cumsum(-2)
    decay = (G[:, :, None] - G[:, None]).masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril()[..., None], float("-inf")).exp()
    for actual, x, diagonal in zip(torch_scores.level_scores(q, k, G / math.log(2)).split(16, 1), (q, k), (0, -1)):
        expected = torch.einsum("nrc,nic,nric->nri", x, k, decay).tril(diagonal)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_large_keys_at_the_lower_bound():
    """exp(-G) of sixteen tokens at -5 is 5e34: a key of 1e4 must not push it over."""
    case = make_case("extreme", T=32, H=1, K=16, raw=False, qk_l2norm=False)
    case.args["k"][:, 14] *= 1e4
    case.args["beta"][:, 14] = 1e-6
    check(case)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bounded", [True, False])
def test_recurrent(regime, bounded):
    check(make_case(regime, lengths=(7, 0, 1, 12, 3), pad_to=25, HV=4, bounded=bounded, state_v_first=True), without_chunk_options)


def without_chunk_options(**args):
    return fused_recurrent_kda(**{name: value for name, value in args.items() if name not in ("safe_gate", "chunk_size")})


def test_recurrent_without_states():
    case = make_case("random", T=9, initial_state=False)
    o, S = without_chunk_options(**{**case.args, "output_final_state": False})
    assert S is None
    assert_close("o", o, case.oracle[0], case.twin[0])


@pytest.mark.parametrize("function", [chunk_kda, without_chunk_options])
def test_autocast_changes_nothing(function):
    case = make_case("init", T=40)
    o, S = function(**case.args)
    with torch.autocast("cpu", torch.bfloat16):
        o2, S2 = function(**case.args)
    assert torch.equal(o, o2) and torch.equal(S, S2)


def test_ragged_lengths_unknown_to_the_host():
    """With use_graph the lengths are read from the device tensor."""
    case = make_case("random", lengths=(5, 0, 40), pad_to=50)
    o, S = chunk_kda(**case.args)
    o2, S2 = chunk_kda(**case.args, use_graph=True, max_num_seqs=3)
    assert torch.equal(o, o2) and torch.equal(S, S2) and not o[:, 45:].any()


def test_inputs_are_not_written():
    case = make_case("extreme", T=40, bounded=False)
    before = {name: x.clone() for name, x in case.args.items() if isinstance(x, torch.Tensor)}
    chunk_kda(**case.args)
    assert all(torch.equal(case.args[name], x) for name, x in before.items())


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_states_in_any_order_of_memory(state_dtype):
    """Heads before sequences, as a slice of more heads too; the scan works in place on a copy that must not copy again."""
    case = make_case("init", B=3, T=20, H=2, K=8, V=12, state_dtype=state_dtype)
    o, S = chunk_kda(**case.args)
    for memory in (torch.empty(2, 3, 8, 12), torch.empty(5, 3, 8, 12)[1:3], torch.empty(3, 8, 12, 2).permute(3, 0, 1, 2)):
        state = memory.to(state_dtype).transpose(0, 1).copy_(case.args["initial_state"])
        o2, S2 = chunk_kda(**{**case.args, "initial_state": state})
        assert torch.equal(o, o2) and torch.equal(S, S2)


def test_one_workspace_after_another(monkeypatch):
    """A call in the memory that other calls left, of its own sizes or of others, gives its own bits; so do calls in two threads."""
    cases = [make_case(regime, T=T, H=2, K=16, seed=T) for T, regime in ((64, "random"), (80, "extreme"), (64, "mixed"), (70, "init"))]
    fresh = []
    for case in cases:
        monkeypatch.setattr(torch_forward, "_kept", threading.local())
        fresh.append(chunk_kda(**case.args, backend="torch"))
    same = lambda n: all(torch.equal(a, b) for a, b in zip(fresh[n], chunk_kda(**cases[n].args, backend="torch")))
    order = [0, 0, 2, 1, 0, 3, 3, 2, 0, 1, 1]
    assert all(map(same, order))
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(same, order * 4))
