"""The Hopper backend's gradient kernels against fp64 autograd of the recurrence: plain Triton, so the interpreter runs them too."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import gradients_case
import pytest
import torch
from gradients_case import run
from offline import SHARED_LIMIT, in_subprocess

from openkda import chunk_kda, hopper, testing, torch_backend
from openkda.autograd import TENSORS
from openkda.hopper import backward_config
from openkda.hopper.backward_tiles import divider
from openkda.hopper.gradients import gradients
from openkda.testing import (
    Case,
    assert_close,
    cotangents,
    gradient_triples,
    leaves,
    make_case,
    oracle,
    reference_gradients,
    relative_error,
    rounded_chunk,
)

SMALL = dict(T=70, H=2, K=64, V=64, dtype=torch.bfloat16, bounded=True)
REGIMES = ("random", "init", "trained", "zero", "extreme", "mixed")


def small(regime: str, device: torch.device, **options: object) -> Case:
    return make_case(regime, **{**SMALL, **options}, device=device)


def check(case: Case, parameters: bool = False) -> dict[str, torch.Tensor]:
    """Every gradient within the earned tolerance, in its input's dtype. parameters: A_log's too, one number per head, which is the small
    difference of large sums: a ratio of errors needs several heads."""
    found = run(case)
    for name, gradient in found.items():
        assert gradient.dtype == case.args[name].dtype
    for triple in gradient_triples(case, {n: x for n, x in found.items() if parameters or n != "A_log"}):
        assert_close(*triple)
    return found


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
def test_regimes(device, regime, bounded):
    check(small(regime, device, bounded=bounded))


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
def test_half_precision(device, regime, bounded):
    """fp16: tiles as fine as the inputs, with the range of fp32."""
    check(small(regime, device, T=37, bounded=bounded, dtype=torch.float16))


@pytest.mark.parametrize(
    "options", [dict(raw=False, qk_l2norm=False, H=1, HV=2), dict(bounded=False, raw=False, lengths=(33, 0, 5), pad_to=40),
                dict(V=128, state_v_first=True, gate_dtype=torch.float32, state_dtype=torch.bfloat16)]
)  # fmt: skip
def test_half_precision_with_options(device, options):
    check(small("init", device, **{**dict(T=37, dtype=torch.float16), **options}))


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("regime", ["random", "init"])
def test_rate_over_many_heads(device, regime, bounded):
    """dA_log by itself: joined with dt_bias's gradient it hardly counts, and a ratio of errors needs more than a few heads."""
    case = small(regime, device, T=40, H=12, bounded=bounded)
    expected, twin = reference_gradients(case, oracle, torch.float64), reference_gradients(case, rounded_chunk)
    assert_close("dA_log", run(case, wanted=("A_log",))["A_log"], expected["A_log"], twin["A_log"])


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("regime", ["random", "init", "trained"])
def test_gate_parameters(device, regime, bounded):
    check(small(regime, device, T=36, H=8, bounded=bounded), parameters=True)


@pytest.mark.parametrize("regime", ["random", "mixed"])
@pytest.mark.parametrize(
    "options", [dict(raw=False), dict(neg_eigval=True), dict(qk_l2norm=False, H=1, HV=2), dict(initial_state=False, B=2, T=33),
                dict(state_v_first=True, K=128, T=35, gate_dtype=torch.float32),
                dict(raw=False, qk_l2norm=False, V=128, lengths=(33, 0, 70), H=4)]
)  # fmt: skip
def test_options_without_a_bound(device, regime, options):
    """random: one pair factor for the whole chunk; mixed: from some row on by levels."""
    check(small(regime, device, bounded=False, **options))


@pytest.mark.parametrize("bounded", [True, False])
def test_gate_parameters_in_half_precision(device, bounded):
    """As a model loaded in 16 bits has them; their gradients come in 16 bits too."""
    case = small("random", device, T=36, H=8, bounded=bounded)
    case.args.update(A_log=case.args["A_log"].half(), dt_bias=case.args["dt_bias"].bfloat16())
    check(case, parameters=True)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("strength", [1.0, 1.9, 2.0])
