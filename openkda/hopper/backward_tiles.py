"""Arithmetic on the tiles of the fused gradients: [K, 32], channels by tokens, 16 channels a warp (`group_layout(32)`).

A thread holds 16 numbers of a tile: number 4 g + 2 row + c is token 8 g + 2 (lane % 4) + c of one of two channels. Sums over tokens stay
within four threads, and subtract nothing: a small sum that follows a large term keeps its own precision. bf16 tiles are rounded and widened
two elements at a time, so that they take half a register per element wherever they wait (instructions.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openkda.hopper.backward_prepare import SPAN, C
from openkda.hopper.compat import fence_async_shared, gl, gluon, mma_v2, tma
from openkda.hopper.runtime import Matrix
from openkda.hopper.tiles import LOG2E, ex2, rcp, softplus2
from openkda.portable.backward_inputs import CUT
from openkda.problem import Problem

LEAST_BITS = gl.constexpr(-SPAN.value)
CUT_BITS = gl.constexpr(CUT.value * 1.4426950408889634)
DEAD = gl.constexpr(-3e38)  # an activated gate's value on rows past the end: no decay, and 0 * DEAD is 0


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for"""

    K: int
    V: int
    gate: str
    any: bool  # gates without a bound
    l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    levels: bool = False  # what rows from the cut on take by levels
    beside: bool = False  # the launch starts beside the one before it (backward_follow.py)
    announcers: int = 1  # flags to wait for then


def form(problem: Problem, levels: bool = False, beside: bool = False, announcers: int = 1) -> Form:
    p = problem
    return Form(p.K, p.V, p.gate, not p.bounded, p.qk_l2norm, p.beta_sigmoid, p.neg_eigval, levels, beside, announcers)


def of_tokens(operand: int, dtype: torch.dtype, problem: Problem, columns: int, width: int, stride: int | None = None) -> Matrix:
    """Rows of tokens [B*T, columns], `stride` elements apart (None: packed), in boxes of a chunk and `width` channels"""
    return Matrix(operand, dtype, problem.B * problem.T, columns, stride or columns, C, width)


def of_chunks(operand: int, dtype: torch.dtype, tiles: int, rows: int, width: int) -> Matrix:
    """`tiles` tiles [rows, width], contiguous, one a box"""
    return Matrix(operand, dtype, tiles * rows, width, width, rows, width)


@gluon.jit
def load_beta(ptr, mask, F: gl.constexpr):
    """beta after the sigmoid, and the same at least 2^-30 from zero: its gradient is found by dividing by it"""
    beta = gl.load(ptr, mask=mask, other=0.0).to(gl.float32)
    if F.beta_sigmoid:
        beta = (2.0 if F.neg_eigval else 1.0) * rcp(1.0 + ex2(beta * -LOG2E))
    return beta, gl.where(gl.abs(beta) < 2.0**-30, 2.0**-30, beta)


def scan_code(reverse: bool = False, own: bool = True) -> str:
    """PTX of a running sum over the tokens of a tile, from the first or from the last. own: whether a token's sum holds the token."""
    order = (3, 2, 1, 0) if reverse else (0, 1, 2, 3)
    test = "eq" if reverse else "ne"  # whether the other lane's tokens, then the other two lanes', come before
    text = ["{ .reg .f32 s, t, e, base; .reg .b32 l, m; .reg .pred p, q;"]
    text.append(f"mov.u32 l, %laneid; and.b32 m, l, 1; setp.{test}.b32 p, m, 0; and.b32 m, l, 2; setp.{test}.b32 q, m, 0;")
    for row in range(2):
        text.append("mov.f32 base, 0f00000000;")
        for step, g in enumerate(order):
            first, second = (4 * g + 2 * row + c for c in ((1, 0) if reverse else (0, 1)))
            text.append(f"add.f32 s, ${16 + first}, ${16 + second};")
            text.append("shfl.sync.bfly.b32 t, s, 1, 0x1f, 0xffffffff; selp.f32 e, t, 0f00000000, p; add.f32 s, s, t;")
            text.append("shfl.sync.bfly.b32 t, s, 2, 0x1f, 0xffffffff; @q add.f32 e, e, t;")
            if own:
                text.append(f"add.f32 e, e, base; add.f32 ${first}, e, ${16 + first}; add.f32 ${second}, ${first}, ${16 + second};")
            else:
                text.append(f"add.f32 ${first}, e, base; add.f32 ${second}, ${first}, ${16 + first};")
            if step < 3:
                text.append("add.f32 s, s, t; add.f32 base, base, s;")
    return " ".join([*text, "}"])


