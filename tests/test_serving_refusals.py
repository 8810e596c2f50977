"""What kda_prefill and kda_decode refuse, each in one sentence, before anything is written."""

import pytest
import torch
from serving_case import assert_untouched, cu, indices, make

from openkda import Checkpoints, kda_decode, kda_prefill, serving

REFUSALS = [
    (dict(q=lambda c: c.tokens["q"][0]), "q's shape"),
    (dict(k=lambda c: c.tokens["k"][..., :3]), "k's shape"),
    (dict(v=lambda c: c.tokens["v"].double()), "v's dtype"),
    (dict(gate=lambda c: c.tokens["gate"].long()), "gate's dtype"),
    (dict(beta=lambda c: c.tokens["beta"][:, :, :1]), "beta's shape"),
    (dict(out=lambda c: c.tokens["q"]), "out's shape"),
    (dict(A_log=lambda c: torch.zeros(5)), "A_log's shape"),
    (dict(A_log=lambda c: None, lower_bound=lambda c: None), "A_log is None"),
    (dict(dt_bias=lambda c: torch.zeros(3)), "dt_bias's shape"),
    (dict(lower_bound=lambda c: -7.0), "lower_bound is -7.0"),
    (dict(state_pool=lambda c: c.pool.mT), "state_pool's shape"),
    (dict(state_pool=lambda c: c.pool.to(torch.float16)), "state_pool's dtype"),
    (dict(state_pool=lambda c: torch.zeros(6, 2, 16, 24).mT), "state_pool's strides"),
    (dict(state_indices=lambda c: torch.zeros(3, dtype=torch.int32)), "state_indices's shape"),
    (dict(state_indices=lambda c: torch.zeros(2)), "state_indices's dtype"),
    (dict(num_accepted=lambda c: torch.ones(2, dtype=torch.int32)), "with num_accepted"),
    (dict(pad_slot=lambda c: 3), "pad_slot is 3"),
    (dict(backend=lambda c: "hopper"), "backend is 'hopper'"),
    (dict(cu_seqlens=lambda c: torch.tensor([0, 1])), "q's batch size"),
    (dict(q=lambda c: c.tokens["q"].detach().requires_grad_()), "no gradient"),
    (dict(q=lambda c: torch.zeros(2, 1, 1, 32)[..., ::2]), "q's last stride"),
    (dict(scale=lambda c: float("nan")), "scale is nan"),
    (dict(q=lambda c: c.tokens["q"].to_sparse()), "q's layout is torch.sparse_coo; it must be torch.strided"),
    (dict(beta=lambda c: torch.nested.nested_tensor([torch.zeros(1, 2)] * 2)), "beta's layout is nested; it must be torch.strided"),
    (dict(A_log=lambda c: torch.zeros(2).to_mkldnn()), "A_log's layout is torch._mkldnn; it must be torch.strided"),
]


@pytest.mark.parametrize("changes, sentence", REFUSALS, ids=[s for _, s in REFUSALS])
def test_decode_refuses_in_one_sentence(changes, sentence):
    case = make()
    args = case.arguments(state_indices=indices([1, 2], case))
    args.update({name: value(case) for name, value in changes.items()})
    with pytest.raises(ValueError) as error:
        kda_decode(**args)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert_untouched(case, set())


