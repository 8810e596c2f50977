"""Gradients through chunk_kda on the portable kernels, against fp64 autograd of the recurrence; and how autograd's users use them."""

from functools import partial
from importlib import import_module

import pytest
import torch
from conftest import KERNELS
from fault_case import finest, width
from torch.utils.checkpoint import checkpoint

from openkda import chunk_kda
from openkda.testing import (
    REGIMES,
    Case,
    assert_close,
    cotangents,
    gradient_triples,
    gradients,
    leaves,
    make_case,
    relative_error,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
kernels = pytest.mark.parametrize("backend", KERNELS)


portable_gradients = partial(gradients, backend="portable")


def check(case: Case, **options: object) -> dict[str, torch.Tensor]:
    """Every gradient within the earned tolerance, in its input's dtype and shape."""
    found = portable_gradients(case, **options)
    for name, gradient in found.items():
        assert gradient.dtype == case.args[name].dtype and gradient.shape == case.args[name].shape
    for triple in gradient_triples(case, found):
        assert_close(*triple)
    return found


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
def test_regimes(device, regime, bounded):
    check(make_case(regime, T=67, H=1, K=32, V=16, bounded=bounded, device=device))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("regime", ["random", "init", "mixed", "extreme"])
def test_half_precision(device, regime, dtype):
    check(make_case(regime, T=70, H=2, K=32, V=32, dtype=dtype, bounded=regime in ("random", "init"), device=device))


@pytest.mark.parametrize(("dtype", "gate_dtype", "beta_dtype"), [(BF16, FP32, BF16), (BF16, FP16, FP32), (FP32, BF16, FP16)])
def test_mixed_dtypes(device, dtype, gate_dtype, beta_dtype):
    check(make_case("random", T=37, H=4, K=16, dtype=dtype, gate_dtype=gate_dtype, beta_dtype=beta_dtype, device=device))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 17), (40, 16), (129, 5), (16, 256), (256, 16)])
def test_head_dims(device, K, V):
    """The gradient of a state of one number is left out: a ratio of errors needs more than that."""
    wanted = ("q", "k", "v", "g", "beta", "A_log", "dt_bias") if K * V == 1 else None
    check(make_case("init", T=35, H=1, K=K, V=V, device=device), wanted=wanted)


@pytest.mark.parametrize(
    "options", [dict(raw=False), dict(raw=False, bounded=False), dict(neg_eigval=True), dict(qk_l2norm=False), dict(initial_state=False),
                dict(scale=0.3), dict(H=2, HV=6, T=35), dict(H=1, HV=2, T=35, dtype=BF16), dict(B=3, T=33), dict(lower_bound=-1.0),
                dict(state_v_first=True, T=67, V=24), dict(state_dtype=BF16)]
)  # fmt: skip
def test_options(device, options):
    check(make_case("init", **{**dict(T=35, H=2, K=16, device=device), **options}))


