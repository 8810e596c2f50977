"""`describe`: every field of Problem follows its argument, every bad argument is refused in one sentence."""

import warnings
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import openkda.problem as problem_module
from openkda import chunk_kda, fused_recurrent_kda
from openkda.problem import Problem, check_cu_seqlens
from openkda.testing import Case, make_case

F32, BF16 = torch.float32, torch.bfloat16


def described(case: Case | None = None, **changes) -> Problem:
    case = case or make_case("random", B=2, T=8, H=2, K=8)
    case.args = {**case.args, **changes}
    return case.described()[0]


BASE = described()


def in_dual_level():
    with forward_ad.dual_level():
        return described(q=forward_ad.make_dual(torch.ones(2, 8, 2, 8), torch.ones(2, 8, 2, 8)))


CASES = {
    "B": described(make_case("random", B=3, T=8, H=2, K=8)),
    "T": described(make_case("random", B=2, T=9, H=2, K=8)),
    "H": described(make_case("random", B=2, T=8, H=1, HV=2, K=8)),
    "HV": described(make_case("random", B=2, T=8, H=2, HV=4, K=8)),
    "K": described(make_case("random", B=2, T=8, H=2, K=4, V=8)),
    "V": described(make_case("random", B=2, T=8, H=2, K=8, V=4)),
    "N": described(make_case("random", lengths=(3, 4, 1), H=2, K=8)),
    "varlen": described(make_case("random", lengths=(8,), H=2, K=8)),
    "dtype": described(make_case("random", B=2, T=8, H=2, K=8, dtype=BF16, gate_dtype=F32, beta_dtype=F32)),
    "gate_dtype": described(make_case("random", B=2, T=8, H=2, K=8, gate_dtype=BF16)),
    "beta_dtype": described(make_case("random", B=2, T=8, H=2, K=8, beta_dtype=BF16)),
    "state_dtype": described(make_case("random", B=2, T=8, H=2, K=8, state_dtype=BF16)),
    "scale": described(scale=0.5),
    "gate": described(lower_bound=None),
    "lower_bound": described(lower_bound=-4.0),
    "safe_gate": described(safe_gate=True),
    "has_A_log": described(A_log=None),
    "has_dt_bias": described(dt_bias=None),
    "qk_l2norm": described(use_qk_l2norm_in_kernel=False),
    "beta_sigmoid": described(use_beta_sigmoid_in_kernel=False),
    "neg_eigval": described(allow_neg_eigval=True),
    "has_initial_state": described(initial_state=None),
    "output_final_state": described(output_final_state=False),
    "return_intermediate_states": described(return_intermediate_states=True),
    "state_v_first": described(state_v_first=True),
    "chunk_size": described(chunk_size=32),
    "needs_grad": described(v=torch.zeros(2, 8, 2, 8, requires_grad=True)),
    "transform": in_dual_level(),
    "device_type": described(make_case("random", B=2, T=8, H=2, K=8, device="meta")),
}


@pytest.mark.parametrize("field", [f.name for f in fields(Problem) if f.name != "capability"])
def test_every_field_follows_its_argument(field):
    assert getattr(CASES[field], field) != getattr(BASE, field)
    assert CASES[field] != BASE and hash(CASES[field]) == hash(CASES[field].replace())


def test_capability_follows_the_device(monkeypatch):
    monkeypatch.setattr(problem_module, "_capability", lambda device: (9, 0))
    problem_module._build.cache_clear()
    assert described().capability == (9, 0)
    problem_module._build.cache_clear()


def test_equal_calls_are_equal_problems():
    assert described() == BASE and hash(described()) == hash(BASE)
    assert BASE.replace(T=9).T == 9 and BASE.T == 8


def test_properties():
    assert CASES["HV"].group == 2
    assert BASE.bounded and not CASES["gate"].bounded
    raw = described(make_case("random", B=2, T=8, H=2, K=8, raw=False, bounded=False))
    assert raw.gate == "none" and not raw.bounded and raw.replace(safe_gate=True).bounded
    assert CASES["V"].state_shape == (2, 2, 8, 4) and CASES["V"].replace(state_v_first=True).state_shape == (2, 2, 4, 8)
    assert BASE.scale == 8**-0.5


def test_published_parameter_shapes():
    """A_log [1, 1, HV, 1] and dt_bias [HV * K] reach the backends as [HV] and [HV, K]."""
    case = make_case("random", B=2, T=8, H=2, K=8)
    case.args.update(A_log=case.args["A_log"].view(1, 1, 2, 1), dt_bias=case.args["dt_bias"].flatten())
    _, inputs = case.described()
    assert inputs.A_log.shape == (2,) and inputs.dt_bias.shape == (2, 8)