def test_decode_wants_tensors():
    case = make()
    with pytest.raises(TypeError, match=r"^beta is a list; it must be a torch.Tensor$"):
        kda_decode(**{**case.arguments(state_indices=indices([1, 2], case)), "beta": [0.5]})
    with pytest.raises(ValueError, match=r"^gate is None; it must be a tensor"):
        kda_decode(**{**case.arguments(state_indices=indices([1, 2], case)), "gate": None})


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(q=[1]), "q is a list; it must be a torch.Tensor"),
        (dict(v=3), "v is a int; it must be a torch.Tensor"),
        (dict(state_indices=[1, 2]), "state_indices is a list; it must be a torch.Tensor"),
        (dict(scale="a"), "scale is a str; it must be a number or None"),
        (dict(scale=[1.0]), "scale is a list; it must be a number or None"),
        (dict(scale=torch.tensor(0.5)), "scale is a Tensor; it must be a number or None"),
        (dict(lower_bound="a"), "lower_bound is a str; it must be a number or None"),
        (dict(pad_slot=0.0), "pad_slot is 0.0; it must be an int"),
        (dict(backend=3), "backend is a int; it must be a str or None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("traced", [False, True])
def test_decode_refuses_types_in_one_sentence(changes, sentence, traced):
    case = make()
    before = len(serving._launches)
    call = torch.compile(kda_decode, backend="eager") if traced else kda_decode
    with pytest.raises(TypeError) as error:
        call(**{**case.arguments(state_indices=indices([1, 2], case)), **changes})
    assert str(error.value) == sentence and len(serving._launches) == before
    assert_untouched(case, set())


@pytest.mark.parametrize("name", ["q", "gate", "state_pool", "out", "A_log", "state_indices"])
def test_decode_refuses_a_tensor_elsewhere(name):
    """Also of a kind of call that was served before: by its device's number, a tensor of the meta device might lie on the CPU."""
    case = make()
    args = {"out": torch.zeros(2, 1, 2, 24), **case.arguments(state_indices=indices([1, 2], case))}
    want = kda_decode(**args).clone()
    case.storage.copy_(case.before)
    with pytest.raises(ValueError, match=r"device is (meta; it must be cpu|cpu; it must be meta), where q is$"):
        kda_decode(**{**args, name: args[name].to("meta")})
    assert_untouched(case, set())
    assert torch.equal(kda_decode(**{**args, "verify": []}), want)  # a flag is taken by its truth, also one that cannot be hashed


def test_launches_are_bounded(monkeypatch):
    monkeypatch.setattr(serving, "_launches", {})
    monkeypatch.setattr(serving, "MAX_LAUNCHES", 2)
    case = make()
    for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
        kda_decode(**case.arguments(state_indices=indices([1, 2], case), scale=scale))
        assert 1 <= len(serving._launches) <= 2


@pytest.mark.parametrize("function", [kda_decode, kda_prefill])
def test_portable_on_a_cpu_is_refused_without_the_interpreter(function, monkeypatch):
    monkeypatch.setattr(serving, "_launches", {})
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    case = make(lengths=[4, 18])
    args = case.arguments(state_indices=indices([1, 2], case), cu_seqlens=cu(case), backend="portable")
    if function is kda_prefill:
        args["has_initial_state"] = None
    with pytest.raises(ValueError, match=r"^backend is 'portable', which cannot serve this call: .* needs a GPU"):
        function(**args)
    assert_untouched(case, set())


PREFILL_REFUSALS = [
    (dict(cu_seqlens=lambda c: None), "cu_seqlens is None"),
    (dict(cu_seqlens_cpu=lambda c: torch.tensor([0, 4, 3])), "cu_seqlens[2]"),
    (dict(cu_seqlens_cpu=lambda c: torch.tensor([2, 4, 6])), "first entry"),
    (dict(cu_seqlens_cpu=lambda c: torch.tensor([0, 4, 99])), "at most T"),
    (dict(cu_seqlens=lambda c: torch.tensor([0, 14, 4])), "cu_seqlens[2] is 4"),
    (dict(cu_seqlens=lambda c: torch.tensor([0, 4, 99])), "at most T"),
    (dict(cu_seqlens=lambda c: torch.tensor(4)), "cu_seqlens's shape is []"),
    (dict(cu_seqlens=lambda c: torch.zeros(3)), "cu_seqlens's dtype"),
    (dict(checkpoints=lambda c: Checkpoints(torch.zeros(1, 2, 24, 16), [1], [16, 16])), "checkpoints.offset's length is 2"),
    (dict(state_indices=lambda c: torch.zeros(2, 2, dtype=torch.int32)), "state_indices's shape"),
    (dict(has_initial_state=lambda c: torch.ones(2)), "has_initial_state's dtype"),
    (dict(out=lambda c: torch.zeros(1, 22, 2, 48)[..., ::2]), "out's strides"),
    (dict(checkpoints=lambda c: Checkpoints(torch.zeros(1, 2, 24, 16), [0], [8])), "offset[0] is 8"),
    (dict(checkpoints=lambda c: Checkpoints(torch.zeros(1, 2, 24, 16), [2], [16])), "sequence[0] is 2"),
    (dict(checkpoints=lambda c: Checkpoints(torch.zeros(1, 2, 24, 16), [1], [32])), "offset[0] is 32"),
    (dict(checkpoints=lambda c: Checkpoints(torch.zeros(2, 2, 24, 16), [1], [16])), "checkpoints.states's shape"),
    (dict(cu_seqlens_cpu=lambda c: torch.tensor([0, 5, 22])), "cu_seqlens_cpu[1] is 5; it must be cu_seqlens[1] = 4"),
    (dict(q=lambda c: c.tokens["q"].detach().requires_grad_()), "kda_prefill has no gradient"),
    (dict(gate=lambda c: c.tokens["gate"][:, :21]), "gate's shape is [1, 21, 2, 16]"),
    (dict(state_pool=lambda c: c.pool.to("meta")), "state_pool's device is meta; it must be cpu, where q is"),
    (dict(backend=lambda c: "cuda"), "backend is 'cuda'"),
]


@pytest.mark.parametrize("changes, sentence", PREFILL_REFUSALS, ids=[s for _, s in PREFILL_REFUSALS])
def test_prefill_refuses_in_one_sentence(changes, sentence):
    case = make(lengths=[4, 18])
    args = case.arguments(state_indices=indices([1, 2], case), has_initial_state=None, cu_seqlens=cu(case))
    args.update({name: value(case) for name, value in changes.items()})
    with pytest.raises(ValueError) as error:
        kda_prefill(**args)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert_untouched(case, set())


@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "beta"])
@pytest.mark.parametrize("tokens", [23, 21])
def test_prefill_refuses_other_lengths_before_it_cuts(name, tokens):
    """At checkpoints the prompts are cut into pieces, whose lengths agree whatever the tensors' do."""
    case = make(lengths=[4, 18])
    states, out = torch.zeros(1, 2, 24, 16), torch.ones(1, 22, 2, 24)
    args = case.arguments(state_indices=indices([1, 2], case), has_initial_state=None, cu_seqlens=cu(case), out=out)
    args[name] = torch.cat([args[name], args[name]], 1)[:, :tokens]
    with pytest.raises(ValueError, match=r"shape is|at most T = 21"):
        kda_prefill(**args, checkpoints=Checkpoints(states, [1], [16]))
    assert_untouched(case, set())
    assert (out == 1).all() and (states == 0).all()