@pytest.mark.parametrize("lengths", [(1, 2, 33, 5), (0, 32, 0, 31, 64), (15, 17)])
def test_ragged_batches(device, lengths):
    """Each sequence's gradients are those of the sequence alone, bit for bit; a tail outside every sequence has gradient zero."""
    case = make_case("init", lengths=lengths, pad_to=sum(lengths) + 3, H=1, K=16, device=device)
    found = check(case)
    do, dfinal = cotangents(case)
    first = 0
    for n, length in enumerate(lengths):
        rows = slice(first, first + length)
        first += length
        args = leaves(case)
        del args["cu_seqlens"]
        args |= {name: args[name].detach()[:, rows].clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")}
        args["initial_state"] = args["initial_state"].detach()[n : n + 1].clone().requires_grad_()
        o, final = chunk_kda(**args, backend="portable")
        torch.autograd.backward([o, final], [do[:, rows], dfinal[n : n + 1]])
        for name in ("q", "k", "v", "g", "beta"):
            assert torch.equal(args[name].grad, found[name][:, rows]), (name, n)
        assert torch.equal(args["initial_state"].grad, found["initial_state"][n : n + 1])
    for name in ("q", "k", "v", "g", "beta"):
        assert (found[name][:, first:] == 0).all()


@pytest.mark.parametrize("shape", [dict(T=0, H=1), dict(lengths=(), H=1), dict(lengths=(0, 0), H=1), dict(T=1, H=1)])
def test_almost_nothing(device, shape):
    case = make_case("random", K=16, device=device, **shape)
    found = portable_gradients(case)
    assert all(x.isfinite().all() for x in found.values())
    if shape.get("T") != 1 and found["initial_state"].numel():
        assert torch.equal(found["initial_state"], cotangents(case)[1])  # no token: the state passes through


def test_zero_beta(device):
    case = make_case("random", T=35, H=2, K=16, raw=False, device=device)
    case.args["beta"][:, 4:9] = 0.0
    check(case)


@pytest.mark.parametrize("form", ["bounded", "softplus"])
def test_causality(device, form):
    """A loss on o[:t0] gives later tokens gradients that are exactly zero, and earlier ones do not move by a bit when those change."""
    t0 = 41
    case = make_case("random", T=67, H=1, K=16, bounded=form == "bounded", initial_state=False, device=device)
    found = []
    for _ in range(2):
        args = leaves(case)
        o, _ = chunk_kda(**args, backend="portable")
        o[:, :t0].backward(cotangents(case)[0][:, :t0])
        found.append({n: args[n].grad for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")})
        for name in ("q", "k", "v", "g", "beta"):
            case.args[name] = case.args[name].clone()
            case.args[name][:, t0:] = case.args[name][:, t0:].flip(1) * 3 - 1
    for name in ("q", "k", "v", "g", "beta"):
        for run in found:
            assert (run[name][:, t0:] == 0).all(), name
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_repeated_runs_are_equal(device):
    case = make_case("init", lengths=(40, 3, 70), H=2, HV=4, K=16, dtype=BF16, device=device)
    first, second = portable_gradients(case), portable_gradients(case)
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_kept_intermediates(device, dtype):
    case = make_case("init", T=70, H=1, HV=2, K=16, dtype=dtype, device=device)
    check(case, disable_recompute=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_one_input_at_a_time(device, name):
    case = make_case("init", T=35, H=1, K=16, device=device)
    every, one = portable_gradients(case), portable_gradients(case, (name,))
    assert set(one) == {name} and torch.equal(one[name], every[name])


def test_what_is_not_needed_is_not_computed(device, monkeypatch):
    backward = import_module("openkda.portable.backward")  # the package's attribute of that name is a function
    ran = []
    for stage in ("both_scans", "reverse_scan", "score_gradients", "input_gradients"):
        run = getattr(backward, stage)
        monkeypatch.setattr(backward, stage, lambda *args, stage=stage, run=run, **kw: (ran.append(stage), run(*args, **kw))[1])
    case = make_case("init", T=35, H=1, K=16, device=device)
    for wanted, stages in (("initial_state", 1), ("v", 2), ("beta", 2), ("q", 3)):
        ran.clear()
        portable_gradients(case, (wanted,))
        assert len(ran) == stages, wanted


def test_gradient_of_one_output(device):
    """Either output alone; an unused final state costs no gradient of its own."""
    case = make_case("init", T=35, H=1, K=16, device=device)
    do, dfinal = cotangents(case)
    parts = []
    for pick in (0, 1):
        args = leaves(case)
        outputs = chunk_kda(**args, backend="portable")
        outputs[pick].backward((do, dfinal)[pick])
        parts.append({n: args[n].grad for n in ("k", "v", "g", "initial_state")})
    for name, both in portable_gradients(case, ("k", "v", "g", "initial_state")).items():
        assert relative_error(parts[0][name] + parts[1][name], both) < 1e-4


@kernels
def test_upstream_gradients_of_any_stride(device, backend):
    case = make_case("init", B=2, T=35, H=2, K=width(backend), dtype=BF16, device=device)
    do, _ = cotangents(case)
    expected = None
    for given in (do, do.transpose(1, 2).contiguous().transpose(1, 2), torch.stack([do, do], -1)[..., 0]):
        args = leaves(case)
        chunk_kda(**args, backend=backend)[0].backward(given)
        expected = expected or {n: args[n].grad for n in ("q", "k", "v", "g", "beta")}
        assert all(torch.equal(args[n].grad, x) for n, x in expected.items())
    args = leaves(case)
    chunk_kda(**args, backend=backend)[0].sum().backward()  # an expanded scalar: every stride zero
    assert args["q"].grad.isfinite().all()


def test_views_of_one_projection(device):
    """q, k, v as views of one fused projection: the same gradients as with copies."""
    case = make_case("init", T=35, H=1, K=16, dtype=BF16, device=device)
    packed = torch.cat([case.args[n].flatten(2) for n in ("q", "k", "v")], -1)
    found = []
    for split in (lambda x: x, lambda x: x.contiguous()):
        x = packed.clone().requires_grad_()
        q, k, v = (split(part).unflatten(2, (1, 16)) for part in x.split(16, -1))
        o, _ = chunk_kda(**{**case.args, "q": q, "k": k, "v": v}, backend="portable")
        o.backward(cotangents(case)[0])
        found.append(x.grad)
    assert torch.equal(*found)


@kernels
def test_checkpoint_hooks_and_a_retained_graph(device, backend):
    case = make_case("init", T=35, H=1, K=width(backend), dtype=finest(backend), device=device)
    expected = gradients(case, backend=backend)
    args = leaves(case)
    names = [n for n, x in args.items() if isinstance(x, torch.Tensor)]
    call = lambda *tensors: chunk_kda(**{**args, **dict(zip(names, tensors))}, backend=backend)
    o, final = checkpoint(call, *(args[n] for n in names), use_reentrant=False)
    seen = []
    o.register_hook(lambda do: seen.append(do.shape))
    torch.autograd.backward([o, final], list(cotangents(case)), retain_graph=True)
    assert seen == [o.shape]
    assert all(torch.equal(args[n].grad, x) for n, x in expected.items())

    args = leaves(case)
    o, final = chunk_kda(**args, backend=backend)
    for _ in range(2):
        torch.autograd.backward([o, final], list(cotangents(case)), retain_graph=True)
    assert all(torch.equal(args[n].grad, x + x) for n, x in expected.items())


@kernels
def test_autocast(device, backend):
    """Inside autocast the call behaves as outside: it takes its tensors as they are."""
    case = make_case("init", T=35, H=1, HV=2, K=width(backend), dtype=BF16, gate_dtype=FP32, device=device)
    expected = gradients(case, backend=backend)
    with torch.autocast(device.type, dtype=BF16):
        found = gradients(case, backend=backend)
    assert all(torch.equal(found[n], x) for n, x in expected.items())
