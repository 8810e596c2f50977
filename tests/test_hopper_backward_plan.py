"""The chunk tables that the Hopper gradients make of a ragged batch are those of openkda/plan.py."""

import pytest
import torch

from openkda.hopper.backward_plan import ragged_plan
from openkda.hopper.backward_prepare import C
from openkda.plan import Plan
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
    problem, _ = make_case("random", lengths=(T,), T=T, H=1, K=64, V=64, dtype=torch.bfloat16, device=device).described()
    found, expected = ragged_plan(problem.replace(N=len(bounds) - 1), cu), Plan.build(cu, 1, T, C, cu.device)
    assert torch.equal(found.chunks, expected.chunks)
    assert torch.equal(found.sequences, expected.sequences)
