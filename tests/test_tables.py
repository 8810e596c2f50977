"""The chunk tables that are made on a GPU are those of openkda/plan.py."""

import pytest
import torch

from openkda import plan as plans
from openkda import portable
from openkda.hopper.backward_plan import ragged_plan
from openkda.hopper.backward_prepare import C
from openkda.plan import Plan
from openkda.tables import ragged_tables
from openkda.testing import make_case


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "bounds",
    [
        [0, 1, 34, 234, 234, 304],
        [0, 0],
        [0, 70, 40, 90, 4096],  # a fall, and an end beyond the tokens
        [-5, 3, 3, 300],
        [0, *range(1, 150), 180, 300],  # more sequences than a program takes at a time
    ],
    ids=["ragged", "empty", "falling", "outside", "many"],
)
def test_tables(device, bounds, dtype):
    cu = torch.tensor(bounds, dtype=dtype, device=device)
    T = 304
    for chunk in (16, 32, 64):
        expected = plans._ragged(cu, T, chunk)
        chunks, sequences = ragged_tables(cu, T, chunk)
        assert torch.equal(chunks, expected.chunks) and torch.equal(sequences, expected.sequences)
        assert torch.equal(Plan.build(cu, 1, T, chunk, cu.device).chunks, expected.chunks)
    problem, _ = make_case("random", lengths=(T,), T=T, H=1, K=64, V=64, dtype=torch.bfloat16, device=device).described()
    found, expected = ragged_plan(problem.replace(N=len(bounds) - 1), cu), plans._ragged(cu, T, C)
    assert torch.equal(found.chunks, expected.chunks) and torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize("T", [0, 70])
def test_no_sequence(device, T):
    chunks, sequences = ragged_tables(torch.zeros(1, dtype=torch.int32, device=device), T, 64)
    assert chunks.shape == (T // 64, 4) and sequences.shape == (0, 4) and not chunks.any()


@pytest.mark.gpu
def test_a_captured_call_follows_the_lengths(device):
    """The portable backend in a CUDA graph, forward and backward: a replay reads cu_seqlens as it is by then."""
    case = make_case("random", lengths=(100, 1, 0, 155), H=2, K=64, V=64, dtype=torch.bfloat16, device=device)
    problem, inputs = case.described()
    inputs.lengths = None

    def call() -> list[torch.Tensor]:
        o, final, _ = portable.forward(problem, inputs)
        return [o, final, *portable.backward(problem, inputs, (True,) * 8, o, torch.ones_like(o), torch.ones_like(final))]

    before = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    inputs.cu_seqlens.copy_(torch.tensor([0, 7, 127, 200, 256]))
    graph.replay()
    expected = call()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and not torch.equal(found[0], before[0])