def zeros(*shape, dtype=F32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def nested(*shape, layout=torch.strided):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one form of nested tensor calls itself a prototype
        return torch.nested.nested_tensor([zeros(*shape)] * 2, layout=layout)


BAD = {  # changed arguments -> what the message must say
    "q rank": (dict(q=zeros(2, 8, 16)), ["q's shape", "[2, 8, 16]", "[B, T, H, K]"]),
    "v rank": (dict(v=zeros(2, 8, 16)), ["v's shape", "[2, 8, 16]", "[B, T, HV, V]"]),
    "q no heads": (dict(q=zeros(2, 8, 0, 8)), ["q's head count", "0", "at least 1"]),
    "K large": (dict(q=zeros(2, 8, 2, 257)), ["q's last dimension", "257", "between 1 and 256"]),
    "V zero": (dict(v=zeros(2, 8, 2, 0)), ["v's last dimension", "0", "between 1 and 256"]),
    "k shape": (dict(k=zeros(2, 8, 2, 7)), ["k's shape", "[2, 8, 2, 7]", "[2, 8, 2, 8]"]),
    "k dtype": (dict(k=zeros(2, 8, 2, 8, dtype=BF16)), ["k's dtype", "torch.bfloat16", "torch.float32"]),
    "k device": (dict(k=zeros(2, 8, 2, 8, device="meta")), ["k's device", "meta", "cpu"]),
    "q dtype": (dict(q=zeros(2, 8, 2, 8, dtype=torch.int32)), ["q's dtype", "torch.int32", "torch.bfloat16"]),
    "v heads": (dict(v=zeros(2, 8, 3, 8)), ["v's head count", "3", "multiple of q's head count 2"]),
    "v tokens": (dict(v=zeros(2, 9, 2, 8)), ["v's shape", "[2, 9, 2, 8]", "[2, 8, 2, 8]"]),
    "g shape": (dict(g=zeros(2, 8, 2, 1)), ["g's shape", "[2, 8, 2, 1]", "[2, 8, 2, 8]"]),
    "g dtype": (dict(g=zeros(2, 8, 2, 8, dtype=torch.float64)), ["g's dtype", "torch.float64", "torch.float32"]),
    "beta shape": (dict(beta=zeros(2, 8, 2, 1)), ["beta's shape", "[2, 8, 2, 1]", "[2, 8, 2]"]),
    "beta dtype": (dict(beta=zeros(2, 8, 2, dtype=torch.int64)), ["beta's dtype", "torch.int64", "torch.float32"]),
    "A_log shape": (dict(A_log=zeros(3)), ["A_log's shape", "[3]", "[2] or [1, 1, 2, 1]"]),
    "dt_bias shape": (dict(dt_bias=zeros(2, 7)), ["dt_bias's shape", "[2, 7]", "[16] or [2, 8]"]),
    "dt_bias dtype": (dict(dt_bias=zeros(16, dtype=torch.int8)), ["dt_bias's dtype", "torch.int8", "torch.float32"]),
    "A_log missing": (dict(A_log=None, lower_bound=None), ["A_log", "None", "[HV]"]),
    "A_log unused": (dict(use_gate_in_kernel=False), ["A_log", "given", "use_gate_in_kernel"]),
    "dt_bias unused": (dict(use_gate_in_kernel=False, A_log=None), ["dt_bias", "given", "use_gate_in_kernel"]),
    "lower_bound low": (dict(lower_bound=-5.1), ["lower_bound", "-5.1", "[-5, 0)"]),
    "lower_bound zero": (dict(lower_bound=0), ["lower_bound", "0", "[-5, 0)"]),
    "lower_bound nan": (dict(lower_bound=float("nan")), ["lower_bound", "nan", "[-5, 0)"]),
    "safe_gate": (dict(safe_gate=True, lower_bound=None), ["lower_bound", "None", "safe_gate"]),
    "neg_eigval": (dict(use_beta_sigmoid_in_kernel=False, allow_neg_eigval=True), ["allow_neg_eigval", "use_beta_sigmoid_in_kernel"]),
    "chunk_size": (dict(chunk_size=48), ["chunk_size", "48", "32, 64"]),
    "state shape": (dict(initial_state=zeros(2, 2, 8, 9)), ["initial_state's shape", "[2, 2, 8, 9]", "[2, 2, 8, 8]"]),
    "state count": (dict(initial_state=zeros(1, 2, 8, 8)), ["initial_state's shape", "[1, 2, 8, 8]", "[2, 2, 8, 8]"]),
    "state dtype": (dict(initial_state=zeros(2, 2, 8, 8, dtype=torch.float16)), ["initial_state's dtype", "torch.float16", "bfloat16"]),
    "cu batch": (dict(cu_seqlens=torch.tensor([0, 8])), ["q's batch size", "2", "cu_seqlens"]),
    "cu rank": (dict(cu_seqlens=torch.tensor([[0, 8]])), ["cu_seqlens's shape", "[1, 2]", "[N + 1]"]),
    "cu dtype": (dict(cu_seqlens=torch.tensor([0.0, 8.0])), ["cu_seqlens's dtype", "torch.float32", "torch.int32"]),
    "backend": (dict(backend="cuda"), ["backend", "'cuda'", "hopper, portable, torch"]),
    "hopper on CPU": (dict(backend="hopper"), ["backend", "'hopper'", "compute capability 9.0"]),
    "scale nan": (dict(scale=float("nan")), ["scale", "nan", "finite"]),
    "scale beyond fp32": (dict(scale=1e39), ["scale", "1e+39", "finite in fp32", "3.4e+38"]),
    "scale beyond any float": (dict(scale=10**400), ["scale", "finite in fp32"]),
    "cp_context": (dict(cp_context=object()), ["cp_context", "object", "None"]),
    "cu rank in a graph": (dict(cu_seqlens=torch.tensor(8), use_graph=True, max_num_seqs=1), ["cu_seqlens's shape", "[]", "[N + 1]"]),
    "q sparse": (dict(q=zeros(2, 8, 2, 8).to_sparse()), ["q's layout", "torch.sparse_coo", "torch.strided"]),
    "g in rows": (dict(g=zeros(16, 16).to_sparse_csr()), ["g's layout", "torch.sparse_csr", "torch.strided"]),
    "A_log of oneDNN": (dict(A_log=zeros(2).to_mkldnn()), ["A_log's layout", "mkldnn", "torch.strided"]),
    "q nested": (dict(q=nested(8, 2, 8)), ["q's layout", "nested", "torch.strided"]),
    "q jagged": (dict(q=nested(8, 2, 8, layout=torch.jagged)), ["q's layout", "nested", "torch.strided"]),
    "state nested": (dict(initial_state=nested(2, 8, 8)), ["initial_state's layout", "nested", "torch.strided"]),
    "cu nested": (dict(cu_seqlens=nested(2)), ["cu_seqlens's layout", "nested", "torch.strided"]),
    "backend of a kind that cannot be hashed": (dict(backend=["torch"]), ["backend", "['torch']", "hopper, portable, torch"]),
}
WRONG_TYPE = {
    "list": (dict(q=[1.0]), ["q is a list", "torch.Tensor"]),
    "none": (dict(g=None), ["g is a NoneType", "torch.Tensor"]),
    "optional": (dict(initial_state=0), ["initial_state is a int", "torch.Tensor or None"]),
    "scale": (dict(scale="0.1"), ["scale is a str", "number or None"]),
    "scale bool": (dict(scale=True), ["scale is a bool", "number or None"]),
    "lower_bound": (dict(lower_bound=[-5.0]), ["lower_bound is a list", "number or None"]),
    "chunk_size": (dict(chunk_size=64.0), ["chunk_size", "64.0", "int"]),
    "max_num_seqs": (dict(max_num_seqs="2", use_graph=True), ["max_num_seqs", "'2'", "int or None"]),
    "unknown": (dict(use_qk_l2norm=True), ["use_qk_l2norm"]),
}


def refuses(error, changes: dict, words: list[str], function=chunk_kda, case: Case | None = None) -> None:
    case = case or make_case("random", B=2, T=8, H=2, K=8)
    with pytest.raises(error) as caught:
        function(**{**case.args, **changes})
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name):
    refuses(ValueError, *BAD[name])


