"""Tiles and scores of bf16 blocks under any gate, in halves of 8 tokens.

The log2 decay of a token is held at -25 or above: a token that forgets more than that leaves 2^-25 of what was there, half an ulp of
fp32. Then 8 tokens span at most 2^200, which two factors share about a constant anchor a = ANCHOR. With G0, G1 the prefix sums inside the
first and the second half of a block, e0, e1 their last rows, e0 = n + f, n = floor(e0):

    rows     k, q times exp(G0 + a)       first half      columns  k exp(-G0 - a)        pairs inside a half: one product of these
             k, q times exp(G1 + f + a)   second half              k exp(-G1 - f - a)
    then the rows of the second half times exp(n), exactly, n being an integer:
             k, q times exp(G + a), G the prefix sum of the block                        pairs across the halves: the same columns again

These last rows are the state's tiles too, kd and qd times 2^a; 2^-a goes into what multiplies the scan's products, row by row. The state
takes kg = k exp(G_C - G): the columns, in fp32, times exp(e0 + e1 + a) and exp(e1 + f + a). That is three exponentials an element where
the product form of a bounded gate has four. Every anchor is a constant or made of tokens before the rows it serves, so causality is
bit-exact. Ranges: rows from 2^-104 up to 2^97, columns up to 2^104 |k|: bf16 keys up to 2^20 and, where the halves meet, decays down to
2^-22.

G is kept as factor * P, the factor being the head's: each exponential's argument is one multiply-add of P."""

from __future__ import annotations

from openkda.hopper.blocks import places, scores
from openkda.hopper.compat import gl, gluon, mma_v2
from openkda.hopper.decay import activate, gate_line
from openkda.hopper.tiles import (
    WIDTH,
    add,
    block_layout,
    channel_layout,
    ex2,
    ex2_denormal,
    floor,
    last,
    outward_key,
    outward_rows,
    shifted,
    to_f32,
)

ANCHOR = gl.constexpr(96.0)
MOST = gl.constexpr(25.0)  # bits that one token forgets at most


@gluon.constexpr_function
def anchor(T):
    """log2 of what kd and qd carry beyond the decay: 0 but in this form"""
    return ANCHOR.value if T.form == "halves" else 0.0


