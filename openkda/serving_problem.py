"""What one serving call asks for: `PoolProblem`, its checks, and the rules of slots in one place.

Slots. `state_indices` [N] or [N, W] names slots of a pool. An index below `pad_slot + 1` (so: negative, or with pad_slot=0 also zero) is
a pad, an index at or past the pool's end is treated alike: such a sequence reads and writes nothing and its o is zeros. Columns:

    [N] or [N, 1]           the state is read from the slot and, after the last token, written back to it
    [N, W], W >= 2          read column num_accepted - 1 (column 0 without num_accepted), write the state after token t to column t
    num_accepted outside    1 .. W: the sequence is skipped like a pad
    verify=True             the slot that is read stays as it is: the state after token t goes to column t + 1, with one column nowhere

A ragged sequence may have more tokens than columns; the states past the last column are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import torch

from openkda.problem import FLOAT_DTYPES, INDEX_DTYPES, MAX_HEAD_DIM, check_lower_bound, check_number, check_scale, fail, transform_of

STATE_DTYPES = (torch.float32, torch.bfloat16)
MAX_STEP_TOKENS = 8  # tokens per sequence of a fused step; its loop over windows is unrolled
MAX_TAPS = 8  # of the short convolution


class Layout(NamedTuple):
    """What the checks read of a tensor; hashable, so that a repeated call costs one dictionary lookup."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def layout(t: torch.Tensor | None) -> Layout | None:
    """The layout of a tensor, None of None."""
    return None if t is None else Layout(t.shape, t.stride(), t.dtype)


def check_types(names: Sequence[str], tensors: Sequence[object], required: Collection[str] = ()) -> None:
    """TypeError for what is no tensor; None only passes where it is not among `required`."""
    for name, t in zip(names, tensors):
        if not isinstance(t, torch.Tensor) and (t is not None or name in required):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a torch.Tensor")


def check_scalars(lower_bound: object, scale: object, pad_slot: object, backend: object) -> None:
    """TypeError for a number or name of another type, which an operator's schema would refuse in words of its own; scale is finite."""
    check_number("lower_bound", lower_bound)
    check_scale(scale)
    if isinstance(pad_slot, bool) or not isinstance(pad_slot, int):
        raise TypeError(f"pad_slot is {pad_slot!r}; it must be an int")
    if not (backend is None or isinstance(backend, str)):
        raise TypeError(f"backend is a {type(backend).__name__}; it must be a str or None")


