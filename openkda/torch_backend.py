"""KDA's chunk algorithm in plain torch: any device, differentiable, both kinds of gate at any magnitude. The CPU's own path.

Chunks of 16 tokens in the equations of torch_forward.py, which computes them in place; here they are written for autograd, for the
gradients of a call. Ragged batches run one sequence after the other: a sequence's result does not depend on its neighbours.
"""

from __future__ import annotations

import functools

import torch

from openkda import torch_forward
from openkda.problem import Inputs, Problem
from openkda.reference import prepare
from openkda.torch_scores import CHUNK, SAFE_SPAN, SHIFT, any_gate, by_chunk, chunk_cumsum, exp2, sum_in_base_2, unsafe_chunks, whole_chunks


def without_autocast(function):
    """`function(problem, inputs)` outside any autocast region, which would run the products, the carried state's too, in 16 bits."""

    @functools.wraps(function)
    def call(problem: Problem, inputs: Inputs):
        with torch.autocast(inputs.q.device.type, enabled=False):
            return function(problem, inputs)

    return call


def why_not(problem: Problem) -> str | None:
    """The torch backend serves every valid problem."""
    return None


@without_autocast
def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """o [B, T, HV, V] in v's dtype; final_state (Problem.state_shape, state_dtype) or None; chunk-entry states or None.

    Chunk-entry states: [B, NT, HV, K, V] (V, K swapped when state_v_first) in q's dtype, NT chunks in all when ragged. A ragged batch
    whose lengths the host does not know yet waits for the device to read them."""
    dtype = torch.float64 if problem.dtype == torch.float64 else torch.float32
    S0 = inputs.initial_state
    if S0 is None:
        S0 = inputs.q.new_zeros(problem.N, problem.HV, problem.K, problem.V, dtype=dtype)
    else:
        S0 = (S0.transpose(-1, -2) if problem.state_v_first else S0).to(dtype)  # [N, HV, K, V]
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    differentiable = (*tensors, inputs.A_log, inputs.dt_bias, S0)
    recorded = problem.transform != "none" or (torch.is_grad_enabled() and any(x.requires_grad for x in differentiable if x is not None))
    sequences = _recorded if recorded else torch_forward.sequences
    if not problem.varlen:
        o, S, h = sequences(problem, inputs, tensors, S0)
    else:
        lengths = inputs.lengths
        if lengths is None:
            lengths = tuple(inputs.cu_seqlens.clamp(0, problem.T).cummax(0).values.diff().tolist())  # unchecked: bounded as in plan.py
        outs, states, entries, row = [], [], [], 0
        for n, length in enumerate(lengths):
            piece = tuple(x[:, row : row + length] for x in tensors)
            o, S, h = sequences(problem, inputs, piece, S0[n : n + 1])
            outs.append(o)
            states.append(S)
            entries.append(h)
            row += length
        outs.append(inputs.v.new_zeros(1, problem.T - row, problem.HV, problem.V))
        o = torch.cat(outs, 1)
        S = torch.cat(states, 0) if states else S0
        h = torch.cat(entries, 1) if entries else inputs.q.new_zeros(1, 0, problem.HV, problem.K, problem.V)
    flip = (lambda x: x.transpose(-1, -2).contiguous()) if problem.state_v_first else (lambda x: x)
    final = flip(S).to(problem.state_dtype) if problem.output_final_state else None
    if final is not None and problem.T == 0:
        final = final.clone()  # no token changed the state; the result is the caller's own all the same
    return o, final, flip(h) if problem.return_intermediate_states else None