@pytest.mark.parametrize("name", WRONG_TYPE)
def test_wrong_types(name):
    refuses(TypeError, *WRONG_TYPE[name])


@pytest.mark.parametrize("name", ["q rank", "k dtype", "lower_bound low", "state shape", "A_log missing", "q sparse", "q jagged"])
def test_the_recurrent_form_refuses_the_same(name):
    refuses(ValueError, *BAD[name], function=fused_recurrent_kda)


BAD_CU = {
    "falls": ([0, 12, 8, 16], ["cu_seqlens[2]", "8", "at least cu_seqlens[1] = 12"]),
    "starts late": ([2, 16], ["cu_seqlens's first entry", "2", "0"]),
    "past T": ([0, 17], ["cu_seqlens's last entry", "17", "at most T = 16"]),
}


@pytest.mark.parametrize("name", BAD_CU)
@pytest.mark.parametrize("on_cpu_too", [True, False])
def test_bad_cu_seqlens(name, on_cpu_too):
    values, words = BAD_CU[name]
    case = make_case("random", lengths=(16,), K=8, initial_state=False)
    cu = torch.tensor(values)
    refuses(ValueError, dict(cu_seqlens=cu, cu_seqlens_cpu=cu.clone() if on_cpu_too else None), words, case=case)


def test_bad_cu_seqlens_cpu():
    case = make_case("random", lengths=(16,), K=8)
    refuses(ValueError, dict(cu_seqlens_cpu=torch.tensor([0, 8, 16])), ["cu_seqlens_cpu's shape", "[3]", "[2]"], case=case)
    refuses(ValueError, dict(cu_seqlens_cpu=torch.tensor([0.0, 16.0])), ["cu_seqlens_cpu's dtype", "float32"], case=case)
    refuses(TypeError, dict(cu_seqlens_cpu=[0, 16]), ["cu_seqlens_cpu is a list"], case=case)
    refuses(ValueError, dict(cu_seqlens_cpu=torch.tensor([0, 16]).to_sparse()), ["cu_seqlens_cpu's layout", "sparse"], case=case)
    refuses(ValueError, dict(cu_seqlens_cpu=torch.tensor([0, 16], device="meta")), ["cu_seqlens_cpu's device", "meta", "cpu"], case=case)
    on_meta = dict(cu_seqlens=torch.tensor([0, 16], device="meta"), cu_seqlens_cpu=torch.tensor([0, 16]))
    refuses(ValueError, on_meta, ["cu_seqlens's device", "meta", "cpu, where the tensors are"], case=case)
    alone = dict(cu_seqlens=torch.tensor([0, 16], device="meta"))
    refuses(ValueError, alone, ["cu_seqlens's device", "meta", "one with values"], case=case)
    refuses(ValueError, dict(cu_seqlens_cpu=torch.tensor([0, 12])), ["cu_seqlens_cpu[1] is 12", "cu_seqlens[1] = 16"], case=case)
    refuses(ValueError, dict(use_graph=True, max_num_seqs=2), ["max_num_seqs", "2", "1"], case=case)