def test_near_equal_keys(device, strength, bounded):
    """Keys that nearly repeat, written at full strength and beyond: (I + L)^-1 is made of alternating numbers, which a rounded L moves by a
    tenth. The twin's chunks are the kernels' 32: where every token is a reflection, each rounding of a state at a chunk's end counts."""
    case = small("zero", device, T=64, H=4, bounded=bounded, raw=False, qk_l2norm=False, gate_dtype=torch.float32)
    gen = torch.Generator().manual_seed(0)
    k = torch.randn(64, generator=gen) + 0.05 * torch.randn(1, 64, 4, 64, generator=gen)
    case.args["k"] = (k / k.norm(dim=-1, keepdim=True)).to(case.args["k"])
    case.args["beta"] = torch.full_like(case.args["beta"], strength)
    case.args["g"] = torch.full_like(case.args["g"], -0.05)
    found = run(case)
    expected, twin = reference_gradients(case, oracle, torch.float64), reference_gradients(case, partial(rounded_chunk, chunk=32))
    for name, gradient in found.items():
        assert_close(f"d{name}", gradient, expected[name], twin[name])


def test_a_gate_that_turns_fast(device):
    """Rows before the first that leaves the span of the pair factors keep their form, and later rows meet them; a reset in mid-chunk."""
    case = small("init", device, bounded=False, H=1)
    for t in (13, 14, 40, 69):
        case.args["g"][:, t] = 2.0**9
    check(case)


@pytest.mark.parametrize(
    "options", [dict(raw=False), dict(neg_eigval=True), dict(qk_l2norm=False), dict(initial_state=False), dict(scale=0.3), dict(B=2, T=33),
                dict(H=1, HV=2, T=35), dict(lower_bound=-1.0), dict(state_v_first=True, K=128, T=35), dict(state_dtype=torch.bfloat16),
                dict(V=128, H=1, gate_dtype=torch.float32, beta_dtype=torch.float32)]
)  # fmt: skip
def test_options(device, options):
    check(small("random", device, **options))


def test_strided_inputs(device):
    """Views of a wider projection, heads before tokens, a broadcast upstream gradient: the gradients of their copies, bit for bit."""
    case = small("init", device, T=35)
    plain = run(case)
    views = Case({**case.args}, "init")
    for name in ("q", "k", "v", "g"):
        x = case.args[name]
        wide = torch.cat([x, torch.full_like(x, float("nan"))], -1)[..., : x.shape[-1]]
        views.args[name] = wide if name in ("q", "v") else x.transpose(1, 2).contiguous().transpose(1, 2)
        assert not views.args[name].is_contiguous()
    beta = case.args["beta"]
    views.args["beta"] = torch.stack([beta, torch.full_like(beta, float("nan"))], -1)[..., 0]
    views.args["initial_state"] = case.args["initial_state"].mT.contiguous().mT
    strided = run(views)
    assert all(torch.equal(x, strided[name]) for name, x in plain.items())
    do = torch.ones(1, 1, 1, 1, dtype=case.args["v"].dtype, device=device).expand(case.args["v"].shape)
    broadcast, copied = run(case, do), run(case, do.contiguous())
    assert all(torch.equal(x, broadcast[name]) for name, x in copied.items())


