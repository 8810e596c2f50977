"""The portable forward against the fp64 recurrence, and its promises: causality, ragged batches, strides, layouts, untouched memory."""

import importlib
from dataclasses import fields, replace

import pytest
import torch
from triton.runtime.jit import KernelInterface

from openkda import chunk_kda, fused_recurrent_kda
from openkda.portable import forward, why_not
from openkda.portable.config import configure, pad, shared_limit
from openkda.problem import Inputs, Problem
from openkda.testing import REGIMES, assert_close, entry_states, gradients, make_case, oracle, relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def check(case) -> None:
    """o and final state within the earned tolerance of the case."""
    problem, inputs = case.described()
    o, final, _ = forward(problem, inputs)
    for name, actual, reference, twin in zip(("o", "final_state"), (o, final), case.oracle, case.twin):
        assert actual.dtype == (problem.dtype if name == "o" else problem.state_dtype)
        assert_close(name, actual, reference, twin)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("regime", [r for r in REGIMES if r != "trained"])
def test_regimes(device, regime, bounded):
    check(make_case(regime, T=70, H=1, K=32, V=16, bounded=bounded, device=device))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("regime", ["random", "init", "extreme"])
def test_half_precision(device, regime, dtype):
    check(make_case(regime, T=70, H=2, K=32, V=32, dtype=dtype, bounded=regime != "extreme", device=device))


@pytest.mark.parametrize(
    ("dtype", "gate_dtype", "beta_dtype"), [(BF16, FP32, BF16), (BF16, FP16, FP32), (FP16, BF16, FP32), (FP32, BF16, FP16)]
)
def test_mixed_dtypes(device, dtype, gate_dtype, beta_dtype):
    check(make_case("random", T=37, H=1, K=16, dtype=dtype, gate_dtype=gate_dtype, beta_dtype=beta_dtype, device=device))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (1, 3), (17, 40), (64, 128), (129, 5), (153, 16), (255, 1), (256, 16), (16, 256)])
def test_head_dims(device, K, V):
    check(make_case("init", T=35, H=1, K=K, V=V, device=device))


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_state_layouts_and_dtypes(device, state_dtype, v_first):
    check(make_case("init", T=40, H=2, K=16, V=24, state_v_first=v_first, state_dtype=state_dtype, device=device))


@pytest.mark.parametrize(
    "options", [dict(raw=False), dict(raw=False, bounded=False), dict(neg_eigval=True), dict(qk_l2norm=False), dict(initial_state=False),
                dict(scale=0.3), dict(HV=6, H=2), dict(B=3, T=33), dict(lower_bound=-1.0)]
)  # fmt: skip
def test_options(device, options):
    check(make_case("random", **{"T": 40, "H": 1, "K": 16, "V": 32, "device": device, **options}))


def test_absent_gate_parameters(device):
    """A bounded gate without A_log and without dt_bias."""
    case = make_case("random", T=40, H=1, K=16, device=device)
    case.args["A_log"] = case.args["dt_bias"] = None
    check(case)


def test_grouped_values_equal_repeated_heads(device):
    case = make_case("random", T=40, H=2, HV=6, K=16, device=device)
    o, final, _ = forward(*case.described())
    for name in ("q", "k"):
        case.args[name] = case.args[name].repeat_interleave(3, dim=2)
    o2, final2, _ = forward(*case.described())
    assert same(o, o2) and same(final, final2)


