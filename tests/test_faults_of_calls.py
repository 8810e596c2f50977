"""Inputs that broke published KDA implementations, continued: ragged, long and large calls, repeated calls, launch configurations."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import KERNELS
from fault_case import BF16, F32, TOKENWISE, check, finest, run, vast, width, with_gate

import openkda
from openkda import chunk_kda
from openkda.portable.config import configure
from openkda.testing import Case, assert_close, gradients, make_case, relative_error


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
    K = width(backend, size["K"])
    case = make_case("init", lengths=lengths, H=size["H"], K=K, dtype=BF16, initial_state=initial_state, device=device)
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
def test_16_many_heads(backend, device, T, much_memory):
    o, S = chunk_kda(**large_raw_call(T, 128, backend, device))
    assert o.isfinite().all() and S.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pytest.mark.parametrize("T, H", [(270336, 64), (8193, 2048)])
def test_17_more_than_2_to_the_31_elements(backend, device, T, H, much_memory):
    """The last chunk of every head equals that of the last thousand tokens alone: this gate has forgotten everything before."""
    args = large_raw_call(T, H, backend, device)
    o, S = chunk_kda(**args)
    o2, S2 = chunk_kda(**{**args, **{name: args[name][:, -1024:].contiguous() for name in TOKENWISE}})
    assert relative_error(o[:, -64:], o2[:, -64:]) < 5e-3 and relative_error(S, S2) < 5e-3


def test_17_rows_more_than_2_to_the_31_elements_apart(backend, device):
    """Views with 2^23 elements from row to row: the offsets of the last of 300 rows do not fit 31 bits."""
    K, T, row = width(backend), 300, 2**23
    case = make_case("init", T=T, H=1, K=K, dtype=BF16, device=device)
    held = vast(T * row, BF16, device)
    for i, name in enumerate(TOKENWISE):
        x = case.args[name]
        case.args[name] = held.as_strided(x.shape, (T * row, row, *x.stride()[2:]), i * K).copy_(x)
    check(case, backend)


def test_22_tokens_past_the_last_sequence(backend, device):
    """cu_seqlens may end before T: the rest of o is zero. (Falling, late-starting and overlong ones: test_problem.py.)"""
    case = make_case("random", lengths=(12, 3), pad_to=40, H=1, K=width(backend), dtype=BF16, device=device)
    for name in TOKENWISE:
        case.args[name][:, 15:] = float("nan")
    o, S = run(case, backend)
    assert o[:, :15].isfinite().all() and S.isfinite().all() and not o[:, 15:].any()


@pytest.mark.parametrize(
    "size, cuts",
    [(dict(T=70, H=1, K=16), (1, 64)), pytest.param(dict(T=32768, H=4, K=128), (1, 100, 8191, 8192), marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("regime", ["init", "random"])
def test_29_a_split_prefill_is_the_whole(backend, device, size, cuts, regime):
    case = make_case(regime, dtype=BF16, gate_dtype=F32, device=device, **{**size, "K": width(backend, size["K"])})
    o, S = run(case, backend)
    twin = max(relative_error(x, y) for x, y in zip(case.twin, case.oracle)) if size["T"] < 1000 else 5e-3
    for cut in cuts:
        parts, state = [], case.args["initial_state"]
        for rows in (slice(0, cut), slice(cut, size["T"])):
            part = {**case.args, **{name: case.args[name][:, rows] for name in TOKENWISE}, "initial_state": state, "backend": backend}
            piece, state = chunk_kda(**part)
            parts.append(piece)
        assert relative_error(torch.cat(parts, 1), o) < 2 * twin and relative_error(state, S) < 2 * twin


@pytest.mark.parametrize("sequence_lengths", [None, (130, 70)])
def test_30_the_state_after_two_chunks(backend, device, sequence_lengths):
    """130 tokens in chunks of 64: the states at chunk entries hold that after 128 tokens."""
    size = dict(lengths=sequence_lengths) if sequence_lengths else dict(T=130)
    case = make_case("init", H=1, K=width(backend), dtype=finest(backend), return_intermediate_states=True, device=device, **size)
    *_, h = run(case, backend)
    part = Case({**case.args, **{name: case.args[name][:, :128] for name in TOKENWISE}}, "init")
    part.args |= dict(initial_state=case.args["initial_state"][:1], cu_seqlens=None)
    assert_close("h", h[0, 2], part.oracle[1][0], part.twin[1][0].to(h.dtype))


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
    size = {**size, "K": width(backend, size["K"])}
    case = make_case("zero", dtype=BF16, gate_dtype=F32, raw=False, bounded=True, device=device, **size)
    check(with_gate(case, torch.tensor(-1e-4)), backend)


def test_34_long_on_the_torch_backend():
    case = make_case("zero", T=3000, H=1, K=8, raw=False)
    check(with_gate(case, torch.tensor(-1e-4)), "torch")


@pytest.mark.parametrize("size, times", [(dict(T=35, H=1, K=16), 1), pytest.param(dict(T=8192, H=12, K=128), 100, marks=pytest.mark.gpu)])
def test_37_repeated_calls_give_the_same_bits(backend, device, size, times):
    """Two inputs in turn."""
    size = {**size, "K": width(backend, size["K"])}
    cases = [make_case("init", dtype=BF16, seed=seed, device=device, **size) for seed in (0, 1)]
    first = [run(case, backend) for case in cases]
    for _ in range(times):
        for case, (o, S) in zip(cases, first):
            o2, S2 = run(case, backend)
            assert torch.equal(o, o2) and torch.equal(S, S2)


@pytest.mark.gpu
def test_39_the_same_bits_beside_a_busy_stream(backend, device):
    case = make_case("init", T=8192, H=16, K=128, dtype=BF16, device=device)
    alone = gradients(case, backend=backend)
    stream, busy = torch.cuda.Stream(), torch.randn(8192, 8192, device=device)
    with torch.cuda.stream(stream):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
    beside = gradients(case, backend=backend)
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


COLD = """
import torch
from openkda.testing import gradients, make_case
sizes = dict(T=300, H=2, K=64, dtype=torch.bfloat16, device="cuda")
first, second = (gradients(make_case("init", **sizes)) for _ in range(2))
assert all(torch.equal(first[name], second[name]) for name in first)
from openkda import kda_decode
from serving_case import make
for attempt in range(2):
    case = make(N=2, K=64, V=64, device="cuda")
    o = kda_decode(**case.arguments(state_indices=torch.tensor([1, 2], device="cuda")))
    kept = (o, case.pool[1:3]) if attempt == 0 else kept
    assert torch.equal(o, kept[0]) and torch.equal(case.pool[1:3], kept[1])