@pytest.mark.parametrize("regime", ["init", "random"])
def test_size_of_upstream_gradients(device, regime):
    """Gradients are linear in the upstream one: at any power of two they are the same numbers, and zero gives zero."""
    case = small(regime, device, T=35)
    do = cotangents(case)[0]
    plain = run(case, do)
    for size in (2.0**-40, 2.0**20):
        for name, x in run(case, do * size).items():
            assert relative_error(x.double() / size, plain[name].double()) <= 2.0**-8, (name, size)
    half = small(regime, device, T=35, dtype=torch.float16)
    plain = run(half, do.half())
    for size in (2.0**-4, 2.0**8):  # a loss's scale
        for name, x in run(half, do.half() * size).items():
            assert relative_error(x.double() / size, plain[name].double()) <= 2.0**-11, (name, size)
    assert not any(x.any() for x in run(case, torch.zeros_like(do)).values())


def test_ragged_batches(device):
    """Each sequence's gradients are those of the sequence alone, bit for bit; a tail outside every sequence has gradient zero."""
    lengths = (0, 1, 33, 32, 5)
    case = small("init", device, lengths=lengths, pad_to=sum(lengths) + 3, H=1)
    found = check(case)
    for name in ("q", "k", "v", "g", "beta"):
        assert (found[name][:, sum(lengths) :] == 0).all()
    one = Case({n: x[:, 1:34] if n in ("q", "k", "v", "g", "beta") else x for n, x in case.args.items() if n != "cu_seqlens"}, "init")
    one.args["initial_state"] = case.args["initial_state"][2:3]
    problem, inputs = one.described()
    do, dfinal = cotangents(case)
    o = torch_backend.forward(problem, inputs)[0]
    alone = gradients(problem, inputs, (True,) * 8, o, do[:, 1:34], dfinal[2:3])
    for name, x in zip(TENSORS[:5], alone):
        assert relative_error(x, found[name][:, 1:34]) == 0.0, name
    assert torch.equal(alone[-1], found["initial_state"][2:3])


@pytest.mark.parametrize("shape", [dict(T=0), dict(lengths=()), dict(lengths=(0, 0)), dict(T=1)])
def test_almost_nothing(device, shape):
    case = small("random", device, **shape)
    found = run(case)
    assert all(x.isfinite().all() for x in found.values())
    if shape.get("T") != 1 and found["initial_state"].numel():
        assert torch.equal(found["initial_state"], cotangents(case)[1])  # no token: the state passes through


def test_zero_beta(device):
    case = small("random", device, T=35, raw=False)
    case.args["beta"][:, 4:9] = 0.0
    check(case)


def test_without_norms(device):
    """Rows of zeros have gradients; long keys beside betas of almost nothing stay in range."""
    case = small("init", device, qk_l2norm=False)
    for name in ("q", "k"):
        case.args[name] = case.args[name].clone()
        case.args[name][:, 3:6] = 0.0
    check(case)
    case = small("zero", device, raw=False, qk_l2norm=False)
    case.args["k"] = case.args["k"] * 3
    case.args["beta"] = case.args["beta"] * 2.0**-24
    check(case)


@pytest.mark.parametrize("bounded", [True, False])
def test_nothing_but_the_state_s_part(device, bounded, monkeypatch):
    """Chunks whose pairs are zero beside gradients that pass through the state: a last chunk of one token, with a gradient of final_state
    alone; a chunk that writes nothing."""
    case = small("init", device, T=65, H=4, bounded=bounded, raw=False)
    case.args["beta"][:, 32:64] = 0.0
    check(case)
    plain = testing.cotangents
    for module in (testing, gradients_case):
        monkeypatch.setattr(module, "cotangents", lambda case: (torch.zeros_like(plain(case)[0]), plain(case)[1]))
    check(case)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("regime", ["random", "init", "extreme"])
