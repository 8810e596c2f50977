"""The torch backend's forward without gradients: KDA by chunks of 16 tokens, in place in one workspace, a segment of chunks at a time.

Names as in docs/math.md. With everything that does not need the state batched over chunks,

    kd, qd = exp(G) k, exp(G) q
    x      = v - kd S                                 values minus what the state predicts of them; Linv x = r
    o      = scale qd S + (Aqk Linv) x
    S'     = Diag(exp(G_C)) S + (Linv^T kg)^T x       beta scales Linv's columns

so the serial pass has two products per chunk, [qd; kd] S and (Linv^T kg)^T x, and neither w nor u is ever made. Scores, L, Linv and
Aqk Linv are kept transposed: a product with 16 rows and 32 columns takes a fifth less time than one with 32 rows and 16 columns. Scores in
one of two forms row by row: torch_scores.py says which and why. G is in base 2.
"""

from __future__ import annotations

import threading

import torch

from openkda.problem import Inputs, Problem
from openkda.reference import prepare
from openkda.torch_scores import CHUNK, SAFE_SPAN, SHIFT, any_gate, by_chunk, chunk_cumsum, exp2, sum_in_base_2, unsafe_chunks, whole_chunks

CPU_SEGMENT_ROWS = 2048  # token-heads prepared at a time on a CPU: what they need stays in the caches, and malloc keeps its pages
GPU_SEGMENT_ROWS = 1 << 18  # on a GPU the launches cost more than the memory does
_kept = threading.local()  # .last: (key, the workspace of this thread's last call on a CPU)


class Workspace:
    """What a segment of `chunks` chunks is computed in, with heads = B * HV. One allocation and one set of views, for every segment."""

    def __init__(self, chunks: int, B: int, HV: int, K: int, V: int, like: torch.Tensor) -> None:
        """Buffers in the dtype and on the device of `like`; what is never needed at one time shares its memory."""
        lead, flat, heads = (chunks, B, HV), chunks * B * HV, (chunks, B * HV)
        square = (CHUNK, CHUNK)
        shapes = ((2 * CHUNK, K), (CHUNK, K), (CHUNK, max(K, V)), (2 * CHUNK, V), (CHUNK, 2 * CHUNK), square, square, square, (1, K))
        sizes = [flat * rows * columns for rows, columns in shapes]
        pieces = [piece.view(flat, *shape) for piece, shape in zip(like.new_empty(sum(sizes)).split(sizes), shapes)]
        self.chunks = chunks
        self.read, self.late, shared, self.x, self.scores, self.L, Linv, self.Z, end = pieces  # [flat, rows, columns]
        self.Linv = Linv.mT  # in the order of memory that the solver writes
        self.read_columns, self.Z_rows = self.read.mT, self.Z.mT
        self.q_scores, self.k_scores = self.scores.split(CHUNK, 2)
        self.G = self.late.view(-1, CHUNK, HV * K)  # in the inputs' order, gone before late is made
        self.kg = shared.view(-1)[: flat * CHUNK * K].view(flat, CHUNK, K)
        self.local = shared.view(-1)[: flat * CHUNK * V].view(flat, CHUNK, V)  # made when kg has been used
        self.end = end.view(*lead, 1, K)  # exp(G_C)
        self.qd, self.kd = self.read.view(*lead, 2, CHUNK, K).unbind(3)  # [chunks, B, HV, CHUNK, K]: q exp(G), k exp(G)
        self.kg_out = self.kg.view(*lead, CHUNK, K)  # k exp(-G) / SHIFT, later kg
        self.values = self.x[:, CHUNK:]
        self.from_state, self.v = self.x.view(*lead, 2, CHUNK, V).unbind(3)  # -qd S; v, after the serial pass v - kd S
        self.local_out = self.local.view(*lead, CHUNK, V)  # (Aqk Linv) x
        of_chunks = (self.x, self.values, self.read, self.late.mT, end.mT)
        self.steps = tuple(zip(*(x.unflatten(0, heads).unbind() for x in of_chunks)))  # [-qd S; x], x, [qd; kd], (Linv^T kg)^T, exp(G_C)
        self.zero = like.new_zeros(1, 1, 1)
        self.eye = torch.eye(CHUNK, dtype=like.dtype, device=like.device) / SHIFT
        self.triangle = sum_in_base_2(like)


def workspace(chunks: int, B: int, HV: int, K: int, V: int, like: torch.Tensor) -> Workspace:
    """A Workspace of these sizes: the one that this thread's last call has left, or a new one, which takes a 60th of a call to make."""
    key = (chunks, B, HV, K, V, like.dtype, like.device, type(like))
    kept, work = _kept.__dict__.pop("last", (None, None))  # taken out, so that no other call can use it meanwhile
    if kept != key:
        work = Workspace(chunks, B, HV, K, V, like)
        work.key = key
    return work


