"""The chunk tables of a ragged batch (openkda/tables.py) as a launch of the Hopper gradients."""

from __future__ import annotations

import torch

from openkda.hopper.backward_prepare import C
from openkda.hopper.launch import dense
from openkda.hopper.runtime import launch
from openkda.plan import Plan
from openkda.problem import Problem
from openkda.tables import BLOCK, plan_kernel


def ragged_plan(problem: Problem, cu_seqlens: torch.Tensor) -> Plan:
    """The tables of a ragged batch with sequences from cu_seqlens [N + 1]"""
    N, T = problem.N, problem.T
    NC = T // C + N
    chunks, sequences = (torch.empty(rows, 4, dtype=torch.int32, device=cu_seqlens.device) for rows in (NC, N))
    if NC:
        launch(plan_kernel, (-(-NC // BLOCK), 1, 1), (dense(cu_seqlens), chunks, sequences), (N, T, NC), (C, BLOCK))
    return Plan(chunks, sequences, C)