def test_causality(device, regime, bounded):
    """A loss on o[:t0] gives later tokens gradients that are exactly zero, and earlier ones do not move by a bit when those change."""
    t0 = 41
    case = small(regime, device, H=1, bounded=bounded, initial_state=False, qk_l2norm=regime == "random")
    found = []
    for _ in range(2):
        do = cotangents(case)[0]
        do[:, t0:] = 0.0
        found.append(run(case, do))
        for name in ("q", "k", "v", "g", "beta"):
            case.args[name] = case.args[name].clone()
            case.args[name][:, t0:] = case.args[name][:, t0:].flip(1) * 3 - 1
        case.args["g"][:, t0 + 3] = 300.0  # the bound, or more than a pair factor's span
    for name in ("q", "k", "v", "g", "beta"):
        for gradient in found:
            assert (gradient[name][:, t0:] == 0).all(), name
        assert torch.equal(found[0][name], found[1][name]), name


def test_large_gradients_stay_finite(device):
    """Where a whole chunk sits at the lower bound the pair factors reach 2^116; gradients of 10^6 must not overflow there."""
    case = small("extreme", device)
    do = cotangents(case)[0]
    ordinary, large = run(case, do), run(case, do * 2.0**20)
    for name in ("q", "k", "v", "g"):
        assert large[name].isfinite().all() and relative_error(large[name] * 2.0**-20, ordinary[name]) < 1e-3, name
    case = small("zero", device)
    dS = cotangents(case)[1]
    problem, inputs = case.described()
    o = torch.zeros_like(inputs.v)
    found = [gradients(problem, inputs, (True,) * 8, o, None, size * dS) for size in (1.0, 2.0**30)]  # no gradient but the final state's
    for one, other in zip(*found):
        assert other.isfinite().all() and relative_error(other * 2.0**-30, one) < 1e-3


@pytest.mark.parametrize("bounded", [True, False])
def test_chunks_with_hardly_any_pairs_stay_finite(device, bounded):
    """What is over the size of a chunk's pairs is large there: in a last chunk of one row under the final state's gradient alone, and where
    every beta is zero. An L2 norm's sums must not meet a factor of 2^116 before the rows that undo it."""
    case = small("mixed", device, T=33, bounded=bounded)
    dS = cotangents(case)[1]
    problem, inputs = case.described()
    found = gradients(problem, inputs, (True,) * 8, torch.zeros_like(inputs.v), None, dS)
    assert all(x.isfinite().all() for x in found)
    case.args["beta"].fill_(-200.0)
    assert all(x.isfinite().all() for x in run(case).values())


def test_repeated_runs_are_equal(device):
    case = small("init", device, lengths=(40, 3, 70), H=1, HV=2)
    first, second = run(case), run(case)
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_only_what_is_needed(device):
    case = small("init", device, T=35, H=1)
    full = run(case)
    for wanted in (("v",), ("initial_state",), ("q", "A_log")):
        found = run(case, wanted=wanted)
        assert set(found) == set(wanted)
        assert all(torch.equal(x, full[name]) for name, x in found.items())


def test_why_not():
    problem = make_case("random", **SMALL).described()[0].replace(device_type="cuda", capability=(9, 0))
    if hopper.why_not(problem) is None:
        assert hopper.why_not_backward(problem) is None
        assert hopper.why_not_backward(problem.replace(gate="softplus", lower_bound=None)) is None
        assert hopper.why_not_backward(problem.replace(dtype=torch.float16)) is None
        assert "fewer than 2^16 sequences" in hopper.why_not_backward(problem.replace(N=2**16))
    assert hopper.why_not_backward(problem.replace(K=96)) == hopper.why_not(problem.replace(K=96))


# Bytes per thread. Two overlapping blocks of eight warps that spill a little beat one that does not; levels are for very fast gates only.
SPILLS = {"prepare_operands_kernel": 112, "fused_gradients_kernel": 24, "fused_levels_kernel": 32, "forward_walk_kernel": 8}


def fit(kernels, spills):
    """What a multiprocessor has suffices: registers but for the bytes that are known, shared memory for a block."""
    for k in kernels:
        assert k.spills <= spills.get(k.name, 0), k
        assert k.shared <= SHARED_LIMIT["sm_90"], k