@pytest.mark.gpu
def test_lengths_on_a_device_are_remembered_until_written_to_or_freed():
    cu = torch.tensor([0, 3, 5], device="cuda")
    assert check_cu_seqlens(cu, None, 5) == (3, 2)
    known = len(problem_module._checked)
    assert check_cu_seqlens(cu, None, 9) == (3, 2) and len(problem_module._checked) == known
    cu[1] = 4
    assert check_cu_seqlens(cu, None, 5) == (4, 1)
    with pytest.raises(ValueError, match="at most T = 4"):
        check_cu_seqlens(cu, None, 4)
    del cu
    assert len(problem_module._checked) == known - 1


def test_lengths_on_the_cpu_are_read_every_time():
    """Such a tensor may share its memory with an array, and torch does not see what is written through that."""
    array = np.array([0, 3, 5])
    cu = torch.from_numpy(array)
    assert check_cu_seqlens(cu, None, 5) == (3, 2)
    array[1] = 4
    assert check_cu_seqlens(cu, None, 5) == (4, 1)


@pytest.mark.parametrize("cu", [[0, 12], [0, 4, 2], [3, 9]])
def test_use_graph_still_checks_lengths_that_are_on_the_cpu(cu):
    refuses(
        ValueError,
        dict(use_graph=True, cu_seqlens=torch.tensor(cu)),
        ["cu_seqlens"],
        case=make_case("random", T=9, K=8, initial_state=False),
    )


def test_lengths_without_their_device_twin_are_refused():
    refuses(ValueError, dict(cu_seqlens_cpu=torch.tensor([0, 9])), ["cu_seqlens_cpu"], case=make_case("random", T=9, K=8))
    refuses(ValueError, dict(max_num_seqs=3), ["max_num_seqs", "use_graph"], case=make_case("random", T=9, K=8))


def test_a_batch_of_none():
    case = make_case("random", B=0, T=9, K=8)
    case.args["q"].requires_grad_()
    o, final_state = chunk_kda(**case.args)
    assert o.shape == (0, 9, 2, 8) and final_state.shape == (0, 2, 8, 8)


def test_no_tokens_leave_a_state_of_the_callers_own():
    case = make_case("random", T=0, K=8)
    _, final_state = chunk_kda(**case.args)
    assert torch.equal(final_state, case.args["initial_state"])
    assert final_state.data_ptr() != case.args["initial_state"].data_ptr()


def test_lengths_of_inference_tensors_are_read_every_time():
    """They have no version counter, so a write could not be noticed."""
    with torch.inference_mode():
        cu = torch.tensor([0, 3, 5])
        assert check_cu_seqlens(cu, None, 5) == (3, 2)
        cu[1] = 1
        assert check_cu_seqlens(cu, None, 5) == (1, 4)


def test_cu_seqlens_on_another_device_is_moved():
    case = make_case("random", lengths=(3, 5), K=8, device="meta")
    case.args["cu_seqlens"] = torch.tensor([0, 3, 8])
    _, inputs = case.described()
    assert inputs.cu_seqlens.device.type == "meta" and inputs.lengths == (3, 5)
