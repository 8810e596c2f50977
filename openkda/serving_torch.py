"""Serving in plain torch: the CPU's own path, and the twin that the Triton kernels are tested against. All arithmetic in fp32.

Vectorised over sequences and heads, one step per token position. The rules of slots are those of openkda/serving_problem.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
import torch.nn.functional as F

from openkda.reference import prepare
from openkda.serving_problem import PoolProblem, StepProblem


def plain(run: Callable[..., None]) -> Callable[..., None]:
    """`run(problem, q, ..)` as the kernels run: no gradient recorded, whatever the dtypes that autocast would choose."""

    @wraps(run)
    def wrapped(problem: PoolProblem, q: torch.Tensor, *tensors: torch.Tensor | None) -> None:
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            run(problem, q, *tensors)

    return wrapped


def valid_slots(index: torch.Tensor, pad_slot: int, slots: int) -> torch.Tensor:
    """Which entries of an index tensor name a slot."""
    return (index > pad_slot) & (index < slots)


def read_slots(problem: PoolProblem, index: torch.Tensor, accepted: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slot [N] int64 that each sequence reads, whether there is one [N] bool, state_indices as [N, W] int64)."""
    index = index.long() if index.dim() == 2 else index.long()[:, None]
    if accepted is None:
        column, ok = index.new_zeros(index.shape[0]), index.new_ones(index.shape[0], dtype=torch.bool)
    else:
        column = accepted.long() - 1
        ok = (column >= 0) & (column < index.shape[1])
    slot = index.gather(1, torch.where(ok, column, 0)[:, None]).squeeze(1)
    ok = ok & valid_slots(slot, problem.pad_slot, problem.slots)
    return torch.where(ok, slot, 0), ok, index


