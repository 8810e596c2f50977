"""Inputs that broke published KDA implementations, one test per kind of fault; the number in a test's name is the fault's.

Every test runs on each backend that serves it: torch, portable (through Triton's interpreter on a CPU) and hopper. The sizes that were
reported run on a GPU; a small twin of each runs everywhere.
"""

import pytest
import torch

from openkda import backends, chunk_kda, fused_recurrent_kda
from openkda.testing import Case, assert_close, make_case, relative_error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOKENWISE = ("q", "k", "v", "g", "beta")


@pytest.fixture(params=["torch", "portable", pytest.param("hopper", marks=pytest.mark.hopper)])
def backend(request):
    return request.param


def sizes(small: dict, full: dict):
    """The reported sizes on a GPU, small ones everywhere."""
    return pytest.mark.parametrize("size", [small, pytest.param(full, marks=pytest.mark.gpu)], ids=["small", "full"])


def width(backend: str) -> int:
    """K and V of a small case: the narrowest that the backend serves."""
    return 64 if backend == "hopper" else 16


def run(case: Case, backend: str, **changes):
    """(o, final_state) of one backend; skipped where it does not serve the case."""
    case.args.update(changes)
    reason = backends.why_not(backend, case.described()[0])
    if reason:
        pytest.skip(reason)
    return chunk_kda(**case.args, backend=backend)


