"""Serving: prompts, whole or in pieces, that continue from states in a paged pool and leave theirs there.

The chunk forward of a backend between a gather of the states and a scatter. The custom operator is openkda::kda_prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import NamedTuple

import torch

from openkda import backends, serving_torch
from openkda.problem import FLOAT_DTYPES, check_bounds, check_cu_seqlens, describe, fail, through_operator
from openkda.serving import TENSORS, choose_backend, common_device, define
from openkda.serving_problem import check_indices, check_like, check_no_gradient, check_pool, check_scalars, check_types, layout


class Checkpoints(NamedTuple):
    """States to be kept during prefill. Entry m: the state of sequence `sequence[m]` after `offset[m]` tokens of this call."""

    states: torch.Tensor  # [M, HV, V, K] fp32 or the pool's dtype, V and K as in the pool; written
    sequence: Sequence[int]  # M
    offset: Sequence[int]  # M multiples of 16, from 16 to the sequence's length


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor | None = None,
    checkpoints: Checkpoints | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    pad_slot: int = -1,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """Whole prompts, or the next piece of them, of N sequences of any lengths, continuing from states in a pool.

    Args:
        q, k [1, T, H, K], v [1, T, HV, V], gate [1, T, HV, K], beta [1, T, HV], A_log, dt_bias, lower_bound, scale: as kda_decode.
        state_pool: [slots, HV, V, K] ([slots, HV, K, V] with state_v_first=False), fp32 or bf16, any stride(0). The state after each
            sequence's last token is written to its slot; an empty sequence writes the state it began with.
        state_indices: [N] int32 or int64, any stride; pads and indices out of range as in kda_decode.
        has_initial_state: [N] bool; False starts from zero whatever the slot holds. None: all True.
        cu_seqlens: [N + 1] int32 or int64, from 0 to at most T; rows past the last sequence give 0. Lengths from one token up may be
            mixed. Checked where the host has it: cu_seqlens_cpu, or itself on the CPU. On a GPU it is read only if checkpoints need it.
        checkpoints: states to keep, see Checkpoints. The prompt is cut there, so each costs a launch of the chunk kernels; the lengths
            are needed on the host, so pass cu_seqlens_cpu to avoid waiting for the device.
        out: [1, T, HV, V], written and returned when given.
        backend: None (the best that serves), "hopper", "portable" or "torch".

    Returns:
        o [1, T, HV, V].

    Raises:
        ValueError, TypeError: one sentence naming the argument, its value and what is allowed. Also when a gradient would be needed.
    """
    names = (*TENSORS[:10], "has_initial_state", "cu_seqlens", "cu_seqlens_cpu")
    tensors = (q, k, v, gate, beta, out, A_log, dt_bias, state_pool, state_indices, has_initial_state, cu_seqlens, cu_seqlens_cpu)
    check_types(names, tensors, names[:5])
    if out is None:
        out = torch.empty_like(v)
    states, sequence, offset = (None, [], []) if checkpoints is None else _listed(checkpoints)
    pooled = (state_pool, state_indices, has_initial_state, cu_seqlens, cu_seqlens_cpu, states, sequence, offset)
    flags = (use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first)
    options = (lower_bound, scale, pad_slot, *map(bool, flags), backend)
    check_scalars(lower_bound, scale, pad_slot, backend)
    if through_operator(q):
        common_device(names[:-1], tensors[:-1])
        torch.ops.openkda.kda_prefill(q, k, v, gate, beta, out, A_log, dt_bias, *pooled, *options)
    else:
        check_no_gradient("kda_prefill", (q, k, v, gate, beta, state_pool), ", or chunk_kda for training")
        _prefill(q, k, v, gate, beta, out, A_log, dt_bias, *pooled, *options)
    return out


def _listed(checkpoints: Checkpoints) -> tuple[torch.Tensor, list[int], list[int]]:
    """A Checkpoints' states, and its sequences and offsets as lists of one length."""
    if not isinstance(checkpoints, tuple) or len(checkpoints) != 3:
        raise TypeError(f"checkpoints is a {type(checkpoints).__name__}; it must be a Checkpoints(states, sequence, offset) or None")
    states, *numbers = checkpoints
    check_types(("checkpoints.states",), (states,), ("checkpoints.states",))
    lists = []
    for name, given in zip(("sequence", "offset"), numbers):
        try:
            lists.append([index(n) for n in given])
        except TypeError:
            raise TypeError(f"checkpoints.{name} is {given!r}; it must be a sequence of ints") from None
    sequence, offset = lists
    if len(sequence) != len(offset):
        raise fail("checkpoints.offset's length", len(offset), f"{len(sequence)}, that of checkpoints.sequence")
    return states, sequence, offset


