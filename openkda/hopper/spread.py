"""A step at a time by all warps of a preparation partition, where a block has a group or two to prepare (own tails) and what counts is when
the first is ready, not what it costs.

With a warp a block, four schedulers turn a block each, 32 numbers a thread at a time, and a fifth block takes as long again. Here B blocks
are 2 B halves of 8 tokens, [2 B, 8, K]: a warp has half a block and 64 channels, a thread 8 tokens of two channels, so B is a quarter of
the warps: eight have a step of two blocks, and only steps that exist are turned, each when its tiles have landed. What a half needs of the
other one, the last row of its sums, passes through shared memory. Norms of q are the scan's to take, which has nothing to do as yet; and
under unbounded gates, where steps take longer, its four warps turn the last block of an odd number. Then scores and inverse are a block a
warp again (in groups of four, four warps do them, and the other four the same once more).

    form "product"     G of the second half is e0 + its own sums: kq, ki, decay as in prep.py
    form "halves"      kq rows of both halves, after the scores the second one's times exp(n); ki kg; columns and across, which the scores
                       alone read, in memory of their own. The operations on a number are those of halves.py in the same order, so the
                       bits are the same."""

from __future__ import annotations

from openkda.hopper.blocks import query_norms, scores
from openkda.hopper.compat import gl, gluon, mbarrier
from openkda.hopper.decay import gate_line, log2_decay
from openkda.hopper.halves import ANCHOR, SHIFT, anchor, both_scores, held_line, last_row, prefix_sums, slice_scores, steepness
from openkda.hopper.tiles import (
    add,
    block_layout,
    by_scan,
    ex2,
    ex2_denormal,
    floor,
    group_count,
    log2p,
    outward,
    outward_key,
    plain_shared,
    scaled,
    shifted,
    stack_layout,
)


@gluon.constexpr_function
def step_layout(B):
    """[2 B, 8, K]: a warp holds 8 tokens of 64 channels, a thread 8 tokens of two"""
    return gl.BlockedLayout([1, 8, 2], [1, 1, 32], [2 * B, 1, 2], [2, 1, 0])


@gluon.constexpr_function
def pair_layout(B, *rows):
    """The same of [B, 2 halves, (8,) K]"""
    n = len(rows)
    return gl.BlockedLayout([1, 1, *rows, 2], [1, 1] + [1] * n + [32], [B, 2] + [1] * n + [2], list(range(3 + n))[::-1])


@gluon.jit
def spread_constants(src, work, T: gl.constexpr):
    """decay.gate_line of all channels, or (slope, offset, factor, most) as halves.slice_constants"""
    K: gl.constexpr = T.K
    B: gl.constexpr = gl.num_warps() // 4
    L: gl.constexpr = step_layout(B)
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))  # in three dimensions a volatile load is one a token
    if T.form == "product":
        slope, offset, factor = gate_line(src, work.head, channel, T)
        return slope, offset[None, None, :], factor
    else:
        slope, offset, factor, most = held_line(src, work, channel, T)
        most = most[None, None, :] + gl.zeros([2 * B, 8, K], gl.float32, L)
        return slope, offset[None, None, :], factor, most.to(src.g.dtype)


@gluon.jit
def step_view(tiles, s, rows: gl.constexpr, T: gl.constexpr):
    """The s-th B blocks of tiles [rows, K], [B, rows, K]"""
    bits: gl.constexpr = tiles.dtype.primitive_bitwidth
    B: gl.constexpr = gl.num_warps() // 4
    return tiles._reinterpret(tiles.dtype, [tiles.shape[0] // B, B, rows, T.K], stack_layout(B, rows, T.K, bits)).index(s)


@gluon.jit
def half_rows(tiles, s, T: gl.constexpr):
    """The first 16 rows of the s-th B blocks, [B, 2, 8, K]"""
    rows: gl.constexpr = tiles.shape[1]
    B: gl.constexpr = gl.num_warps() // 4
    return step_view(tiles, s, rows, T).reshape([B, rows // 8, 8, T.K]).slice(0, 2, dim=1)


@gluon.jit
def load_rows(kq, n: gl.constexpr, T: gl.constexpr):
    """k (n = 0) or q of B blocks, [2 B, 8, K]"""
    B: gl.constexpr = gl.num_warps() // 4
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8, 2], [1, 1, 1, 1, 32], [B, 1, 2, 1, 2], [4, 3, 2, 1, 0])
    x = kq.slice(n, 1, dim=1).load(L).reshape([2 * B, 8, T.K])
    return gl.convert_layout(x, step_layout(B), assert_trivial=True)


@gluon.jit
def edge_rows(edges, h: gl.constexpr, T: gl.constexpr):
    """What first (h = 0) or second halves left in edges, [B, 1, K]"""
    B: gl.constexpr = gl.num_warps() // 4
    return edges._reinterpret(gl.float32, [B, 2, T.K], plain_shared(3)).slice(h, 1, dim=1).load(pair_layout(B))


@gluon.jit
def by_half(first, second, T: gl.constexpr):
    """[2 B, 1, K] of what first and second halves take, [B, 1, K] each"""
    B: gl.constexpr = gl.num_warps() // 4
    L: gl.constexpr = pair_layout(B)
    h = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    x = gl.where(h == 0, first, second).reshape([2 * B, T.K])
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, step_layout(B)), assert_trivial=True), 1)


