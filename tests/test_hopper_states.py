"""Chunk-entry states of the Hopper forward: values against the fp64 recurrence, beside portable's, and that asking changes nothing else."""

import pytest
import torch
from hopper_case import BF16, FP16, FP32, RAGGED, SPLIT, case, split_config

from openkda import chunk_kda
from openkda.hopper import launch, why_not
from openkda.hopper.config import choose
from openkda.testing import assert_close, entry_states, oracle, rounded_chunk

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]


def check(c, how=None):
    """h by `how` (default: what `choose` says), every entry written, o and final_state those of a call without h bit for bit."""
    plain, inputs = c.described()
    problem = plain.replace(return_intermediate_states=True)
    assert why_not(problem) is None
    cut = lambda p: choose(p) if how is None else split_config(p, how)
    o, final, h = launch.forward(problem, inputs, cut(problem))
    expected = entry_states(problem, inputs, oracle)
    assert h.dtype == problem.dtype and h.shape == (problem.B, expected.shape[0] // problem.B, *problem.state_shape[1:])
    assert_close("h", h.flatten(0, 1), expected, entry_states(problem, inputs, rounded_chunk).to(h.dtype))
    for again in (launch.forward(plain, inputs, cut(plain)), launch.forward(problem, inputs, cut(problem))):
        assert torch.equal(o, again[0]) and torch.equal(final, again[1])
    assert torch.equal(h, again[2])
    return h


@pytest.mark.parametrize(("chunk_size", "v_first"), [(64, True), (32, False)], ids=["64, V first", "32, K first"])
@pytest.mark.parametrize("regime", ["random", "mixed"])
@pytest.mark.parametrize("how", ["full", "half", "turns", *SPLIT])
@pytest.mark.parametrize("kw", [dict(T=300, B=2), dict(lengths=RAGGED)], ids=["fixed", "ragged"])
def test_every_way_of_cutting(how, regime, chunk_size, v_first, kw):
    check(case(regime, chunk_size=chunk_size, state_v_first=v_first, **kw), how)


@pytest.mark.parametrize(
    "kw",
    [
        dict(HV=4), dict(initial_state=False), dict(K=64), dict(V=64), dict(K=64, V=64), dict(state_dtype=BF16), dict(dtype=FP16),
        dict(raw=False, gate_dtype=FP32), dict(bounded=False), dict(bounded=False, T=700), dict(T=1), dict(T=32), dict(T=64), dict(T=65),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("v_first", [True, False], ids=["V first", "K first"])
def test_options(kw, v_first):
    check(case("init", chunk_size=32, state_v_first=v_first, **{**dict(T=150), **kw}))


@pytest.mark.parametrize("kw", [dict(T=300, B=4), dict(lengths=(330, 70, 0, 33, 1, 130))], ids=["fixed", "ragged"])
def test_blocks_take_several_items(kw):
    check(case("init", H=48, **kw), "turns")


@pytest.mark.parametrize(
    "kw", [dict(T=0), dict(lengths=()), dict(lengths=(0, 0)), dict(lengths=(40, 0, 70), pad_to=150), dict(T=100, B=2)], ids=str
)
def test_shapes_are_those_of_portable(kw):
    """Also where lengths never reach the host: there h has a bound's length, and zeros past the chunks in use."""
    c = case("init", chunk_size=32, return_intermediate_states=True, **kw)
    for use_graph in (False, True) if "lengths" in kw else (False,):
        one, other = (chunk_kda(**c.args, use_graph=use_graph, backend=name)[2] for name in ("hopper", "portable"))
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
        used = sum(-(-length // 32) for length in c.lengths or ()) if use_graph else one.shape[1]
        assert torch.equal(one[:, used:], other[:, used:])


def test_captured_in_a_graph_whose_batch_changes():
    c = case("init", lengths=(200, 40, 60), return_intermediate_states=True)
    cu = c.args["cu_seqlens"]
    chunk_kda(**c.args, use_graph=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h = chunk_kda(**c.args, use_graph=True)[2]
    cu.copy_(torch.tensor([0, 33, 33, 300]))
    graph.replay()
    again = chunk_kda(**c.args, use_graph=True)[2]
    assert torch.equal(h, again)
    problem, inputs = c.described()
    expected = entry_states(problem, inputs, oracle)
    assert_close("h", h[0, : len(expected)], expected, entry_states(problem, inputs, rounded_chunk).to(BF16))
    assert not h[0, len(expected) :].any()
