"""Inputs that broke other KDA kernels, given to the portable one: small twins of publicly reported failures."""

import pytest
import torch

from openkda.portable import forward
from openkda.testing import assert_close, make_case, relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def check(case) -> None:
    problem, inputs = case.described()
    o, final, _ = forward(problem, inputs)
    assert o.isfinite().all() and final.isfinite().all()
    assert_close("o", o, case.oracle[0], case.twin[0])
    assert_close("final_state", final, case.oracle[1], case.twin[1])


@pytest.mark.parametrize(("T", "K"), [(70, 32), pytest.param(8192, 128, marks=pytest.mark.gpu)])
def test_half_of_the_channels_forget_at_once(device, T, K):
    """Clamped decay factors would read a forgotten key at full weight."""
    case = make_case("init", T=T, H=2, K=K, dtype=BF16, raw=False, bounded=False, device=device)
    case.args["g"] = torch.where(torch.arange(K, device=device) % 2 == 0, -50.0, -0.01).expand(1, T, 2, K).contiguous()
    check(case)


@pytest.mark.parametrize("decay", [5.4, 5.6, 8.0, 20.0])
def test_unbounded_decay_beyond_one_anchor(device, decay):
    """Sixteen tokens of 5.545 and more per token overflow an inverse decay in fp32."""
    case = make_case("random", T=49, H=1, K=16, bounded=False, device=device)
    case.args["A_log"] = torch.zeros(1, device=device)
    case.args["dt_bias"] = torch.zeros(1, 16, device=device)
    case.args["g"] = torch.full((1, 49, 1, 16), decay, device=device).expm1().log()  # softplus(g) = decay
    check(case)


@pytest.mark.parametrize("lower_bound", [-1.0, -2.5, -3.0, -4.0, -5.0])
def test_saturated_bounded_gate(device, lower_bound):
    """Every token at the lower bound: a 64-token anchor gives NaN at -5, wrong values at -3."""
    case = make_case("extreme", T=70, H=1, K=32, dtype=BF16, lower_bound=lower_bound, device=device)
    check(case)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_near_equal_keys_and_slow_decay(device, dtype):
    """Full-strength writes of nearly the same key with hardly any decay: where a power series of L cancels, or overflows fp16."""
    case = make_case(
        "init", T=66, H=1, K=48, V=16, dtype=dtype, gate_dtype=FP32, beta_dtype=FP32, raw=False, qk_l2norm=False, device=device
    )
    gen = torch.Generator().manual_seed(3)
    k = torch.randn(1, 1, 1, 48, generator=gen) + 0.05 * torch.randn(1, 66, 1, 48, generator=gen)
    case.args["k"] = (k / k.norm(dim=-1, keepdim=True)).to(device, dtype)
    case.args["g"] = torch.full_like(case.args["g"], -1e-3)
    case.args["beta"] = torch.ones_like(case.args["beta"])
    check(case)


@pytest.mark.parametrize("gate_dtype", [FP32, BF16])
@pytest.mark.parametrize("raw", [True, False])
def test_a_tail_with_either_gate_dtype(device, gate_dtype, raw):
    """28 tokens past the last whole chunk, the gate in the kernel or outside, one dtype after the other."""
    check(make_case("random", T=60, H=1, K=16, dtype=BF16, gate_dtype=gate_dtype, raw=raw, device=device))


def test_one_token_sequences_among_others(device):
    check(make_case("random", lengths=(1, 1, 1, 64, 1), H=2, K=16, dtype=BF16, device=device))


@pytest.mark.parametrize("T", [1, 5, 63])
def test_prompts_shorter_than_a_chunk(device, T):
    check(make_case("random", T=T, H=1, K=16, dtype=BF16, device=device))


@pytest.mark.parametrize("initial_state", [True, False])
def test_empty_sequences_keep_their_state(device, initial_state):
    case = make_case("random", lengths=(0, 64, 0), H=1, K=16, V=32, initial_state=initial_state, device=device)
    final = forward(*case.described())[1]
    for n in (0, 2):
        expected = case.args["initial_state"][n] if initial_state else torch.zeros_like(final[n])
        assert torch.equal(final[n], expected)
    check(case)


def test_no_decay_at_all(device):
    """g = 0 with a state given: nothing hides a fault at a chunk boundary."""
    case = make_case("init", T=100, H=1, K=16, raw=False, device=device)
    case.args["g"] = torch.zeros_like(case.args["g"])
    case.args["safe_gate"] = False
    check(case)


def test_scaled_keys_are_normalised(device):
    """q and k times 8: with the L2 norm in the kernel nothing changes but rounding."""
    case = make_case("random", T=40, H=1, K=16, device=device)
    o = forward(*case.described())[0]
    for name in ("q", "k"):
        case.args[name] = 8 * case.args[name]
    assert relative_error(forward(*case.described())[0], o) < 1e-5


@pytest.mark.parametrize("v_first", [True, False])
def test_the_state_survives_a_hand_over(device, v_first):
    """K != V, prefill then token by token, in either layout: the two must mean the same [K, V]."""
    case = make_case("init", T=40, H=1, K=16, V=32, state_v_first=v_first, device=device)
    problem, inputs = case.described()
    whole, state = forward(problem, inputs)[:2]
    rows = lambda a, b: {name: case.args[name][:, a:b] for name in ("q", "k", "v", "g", "beta")}
    part = make_case("init", T=1, H=1, K=16, V=32, state_v_first=v_first, device=device)
    part.args = case.args | rows(0, 36)
    S = forward(*part.described())[1]
    for t in range(36, 40):
        part.args = case.args | rows(t, t + 1) | {"initial_state": S}
        o, S, _ = forward(*part.described())
        assert relative_error(o[:, 0], whole[:, t]) < 1e-5
    assert relative_error(S, state) < 1e-5
