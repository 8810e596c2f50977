"""Tiles and scores of bf16 blocks under any gate, in halves of 8 tokens.

The log2 decay of a token is held at -25 or above: a token that forgets more than that leaves 2^-25 of what was there, half an ulp of
fp32. (It is the raw gate that is held, at the last value of its own type that forgets no more.) Then 8 tokens span at most 2^200, which two
factors share about a constant anchor a = ANCHOR. With G0, G1 the prefix sums inside the first and the second half of a block, e0, e1 their
last rows, e0 = n + f, n = floor(e0):

    first half     rows  k, q times exp(G0 + a)          columns  k exp(-G0 - a)         pairs inside a half: one product of these
    second half    rows  k, q times exp(G1 + f + a)      columns  k exp(-G1 - f - a)
    across         the second half's rows                columns  of the first half times exp(n), exactly, n being an integer

The state's kd and qd are the first half's rows and the second half's times exp(n), all with 2^a; 2^-a goes into what multiplies the scan's
products, row by row. It takes kg = k exp(G_C - G): the columns, in fp32, times exp(e0 + e1 + a) and exp(e1 + f + a). Every anchor is
a constant or made of tokens before the rows it serves, so causality is bit-exact. Ranges: rows from 2^-104 up to 2^97, columns up to
2^104 |k|, products across up to 2^77 |k|^2: keys from 2^-20 to 2^20.

A slice of 64 channels at a time: raw tiles become those of the scores; after its products, those that the state reads.

**Softplus.** The sums are log2 of products: with e_t = 2^x_t, log2 prod(1 + e_t) = log2(1 + q), q <- q + e (1 + q). Kept as 2^-BASE q, the
products of 8 tokens of 25 bits fit fp32 where exp(A_log) >= STEEP; heads with less sum a polynomial's values (2^x may overflow there). lg2
is exact to 2^-16, which is nothing to an exponent of a bf16 tile, but a slow decay is smaller than that: the state's decay over a block
where q <= 1 is log2(1 + q) by the polynomial, whose relative error is below 1e-5 however small q is.

G is kept as factor * (P + base), the factor being the head's: each exponential's argument is one multiply-add of P."""

from __future__ import annotations

from openkda.hopper.compat import gl, gluon, mma_v2
from openkda.hopper.decay import activate, gate_line
from openkda.hopper.tiles import (
    LOG2E,
    WIDTH,
    add,
    block_layout,
    channel_layout,
    ex2,
    ex2_denormal,
    floor,
    last,
    log2p,
    outward_key,
    rcp,
    scaled,
    shifted,
    slice_views,
    stack_layout,
    to_f32,
)

ANCHOR = gl.constexpr(96.0)
SHIFT = gl.constexpr(76.0)  # products across carry 2^SHIFT: exp(n + SHIFT) is a bf16 number
MOST = gl.constexpr(25.0)  # bits that one token forgets at most
STEEP = gl.constexpr(0.93)
BASE = gl.constexpr(90.0)
LEAST = gl.constexpr(2.0**-90)


@gluon.constexpr_function
def anchor(T):
    """log2 of what kd and qd carry beyond the decay: 0 but in this form"""
    return ANCHOR.value if T.form == "halves" else 0.0


@gluon.constexpr_function
def held_code(dtype, T):
    """PTX of held"""
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2" if dtype == gl.float16 else "f32"
    return f"{'max' if T.gate == 'none' else 'min'}.NaN.{kind} $0, $1, $2;"


@gluon.jit
def held(x, most, T: gl.constexpr):
    """The raw gate x, in its own type, or `most` where a token forgets more; NaN stays"""
    code: gl.constexpr = held_code(x.dtype, T)
    pack: gl.constexpr = 32 // x.dtype.primitive_bitwidth
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(code, "=r,r,r", [x, most], dtype=gl.bfloat16, is_pure=True, pack=pack)
    elif x.dtype == gl.float16:
        return gl.inline_asm_elementwise(code, "=r,r,r", [x, most], dtype=gl.float16, is_pure=True, pack=pack)
    else:
        return gl.inline_asm_elementwise(code, "=r,r,r", [x, most], dtype=gl.float32, is_pure=True, pack=pack)


