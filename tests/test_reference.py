"""The definition: the token recurrence by hand, and the chunk algebra equal to it in every regime, values and gradients."""

import math

import pytest
import torch

from openkda import naive_chunk_kda, naive_recurrent_kda
from openkda.reference import activate_beta, activate_gate, l2norm, prepare
from openkda.testing import REGIMES, make_case, relative_error


def arguments(regime: str, bounded: bool = True, **sizes):
    """fp64 arguments of the naive functions, activated, and the entry state."""
    case = make_case(regime, raw=False, bounded=bounded, qk_l2norm=False, **sizes)
    tensors = [case.args[name].double() for name in ("q", "k", "v", "g", "beta")]
    return tensors, case.args["initial_state"].double()


def test_two_tokens_by_hand():
    one = lambda *values: torch.tensor(values, dtype=torch.float64).view(1, len(values), 1, 1)
    q, k, v, g = one(1.0, 2.0), one(3.0, 4.0), one(5.0, 6.0), one(-0.5, -0.25)
    beta = one(0.5, 0.25)[..., 0]
    S0 = torch.full((1, 1, 1, 1), 7.0, dtype=torch.float64)
    D1 = math.exp(-0.5) * 7.0
    S1 = D1 + 0.5 * 3.0 * (5.0 - 3.0 * D1)
    D2 = math.exp(-0.25) * S1
    S2 = D2 + 0.25 * 4.0 * (6.0 - 4.0 * D2)
    o, S = naive_recurrent_kda(q, k, v, g, beta, 0.1, S0, True)
    torch.testing.assert_close(o.flatten(), torch.tensor([0.1 * S1, 0.2 * S2], dtype=torch.float64))
    assert S.item() == pytest.approx(S2, rel=1e-14)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_chunk_form_equals_recurrence(regime, bounded, chunk_size):
    tensors, S0 = arguments(regime, bounded, B=2, T=75, H=1, HV=2, K=8, V=12)
    o, S = naive_recurrent_kda(*tensors, None, S0, True)
    o2, S2 = naive_chunk_kda(*tensors, None, S0, True, chunk_size)
    assert relative_error(o2, o) < 1e-12 and relative_error(S2, S) < 1e-12


@pytest.mark.parametrize("regime", ["random", "mixed", "zero"])
def test_gradients_of_both_forms_agree(regime):
    tensors, S0 = arguments(regime, bounded=False, T=40, H=1, K=6, V=5)
    leaves = [x.requires_grad_() for x in (*tensors, S0)]
    grads = []
    for function in (naive_recurrent_kda, naive_chunk_kda):
        o, S = function(*leaves[:5], None, leaves[5], True)
        grads.append(torch.autograd.grad(o.square().sum() + S.sin().sum(), leaves))
    for a, b in zip(*grads):
        assert relative_error(a, b) < 1e-10


@pytest.mark.parametrize("function", [naive_recurrent_kda, naive_chunk_kda])
def test_dtypes_and_defaults(function):
    """The output has v's dtype and the state is fp32; no state unless asked; scale is K^-0.5; no tokens is a valid input."""
    tensors, _ = arguments("random", T=9, H=1, K=16)
    half = [x.bfloat16() for x in tensors]
    o, S = function(*half)
    assert o.dtype == torch.bfloat16 and S is None
    _, S = function(*half, output_final_state=True)
    assert S.dtype == torch.float32
    torch.testing.assert_close(function(*tensors)[0], function(*tensors, 0.25)[0])
    o, S = function(*(x[:, :0] for x in tensors), output_final_state=True)
    assert o.shape == (1, 0, 1, 16) and not S.any()