@gluon.jit
def held(x, most):
    """min(x, most); NaN stays"""
    return gl.inline_asm_elementwise("min.NaN.f32 $0, $1, $2;", "=r,r,r", [x, most], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def slice_constants(src, work, first: gl.constexpr, T: gl.constexpr):
    """(slope, offset, factor, most) of channels first to first + WIDTH: a token forgets -factor * min(activation, most) bits"""
    L: gl.constexpr = channel_layout(WIDTH, 8)
    channel = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    slope, offset, factor = gate_line(src, work.head, channel, T)
    if T.gate == "none":
        slope = -slope
        factor = -factor
    return slope, offset, factor, gl.zeros([4, 8, WIDTH], gl.float32, L) - MOST / factor


@gluon.jit
def half_constants(src, work, T: gl.constexpr):
    """slice_constants of the first and of the last WIDTH channels"""
    return slice_constants(src, work, 0, T), slice_constants(src, work, T.K - WIDTH, T)


@gluon.jit
def half_sums(g, h: gl.constexpr, c: gl.constexpr, consts, T: gl.constexpr):
    """(prefix sum P [4, 8, WIDTH], its last row [4, 1, WIDTH]) of the held activations of half h, slice c of the raw gate"""
    slope, offset, _, most = consts
    x = g.slice(8 * h, 8, dim=1).slice(WIDTH * c, WIDTH, dim=2).load(channel_layout(WIDTH, 8))
    P = gl.associative_scan(held(activate(to_f32(x) * slope + offset, T), most), 1, add)
    return P, gl.expand_dims(gl.reduce(P, 1, last), 1)


@gluon.jit
def load_half(kq, h: gl.constexpr, c: gl.constexpr, T: gl.constexpr):
    """k and q (k again where no output is asked) of half h, slice c, [4, 8, WIDTH] each"""
    L: gl.constexpr = channel_layout(WIDTH, 8)
    k = kq.slice(8 * h, 8, dim=1).slice(WIDTH * c, WIDTH, dim=2).load(L)
    q = k
    if T.outputs:
        q = kq.slice(16 + 8 * h, 8, dim=1).slice(WIDTH * c, WIDTH, dim=2).load(L)
    return k, q


@gluon.jit
def store_half(kq, h: gl.constexpr, c: gl.constexpr, k, q, both: gl.constexpr, T: gl.constexpr):
    """The same back: k, and q where `both`, in one store, as two would have a barrier between them"""
    if both:
        rows = gl.join(k, q).permute((0, 3, 1, 2))
        kq.reshape([4, 2, 16, T.K]).slice(8 * h, 8, dim=2).slice(WIDTH * c, WIDTH, dim=3).store(rows)
    else:
        kq.slice(8 * h, 8, dim=1).slice(WIDTH * c, WIDTH, dim=2).store(k)


@gluon.jit
def make_half(kq, ki, h: gl.constexpr, c: gl.constexpr, k, q, e, w, T: gl.constexpr):
    """Rows k, q times 2^e and columns k 2^-e of half h, slice c, over the raw rows. Returns kg = k 2^-e w; without outputs kg waits in
    q's place, not in registers."""
    if T.outputs:
        k, q, columns, kg = outward_rows(k, q, e, w)
    else:
        k, columns, kg = outward_key(k, e, w)
        q = kg
    store_half(kq, h, c, k, q, True, T)
    ki.slice(8 * h, 8, dim=1).slice(WIDTH * c, WIDTH, dim=2).store(columns)
    return kg


@gluon.jit
def raw_to_near(kq, g, ki, decay, c: gl.constexpr, consts, T: gl.constexpr):
    """Slice c: decay, and the tiles for pairs inside halves. Returns kg of both halves, and n."""
    L: gl.constexpr = channel_layout(WIDTH, 8)
    factor = consts[2]
    P0, p0 = half_sums(g, 0, c, consts, T)
    P1, p1 = half_sums(g, 1, c, consts, T)
    k0, q0 = load_half(kq, 0, c, T)
    k1, q1 = load_half(kq, 1, c, T)
    e0 = p0 * factor
    e1 = p1 * factor
    n = floor(e0)
    a1 = e0 - n + ANCHOR
    decay.slice(WIDTH * c, WIDTH, dim=1).store(gl.reshape(ex2(e0 + e1), [4, WIDTH]))
    zero = gl.zeros([4, 8, WIDTH], gl.float32, L)
    kg0 = make_half(kq, ki, 0, c, k0, q0, P0 * factor + ANCHOR, ex2_denormal(e0 + e1 + ANCHOR) + zero, T)
    kg1 = make_half(kq, ki, 1, c, k1, q1, P1 * factor + a1, ex2_denormal(e1 + a1) + zero, T)
    return kg0, kg1, n


@gluon.jit
def far_rows(kq, c: gl.constexpr, n, T: gl.constexpr):
    """k and q rows of the second half, slice c, times 2^n, in two steps: 2^n may leave bf16's range"""
    k, q = load_half(kq, 1, c, T)
    m = floor(n * 0.5)
    zero = gl.zeros([4, 8, WIDTH], gl.float32, channel_layout(WIDTH, 8))
    a = (ex2(m) + zero).to(kq.dtype)
    b = (ex2(n - m) + zero).to(kq.dtype)
    k = shifted(k, a, b)
    if T.outputs:
        q = shifted(q, a, b)
    else:
        q = k
    return k, q


@gluon.jit
def twice(x):
    """[4, 16, 8] to [4, 16, 16], every row twice; registers only"""
    return gl.convert_layout(gl.join(x, x).permute((0, 1, 3, 2)).reshape([4, 16, 16]), block_layout())


@gluon.jit
def scores_across(kq, ki, kk, qk, T: gl.constexpr):
    """kk and qk with the pairs of second-half rows and first-half columns from the tiles as they are now"""
    mma: gl.constexpr = block_layout()
    d0: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    zero = gl.zeros([4, 16, 8], gl.float32, mma)
    k0, k1, q = zero, zero, zero
    for c in gl.static_range(T.K // 32):
        columns = ki.permute((0, 2, 1)).slice(0, 8, dim=2).slice(32 * c, 32, dim=1).load(gl.DotOperandLayout(1, mma, 2))
        rows = kq.slice(0, 16, dim=1).slice(32 * c, 32, dim=2).load(d0)
        if c % 2 == 0:
            k0 = mma_v2(rows, columns, k0)
        else:
            k1 = mma_v2(rows, columns, k1)
        if T.outputs:
            q = mma_v2(kq.slice(16, 16, dim=1).slice(32 * c, 32, dim=2).load(d0), columns, q)
    r, i = places()
    across = (r >= 8) & (i < 8)
    return gl.where(across, twice(k0 + k1), kk), gl.where(across, twice(q), qk)


@gluon.jit
def half_tiles(kq, g, ki, decay, consts, T: gl.constexpr):
    """kq = (kd, qd) 2^ANCHOR, ki = kg and decay of a group from its raw tiles; returns the scores kd ki^T, qd ki^T"""
    c0, c1 = consts
    kg00, kg01, n0 = raw_to_near(kq, g, ki, decay, 0, c0, T)
    if T.K > WIDTH:
        kg10, kg11, n1 = raw_to_near(kq, g, ki, decay, 1, c1, T)
    kk, qk = scores(kq, ki, T)
    k0, q0 = far_rows(kq, 0, n0, T)
    if T.K > WIDTH:
        k1, q1 = far_rows(kq, 1, n1, T)
        store_half(kq, 1, 1, k1, q1, T.outputs, T)
    store_half(kq, 1, 0, k0, q0, T.outputs, T)
    kk, qk = scores_across(kq, ki, kk, qk, T)
    if T.outputs:
        ki.slice(0, 8, dim=1).slice(0, WIDTH, dim=2).store(kg00)
        ki.slice(8, 8, dim=1).slice(0, WIDTH, dim=2).store(kg01)
        if T.K > WIDTH:
            ki.slice(0, 8, dim=1).slice(WIDTH, WIDTH, dim=2).store(kg10)
            ki.slice(8, 8, dim=1).slice(WIDTH, WIDTH, dim=2).store(kg11)
    else:
        for h in gl.static_range(2):
            ki.slice(8 * h, 8, dim=1).store(kq.slice(16 + 8 * h, 8, dim=1).load(channel_layout(T.K, 8)))
    return kk, qk