def check_no_gradient(name: str, tensors: Iterable[torch.Tensor | None], instead: str = "") -> None:
    """ValueError for a call whose gradient, or any other transform of torch's, would be lost: `name` has none (`instead` has)."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(f"{name} has no gradient; call it under torch.no_grad(){instead}")
    if transform_of(tensors) != "none":
        raise ValueError(f"{name} has no rule for torch.vmap, torch.func's transforms or forward-mode derivatives; call it outside of them")


@dataclass(frozen=True)
class Options:
    """The options that kda_decode and the fused step share."""

    lower_bound: float | None  # natural log; None: the softplus gate
    scale: float | None  # None: K ** -0.5
    pad_slot: int
    verify: bool
    qk_l2norm: bool
    neg_eigval: bool
    state_v_first: bool
    gate_in_kernel: bool  # gate holds logits; else it is the natural-log decay itself
    beta_sigmoid: bool  # beta holds logits; else it is the write strength itself
    recurrent: bool = False  # a call of fused_recurrent_kda, where the gate is `g` and the pool `initial_state`

    @property
    def gate_name(self) -> str:
        """What the caller calls the gate."""
        return "g" if self.recurrent else "gate"

    @property
    def pool_name(self) -> str:
        """What the caller calls the pool."""
        return "initial_state" if self.recurrent else "state_pool"


@dataclass(frozen=True)
class PoolProblem:
    """Sizes, strides, dtypes and options of one call against a state pool."""

    N: int
    S: int | None  # tokens per sequence; None when cu_seqlens cuts the rows
    R: int  # token rows in all
    H: int
    HV: int
    K: int
    V: int
    slots: int
    slot_stride: int
    index_strides: tuple[int, int]  # row, column
    W: int  # columns of state_indices
    token_strides: tuple[int, ...]  # (row, head) of q, k, v, gate, beta, out
    state_dtype: torch.dtype
    scale: float
    gate: str  # "none", "softplus" or "bounded"
    lower_bound: float | None
    pad_slot: int
    verify: bool
    qk_l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    state_v_first: bool

    @property
    def per_token(self) -> bool:
        """True when the state after every token has a slot of its own."""
        return self.W > 1

    @property
    def step_column(self) -> int:
        """Column of state_indices that takes the state after token 0."""
        return int(self.verify)

    @property
    def written(self) -> bool:
        """False when no state is written at all."""
        return self.per_token or not self.verify


@dataclass(frozen=True)
class StepProblem(PoolProblem):
    """A fused decode step: kda_decode between a short convolution and a gated RMSNorm."""

    taps: int  # W of the convolution
    conv_strides: tuple[int, int, int]  # of conv_pool: slot, channel, tap
    conv_weight_stride: int
    output_gate_strides: tuple[int, int]  # row, head
    norm_eps: float


def row_strides(name: str, t: Layout) -> tuple[int, int]:
    """(row, head) strides of a [N, S, heads, ..] tensor whose token rows must lie at one distance, last dimension contiguous."""
    N, S = t.shape[:2]
    if len(t.shape) == 4 and t.shape[3] > 1 and t.stride[3] != 1:
        raise fail(f"{name}'s last stride", t.stride[3], "1 (use .contiguous())")
    if N > 1 and S > 1 and t.stride[0] != S * t.stride[1]:
        raise fail(f"{name}'s strides", list(t.stride), f"such that stride(0) = {S} * stride(1): token rows at one distance")
    return (t.stride[0] if S == 1 else t.stride[1]), t.stride[2]


def check_like(name: str, t: Layout | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Shape and dtype of a required tensor."""
    if t is None:
        raise fail(name, None, f"a tensor {list(shape)}")
    if tuple(t.shape) != shape:
        raise fail(f"{name}'s shape", list(t.shape), str(list(shape)))
    if t.dtype not in dtypes:
        raise fail(f"{name}'s dtype", t.dtype, "one of " + ", ".join(map(str, dtypes)))


def check_gate(A_log: Layout | None, dt_bias: Layout | None, HV: int, K: int, options: Options) -> str:
    """The kind of gate. A_log [HV] or [1, 1, HV, 1], dt_bias [HV * K] or [HV, K], lower_bound in [-5, 0) or None."""
    lower_bound = options.lower_bound
    check_lower_bound(lower_bound)
    if not options.gate_in_kernel:
        if A_log is not None or dt_bias is not None:
            raise fail("dt_bias" if A_log is None else "A_log", "given", "None unless use_gate_in_kernel=True: g is the log decay itself")
        return "none"
    if A_log is None and lower_bound is None:
        raise fail("A_log", None, "a tensor [HV] without lower_bound")
    for name, t, shapes in (("A_log", A_log, ((HV,), (1, 1, HV, 1))), ("dt_bias", dt_bias, ((HV * K,), (HV, K)))):
        if t is None:
            continue
        if tuple(t.shape) not in shapes:
            raise fail(f"{name}'s shape", list(t.shape), " or ".join(str(list(s)) for s in shapes))
        check_like(name, t, tuple(t.shape), FLOAT_DTYPES)
        if not _dense(t):
            raise fail(f"{name}'s strides", list(t.stride), "contiguous")
    return "softplus" if lower_bound is None else "bounded"


def _dense(t: Layout) -> bool:
    expected = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def check_pool(pool: Layout | None, HV: int, K: int, V: int, v_first: bool, name: str = "state_pool") -> None:
    """The pool [slots, HV, V, K] (or [slots, HV, K, V]), which the caller calls `name`: each slot dense, slots at any distance."""
    want = f"[slots, {HV}, {V}, {K}] (state_v_first=True)" if v_first else f"[slots, {HV}, {K}, {V}] (state_v_first=False)"
    if pool is None:
        raise fail(name, None, "a tensor " + want)
    if len(pool.shape) != 4 or tuple(pool.shape[1:]) != ((HV, V, K) if v_first else (HV, K, V)):
        raise fail(f"{name}'s shape", list(pool.shape), want)
    if pool.dtype not in STATE_DTYPES:
        raise fail(f"{name}'s dtype", pool.dtype, "torch.float32 or torch.bfloat16")
    if not _dense(Layout(pool.shape[1:], pool.stride[1:], pool.dtype)):
        raise fail(f"{name}'s strides", list(pool.stride), "dense inside a slot (only stride(0) is free)")
    if pool.shape[0] > 1 and pool.stride[0] < HV * K * V:
        raise fail(f"{name}'s stride(0)", pool.stride[0], f"at least {HV * K * V}, the elements of a slot")


