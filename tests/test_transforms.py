"""torch.func, forward-mode and second derivatives: right on the torch backend, refused by name where kernels would lose them."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from openkda import chunk_kda, fused_recurrent_kda, kda_decode, kda_fused_decode, kda_prefill
from openkda.custom_ops import chunk_kda_op
from openkda.layer import KimiDeltaAttention
from openkda.portable.gated_norm import gated_norm
from openkda.portable.short_conv import silu_conv
from openkda.testing import REGIMES, make_case

FUNCTIONS = [chunk_kda, fused_recurrent_kda]
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def call(function, device="cpu", backend="torch", regime="random", dtype=torch.float64, **options):
    """(f, its tensors): f(*tensors) -> (o, final_state) of a small case with everything given, in fp64."""
    case = make_case(regime, **dict(T=18, H=1, HV=2, K=4, V=3, device=device) | options)
    args = {
        n: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in case.args.items() if n != "safe_gate"
    }
    names = [n for n in TENSORS if args.get(n) is not None]
    return lambda *tensors: function(**args | dict(zip(names, tensors)), backend=backend), [args[n] for n in names]


def along(tensors):
    """A direction for every tensor."""
    gen = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=gen, dtype=torch.float64).to(x) for x in tensors]


@pytest.mark.parametrize("regime", [r for r in REGIMES if r != "zero"])  # a step across g = 0 leaves the contract
@pytest.mark.parametrize("lengths", [None, (5, 0, 13)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_mode_is_the_slope(function, regime, lengths):
    """jvp, dual numbers without a grad mode, and the central difference agree."""
    f, x = call(function, regime=regime, lengths=lengths)
    d = along(x)
    _, slopes = torch.func.jvp(f, tuple(x), tuple(d))
    step = 1e-6
    ahead, behind = f(*(a + step * b for a, b in zip(x, d))), f(*(a - step * b for a, b in zip(x, d)))
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.unpack_dual(y).tangent for y in f(*(forward_ad.make_dual(a, b) for a, b in zip(x, d)))]
    for slope, dual, a, b in zip(slopes, duals, ahead, behind):
        assert torch.equal(slope, dual)
        assert (slope - (a - b) / (2 * step)).norm() <= 1e-6 * (slope.norm() + 1)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functional_gradients_are_those_of_autograd(function):
    f, x = call(function)
    loss = lambda *tensors: sum(y.square().sum() for y in f(*tensors))
    found = torch.func.grad(loss, argnums=tuple(range(len(x))))(*x)
    leaves = [t.clone().requires_grad_() for t in x]
    for a, b in zip(found, torch.autograd.grad(loss(*leaves), leaves)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("options", [dict(), dict(bounded=False), dict(regime="mixed", bounded=False), dict(lengths=(3, 0, 8))])
def test_second_derivatives(function, options):
    """Finite differences of the gradients, in fp64."""
    f, x = call(function, **dict(T=11, HV=1, K=3, V=2) | options)
    leaves = tuple(t.requires_grad_() for t in x)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True, atol=1e-5, rtol=1e-4)


def refused(device, run, *words):
    with pytest.raises(ValueError) as error:
        run()
    text = str(error.value)
    assert all(word in text for word in words) and "\n" not in text, text


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda q: f(q, *x[1:])[0].sum())(x[0]),
    "vjp": lambda f, x: torch.func.vjp(lambda k: f(x[0], k, *x[2:])[0], x[1])[1](x[2]),
    "jvp": lambda f, x: torch.func.jvp(lambda v: f(*x[:2], v, *x[3:])[0], (x[2],), (x[2],)),
    "jacrev": lambda f, x: torch.func.jacrev(lambda g: f(*x[:3], g, *x[4:])[0].sum())(x[3]),
    "dual": lambda f, x: in_dual_level(lambda: f(x[0], forward_ad.make_dual(x[1], x[1]), *x[2:])),
    "vmap": lambda f, x: torch.vmap(lambda beta: f(*x[:4], beta, *x[5:])[0])(torch.stack([x[4], x[4]])),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda q: f(q, *x[1:])[0].sum()))(torch.stack([x[0], x[0]])),
}


def in_dual_level(run):
    with forward_ad.dual_level():
        return run()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_kernels_refuse_what_they_would_lose(device, function, transform):
    f, x = call(function, device, "portable", dtype=torch.float32)
    words = ("chunk_kda", "vmap", "B") if "vmap" in transform and function is chunk_kda else ("portable", "torch.func", "torch backend")
    refused(device, lambda: TRANSFORMS[transform](f, x), *words)


@pytest.mark.parametrize("transform", ["grad", "jvp", "dual"])
def test_dispatch_sends_transforms_to_torch(device, transform):
    f, x = call(chunk_kda, device, None, dtype=torch.float32)
    TRANSFORMS[transform](f, x)


def test_vmap_is_refused_in_our_words():
    f, x = call(chunk_kda)
    refused("cpu", lambda: TRANSFORMS["vmap"](f, x), "chunk_kda", "torch.vmap", "fold the mapped dimension into B")
    f, x = call(fused_recurrent_kda)
    mapped = torch.vmap(lambda v: f(*x[:2], v, *x[3:])[0])(torch.stack([x[2], 2 * x[2]]))
    assert torch.allclose(mapped[1], f(*x[:2], 2 * x[2], *x[3:])[0])


@pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()], ids=["linear", "square"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_gradients_of_the_kernels_gradients_are_refused(device, loss, wrapped):
    """Also where nothing above depends on the inputs: the gradients still do. First ones are what they are without create_graph."""
    f, x = call(chunk_kda, device, "portable", dtype=torch.float32)
    q = x[0].requires_grad_()
    run = lambda q: f(q, *x[1:])[0]
    o = checkpoint(run, q, use_reentrant=False) if wrapped else run(q)
    dq = torch.autograd.grad(loss(o), q, create_graph=True)[0]
    assert torch.equal(dq, torch.autograd.grad(loss(run(q)), q)[0])
    for again in (lambda: torch.autograd.grad(dq.sum(), q, retain_graph=True, allow_unused=True), lambda: dq.sum().backward()):
        refused(device, again, "gradients of chunk_kda's kernels", "create_graph", 'backend="torch"')
    assert q.grad is None
    up = torch.ones_like(o).requires_grad_()
    dq = torch.autograd.grad(run(q), q, up, create_graph=True)[0]
    refused(device, lambda: torch.autograd.grad(dq.sum(), up), "gradients of chunk_kda's kernels", 'backend="torch"')


def test_the_operator_refuses_second_gradients(device):
    case = make_case("random", T=18, H=1, K=4, device=device)
    args = [case.args[n] for n in TENSORS]
    args[0] = args[0].requires_grad_()
    flags = (None, None, None, True, -5.0, False, True, True, False, True, False, False, 64, True, "portable")
    dq = torch.autograd.grad(chunk_kda_op(*args, *flags)[0].sum(), args[0], create_graph=True)[0]
    refused(device, lambda: torch.autograd.grad(dq.sum(), args[0]), "as an operator", 'backend="torch"')


def test_batched_upstream_gradients(device):
    """autograd.grad(..., is_grads_batched=True): torch's own operators map, kernels refuse."""
    f, x = call(chunk_kda, device, "torch", dtype=torch.float32)
    q = x[0].requires_grad_()
    o = f(*x)[0]
    up = torch.stack([torch.ones_like(o), 2 * torch.ones_like(o)])
    both = torch.autograd.grad(o, q, up, is_grads_batched=True)[0]
    assert torch.allclose(2 * both[0], both[1], rtol=1e-4, atol=1e-6)
    f, x = call(chunk_kda, device, "portable", dtype=torch.float32)
    q = x[0].requires_grad_()
    o = f(*x)[0]
    refused(device, lambda: torch.autograd.grad(o, q, up, is_grads_batched=True), "chunk_kda's kernels", "batched", 'backend="torch"')