@pytest.mark.parametrize("name", ["state_pool", "state_indices", "has_initial_state", "cu_seqlens", "cu_seqlens_cpu", "out", "q", "v"])
def test_prefill_wants_tensors(name):
    case = make(lengths=[4, 18])
    args = case.arguments(state_indices=indices([1, 2], case), has_initial_state=None, cu_seqlens=cu(case))
    with pytest.raises(TypeError, match=f"^{name} is a list; it must be a torch.Tensor$"):
        kda_prefill(**{**args, name: [0, 1]})
    with pytest.raises(TypeError, match=r"^checkpoints.states is a NoneType; it must be a torch.Tensor$"):
        kda_prefill(**args, checkpoints=Checkpoints(None, [1], [16]))


@pytest.mark.parametrize(
    "checkpoints, sentence",
    [
        (3, "checkpoints is a int"),
        ((1, 2), "checkpoints is a tuple"),
        ((torch.zeros(1, 2, 24, 16), ["a"], [16]), "checkpoints.sequence is ['a']; it must be a sequence of ints"),
        ((torch.zeros(1, 2, 24, 16), [1], [16.5]), "checkpoints.offset is [16.5]; it must be a sequence of ints"),
    ],
    ids=str,
)
def test_prefill_wants_checkpoints(checkpoints, sentence):
    case = make(lengths=[4, 18])
    args = case.arguments(state_indices=indices([1, 2], case), has_initial_state=None, cu_seqlens=cu(case))
    with pytest.raises(TypeError) as error:
        kda_prefill(**args, checkpoints=checkpoints)
    assert sentence in str(error.value)
    assert_untouched(case, set())