def check(case: Case, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results within twice the error of the same algorithm in torch at the inputs' dtype."""
    o, S = run(case, backend)
    assert o.isfinite().all() and S.isfinite().all()
    assert_close("o", o, case.oracle[0], case.twin[0])
    assert_close("final_state", S, case.oracle[1], case.twin[1])
    return o, S


def with_gate(case: Case, g: torch.Tensor, **changes) -> Case:
    """The case with its log decay (or logits) replaced, cast to the dtype it had."""
    case.args.update(g=g.to(case.args["g"]).expand_as(case.args["g"]).contiguous(), **changes)
    return case


@sizes(dict(T=75, H=1, K=32), dict(T=298, H=4, K=128))
def test_01_fast_and_slow_channels(backend, device, size):
    """A channel that falls by 50 nats a token contributes nothing a few tokens later, beside one that falls by 0.01."""
    case = make_case("random", dtype=BF16, raw=False, bounded=False, gate_dtype=F32, device=device, **size)
    check(with_gate(case, torch.tensor([-50.0, -0.01], device=device).repeat(size["K"] // 2)), backend)


@pytest.mark.gpu
def test_01_on_the_other_dispatch_path(backend, device):
    case = make_case("random", T=8192, H=4, K=128, dtype=BF16, raw=False, bounded=False, gate_dtype=F32, device=device)
    check(with_gate(case, torch.tensor([-50.0, -0.01], device=device).repeat(64)), backend)


@sizes(dict(T=67, H=1, K=16), dict(T=129, H=8, K=128))
@pytest.mark.parametrize("decay", [5.4, 5.6, 8.0, 20.0])
def test_02_unbounded_decay_around_the_limit_of_the_matrix_form(backend, device, size, decay):
    case = make_case("random", dtype=BF16, bounded=False, gate_dtype=F32, device=device, **size)
    logit = torch.full((), decay, dtype=torch.float64).expm1().log()  # softplus(logit) = decay
    zero = torch.zeros(size["H"], device=device)
    check(with_gate(case, logit, A_log=zero, dt_bias=torch.zeros(size["H"], size["K"], device=device)), backend)


@sizes(dict(T=70, H=1, K=16), dict(T=512, H=12, K=128))
@pytest.mark.parametrize("lower_bound", [-1.0, -2.5, -3.0, -4.0, -5.0])
def test_03_saturated_bounded_gate(backend, device, size, lower_bound):
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
    grads = []
    for seed in (1, 2):
        case = make_case("random", T=74, H=1, K=16, initial_state=False, device=device)
        later = make_case("random", T=74, H=1, K=16, seed=seed, device=device)
        for name in TOKENWISE:
            case.args[name] = torch.cat([case.args[name][:, :68], later.args[name][:, 68:]], 1).requires_grad_()
        o, _ = run(case, backend)
        grads.append(torch.autograd.grad(o[:, :68].sum(), [case.args[name] for name in TOKENWISE]))
    for a, b in zip(*grads):
        assert torch.equal(a[:, :68], b[:, :68]) and not a[:, 68:].any()


def test_05_growth_is_outside_the_contract(backend, device):
    """Documented, and not looked for: the call returns."""
    assert "positive value is outside the contract" in " ".join(chunk_kda.__doc__.split())
    case = make_case("zero", T=20, H=1, K=16, raw=False, bounded=False, device=device)
    assert run(with_gate(case, torch.tensor(5.0)), backend)[0].shape == (1, 20, 1, 16)


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
    check(correlated_keys(dtype=dtype, device=device, **size), backend)


@sizes(dict(T=66, H=1, K=32), dict(T=512, H=48, K=128))
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_07_correlated_keys_in_fp16(backend, device, size, chunk_size):
    case = correlated_keys(dtype=F16, device=device, **size)
    case.args["chunk_size"] = chunk_size
    check(case, backend)


def gradients(case: Case, backend: str) -> dict[str, torch.Tensor]:
    leaves = {name: x.requires_grad_() for name, x in case.args.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    o, S = run(case, backend)
    torch.manual_seed(0)
    loss = (o.float() * torch.randn(o.shape).to(o.device)).sum() + (S.float() * torch.randn(S.shape).to(S.device)).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


def exact_gradients(case: Case) -> dict[str, torch.Tensor]:
    real = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
    double = {name: x.detach().cpu().double() if real(x) else x for name, x in case.args.items()}
    return gradients(Case(double, case.regime), "torch")


def test_08_gate_gradient_under_strong_decay(backend, device):
    """exp(A_log) from 1 to 16: dg is a small difference of large sums, and the first token has none without an entry state."""
    case = make_case("random", T=64, H=2, K=16, bounded=False, raw=False, gate_dtype=F32, initial_state=False, device=device)
    rate = 1.0 + 15.0 * torch.rand(2, 1, generator=torch.Generator().manual_seed(0))
    with_gate(case, -rate.to(device) * torch.rand(1, 64, 2, 16, generator=torch.Generator().manual_seed(1)).to(device))
    grads, exact = gradients(case, backend), exact_gradients(case)
    assert relative_error(grads["g"], exact["g"]) < 1e-4
    assert grads["g"][:, 0].abs().max() <= 1e-6 * grads["g"].abs().max()


@sizes(dict(T=70, H=1, K=16), dict(T=1000, H=4, K=64))
def test_09_no_decay_at_all(backend, device, size):
    """Boundary errors do not fade when nothing is forgotten: values and every gradient."""
    check(make_case("zero", raw=False, bounded=False, qk_l2norm=False, device=device, **size), backend)
    case = make_case("zero", raw=False, bounded=False, qk_l2norm=False, device=device, **size)
    grads, exact = gradients(case, backend), exact_gradients(case)
    for name, grad in grads.items():
        assert relative_error(grad, exact[name]) < 2e-5, name


@pytest.mark.parametrize("gate_dtype", [F32, BF16])
def test_11_norm_flag_is_honoured(backend, device, gate_dtype):
    """q and k times eight with the flag are q and k normalised before without it."""
    case = make_case("random", T=40, H=1, K=16, gate_dtype=gate_dtype, device=device)
    normal = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    before = dict(q=normal(8 * case.args["q"]), k=normal(8 * case.args["k"]), use_qk_l2norm_in_kernel=False)
    o, S = run(case, backend, q=8 * case.args["q"], k=8 * case.args["k"])
    o2, S2 = run(case, backend, **before)
    assert relative_error(o, o2) < 2e-6 and relative_error(S, S2) < 2e-6


@sizes(dict(T=92, H=1, K=16), dict(T=1500, H=4, K=128))
@pytest.mark.parametrize("raw", [True, False])
def test_12_a_tail_with_either_gate_dtype(backend, device, size, raw):
    """28 tokens in the last chunk; the second call differs in g's dtype alone."""
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


@pytest.mark.parametrize("lengths", [(1, 1, 1, 127, 1), (1,), (5,), (63,)])
def test_14_one_token_sequences_and_prompts_shorter_than_a_chunk(backend, device, lengths):
    sizes = dict(H=1, K=width(backend), dtype=BF16, gate_dtype=F32, device=device)
    check(make_case("init", lengths=lengths, **sizes), backend)
    if len(lengths) == 1:
        check(make_case("init", T=lengths[0], **sizes), backend)


@pytest.mark.parametrize("lengths", [(0, 64, 0), (0, 0), ()])
@pytest.mark.parametrize("initial_state", [True, False])
def test_15_empty_sequences(backend, device, lengths, initial_state):
    """An empty sequence ends in the state it began with."""
    case = make_case("random", lengths=lengths, H=1, K=width(backend), dtype=BF16, initial_state=initial_state, device=device)
    o, S = check(case, backend)
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(S[n], case.args["initial_state"][n]) if initial_state else not S[n].any()
    assert o.shape[1] == sum(lengths)


def test_15_no_tokens(backend, device):
    case = make_case("random", B=2, T=0, H=1, K=width(backend), dtype=BF16, device=device)
    o, S = run(case, backend)
    assert o.shape == (2, 0, 1, width(backend)) and torch.equal(S, case.args["initial_state"])


@pytest.mark.parametrize("initial_state", [True, False])
@pytest.mark.parametrize(
    "size", [dict(longest=130, short=4, H=1, K=16), pytest.param(dict(longest=16384, short=60, H=4, K=128), marks=pytest.mark.gpu)]
)
def test_16_one_long_sequence_among_short_ones(backend, device, size, initial_state):
    """Terminates, with entry states that are zero but given, and gives each sequence what it gets alone."""
    lengths = (size["longest"], *(1 + 63 * n // size["short"] for n in range(size["short"])))
    case = make_case("init", lengths=lengths, H=size["H"], K=size["K"], dtype=BF16, initial_state=initial_state, device=device)
    if initial_state:
        case.args["initial_state"].zero_()
    check(case, backend)


def large_raw_call(T: int, H: int, backend: str, device: torch.device) -> dict[str, object]:
    """Arguments of a raw bf16 call with K = V = 128, drawn on the device."""
    gen = torch.Generator(device).manual_seed(0)
    args = {name: torch.randn(1, T, H, 128, dtype=BF16, device=device, generator=gen) for name in ("q", "k", "v", "g")}
    args["beta"] = torch.randn(1, T, H, dtype=BF16, device=device, generator=gen)
    flags = dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel", "output_final_state"), True)
    return args | flags | dict(lower_bound=-5.0, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [16224, 16384])
def test_16_many_heads(backend, device, T):
    o, S = chunk_kda(**large_raw_call(T, 128, backend, device))
    assert o.isfinite().all() and S.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("T, H", [(270336, 64), (8193, 2048)])
def test_17_more_than_2_to_the_31_elements(backend, device, T, H):
    """The last chunk of every head equals that of the last thousand tokens alone: this gate has forgotten everything before."""
    if backend == "torch":
        pytest.skip("the torch backend addresses through torch")
    args = large_raw_call(T, H, backend, device)
    o, S = chunk_kda(**args)
    o2, S2 = chunk_kda(**{**args, **{name: args[name][:, -1024:].contiguous() for name in TOKENWISE}})
    assert relative_error(o[:, -64:], o2[:, -64:]) < 5e-3 and relative_error(S, S2) < 5e-3


@pytest.mark.parametrize("K", [129, 153, 255])
def test_19_odd_wide_heads(backend, device, K):
    """One token, K just over a power of two: values and gradients."""
    check(make_case("random", B=4, T=1, H=1, K=K, V=64, dtype=BF16, device=device), backend)
    case = make_case("random", T=1, H=1, K=K, V=16, device=device)
    grads, exact = gradients(case, backend), exact_gradients(case)
    for name, grad in grads.items():
        assert relative_error(grad, exact[name]) < 1e-4, name


@pytest.mark.parametrize(
    "size",
    [dict(H=12, K=64, T=2), dict(H=3, K=96, T=33), dict(H=3, K=64, lengths=(32, 3))]
    + [pytest.param(dict(H=H, K=K, T=33), marks=pytest.mark.gpu) for H in (1, 3, 12) for K in (64, 96)],
)
def test_20_head_counts_and_dims_off_the_beaten_track(backend, device, size):
    check(make_case("random", V=16, dtype=BF16, device=device, **size), backend)


@pytest.mark.parametrize("V", [64, 256])
def test_21_v_unlike_k(backend, device, V):
    check(make_case("init", T=35, H=1, K=128, V=V, dtype=BF16, gate_dtype=F32, device=device), backend)


def test_22_tokens_past_the_last_sequence(backend, device):
    """cu_seqlens may end before T: the rest of o is zero. (Falling, late-starting and overlong ones: test_problem.py.)"""
    case = make_case("random", lengths=(12, 3), pad_to=40, H=1, K=width(backend), dtype=BF16, device=device)
    for name in TOKENWISE:
        case.args[name][:, 15:] = float("nan")
    o, S = run(case, backend)
    assert o[:, :15].isfinite().all() and S.isfinite().all() and not o[:, 15:].any()


@pytest.mark.parametrize("v_first", [True, False])
def test_23_one_contract_for_prefill_and_recurrence(backend, device, v_first):
    """K != V: the state of a prefill continues token by token."""
    if backend == "hopper":
        pytest.skip("the token recurrence is the portable backend's")
    case = make_case("init", T=40, H=1, K=32, V=64, state_v_first=v_first, device=device)
    part = lambda rows, S: {**case.args, **{name: case.args[name][:, rows] for name in TOKENWISE}, "initial_state": S, "backend": backend}
    _, S = chunk_kda(**part(slice(0, 37), case.args["initial_state"]))
    o, S = fused_recurrent_kda(**part(slice(37, 40), S))
    assert_close("o", o, case.oracle[0][:, 37:], case.twin[0][:, 37:])
    assert_close("final_state", S, case.oracle[1], case.twin[1])


def test_24_views_of_one_projection(backend, device):
    """q, k, v cut from one tensor give what their copies give, values and gradients."""
    results = []
    packed = torch.randn(1, 40, 2, 48, generator=torch.Generator().manual_seed(0)).to(device)
    for copy in (lambda x: x, torch.clone):
        leaf = packed.clone().requires_grad_()
        case = make_case("random", T=40, H=2, K=16, device=device)
        case.args.update({name: copy(x) for name, x in zip("qkv", leaf.split(16, -1))})
        o, S = run(case, backend)
        results.append((o, S, torch.autograd.grad(o.square().sum() + S.sum(), leaf)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(
    "size, cuts",
    [(dict(T=70, H=1, K=16), (1, 64)), pytest.param(dict(T=32768, H=4, K=128), (1, 100, 8191, 8192), marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("regime", ["init", "random"])
def test_29_a_split_prefill_is_the_whole(backend, device, size, cuts, regime):
    case = make_case(regime, dtype=BF16, gate_dtype=F32, device=device, **size)
    o, S = run(case, backend)
    twin = max(relative_error(x, y) for x, y in zip(case.twin, case.oracle)) if size["T"] < 1000 else 5e-3
    for cut in cuts:
        parts, state = [], case.args["initial_state"]
        for rows in (slice(0, cut), slice(cut, size["T"])):
            part = {**case.args, **{name: case.args[name][:, rows] for name in TOKENWISE}, "initial_state": state, "backend": backend}
            piece, state = chunk_kda(**part)
            parts.append(piece)
        assert relative_error(torch.cat(parts, 1), o) < 2 * twin and relative_error(state, S) < 2 * twin


def test_32_context_parallelism_is_refused_by_name(device):
    case = make_case("random", T=8, H=1, K=8, device=device)
    with pytest.raises(ValueError, match="cp_context"):
        chunk_kda(**case.args, cp_context=object())


@pytest.mark.parametrize(
    "size",
    [pytest.param(dict(T=70, H=1, K=16), id="small"), pytest.param(dict(T=65536, H=1, K=128), id="full", marks=pytest.mark.gpu)],
)
def test_34_nothing_is_dropped_on_trust_in_decay(backend, device, size):
    """1e-4 nats a token: the entry state is felt to the end, whatever the sequence is cut into."""
    case = make_case("zero", dtype=BF16, gate_dtype=F32, raw=False, bounded=True, device=device, **size)
    check(with_gate(case, torch.tensor(-1e-4)), backend)


def test_34_long_on_the_torch_backend():
    case = make_case("zero", T=3000, H=1, K=8, raw=False)
    check(with_gate(case, torch.tensor(-1e-4)), "torch")


@pytest.mark.parametrize("size, times", [(dict(T=35, H=1, K=16), 1), pytest.param(dict(T=8192, H=12, K=128), 100, marks=pytest.mark.gpu)])
def test_37_repeated_calls_give_the_same_bits(backend, device, size, times):
    """Two inputs in turn."""
    cases = [make_case("init", dtype=BF16, seed=seed, device=device, **size) for seed in (0, 1)]
    first = [run(case, backend) for case in cases]
    for _ in range(times):
        for case, (o, S) in zip(cases, first):
            o2, S2 = run(case, backend)
            assert torch.equal(o, o2) and torch.equal(S, S2)


@pytest.mark.gpu
def test_39_the_same_bits_beside_a_busy_stream(backend, device):
    case = make_case("init", T=8192, H=16, K=128, dtype=BF16, device=device)
    alone = gradients(case, backend)
    stream, busy = torch.cuda.Stream(), torch.randn(8192, 8192, device=device)
    with torch.cuda.stream(stream):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
    beside = gradients(case, backend)
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


def test_42_lengths_are_no_part_of_a_configuration(device):
    """Twenty lengths, one configuration of the portable kernels: nothing compiles anew."""
    from openkda.portable.config import configure

    problems = [make_case("random", T=T, H=2, K=16, device=device).described()[0] for T in range(100, 2100, 100)]
    assert len({configure(problem) for problem in problems}) == 1


@pytest.mark.gpu
def test_42_no_new_compiles(backend, device, monkeypatch):
    import triton

    call = lambda T: run(make_case("random", T=T, H=4, K=128, dtype=BF16, device=device), backend)
    for T in (1024, 1040, 1001, 16, 1):
        call(T)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event["repr"]))
    for T in range(517, 1517, 50):
        call(T)
    assert not compiled
