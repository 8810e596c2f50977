"""Gradients through the public function: every combination of its optional arguments, every launch configuration, real sizes on a GPU."""

from dataclasses import replace
from importlib import import_module
from itertools import product

import pytest
import torch

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
    oracle,
    reference_gradients,
    relative_error,
    rounded_chunk,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

GATES = {  # what make_case gets, and the gate parameters left out
    "given": (dict(raw=False, bounded=False), ()),
    "given, with a bound": (dict(raw=False), ()),
    "softplus": (dict(bounded=False), ()),
    "softplus, no bias": (dict(bounded=False), ("dt_bias",)),
    "bounded": (dict(), ()),
    "bounded, no rate": (dict(), ("A_log",)),
    "bounded, no parameters": (dict(), ("A_log", "dt_bias")),
}
FLAGS = {  # argument -> its values, in make_case's words
    "neg_eigval": (False, True),
    "qk_l2norm": (True, False),
    "initial_state": (True, False),
    "output_final_state": (True, False),
    "state_v_first": (False, True),
    "lengths": (None, (2, 0, 3)),
    "disable_recompute": (False, True),
    "scale": (None, 0.3),
}


def combination(gate: str, flags: dict[str, object], **options: object) -> Case:
    """A case with one value of every flag; without a raw gate, negative eigenvalues have no meaning and are off."""
    (form, absent), flags = GATES[gate], dict(flags)
    flags["neg_eigval"] &= form.get("raw", True)
    later = {name: flags.pop(name) for name in ("output_final_state", "disable_recompute", "scale") if name in flags}
    case = make_case("random", **form, **flags, **options)
    case.args.update(later)
    for name in absent:
        del case.args[name]
    return case