def segment_tokens(problem: Problem, B: int, device: torch.device) -> int:
    """Tokens of B sequences that are prepared at a time, a multiple of chunk_size."""
    rows = CPU_SEGMENT_ROWS if device.type == "cpu" else GPU_SEGMENT_ROWS
    return max(1, rows // max(1, B * problem.HV * problem.chunk_size)) * problem.chunk_size


def sequences(
    problem: Problem, inputs: Inputs, tensors: tuple[torch.Tensor, ...], S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences of one length: q, k, v, g, beta [B, T, ..] and S [B, HV, K, V], the state at their entry.

    Returns o [B, T, HV, V] in v's dtype, S at their end, and the states at the entry of every problem.chunk_size tokens
    [B, NT, HV, K, V] in q's dtype (NT = 0 unless the problem asks for them)."""
    B, T = tensors[0].shape[:2]
    HV, K, V = problem.HV, problem.K, problem.V
    step = segment_tokens(problem, B, tensors[0].device)
    o = tensors[2].new_empty(B, T, HV, V)
    S = S.flatten(0, 1).clone().unflatten(0, (B, HV))  # the scan's view of it, flattened again, must be no copy, however S lies in memory
    h = tensors[0].new_empty(B, -(-T // problem.chunk_size) if problem.return_intermediate_states else 0, HV, K, V)
    if T == 0:
        return o, S, h
    wanted, sizes = iter(h.unbind(1)), (B, HV, K, V, S)
    with torch.inference_mode():  # no bookkeeping of views and versions
        first = work = workspace(-(-min(T, step) // CHUNK), *sizes)
        for *given, out in zip(*(x.split(step, 1) for x in (*tensors, o))):
            q, k, v, g, beta = prepare(
                *given, A_log=inputs.A_log, dt_bias=inputs.dt_bias, gate=problem.gate, lower_bound=problem.lower_bound,
                qk_l2norm=problem.qk_l2norm, beta_sigmoid=problem.beta_sigmoid, neg_eigval=problem.neg_eigval,
            )  # fmt: skip
            length = v.shape[1]
            whole = length % CHUNK == 0
            if not whole:
                q, k, v, g, beta = map(whole_chunks, (q, k, v, g, beta))
            chunks = v.shape[1] // CHUNK
            if work.chunks != chunks:
                work = Workspace(chunks, *sizes)
            _prepare(work, q, k, g, beta, problem.scale)
            work.from_state.zero_()
            work.v.copy_(by_chunk(v))
            _scan(work, S, dict(zip(range(0, chunks, problem.chunk_size // CHUNK), wanted)))
            torch.bmm(work.Z_rows, work.values, out=work.local)
            filled = out if whole else v.new_empty(v.shape)
            torch.sub(work.local_out, work.from_state, alpha=problem.scale, out=by_chunk(filled))
            if not whole:
                out.copy_(filled[:, :length])
    if S.device.type == "cpu" and first.chunks * CHUNK * B * HV <= CPU_SEGMENT_ROWS:
        _kept.last = (first.key, first)
    return o, S, h


def _prepare(work: Workspace, q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float) -> None:
    """What does not depend on the state, into work: read, late, Z and end.

    q, k, g [B, T, HV, K], g the log decay; beta [B, T, HV]; T whole chunks."""
    G = by_chunk(chunk_cumsum(g, work.triangle, work.G))  # [chunks, B, HV, CHUNK, K]
    unsafe = unsafe_chunks(G)
    row = G.exp2_() if unsafe is None else exp2(G)
    end = work.end.copy_(row[..., -1:, :])
    q, k, strength = by_chunk(q), by_chunk(k), by_chunk(beta).reshape(-1, CHUNK, 1) * SHIFT
    torch.mul(q, row, out=work.qd)
    torch.mul(k, row, out=work.kd)
    held = row if unsafe is None else row.clamp(min=2.0**-SAFE_SPAN)  # the rows held have their scores from elsewhere
    torch.addcdiv(work.zero, k, held, value=1 / SHIFT, out=work.kg_out)
    torch.bmm(work.kg, work.read_columns, out=work.scores)
    work.kg_out.mul_(end * SHIFT)
    if unsafe is not None:
        chosen = slice(None) if len(unsafe) == len(work.scores) else unsafe  # all of them: nothing to gather
        picked = (x.flatten(0, 2)[chosen] for x in (q, k, G))
        scores, work.kg[chosen] = any_gate(*picked, work.scores[chosen].mT)
        work.scores[chosen] = scores.mT
    L = torch.mul(work.k_scores, strength.mT, out=work.L)  # the solver reads the strictly upper part alone
    # To the left of the inverse the solver takes half the time that it takes to the right.
    Linv = torch.mul(work.eye, strength, out=work.Linv)
    torch.linalg.solve_triangular(L, Linv, upper=True, unitriangular=True, left=False, out=Linv)
    torch.baddbmm(work.zero, Linv, work.q_scores.triu_(), beta=0, alpha=scale * SHIFT, out=work.Z)
    torch.bmm(Linv, work.kg, out=work.late)


def _scan(work: Workspace, S: torch.Tensor, entries: dict[int, torch.Tensor]) -> None:
    """The serial pass: work.x from [0; v] to [-qd S; x], S [B, HV, K, V] from the first chunk's entry to the last one's exit.

    entries: chunk -> [B, HV, K, V], filled with the state at that chunk's entry."""
    state = S.flatten(0, 1)
    for n, (both, x, read, late, decay) in enumerate(work.steps):
        if n in entries:
            entries[n].copy_(S)
        both.baddbmm_(read, state, alpha=-1)
        state.mul_(decay).baddbmm_(late, x)
