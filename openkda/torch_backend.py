"""KDA's chunk algorithm in plain torch: any device, differentiable, both kinds of gate at any magnitude. The CPU's own path.

Chunks of 16 tokens, the form of docs/math.md. With G the log decay summed from the chunk's entry, the decayed scores are

    (x_r exp(G_r)) . (k_i exp(-G_i))   for rows with G_r >= -SAFE_SPAN, which bounded gates never leave
    level by level                     for the other rows, where exp(-G_i) could overflow

The choice of form is made row by row from the gates up to that row, so an output never depends on a later token, not even by rounding.
Level s = 1, 2, 4, 8: in every 2s rows the odd half meets the even half about the even half's last row a, exp(G_r - G_a) exp(G_a - G_i).

The serial pass has two products per chunk, [qd; w] S and kg^T r; everything else is batched over chunks. Ragged batches run one sequence
after the other: a sequence's result does not depend on its neighbours.
"""

from __future__ import annotations

import functools
import math

import torch

from openkda.problem import Inputs, Problem
from openkda.reference import prepare

CHUNK = 16
SAFE_SPAN = 80.5  # 16 tokens at a lower bound of -5, and rounding; exp(-SAFE_SPAN) is a normal fp32 number
SHIFT = 2.0**57  # taken off exp(-G), which then stays within 2^+-59 and cannot overflow on a large key; exact, given back in the scores
CPU_SEGMENT_ROWS = 2048  # token-heads prepared at a time on a CPU: more, and every segment's memory comes as fresh pages from the system
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
            lengths = tuple(inputs.cu_seqlens.clamp(0, problem.T).cummax(0).values.diff().tolist())  # unchecked: bounded as in plan.py
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
    if final is not None and inputs.initial_state is not None and final.data_ptr() == inputs.initial_state.data_ptr():
        final = final.clone()  # no token changed the state; the result is the caller's own all the same
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
        o, S, h = _segment(q, k, v, g, beta, S, problem.scale, problem.return_intermediate_states)
        outs.append(o.to(problem.dtype))
        entries += [x.to(problem.dtype) for x in h[::every]]
    empty = tensors[0].new_zeros(B, 0, problem.HV, problem.K, problem.V)
    return torch.cat(outs, 1), S, torch.stack(entries, 1) if entries else empty


def _segment(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, S: torch.Tensor, scale: float, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """[B, T, HV, *] inputs, g the log decay; S [B, HV, K, V]. Returns o [B, T, HV, V], S, and with `keep` every chunk's entry state."""
    B, T, HV, _ = q.shape
    q, k, v, g, beta = (_chunks(x) for x in (q, k, v, g, beta[..., None]))  # [NT, B * HV, C, *]
    beta = beta.contiguous()
    G = g.cumsum(-2)
    unsafe = _unsafe_chunks(G[..., -1:, :])
    row = G.exp() if unsafe is None else _exp(G)
    last = row[..., -1:, :]  # [NT, heads, 1, K] decay of a whole chunk
    ki = _inverse_rows(k, row, G, unsafe)
    kg = ki * (last * SHIFT)
    qk = _stack_rows(q, k, row)  # [NT, heads, 2C, K]: q exp(G), k exp(G)
    scores = _batched(torch.bmm, qk, ki.mT)  # [NT, heads, 2C, C], less SHIFT
    if unsafe is not None:
        scores, kg = _any_gate(unsafe, q, k, G, scores, kg)
    Aqk = scores[..., :CHUNK, :].tril()
    L = scores[..., CHUNK:, :] * (beta * SHIFT)  # the solver reads the strictly lower part alone
    eye = torch.eye(CHUNK, dtype=L.dtype, device=L.device).expand_as(L)
    Linv = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True) * beta.mT
    w = _batched(torch.bmm, Linv, qk[..., CHUNK:, :])
    u = _batched(torch.bmm, Linv, v)
    scan = _scan if torch.is_grad_enabled() else _scan_in_place
    products, S, entries = scan(qk, w, u, kg.mT, last.mT, S.flatten(0, 1), keep)
    read, r = products.split(CHUNK, -2)
    o = _batched(torch.baddbmm, read, Aqk, r, beta=-scale, alpha=scale * SHIFT)
    o = o.unflatten(1, (B, HV)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :T]  # [B, T, HV, V]
    return o, S.unflatten(0, (B, HV)), [x.unflatten(0, (B, HV)) for x in entries]