@pytest.mark.parametrize("function", [naive_recurrent_kda, naive_chunk_kda])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(v=torch.zeros(1, 5, 1, 3)), "v's head count is 1; it must be a multiple of q's head count 2"),
        (dict(v=torch.zeros(1, 9, 2, 3)), r"v's shape is \[1, 9, 2, 3\]; it must be \[1, 5, 2, 3\]"),
        (dict(k=torch.zeros(1, 9, 2, 4)), r"k's shape is \[1, 9, 2, 4\]; it must be \[1, 5, 2, 4\]"),
        (dict(g=torch.zeros(1, 5, 1, 4)), "g's shape"),
        (dict(beta=torch.zeros(1, 5, 2, 1)), "beta's shape"),
        (dict(beta=torch.zeros(1, 5, 2, dtype=torch.bool)), "beta's dtype is torch.bool; it must be a floating-point one"),
        (dict(q=torch.zeros(1, 5, 0, 4)), r"q's shape is \[1, 5, 0, 4\]; it must be \[B, T, H, K\], heads and dimensions at least 1"),
        (dict(q=[1.0]), "q is a list; it must be a torch.Tensor"),
        (dict(k=torch.zeros(1, 5, 2, 4, device="meta")), "k's device is meta; it must be cpu, where q is"),
        (dict(initial_state=torch.zeros(1, 1, 4, 3)), r"initial_state's shape is \[1, 1, 4, 3\]; it must be \[1, 2, 4, 3\]"),
        (dict(scale="1"), "scale is a str; it must be a number or None"),
    ],
)
def test_what_does_not_fit_is_refused(function, wrong, message):
    """Torch would broadcast most of it without a word."""
    fitting = dict(q=torch.zeros(1, 5, 2, 4), k=torch.zeros(1, 5, 2, 4), v=torch.zeros(1, 5, 2, 3), g=torch.zeros(1, 5, 2, 4))
    with pytest.raises((ValueError, TypeError), match=message):
        function(**fitting | dict(beta=torch.zeros(1, 5, 2)) | wrong)


@pytest.mark.parametrize(("chunk_size", "message"), [(0, "is 0; it must be at least 1"), (-5, "is -5"), (2.5, "is 2.5; it must be an int")])
def test_chunk_sizes_that_are_none(chunk_size, message):
    tensors, _ = arguments("random", T=3, H=1, K=4)
    with pytest.raises((ValueError, TypeError), match=f"chunk_size {message}"):
        naive_chunk_kda(*tensors, chunk_size=chunk_size)


def test_gate_forms():
    x = torch.tensor([-300.0, -3.0, 0.0, 4.0, 300.0], dtype=torch.float64).view(5, 1, 1)
    A_log, bias = torch.tensor([0.7], dtype=torch.float64), torch.tensor([[0.3]], dtype=torch.float64)
    y = x + 0.3
    softplus = torch.where(y > 30, y, torch.log1p(y.clamp(max=30).exp()))
    torch.testing.assert_close(activate_gate(x, A_log, bias, None), -math.exp(0.7) * softplus, rtol=1e-12, atol=0)
    torch.testing.assert_close(activate_gate(x, A_log, bias, -2.0), -2.0 / (1 + (-math.exp(0.7) * y).exp()), rtol=1e-12, atol=0)
    torch.testing.assert_close(activate_gate(x, None, None, -2.0), -2.0 / (1 + (-x).exp()), rtol=1e-12, atol=0)


def test_slow_gates_keep_relative_precision():
    """A decay of 1e-5 per token is right to 1e-5 of itself in fp32, in both forms."""
    logits = torch.linspace(-12.0, -9.0, 64).view(1, 1, 64)
    for lower_bound in (-5.0, None):
        exact = activate_gate(logits.double(), torch.zeros(1).double(), None, lower_bound)
        assert ((activate_gate(logits, torch.zeros(1), None, lower_bound).double() - exact) / exact).abs().max() < 1e-6


def test_beta_and_norm():
    x = torch.tensor([0.3, -2.0])
    assert activate_beta(x, False, False) is x
    torch.testing.assert_close(activate_beta(x, True, True), 2 / (1 + (-x).exp()))
    torch.testing.assert_close(l2norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6, 0.8]]))
    assert not l2norm(torch.zeros(1, 3)).any()


def test_prepare_repeats_heads_in_blocks():
    """Value head h reads q/k head h // (HV / H)."""
    tensors, _ = arguments("random", T=3, H=2, HV=6, K=4)
    q = prepare(*tensors, A_log=None, dt_bias=None, gate="none", lower_bound=None, qk_l2norm=False, beta_sigmoid=False, neg_eigval=False)[0]
    for head in range(6):
        assert torch.equal(q[:, :, head], tensors[0][:, :, head // 3])