def channels_code() -> str:
    """PTX of the sums over a warp's channels: each lane ends with that of one token, in the first output; the others are not written.
    Lanes halve what they hold with every exchange: the higher lane / 4 keeps the later group of eight tokens, then the odd token."""
    text = ["{ .reg .f32 s<8>, a, b; .reg .b32 l, m; .reg .pred p; mov.u32 l, %laneid;"]
    text += [f"add.f32 s{2 * g + c}, ${16 + 4 * g + c}, ${18 + 4 * g + c};" for g in range(4) for c in range(2)]
    for lanes in (16, 8, 4):
        half = lanes // 4
        text.append(f"and.b32 m, l, {lanes}; setp.ne.s32 p, m, 0;")
        for n in range(half):
            text.append(f"selp.f32 a, s{n}, s{n + half}, p; selp.f32 b, s{n + half}, s{n}, p;")
            text.append(f"shfl.sync.bfly.b32 a, a, {lanes}, 0x1f, 0xffffffff; add.f32 s{n}, a, b;")
    return " ".join([*text, "mov.f32 $0, s0; }"])


FROM_FIRST = gl.constexpr(scan_code())
BEFORE = gl.constexpr(scan_code(own=False))
FROM_LAST = gl.constexpr(scan_code(reverse=True))
CHANNELS = gl.constexpr(channels_code())
SIXTEEN = gl.constexpr(",".join(["=&f"] * 16 + ["f"] * 16))


@gluon.jit
def sums_from_first(x):
    """Running sums over the tokens of x [K, 32]"""
    return gl.inline_asm_elementwise(FROM_FIRST, SIXTEEN, [x], dtype=gl.float32, is_pure=True, pack=16)


@gluon.jit
def sums_before(x):
    """Sums over the tokens before each"""
    return gl.inline_asm_elementwise(BEFORE, SIXTEEN, [x], dtype=gl.float32, is_pure=True, pack=16)


@gluon.jit
def sums_from_last(x):
    return gl.inline_asm_elementwise(FROM_LAST, SIXTEEN, [x], dtype=gl.float32, is_pure=True, pack=16)


@gluon.jit
def to_bf16(x):
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def widen(x):
    """fp32 of a tile. Not pure: each use of a bf16 tile widens it anew, instead of keeping fp32 copies in registers."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=False, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def inverse(x):
    """1 / x. Not pure, likewise."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


