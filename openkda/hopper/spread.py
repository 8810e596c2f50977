"""The form in halves with two warps a block: all warps of a preparation partition turn two blocks at a time.

Where a block has one group or two to prepare (own tails), what counts is when the first is ready, not what it costs. With a warp a block,
four schedulers turn a block each, 32 numbers a thread at a time, and a fifth block takes as long again. Here a step of two blocks is 4
halves of 8 tokens, [4, 8, K]: a warp has half a block and 64 channels, a thread 8 tokens of two channels, so eight warps have a step, and
only steps that exist are turned. What a half needs of the other one, the last row of its sums, passes through shared memory. Then scores
are a block a warp again, all channels in a row (four warps do it, and the other four the same once more); so what they alone read lies in
memory of its own (Spread), not where the state's tiles are:

    kq      rows of both halves; after the scores the second one's times exp(n)
    ki      kg                      columns, across     what the scores read

The operations on a number are those of halves.py in the same order: the same bits."""

from __future__ import annotations

from openkda.hopper.compat import gl, gluon
from openkda.hopper.halves import ANCHOR, SHIFT, both_scores, held_line, last_row, prefix_sums, slice_scores, steepness
from openkda.hopper.tiles import (
    block_layout,
    ex2,
    ex2_denormal,
    floor,
    log2p,
    outward_key,
    plain_shared,
    scaled,
    shifted,
    stack_layout,
)


@gluon.constexpr_function
def step_layout():
    """[4, 8, K]: a warp holds 8 tokens of 64 channels, a thread 8 tokens of two"""
    return gl.BlockedLayout([1, 8, 2], [1, 1, 32], [4, 1, 2], [2, 1, 0])


@gluon.constexpr_function
def pair_layout(*rows):
    """The same of [2 blocks, 2 halves, (8,) K]"""
    n = len(rows)
    return gl.BlockedLayout([1, 1, *rows, 2], [1, 1] + [1] * n + [32], [2, 2] + [1] * n + [2], list(range(3 + n))[::-1])


@gluon.jit
def spread_constants(src, work, T: gl.constexpr):
    """(slope, offset, factor, most) as halves.slice_constants, of all channels"""
    K: gl.constexpr = T.K
    L: gl.constexpr = step_layout()
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    slope, offset, factor, most = held_line(src, work, channel, T)
    return slope, offset, factor, (most + gl.zeros([4, 8, K], gl.float32, L)).to(src.g.dtype)


@gluon.jit
def step_view(tiles, s, rows: gl.constexpr, T: gl.constexpr):
    """The two blocks of the s-th step of tiles [rows, K], [2, rows, K]"""
    bits: gl.constexpr = tiles.dtype.primitive_bitwidth
    return tiles._reinterpret(tiles.dtype, [tiles.shape[0] // 2, 2, rows, T.K], stack_layout(2, rows, T.K, bits)).index(s)


@gluon.jit
def half_rows(tiles, s, T: gl.constexpr):
    """The first 16 rows of the two blocks of the s-th step, [2, 2, 8, K]"""
    rows: gl.constexpr = tiles.shape[1]
    return step_view(tiles, s, rows, T).reshape([2, rows // 8, 8, T.K]).slice(0, 2, dim=1)


@gluon.jit
def load_rows(kq, n: gl.constexpr, T: gl.constexpr):
    """k (n = 0) or q of a step, [4, 8, K]"""
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8, 2], [1, 1, 1, 1, 32], [2, 1, 2, 1, 2], [4, 3, 2, 1, 0])
    x = kq.slice(n, 1, dim=1).load(L).reshape([4, 8, T.K])
    return gl.convert_layout(x, step_layout(), assert_trivial=True)


@gluon.jit
def edge_rows(edges, h: gl.constexpr, T: gl.constexpr):
    """What the step's first (h = 0) or second halves left in edges, [2, 1, K]"""
    return edges._reinterpret(gl.float32, [2, 2, T.K], plain_shared(3)).slice(h, 1, dim=1).load(pair_layout())


@gluon.jit
def by_half(first, second, T: gl.constexpr):
    """[4, 1, K] of what first and second halves take, [2, 1, K] each"""
    L: gl.constexpr = pair_layout()
    h = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    x = gl.where(h == 0, first, second).reshape([4, T.K])
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, step_layout()), assert_trivial=True), 1)


