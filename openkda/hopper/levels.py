"""Scores of 16x16 blocks: kd ki^T in one product, or in the level form.

The product form multiplies exp(G_r) by exp(-G_i), which needs 16 tokens' decay within fp32's range, and bf16 tiles: bounded gates. The
level form serves fp16 tiles, under any gate: for s = 1, 2, 4, 8, rows of the odd s-block meet rows of the even s-block before it, both
anchored on the even block's last row, so that every factor is at most 1. An anchor precedes every row it serves: causality is bit-exact."""

from __future__ import annotations

from openkda.hopper.compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.tiles import block_layout, group_layout, scaled_exp2


@gluon.jit
def pair_scores(kd, ki):
    """rows (k0, q0, k1, q1) [64, K] against columns (k0, k1) [32, K], the blocks on the diagonal: [4, 16, 16] fp32"""
    return diagonal(all_pairs(kd, ki))


@gluon.jit
def all_pairs(kd, ki):
    """The same for all blocks, [64, 32]"""
    w32: gl.constexpr = group_layout(32, 4)
    s = warpgroup_mma(kd, ki.permute((1, 0)), gl.zeros([64, 32], gl.float32, w32), use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def diagonal(s):
    """The blocks on the diagonal of s [64, 32], as [4, 16, 16]"""
    mma: gl.constexpr = block_layout()
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
    s0, s1 = gl.split(s.reshape([4, 16, 2, 16]).permute((0, 1, 3, 2)))
    return gl.where(b < 2, gl.convert_layout(s0, mma), gl.convert_layout(s1, mma))


@gluon.jit
def halves(x, level: gl.constexpr):
    """The rows of even and of odd blocks of 2**level rows of x [2, 16, K], as [2, pairs, rows, K] each. Registers only."""
    s: gl.constexpr = 2**level
    K: gl.constexpr = x.shape[2]
    return gl.split(x.reshape([2, 8 // s, 2, s, K]).permute((0, 1, 3, 4, 2)))


@gluon.jit
def store_level(tile, x, G, level: gl.constexpr):
    """tile = x exp(G_r - G_a) in rows of odd blocks, x exp(G_a - G_i) in rows of even ones, a the even block's last row"""
    K: gl.constexpr = x.shape[2]
    G0, G1 = halves(G, level)
    x0, x1 = halves(x, level)
    a = gl.expand_dims(gl.min(G0, axis=2), 2)  # the last row's, G never rises
    both = gl.join(scaled_exp2(x0, a - G0), scaled_exp2(x1, G1 - a)).permute((0, 1, 4, 2, 3))
    tile.store(gl.convert_layout(both.reshape([2, 16, K]), x.type.layout))


@gluon.jit
def level_scores(kd, ki, k_raw, q_raw, G, T: gl.constexpr):
    """Scores [4, 16, 16] fp32 in the level form. Uses the kd and ki tiles as scratch."""
    K: gl.constexpr = T.K
    mma: gl.constexpr = block_layout()
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    k_tile = kd.reshape([2, 32, K]).slice(0, 16, dim=1)
    q_tile = kd.reshape([2, 32, K]).slice(16, 16, dim=1)
    column_tile = ki.reshape([2, 16, K])
    column_tile.store(k_raw)  # kd still holds the raw rows: the diagonal has no decay
    fence_async_shared()
    scores = gl.where(r == c, pair_scores(kd, ki), 0.0)
    for level in gl.static_range(4):
        gl.thread_barrier()  # every warp's product is done with the tiles
        store_level(k_tile, k_raw, G, level)
        store_level(column_tile, k_raw, G, level)
        if T.outputs:
            store_level(q_tile, q_raw, G, level)
        fence_async_shared()
        pairs = ((r >> level) == (c >> level) + 1) & ((r >> (level + 1)) == (c >> (level + 1)))
        scores = gl.where(pairs, pair_scores(kd, ki), scores)
    gl.thread_barrier()
    return scores