def test_offline_compile():
    kernels = in_subprocess("sm_90", "offline_hopper_backward:compile_gradients")
    names = {
        "prepare_operands_kernel",
        "table_kernel",
        "plan_kernel",
        "scans_kernel",
        "fused_gradients_kernel",
        "fused_levels_kernel",
        "sums_kernel",
    }
    assert {k.name for k in kernels} == names
    fit(kernels, SPILLS)


def test_offline_compile_of_walks():
    kernels = in_subprocess("sm_90", "offline_hopper_backward:compile_walks")
    assert {"forward_walk_kernel", "reverse_walk_kernel", "prepare_operands_kernel", "fused_gradients_kernel"} <= {k.name for k in kernels}
    fit(kernels, SPILLS)


# Tiles of fp32: one block a multiprocessor, in all its registers.
SPILLS_HALF = {"prepare_chunk_kernel": 304, "scans_kernel": 64, "chunk_gradients_kernel": 48, "level_gradients_kernel": 560}


def test_offline_compile_half_precision():
    kernels = in_subprocess("sm_90", "offline_hopper_backward:compile_half")
    assert {"prepare_chunk_kernel", "scans_kernel", "summaries_kernel", "score_gradients_kernel"} <= {k.name for k in kernels}
    fit(kernels, SPILLS_HALF)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.hopper
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
def test_through_chunk_kda(device, regime, bounded, dtype):
    """Forward and gradients of the hopper backend under autograd, at the size of a head."""
    case = make_case(regime, T=333, H=2, K=128, V=128, dtype=dtype, bounded=bounded, device=device)
    args = leaves(case)
    torch.autograd.backward(chunk_kda(**args, backend="hopper"), cotangents(case))
    for triple in gradient_triples(case, {n: args[n].grad for n in TENSORS if n != "A_log"}):
        assert_close(*triple)


KEPT = [
    dict(), dict(bounded=False), dict(qk_l2norm=False, raw=False), dict(B=3, T=96, H=1, HV=2), dict(V=64, state_v_first=True),
    dict(H=48, B=2, T=64), dict(K=64, T=31, state_dtype=torch.bfloat16), dict(H=16, B=2, T=70),
]  # fmt: skip


@pytest.fixture
def keeping(monkeypatch):
    """Every call keeps that could, however few its heads, and recomputes by walks."""
    monkeypatch.setattr(backward_config, "FEWEST", 1)
    chosen = backward_config.keeping, backward_config.choose_scans
    for choice in chosen:
        choice.cache_clear()
    yield
    for choice in chosen:
        choice.cache_clear()


@pytest.mark.hopper
@pytest.mark.parametrize("options", KEPT, ids=str)
@pytest.mark.parametrize("regime", ["random", "init", "mixed"])
def test_a_forward_that_keeps(device, keeping, regime, options):
    """disable_recompute=True: outputs and gradients within earned tolerances, the gradients bit for bit those without it, in every run and
    from a graph that is used twice."""
    case = make_case(regime, **{**dict(T=140, H=2, K=128, V=128, dtype=torch.bfloat16, bounded=True), **options}, device=device)
    args = leaves(case)
    inputs = {n: args[n] for n in TENSORS if args.get(n) is not None}
    out = chunk_kda(**args, backend="hopper", disable_recompute=True)
    assert len(out[0].grad_fn.saved_tensors) > len(TENSORS) + 1
    for name, found, expected, twin in zip(("o", "final_state"), out, case.oracle, case.twin):
        assert_close(name, found, expected, twin)
    first = torch.autograd.grad(out, list(inputs.values()), cotangents(case), retain_graph=True)
    for triple in gradient_triples(case, {n: x for n, x in zip(inputs, first) if n != "A_log"}):
        assert_close(*triple)
    for _ in range(4):
        again = torch.autograd.grad(out, list(inputs.values()), cotangents(case), retain_graph=True)
        assert all(map(torch.equal, first, again))
    for kept in (True, False):
        found = testing.gradients(case, backend="hopper", disable_recompute=kept)
        assert all(torch.equal(x, found[n]) for n, x in zip(inputs, first))