@gluon.jit
def turn_step(ring, s, n, consts, T: gl.constexpr):
    """The s-th step of the ring, the n-th of its group: the tiles of the scores and of the state over its raw ones, but for the factor
    exp(n) of the second halves' rows"""
    K: gl.constexpr = T.K
    zero = gl.zeros([4, 8, K], gl.float32, step_layout())
    dtype: gl.constexpr = ring.kq.dtype
    factor = consts[2]
    steep, base = steepness(factor, T)
    kq = step_view(ring.kq, s, 32, T).reshape([2, 2, 2, 8, K])
    raw = half_rows(ring.g, s, T).load(pair_layout(8)).reshape([4, 8, K])
    k = load_rows(kq, 0, T)
    queries = load_rows(kq, 1, T)
    P, grown = prefix_sums(gl.convert_layout(raw, step_layout(), assert_trivial=True), consts, steep, T)
    ring.beside.edges.store(gl.reshape(last_row(P) * factor + base, [4, K]))
    if T.gate == "softplus":
        ring.beside.grown.store(gl.reshape(grown, [4, K]))
    e0 = edge_rows(ring.beside.edges, 0, T)
    e1 = edge_rows(ring.beside.edges, 1, T)
    whole = floor(e0)
    a1 = e0 - whole + ANCHOR
    p = e0 + e1
    if T.gate == "softplus":
        q0 = edge_rows(ring.beside.grown, 0, T)
        q1 = edge_rows(ring.beside.grown, 1, T)
        q = q0 + (q0 * q1 + q1)
        p = gl.where(q <= 1.0, log2p(q) * factor, p)
    ring.decay._reinterpret(gl.float32, [T.wide * T.groups // 2, 2, K], plain_shared(2)).index(s).store(ex2(p).reshape([2, K]))
    ring.beside.down.index(n).store(ex2(gl.maximum(whole, -126.0)).to(dtype).reshape([2, K]))
    e = P * factor + by_half(base + ANCHOR, base + a1, T)
    up = ex2(e)
    rows, columns, kg = outward_key(k, up, e, ex2_denormal(by_half(e0 + e1 + ANCHOR, e1 + a1, T)) + zero)
    across = shifted(columns, (ex2(by_half(whole, whole, T) + SHIFT) + zero).to(dtype))
    kq.store(gl.join(rows, scaled(queries, up)).reshape([2, 2, 8, K, 2]).permute((0, 4, 1, 2, 3)))
    half_rows(ring.ki, s, T).store(kg.reshape([2, 2, 8, K]))
    half_rows(ring.beside.columns, n, T).store(columns.reshape([2, 2, 8, K]))
    half_rows(ring.beside.across, n, T).store(across.reshape([2, 2, 8, K]))


@gluon.jit
def turn_down(kq, down, T: gl.constexpr):
    """The second halves' rows times exp(n), for the state: 16 bytes at a time"""
    W: gl.constexpr = T.wide
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 8], [1, 1, 1, 2, 16], [W, 2, 1, 1, 1], [4, 3, 2, 1, 0])
    rows = kq.reshape([W, 2, 2, 8, T.K]).slice(1, 1, dim=2)
    by = down._reinterpret(down.dtype, [W, 1, 1, 1, T.K], plain_shared(5)).load(L)
    rows.store(shifted(rows.load(L), by))


@gluon.jit
def spread_tiles(ring, at, work, group, consts, T: gl.constexpr):
    """As halves.half_tiles, of group `group` of the item, in place `at` of the ring"""
    K: gl.constexpr = T.K
    W: gl.constexpr = T.wide
    dtype: gl.constexpr = ring.kq.dtype
    per: gl.constexpr = T.wide // 2  # steps of a group
    for n in range(gl.minimum(work.steps - per * group, per)):
        turn_step(ring, per * at + n, n, consts, T)
    zero = gl.zeros([W, 16, 8], gl.float32, block_layout(gl.num_warps()))
    kq = ring.kq._reinterpret(dtype, [T.groups, W, 32, K], stack_layout(W, 32, K, 16)).index(at)
    columns = ring.beside.columns._reinterpret(dtype, [W, 16, K], stack_layout(W, 16, K, 16))
    across = ring.beside.across._reinterpret(dtype, [W, 16, K], stack_layout(W, 16, K, 16))
    near0, near1, far = slice_scores(kq, columns, across, zero, zero, zero, K, T)
    turn_down(kq, ring.beside.down, T)
    return both_scores(near0, near1, far)