def divider(d: int) -> tuple[int, int]:
    """What `quotient` takes to divide by d: a multiplier from 2^31 to 2^32, less 2^31, and a shift"""
    shift = (d - 1).bit_length()
    return -(-(2 ** (31 + shift)) // d) - 2**31, shift


@gluon.jit
def quotient(n, by):
    """n // d for 0 <= n < 2^31, in a tenth of a division's instructions; by: as `divider` says"""
    return (gl.umulhi((2 * n).to(gl.uint32), by[0].to(gl.uint32) + 0x80000000) >> by[1]).to(gl.int32)


@gluon.jit
def bounds(chunks_ptr, chunk):
    """(first row, live rows) of a chunk"""
    first = gl.load(chunks_ptr + chunk * 4 + 1)
    return first, gl.load(chunks_ptr + chunk * 4 + 2) - first


@gluon.jit
def clear_rows(tile, length, neutral):
    """Overwrite the rows of a tile [rows, columns] whose token, row % 32, is past the end."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    token = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, L)) % 32
    x = tile.load(L)
    tile.store(gl.where((token < length)[:, None], x, neutral).to(tile.dtype))


@gluon.constexpr_function
def channel_groups(K, V):
    """[K / 16, V, 16] view of a tile [V, K] of `tile_layout`: groups of 16 channels"""
    bases = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0], [0, 1, 8], [1, 2, 0], [2, 4, 0]]
    v = 8
    while v < V:
        bases += [[0, v, 0]]
        v *= 2
    return gl.SharedLinearLayout(bases + [[4, 0, 0]] * (K // 128), [], 1024)


@gluon.jit
def state_products(h, dh, K: gl.constexpr, L: gl.constexpr):
    """rowsum(S dS') [K] for h, dh [V, K]: the diagonals of their products, 16 channels a warp"""
    V: gl.constexpr = h.shape[0]
    W: gl.constexpr = K // 16
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[gl.num_warps(), 1, 1], instr_shape=[1, 16, 8])
    h = h._reinterpret(h.dtype, [W, V, 16], channel_groups(K, V)).permute((0, 2, 1))
    dh = dh._reinterpret(dh.dtype, [W, V, 16], channel_groups(K, V))
    gram = gl.zeros([W, 16, 16], gl.float32, mma)
    for i in gl.static_range(V // 32):
        left = h.slice(32 * i, 32, dim=2).load(gl.DotOperandLayout(0, mma, 2))
        gram = mma_v2(left, dh.slice(32 * i, 32, dim=1).load(gl.DotOperandLayout(1, mma, 2)), gram)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    return gl.convert_layout(gl.sum(gl.where(i == j, gram, 0.0), 2).reshape([K]), gl.SliceLayout(1, L))


@gluon.jit
def ex2_below(x):
    """2^-|x|"""
    code: gl.constexpr = "{ .reg .f32 e; abs.f32 e, $1; neg.f32 e, e; ex2.approx.ftz.f32 $0, e; }"
    return gl.inline_asm_elementwise(code, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def hold(x, low):
    """x, or low where x is below; NaN stays."""
    return gl.where(x < low, low, x)


@gluon.jit
def channel_sums(buf, x, part: gl.constexpr):
    """Leave the sums over each group of 16 channels of x [K, 32] in buf.sums"""
    buf.sums.index(part).store(gl.sum(x.reshape([x.shape[0] // 16, 16, 32]), 1))


@gluon.jit
def sums_of_warps(x):
    """The sums over each group of 16 channels of x [K, 32]: [K / 16, 32], a token a lane"""
    W: gl.constexpr = x.shape[0] // 16
    x = gl.inline_asm_elementwise(CHANNELS, SIXTEEN, [x], dtype=gl.float32, is_pure=True, pack=16)
    x = x.reshape([W, 2, 8, 2, 2, 4, 2]).permute((0, 2, 5, 1, 3, 4, 6))  # warp, lane / 4, lane % 4, and what a thread holds
    for _n in gl.static_range(4):
        x, _ = gl.split(x)
    return x.reshape([W, 4, 2, 4]).permute((0, 1, 3, 2)).reshape([W, 32])


@gluon.jit
def both_sums(sums, x, y):
    """Leave the sums over each group of 16 channels of x and y [K, 32] in sums [warps, 32, 2] fp32"""
    sums.store(gl.join(sums_of_warps(x), sums_of_warps(y)))


@gluon.jit
def add_up(totals, sums):
    """Leave the sums over all channels in totals [2, 32] fp32"""
    W: gl.constexpr = sums.shape[0]
    by_token: gl.constexpr = gl.BlockedLayout([W, 1, 2], [1, 32, 1], [1, gl.num_warps(), 1], [2, 1, 0])
    totals.permute((1, 0)).store(gl.sum(sums.load(by_token), 0))


@gluon.jit
def without_norms(buf, dq, dk, ky, up, L: gl.constexpr):
    """dq and dk [K, 32] without their parts along the rows that were normalised, whose sums over channels are in buf.sums"""
    gl.thread_barrier()
    add_up(buf.totals, buf.sums)
    gl.thread_barrier()
    # The tiles first: x reaches 2^116, and sums over size are large where the chunk has no pairs to speak of.
    dq -= widen(buf.q.permute((1, 0)).load(L)) * inverse(up) * buf.along[0].load(gl.SliceLayout(0, L))[None, :]
    dk -= widen(ky) * up * buf.along[1].load(gl.SliceLayout(0, L))[None, :]
    return dq, dk


@gluon.jit
def total_sums(buf, part: gl.constexpr, L: gl.constexpr):
    """The sums over all channels, [32]"""
    sums = buf.sums.index(part)
    by_token: gl.constexpr = gl.BlockedLayout([sums.shape[0], 1], [1, 32], [1, gl.num_warps()], [1, 0])  # each warp adds for itself
    return gl.convert_layout(gl.sum(sums.load(by_token), 0), L)


@gluon.jit
def store_tiles(xs, descs, ptrs, tiles, first, length, head, HV, K: gl.constexpr):
    """Write each of xs [K, 32] to rows first to first + length: by the copy engine through `tiles` [32, K] where that is possible"""
    aligned: gl.constexpr = ptrs[0].dtype.element_ty == tiles[0].dtype
    if aligned:
        if length == 32:
            for n in gl.static_range(len(xs)):
                tiles[n].permute((1, 0)).store(xs[n].to(tiles[n].dtype))
            fence_async_shared()
            for n in gl.static_range(len(xs)):
                tma.async_copy_shared_to_global(descs[n], [first, head * K], tiles[n])
    if not aligned or length < 32:
        L: gl.constexpr = xs[0].type.layout
        channel = gl.arange(0, K, layout=gl.SliceLayout(1, L))[:, None]
        token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :]
        at = (first.to(gl.int64) * HV + head) * K
        for n in gl.static_range(len(xs)):
            gl.store(ptrs[n] + at + token * (HV * K) + channel, xs[n].to(ptrs[n].dtype.element_ty), mask=token < length)


@gluon.jit
def load_gate(A_log_ptr, dt_bias_ptr, head, channel, F: gl.constexpr):
    """A_log as it is and dt_bias [K] in fp32 of a head, zero where there are none"""
    A_log = 0.0
    if A_log_ptr is not None:
        A_log = gl.load(A_log_ptr + head)
    bias = channel.to(gl.float32) * 0.0
    if dt_bias_ptr is not None:
        bias = gl.load(dt_bias_ptr + head * F.K + channel).to(gl.float32)
    return A_log, bias


@gluon.jit
def gate_constants(A_log, bias, lower_bound, F: gl.constexpr):
    """exp(A_log), dt_bias [K], and what token_decay takes: the activation reads gate * slope + offset and is scaled by factor"""
    rate = gl.exp(gl.to_tensor(A_log).to(gl.float32))
    slope = rate * -LOG2E
    factor = LOG2E
    if F.gate == "bounded":
        factor = lower_bound * LOG2E
    elif F.gate == "softplus":
        slope = LOG2E
        factor = -rate
    return rate, bias, slope, bias * slope, factor


@gluon.jit
def gate_chain(dg, gate, slope, offset, rate, bias, L: gl.constexpr, F: gl.constexpr):
    """From dg [K, 32], of bounded gates times lower_bound * rate: the gate's gradient, its sums over the tokens [K], and those of A_log's
    terms. Rows past the end that come with zero leave with zero, of bounded gates all of them."""
    x = widen(gate.permute((1, 0)).load(L))
    if F.gate == "softplus":
        x = x * slope + offset[:, None]
        bits = softplus2(x) * -rate
        dg = gl.where(bits < CUT_BITS, 0.0, dg)
        to_A_log = gl.sum(dg * bits, 1) * (1.0 / LOG2E)
        dg *= rcp(1.0 + ex2(-x)) * -rate
        return dg, gl.sum(dg, 1), to_A_log
    else:
        if F.gate == "bounded":
            e = ex2_below(x * slope + offset[:, None])
            s = rcp(1.0 + e)
            dg *= e * s * s  # the sigmoid's slope: the same on both sides
        elif F.any:
            dg = gl.where(x < CUT, 0.0, dg)
        total = gl.sum(dg, 1)
        return dg, total, gl.sum(dg * x, 1) + bias * total


@gluon.jit
def token_decay(gate, slope, offset, factor, L: gl.constexpr, F: gl.constexpr):
    """log2 of each token's decay [K, 32] from the gate's tile, but for the factor where the gate is bounded; else held at -SPAN"""
    x = widen(gate.permute((1, 0)).load(L))
    if F.gate == "bounded":
        x = rcp(1.0 + ex2(x * slope + offset[:, None]))
    elif F.gate == "softplus":
        x = softplus2(x * slope + offset[:, None])
    if F.any:
        x = hold(x * factor, LEAST_BITS)
    return x


def anchor_code() -> str:
    """PTX: in place of each number that of its anchor, the last token of the even block of 2^level tokens; the level is input 32."""
    text = ["{ .reg .b32 l, m; .reg .pred p<5>; .reg .f32 t; mov.u32 l, %laneid; and.b32 l, l, 3; and.b32 m, l, 2;"]
    text += [f"setp.eq.s32 p{level}, $32, {level};" for level in range(5)]
    text.append("selp.b32 l, m, l, p1; selp.b32 l, 1, l, p2; selp.b32 l, 3, l, p3; selp.b32 l, 3, l, p4;")
    for row in range(2):
        for g in range(4):
            first, second = (16 + 4 * g + 2 * row + c for c in range(2))
            text.append(f"selp.f32 t, ${first}, ${second}, p0;")
            for level, group in ((3, g // 2 * 2), (4, 1)):
                text.append(f"selp.f32 t, ${16 + 4 * group + 2 * row + 1}, t, p{level};")
            text.append(f"shfl.sync.idx.b32 t, t, l, 0x1c03, 0xffffffff; mov.f32 ${first - 16}, t; mov.f32 ${second - 16}, t;")
    return " ".join([*text, "}"])


ANCHORS = gl.constexpr(anchor_code())
CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 16 + ["f"] * 16 + ["r"] * 16))


@gluon.jit
def level_factor(G, level):
    """2^(G_r - G_a) in odd rows, 2^(G_a - G_i) in even ones"""
    levels = gl.full(G.shape, level, gl.int32, G.type.layout)
    return ex2(-gl.abs(G - gl.inline_asm_elementwise(ANCHORS, CONSTRAINTS, [G, levels], dtype=gl.float32, is_pure=True, pack=16)))
