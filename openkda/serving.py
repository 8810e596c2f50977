"""Serving: decoding and prefill against a paged pool of states, in place, by slot index.

The raw contract throughout: `gate` and `beta` are logits (activation and sigmoid happen inside, in fp32), q and k are L2-normalised inside
unless asked not to. A pool belongs to the engine: slots may lie at any distance, other data may lie between them, and no slot but those
named is read or written. openkda/serving_problem.py has the rules of slots, pads, speculation and verification.

The kernels' calls never wait for the device; the torch backend does, and a prefill with checkpoints but no cu_seqlens_cpu. Eager calls go
straight to the kernels; under torch.compile, and for fake tensors, the same functions run as the custom operators openkda::kda_decode and
openkda::kda_prefill.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import index
from typing import NamedTuple

import torch

from openkda import backends, serving_torch
from openkda.problem import check_cu_seqlens, describe, fail, through_operator
from openkda.serving_problem import (
    INDEX_DTYPES,
    Options,
    check_decode,
    check_indices,
    check_like,
    check_pool,
    check_scalars,
    check_types,
    layout,
)


def kda_decode(
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
    out: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    pad_slot: int = -1,
    verify: bool = False,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """One or a few tokens of every sequence, the recurrent states read from and written to a pool.

    Args:
        q, k: [N, S, H, K] bf16, fp16 or fp32, one dtype with v; S >= 1 tokens per sequence; K from 1 to 256.
        v: [N, S, HV, V]; HV a multiple of H; V from 1 to 256.
        gate: [N, S, HV, K] logits. beta: [N, S, HV] logits. bf16, fp16 or fp32 each.
            These five may be slices of one packed projection: token rows at one distance, a head's vector contiguous.
        A_log: [HV], None allowed with lower_bound. dt_bias: [HV * K] or [HV, K] or None. fp32, bf16 or fp16.
        lower_bound: in [-5, 0): decay lower_bound * sigmoid(exp(A_log) * (gate + dt_bias)); None: -exp(A_log) * softplus(gate + dt_bias).
        state_pool: [slots, HV, V, K] ([slots, HV, K, V] with state_v_first=False), fp32 or bf16, any stride(0). Updated in place.
        state_indices: [N] or [N, W], int32 or int64, any strides. A pad (index < 0; with pad_slot=0 index <= 0) and an index >= slots
            read and write nothing, and that sequence's output is 0. Sequences that name the same slot in one call race: their outputs
            and that slot are undefined, everything else is unaffected.
        out: [N, S, HV, V], written and returned when given; else allocated in v's dtype.
        num_accepted: [N] int32 or int64 with state_indices [N, W]: the state is read from column num_accepted - 1; a value outside
            1 .. W skips the sequence like a pad. With W >= 2 the state after token t is written to column t.
        cu_seqlens: [N + 1]: the sequences have different lengths and are packed, tensors [1, T, ..]; rows past the last one give 0. Its
            values are not looked at on the host: bounds outside the T rows count as the nearest row.
        verify: leave the slot that is read as it is. The state after token t goes to column t + 1, or nowhere with one column.
        scale: factor on q, default K ** -0.5.
        backend: None (Triton on a GPU, torch on a CPU), "portable" or "torch".

    Returns:
        o [N, S, HV, V].

    Raises:
        ValueError, TypeError: one sentence naming the argument, its value and what is allowed. Also when a gradient would be needed.
    """
    if out is None:
        out = _empty_like(v)
    options = (lower_bound, scale, pad_slot, verify, use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, True, True, False, backend)
    tensors = (q, k, v, gate, beta, out, A_log, dt_bias, state_pool, state_indices, num_accepted, cu_seqlens)
    _run_decode(tensors, options)
    return out


def recurrent_in_pool(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, scale: float | None, state_pool: torch.Tensor, state_indices: torch.Tensor | None,
    num_accepted: torch.Tensor | None, cu_seqlens: torch.Tensor | None, out: torch.Tensor | None, use_gate_in_kernel: bool,
    use_qk_l2norm_in_kernel: bool, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, lower_bound: float | None,
    state_v_first: bool, backend: str | None, cu_seqlens_cpu: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """fused_recurrent_kda with its states in a pool: kda_decode with every input stage optional. Without state_indices slot n is n's.

    cu_seqlens is checked where the host has it: as cu_seqlens_cpu, or on the CPU itself."""
    if state_pool is None:
        raise fail("initial_state", None, "the state pool when states are updated in place")
    names = ("q", "k", "v", "g", "beta", "initial_state", "state_indices", "num_accepted", "cu_seqlens", "out")
    check_types(names, (q, k, v, g, beta, state_pool, state_indices, num_accepted, cu_seqlens, out), names[:6])
    if q.dim() != 4:
        raise fail("q's shape", list(q.shape), "[B, T, H, K]")
    if cu_seqlens is not None:
        _check_bounds(cu_seqlens, cu_seqlens_cpu, q.shape[1])
    elif cu_seqlens_cpu is not None:
        raise fail("cu_seqlens_cpu", "given", "None without cu_seqlens")
    if state_indices is None:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state_pool.dim() == 0 or state_pool.shape[0] != N:
            raise fail("initial_state's shape", list(state_pool.shape), f"[{N}, ..], one state per sequence, without state_indices")
        state_indices = torch.arange(N, device=q.device)
    if out is None:
        out = torch.empty_like(v)
    tensors = (q, k, v, g, beta, out, A_log, dt_bias, state_pool, state_indices, num_accepted, cu_seqlens)
    flags = (use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first, use_gate_in_kernel, use_beta_sigmoid_in_kernel)
    _run_decode(tensors, (lower_bound, scale, -1, False, *flags, True, backend))
    return out


def _run_decode(tensors: tuple[torch.Tensor | None, ...], options: tuple) -> None:
    """Straight to the kernel, or through the operator where something traces the call."""
    if through_operator(tensors[0]):
        check_types(_DECODE_TENSORS, tensors, _DECODE_TENSORS[:6])
        check_scalars(*options[:3], options[-1])
        torch.ops.openkda.kda_decode(*tensors, *options[:3], *map(bool, options[3:-1]), options[-1])
    else:
        _decode(tensors, options)


def _decode(tensors: tuple[torch.Tensor | None, ...], options: tuple) -> None:
    launch = find_launch(_launches, _decode_launch, _DECODE_TENSORS, tensors, options)
    if torch.is_grad_enabled() and any(tensors[i].requires_grad for i in (0, 1, 2, 3, 4, 8)):  # q, k, v, gate, beta, state_pool
        name = "fused_recurrent_kda with states in place" if options[-2] else "kda_decode"
        raise ValueError(f"{name} has no gradient; call it under torch.no_grad(), or chunk_kda for training")
    launch(*tensors)


_DECODE_TENSORS = (
    "q", "k", "v", "gate", "beta", "out", "A_log", "dt_bias", "state_pool", "state_indices", "num_accepted", "cu_seqlens",
)  # fmt: skip
_launches: dict[tuple, Callable[..., None]] = {}  # what runs a kind of call, its checks done; about one per batch size
MAX_LAUNCHES = 4096  # kept at a time


def _signature(t: torch.Tensor | None) -> tuple | None:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.get_device())


def call_key(names: Sequence[str], tensors: Sequence[torch.Tensor | None], options: tuple) -> tuple:
    """Everything that the checks and the launch read of a call, but addresses. TypeError for what is no tensor."""
    try:
        return (*map(_signature, tensors), options)
    except AttributeError:
        name, t = next((n, t) for n, t in zip(names, tensors) if not (t is None or isinstance(t, torch.Tensor)))
        raise TypeError(f"{name} is a {type(t).__name__}; it must be a torch.Tensor") from None


def find_launch(
    launches: dict[tuple, Callable[..., None]], build: Callable[..., Callable[..., None]], names: Sequence[str],
    tensors: tuple[torch.Tensor | None, ...], options: tuple,
) -> Callable[..., None]:  # fmt: skip
    """What runs this kind of call: remembered, or built once its checks have passed."""
    key = call_key(names, tensors, options)
    try:
        return launches[key]
    except (KeyError, TypeError):  # TypeError: an option that cannot be hashed, which the checks refuse
        pass
    launch = build(tensors, *options)
    if len(launches) >= MAX_LAUNCHES:
        launches.clear()
    launches[key] = launch
    return launch


def _empty_like(v: torch.Tensor) -> torch.Tensor:
    if not isinstance(v, torch.Tensor):
        raise TypeError(f"v is a {type(v).__name__}; it must be a torch.Tensor")
    return torch.empty_like(v)


def common_device(tensors: Sequence[torch.Tensor | None]) -> torch.device:
    """The device all tensors share; ValueError when they do not share one."""
    devices = {t.device for t in tensors if t is not None}
    if len(devices) != 1:
        raise ValueError(f"the tensors lie on {', '.join(sorted(map(str, devices)))}; all must be on q's device")
    return devices.pop()


def _decode_launch(tensors: tuple[torch.Tensor | None, ...], *options: object) -> Callable[..., None]:
    """Checks of one kind of call, and what runs it: called with the tensors of `_decode`."""
    *options, backend = options
    check_scalars(*options[:3], backend)
    device = common_device(tensors)
    problem = check_decode(*map(layout, tensors), Options(*options[:3], *map(bool, options[3:])))
    if choose_backend(device, backend) == "torch":
        return partial(serving_torch.decode, problem)
    from openkda.portable.decode import decode_launch  # Triton may be absent where the torch path serves

    return decode_launch(problem, device)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def choose_backend(device: torch.device, backend: str | None) -> str:
    """The backend of a decode call: Triton on a GPU, torch on a CPU, or the one asked for."""
    if backend not in (None, "portable", "torch"):
        raise fail("backend", repr(backend), "None, 'portable' or 'torch'")
    if backend == "torch" or (backend is None and device.type != "cuda"):
        return "torch"
    if not _has_triton():
        reason = "it needs Triton, which is not installed"
    else:
        from openkda.portable.decode import why_not_device

        reason = why_not_device(device.type)
    if reason is None:
        return "portable"
    if backend is None:
        return "torch"
    raise ValueError(f"backend is {backend!r}, which cannot serve this call: {reason}")


def _check_bounds(cu: torch.Tensor, cu_cpu: torch.Tensor | None, T: int) -> None:
    """Shape and dtype of cu_seqlens, and its values where the host has them."""
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise fail("cu_seqlens's shape", list(cu.shape), "[N + 1]")
    if cu.dtype not in INDEX_DTYPES:
        raise fail("cu_seqlens's dtype", cu.dtype, "torch.int32 or torch.int64")
    if through_operator(cu):
        return
    if cu_cpu is not None or cu.device.type == "cpu":
        check_cu_seqlens(cu, cu_cpu, T)


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
    names = (*_DECODE_TENSORS[:10], "has_initial_state", "cu_seqlens", "cu_seqlens_cpu")
    tensors = (q, k, v, gate, beta, out, A_log, dt_bias, state_pool, state_indices, has_initial_state, cu_seqlens, cu_seqlens_cpu)
    check_types(names, tensors, names[:5])
    if out is None:
        out = torch.empty_like(v)
    states, sequence, offset = (None, [], []) if checkpoints is None else _listed(checkpoints)
    pooled = (state_pool, state_indices, has_initial_state, cu_seqlens, cu_seqlens_cpu, states, sequence, offset)
    flags = (use_qk_l2norm_in_kernel, allow_neg_eigval, state_v_first)
    options = (lower_bound, scale, pad_slot, *map(bool, flags), backend)
    if through_operator(q):
        check_scalars(lower_bound, scale, pad_slot, backend)
        torch.ops.openkda.kda_prefill(q, k, v, gate, beta, out, A_log, dt_bias, *pooled, *options)
    else:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, gate, beta, state_pool)):
            raise ValueError("kda_prefill has no gradient; call it under torch.no_grad(), or chunk_kda for training")
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
    _check_bounds(cu_seqlens, cu_seqlens_cpu, q.shape[1])
    N, (HV, V), K = cu_seqlens.shape[0] - 1, v.shape[2:], q.shape[3]
    check_pool(layout(state_pool), HV, K, V, state_v_first)
    if state_indices is None or state_indices.dim() != 1:
        raise fail("state_indices's shape", None if state_indices is None else list(state_indices.shape), f"[{N}]")
    check_indices(layout(state_indices), N, None, pad_slot)
    check_like("out", layout(out), tuple(v.shape), (torch.bfloat16, torch.float16, torch.float32))
    if out.shape[1] and not out[0, 0].is_contiguous():
        raise fail("out's strides", list(out.stride()), "dense inside a token")
    if has_initial_state is not None:
        check_like("has_initial_state", layout(has_initial_state), (N,), (torch.bool,))
    common_device((q, state_pool, state_indices, has_initial_state, cu_seqlens, out, states))
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


_SHARED = (
    "Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor(a!) out, Tensor? A_log, Tensor? dt_bias, Tensor(b!) state_pool, "
    "Tensor state_indices, "
)
_DECODE_SCHEMA = (
    _SHARED + "Tensor? num_accepted, Tensor? cu_seqlens, float? lower_bound, float? scale, int pad_slot, bool verify, bool qk_l2norm, "
    "bool neg_eigval, bool state_v_first, bool gate_in_kernel, bool beta_sigmoid, bool recurrent, str? backend) -> ()"
)
_PREFILL_SCHEMA = (
    _SHARED + "Tensor? has_initial_state, Tensor cu_seqlens, Tensor? cu_seqlens_cpu, Tensor(c!)? checkpoint_states, int[] sequence, "
    "int[] offset, float? lower_bound, float? scale, int pad_slot, bool qk_l2norm, bool neg_eigval, bool state_v_first, str? backend) -> ()"
)
library = torch.library.Library("openkda", "DEF")
for _name, _schema, _run in (
    ("kda_decode", _DECODE_SCHEMA, lambda *args: _decode(args[:12], args[12:])),
    ("kda_prefill", _PREFILL_SCHEMA, _prefill),
):
    library.define(f"{_name}({_schema}")
    library.impl(_name, _run, "CPU")
    library.impl(_name, _run, "CUDA")
    torch.library.register_fake(f"openkda::{_name}", lambda *args: None, lib=library)
