"""Inputs that broke published KDA implementations, one test per kind of fault; the number in a test's name is the fault's.

Every test runs on each backend: torch, portable (through Triton's interpreter on a CPU) and hopper. A backend that does not serve a case
must refuse it by name, and dispatch must serve it instead. The sizes that were reported run on a GPU; a small twin of each runs everywhere.
docs/faults.md has the list, with the faults whose tests are in other files.
"""

import pytest
import torch
from fault_case import BF16, F16, F32, TOKENWISE, check, check_gradients, finest, run, sizes, width, with_gate

from openkda import chunk_kda, fused_recurrent_kda
from openkda.testing import Case, assert_close, cotangents, leaves, make_case, relative_error


@sizes(dict(T=75, H=1, K=32), dict(T=298, H=4, K=128))
def test_01_fast_and_slow_channels(backend, device, size):
    """A channel that falls by 50 nats a token contributes nothing a few tokens later, beside one that falls by 0.01."""
    K = width(backend, size["K"])
    case = make_case("random", dtype=BF16, raw=False, bounded=False, gate_dtype=F32, device=device, **{**size, "K": K})
    check(with_gate(case, torch.tensor([-50.0, -0.01], device=device).repeat(K // 2)), backend)


@pytest.mark.gpu
def test_01_on_the_other_dispatch_path(backend, device):
    case = make_case("random", T=8192, H=4, K=128, dtype=BF16, raw=False, bounded=False, gate_dtype=F32, device=device)
    check(with_gate(case, torch.tensor([-50.0, -0.01], device=device).repeat(64)), backend)


@sizes(dict(T=67, H=1, K=16), dict(T=129, H=8, K=128))
@pytest.mark.parametrize("decay", [5.4, 5.6, 8.0, 20.0])
def test_02_unbounded_decay_around_the_limit_of_the_matrix_form(backend, device, size, decay):
    size = {**size, "K": width(backend, size["K"])}
    case = make_case("random", dtype=BF16, bounded=False, gate_dtype=F32, device=device, **size)
    logit = torch.full((), decay, dtype=torch.float64).expm1().log()  # softplus(logit) = decay
    zero = torch.zeros(size["H"], device=device)
    check(with_gate(case, logit, A_log=zero, dt_bias=torch.zeros(size["H"], size["K"], device=device)), backend)


@sizes(dict(T=70, H=1, K=16), dict(T=512, H=12, K=128))
@pytest.mark.parametrize("lower_bound", [-1.0, -2.5, -3.0, -4.0, -5.0])
def test_03_saturated_bounded_gate(backend, device, size, lower_bound):
    size = {**size, "K": width(backend, size["K"])}
    check(make_case("extreme", dtype=BF16, lower_bound=lower_bound, device=device, **size), backend)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("t0", [1, 17, 37, 68])
def test_04_causality_to_the_bit(backend, device, raw, t0):
    """Changing tokens from t0 on, or cutting them off, leaves the earlier outputs as they were."""
    K = width(backend)
    case, changed, cut = (make_case("mixed", T=74, H=1, K=K, dtype=BF16, raw=raw, initial_state=False, device=device) for _ in range(3))
    other = make_case("extreme", T=74, H=1, K=K, dtype=BF16, raw=raw, seed=1, device=device)
    for name in TOKENWISE:
        changed.args[name] = torch.cat([case.args[name][:, :t0], other.args[name][:, t0:]], 1)
        cut.args[name] = case.args[name][:, :t0]
    o = run(case, backend)[0][:, :t0]
    assert torch.equal(o, run(changed, backend)[0][:, :t0]) and torch.equal(o, run(cut, backend)[0])


def test_04_causality_of_gradients(backend, device):
    """A loss on the first 68 tokens has the same gradients, to the bit, whatever the others are, and none for the others."""
    grads, options = [], dict(T=74, H=1, K=width(backend), dtype=finest(backend), device=device)
    for seed in (1, 2):
        case = make_case("random", initial_state=False, **options)
        later = make_case("random", seed=seed, **options)
        for name in TOKENWISE:
            case.args[name] = torch.cat([case.args[name][:, :68], later.args[name][:, 68:]], 1).requires_grad_()
        o, _ = run(case, backend)
        grads.append(torch.autograd.grad(o[:, :68].sum(), [case.args[name] for name in TOKENWISE]))
    for a, b in zip(*grads):
        assert torch.equal(a[:, :68], b[:, :68]) and not a[:, 68:].any()


def test_05_growth_is_outside_the_contract(backend, device):
    """Documented, and not looked for: the call returns."""
    assert "positive value is outside the contract" in " ".join(chunk_kda.__doc__.split())
    K = width(backend)
    case = make_case("zero", T=20, H=1, K=K, dtype=finest(backend), raw=False, bounded=False, device=device)
    assert run(with_gate(case, torch.tensor(5.0)), backend)[0].shape == (1, 20, 1, K)


def correlated_keys(T: int, H: int, K: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Keys that nearly repeat, full write strength, almost no decay: the inverse is far from a short series."""
    case = make_case("zero", T=T, H=H, K=K, dtype=dtype, gate_dtype=F32, raw=False, bounded=False, qk_l2norm=False, device=device)
    gen = torch.Generator().manual_seed(0)
    k = torch.randn(K, generator=gen) + 0.05 * torch.randn(1, T, H, K, generator=gen)
    k = (k / k.norm(dim=-1, keepdim=True)).to(device, dtype)
    return with_gate(case, torch.tensor(-1e-3), k=k, beta=torch.ones_like(case.args["beta"]))


@sizes(dict(T=66, H=1, K=32), dict(T=512, H=48, K=128))
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_06_inverse_of_correlated_keys(backend, device, size, dtype):
    check(correlated_keys(dtype=dtype, device=device, **{**size, "K": width(backend, size["K"])}), backend)


@sizes(dict(T=66, H=1, K=32), dict(T=512, H=48, K=128))
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_07_correlated_keys_in_fp16(backend, device, size, chunk_size):
    case = correlated_keys(dtype=F16, device=device, **{**size, "K": width(backend, size["K"])})
    case.args["chunk_size"] = chunk_size
    check(case, backend)


def test_08_gate_gradient_under_strong_decay(backend, device):
    """exp(A_log) from 1 to 16: dg is a small difference of large sums, and the first token has none without an entry state."""
    K = width(backend)
    options = dict(T=64, H=2, K=K, dtype=finest(backend), gate_dtype=F32, device=device)
    case = make_case("random", bounded=False, raw=False, initial_state=False, **options)
    rate = 1.0 + 15.0 * torch.rand(2, 1, generator=torch.Generator().manual_seed(0))
    with_gate(case, -rate.to(device) * torch.rand(1, 64, 2, K, generator=torch.Generator().manual_seed(1)).to(device))
    dg = check_gradients(case, backend, 1e-4)["g"]
    assert dg[:, 0].abs().max() <= (1e-6 if finest(backend) == F32 else 1e-3) * dg.abs().max()


@sizes(dict(T=70, H=1, K=16), dict(T=1000, H=4, K=64))
def test_09_no_decay_at_all(backend, device, size):
    """Boundary errors do not fade when nothing is forgotten: values and every gradient."""
    size = {**size, "K": width(backend, size["K"]), "dtype": finest(backend)}
    case = make_case("zero", raw=False, bounded=False, qk_l2norm=False, device=device, **size)
    check(case, backend)
    check_gradients(case, backend, 2e-5)


@pytest.mark.parametrize("gate_dtype", [F32, BF16])
def test_11_norm_flag_is_honoured(backend, device, gate_dtype):
    """q and k times eight with the flag are q and k normalised before without it."""
    dtype = finest(backend)
    case = make_case("random", T=40, H=1, K=width(backend), dtype=dtype, gate_dtype=gate_dtype, device=device)
    normal = lambda x: (x.float() * torch.rsqrt((x.float() ** 2).sum(-1, keepdim=True) + 1e-6)).to(dtype)
    before = dict(q=normal(8 * case.args["q"]), k=normal(8 * case.args["k"]), use_qk_l2norm_in_kernel=False)
    o, S = run(case, backend, q=8 * case.args["q"], k=8 * case.args["k"])
    o2, S2 = run(case, backend, **before)
    near = 2e-6 if dtype == F32 else 2e-2  # the normalised q and k are rounded too
    assert relative_error(o, o2) < near and relative_error(S, S2) < near


@sizes(dict(T=92, H=1, K=16), dict(T=1500, H=4, K=128))
@pytest.mark.parametrize("raw", [True, False])
def test_12_a_tail_with_either_gate_dtype(backend, device, size, raw):
    """28 tokens in the last chunk; the second call differs in g's dtype alone."""
    size = {**size, "K": width(backend, size["K"])}
    for gate_dtype in (F32, BF16):
        check(make_case("random", dtype=BF16, gate_dtype=gate_dtype, raw=raw, device=device, **size), backend)


@pytest.mark.parametrize("T", [1, 2, 15, 17, 33, 49, 63, 65])
def test_13_partial_blocks_before_poisoned_memory(backend, device, T):
    """What lies behind the inputs is NaN, and some gates are -1000."""
    case = make_case("random", T=T, H=1, K=width(backend), dtype=BF16, gate_dtype=F32, raw=False, bounded=False, device=device)
    spikes = torch.rand(case.args["g"].shape, generator=torch.Generator().manual_seed(0)).to(device) < 0.1
    case.args["g"] = torch.where(spikes, -1000.0, case.args["g"])
    for name in TOKENWISE:
        x = case.args[name]
        held = torch.full((1, T + 80, *x.shape[2:]), float("nan"), dtype=x.dtype, device=device)
        held[:, :T] = x
        case.args[name] = held[:, :T]
    check(case, backend)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_13_what_the_neighbours_hold(backend, device, bounded, bad):
    """A sequence of NaN between two others, and NaN behind the last one: what the others give, gradients too, keeps its bits."""
    case = make_case("random", lengths=(33, 5, 20), pad_to=70, H=1, K=width(backend), dtype=finest(backend), bounded=bounded, device=device)
    rows, sequences = [*range(33), *range(38, 58)], [0, 2]
    found = []
    for _ in range(2):
        args = leaves(case)
        o, S = chunk_kda(**args, backend=backend)
        torch.autograd.backward([o, S], cotangents(case))
        tokens = [x[:, rows] for x in (o.detach(), *(args[name].grad for name in TOKENWISE))]
        found.append([*tokens, S.detach()[sequences], args["initial_state"].grad[sequences]])
        for name in TOKENWISE:
            case.args[name] = case.args[name].clone()
            case.args[name][:, 33:38] = case.args[name][:, 58:] = bad
        case.args["initial_state"] = case.args["initial_state"].clone()
        case.args["initial_state"][1] = bad
    assert all(x.isfinite().all() and torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("K", [129, 153, 255])
def test_19_odd_wide_heads(backend, device, K):
    """One token, K just over a power of two: values and gradients."""
    check(make_case("random", B=4, T=1, H=1, K=K, V=64, dtype=BF16, device=device), backend)
    check_gradients(make_case("random", T=1, H=1, K=K, V=16, device=device), backend, 1e-4)


@pytest.mark.parametrize(
    "size",
    [dict(H=12, K=64, T=2), dict(H=3, K=96, T=33), dict(H=3, K=64, lengths=(32, 3))]
    + [pytest.param(dict(H=H, K=K, T=33), marks=pytest.mark.gpu) for H in (1, 3, 12) for K in (64, 96)],
)
def test_20_head_counts_and_dims_off_the_beaten_track(backend, device, size):
    check(make_case("random", V=width(backend), dtype=BF16, device=device, **size), backend)


@pytest.mark.parametrize("V", [64, 256])
def test_21_v_unlike_k(backend, device, V):
    check(make_case("init", T=35, H=1, K=128, V=V, dtype=BF16, gate_dtype=F32, device=device), backend)


@pytest.mark.parametrize("v_first", [True, False])
def test_23_one_contract_for_prefill_and_recurrence(backend, device, v_first):
    """K != V: the state of a prefill continues token by token."""
    K = width(backend, 32)
    case = make_case("init", T=40, H=1, K=K, V=192 - K if K == 64 else 64, dtype=finest(backend), state_v_first=v_first, device=device)
    part = lambda rows, S: {**case.args, **{name: case.args[name][:, rows] for name in TOKENWISE}, "initial_state": S}
    _, S = chunk_kda(**part(slice(0, 37), case.args["initial_state"]), backend=backend)
    tokenwise = None if backend == "hopper" else backend  # it has no token-by-token form of its own
    o, S = fused_recurrent_kda(**part(slice(37, 40), S), backend=tokenwise)
    assert_close("o", o, case.oracle[0][:, 37:], case.twin[0][:, 37:])
    assert_close("final_state", S, case.oracle[1], case.twin[1])


def test_24_views_of_one_projection(backend, device):
    """q, k, v cut from one tensor give what their copies give, values and gradients."""
    results = []
    K, dtype = width(backend), finest(backend)
    packed = torch.randn(1, 40, 2, 3 * K, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for copy in (lambda x: x, torch.clone):
        leaf = packed.clone().requires_grad_()
        case = make_case("random", T=40, H=2, K=K, dtype=dtype, device=device)
        case.args.update({name: copy(x) for name, x in zip("qkv", leaf.split(K, -1))})
        o, S = run(case, backend)
        results.append((o, S, torch.autograd.grad(o.float().square().sum() + S.sum(), leaf)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results))
