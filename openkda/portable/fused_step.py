"""A whole decode step of the layer in one kernel: short convolution, token recurrence, gated RMSNorm.

Per token (x: the projections q, k, v before the convolution; W taps, weight[:, W - 1] meets the newest token):

    y_c  = silu(sum_j weight[c, j] x_{t - W + 1 + j, c} + bias_c)      depthwise, causal; older x from the window
    S, o = the recurrence of openkda/portable/decode.py on y
    out  = o * rsqrt(mean(o^2) + eps) * norm_weight * sigmoid(output_gate)
    window <- the last W - 1 tokens' x

Everything between x and out stays in fp32 registers. Grid: one program per (sequence, q/k head); it owns that head's q and k channels, the
v channels and states of the value heads that read it, and serves those one after the other. So nobody else reads a window that it
rewrites in place. The state passes through registers in blocks of BV values, all tokens block by block, the next block on its way while
this one is computed; the outputs wait in registers for the norm over the whole head. Windows follow the same slots as the states
(openkda/portable/decode.py), one window after each token where states are kept per token; old taps are in registers before any is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from openkda.portable.decode import (
    LOG2E,
    Config,
    Slots,
    SlotSizes,
    Tokens,
    decay_factor,
    find_slot,
    find_step_slot,
    normalise,
    token_step,
    write_strength,
)
from openkda.portable.launch import PreparedLaunch
from openkda.portable.tile import sigmoid
from openkda.serving_problem import StepProblem

MAX_TILE = 16384  # state elements of one block: 16 warps with 32 to a lane


class Conv(NamedTuple):
    """The convolution of all channels, q heads first, then k heads, then v heads."""

    weight: torch.Tensor  # [C, W]
    bias: torch.Tensor | None  # [C]
    pool: torch.Tensor  # [slots, C, W - 1], oldest tap first, any strides


class ConvSizes(NamedTuple):
    """Strides in elements of Conv.pool and of Conv.weight's rows."""

    slot: int
    channel: int
    tap: int
    weight: int


@triton.jit
def convolve(p_x, row_stride, t, conv, sizes, window, channel, mask, W: tl.constexpr, BW: tl.constexpr):
    """[B] channels at token t of this call, their taps side by side as a [B, BW] tile. p_x: the channels at the call's first token;
    window: offset of the slot, or -1."""
    j = tl.arange(0, BW)[None, :]
    i = t + j - (W - 1)  # negative: a token before this call
    mask_taps = mask[:, None] & (j < W)
    new = tl.load(p_x[:, None] + i * row_stride, mask=mask_taps & (i >= 0), other=0.0).to(tl.float32)
    p_old = conv.pool + window + channel[:, None] * sizes.channel + (t + j) * sizes.tap
    old = tl.load(p_old, mask=mask_taps & (i < 0) & (window >= 0), other=0.0).to(tl.float32)
    weight = tl.load(conv.weight + channel[:, None] * sizes.weight + j, mask=mask_taps, other=0.0).to(tl.float32)
    y = tl.sum(weight * (new + old), axis=1)
    if conv.bias is not None:
        y += tl.load(conv.bias + channel, mask=mask, other=0.0).to(tl.float32)
    return y * sigmoid(y)


@triton.jit
def keep_window(
    x_ptr, row_stride, conv, sizes, window, channel, mask, slots, slot_sizes, n, num_slots, ok,
    S: tl.constexpr, W: tl.constexpr, FIRST_SLOT: tl.constexpr, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr,
    STEP_COLUMN: tl.constexpr,
):  # fmt: skip
    """Write the window of [B] channels after every token that has a slot, or after the last token to the slot that was read."""
    taps = ()  # the W - 1 old ones, then this call's S
    p_old = conv.pool + window + channel * sizes.channel
    for m in tl.static_range(W - 1):
        taps = taps + (tl.load(p_old + m * sizes.tap, mask=mask & ok, other=0.0),)  # noqa: RUF005
    for t in tl.static_range(S):
        taps = taps + (tl.load(x_ptr + t * row_stride, mask=mask, other=0.0).to(conv.pool.dtype.element_ty),)  # noqa: RUF005
    tl.debug_barrier()  # other threads of this program may still be reading the taps that are now overwritten
    for t in tl.static_range(S):
        if PER_TOKEN:
            slot, kept = find_step_slot(slots, slot_sizes, n, STEP_COLUMN + t, num_slots, FIRST_SLOT, WIDTH)
            kept = kept & ok
            target = slot * sizes.slot
        else:
            kept = ok & (t == S - 1)
            target = window
        for j in tl.static_range(W - 1):
            tl.store(conv.pool + target + channel * sizes.channel + j * sizes.tap, taps[t + 1 + j], mask=mask & kept)


