"""KDA's chunk algorithm in plain torch: any device, differentiable, both kinds of gate at any magnitude. The CPU's own path.

Chunks of 32 tokens in two blocks of 16. With G the log decay summed from a block's entry, the decayed scores are

    across the blocks    (x_r exp(G_r)) . (k_i exp(G_end - G_i))   about the first block's last row: both factors at most 1
    within a block       (x_r exp(G_r)) . (k_i exp(-G_i))          for rows with G_r >= -SAFE_SPAN
                         level by level                            for the other rows, where exp(-G_i) could overflow

The choice of form is made row by row from the gates up to that row, so an output never depends on a later token, not even by rounding.
Level s = 1, 2, 4, 8: in every 2s rows the odd half meets the even half about the even half's last row a, exp(G_r - G_a) exp(G_a - G_i).

The inverse acts on the difference: r = Linv beta (v - decayed_k S), so the serial pass has three products per chunk. Ragged batches run
one sequence after the other: a sequence's result does not depend on its neighbours.
"""

from __future__ import annotations

import functools
import math

import torch

from openkda.problem import Inputs, Problem
from openkda.reference import prepare

CHUNK, BLOCK = 32, 16
SAFE_SPAN = 80.0  # 16 tokens at a lower bound of -5; split evenly by a constant shift, factors stay within exp(+-40) in fp32
CPU_SEGMENT_ROWS = 2048  # token-heads prepared at a time on a CPU: intermediates stay in cache, and memory does not grow with T
GPU_SEGMENT_ROWS = 1 << 18  # on a GPU the launches cost more than the memory does


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
    if not problem.varlen:
        o, S, h = _sequences(problem, inputs, tensors, S0)
    else:
        lengths = inputs.lengths
        if lengths is None:
            lengths = tuple((inputs.cu_seqlens[1:] - inputs.cu_seqlens[:-1]).tolist())
        outs, states, entries, row = [], [], [], 0
        for n, length in enumerate(lengths):
            piece = tuple(x[:, row : row + length] for x in tensors)
            o, S, h = _sequences(problem, inputs, piece, S0[n : n + 1])
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
    return o, final, flip(h) if problem.return_intermediate_states else None


