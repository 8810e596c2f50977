"""Tiles and scores of fp16 blocks, in the level form.

fp16 cannot hold k / exp(G). For s = 1, 2, 4, 8, rows of the odd s-block meet rows of the even s-block before it, both anchored on the even
block's last row, so that every factor is at most 1: a row is either odd, with exp(G_r - G_a), or even, with exp(G_a - G_i), hence one tile
per level holds both sides of the product. The diagonal has no decay. An anchor precedes every row it serves: causality is bit-exact.

32 channels at a time, which pass through all levels in place; the state takes kg = k exp(G_C - G)."""

from __future__ import annotations

from openkda.hopper.blocks import both_operands, places
from openkda.hopper.compat import gl, gluon, mma_v2
from openkda.hopper.decay import gate_line, log2_decay
from openkda.hopper.tiles import WIDTH, add, block_layout, ex2, last, scaled_exp2, slice_views

SLICE = gl.constexpr(32)  # channels at a time


@gluon.jit
def halves(x, level: gl.constexpr):
    """The rows of even and of odd blocks of 2**level rows of x [warps, 16, n], as [warps, pairs, rows, n] each. Registers only."""
    s: gl.constexpr = 2**level
    n: gl.constexpr = x.shape[2]
    return gl.split(x.reshape([gl.num_warps(), 8 // s, 2, s, n]).permute((0, 1, 3, 4, 2)))


@gluon.jit
def level_exponents(G, level: gl.constexpr):
    """G_r - G_a in rows of odd blocks, G_a - G_i in rows of even ones, a the even block's last row"""
    G0, G1 = halves(G, level)
    a = gl.expand_dims(gl.min(G0, axis=2), 2)  # the last row's, G never rises
    both = gl.join(a - G0, G1 - a).permute((0, 1, 4, 2, 3))
    return gl.convert_layout(both.reshape(G.shape), G.type.layout)


@gluon.jit
def pair_products(kq, c: gl.constexpr, T: gl.constexpr):
    """k k^T and q k^T of the c-th 32 channels of what kq holds now"""
    mma: gl.constexpr = block_layout(gl.num_warps())
    zero = gl.zeros([gl.num_warps(), 16, 16], gl.float32, mma)
    k, kt = both_operands(kq, 0, c)
    qk = zero
    if T.outputs:
        q = kq.slice(16, 16, dim=1).slice(SLICE * c, SLICE, dim=2).load(gl.DotOperandLayout(0, mma, 2))
        qk = mma_v2(q, kt, zero)
    return mma_v2(k, kt, zero), qk


@gluon.jit
def level_slice(kq, g, ki, decay, first, c: gl.constexpr, src, work, kk, qk, T: gl.constexpr):
    """The c-th 32 channels of these tiles, channels from `first` on: the tiles, and their part of the scores"""
    L: gl.constexpr = gl.BlockedLayout([1, 16, 1], [1, 1, 32], [gl.num_warps(), 1, 1], [2, 1, 0])
    r, i = places()
    channel = first + gl.arange(0, SLICE, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    consts = gate_line(src, work.head, channel, T)
    raw = g.slice(SLICE * c, SLICE, dim=2).load(L)
    k_tile = kq.slice(0, 16, dim=1).slice(SLICE * c, SLICE, dim=2)
    q_tile = kq.slice(16, 16, dim=1).slice(SLICE * c, SLICE, dim=2)
    k = k_tile.load(L)
    q = q_tile.load(L)
    G = gl.associative_scan(log2_decay(raw, consts, T), 1, add)
    kk_c, qk_c = pair_products(kq, c, T)
    kk += gl.where(r == i, kk_c, 0.0)
    qk += gl.where(r == i, qk_c, 0.0)
    for level in gl.static_range(4):
        e = level_exponents(G, level)
        k_tile.store(scaled_exp2(k, e))
        if T.outputs:
            q_tile.store(scaled_exp2(q, e))
        kk_c, qk_c = pair_products(kq, c, T)
        below = ((r >> level) == (i >> level) + 1) & ((r >> (level + 1)) == (i >> (level + 1)))
        kk += gl.where(below, kk_c, 0.0)
        qk += gl.where(below, qk_c, 0.0)
    G_end = gl.reduce(G, 1, last)
    k_tile.store(scaled_exp2(k, G))
    if T.outputs:
        q_tile.store(scaled_exp2(q, G))
    ki.slice(0, 16, dim=1).slice(SLICE * c, SLICE, dim=2).store(scaled_exp2(k, gl.expand_dims(G_end, 1) - G))
    decay.slice(SLICE * c, SLICE, dim=1).store(ex2(G_end))
    return kk, qk


@gluon.jit
def level_tiles(ring, at, src, work, T: gl.constexpr):
    """kq = (kd, qd), ki = kg and decay of group `at` from its raw tiles; returns the lower halves of kd ki^T, qd ki^T"""
    kk = gl.zeros([gl.num_warps(), 16, 16], gl.float32, block_layout(gl.num_warps()))
    qk = kk
    for c in range(T.K // WIDTH):
        kq, g, ki, decay = slice_views(ring, at, c, T)
        for n in gl.static_range(WIDTH // SLICE):
            kk, qk = level_slice(kq, g, ki, decay, WIDTH * c + SLICE * n, n, src, work, kk, qk, T)
    return kk, qk