@triton.jit
def block_offsets(i_hv, b, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr):
    """Offsets and mask of block b of V of one head's state within a slot."""
    offs_k = tl.arange(0, BK)
    offs_v = b * BV + tl.arange(0, BV)
    if V_FIRST:
        return i_hv * (K * V) + offs_v[:, None] * K + offs_k[None, :], (offs_v < V)[:, None] & (offs_k < K)[None, :]
    else:
        return i_hv * (K * V) + offs_k[:, None] * V + offs_v[None, :], (offs_k < K)[:, None] & (offs_v < V)[None, :]


@triton.jit
def load_block(p_slot, i_hv, b, ok, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr):
    """Block b of a head's state, fp32; zeros without a slot."""
    offs, mask = block_offsets(i_hv, b, K, V, BK, BV, V_FIRST)
    return tl.load(p_slot + offs, mask=mask & ok, other=0.0).to(tl.float32)


@triton.jit
def store_block(p_slot, S, i_hv, b, ok, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr):
    """Write it back in the pool's dtype."""
    offs, mask = block_offsets(i_hv, b, K, V, BK, BV, V_FIRST)
    tl.store(p_slot + offs, S.to(p_slot.dtype.element_ty), mask=mask & ok)


@triton.jit
def prepare_token(
    tokens, strides, p_q, p_k, conv, conv_sizes, window, first, t, i_h, i_hv, A, bias, scale, lower_bound,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, GATE: tl.constexpr, QK_L2NORM: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
):  # fmt: skip
    """What every block of V needs of token t: q and k convolved and normalised, a = exp(g), beta, q . k."""
    row = first + t
    offs_k = tl.arange(0, BK)
    mask_k = offs_k < K
    channel = i_h * K + offs_k
    q = convolve(p_q, strides[0], t, conv, conv_sizes, window, channel, mask_k, W, BW)
    k = convolve(p_k, strides[2], t, conv, conv_sizes, window, H * K + channel, mask_k, W, BW)
    gate = tl.load(tokens.gate + row * strides[6] + i_hv * strides[7] + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    beta = tl.load(tokens.beta + row * strides[8] + i_hv * strides[9]).to(tl.float32)
    q, k, qk = normalise(q, k, scale, QK_L2NORM)
    return q, k, decay_factor(gate, A, bias, lower_bound, GATE), write_strength(beta, True, NEG_EIGVAL), qk


@triton.jit(do_not_specialize=["num_slots", "steps"])
def fused_step_kernel(
    tokens, output_gate, norm_weight, strides, gate_params, pool, conv, slots, slot_sizes, conv_sizes, num_slots, steps, scale, lower_bound,
    eps, S: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    W: tl.constexpr, BW: tl.constexpr, V_FIRST: tl.constexpr, GATE: tl.constexpr, QK_L2NORM: tl.constexpr, NEG_EIGVAL: tl.constexpr,
    FIRST_SLOT: tl.constexpr, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, STEP_COLUMN: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    """See the module's head. tokens: Tokens (x instead of q, k, v; o: the result); strides: (row, head) of q, k, v, gate, beta, o and
    output_gate [R, HV, V]; norm_weight [V]; gate_params: (A_log [HV], dt_bias [HV, K]); S = steps tokens per sequence: as a
    variable it keeps the compiler from unrolling the loop over them, whose states would not fit the registers together."""
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    n = (pid // H).to(tl.int64)
    NB: tl.constexpr = (V + BV - 1) // BV
    SP: tl.constexpr = triton.next_power_of_2(S)
    offs_t = tl.arange(0, SP)
    offs_k = tl.arange(0, BK)
    mask_k = offs_k < K
    slot, ok = find_slot(slots, slot_sizes, n, num_slots, FIRST_SLOT, WIDTH)
    window = tl.where(ok, slot * conv_sizes.slot, -1)
    first = n * S
    q_channel = i_h * K + offs_k
    k_channel = H * K + q_channel
    p_q = tokens.q + first * strides[0] + i_h * strides[1] + offs_k
    p_k = tokens.k + first * strides[2] + i_h * strides[3] + offs_k
    p_slot = pool + slot * slot_sizes.source

    for j in tl.static_range(HV // H):
        i_hv = i_h * (HV // H) + j
        ahead = load_block(p_slot, i_hv, 0, ok, K, V, BK, BV, V_FIRST)
        A = 1.0
        bias = 0.0
        if gate_params[0] is not None:
            A = tl.exp2(tl.load(gate_params[0] + i_hv).to(tl.float32) * LOG2E)
        if gate_params[1] is not None:
            bias = tl.load(gate_params[1] + i_hv * K + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        p_v = tokens.v + first * strides[4] + i_hv * strides[5]
        v_channel = 2 * H * K + i_hv * V
        if S == 1:
            q, k, a, beta, qk = prepare_token(
                tokens, strides, p_q, p_k, conv, conv_sizes, window, first, 0, i_h, i_hv, A, bias, scale, lower_bound,
                H, K, BK, W, BW, GATE, QK_L2NORM, NEG_EIGVAL,
            )  # fmt: skip
        outs = ()  # block by block [SP, BV]; Triton knows tuple sums, not unpacking
        squares = tl.zeros([SP], dtype=tl.float32)
        for b in tl.static_range(NB):
            offs_v = b * BV + tl.arange(0, BV)
            state = ahead
            if b + 1 < NB:  # on its way while this block is computed and stored
                ahead = load_block(p_slot, i_hv, b + 1, ok, K, V, BK, BV, V_FIRST)
            o = tl.zeros([SP, BV], dtype=tl.float32)
            for t in tl.range(0, 1 if S == 1 else steps):
                if S > 1:
                    q, k, a, beta, qk = prepare_token(
                        tokens, strides, p_q, p_k, conv, conv_sizes, window, first, t, i_h, i_hv, A, bias, scale, lower_bound,
                        H, K, BK, W, BW, GATE, QK_L2NORM, NEG_EIGVAL,
                    )  # fmt: skip
                v = convolve(p_v + offs_v, strides[4], t, conv, conv_sizes, window, v_channel + offs_v, offs_v < V, W, BW)
                state, o_t = token_step(state, q, k, v, a, beta, qk, V_FIRST)
                o = tl.where(offs_t[:, None] == t, o_t[None, :], o)
                if PER_TOKEN:
                    target, kept = find_step_slot(slots, slot_sizes, n, STEP_COLUMN + t, num_slots, FIRST_SLOT, WIDTH)
                    store_block(pool + target * slot_sizes.sink, state, i_hv, b, ok & kept, K, V, BK, BV, V_FIRST)
            if WRITTEN and not PER_TOKEN:
                store_block(p_slot, state, i_hv, b, ok, K, V, BK, BV, V_FIRST)
            outs = outs + (o,)  # noqa: RUF005
            squares += tl.sum(o * o, axis=1)
        inverse = tl.rsqrt(squares / V + eps)
        for b in tl.static_range(NB):
            offs_v = b * BV + tl.arange(0, BV)
            mask = (offs_t < S)[:, None] & (offs_v < V)[None, :]
            rows = (first + offs_t)[:, None]
            weight = tl.load(norm_weight + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
            z = tl.load(output_gate + rows * strides[12] + i_hv * strides[13] + offs_v[None, :], mask=mask, other=0.0).to(tl.float32)
            y = tl.where(ok, outs[b] * inverse[:, None] * weight[None, :] * sigmoid(z), 0.0)
            tl.store(tokens.o + rows * strides[10] + i_hv * strides[11] + offs_v[None, :], y.to(tokens.o.dtype.element_ty), mask=mask)
            if WRITTEN:
                keep_window(
                    p_v + offs_v, strides[4], conv, conv_sizes, window, v_channel + offs_v, offs_v < V, slots, slot_sizes, n, num_slots, ok,
                    S, W, FIRST_SLOT, WIDTH, PER_TOKEN, STEP_COLUMN,
                )  # fmt: skip
    if WRITTEN:
        keep_window(
            p_q, strides[0], conv, conv_sizes, window, q_channel, mask_k, slots, slot_sizes, n, num_slots, ok, S, W, FIRST_SLOT, WIDTH,
            PER_TOKEN, STEP_COLUMN,
        )  # fmt: skip
        keep_window(
            p_k, strides[2], conv, conv_sizes, window, k_channel, mask_k, slots, slot_sizes, n, num_slots, ok, S, W, FIRST_SLOT, WIDTH,
            PER_TOKEN, STEP_COLUMN,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def config(K: int, V: int, S: int, state_bytes: int, v_first: bool, heads: int) -> Config:
    """Block of V and warps for `heads` = sequences x q/k heads. Measured on an H200 at K = V = 128 (docs/decode.md).

    One token, few programs: the whole state at once by many warps, the shortest way through one program. Many programs: four blocks, so
    that more of them share a multiprocessor and their loads and arithmetic overlap. Where a lane's share of the state is scattered (bf16,
    K-first), two blocks by four warps. Several tokens: 16 state values to a lane, since the compiler keeps more than one state alive
    around the loop."""
    tile = triton.next_power_of_2(K) * triton.next_power_of_2(V)
    if S > 1:
        elements, values = max(min(tile, 4096), tile // 4), 512
    elif state_bytes == 2 or not v_first:
        elements, values = max(min(tile, 8192), tile // 4), 2048
    else:
        elements, values = tile if heads < 512 and tile <= MAX_TILE else max(min(tile, 4096), tile // 4), 1024
    block_v = max(1, elements // triton.next_power_of_2(K))
    return Config(block_v=block_v, num_warps=max(1, min(16, elements // values)))


def fused_launch(problem: StepProblem, device: torch.device) -> Callable[..., None]:
    """The launch behind kda_fused_decode, to be called with (q, k, v, gate, beta, out, A_log, dt_bias, pool, index, accepted, output_gate,
    norm_weight, conv_weight, conv_bias, conv_pool)."""
    H, HV, K, V = problem.H, problem.HV, problem.K, problem.V
    cfg = config(K, V, problem.S, problem.state_dtype.itemsize, problem.state_v_first, problem.N * H)
    sizes = SlotSizes(problem.slot_stride, problem.slot_stride, *problem.index_strides)
    conv_sizes = ConvSizes(*problem.conv_strides, problem.conv_weight_stride)
    strides = problem.token_strides + problem.output_gate_strides
    constants = (
        sizes, conv_sizes, problem.slots, problem.S, problem.scale, problem.lower_bound or 0.0, problem.norm_eps, problem.S, H, HV, K, V,
        triton.next_power_of_2(K), cfg.block_v, problem.taps, triton.next_power_of_2(problem.taps), problem.state_v_first, problem.gate,
        problem.qk_l2norm, problem.neg_eigval, problem.pad_slot + 1, problem.W, problem.per_token, problem.step_column, problem.written,
    )  # fmt: skip

    def build(t: Sequence) -> tuple:
        q, k, v, gate, beta, out, A_log, dt_bias, pool, index, accepted, output_gate, norm_weight, weight, bias, conv_pool = t
        slots = Slots(index, accepted, None)
        tokens, conv = Tokens(q, k, v, gate, beta, out), Conv(weight, bias, conv_pool)
        return tokens, output_gate, norm_weight, strides, (A_log, dt_bias), pool, conv, slots, *constants

    launch = PreparedLaunch(fused_step_kernel, (H * problem.N,), build, device, num_warps=cfg.num_warps)
    if problem.N == 0 or problem.slots == 0:
        return lambda *tensors: tensors[5].zero_()
    return launch
