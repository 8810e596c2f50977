"""The public functions beyond their numbers: dispatch, defaults, option names, both calls of fused_kda_gate."""

import inspect

import pytest
import torch

import openkda
from openkda import backends, chunk_kda, fused_kda_gate, fused_recurrent_kda, torch_backend
from openkda.reference import activate_gate
from openkda.testing import make_case, relative_error

BF16 = torch.bfloat16


def test_every_public_name_is_there_and_documented():
    assert sorted(openkda.__all__) == list(openkda.__all__)
    assert all(inspect.getdoc(getattr(openkda, name)) for name in openkda.__all__)


def test_the_signature_that_callers_of_fla_use():
    positional = "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel"
    assert list(inspect.signature(chunk_kda).parameters)[:10] == positional.split()
    for function in (chunk_kda, fused_recurrent_kda):
        assert all(p.kind != p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def test_results_follow_the_flags():
    case = make_case("random", T=40, K=8)
    o, S = chunk_kda(**{**case.args, "output_final_state": False})
    assert o.shape == case.args["v"].shape and S is None
    assert len(chunk_kda(**case.args, return_intermediate_states=True)) == 3


def test_transpose_state_layout_is_state_v_first():
    case = make_case("random", T=20, K=8, V=4, state_v_first=True)
    a = chunk_kda(**case.args)
    b = chunk_kda(**{**case.args, "state_v_first": False}, transpose_state_layout=True)
    assert all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_final_state_has_the_entry_states_dtype(function, state_dtype):
    case = make_case("random", T=9, K=8, dtype=BF16, state_dtype=state_dtype)
    assert function(**case.args)[1].dtype == state_dtype
    case.args["initial_state"] = None
    assert function(**case.args)[1].dtype == torch.float32


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_cu_seqlens_cpu_and_int32(function):
    case = make_case("random", lengths=(5, 0, 9), K=8)
    a = function(**case.args)
    cu = case.args["cu_seqlens"].int()
    b = function(**{**case.args, "cu_seqlens": cu}, cu_seqlens_cpu=cu.cpu())
    assert all(torch.equal(x, y) for x, y in zip(a, b))


def test_recurrent_form_without_tokens():
    case = make_case("random", T=0, K=8)
    o, S = fused_recurrent_kda(**case.args)
    assert o.shape == (1, 0, 2, 8) and torch.equal(S, case.args["initial_state"])
    case = make_case("random", lengths=(), K=8)
    assert fused_recurrent_kda(**case.args)[1].shape == (0, 2, 8, 8)


def test_recurrent_form_writes_into_out_or_says_why_not():
    case = make_case("random", T=9, K=8)
    o, S = fused_recurrent_kda(**case.args)
    out = torch.full_like(o, float("nan"))
    o2, S2 = fused_recurrent_kda(**case.args, out=out)
    assert o2 is out and torch.equal(o, out) and torch.equal(S, S2)
    with pytest.raises(ValueError, match=r"out is \[1, 8, 2, 8\] torch.float32 on cpu; it must be \[1, 9, 2, 8\] torch.float32 on cpu"):
        fused_recurrent_kda(**case.args, out=out[:, :8])
    with pytest.raises(ValueError, match="on meta; it must be"):
        fused_recurrent_kda(**case.args, out=out.to("meta"))
    with pytest.raises(ValueError, match="out is a leaf that requires grad"):
        fused_recurrent_kda(**case.args, out=torch.empty_like(o, requires_grad=True))
    with pytest.raises(TypeError, match="out is a list"):
        fused_recurrent_kda(**case.args, out=[0.0])
    with pytest.raises(ValueError, match="num_accepted is given; it must be None without state_indices"):
        fused_recurrent_kda(**case.args, num_accepted=torch.tensor([1]))


def problem(**changes):
    case = make_case("random", T=64, H=2, K=64, dtype=BF16)
    return case.described()[0].replace(**{"device_type": "cuda", "capability": (9, 0), **changes})


def test_dispatch_takes_the_first_that_serves():
    on_cpu = make_case("random", T=8, K=8).described()[0]
    assert backends.choose(on_cpu) == "torch"
    assert backends.choose(problem(capability=(8, 0))) == "portable"
    assert backends.choose(problem(dtype=torch.float64)) == "torch"
    assert backends.choose(problem()) == ("hopper" if backends.why_not("hopper", problem()) is None else "portable")
    assert backends.choose(problem(), "torch") == "torch"


def test_a_backend_without_triton_says_so(monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    for name in ("hopper", "portable"):
        assert backends.why_not(name, problem(T=1)) == f"the {name} backend needs Triton, which is not installed"
    assert backends.why_not("torch", problem(T=1)) is None


def test_gradients_go_to_the_first_that_has_them(monkeypatch):
    assert backends.choose_backward(problem(T=2), "torch") == "torch"
    assert backends.why_not_backward("torch", problem()) is None
    monkeypatch.setattr(backends, "module", lambda name: torch_backend)
    assert backends.why_not_backward("hopper", problem()) == "the hopper backend has no backward kernels"


def test_the_recurrent_form_has_backends_of_its_own():
    assert "portable serves it" in backends.why_not_recurrent("hopper", problem())
    with pytest.raises(ValueError, match="backend is 'hopper', which cannot serve this call"):
        fused_recurrent_kda(**make_case("random", T=8, K=8).args, backend="hopper")
    assert backends.choose_recurrent(problem(needs_grad=True)) == "torch"
    assert backends.choose_recurrent(problem()) == "portable"


def test_an_exception_inside_a_backend_stays_one(monkeypatch):
    def broken(problem, inputs):
        raise RuntimeError("inside")

    monkeypatch.setattr(torch_backend, "forward", broken)
    with pytest.raises(RuntimeError, match="inside"):
        chunk_kda(**make_case("random", T=8, K=8).args)


@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16, torch.float64])
def test_fused_kda_gate(lower_bound, dtype):
    torch.manual_seed(0)
    g, A_log, bias = torch.randn(2, 5, 3, 4).to(dtype), torch.randn(3), torch.randn(12)
    wide = dtype if dtype == torch.float64 else torch.float32
    out = fused_kda_gate(g, A_log, bias, lower_bound)
    assert out.dtype == torch.float32 and out.shape == g.shape
    torch.testing.assert_close(out, activate_gate(g.to(wide), A_log, bias.view(3, 4), lower_bound).float())
    assert fused_kda_gate(g, A_log.view(1, 1, 3, 1), None, lower_bound, BF16).dtype == BF16
    assert torch.equal(fused_kda_gate(g, A_log, bias.view(3, 4), lower_bound), out)