def test_the_layers_kernels_refuse_second_gradients(device):
    x, gate, weight = (torch.randn(*shape, device=device).requires_grad_() for shape in ((5, 8), (5, 8), (8,)))
    y = gated_norm(x, gate, weight, 1e-5)
    dx = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    refused(device, lambda: torch.autograd.grad(dx.sum(), gate, allow_unused=True), "output norm", "CPU")
    stream, taps = torch.randn(1, 9, 8, device=device).requires_grad_(), torch.randn(8, 1, 4, device=device).requires_grad_()
    dx = torch.autograd.grad(silu_conv(stream, taps, None).sum(), stream, create_graph=True)[0]
    refused(device, lambda: torch.autograd.grad(dx.sum(), taps, allow_unused=True), "short convolution", "CPU")


def test_a_whole_layer():
    """torch.func over a layer's parameters: its gradients are autograd's, its jvp their product with the direction."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(24, 2, 8).double()
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    loss = lambda p: torch.func.functional_call(layer, p, (x,)).square().sum()
    detached = {name: p.detach() for name, p in parameters.items()}
    found, expected = torch.func.grad(loss)(detached), torch.autograd.grad(loss(parameters), list(parameters.values()))
    direction = {name: torch.randn_like(p) for name, p in detached.items()}
    slope = torch.func.jvp(loss, (detached,), (direction,))[1]
    assert all(torch.allclose(a, b) for a, b in zip(found.values(), expected, strict=True))
    assert torch.allclose(slope, sum((a * b).sum() for a, b in zip(expected, direction.values(), strict=True)))


def serving(device):
    """The three serving functions on small inputs: name -> run(q)."""
    H, K = 2, 16
    q, k, v, gate = (torch.randn(3, 1, H, K, device=device) for _ in range(4))
    beta, pool, conv = (
        torch.rand(3, 1, H, device=device),
        torch.zeros(5, H, K, K, device=device),
        torch.zeros(5, 3 * H * K, 3, device=device),
    )
    taps = torch.zeros(3 * H * K, 4, device=device)
    slots = torch.arange(3, dtype=torch.int32, device=device)
    gate_options = dict(A_log=torch.zeros(H, device=device), dt_bias=None, lower_bound=-5.0)
    options = gate_options | dict(state_pool=pool, state_indices=slots)
    flat = lambda x: x.transpose(0, 1)
    bounds = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    return q, {
        "kda_decode": lambda q: kda_decode(q, k, v, gate, beta, **options),
        "kda_prefill": lambda q: kda_prefill(
            flat(q), flat(k), flat(v), flat(gate), flat(beta), has_initial_state=None, cu_seqlens=bounds, **options
        ),
        "fused_recurrent_kda with states in place": lambda q: fused_recurrent_kda(
            q, k, v, -gate.abs(), beta, initial_state=pool, state_indices=slots, backend=None
        )[0],
        "kda_fused_decode": lambda q: kda_fused_decode(
            q, k, v, gate, beta, output_gate=v, norm_weight=v[0, 0, 0], conv_weight=taps, conv_bias=None, conv_pool=conv,
            **options
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["kda_decode", "kda_prefill", "fused_recurrent_kda with states in place", "kda_fused_decode"])
def test_serving_refuses_transforms(device, name):
    q, functions = serving(device)
    run = functions[name]
    assert run(q).isfinite().all()
    refused(device, lambda: torch.func.grad(lambda q: run(q).sum())(q), name, "has no gradient")
    refused(device, lambda: in_dual_level(lambda: run(forward_ad.make_dual(q, q))), name, "forward-mode")
    refused(device, lambda: torch.vmap(run)(torch.stack([q, q])), name, "torch.vmap")