LENGTHS = [(33, 1, 0, 34, 2), (0, 0), (1, 1, 1), (40,)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_ragged_equals_one_at_a_time(device, lengths, dtype):
    """Bit for bit, and the tokens past the last sequence are zero."""
    case = make_case("mixed", lengths=lengths, pad_to=sum(lengths) + 5, H=2, K=16, V=32, dtype=dtype, device=device)
    problem, inputs = case.described()
    o, final, _ = forward(problem, inputs)
    row = 0
    for n, length in enumerate(lengths):
        single = make_case("mixed", T=length, H=2, K=16, V=32, dtype=dtype, device=device)
        single.args = dict(case.args, cu_seqlens=None, initial_state=case.args["initial_state"][n : n + 1])
        for name in ("q", "k", "v", "g", "beta"):
            single.args[name] = case.args[name][:, row : row + length]
        o1, final1, _ = forward(*single.described())
        assert same(o[:, row : row + length], o1) and same(final[n : n + 1], final1)
        row += length
    assert not o[:, row:].any()


def test_empty_calls(device):
    """No tokens, no sequences: the final state is the initial state."""
    case = make_case("random", T=0, H=1, K=16, device=device)
    o, final, _ = forward(*case.described())
    assert o.shape == (1, 0, 1, 16) and same(final, case.args["initial_state"])
    o, final, _ = forward(*make_case("random", lengths=(), pad_to=7, H=1, K=16, device=device).described())
    assert o.shape == (1, 7, 1, 16) and not o.any() and final.shape[0] == 0


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("t0", [1, 16, 31, 32, 50, 65])
def test_causality_is_bit_exact(device, t0, bounded):
    """Changing, or cutting off, tokens t >= t0 leaves o[:t0] as it was, to the bit."""
    case = make_case("mixed", T=70, H=1, K=16, dtype=BF16, bounded=bounded, device=device)
    o = forward(*case.described())[0][:, :t0]
    cut = make_case("mixed", T=70, H=1, K=16, dtype=BF16, bounded=bounded, device=device)
    for name in ("q", "k", "v", "g", "beta"):
        changed = case.args[name].clone()
        changed[:, t0:] = 3 * changed[:, t0:].flip(1) - 1
        cut.args[name] = case.args[name][:, :t0]
        case.args[name] = changed
    assert same(o, forward(*case.described())[0][:, :t0])
    assert same(o, forward(*cut.described())[0])


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, ...] as a view of memory that holds NaN before and after it, and between its rows and heads where it has heads."""
    shape = [1, x.shape[0] * x.shape[1] + 130, *(n + 8 for n in x.shape[2:])]
    memory = torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)
    view = memory[0, 64 : 64 + x.shape[0] * x.shape[1]].unflatten(0, x.shape[:2])
    for axis, n in enumerate(x.shape[2:], start=2):
        view = view.narrow(axis, 0, n)
    return view.copy_(x)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("T", [1, 15, 33, 65])
def test_memory_around_the_inputs_is_never_used(device, T, bounded):
    """Partial chunks and sub-chunks with some gates at -1000 per token, in NaN-filled surroundings; strides are honoured, bit for bit."""
    case = make_case("extreme" if not bounded else "random", T=T, H=2, K=24, V=20, raw=False, bounded=bounded, device=device)
    if not bounded:
        case.args["g"][:, ::3, :, ::2] = -1000.0
    plain = forward(*case.described())
    for name in ("q", "k", "v", "g", "beta"):
        case.args[name] = poisoned(case.args[name])
    o, final, _ = forward(*case.described())
    assert o.isfinite().all() and final.isfinite().all()
    assert same(o, plain[0]) and same(final, plain[1])


def test_transposed_inputs_are_copied(device):
    """Layouts the kernels do not address: heads before tokens with a batch, last dimension strided."""
    case = make_case("random", B=2, T=40, H=2, K=16, device=device)
    o, final, _ = forward(*case.described())
    for name in ("q", "k", "v", "g"):
        case.args[name] = case.args[name].transpose(1, 2).contiguous().transpose(1, 2)
    case.args["beta"] = case.args["beta"].mT.contiguous().mT
    o2, final2, _ = forward(*case.described())
    assert same(o, o2) and same(final, final2)
    case.args["q"] = case.args["q"].mT.contiguous().mT
    assert same(o, forward(*case.described())[0])


def test_inputs_are_not_written(device):
    case = make_case("random", T=40, H=1, K=16, device=device)
    before = {name: x.clone() for name, x in case.args.items() if isinstance(x, torch.Tensor)}
    forward(*case.described())
    assert all(same(case.args[name], x) for name, x in before.items())


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("lengths", [None, (70, 0, 1, 64)])
def test_chunk_entry_states(device, lengths, v_first, chunk_size):
    """h holds the state at every multiple of the asked chunk size: what a run of the tokens before it ends with."""
    options = dict(H=1, K=16, V=24, state_v_first=v_first, chunk_size=chunk_size, return_intermediate_states=True, device=device)
    case = make_case("init", **({"B": 2, "T": 70} if lengths is None else {"lengths": lengths}), **options)
    problem, inputs = case.described()
    h = forward(problem, inputs)[2].flatten(0, 1)
    for found, expected in zip(h, entry_states(problem, inputs, oracle), strict=True):
        assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("split", [1, 32, 45])
def test_a_split_with_the_state_carried_equals_the_whole(device, split):
    case = make_case("init", T=70, H=1, K=16, V=24, device=device)
    o, final, _ = forward(*case.described())
    parts, state = [], case.args["initial_state"]
    for rows in (slice(0, split), slice(split, 70)):
        part = make_case("init", T=1, H=1, K=16, V=24, device=device)
        part.args = dict(case.args, initial_state=state) | {name: case.args[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
        o1, state, _ = forward(*part.described())
        parts.append(o1)
    assert relative_error(torch.cat(parts, 1), o) < 2e-6 and relative_error(state, final) < 2e-6


@pytest.mark.parametrize("changes", [dict(form="any"), dict(chunk=64), dict(scan_block_v=16), dict(block_k=16)])
def test_every_configuration_gives_the_same_result(device, changes, monkeypatch):
    case = make_case("random", T=70, H=1, K=32, V=32, device=device)
    problem, inputs = case.described()
    o, final, _ = forward(problem, inputs)
    config = replace(configure(problem), **changes)
    monkeypatch.setattr(importlib.import_module("openkda.portable.forward"), "configure", lambda _: config)
    o2, final2, _ = forward(problem, inputs)
    assert relative_error(o2, o) < 2e-6 and relative_error(final2, final) < 2e-6


def test_repeated_runs_are_bit_equal(device):
    problem, inputs = make_case("mixed", lengths=(35, 3), H=2, K=16, dtype=BF16, device=device).described()
    first, again = forward(problem, inputs), forward(problem, inputs)
    assert same(first[0], again[0]) and same(first[1], again[1])


def example() -> Problem:
    return make_case("random", T=64, H=1, K=128, dtype=BF16).described()[0].replace(device_type="cuda", capability=(9, 0))


def test_refusals(monkeypatch):
    problem = example()
    assert why_not(problem) is None
    assert "float64" in why_not(problem.replace(dtype=torch.float64))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "on cpu" in why_not(problem.replace(device_type="cpu"))


def test_configuration_is_pure_and_within_the_device():
    """Equal problems, equal configurations; nothing depends on T; tiles are powers of two that cover the head."""
    problem = example()
    assert configure(problem) == configure(problem.replace())
    for T in (1, 63, 64, 100_000):
        assert configure(problem.replace(T=T)) == configure(problem)
    for K in (1, 16, 100, 256):
        for capability in ((8, 0), (9, 0), (12, 0), None):
            config = configure(problem.replace(K=K, V=K, capability=capability))
            assert config.scan_block_v <= pad(K) and config.block_k <= pad(K)
            assert all(isinstance(getattr(config, f.name), (int, str, bool)) for f in fields(config))
    assert shared_limit((12, 0)) < shared_limit((8, 0)) < shared_limit((9, 0))


def test_the_matrix_form_serves_bounded_gates_alone():
    problem = example()
    assert configure(problem).form == "matrix"
    assert configure(problem.replace(gate="softplus", lower_bound=None)).form == "any"
    assert configure(problem.replace(gate="none", lower_bound=None)).form == "any"
    assert configure(problem.replace(gate="none", safe_gate=True)).form == "matrix"
    assert configure(problem.replace(dtype=FP16)).form == "any"  # the column factor reaches 2^108


@pytest.mark.gpu
@pytest.mark.parametrize("regime", ["random", "init"])
@pytest.mark.parametrize("bounded", [True, False])
def test_accuracy_at_length(regime, bounded, record_property):
    """T = 8192, H = 4, D = 128, bf16: relative errors of o and of the final state, recorded with the results of the GPU tests."""
    case = make_case(regime, T=8192, H=4, K=128, dtype=BF16, bounded=bounded, device="cuda")
    o, final, _ = forward(*case.described())
    errors = relative_error(o, case.oracle[0]), relative_error(final, case.oracle[1])
    record_property("err_o", errors[0])
    record_property("err_state", errors[1])
    assert errors[0] <= 0.0048 and errors[1] <= 0.0040


@pytest.mark.gpu
def test_lengths_never_compile():
    """Twenty lengths after the first few: no new compilation."""
    from triton.runtime.jit import JITFunction

    case = make_case("random", T=300, H=1, K=64, dtype=BF16, device="cuda")
    problem, inputs = case.described()
    forward(problem, inputs)
    compiled, do_compile = [], JITFunction._do_compile
    JITFunction._do_compile = lambda self, *a, **k: compiled.append(self) or do_compile(self, *a, **k)
    try:
        for T in range(100, 300, 10):
            cut = {name: getattr(inputs, name)[:, :T] for name in ("q", "k", "v", "g", "beta")}
            forward(
                problem.replace(T=T),
                Inputs(**cut, A_log=inputs.A_log, dt_bias=inputs.dt_bias, initial_state=inputs.initial_state, cu_seqlens=None),
            )
    finally:
        JITFunction._do_compile = do_compile
    assert not compiled


def test_axes_of_grids_that_end_at_65535_know_no_lengths(device, monkeypatch):
    """More sequences and chunks make the first axis longer, and no other."""
    item, grids = KernelInterface.__getitem__, []
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: grids.append(grid[1:]) or item(kernel, grid))
    found = []
    for lengths in ((5, 40), (1, 33, 0, 70, 2)):
        grids.clear()
        case = make_case("random", lengths=lengths, H=1, HV=2, K=16, device=device)
        gradients(case, backend="portable")
        gradients(case, backend="portable", disable_recompute=True)
        found.append(list(grids))
    assert found[0] == found[1] and len(found[0]) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("B, T", [(70000, 2), (35000, 64)])
def test_more_sequences_and_chunks_than_an_axis_of_a_grid_holds(device, B, T):
    case = make_case("random", B=B, T=T, H=1, K=16, device=device)
    args = {name: x for name, x in case.args.items() if name not in ("safe_gate", "chunk_size")}
    for found, expected in zip(chunk_kda(**case.args, backend="portable"), fused_recurrent_kda(**args, backend="portable")):
        assert relative_error(found, expected) < 1e-5
    expected = gradients(case, backend="torch")
    for name, found in gradients(case, backend="portable").items():
        assert relative_error(found, expected[name]) < 1e-4, name