def _recorded(
    problem: Problem, inputs: Inputs, tensors: tuple[torch.Tensor, ...], S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch_forward.sequences for autograd, bit by bit. No chunk-entry states: a call that asks for them has no gradients."""
    B, T = tensors[0].shape[:2]
    step = torch_forward.segment_tokens(problem, B, tensors[0].device)
    outs = [tensors[2][:, :0]]
    for start in range(0, T, step):
        q, k, v, g, beta = prepare(
            *(x[:, start : start + step] for x in tensors), A_log=inputs.A_log, dt_bias=inputs.dt_bias, gate=problem.gate,
            lower_bound=problem.lower_bound, qk_l2norm=problem.qk_l2norm, beta_sigmoid=problem.beta_sigmoid, neg_eigval=problem.neg_eigval,
        )  # fmt: skip
        o, S = _segment(q, k, v, g, beta, S, problem.scale)
        outs.append(o.to(problem.dtype))
    return torch.cat(outs, 1), S, tensors[0].new_zeros(B, 0, *S.shape[1:])


def _segment(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, S: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, v, g [B, T, HV, *], g the log decay, beta [B, T, HV], S [B, HV, K, V]. Returns o [B, T, HV, V] and S."""
    B, T, HV, _ = q.shape
    q, k, v, g, beta = (whole_chunks(x) for x in (q, k, v, g, beta[..., None]))
    G = chunk_cumsum(g, sum_in_base_2(g))
    q, k, v, G, beta = (by_chunk(x).flatten(1, 2).contiguous() for x in (q, k, v, G, beta))  # [NT, heads, C, *]
    unsafe = unsafe_chunks(G)
    row = G.exp2() if unsafe is None else exp2(G)
    end = row[..., -1:, :]  # [NT, heads, 1, K]
    # k exp2(-G) as a quotient costs a fifth of the exponential, but its own gradient passes through exp2(-2G), which overflows: it is
    # taken by a constant, times exp2(0) whose gradients are those of the exponential.
    held = (row if unsafe is None else row.clamp(min=2.0**-SAFE_SPAN)).detach()
    ki = k * (1 / SHIFT) / held * (G.detach() - G).exp2()
    kg = ki * (end * SHIFT)
    read = torch.cat([q * row, k * row], -2)  # [NT, heads, 2C, K]
    scores = _bmm(ki, read.mT)  # [NT, heads, C, 2C], less SHIFT; like what comes of them, transposed
    if unsafe is not None:
        new, kg_new = any_gate(*(x.flatten(0, 1).index_select(0, unsafe) for x in (q, k, G, scores.mT)))
        scores, kg = (x.flatten(0, 1).index_copy(0, unsafe, y).view_as(x) for x, y in zip((scores, kg), (new.mT, kg_new)))
    strength = beta * SHIFT
    L = scores[..., CHUNK:] * strength.mT  # the solver reads the strictly upper part alone
    eye = torch.eye(CHUNK, dtype=L.dtype, device=L.device) / SHIFT
    Linv = torch.linalg.solve_triangular(L, eye * strength, upper=True, unitriangular=True, left=False)
    Z = _bmm(Linv, scores[..., :CHUNK].triu(), scale * SHIFT)
    late = _bmm(Linv, kg)
    start = torch.cat([torch.zeros_like(v), v], -2)
    products, state = [], S.flatten(0, 1)
    for start_n, read_n, late_n, end_n in zip(start.unbind(), read.unbind(), late.mT.unbind(), end.mT.unbind()):
        product = torch.baddbmm(start_n, read_n, state, alpha=-1)  # [-qd S; x]
        state = torch.baddbmm(end_n * state, late_n, product[:, CHUNK:])
        products.append(product)
    from_state, x = torch.stack(products).split(CHUNK, -2)
    o = torch.sub(_bmm(Z.mT, x), from_state, alpha=scale)
    o = o.unflatten(1, (B, HV)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :T]  # [B, T, HV, V]
    return o, state.unflatten(0, (B, HV))


def _bmm(a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """alpha a b over the two leading dimensions."""
    return torch.baddbmm(a.new_zeros(1, 1, 1), a.flatten(0, 1), b.flatten(0, 1), beta=0, alpha=alpha).unflatten(0, a.shape[:2])


@without_autocast
def recurrent(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token by token, all sequences abreast (the longest first, so that those still running are a prefix)."""
    q, k, v, g, beta = prepare(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, A_log=inputs.A_log, dt_bias=inputs.dt_bias, gate=problem.gate,
        lower_bound=problem.lower_bound, qk_l2norm=problem.qk_l2norm, beta_sigmoid=problem.beta_sigmoid, neg_eigval=problem.neg_eigval,
    )  # fmt: skip
    device = q.device
    rows = lambda x: x.flatten(0, 1)  # [B * T, ...]
    q, k, v, g, beta = rows(q * problem.scale), rows(k), rows(v), rows(g.exp()), rows(beta)
    if problem.varlen:
        cu = inputs.cu_seqlens.long()
        first, length = cu[:-1], cu[1:] - cu[:-1]
    else:
        first = torch.arange(problem.N, device=device) * problem.T
        length = torch.full((problem.N,), problem.T, device=device)
    order = torch.argsort(length, descending=True, stable=True)
    first, length = first[order], length[order].tolist()
    if inputs.initial_state is None:
        S = v.new_zeros(problem.N, problem.HV, problem.K, problem.V)
    else:
        S = (inputs.initial_state.mT if problem.state_v_first else inputs.initial_state).to(v.dtype)[order]  # [N, HV, K, V]
    finished, tokens, outs = [], [], []
    running = len(length)
    for t in range(length[0] if length else 0):
        while length[running - 1] <= t:
            running -= 1
        finished.append(S[running:])
        row = first[:running] + t
        S = S[:running] * g[row][..., None]
        r = beta[row][..., None] * (v[row] - (k[row][..., None, :] @ S).squeeze(-2))  # [running, HV, V]
        S = S + k[row][..., None] * r[..., None, :]
        outs.append((q[row][..., None, :] @ S).squeeze(-2))
        tokens.append(row)
    o = v.new_zeros(problem.B * problem.T, problem.HV, problem.V)
    if tokens:
        o = o.index_copy(0, torch.cat(tokens), torch.cat(outs))
    o = o.view(problem.B, problem.T, problem.HV, problem.V).to(problem.dtype)
    if not problem.output_final_state:
        return o, None
    final = torch.cat([S, *reversed(finished)])[torch.argsort(order)]  # the shortest finished first, so the order is restored backwards
    return o, (final.mT.contiguous() if problem.state_v_first else final).to(problem.state_dtype)