def test_the_older_call_of_fused_kda_gate():
    """fused_kda_gate(g [.., HV * head_dim], A_log, head_dim, g_bias=...) of published remote code."""
    torch.manual_seed(0)
    g, A_log, bias = torch.randn(2, 5, 12), torch.randn(1, 1, 3, 1), torch.randn(12)
    expected = fused_kda_gate(g.view(2, 5, 3, 4), A_log, bias)
    assert torch.equal(fused_kda_gate(g, A_log, 4, g_bias=bias), expected)
    assert torch.equal(fused_kda_gate(g, A_log, head_dim=4, g_bias=bias), expected)


def test_gate_then_kernel_is_the_gate_in_the_kernel():
    case = make_case("random", T=20, K=8)
    args = dict(case.args)
    g = fused_kda_gate(args["g"], args.pop("A_log"), args.pop("dt_bias"), args["lower_bound"])
    o, S = chunk_kda(**{**args, "g": g, "use_gate_in_kernel": False, "safe_gate": True})
    expected = chunk_kda(**case.args)
    assert relative_error(o, expected[0]) < 1e-6 and relative_error(S, expected[1]) < 1e-6


def test_gradient_of_the_gate():
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (3,), (12,))]
    for lower_bound in (None, -5.0):
        assert torch.autograd.gradcheck(lambda g, a, b, bound=lower_bound: fused_kda_gate(g, a, b, bound, torch.float64), tensors)


G = torch.zeros(2, 3, 4)
A = torch.zeros(3)
BAD_GATES = {
    "dtype": (dict(g=G.int(), A_log=A), ["g's dtype", "torch.int32"]),
    "rank": (dict(g=torch.zeros(4), A_log=A), ["g's shape", "[4]"]),
    "head_dim": (dict(g=torch.zeros(2, 10), A_log=A, head_dim=4), ["head_dim", "4", "10"]),
    "rank with head_dim": (dict(g=torch.tensor(1.0), A_log=A, head_dim=4), ["g's shape", "[]"]),
    "lower_bound": (dict(g=G, A_log=A, lower_bound=1.0), ["lower_bound", "1.0", "[-5, 0)"]),
    "A_log missing": (dict(g=G, A_log=None), ["A_log", "None"]),
    "A_log shape": (dict(g=G, A_log=torch.zeros(4)), ["A_log's shape", "[4]"]),
    "dt_bias shape": (dict(g=G, A_log=A, dt_bias=torch.zeros(4)), ["dt_bias's shape", "[4]"]),
    "two biases": (dict(g=G, A_log=A, dt_bias=torch.zeros(12), g_bias=torch.zeros(12)), ["g_bias", "dt_bias"]),
}


@pytest.mark.parametrize("name", BAD_GATES)
def test_bad_gate_calls(name):
    arguments, words = BAD_GATES[name]
    with pytest.raises(ValueError) as caught:
        fused_kda_gate(**arguments)
    assert all(word in str(caught.value) for word in words)


def test_gate_of_no_tensor():
    with pytest.raises(TypeError, match="g is a list"):
        fused_kda_gate([1.0], A)


def test_the_gate_alone_refuses_what_the_whole_refuses():
    g, A_log = torch.zeros(2, 3, 4), torch.zeros(3)
    for options, words in (
        (dict(A_log=A_log, dt_bias=torch.zeros(4, 3)), "dt_bias's shape is .4, 3."),
        (dict(A_log=1.0), "A_log is a float"),
        (dict(A_log=A_log, dt_bias=0.1), "dt_bias is a float"),
        (dict(A_log=A_log, lower_bound="x"), "lower_bound is a str"),
        (dict(A_log=A_log, head_dim="4"), "head_dim is '4'; it must be an int"),
        (dict(A_log=A_log, dt_bias=4, head_dim=4), "dt_bias is a int"),
        (dict(A_log=A_log, output_dtype="float32"), "output_dtype is 'float32'"),
        (dict(A_log=A_log, output_dtype=torch.int32), "output_dtype is torch.int32"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            fused_kda_gate(g, **options)
