"""Gradients of the public functions: the fp64 torch path by finite differences, kernels that leave the backward to torch, plumbing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from openkda import backends, chunk_kda, fused_recurrent_kda
from openkda.testing import REGIMES, Case, make_case, relative_error

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def leaves_of(case: Case) -> dict[str, torch.Tensor]:
    return {name: case.args[name].requires_grad_() for name in TENSORS if case.args.get(name) is not None}


def backward(case: Case, function=chunk_kda, **options) -> dict[str, torch.Tensor]:
    """Gradients of a fixed random combination of o and the final state."""
    leaves = leaves_of(case)
    o, S = function(**case.args, **options)
    gen = torch.Generator().manual_seed(0)
    weigh = lambda x: (x.double() * torch.randn(x.shape, generator=gen).to(x.device)).sum()
    return dict(zip(leaves, torch.autograd.grad(weigh(o) + weigh(S), list(leaves.values()))))


def in_double(case: Case) -> Case:
    real = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
    return Case({name: x.detach().double() if real(x) else x for name, x in case.args.items()}, case.regime)


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(bounded=False),
        dict(raw=False, bounded=False, qk_l2norm=False),
        dict(neg_eigval=True, state_v_first=True),
        dict(lengths=(3, 0, 17)),
        dict(regime="mixed", bounded=False),
    ],
)
def test_gradcheck(function, options):
    """Finite differences in fp64: both gate forms, both contracts, layouts, ragged, rows beyond the span of the matrix form."""
    case = in_double(make_case(**{"T": 20, "H": 1, "HV": 2, "K": 3, "V": 2, **options}))
    if not options.get("raw", True):
        case.args["g"] = -0.1 - case.args["g"].abs()  # a step across g = 0 would leave the contract
    case.args = {name: value for name, value in case.args.items() if name != "safe_gate"}
    leaves = leaves_of(case)
    call = lambda *tensors: function(**{**case.args, **dict(zip(leaves, tensors))}, backend="torch")
    assert torch.autograd.gradcheck(call, tuple(leaves.values()), fast_mode=True, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bounded", [True, False])
def test_fp32_gradients_in_every_regime(regime, bounded):
    """Finite, and as near to fp64 as the regime allows: a decay of exp(-1000) has none to speak of."""
    case = make_case(regime, T=70, H=1, HV=2, K=8, V=6, bounded=bounded)
    exact, grads = backward(in_double(case)), backward(case)
    for name, grad in grads.items():
        assert grad.isfinite().all() and grad.dtype == case.args[name].dtype
        size = exact[name].norm()
        assert (grad - exact[name]).norm() <= 2e-4 * size + 1e-5, name


@pytest.mark.parametrize("lengths", [None, (20, 0, 15)])
@pytest.mark.parametrize("v_first", [True, False])
def test_torch_backward_behind_a_kernel_forward(device, monkeypatch, lengths, v_first):
    """Where a backend has no gradient kernels the torch backend recomputes; the gradients are its own."""
    monkeypatch.setattr(backends, "why_not_backward", lambda name, problem: None if name == "torch" else "none here")
    backends.choose_backward.cache_clear()
    case = make_case("init", T=35, lengths=lengths, H=1, HV=2, K=8, V=6, state_v_first=v_first, device=device)
    reference, grads = backward(case, backend="torch"), backward(case, backend="portable")
    backends.choose_backward.cache_clear()
    assert grads.keys() == reference.keys()
    for name in grads:
        assert relative_error(grads[name], reference[name]) < 1e-6, name


def test_gradients_in_the_inputs_dtypes(device):
    case = make_case("random", T=20, H=1, K=8, dtype=torch.bfloat16, gate_dtype=torch.float16, state_dtype=torch.bfloat16, device=device)
    for name, grad in backward(case, backend="torch").items():
        assert grad.dtype == case.args[name].dtype and grad.shape == case.args[name].shape and grad.isfinite().all()


@pytest.mark.parametrize("name", TENSORS)
def test_one_input_that_needs_a_gradient(device, name):
    case = make_case("random", T=18, H=1, K=8, device=device)
    expected = backward(case, backend="torch")[name]
    for other in TENSORS:
        case.args[other] = case.args[other].detach()
    case.args[name].requires_grad_()
    o, S = chunk_kda(**case.args, backend="torch")
    gen = torch.Generator().manual_seed(0)
    weigh = lambda x: (x.double() * torch.randn(x.shape, generator=gen).to(x.device)).sum()
    (weigh(o) + weigh(S)).backward()
    assert relative_error(case.args[name].grad, expected) < 1e-6
    assert all(case.args[other].grad is None for other in TENSORS if other != name)


def test_either_output_alone(device):
    """The gradient of final_state reaches initial_state; that of one token's o reaches it and the values up to that token."""
    case = make_case("init", T=18, H=1, K=8, device=device)
    leaves = leaves_of(case)
    o, S = chunk_kda(**case.args, backend="torch")
    of_state = torch.autograd.grad(S.sum(), leaves["initial_state"], retain_graph=True)[0]
    of_o = torch.autograd.grad(o[:, 5].sum(), (leaves["initial_state"], leaves["v"]))
    assert of_state.abs().sum() > 0 and of_o[0].abs().sum() > 0
    assert of_o[1][:, :6].abs().sum() > 0 and not of_o[1][:, 6:].any()


def test_retained_graphs_checkpoints_and_strided_upstream_gradients(device):
    case = make_case("init", T=18, H=2, K=8, device=device)
    leaves = leaves_of(case)
    call = lambda q: chunk_kda(**{**case.args, "q": q}, backend="torch")[0]
    o = call(leaves["q"])
    upstream = torch.randn(1, 2, 18, 8, device=device).transpose(1, 2)
    first, again = (torch.autograd.grad(o, leaves["q"], upstream, retain_graph=True)[0] for _ in range(2))
    recomputed = torch.autograd.grad(checkpoint(call, leaves["q"], use_reentrant=False), leaves["q"], upstream)[0]
    assert torch.equal(first, again) and torch.equal(first, recomputed)
    assert torch.equal(first, torch.autograd.grad(o, leaves["q"], upstream.contiguous())[0])


@pytest.mark.parametrize("backend", ["torch", "portable"])
def test_no_graph_without_need(device, backend):
    case = make_case("random", T=8, H=1, K=8, device=device)
    leaves_of(case)
    with torch.no_grad():
        assert not chunk_kda(**case.args, backend=backend)[0].requires_grad
    o, S, h = chunk_kda(**case.args, backend=backend, return_intermediate_states=True)
    assert not (o.requires_grad or S.requires_grad or h.requires_grad)