@gluon.jit
def lg2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def held_line(src, work, channel, T: gl.constexpr):
    """(slope, offset, factor, most): a token forgets -factor * activation(gate * slope + offset) bits, at most MOST, which the gate `most`
    does"""
    slope, offset, factor = gate_line(src, work.head, channel, T)
    if T.gate == "softplus":
        z = -MOST * rcp(factor * LOG2E)
        most = gl.where(z < 0.01, lg2(z), z * LOG2E + lg2(1.0 - ex2(-LOG2E * z))) * (1 / LOG2E) - offset / LOG2E
    else:
        slope = -slope
        factor = -factor
        most = offset * 0.0 - MOST / LOG2E
    most += gl.abs(most) * (0.0078125 if T.gate == "none" else -0.0078125)
    return slope, offset, factor, most


@gluon.jit
def slice_constants(src, work, first: gl.constexpr, T: gl.constexpr):
    """held_line of channels first to first + WIDTH"""
    L: gl.constexpr = channel_layout(WIDTH, 8, gl.num_warps())
    channel = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    slope, offset, factor, most = held_line(src, work, channel, T)
    return slope, offset, factor, (most + gl.zeros([gl.num_warps(), 8, WIDTH], gl.float32, L)).to(src.g.dtype)


@gluon.jit
def half_constants(src, work, T: gl.constexpr):
    """slice_constants of the first and of the last WIDTH channels"""
    return slice_constants(src, work, 0, T), slice_constants(src, work, T.K - WIDTH, T)


@gluon.jit
def grow(c1, e1, c2, e2):
    """(LEAST q, e) of a token and all before it"""
    return c1 + e2 * (c1 + LEAST), e2


@gluon.jit
def last_row(x):
    return gl.expand_dims(gl.reduce(x, 1, last), 1)


@gluon.jit
def steepness(factor, T: gl.constexpr):
    """(whether softplus gates go through products, base)"""
    steep = factor <= -STEEP
    return steep, gl.where(steep, factor * BASE, 0.0) if T.gate == "softplus" else 0.0


@gluon.jit
def half_sums(g, h: gl.constexpr, consts, steep, T: gl.constexpr):
    """prefix_sums of half h, [warps, 8, WIDTH]"""
    raw = g.slice(8 * h, 8, dim=1).slice(0, WIDTH, dim=2).load(channel_layout(WIDTH, 8, gl.num_warps()))
    return prefix_sums(raw, consts, steep, T)


@gluon.jit
def prefix_sums(raw, consts, steep, T: gl.constexpr):
    """(P [n, 8, channels], q [n, 1, channels]) of raw gates: P + base is the prefix sum of the activations over 8 tokens; its last row is
    log2(1 + q), more exactly, where q <= 1"""
    slope, offset, _, most = consts
    x = to_f32(held(raw, most, T)) * slope + offset
    if T.gate == "softplus":
        if steep:
            e = ex2(x)
            C = gl.associative_scan((e * LEAST, e), 1, grow)[0]
            P = lg2(C + LEAST)
            q = last_row(C) / LEAST
        else:
            P = gl.associative_scan(activate(x, T), 1, add)
            q = last_row(P) * 0.0 + 2.0
    else:
        P = gl.associative_scan(x, 1, add)
        q = last_row(P)
    return P, q


@gluon.jit
def load_half(kq, h: gl.constexpr, T: gl.constexpr):
    """k and q (k again where no output is asked) of half h, [warps, 8, WIDTH] each"""
    L: gl.constexpr = channel_layout(WIDTH, 8, gl.num_warps())
    k = kq.slice(8 * h, 8, dim=1).slice(0, WIDTH, dim=2).load(L)
    q = k
    if T.outputs:
        q = kq.slice(16 + 8 * h, 8, dim=1).slice(0, WIDTH, dim=2).load(L)
    return k, q