def check_indices(index: Layout | None, N: int, accepted: Layout | None, pad_slot: int) -> tuple[int, tuple[int, int]]:
    """state_indices [N] or [N, W] and num_accepted [N]. Returns W and the (row, column) strides."""
    if index is None:
        raise fail("state_indices", None, f"a tensor [{N}] or [{N}, W]")
    if len(index.shape) not in (1, 2) or index.shape[0] != N or index.shape[-1] < (len(index.shape) == 2):
        raise fail("state_indices's shape", list(index.shape), f"[{N}] or [{N}, W]")
    if index.dtype not in INDEX_DTYPES:
        raise fail("state_indices's dtype", index.dtype, "torch.int32 or torch.int64")
    if pad_slot not in (-1, 0):
        raise fail("pad_slot", pad_slot, "-1 (negative indices are pads) or 0 (zero is one too)")
    W = index.shape[1] if len(index.shape) == 2 else 1
    if accepted is not None:
        check_like("num_accepted", accepted, (N,), INDEX_DTYPES)
        if N > 1 and accepted.stride[0] != 1:
            raise fail("num_accepted's stride", accepted.stride[0], "1")
        if W < 2:
            raise fail("state_indices's shape", list(index.shape), f"[{N}, W] with W >= 2, one slot per draft step, with num_accepted")
    return W, (index.stride[0], index.stride[1] if len(index.shape) == 2 else 0)


