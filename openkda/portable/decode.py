"""The token recurrence in plain Triton: one kernel for fused_recurrent_kda, for decoding against a state pool and for verification.

Per token t of one sequence and value head (docs/math.md):

    a  = exp(g)                                  [K]     gate activation, fp32
    kD = D^T k,  qD = D^T q   with D = a * S     [V]     one pass over the state
    r  = beta (v - kD)                           [V]
    o  = scale (qD + (q . k) r)                  [V]     equals scale S_t^T q, without a second pass
    S  = D + k r^T                               [K, V]

Grid: one program per (sequence, value head, block of BV values), BV fastest. A program keeps its [BV, BK] state tile in registers, BK the
power of two that covers K, whichever way the state lies in memory. With one token per sequence the token's loads are issued before the
state's: the first waits for nothing, the second for the slot index.

Where a sequence's state comes from and goes to:
    slots.index is None   state n of `source` (None: zeros), written to state n of `sink` (None: nowhere) after the last token
    slots.index [N, W]    slot index[n, accepted[n] - 1] of `source` (column 0 without `accepted`), written back to the same slot of
                          `sink` after the last token
    PER_TOKEN             instead of that, the state after token t goes to slot index[n, STEP_COLUMN + t] of `sink`
A slot outside [FIRST_SLOT, slots) is no slot: a sequence that reads from one is skipped (its o is zeros, nothing is written), a state
that belongs to one is dropped. Sequences that share a slot in one call race: what they leave there and in their o is undefined, and
nothing else is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from openkda.backends import on_its_device
from openkda.portable.forward import interpreted
from openkda.portable.gate import softplus
from openkda.portable.launch import PreparedLaunch
from openkda.portable.tile import sigmoid
from openkda.problem import FLOAT_DTYPES, MAX_HEAD_DIM, Inputs, Problem
from openkda.serving_problem import PoolProblem

LOG2E = tl.constexpr(1.4426950408889634)


class Tokens(NamedTuple):
    """Per-token tensors on one axis of R rows; pairs of strides (row, head) follow in `TokenStrides`."""

    q: torch.Tensor  # [R, H, K]
    k: torch.Tensor  # [R, H, K]
    v: torch.Tensor  # [R, HV, V]
    gate: torch.Tensor  # [R, HV, K]
    beta: torch.Tensor  # [R, HV]
    o: torch.Tensor  # [R, HV, V]


class Slots(NamedTuple):
    """Which state belongs to which sequence. Absent tensors are None."""

    index: torch.Tensor | None  # [N, W] int32
    accepted: torch.Tensor | None  # [N] int32
    bounds: torch.Tensor | None  # sequence n has the rows bounds[n] .. bounds[n + 1]; without it S rows each


class SlotSizes(NamedTuple):
    """Strides in elements of `Slots.index` and of the two state tensors."""

    source: int  # between slots
    sink: int
    index_row: int
    index_column: int


@dataclass(frozen=True)
class Config:
    """Launch configuration of one recurrence kernel."""

    block_v: int  # values per program
    num_warps: int


@lru_cache(maxsize=1024)
def config(K: int, V: int, state_bytes: int, v_first: bool, heads: int) -> Config:
    """Block of V and warps for `heads` = sequences x value heads. Measured on an H200 at K = V = 128 (docs/decode.md).

    V-first: a row of the state is contiguous in K, one warp reads it whole, and a one-warp program never waits at a barrier: 8 or 16 rows.
    K-first: V is contiguous, so a block takes whole memory lines of it, fp32 states by more warps once there are enough programs."""
    if v_first:
        warps, elements = 1, 1024 if heads < (512 if state_bytes == 2 else 4096) else 2048
    elif state_bytes == 2:
        warps, elements = 1, 4096
    elif heads < 128:
        warps, elements = 1, 2048
    elif heads < 2048:
        warps, elements = 2, 4096
    else:
        warps, elements = 4, 8192
    block_v = max(1, min(triton.next_power_of_2(V), elements // triton.next_power_of_2(K)))
    return Config(block_v=block_v, num_warps=warps)


@triton.jit
def _across_k(x, V_FIRST: tl.constexpr):
    """[BK] -> broadcastable against the state tile."""
    return x[None, :] if V_FIRST else x[:, None]


@triton.jit
def _across_v(x, V_FIRST: tl.constexpr):
    """[BV] -> broadcastable against the state tile."""
    return x[:, None] if V_FIRST else x[None, :]


@triton.jit
def token_step(S, q, k, v, a, beta, qk, V_FIRST: tl.constexpr):
    """One token: (S_t, S_t^T q). q, k, a [BK]; v [BV]; beta, qk = q . k scalars; S the state tile. All fp32."""
    K_AXIS: tl.constexpr = 1 if V_FIRST else 0
    kx = _across_k(k, V_FIRST)
    D = S * _across_k(a, V_FIRST)
    kD = tl.sum(D * kx, axis=K_AXIS)
    qD = tl.sum(D * _across_k(q, V_FIRST), axis=K_AXIS)
    r = beta * (v - kD)
    return D + kx * _across_v(r, V_FIRST), qD + qk * r


@triton.jit
def normalise(q, k, scale, QK_L2NORM: tl.constexpr):
    """(q * scale, k, their product) with q and k [BK] L2-normalised first where asked for."""
    if QK_L2NORM:
        q = q * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    q = q * scale
    return q, k, tl.sum(q * k, axis=0)


@triton.jit
def decay_factor(gate, A, bias, lower_bound, GATE: tl.constexpr):
    """exp(g) of gate values (logits unless GATE == "none"); A = exp(A_log)."""
    if GATE == "softplus":
        gate = -A * softplus(gate + bias)
    elif GATE == "bounded":
        gate = lower_bound * sigmoid(A * (gate + bias))
    return tl.exp2(gate * LOG2E)


@triton.jit
def write_strength(beta, BETA_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr):
    """beta, or the sigmoid of its logit, twice that where negative eigenvalues are allowed."""
    if BETA_SIGMOID:
        beta = sigmoid(beta)
        if NEG_EIGVAL:
            beta = 2.0 * beta
    return beta


@triton.jit
def _load_token(
    tokens, strides, row, i_h, i_hv, offs_k, offs_v, A, bias, scale, lower_bound, K: tl.constexpr, V: tl.constexpr, GATE: tl.constexpr,
    QK_L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr,
):  # fmt: skip
    """The token at `row`, ready for `token_step`: (q, k, v, a, beta, qk)."""
    mask_k = offs_k < K
    q = tl.load(tokens.q + row * strides[0] + i_h * strides[1] + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    k = tl.load(tokens.k + row * strides[2] + i_h * strides[3] + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    v = tl.load(tokens.v + row * strides[4] + i_hv * strides[5] + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
    gate = tl.load(tokens.gate + row * strides[6] + i_hv * strides[7] + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    beta = tl.load(tokens.beta + row * strides[8] + i_hv * strides[9]).to(tl.float32)
    a = decay_factor(gate, A, bias, lower_bound, GATE)
    q, k, qk = normalise(q, k, scale, QK_L2NORM)
    return q, k, v, a, write_strength(beta, BETA_SIGMOID, NEG_EIGVAL), qk


@triton.jit
def find_slot(slots, sizes, n, num_slots, FIRST_SLOT: tl.constexpr, WIDTH: tl.constexpr):
    """(slot that sequence n reads, whether there is one)."""
    if slots.index is None:
        return n, n >= 0
    else:
        column = 0
        ok = n >= 0
        if slots.accepted is not None:
            accepted = tl.load(slots.accepted + n).to(tl.int64)
            ok = (accepted >= 1) & (accepted <= WIDTH)
            column = tl.where(ok, accepted - 1, 0)
        slot = tl.load(slots.index + n * sizes.index_row + column * sizes.index_column).to(tl.int64)
        ok = ok & (slot >= FIRST_SLOT) & (slot < num_slots)
        return tl.where(ok, slot, 0), ok


@triton.jit
def find_step_slot(slots, sizes, n, column, num_slots, FIRST_SLOT: tl.constexpr, WIDTH: tl.constexpr):
    """(slot in a column of sequence n's row, whether there is one)."""
    slot = tl.load(slots.index + n * sizes.index_row + column * sizes.index_column, mask=column < WIDTH, other=-1).to(tl.int64)
    ok = (slot >= FIRST_SLOT) & (slot < num_slots)
    return tl.where(ok, slot, 0), ok


@triton.jit
def sequence_rows(slots, n, S, R):
    """First and end row of sequence n, clamped to the R rows there are: a bad table must not lead to a wild address."""
    if slots.bounds is None:
        first = n * S
        end = first + S
    else:
        first = tl.maximum(tl.load(slots.bounds + n).to(tl.int64), 0)
        end = tl.minimum(tl.load(slots.bounds + n + 1).to(tl.int64), R)
    return first, end


@triton.jit(do_not_specialize=["S", "R", "num_slots"])
def recurrent_kernel(
    tokens, strides, gate_params, source, sink, slots, sizes, S, R, num_slots, scale, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
    GATE: tl.constexpr, QK_L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr, FIRST_SLOT: tl.constexpr,
    WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, STEP_COLUMN: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """See the module's head. tokens: Tokens; strides: (row, head) of q, k, v, gate, beta, o; gate_params: (A_log [HV], dt_bias [HV, K]);
    slots: Slots; sizes: SlotSizes. S tokens per sequence unless slots.bounds; R rows in all."""
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = pid % NV
    n = (pid // (NV * HV)).to(tl.int64)
    i_hv = ((pid // NV) % HV).to(tl.int64)
    i_h = i_hv // (HV // H)
    offs_k = tl.arange(0, BK)
    offs_v = i_v * BV + tl.arange(0, BV)
    slot, ok = find_slot(slots, sizes, n, num_slots, FIRST_SLOT, WIDTH)
    first, end = sequence_rows(slots, n, S, R)
    A = 1.0
    bias = 0.0
    if gate_params[0] is not None:
        A = tl.exp2(tl.load(gate_params[0] + i_hv).to(tl.float32) * LOG2E)
    if gate_params[1] is not None:
        bias = tl.load(gate_params[1] + i_hv * K + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
    if ONE_TOKEN:
        q, k, v, a, beta, qk = _load_token(
            tokens, strides, first, i_h, i_hv, offs_k, offs_v, A, bias, scale, lower_bound, K, V, GATE, QK_L2NORM, BETA_SIGMOID, NEG_EIGVAL
        )

    mask_s = _across_k(offs_k < K, V_FIRST) & _across_v(offs_v < V, V_FIRST)
    if V_FIRST:
        offs_s = i_hv * (K * V) + offs_v[:, None] * K + offs_k[None, :]
    else:
        offs_s = i_hv * (K * V) + offs_k[:, None] * V + offs_v[None, :]
    state = tl.zeros([BV, BK] if V_FIRST else [BK, BV], dtype=tl.float32)
    if source is not None:
        state = tl.load(source + slot * sizes.source + offs_s, mask=mask_s & ok, other=0.0).to(tl.float32)

    if ONE_TOKEN:
        state, o = token_step(state, q, k, v, a, beta, qk, V_FIRST)
        p_o = tokens.o + first * strides[10] + i_hv * strides[11] + offs_v
        tl.store(p_o, tl.where(ok, o, 0.0).to(tokens.o.dtype.element_ty), mask=offs_v < V)
        if PER_TOKEN:
            slot, has_sink = find_step_slot(slots, sizes, n, STEP_COLUMN, num_slots, FIRST_SLOT, WIDTH)
            ok = ok & has_sink
    else:
        for t in tl.range(0, end - first):
            row = first + t
            q, k, v, a, beta, qk = _load_token(
                tokens, strides, row, i_h, i_hv, offs_k, offs_v, A, bias, scale, lower_bound, K, V, GATE, QK_L2NORM, BETA_SIGMOID,
                NEG_EIGVAL,
            )  # fmt: skip
            state, o = token_step(state, q, k, v, a, beta, qk, V_FIRST)
            p_o = tokens.o + row * strides[10] + i_hv * strides[11] + offs_v
            tl.store(p_o, tl.where(ok, o, 0.0).to(tokens.o.dtype.element_ty), mask=offs_v < V)
            if PER_TOKEN:
                step_slot, has_sink = find_step_slot(slots, sizes, n, STEP_COLUMN + t, num_slots, FIRST_SLOT, WIDTH)
                p_s = sink + step_slot * sizes.sink + offs_s
                tl.store(p_s, state.to(sink.dtype.element_ty), mask=mask_s & ok & has_sink)
    if sink is not None and (ONE_TOKEN or not PER_TOKEN):
        tl.store(sink + slot * sizes.sink + offs_s, state.to(sink.dtype.element_ty), mask=mask_s & ok)


def flatten_rows(t: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] -> [B * T, ...], last axis contiguous where it is a head's vector; a copy only where no such view exists."""
    if t.dim() == 4 and t.stride(-1) != 1:
        t = t.contiguous()
    return t.flatten(0, 1)


def why_not_device(device_type: str) -> str | None:
    """None when the kernels run on such a device, otherwise one sentence."""
    if device_type == "cuda" or (device_type == "cpu" and interpreted()):
        return None
    return f"the Triton recurrence needs a GPU (or TRITON_INTERPRET=1 set before import), and q is on {device_type}"


def why_not(problem: Problem) -> str | None:
    """None when `recurrent` serves the problem, otherwise one sentence."""
    if reason := why_not_device(problem.device_type):
        return reason
    if problem.dtype not in FLOAT_DTYPES:
        return f"the Triton recurrence computes in fp32, so it does not serve {problem.dtype}"
    if problem.needs_grad:
        return "the Triton recurrence has no gradient"
    if problem.return_intermediate_states:
        return "the Triton recurrence keeps no intermediate states"
    if max(problem.K, problem.V) > MAX_HEAD_DIM:
        return f"the Triton recurrence serves head dims up to {MAX_HEAD_DIM}, not K={problem.K}, V={problem.V}"
    return None


@on_its_device
def recurrent(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token-by-token forward: o [B, T, HV, V] in q's dtype and final_state (Problem.state_shape, state_dtype) or None."""
    B, T, H, HV, K, V, N = problem.B, problem.T, problem.H, problem.HV, problem.K, problem.V, problem.N
    allocate = torch.zeros if problem.varlen else torch.empty  # rows past the last sequence are zeros
    o = allocate(B, T, HV, V, dtype=problem.dtype, device=inputs.q.device)
    final = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=inputs.q.device) if problem.output_final_state else None
    if N == 0:
        return o, final
    initial = None if inputs.initial_state is None else inputs.initial_state.contiguous()
    tokens = Tokens(*(flatten_rows(t) for t in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, o)))
    strides = tuple(s for t in tokens for s in (t.stride(0), t.stride(1)))
    A_log = None if inputs.A_log is None else inputs.A_log.contiguous()
    dt_bias = None if inputs.dt_bias is None else inputs.dt_bias.contiguous()
    cfg = config(K, V, 4, problem.state_v_first, N * HV)
    grid = (triton.cdiv(V, cfg.block_v) * HV * N,)
    recurrent_kernel[grid](
        tokens, strides, (A_log, dt_bias), initial, final, Slots(None, None, inputs.cu_seqlens),
        SlotSizes(HV * K * V, HV * K * V, 0, 0), T, B * T, N, problem.scale, problem.lower_bound or 0.0,
        H, HV, K, V, triton.next_power_of_2(K), cfg.block_v, problem.state_v_first, problem.gate, problem.qk_l2norm, problem.beta_sigmoid,
        problem.neg_eigval, 0, 1, False, 0, T == 1 and not problem.varlen, num_warps=cfg.num_warps,
    )  # fmt: skip
    return o, final


def decode_launch(problem: PoolProblem, device: torch.device) -> Callable[..., None]:
    """The launch behind kda_decode, to be called with (q, k, v, gate, beta, out, A_log, dt_bias, pool, index, accepted, cu_seqlens)."""
    H, HV, K, V = problem.H, problem.HV, problem.K, problem.V
    cfg = config(K, V, problem.state_dtype.itemsize, problem.state_v_first, problem.N * HV)
    sizes = SlotSizes(problem.slot_stride, problem.slot_stride, *problem.index_strides)
    strides = problem.token_strides
    constants = (
        problem.S or 0, problem.R, problem.slots, problem.scale, problem.lower_bound or 0.0,
        H, HV, K, V, triton.next_power_of_2(K), cfg.block_v, problem.state_v_first, problem.gate, problem.qk_l2norm,
        problem.beta_sigmoid, problem.neg_eigval, problem.pad_slot + 1, problem.W, problem.per_token, problem.step_column, problem.S == 1,
    )  # fmt: skip

    def build(t: Sequence) -> tuple:
        q, k, v, gate, beta, out, A_log, dt_bias, pool, index, accepted, cu_seqlens = t
        tokens, slots = Tokens(q, k, v, gate, beta, out), Slots(index, accepted, cu_seqlens)
        return tokens, strides, (A_log, dt_bias), pool, pool if problem.written else None, slots, sizes, *constants

    grid = (triton.cdiv(V, cfg.block_v) * HV * problem.N,)
    launch = PreparedLaunch(recurrent_kernel, grid, build, device, num_warps=cfg.num_warps)
    idle = problem.N == 0 or problem.slots == 0
    if problem.S is not None and not idle:
        return launch

    def zero_first(*tensors: torch.Tensor | None) -> None:
        """Rows that belong to no sequence are zeros."""
        tensors[5].zero_()
        if not idle:
            launch(*tensors)

    return zero_first