def _inverse_rows(k: torch.Tensor, row: torch.Tensor, G: torch.Tensor, unsafe: torch.Tensor | None) -> torch.Tensor:
    """k exp(-G) / SHIFT, contiguous, where row = exp(G); rows beyond SAFE_SPAN are held at it, their scores come from elsewhere.

    A quotient costs a fifth of the exponential, but its own gradient passes through exp(-2G), which overflows. Under autograd its value
    is a constant, times exp(0) whose gradients are those of the exponential."""
    inverse = torch.div(torch.tensor(1 / SHIFT, dtype=row.dtype), row if unsafe is None else row.clamp(min=math.exp(-SAFE_SPAN)))
    return inverse.detach() * (G.detach() - G).exp() * k if torch.is_grad_enabled() else inverse.mul_(k)


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """[B, T, HV, D] -> [NT, B * HV, C, D], the last chunk filled with zeros (log decay 0, key 0: rows that change nothing)."""
    B, T, HV, D = x.shape
    if T % CHUNK:
        x = torch.cat([x, x.new_zeros(B, -T % CHUNK, HV, D)], 1)
    return x.reshape(B, x.shape[1] // CHUNK, CHUNK, HV, D).permute(1, 0, 3, 2, 4).flatten(1, 2)


def _batched(product, *tensors: torch.Tensor, **factors: float) -> torch.Tensor:
    """torch.bmm or torch.baddbmm over the two leading dimensions."""
    return product(*(x.flatten(0, 1) for x in tensors), **factors).unflatten(0, tensors[0].shape[:2])


def _stack_rows(q: torch.Tensor, k: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """[q * row; k * row] along the rows; without autograd each product is written once, where it belongs."""
    if torch.is_grad_enabled():
        return torch.cat([q * row, k * row], -2)
    out = row.new_empty(*row.shape[:2], 2 * CHUNK, row.shape[-1])
    torch.mul(q, row, out=out[..., :CHUNK, :])
    torch.mul(k, row, out=out[..., CHUNK:, :])
    return out


def _scan(
    qk: torch.Tensor, w: torch.Tensor, u: torch.Tensor, write: torch.Tensor, end: torch.Tensor, S: torch.Tensor, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The serial pass over chunks: r = u - w S, S' = Diag(end) S + write r.

    qk [NT, heads, 2C, K] (its upper half is read), w [.., C, K], u [.., C, V], write [.., K, C], end [.., K, 1], S [heads, K, V].
    Returns [-qd S; r] [NT, heads, 2C, V], the last S and, with `keep`, the entry states."""
    read = torch.cat([qk[..., :CHUNK, :], w], -2)
    start = torch.cat([torch.zeros_like(u), u], -2)
    products, entries = [start[:0]], []
    for start_n, read_n, write_n, end_n in zip(start.unbind(), read.unbind(), write.unbind(), end.unbind()):
        entries += [S] if keep else []
        product = torch.baddbmm(start_n, read_n, S, alpha=-1)
        S = torch.baddbmm(end_n * S, write_n, product[:, CHUNK:])
        products.append(product[None])
    return torch.cat(products), S, entries


def _scan_in_place(
    qk: torch.Tensor, w: torch.Tensor, u: torch.Tensor, write: torch.Tensor, end: torch.Tensor, S: torch.Tensor, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """_scan without autograd: overwrites qk and updates one copy of S. The same arithmetic in half the time."""
    qk[..., CHUNK:, :] = w
    products = qk.new_zeros(*qk.shape[:-1], u.shape[-1])
    products[..., CHUNK:, :] = u
    S, entries = S.clone(), []
    steps = zip(products.unbind(), products[..., CHUNK:, :].unbind(), qk.unbind(), write.unbind(), end.unbind())
    for product, r, read_n, write_n, end_n in steps:
        entries += [S.clone()] if keep else []
        product.baddbmm_(read_n, S, alpha=-1)
        S.mul_(end_n).baddbmm_(write_n, r)
    return products, S, entries


def _unsafe_chunks(total: torch.Tensor) -> torch.Tensor | None:
    """Indices into [NT * heads] of the chunks with a row beyond SAFE_SPAN, None where there are none; total [NT, heads, 1, K] = G_C."""
    if total.numel() == 0 or bool(total.amin() >= -SAFE_SPAN):
        return None
    return (total.amin((-2, -1)).flatten() < -SAFE_SPAN).nonzero().squeeze(-1)


def _exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x), zero below the normal range: subnormal results take a CPU ten times as long."""
    return torch.nn.functional.threshold(x, math.log(torch.finfo(x.dtype).tiny), -math.inf).exp()


def _any_gate(
    chunks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, G: torch.Tensor, scores: torch.Tensor, kg: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scores` and `kg` with the given chunks made right for any gate: the rows beyond SAFE_SPAN, and all of kg."""
    pick = lambda x: x.flatten(0, 1).index_select(0, chunks)
    put = lambda x, new: x.flatten(0, 1).index_copy(0, chunks, new).view_as(x)
    q, k, G = pick(q), pick(k), pick(G)
    safe = (G.amin(-1, keepdim=True) >= -SAFE_SPAN).repeat(1, 2, 1)  # [chunks, 2C, 1]; G falls, so they come first
    right = torch.where(safe, pick(scores), level_scores(q, k, G) / SHIFT)
    return put(scores, right), put(kg, k * _exp(G[..., -1:, :] - G))


def level_scores(q: torch.Tensor, k: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """Scores within a chunk for any gate: sum_c x_r k_i exp(G_r - G_i) for x = q (i <= r) above those for x = k (i < r).

    q, k, G [N, C, K], G falling from row to row -> [N, 2C, C]."""
    N, C, _ = q.shape
    out = torch.diag_embed(torch.stack([(q * k).sum(-1), q.new_zeros(N, C)], 1))  # [N, 2, C, C]
    s = 1
    while s < C:
        halves = lambda x, s=s: x.unflatten(1, (-1, 2, s)).unbind(2)  # even and odd blocks of s rows, [N, C / 2s, s, K] each
        even, odd = halves(G)
        anchor = even[:, :, -1:]
        decay = _exp(odd - anchor)
        rows = torch.cat([halves(q)[1] * decay, halves(k)[1] * decay], -2)  # [N, C / 2s, 2s, K]
        block = rows @ (halves(k)[0] * _exp(anchor - even)).mT  # [N, C / 2s, 2s, s]
        target = out.unflatten(3, (-1, 2, s)).unflatten(2, (-1, 2, s))  # [N, 2, C / 2s, 2, s, C / 2s, 2, s]
        target.diagonal(dim1=2, dim2=5)[:, :, 1, :, 0].copy_(block.unflatten(2, (2, s)).permute(0, 2, 3, 4, 1))
        s *= 2
    return out.flatten(1, 2)


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