def expected_gradients(case: Case) -> dict[str, torch.Tensor]:
    """fp64 autograd of the recurrence; an unasked final state has no gradient."""
    args = dict(case.args)
    if args["output_final_state"]:
        return reference_gradients(case, oracle, FP64)
    unasked = Case(args | {"output_final_state": True}, case.regime, case.lengths)
    do, _ = cotangents(unasked)
    problem, inputs = unasked.described()
    tensors = {n: x.double().requires_grad_() for n, x in args.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    o, _ = oracle(problem, replace(inputs, **tensors))
    return dict(zip(tensors, torch.autograd.grad(o, list(tensors.values()), do.double(), allow_unused=True, materialize_grads=True)))


def check_combination(case: Case, backend: str | None, tolerance: float) -> None:
    args = leaves(case)
    o, final = chunk_kda(**args, backend=backend)
    do, dfinal = cotangents(case)
    assert (final is not None) == case.args["output_final_state"]
    torch.autograd.backward([x for x in (o, final) if x is not None], [do, dfinal] if final is not None else [do])
    for name, gradient in expected_gradients(case).items():
        found = args[name].grad
        assert found.shape == args[name].shape and found.dtype == args[name].dtype, name
        assert relative_error(found, gradient.reshape(found.shape)) < tolerance, name


@pytest.mark.parametrize("gate", GATES)
def test_every_combination_of_optional_arguments(gate):
    """All 256 of each gate form on the torch backend; disable_recompute is the kernels' and tested there."""
    flags = {name: values for name, values in FLAGS.items() if name != "disable_recompute"}
    for values in product(*flags.values()):
        check_combination(combination(gate, dict(zip(flags, values)), T=5, H=1, HV=2, K=4, V=3), "torch", 2e-5)


def spread(gate: str) -> list[dict[str, object]]:
    """Eight rows of flags: any two but scale meet in all four pairs of values, scale changes from gate form to gate form."""
    odd = lambda row, column: bin(row & column).count("1") % 2  # two columns differ as parities of different bits of the row's number
    turn = list(GATES).index(gate) % 2
    parity = lambda row: [*(odd(row, column) for column in range(1, 8)), turn]
    return [{name: values[i] for (name, values), i in zip(FLAGS.items(), parity(row))} for row in range(8)]


def test_rows_of_the_spread_cover_every_pair():
    for a, b in product(list(FLAGS), repeat=2):
        met = {(FLAGS[a].index(row[a]), FLAGS[b].index(row[b])) for gate in GATES for row in spread(gate)}
        assert len(met) == (2 if a == b else 4), (a, b)


@pytest.mark.parametrize("row", range(8))
def test_combinations_on_kernels(device, row):
    gate = list(GATES)[row % len(GATES)]
    check_combination(combination(gate, spread(gate)[row], T=5, H=1, HV=2, K=16, device=device), "portable", 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
def test_combinations_where_dispatch_sends_them(device, gate):
    """At the size of a real head, in bf16: a few roundings of 2^-9 in each product. Two rows a gate form, every row with some."""
    turn = list(GATES).index(gate)
    for row in (2 * turn, 2 * turn + 1):
        flags = spread(gate)[row % 8]
        flags["lengths"] = flags["lengths"] and (70, 0, 130)
        flags["scale"] = flags["scale"] and 0.1
        check_combination(combination(gate, flags, T=200, H=1, HV=2, K=128, dtype=BF16, gate_dtype=FP32, device=device), None, 0.03)


BLOCKS = dict(scan_block_v=(16, 32, 64), scan_block_k=(64, 128), block_v=(32, 64), block_k=(16, 32, 64), input_block_v=(32, 64))
SCHEDULES = dict(scan_warps=(4, 8), scan_stages=(1, 2, 3), input_warps=(4, 8))  # of which the interpreter has none
SMALL, FULL = dict(T=18, H=1, K=32, dtype=FP32), dict(T=298, H=2, K=128, dtype=BF16)


@pytest.mark.parametrize(
    ("field", "size"),
    [pytest.param(field, SMALL, id=f"{field}-small") for field in BLOCKS]
    + [pytest.param(field, FULL, id=f"{field}-full", marks=pytest.mark.gpu) for field in (*BLOCKS, *SCHEDULES)],
)
def test_41_every_launch_configuration(device, monkeypatch, field, size):
    """Whatever the configuration chooses somewhere, forced here one at a time: the gradients stay within the earned error."""
    case = make_case("init", device=device, **size)
    backward = import_module("openkda.portable.backward")  # the package's attribute of that name is a function
    chosen = backward.configure_backward(case.described()[0])
    expected, twin = reference_gradients(case, oracle, FP64), reference_gradients(case, rounded_chunk)
    for value in (BLOCKS | SCHEDULES)[field]:
        if getattr(chosen, field) == value or ("block" in field and value > size["K"]):
            continue  # tested everywhere else, or wider than the head
        monkeypatch.setattr(backward, "configure_backward", lambda problem, value=value: replace(chosen, **{field: value}))
        found = gradients(case, backend="portable")
        for name in ("q", "k", "v", "g", "beta", "dt_bias", "initial_state"):
            assert_close(f"{field}={value}: d{name}", found[name], expected[name], twin[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
def test_regimes_where_dispatch_sends_them(device, regime, bounded, dtype):
    """Real heads, the gate's gradient at 20 to 1000 nats a token included."""
    case = make_case(regime, T=298, H=2, K=128, dtype=dtype, bounded=bounded, device=device)
    for triple in gradient_triples(case, gradients(case)):
        assert_close(*triple)


@pytest.mark.gpu
@pytest.mark.parametrize("bounded", [True, False])
def test_causality_where_dispatch_sends_it(device, bounded):
    """A long sequence: zero for what comes after the loss, not a bit of change before it."""
    t0, names, found = 3001, ("q", "k", "v", "g", "beta", "A_log", "dt_bias"), []
    case = make_case("init", T=5000, H=2, K=128, dtype=BF16, bounded=bounded, initial_state=False, device=device)
    for _ in range(2):
        args = leaves(case)
        o, _ = chunk_kda(**args)
        o[:, :t0].backward(cotangents(case)[0][:, :t0])
        found.append({name: args[name].grad for name in names})
        for name in names[:5]:
            case.args[name] = torch.cat([case.args[name][:, :t0], case.args[name][:, t0:].flip(1) * 3 - 1], 1)
    for name in names:
        for run in found:
            assert name in names[5:] or not run[name][:, t0:].any(), name
        same = slice(None) if name in names[5:] else (slice(None), slice(t0))
        assert torch.equal(found[0][name][same], found[1][name][same]), name