def sequence_rows(problem: PoolProblem, cu_seqlens: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """First row and number of rows of every sequence, [N] each, clamped to the rows there are."""
    if cu_seqlens is None:
        first = torch.arange(problem.N, device=device) * problem.S
        return first, torch.full_like(first, problem.S)
    cu = cu_seqlens.long().clamp(0, problem.R)
    return cu[:-1], (cu[1:] - cu[:-1]).clamp(min=0)


def step_states(
    S: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of every sequence: S [n, HV, K, V], q, k, a = exp(g) [n, HV, K], v [n, HV, V], beta [n, HV] -> new S, S^T q [n, HV, V]."""
    S = S * a[..., None]
    r = beta[..., None] * (v - (k[..., None, :] @ S).squeeze(-2))
    S = S + k[..., None] * r[..., None, :]
    return S, (q[..., None, :] @ S).squeeze(-2)


@plain
def decode(
    problem: PoolProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, out: torch.Tensor,
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, pool: torch.Tensor, index: torch.Tensor, accepted: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:  # fmt: skip
    """kda_decode on any device: writes `out` and the slots of `pool`."""
    if problem.slots == 0:
        out.zero_()
        return
    q, k, v, g, beta = prepare(
        *(x.flatten(0, 1) for x in (q, k, v, gate, beta)), A_log=None if A_log is None else A_log.view(problem.HV),
        dt_bias=None if dt_bias is None else dt_bias.view(problem.HV, problem.K), gate=problem.gate, lower_bound=problem.lower_bound,
        qk_l2norm=problem.qk_l2norm, beta_sigmoid=problem.beta_sigmoid, neg_eigval=problem.neg_eigval,
    )  # fmt: skip
    q, a = q * problem.scale, g.exp()
    slot, ok, index = read_slots(problem, index, accepted)
    first, length = sequence_rows(problem, cu_seqlens, q.device)
    states = pool if not problem.state_v_first else pool.mT  # [slots, HV, K, V]
    S = torch.where(ok[:, None, None, None], states[slot], 0).float()
    o = torch.zeros(problem.R, problem.HV, problem.V, dtype=torch.float32, device=q.device)
    for t in range(int(length.max()) if problem.N else 0):
        n = (ok & (t < length)).nonzero().squeeze(1)
        row = first[n] + t
        S[n], o[row] = step_states(S[n], q[row], k[row], v[row], a[row], beta[row])
        if problem.per_token and problem.step_column + t < problem.W:
            target = index[n, problem.step_column + t]
            valid = valid_slots(target, problem.pad_slot, problem.slots)
            states[target[valid]] = S[n[valid]].to(pool.dtype)
    if problem.written and not problem.per_token:
        states[slot[ok]] = S[ok].to(pool.dtype)
    out.copy_(o.view(out.shape))


@plain
def fused_step(
    problem: StepProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, out: torch.Tensor,
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, pool: torch.Tensor, index: torch.Tensor, accepted: torch.Tensor | None,
    output_gate: torch.Tensor, norm_weight: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor | None,
    conv_pool: torch.Tensor,
) -> None:  # fmt: skip
    """kda_fused_decode on any device: convolution, kda_decode, gated RMSNorm one after the other."""
    if problem.slots == 0:
        out.zero_()
        return
    N, S, H, HV, K, V = problem.N, problem.S, problem.H, problem.HV, problem.K, problem.V
    slot, ok, columns = read_slots(problem, index, accepted)
    x = torch.cat([t.flatten(2) for t in (q, k, v)], -1).float()  # [N, S, C]
    old = torch.where(ok[:, None, None], conv_pool[slot], 0).float()  # [N, C, W - 1]
    taps = torch.cat([old, x.mT], -1)  # [N, C, W - 1 + S]
    y = F.conv1d(taps, conv_weight.float()[:, None], None if conv_bias is None else conv_bias.float(), groups=taps.shape[1])
    y = F.silu(y).mT.split([H * K, H * K, HV * V], -1)  # [N, S, ..] each
    y = [t.unflatten(-1, (-1, d)) for t, d in zip(y, (K, K, V))]
    o = torch.empty(N, S, HV, V, dtype=torch.float32, device=out.device)
    decode(problem, *y, gate, beta, o, A_log, dt_bias, pool, index, accepted, None)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + problem.norm_eps) * norm_weight.float() * torch.sigmoid(output_gate.float())
    out.copy_(o.masked_fill(~ok[:, None, None, None], 0))
    for t in range(S):
        if not problem.written or not (problem.per_token or t == S - 1):
            continue
        target = columns[:, problem.step_column + t] if problem.per_token else slot
        valid = ok & valid_slots(target, problem.pad_slot, problem.slots)
        conv_pool[target[valid]] = taps[valid, :, t + 1 : t + problem.taps].to(conv_pool.dtype)


def gather_states(pool: torch.Tensor, index: torch.Tensor, has_initial: torch.Tensor | None, pad_slot: int) -> torch.Tensor:
    """pool [slots, HV, ., .], index [N], has_initial [N] bool or None -> [N, HV, ., .] fp32, zero where there is nothing to read."""
    ok = valid_slots(index, pad_slot, pool.shape[0])
    if has_initial is not None:
        ok = ok & has_initial
    dense = torch.zeros(index.shape[0], *pool.shape[1:], dtype=torch.float32, device=pool.device)
    dense[ok] = pool[index[ok].long()].float()
    return dense


def scatter_states(dense: torch.Tensor, pool: torch.Tensor, index: torch.Tensor, pad_slot: int) -> None:
    """Write dense [N, HV, ., .] fp32 into the slots of index [N]."""
    ok = valid_slots(index, pad_slot, pool.shape[0])
    pool[index[ok].long()] = dense[ok].to(pool.dtype)


def clear_rows(out: torch.Tensor, cu_seqlens: torch.Tensor, index: torch.Tensor, slots: int, pad_slot: int) -> None:
    """Zero the rows of out [1, T, HV, V] that belong to sequences without a slot."""
    for n in (~valid_slots(index, pad_slot, slots)).nonzero().flatten().tolist():
        out[:, int(cu_seqlens[n]) : int(cu_seqlens[n + 1])].zero_()