"""


@pytest.mark.gpu
def test_40_the_first_call_is_as_good_as_the_second(tmp_path):
    """In a new process with nothing compiled yet: values, gradients, and states that are updated in place."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    done = subprocess.run([sys.executable, "-c", COLD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_40_nothing_is_tuned_by_running_it():
    """An autotuner runs a kernel many times, on the caller's state where that is updated in place."""
    sources = list(Path(openkda.__file__).parent.rglob("*.py"))
    assert sources and not [path.name for path in sources if "autotune" in path.read_text()]


@pytest.mark.parametrize(
    "size, heads",
    [(dict(H=1, K=32, T=35), (1, 200))]
    + [pytest.param(dict(H=1, K=K, T=150), (1, 40, 200), marks=pytest.mark.gpu) for K in (64, 128, 256)],
    ids=lambda x: f"K{x['K']}" if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("bounded", [True, False])
def test_41_every_configuration_of_the_forward(device, size, heads, bounded, monkeypatch):
    """What the portable kernels choose for few heads and for many, one at a time on the same inputs. (Gradients: test_gradients.py.)"""
    case = make_case("init", dtype=BF16, bounded=bounded, device=device, **size)
    problem = case.described()[0]
    if device.type == "cpu":
        problem = problem.replace(device_type="cuda", capability=(9, 0))
    for config in dict.fromkeys(configure(problem.replace(H=H, HV=H)) for H in heads):
        monkeypatch.setattr(importlib.import_module("openkda.portable.forward"), "configure", lambda _, config=config: config)
        check(case, "portable")


def test_42_lengths_are_no_part_of_a_configuration(device):
    """Twenty lengths, one configuration of the portable kernels: nothing compiles anew."""
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
