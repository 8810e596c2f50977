"""chunk_kda under torch.compile: whole graphs, training, shapes of the fakes, and torch.library's own checks of the operators."""

from contextlib import nullcontext

import pytest
import torch
from fault_case import finest, width
from torch._subclasses import FakeTensorMode

from openkda import chunk_kda, fused_recurrent_kda
from openkda.custom_ops import chunk_kda_backward_op, chunk_kda_op, recurrent_kda_op
from openkda.testing import make_case, relative_error

# the schema's arguments after the tensors: gate, norm and beta inside; o and final_state out; chunks of 64
FLAGS = (None, None, None, True, -5.0, False, True, True, False, True, False, False, 64, True)


@pytest.fixture(autouse=True)
def fresh_graphs():
    """A call that fails while being traced makes dynamo leave its function alone from then on."""
    torch.compiler.reset()


class Mixer(torch.nn.Module):
    """The smallest module that trains everything chunk_kda takes."""

    def __init__(self, backend: str, D: int = 16):
        super().__init__()
        self.backend, self.D = backend, D
        self.project = torch.nn.Linear(D, 4 * D + 1)
        self.A_log = torch.nn.Parameter(torch.zeros(1))
        self.dt_bias = torch.nn.Parameter(torch.zeros(D))

    def forward(self, x, state):
        q, k, v, g, beta = self.project(x).split([self.D] * 4 + [1], -1)
        heads = lambda y: y[:, :, None]
        o, state = chunk_kda(
            heads(q), heads(k), heads(v), heads(g), beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0, A_log=self.A_log, dt_bias=self.dt_bias,
            backend=self.backend,
        )  # fmt: skip
        return o[:, :, 0], state


def step(model, x, state):
    o, final = model(x, state)
    (o.square().mean() + final.square().mean()).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_whole_graph_trains(device, backend):
    torch.manual_seed(0)
    D, dtype = width(backend), finest(backend)
    model = Mixer(backend, D).to(device, dtype)
    x, state = torch.randn(2, 35, D, device=device, dtype=dtype), 0.1 * torch.randn(2, 1, D, D, device=device)
    expected = step(model, x, state)
    model.zero_grad()
    found = step(torch.compile(model, fullgraph=True, backend="aot_eager"), x, state)
    for a, b in zip(found, expected):
        assert relative_error(a, b) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_shapes_may_vary(device):
    model = torch.compile(Mixer("torch").to(device), fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (20, 33, 50):
        o, final = model(torch.randn(1, T, 16, device=device), None)
        assert o.shape == (1, T, 16) and final.shape == (1, 1, 16, 16)
        o.sum().backward()


@pytest.mark.parametrize("lengths", [None, (20, 13)])
def test_intermediate_states_in_a_graph(device, lengths):
    case = make_case("random", T=33, H=1, K=16, lengths=lengths, return_intermediate_states=True, device=device)
    expected = chunk_kda(**case.args)
    found = torch.compile(lambda: chunk_kda(**case.args), fullgraph=True, backend="aot_eager")()
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


def operands(device, backend, **changes):
    sizes = dict(T=20, H=1, HV=2, K=width(backend), V=width(backend, 8), dtype=finest(backend))
    case = make_case("random", **{**sizes, **changes}, device=device)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    tensors = [case.args.get(n) for n in names]
    return [t.requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors], (*FLAGS[1:], backend)


@pytest.mark.parametrize("changes", [dict(), dict(lengths=(5, 0, 15)), dict(initial_state=False, HV=1)])
def test_opcheck(device, backend, changes):
    tensors, flags = operands(device, backend, **changes)
    torch.library.opcheck(chunk_kda_op, (*tensors, *flags))


def test_opcheck_backward(device, backend):
    tensors, flags = operands(device, backend)
    given = [t if t is None else t.detach() for t in tensors]
    o, final, _ = chunk_kda_op(*given, *flags)
    needs = [True, False, True, True, True, True, True, True]
    for dfinal in (torch.randn_like(final), None):
        torch.library.opcheck(chunk_kda_backward_op, (o, torch.randn_like(o), dfinal, needs, *given, *flags))


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_calls_without_values(function):
    """Fake tensors and those of the meta device have shapes and gradients' shapes, and one device."""
    for mode, where in ((nullcontext(), "meta"), (FakeTensorMode(), "cpu")):
        with mode:
            args = without_chunk_options(make_case("random", T=5, H=1, HV=2, K=8))
            args = {name: x.to(where) if isinstance(x, torch.Tensor) else x for name, x in args.items()}
            args["q"].requires_grad_()
            o, final_state = function(**args)
            assert o.shape == (1, 5, 2, 8) and final_state.shape == (1, 2, 8, 8)
            o.sum().backward()
            assert args["q"].grad.shape == (1, 5, 1, 8)
    with pytest.raises(ValueError, match="beta's device is cpu; it must be meta, where q is"):
        function(**{**args, "q": torch.empty(1, 5, 1, 8, device="meta"), **dict.fromkeys(("k", "v", "g"), torch.empty(0, device="meta"))})


def test_errors_reach_the_caller(device):
    tensors, flags = operands(device, "torch")
    with pytest.raises(ValueError, match="chunk_size is 48"):
        chunk_kda_op(*tensors, *flags[:-3], 48, *flags[-2:])


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        (dict(scale="a"), TypeError, "scale is a str; it must be a number or None"),
        (dict(lower_bound=[-5.0]), TypeError, "lower_bound is a list; it must be a number or None"),
        (dict(beta=0.5), TypeError, "beta is a float; it must be a torch.Tensor"),
        (dict(backend="best"), ValueError, "backend is 'best'; it must be None or one of hopper, portable, torch"),
    ],
    ids=str,
)
def test_a_traced_call_refuses_in_one_sentence(function, changes, error, sentence):
    args = {**without_chunk_options(make_case("random", T=5, H=1, K=8)), **changes}
    with pytest.raises(error) as e:
        torch.compile(function, backend="eager")(**args)
    assert str(e.value) == sentence


def without_chunk_options(case):
    return {name: x for name, x in case.args.items() if name not in ("safe_gate", "chunk_size")}


@pytest.mark.parametrize("changes", [dict(), dict(lengths=(5, 0, 15)), dict(initial_state=False, HV=1, state_v_first=True)])
def test_recurrence_in_a_graph(device, changes):
    """Values as in eager mode, gradients those of chunk_kda; torch.library's own checks."""
    case = make_case("random", **{**dict(T=20, H=1, HV=2, K=16, V=8), **changes}, device=device)
    leaf = lambda x: x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
    args, twins = ({name: leaf(x) for name, x in without_chunk_options(case).items()} for _ in range(2))
    o, final = torch.compile(fused_recurrent_kda, fullgraph=True, backend="aot_eager")(**args, backend="torch")
    expected = chunk_kda(**twins, backend="torch")
    for a, b in zip((o, final), fused_recurrent_kda(**without_chunk_options(case), backend="torch")):
        assert torch.equal(a, b)
    (o.square().sum() + final.sum()).backward()
    (expected[0].square().sum() + expected[1].sum()).backward()
    for name, x in args.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            assert relative_error(x.grad, twins[name].grad) < 1e-5, name
    tensors, _ = operands(device, "torch", **changes)
    torch.library.opcheck(recurrent_kda_op, (*tensors, None, None, True, -5.0, True, True, False, True, False, "torch"))