@torch.no_grad()
def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, out: torch.Tensor,
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, state_pool: torch.Tensor, state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, states: torch.Tensor | None,
    sequence: list[int], offset: list[int], lower_bound: float | None, scale: float | None, pad_slot: int, use_qk_l2norm_in_kernel: bool,
    allow_neg_eigval: bool, state_v_first: bool, backend: str | None,
) -> None:  # fmt: skip
    if cu_seqlens is None:
        raise fail("cu_seqlens", None, "a tensor [N + 1]")
    if v.dim() != 4 or q.dim() != 4:
        raise fail("v's shape" if v.dim() != 4 else "q's shape", list((v if v.dim() != 4 else q).shape), "[1, T, heads, head dim]")
    check_bounds(cu_seqlens, cu_seqlens_cpu, q.shape[1], wait=False)
    N, (HV, V), K = cu_seqlens.shape[0] - 1, v.shape[2:], q.shape[3]
    check_pool(layout(state_pool), HV, K, V, state_v_first)
    if state_indices is None or state_indices.dim() != 1:
        raise fail("state_indices's shape", None if state_indices is None else list(state_indices.shape), f"[{N}]")
    check_indices(layout(state_indices), N, None, pad_slot)
    check_like("out", layout(out), tuple(v.shape), FLOAT_DTYPES)
    if out.shape[1] and not out[0, 0].is_contiguous():
        raise fail("out's strides", list(out.stride()), "dense inside a token")
    if has_initial_state is not None:
        check_like("has_initial_state", layout(has_initial_state), (N,), (torch.bool,))
    check_like("gate", layout(gate), (*q.shape[:2], HV, K), FLOAT_DTYPES)
    others = dict(
        gate=gate, state_pool=state_pool, state_indices=state_indices, has_initial_state=has_initial_state, cu_seqlens=cu_seqlens, out=out
    )
    common_device(("q", *others, "checkpoints.states"), (q, *others.values(), states))
    pool = _pool_functions(q.device, backend)
    call = partial(
        describe, A_log=A_log, dt_bias=dt_bias, scale=scale, use_gate_in_kernel=True, lower_bound=lower_bound, safe_gate=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=allow_neg_eigval,
        output_final_state=True, return_intermediate_states=False, state_v_first=state_v_first, chunk_size=64,
    )  # fmt: skip

    def forward(tensors: Sequence[torch.Tensor], S: torch.Tensor, cu: torch.Tensor, cu_cpu: torch.Tensor | None) -> tuple:
        problem, inputs = call(*tensors, initial_state=S, cu_seqlens=cu, cu_seqlens_cpu=cu_cpu, check_lengths=cu_cpu is not None)
        return backends.module(backends.choose(problem, backend)).forward(problem, inputs)[:2]

    S = pool.gather_states(state_pool, state_indices, has_initial_state, pad_slot)
    if states is None:
        o, S = forward((q, k, v, gate, beta), S, cu_seqlens, cu_seqlens_cpu)
        out.copy_(o)
    else:
        check_like("checkpoints.states", layout(states), (len(offset), *state_pool.shape[1:]), (torch.float32, state_pool.dtype))
        lengths = check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, q.shape[1])
        whole = dict(initial_state=S, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, check_lengths=False)
        backends.choose(call(q, k, v, gate, beta, **whole)[0], backend)  # refusals come before pieces are cut and anything is written
        S = _forward_in_pieces(forward, (q, k, v, gate, beta), S, lengths, out, Checkpoints(states, sequence, offset))
    pool.scatter_states(S, state_pool, state_indices, pad_slot)
    pool.clear_rows(out, cu_seqlens, state_indices, state_pool.shape[0], pad_slot)


def _pool_functions(device: torch.device, backend: str | None) -> object:
    """The module with gather_states, scatter_states and clear_rows for tensors on `device`."""
    if choose_backend(device, "portable" if backend == "portable" else None) == "torch":
        return serving_torch
    from openkda.portable import pool

    return pool


def _forward_in_pieces(
    forward: Callable[..., tuple], tensors: tuple[torch.Tensor, ...], S: torch.Tensor, lengths: tuple[int, ...], out: torch.Tensor,
    checkpoints: Checkpoints,
) -> torch.Tensor:  # fmt: skip
    """Run every sequence up to its first checkpoint, all of them in one call, then on to the second, and so on. Returns the last states.

    The states between the pieces are fp32, so the cuts cost no precision."""
    kept: dict[int, dict[int, list[int]]] = {n: {} for n in range(len(lengths))}  # sequence -> offset -> entries of checkpoints
    for m, (n, p) in enumerate(zip(checkpoints.sequence, checkpoints.offset, strict=True)):
        if not 0 <= n < len(lengths):
            raise fail(f"checkpoints.sequence[{m}]", n, f"a sequence, 0 .. {len(lengths) - 1}")
        if p % 16 or not 0 < p <= lengths[n]:
            raise fail(f"checkpoints.offset[{m}]", p, f"a multiple of 16 from 16 to the sequence's length {lengths[n]}")
        kept[n].setdefault(p, []).append(m)
    device, start, pieces = out.device, 0, []
    for n, length in enumerate(lengths):
        ends = sorted({*kept[n], length})
        pieces.append([(start + a, start + b) for a, b in zip([0, *ends], ends)])
        start += length
    out[:, start:].zero_()
    S = S.clone()
    for i in range(max(map(len, pieces), default=0)):
        active = [n for n, p in enumerate(pieces) if i < len(p)]
        spans = [pieces[n][i] for n in active]
        bounds = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0)
        which = torch.tensor(active, device=device)
        if len(spans) == 1:
            rows = slice(*spans[0])
        else:
            rows = torch.cat([torch.arange(a, b, device=device) for a, b in spans])
        o, after = forward([t[:, rows] for t in tensors], S[which], bounds.to(device), bounds)
        out[:, rows] = o.to(out.dtype)
        S[which] = after
        for n, (_, end) in zip(active, spans):
            first = pieces[n][0][0]
            for m in kept[n].get(end - first, ()):
                checkpoints.states[m].copy_(S[n])
    return S


define(
    "kda_prefill(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor(a!) out, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(b!) state_pool, Tensor state_indices, Tensor? has_initial_state, Tensor cu_seqlens, Tensor? cu_seqlens_cpu, "
    "Tensor(c!)? checkpoint_states, int[] sequence, int[] offset, float? lower_bound, float? scale, int pad_slot, bool qk_l2norm, "
    "bool neg_eigval, bool state_v_first, str? backend) -> ()",
    _prefill,
)