@pytest.mark.hopper
@pytest.mark.parametrize("kept", [False, True])
def test_only_what_is_needed_by_walks(device, kept):
    """The gradient of one input alone, strided inputs: as with everything asked for, bit for bit. 32 heads walk either way."""
    found = partial(testing.gradients, backend="hopper", disable_recompute=kept)
    case = make_case("init", T=70, H=32, K=128, V=128, dtype=torch.bfloat16, device=device)
    everything = found(case)
    wide = {n: torch.cat([case.args[n]] * 2, -1)[..., : case.args[n].shape[-1]] for n in ("q", "k", "v", "g", "beta")}
    strided = found(Case({**case.args, **wide}, "init"))
    assert all(torch.equal(x, strided[n]) for n, x in everything.items())
    for wanted in (("initial_state",), ("v",), ("g", "beta")):
        some = found(case, wanted)
        assert set(some) == set(wanted) and all(torch.equal(x, everything[n]) for n, x in some.items())


@pytest.mark.hopper
def test_a_forward_that_keeps_where_launches_do_not_overlap(device, tmp_path):
    """Its walk waits for tiles that a later launch makes: it gives up, and is done behind that one."""
    code = (
        "import sys, torch\nfrom openkda import testing\n"
        "case = testing.make_case('init', T=100, H=32, K=128, V=128, dtype=torch.bfloat16, device='cuda')\n"
        "torch.save(testing.gradients(case, backend='hopper', disable_recompute=True), sys.argv[1])"
    )
    environment = os.environ | {"CUDA_LAUNCH_BLOCKING": "1"}
    command, root = [sys.executable, "-c", code, str(tmp_path / "found.pt")], Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt")
    case = make_case("init", T=100, H=32, K=128, V=128, dtype=torch.bfloat16, device=device)
    expected = testing.gradients(case, backend="hopper", disable_recompute=True)
    assert all(torch.equal(x, found[name]) for name, x in expected.items())


@pytest.mark.hopper
def test_memory_of_a_forward_that_keeps(device, keeping):
    """What is kept goes with the graph."""
    case = make_case("init", T=4096, H=8, K=128, V=128, dtype=torch.bfloat16, initial_state=False, device=device)
    args = leaves(case)
    row = args["q"].numel() * 2

    def held(kept: bool) -> tuple[int, torch.Tensor]:
        before = torch.cuda.memory_allocated()
        o, _ = chunk_kda(**args, backend="hopper", disable_recompute=kept)
        return torch.cuda.memory_allocated() - before, o

    for kept, rows in ((False, 2), (True, 11)):
        size, o = held(kept)
        assert size <= rows * row
        o.sum().backward()
        for x in args.values():
            if isinstance(x, torch.Tensor):
                x.grad = None
        before = torch.cuda.memory_allocated()
        del o
        assert before - torch.cuda.memory_allocated() <= 2 * row


@pytest.mark.parametrize("d", [1, 2, 3, 7, 32, 96, 641, 65535, 65536, 2**31 - 1])
def test_division_by_a_multiplication(d):
    """What `quotient` computes on the device, in Python's integers"""
    multiplier, shift = divider(d)
    assert 0 <= multiplier < 2**31
    for n in {k for at in (0, d, 2 * d, 1000 * d, 2**31) for k in range(at - 2, at + 3) if 0 <= k < 2**31}:
        assert (2 * n * (multiplier + 2**31) >> 32) >> shift == n // d


def test_the_backend_keeps_its_functions():
    """A submodule's import sets an attribute of the package: none may take the place of what dispatch calls."""
    import openkda.hopper.gradients  # noqa: F401

    assert all(callable(getattr(hopper, name)) for name in hopper.__all__)