def _sequences(
    problem: Problem, inputs: Inputs, tensors: tuple[torch.Tensor, ...], S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences of one length: o [B, T, HV, V], S [B, HV, K, V], h [B, NT, HV, K, V], a segment of whole chunks at a time."""
    B, T = tensors[0].shape[:2]
    rows = CPU_SEGMENT_ROWS if tensors[0].device.type == "cpu" else GPU_SEGMENT_ROWS
    step = max(1, rows // max(1, B * problem.HV * problem.chunk_size)) * problem.chunk_size
    every = problem.chunk_size // CHUNK
    outs, entries = [tensors[2][:, :0]], []
    for start in range(0, T, step):
        q, k, v, g, beta = prepare(
            *(x[:, start : start + step] for x in tensors), A_log=inputs.A_log, dt_bias=inputs.dt_bias, gate=problem.gate,
            lower_bound=problem.lower_bound, qk_l2norm=problem.qk_l2norm, beta_sigmoid=problem.beta_sigmoid, neg_eigval=problem.neg_eigval,
        )  # fmt: skip
        o, S, h = _segment(q, k, v, g, beta, S, problem.scale)
        outs.append(o.to(problem.dtype))
        entries += [x.to(problem.dtype) for x in h[::every]] if problem.return_intermediate_states else []
    empty = tensors[0].new_zeros(B, 0, problem.HV, problem.K, problem.V)
    return torch.cat(outs, 1), S, torch.stack(entries, 1) if entries else empty


def _segment(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, S: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """[B, T, HV, *] inputs, g the log decay; S [B, HV, K, V]. Returns o [B, T, HV, V], S, and the entry state of every chunk."""
    B, T, HV, _ = q.shape
    tail = -T % CHUNK
    q, k, v, g, beta = (_chunks(x, tail) for x in (q, k, v, g, beta[..., None]))  # [NT, B * HV, C, *]
    blocks = CHUNK // BLOCK
    G = g.unflatten(-2, (blocks, BLOCK)).cumsum(-2)  # [NT, heads, blocks, 16, K], from each block's entry
    total = G[..., -1:, :]
    row, rest = G.exp(), (total - G).exp()
    local = lambda x, factor: x.unflatten(-2, (blocks, BLOCK)) * factor
    qd, kd, kg = local(q, row), local(k, row), local(k, rest)
    diagonal_q, diagonal_k = diagonal_scores(q, k, G, row, qd, kd)

    decay = total.exp()  # [.., blocks, 1, K] of one block
    before = torch.cat([torch.ones_like(decay[..., :1, :, :]), decay[..., :-1, :, :].cumprod(-3)], -3)  # from chunk entry to block entry
    after = torch.cat([decay[..., 1:, :, :].flip(-3).cumprod(-3).flip(-3), torch.ones_like(decay[..., :1, :, :])], -3)
    off_q, off_k = (qd[..., 1, :, :] @ kg[..., 0, :, :].mT, kd[..., 1, :, :] @ kg[..., 0, :, :].mT)  # about the first block's last row
    whole = lambda d, off: torch.cat(
        [torch.cat([d[..., 0, :, :], torch.zeros_like(off)], -1), torch.cat([off, d[..., 1, :, :]], -1)], -2
    )  # [NT, heads, C, C]
    Aqk, L = scale * whole(diagonal_q, off_q), beta * whole(diagonal_k, off_k)
    eye = torch.eye(CHUNK, dtype=L.dtype, device=L.device).expand_as(L)
    Linv = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True) * beta.mT  # the unit diagonal is implied
    solve = torch.cat([Linv, Aqk @ Linv], -2)  # [NT, heads, 2C, C]
    read = torch.cat([(kd * before).flatten(-3, -2), (scale * qd * before).flatten(-3, -2)], -2)  # [NT, heads, 2C, K]
    write = (kg * after).flatten(-3, -2).mT  # [NT, heads, K, C]
    end = decay.prod(-3).mT  # [NT, heads, K, 1]

    S = S.flatten(0, 1)
    outs, entries = [], []
    for n in range(G.shape[0]):
        entries.append(S.unflatten(0, (B, HV)))
        predicted, o = (read[n] @ S).split(CHUNK, -2)
        r, inner = (solve[n] @ (v[n] - predicted)).split(CHUNK, -2)
        outs.append(o + inner)
        S = torch.baddbmm(end[n] * S, write[n], r)
    o = torch.stack(outs, 1).view(B, HV, T + tail, -1).transpose(1, 2)[:, :T]  # [B, T, HV, V]
    return o, S.unflatten(0, (B, HV)), entries


def _chunks(x: torch.Tensor, tail: int) -> torch.Tensor:
    """[B, T, HV, D] -> [NT, B * HV, C, D], the last chunk filled with zeros (log decay 0, key 0: rows that change nothing)."""
    B, _, HV, D = x.shape
    if tail:
        x = torch.cat([x, x.new_zeros(B, tail, HV, D)], 1)
    return x.view(B, -1, CHUNK, HV, D).permute(1, 0, 3, 2, 4).reshape(-1, B * HV, CHUNK, D)


def diagonal_scores(
    q: torch.Tensor, k: torch.Tensor, G: torch.Tensor, row: torch.Tensor, qd: torch.Tensor, kd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores within blocks of 16: sum_c x_r k_i exp(G_r - G_i) for x = q (i <= r) and x = k (i < r).

    q, k [.., C, K]; G [.., blocks, 16, K] from the block's entry; row = exp(G), qd = q row, kd = k row. Two of [.., blocks, 16, 16]."""
    k = k.unflatten(-2, G.shape[-3:-1])
    safe = G.amin(-1, keepdim=True) >= -SAFE_SPAN  # [.., blocks, 16, 1]; G falls, so every i <= r of a safe row r is safe
    ki = torch.where(safe, k * torch.exp(-SAFE_SPAN / 2 - G.clamp(min=-SAFE_SPAN)), 0.0)
    balance = math.exp(SAFE_SPAN / 2)
    scores_q = (qd @ ki.mT).tril() * balance
    scores_k = (kd @ ki.mT).tril(-1) * balance
    if not bool(safe.all()):
        level_q, level_k = level_scores(q.unflatten(-2, G.shape[-3:-1]), k, G)
        scores_q, scores_k = torch.where(safe, scores_q, level_q), torch.where(safe, scores_k, level_k)
    return scores_q, scores_k


def level_scores(q: torch.Tensor, k: torch.Tensor, G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """diagonal_scores for any gate; q, k, G [.., C, K] -> two of [.., C, C]."""
    C = q.shape[-2]
    qk = torch.stack([q, k], 0)  # [2, .., C, K]
    out = qk.new_zeros(*qk.shape[:-1], C)
    s = 1
    while s < C:
        even, odd = G.unflatten(-2, (-1, 2, s)).unbind(-3)  # [.., C / 2s, s, K]
        anchor = even[..., -1:, :]
        col = k.unflatten(-2, (-1, 2, s))[..., 0, :, :] * (anchor - even).exp()
        row = qk.unflatten(-2, (-1, 2, s))[..., 1, :, :] * (odd - anchor).exp()
        target = out.unflatten(-1, (-1, 2, s)).unflatten(-4, (-1, 2, s))  # [.., C / 2s, 2, s, C / 2s, 2, s]
        target.diagonal(dim1=-6, dim2=-3)[..., 1, :, 0, :, :].copy_((row @ col.mT).movedim(-3, -1))
        s *= 2
    return out[0] + torch.diag_embed((q * k).sum(-1)), out[1]


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