@lru_cache(maxsize=4096)
def check_decode(
    q: Layout, k: Layout, v: Layout, gate: Layout, beta: Layout, out: Layout, A_log: Layout | None, dt_bias: Layout | None,
    pool: Layout, index: Layout, accepted: Layout | None, cu: Layout | None, options: Options,
) -> PoolProblem:  # fmt: skip
    """The `PoolProblem` of kda_decode; ValueError names the argument that does not fit."""
    for name, t in (("q", q), ("v", v)):
        if t is None:
            raise fail(name, None, "a tensor [N, S, heads, head dim]")
    if len(q.shape) != 4 or not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise fail("q's shape", list(q.shape), f"[N, S, H, K] with K from 1 to {MAX_HEAD_DIM}")
    N, S, H, K = q.shape
    if S < 1 and cu is None and not options.recurrent:
        raise fail("q's shape", list(q.shape), "[N, S, H, K] with S at least 1")
    if len(v.shape) != 4 or tuple(v.shape[:2]) != (N, S) or not 1 <= v.shape[3] <= MAX_HEAD_DIM:
        raise fail("v's shape", list(v.shape), f"[{N}, {S}, HV, V] with V from 1 to {MAX_HEAD_DIM}")
    HV, V = v.shape[2:]
    if H < 1 or HV < 1 or HV % H:
        raise fail("v's head count", HV, f"a multiple of q's head count {H}")
    check_like("q", q, (N, S, H, K), FLOAT_DTYPES)
    check_like("k", k, (N, S, H, K), (q.dtype,))
    check_like("v", v, (N, S, HV, V), (q.dtype,))
    check_like(options.gate_name, gate, (N, S, HV, K), FLOAT_DTYPES)
    check_like("beta", beta, (N, S, HV), FLOAT_DTYPES)
    check_like("out", out, (N, S, HV, V), FLOAT_DTYPES)
    gate_kind = check_gate(A_log, dt_bias, HV, K, options)
    if options.neg_eigval and not options.beta_sigmoid:
        raise fail("allow_neg_eigval", True, "False unless use_beta_sigmoid_in_kernel=True; otherwise scale beta yourself")
    check_pool(pool, HV, K, V, options.state_v_first, options.pool_name)
    sequences = N
    if cu is not None:
        if len(cu.shape) != 1 or cu.shape[0] < 1 or cu.dtype not in INDEX_DTYPES:
            raise fail("cu_seqlens", f"{list(cu.shape)} {cu.dtype}", "[N + 1] int32 or int64")
        if cu.shape[0] > 1 and cu.stride[0] != 1:
            raise fail("cu_seqlens's stride", cu.stride[0], "1")
        if N != 1:
            raise fail("q's batch size", N, "1 with cu_seqlens, the sequences packed along the second dimension")
        sequences = cu.shape[0] - 1
    W, index_strides = check_indices(index, sequences, accepted, options.pad_slot)
    written = W - options.verify
    if W > 1 and cu is None and written < S:
        raise fail("state_indices's shape", list(index.shape), f"[{N}, W] with W >= {S + options.verify}, a slot for each of {S} tokens")
    tokens = (("q", q), ("k", k), ("v", v), (options.gate_name, gate), ("beta", beta), ("out", out))
    return PoolProblem(
        N=sequences, S=None if cu is not None else S, R=N * S, H=H, HV=HV, K=K, V=V, slots=pool.shape[0], slot_stride=pool.stride[0],
        index_strides=index_strides, W=W,
        token_strides=tuple(s for name, t in tokens for s in row_strides(name, t)), state_dtype=pool.dtype,
        scale=float(K**-0.5 if options.scale is None else options.scale), gate=gate_kind,
        lower_bound=options.lower_bound, pad_slot=options.pad_slot, verify=options.verify,
        qk_l2norm=options.qk_l2norm, beta_sigmoid=options.beta_sigmoid, neg_eigval=options.neg_eigval,
        state_v_first=options.state_v_first,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def check_step(
    decode: PoolProblem, output_gate: Layout, norm_weight: Layout, conv_weight: Layout, conv_bias: Layout | None, conv_pool: Layout,
    norm_eps: float,
) -> StepProblem:  # fmt: skip
    """The `StepProblem` of kda_fused_decode, from what kda_decode would see and the rest; ValueError names the argument at fault."""
    N, S, H, HV, K, V = decode.N, decode.S, decode.H, decode.HV, decode.K, decode.V
    C = 2 * H * K + HV * V
    if S > MAX_STEP_TOKENS:
        raise fail("q's shape", [N, S, H, K], f"[N, S, H, K] with S at most {MAX_STEP_TOKENS} in a fused step")
    check_like("output_gate", output_gate, (N, S, HV, V), FLOAT_DTYPES)
    check_like("norm_weight", norm_weight, (V,), FLOAT_DTYPES)
    if conv_weight is None:
        raise fail("conv_weight", None, f"a tensor [{C}, W]")
    if len(conv_weight.shape) != 2 or conv_weight.shape[0] != C or not 2 <= conv_weight.shape[1] <= MAX_TAPS:
        raise fail("conv_weight's shape", list(conv_weight.shape), f"[{C}, W]: 2*H*K + HV*V channels, W from 2 to {MAX_TAPS} taps")
    W = conv_weight.shape[1]
    check_like("conv_weight", conv_weight, (C, W), FLOAT_DTYPES)
    if conv_weight.stride[1] != 1:
        raise fail("conv_weight's last stride", conv_weight.stride[1], "1")
    if conv_bias is not None:
        check_like("conv_bias", conv_bias, (C,), FLOAT_DTYPES)
    check_like("conv_pool", conv_pool, (decode.slots, C, W - 1), FLOAT_DTYPES)
    for name, t in (("norm_weight", norm_weight), ("conv_bias", conv_bias)):
        if t is not None and t.stride[0] != 1:
            raise fail(f"{name}'s stride", t.stride[0], "1")
    return StepProblem(
        **{f.name: getattr(decode, f.name) for f in fields(decode)}, taps=W, conv_strides=tuple(conv_pool.stride),
        conv_weight_stride=conv_weight.stride[0],
        output_gate_strides=row_strides("output_gate", output_gate), norm_eps=norm_eps,
    )  # fmt: skip
