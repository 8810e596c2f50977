"""Tiles and scores of bf16 blocks under any gate, in halves of 8 tokens.

The log2 decay of a token is held at -25 or above: a token that forgets more than that leaves 2^-25 of what was there, half an ulp of
fp32. Then 8 tokens span at most 2^200, which two factors share about a constant anchor a = ANCHOR. With G0, G1 the prefix sums inside the
first and the second half of a block, e0 = G0 of its last row = n + f, n = floor(e0):

    rows     k, q times exp(G0 + a)    first half         columns  k exp(-G0 - a)        pairs inside a half: one product of these
             k, q times exp(G1 + f + a)  second half               k exp(-G1 - f - a)
    then the rows of the second half times exp(n), exactly, n being an integer:
             k, q times exp(G + a), G the prefix sum of the block                        pairs across the halves: the same columns again

These last rows are the state's tiles too, kd and qd times 2^a; 2^-a goes into what multiplies the scan's products, row by row. Every
anchor is a constant or made of tokens before the rows it serves, so causality is bit-exact. Ranges: rows from 2^-104 up to 2^97, columns
up to 2^104 |k|: bf16 keys up to 2^20 and, where the halves meet, decays down to 2^-22. The state takes kg = k exp(G_C - G)."""

from __future__ import annotations

from openkda.hopper.compat import fence_async_shared, gl, gluon
from openkda.hopper.decay import log2_decay
from openkda.hopper.levels import all_pairs, diagonal
from openkda.hopper.tiles import add, ex2, floor, group_layout, half_layout, last, outward, scaled_exp2, shifted

ANCHOR = gl.constexpr(96.0)


@gluon.constexpr_function
def anchor(T):
    """log2 of what kd and qd carry beyond the decay: 0 but in this form"""
    return ANCHOR.value if T.form == "halves" else 0.0


@gluon.jit
def held(x):
    """x, at -25 or above; NaN stays"""
    return gl.inline_asm_elementwise("max.NaN.f32 $0, $1, 0fC1C80000;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def half(tile, first: gl.constexpr, T: gl.constexpr):
    """Rows first to first + 8 of both blocks of a step's tile, [2, 8, K]"""
    K: gl.constexpr = T.K
    return tile.reshape([2, tile.shape[0] // 2, K]).slice(first, 8, dim=1)


@gluon.jit
def half_sums(g, first: gl.constexpr, consts, T: gl.constexpr):
    """(prefix sum [2, 8, K], its last row [2, 1, K]) of the log2 decay of raw gate rows"""
    x = half(g, first, T).load(half_layout(T.K))
    G = gl.associative_scan(held(log2_decay(x, consts, T)), 1, add)
    return G, gl.expand_dims(gl.reduce(G, 1, last), 1)


@gluon.jit
def store_half(kq, ki, first: gl.constexpr, e, e_kg, T: gl.constexpr):
    """Rows k, q times 2^e and columns k 2^-e of one half, over the raw rows. Returns the rows and kg = k 2^e_kg."""
    L: gl.constexpr = half_layout(T.K)
    k = half(kq, first, T).load(L)
    if T.outputs:
        kr, qr, kc = outward(k, half(kq, 16 + first, T).load(L), e)
        half(kq, 16 + first, T).store(qr)
    else:
        kr = scaled_exp2(k, e)
        qr = kr
        kc = scaled_exp2(k, -e)
    half(kq, first, T).store(kr)
    half(ki, first, T).store(kc)
    return kr, qr, scaled_exp2(k, e_kg)


@gluon.jit
def half_step(kq, ki, g, decay, consts, T: gl.constexpr):
    """kq = (kd, qd) 2^ANCHOR, ki = kg and decay of a step from its raw tiles; returns the scores [4, 16, 16]"""
    K: gl.constexpr = T.K
    L: gl.constexpr = half_layout(K)
    G0, e0 = half_sums(g, 0, consts, T)
    G1, e1 = half_sums(g, 8, consts, T)
    n = floor(e0)
    decay.store(gl.reshape(ex2(e0 + e1), [2, K]))
    gl.thread_barrier()  # every warp has read the gate: ki lies over it
    _, _, kg0 = store_half(kq, ki, 0, G0 + ANCHOR, (e0 + e1) - G0, T)
    kr, qr, kg1 = store_half(kq, ki, 8, G1 + (e0 - n + ANCHOR), e1 - G1, T)
    fence_async_shared()
    inside = all_pairs(kq, ki)
    n0 = floor(n * 0.5)
    zero = gl.zeros([2, 8, K], gl.float32, L)
    a = (ex2(n0) + zero).to(kq.dtype)  # in two steps: 2^n may leave bf16's range
    b = (ex2(n - n0) + zero).to(kq.dtype)
    gl.thread_barrier()  # every warp's product is done with the tiles
    half(kq, 8, T).store(shifted(kr, a, b))
    if T.outputs:
        half(kq, 24, T).store(shifted(qr, a, b))
    fence_async_shared()
    across = all_pairs(kq, ki)
    w32: gl.constexpr = group_layout(32, 4)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, w32))[:, None]
    c = gl.arange(0, 32, layout=gl.SliceLayout(0, w32))[None, :]
    gl.thread_barrier()
    half(ki, 0, T).store(kg0)
    half(ki, 8, T).store(kg1)
    fence_async_shared()
    return diagonal(gl.where((r // 8) % 2 > (c // 8) % 2, across, inside))