@gluon.jit
def outward_half(kq, ki, h: gl.constexpr, k, q, e, w, T: gl.constexpr):
    """Half h: k 2^e and k 2^-e, then q 2^e, which needs fewer registers than all at once. Returns (k 2^-e, k 2^-e w).

    k and q in one store, without the barrier between two, take 1 to 3 % off small calls and state passes; blocks in clusters get 1.5 %
    slower."""
    up = ex2(e)
    rows, columns, kg = outward_key(k, up, e, w)
    if T.cluster:
        kq.slice(8 * h, 8, dim=1).slice(0, WIDTH, dim=2).store(rows)
        ki.slice(8 * h, 8, dim=1).slice(0, WIDTH, dim=2).store(columns)
        kq.slice(16 + 8 * h, 8, dim=1).slice(0, WIDTH, dim=2).store(scaled(q, up))
    else:
        ki.slice(8 * h, 8, dim=1).slice(0, WIDTH, dim=2).store(columns)
        store_rows(kq, h, rows, scaled(q, up) if T.outputs else rows, T)
    return columns, kg


@gluon.jit
def store_rows(kq, h: gl.constexpr, k, q, T: gl.constexpr):
    """Half h of k and q back, in one store: two would have a barrier between them"""
    if T.outputs:
        rows = gl.join(k, q).permute((0, 3, 1, 2))
        kq.reshape([gl.num_warps(), 2, 16, T.K]).slice(8 * h, 8, dim=2).slice(0, WIDTH, dim=3).store(rows)
    else:
        kq.slice(8 * h, 8, dim=1).slice(0, WIDTH, dim=2).store(k)