@gluon.jit
def load_step(ring, s, T: gl.constexpr):
    """The raw gate, k and q of the ring's s-th B blocks, [2 B, 8, K], and where the latter are, [B, k and q, halves, 8, K]"""
    B: gl.constexpr = gl.num_warps() // 4
    kq = step_view(ring.kq, s, 32, T).reshape([B, 2, 2, 8, T.K])
    g = half_rows(ring.g, s, T).load(pair_layout(B, 8)).reshape([2 * B, 8, T.K])
    return gl.convert_layout(g, step_layout(B), assert_trivial=True), load_rows(kq, 0, T), load_rows(kq, 1, T), kq


@gluon.jit
def store_step(ring, s, phase, kq, k, q, columns, p, T: gl.constexpr):
    """What the state reads: rows, columns, and the decay exp2(p) of the blocks"""
    B: gl.constexpr = gl.num_warps() // 4
    if T.l2norm and B == 2:  # the scan's warps have taken them themselves
        mbarrier.wait(ring.beside.normed.index(s // 2), phase)
    decay = ring.decay._reinterpret(gl.float32, [T.wide * T.groups // B, B, T.K], plain_shared(2))
    decay.index(s).store(ex2(p).reshape([B, T.K]))
    kq.store(gl.join(k, q).reshape([B, 2, 8, T.K, 2]).permute((0, 4, 1, 2, 3)))
    half_rows(ring.ki, s, T).store(columns.reshape([B, 2, 8, T.K]))


@gluon.jit
def turn_bounded(ring, s, phase, consts, T: gl.constexpr):
    """The s-th step of the ring under a bounded gate: its tiles over its raw ones"""
    g, k, q, kq = load_step(ring, s, T)
    P = gl.associative_scan(log2_decay(g, consts, T), 1, add)
    ring.beside.edges.store(gl.reshape(last_row(P), [4, T.K]))
    e0 = edge_rows(ring.beside.edges, 0, T)
    e1 = edge_rows(ring.beside.edges, 1, T)
    kd, qd, columns = outward(k, q, P + by_half(0.0, e0, T))
    store_step(ring, s, phase, kq, kd, qd, columns, e0 + e1, T)


@gluon.jit
def turn_unbounded(ring, s, n, phase, edges, grown_rows, consts, T: gl.constexpr):
    """The s-th B blocks of the ring, the n-th of their group: the tiles of the scores and of the state over their raw ones, but for the
    factor exp(n) of the second halves' rows. What halves tell one another goes through `edges` and `grown_rows`."""
    K: gl.constexpr = T.K
    B: gl.constexpr = gl.num_warps() // 4
    zero = gl.zeros([2 * B, 8, K], gl.float32, step_layout(B))
    dtype: gl.constexpr = ring.kq.dtype
    factor = consts[2]
    steep, base = steepness(factor, T)
    g, k, q, kq = load_step(ring, s, T)
    P, grown = prefix_sums(g, consts, steep, T)
    edges.store(gl.reshape(last_row(P) * factor + base, [2 * B, K]))
    if T.gate == "softplus":
        grown_rows.store(gl.reshape(grown, [2 * B, K]))
    e0 = edge_rows(edges, 0, T)
    e1 = edge_rows(edges, 1, T)
    whole = floor(e0)
    a1 = e0 - whole + ANCHOR
    p = e0 + e1
    if T.gate == "softplus":
        q0 = edge_rows(grown_rows, 0, T)
        q1 = edge_rows(grown_rows, 1, T)
        both = q0 + (q0 * q1 + q1)
        p = gl.where(both <= 1.0, log2p(both) * factor, p)
    down = ring.beside.down._reinterpret(dtype, [T.wide // B, B, K], plain_shared(2))
    down.index(n).store(ex2(gl.maximum(whole, -126.0)).to(dtype).reshape([B, K]))
    e = P * factor + by_half(base + ANCHOR, base + a1, T)
    up = ex2(e)
    rows, columns, kg = outward_key(k, up, e, ex2_denormal(by_half(e0 + e1 + ANCHOR, e1 + a1, T)) + zero)
    across = shifted(columns, (ex2(by_half(whole, whole, T) + SHIFT) + zero).to(dtype))
    store_step(ring, s, phase, kq, rows, scaled(q, up), kg, p, T)
    half_rows(ring.beside.columns, n, T).store(columns.reshape([B, 2, 8, K]))
    half_rows(ring.beside.across, n, T).store(across.reshape([B, 2, 8, K]))


@gluon.jit
def odd_block(work, T: gl.constexpr):
    """1 where the scan's warps turn the last block; it is whole then"""
    if by_scan(T):
        return ((work.end - work.start) % 32 == 16).to(gl.int32) * (work.steps > 0).to(gl.int32)
    else:
        return 0


@gluon.jit
def turn_odd(ring, work, consts, T: gl.constexpr):
    """The last block of an odd number, by the scan's four warps. The preparation's fence, after it has heard of this, covers what they
    write."""
    if odd_block(work, T) != 0:
        if not T.l2norm:
            mbarrier.wait(ring.full.index(work.steps - 1), 0)
        at = 2 * work.steps - 2
        turn_unbounded(ring, at, at, 0, ring.beside.odd.index(0), ring.beside.odd.index(1), consts, T)
        mbarrier.arrive(ring.beside.turned.index(0), count=1)


@gluon.jit
def take_norms(ring, work, scale, T: gl.constexpr):
    """scale r_q into `write`, by the scan's warps, which have nothing to do as yet: a warp a block"""
    count: gl.constexpr = T.wide * T.groups // 4
    K: gl.constexpr = T.K
    for c in range(group_count(work.steps, T) * (T.wide // 4)):  # tiles of steps that do not exist count as landed
        for n in gl.static_range(2):
            mbarrier.wait(ring.full.index(2 * c + n), 0)
        kq = ring.kq._reinterpret(ring.kq.dtype, [count, 4, 32, K], stack_layout(4, 32, K, 16)).index(c)
        write = ring.write._reinterpret(gl.float32, [count, 4, 16], plain_shared(2)).index(c)
        write.store(query_norms(kq) * (scale * 2.0 ** -anchor(T)))
        mbarrier.arrive(ring.beside.normed.index(c), count=1)


@gluon.jit
def await_group(ring, at, phase, T: gl.constexpr):
    """The group's tiles have landed, and their norms are taken"""
    for n in gl.static_range(T.wide // 2):
        mbarrier.wait(ring.full.index(T.wide // 2 * at + n), phase)
    if T.l2norm:
        for n in gl.static_range(T.wide // 4):
            mbarrier.wait(ring.beside.normed.index(T.wide // 4 * at + n), phase)


@gluon.jit
def turn_down(kq, down, T: gl.constexpr):
    """The second halves' rows times exp(n), for the state: 16 bytes at a time"""
    W: gl.constexpr = T.wide
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 8], [1, 1, 1, 2, 16], [W, gl.num_warps() // W, 1, 1, 1], [4, 3, 2, 1, 0])
    rows = kq.reshape([W, 2, 2, 8, T.K]).slice(1, 1, dim=2)
    by = down._reinterpret(down.dtype, [W, 1, 1, 1, T.K], plain_shared(5)).load(L)
    rows.store(shifted(rows.load(L), by))


@gluon.jit
def spread_tiles(ring, at, phase, work, group, kq, ki, consts, T: gl.constexpr):
    """kq = (kd, qd) 2^anchor, ki or kg over the gate, and decay of group `group` of the item, in place `at` of the ring; returns the scores
    kd ki^T, qd ki^T 2^anchor"""
    K: gl.constexpr = T.K
    W: gl.constexpr = T.wide
    per: gl.constexpr = T.wide // 2  # steps of a group
    odd = odd_block(work, T)
    for n in range(gl.minimum(work.steps - odd - per * group, per)):
        mbarrier.wait(ring.full.index(per * at + n), phase)
        if T.form == "product":
            turn_bounded(ring, per * at + n, phase, consts, T)
        else:
            turn_unbounded(ring, per * at + n, n, phase, ring.beside.edges, ring.beside.grown, consts, T)
    if by_scan(T):
        if odd != 0:
            mbarrier.wait(ring.beside.turned.index(0), phase)
    if T.form == "product":
        return scores(kq, ki, T)
    else:
        zero = gl.zeros([W, 16, 8], gl.float32, block_layout(gl.num_warps()))
        columns = ring.beside.columns._reinterpret(kq.dtype, [W, 16, K], stack_layout(W, 16, K, 16))
        across = ring.beside.across._reinterpret(kq.dtype, [W, 16, K], stack_layout(W, 16, K, 16))
        near0, near1, far = slice_scores(kq, columns, across, zero, zero, zero, K, T)
        turn_down(kq, ring.beside.down, T)
        return both_scores(near0, near1, far)
