"""The portable forward: gate_cumsum -> prepare (scores, inverse, w, u, kg, qg) -> state scan with the output.

What passes through memory between the kernels, per token and value head: G (4 K bytes), w, kg, qg, u and Aqk in q's dtype.
"""

from __future__ import annotations

import os

import torch

from openkda.backends import on_its_device
from openkda.portable.config import configure
from openkda.portable.gate import gate_cumsum
from openkda.portable.state import scan_output
from openkda.portable.wy import prepare
from openkda.problem import FLOAT_DTYPES, Inputs, Problem


def interpreted() -> bool:
    """True when Triton kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def why_not(problem: Problem) -> str | None:
    """None if the portable Triton kernels serve `problem`, else the reason in one sentence."""
    if problem.dtype not in FLOAT_DTYPES:
        return f"the portable kernels compute in fp32 and below, and q's dtype is {problem.dtype}"
    if problem.device_type != "cuda" and not interpreted():
        return f"the portable kernels need a GPU (or TRITON_INTERPRET=1 set before import), and q is on {problem.device_type}"
    return None


@on_its_device
def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run the problem.

    Returns: o [B, T, HV, V] in v's dtype, zero outside every sequence; final_state (problem.state_shape, state_dtype) or None;
    chunk-entry states in q's dtype or None: [B, NT, HV, K, V] (V, K swapped when state_v_first), all sequences' chunks in turn when
    ragged ([1, sum NT, ...]; the plan's upper bound where the host does not know the lengths)."""
    config = configure(problem)
    plan = inputs.plan(problem, config.chunk)
    covered = not problem.varlen or (inputs.lengths is not None and sum(inputs.lengths) == problem.T)
    o = (torch.empty if covered else torch.zeros)(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    G = gate_cumsum(problem, config, plan, inputs.g, inputs.A_log, inputs.dt_bias)
    Aqk, w, u, kg, qg = prepare(problem, config, plan, inputs.q, inputs.k, inputs.v, G, inputs.beta)
    h = entries = None
    if problem.return_intermediate_states:
        entries = inputs.plan(problem, problem.chunk_size)
        h = torch.zeros(entries.num_chunks, problem.HV, problem.K, problem.V, dtype=problem.dtype, device=o.device)
    final_state = scan_output(problem, config, plan, w, kg, u, G, qg, Aqk, o, inputs.initial_state, h, entries)
    return o, final_state, None if h is None else chunk_entry_states(problem, inputs, h)


def chunk_entry_states(problem: Problem, inputs: Inputs, h: torch.Tensor) -> torch.Tensor:
    """h [NC, HV, K, V] by plan entry -> [B, NT, HV, K, V] (or V first); ragged: [1, chunks in use, HV, K, V]."""
    if problem.state_v_first:
        h = h.transpose(-1, -2).contiguous()
    if problem.varlen:
        if inputs.lengths is not None:
            h = h[: sum(-(-length // problem.chunk_size) for length in inputs.lengths)]
        return h[None]
    return h.unflatten(0, (problem.B, -1)) if h.shape[0] else h.reshape(problem.B, 0, *h.shape[1:])