@gluon.jit
def store_columns(ki, first, second, T: gl.constexpr):
    """Both halves into ki, in one store likewise"""
    both = gl.join(first, second).permute((0, 3, 1, 2))
    ki.reshape([gl.num_warps(), ki.shape[1] // 8, 8, T.K]).slice(0, 2, dim=1).slice(0, WIDTH, dim=3).store(both)


@gluon.jit
def make_slice(kq, g, ki, across, decay, consts, T: gl.constexpr):
    """decay, and the tiles of the scores, over a slice's raw ones. Returns exp(n), for the second half's rows, and kg of both halves."""
    L: gl.constexpr = channel_layout(WIDTH, 8, gl.num_warps())
    zero = gl.zeros([gl.num_warps(), 8, WIDTH], gl.float32, L)
    factor = consts[2]
    steep, base = steepness(factor, T)
    P0, q0 = half_sums(g, 0, consts, steep, T)
    P1, q1 = half_sums(g, 1, consts, steep, T)
    e0 = last_row(P0) * factor + base
    e1 = last_row(P1) * factor + base
    n = floor(e0)
    a1 = e0 - n + ANCHOR
    p = e0 + e1
    if T.gate == "softplus":
        q = q0 + (q0 * q1 + q1)
        p = gl.where(q <= 1.0, log2p(q) * factor, p)
    k0, q0 = load_half(kq, 0, T)
    decay.slice(0, WIDTH, dim=1).store(gl.reshape(ex2(p), [gl.num_warps(), WIDTH]))
    c0, kg0 = outward_half(kq, ki, 0, k0, q0, P0 * factor + (base + ANCHOR), ex2_denormal(e0 + e1 + ANCHOR) + zero, T)
    across.store(shifted(c0, (ex2(n + SHIFT) + zero).to(kq.dtype)))
    k1, q1 = load_half(kq, 1, T)
    _, kg1 = outward_half(kq, ki, 1, k1, q1, P1 * factor + (base + a1), ex2_denormal(e1 + a1) + zero, T)
    return ex2(gl.maximum(n, -126.0)), kg0, kg1


@gluon.jit
def finish_slice(kq, ki, down, kg0, kg1, T: gl.constexpr):
    """What the state reads, over what only the scores did"""
    k, q = load_half(kq, 1, T)
    down = (down + gl.zeros([gl.num_warps(), 8, WIDTH], gl.float32, channel_layout(WIDTH, 8, gl.num_warps()))).to(kq.dtype)
    store_rows(kq, 1, shifted(k, down), shifted(q, down), T)
    store_columns(ki, kg0, kg1, T)


@gluon.constexpr_function
def stacked_layout(blocks, warps):
    """8 rows of k and the same 8 of q, [blocks, 2, 1, 8, 32], as the rows of a left operand [blocks, 16, 32]"""
    at = lambda dim, n: [n if d == dim else 0 for d in range(5)]
    return gl.DistributedLinearLayout(
        reg_bases=[at(4, 1), at(1, 1), at(4, 8), at(4, 16)],
        lane_bases=[at(4, 2), at(4, 4), at(3, 1), at(3, 2), at(3, 4)],
        warp_bases=[at(0, (1 << i) % blocks) for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[blocks, 2, 1, 8, 32],
    )


@gluon.jit
def stacked_rows(kq, h: gl.constexpr, first: gl.constexpr, T: gl.constexpr):
    """8 rows of k above 8 of q, those of half h and 32 channels, as a left operand"""
    x = kq.reshape([T.wide, 2, 2, 8, T.K]).slice(h, 1, dim=2).slice(first, 32, dim=4).load(stacked_layout(T.wide, gl.num_warps()))
    L: gl.constexpr = gl.DotOperandLayout(0, block_layout(gl.num_warps()), 2)
    return gl.convert_layout(x.reshape([T.wide, 16, 32]), L, assert_trivial=True)


@gluon.jit
def slice_scores(kq, ki, across, near0, near1, far, channels: gl.constexpr, T: gl.constexpr):
    """Adds a slice of so many channels to the products of rows and columns of the first half, of the second, and of second-half rows with
    first-half columns; [blocks, 16, 8] each: 8 rows of k, 8 of q"""
    d1: gl.constexpr = gl.DotOperandLayout(1, block_layout(gl.num_warps()), 2)
    for n in gl.static_range(channels // 32):
        r0 = stacked_rows(kq, 0, 32 * n, T)
        r1 = stacked_rows(kq, 1, 32 * n, T)
        columns = ki.permute((0, 2, 1)).slice(32 * n, 32, dim=1)
        near0 = mma_v2(r0, columns.slice(0, 8, dim=2).load(d1), near0)
        near1 = mma_v2(r1, columns.slice(8, 8, dim=2).load(d1), near1)
        far = mma_v2(r1, across.permute((0, 2, 1)).slice(32 * n, 32, dim=1).slice(0, 8, dim=2).load(d1), far)
    return near0, near1, far


@gluon.jit
def rows_of(x):
    """The k and the q rows of stacked products, [blocks, 8, 8] each"""
    return gl.split(x.reshape([x.shape[0], 2, 8, 8]).permute((0, 2, 3, 1)))


@gluon.jit
def whole_block(near0, near1, far):
    """[blocks, 16, 16] from its quarters; the upper right one is never read"""
    top = gl.join(near0, near0).permute((0, 1, 3, 2)).reshape([far.shape[0], 8, 16])
    bottom = gl.join(far, near1).permute((0, 1, 3, 2)).reshape([far.shape[0], 8, 16])
    both = gl.join(top, bottom).permute((0, 3, 1, 2)).reshape([far.shape[0], 16, 16])
    return gl.convert_layout(both, block_layout(gl.num_warps()), assert_trivial=True)


@gluon.jit
def half_tiles(ring, at, consts, T: gl.constexpr):
    """kq = (kd, qd) 2^ANCHOR, ki = kg and decay of group `at` from its raw tiles; returns the scores kd ki^T, qd ki^T 2^ANCHOR."""
    c0, c1 = consts
    zero = gl.zeros([gl.num_warps(), 16, 8], gl.float32, block_layout(gl.num_warps()))
    near0, near1, far = zero, zero, zero
    L: gl.constexpr = stack_layout(gl.num_warps(), 8, WIDTH, 16)
    across = ring.tz._reinterpret(ring.kq.dtype, [T.groups, T.wide, 8, WIDTH], L).index(at)  # free until T0 is there
    for c in range(T.K // WIDTH):
        kq, g, ki, decay = slice_views(ring, at, c, T)
        here = c0[0], gl.where(c == 0, c0[1], c1[1]), c0[2], gl.where(c == 0, c0[3], c1[3])
        down, kg0, kg1 = make_slice(kq, g, ki, across, decay, here, T)
        near0, near1, far = slice_scores(kq, ki, across, near0, near1, far, WIDTH, T)
        finish_slice(kq, ki, down, kg0, kg1, T)
    return both_scores(near0, near1, far)


@gluon.jit
def both_scores(near0, near1, far):
    """The scores kd ki^T, qd ki^T 2^ANCHOR from the sums of slice_scores"""
    k00, q00 = rows_of(near0)
    k11, q11 = rows_of(near1)
    k10, q10 = rows_of(far * 2.0**-SHIFT)
    return whole_block(k00, k11, k10), whole_block(q00, q11, q10) * 2.0**ANCHOR
