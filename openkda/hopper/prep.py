"""The preparation role of the Hopper forward: from the raw tiles of a step (32 tokens, two blocks of 16) to what the scan reads.

Per block, r_k, r_q the inverse norms (1 without l2norm), G the inclusive base-2 prefix sum of the log decay:

    kd = k exp(G)    qd = q exp(G)    ki = k / exp(G)  (or kg = k exp(G_C - G))        norms, beta, scale: rows of 16x16 blocks only
                                                  kd, qd with a factor 2^anchor, rows with its inverse (halves.py; else 1)
    A  = diag(beta r_k^2) tril(kd ki^T, -1)       Z = tril(qd ki^T)
    T0 = (I + A)^-1 diag(beta r_k)                by doubling the block size 2, 4, 8, 16: every iterate is the exact inverse of a
                                                  block-diagonal part, so nothing grows
    tz = (T0, Z T0)     rows = (-r_k, scale r_q)     decay = exp(G_C)

Raw tiles are overwritten in place: kq by (kd, qd), the gate by ki. Each partition of 4 warps takes every `preps`-th step and requests its
own next step, so no load warp is needed. Rows past the segment's end are overwritten by neutral values first, before any exponential."""

from __future__ import annotations

from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, mma_v2, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.decay import decay_constants, log2_decay, neutral_gate
from openkda.hopper.halves import anchor, half_step
from openkda.hopper.levels import level_scores, pair_scores
from openkda.hopper.tiles import add, block_layout, channel_layout, ex2, group_layout, last, rcp, rsqrt, scaled_exp2, to_f32


@gluon.jit
def load_step(ring, src, work, it, T: gl.constexpr):
    """Request the raw tiles of step `it` once its slot is free"""
    slots: gl.constexpr = T.slots
    K: gl.constexpr = T.K
    V: gl.constexpr = T.V
    slot = it % slots
    mbarrier.wait(ring.empty.index(slot), ((it // slots) & 1) ^ 1)
    full = ring.full.index(slot)
    k_bytes: gl.constexpr = src.k.block_type.nbytes * (4 if T.outputs else 2)
    mbarrier.expect(full, k_bytes + src.v.block_type.nbytes + src.g.block_type.nbytes)
    row = work.start + it * 32
    kq = ring.kq.index(slot)
    tma.async_copy_global_to_shared(src.g, [row, work.head * K], full, ring.g.index(slot))
    for c in gl.static_range(2):
        tma.async_copy_global_to_shared(src.k, [row + 16 * c, work.qk_head * K], full, kq.slice(32 * c, 16, dim=0))
        if T.outputs:
            tma.async_copy_global_to_shared(src.q, [row + 16 * c, work.qk_head * K], full, kq.slice(32 * c + 16, 16, dim=0))
    tma.async_copy_global_to_shared(src.v, [row, work.head * V + work.row0], full, ring.v.index(slot))


@gluon.jit
def clear_tail(kq, g, v, valid, T: gl.constexpr):
    """Make the rows from `valid` on neutral: no key, no query, no value, no decay. They may hold another sequence, or NaN."""
    K: gl.constexpr = T.K
    R: gl.constexpr = T.R
    L: gl.constexpr = channel_layout(K)
    LV: gl.constexpr = channel_layout(R)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    b = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    keep = b * 16 + i < valid
    for part in gl.static_range(2 if T.outputs else 1):
        tile = kq.reshape([2, 32, K]).slice(16 * part, 16, dim=1)
        tile.store(gl.where(keep, tile.load(L), 0.0).to(kq.dtype))
    tile = g.reshape([2, 16, K])
    tile.store(gl.where(keep, tile.load(L), neutral_gate(T)).to(g.dtype))
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LV)))[None, :, None]
    b = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, LV)))[:, None, None]
    tile = v.reshape([2, 16, R])
    tile.store(gl.where(b * 16 + i < valid, tile.load(LV), 0.0).to(v.dtype))
    gl.thread_barrier()


@gluon.jit
def load_beta(src, work, it):
    """(raw beta, in range) of the rows of step `it` as [4, 16, 1]: each block twice, for its k and its q rows"""
    mma: gl.constexpr = block_layout()
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    row = (b // 2) * 16 + i
    first = work.start + it * 32
    base = src.beta_ptr + first.to(gl.int64) * src.HV + work.head
    live = row < work.end - first
    return gl.load(base + row * src.HV, mask=live, other=0.0), live


@gluon.jit
def activate_beta(x, live, T: gl.constexpr):
    """beta of a step's rows from its raw values, 0 past the segment's end"""
    x = x.to(gl.float32)
    if T.beta != "given":
        top: gl.constexpr = 2.0 if T.beta == "twice" else 1.0
        x = top * rcp(1.0 + ex2(x * -1.4426950408889634))
    return gl.where(live, x, 0.0)


@gluon.jit
def invert(A, dtype: gl.constexpr):
    """(I - A)^-1 of strictly lower 16x16 blocks by T <- T + (T A_s) T over block sizes 2, 4, 8, 16; operands in `dtype`, fp32 sums"""
    mma: gl.constexpr = block_layout()
    d0: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    d1: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    i1 = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, d1)))[None, :, None]
    j1 = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, d1)))[None, None, :]
    zero = gl.zeros([4, 16, 16], gl.float32, mma)
    Ab = gl.convert_layout(A.to(dtype), d1)
    T = gl.where(i == j, 1.0, gl.where((i // 2 == j // 2), A, 0.0))
    for lv in gl.static_range(1, 4):
        lower = ((i1 >> (lv + 1)) == (j1 >> (lv + 1))) & ((i1 >> lv) != (j1 >> lv))
        Tb = T.to(dtype)
        Y = mma_v2(gl.convert_layout(Tb, d0), gl.where(lower, Ab, 0.0), zero)
        T = mma_v2(gl.convert_layout(Y.to(dtype), d0), gl.convert_layout(Tb, d1), T)
    return T


@gluon.jit
def row_norms(kq, T: gl.constexpr):
    """rsqrt(|x|^2 + 1e-6) of the raw rows as [4, 16, 1]: the diagonal of their Gram matrices, on the matrix unit"""
    mma: gl.constexpr = block_layout()
    d0: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    d1: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    K: gl.constexpr = T.K
    x = kq.reshape([4, 16, K]).load(d0)
    gram = mma_v2(x, gl.convert_layout(x.permute((0, 2, 1)), d1), gl.zeros([4, 16, 16], gl.float32, mma))
    return rsqrt(gl.expand_dims(gl.sum(gl.where(i == j, gram, 0.0), axis=2), 2) + 1e-6)


@gluon.jit
def finish_blocks(sc, tz, rows, columns, T: gl.constexpr):
    """Scores to (T0, Z T0) of both blocks. In k rows, rows * columns is -beta r_k^2 2^-anchor."""
    mma: gl.constexpr = block_layout()
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    dtype: gl.constexpr = tz.dtype
    by_row: gl.constexpr = gl.SliceLayout(2, mma)
    up: gl.constexpr = 2.0 ** anchor(T)
    A = gl.where(i > j, sc, 0.0) * gl.expand_dims((rows.load(by_row) * up) * columns.load(by_row), 2)
    inv = invert(A, dtype) * gl.expand_dims(columns.load(gl.SliceLayout(1, mma)), 1)
    tz.store(inv.to(dtype).reshape([64, 16]))
    fence_async_shared()
    if T.outputs:
        w16: gl.constexpr = group_layout(16, 4)
        z = gl.where(i >= j, sc * up, 0.0).to(dtype).reshape([64, 16])
        z = gl.convert_layout(z, gl.DotOperandLayout(0, w16, 2))
        zero = gl.zeros([64, 16], gl.float32, w16)
        y0 = warpgroup_mma(z, tz.slice(0, 16, dim=0), zero, use_acc=False, is_async=True)
        y1 = warpgroup_mma(z, tz.slice(32, 16, dim=0), zero, use_acc=False, is_async=True)
        y0, y1 = warpgroup_mma_wait(0, deps=(y0, y1))
        r = gl.arange(0, 64, layout=gl.SliceLayout(1, w16))[:, None]
        t = gl.convert_layout(inv.reshape([64, 16]), w16)
        tz.store(gl.where((r // 16) % 2 == 1, gl.where(r < 32, y0, y1), t).to(dtype))
        fence_async_shared()


@gluon.jit
def load_rows(kq, T: gl.constexpr):
    """The raw k and q rows of a step [2, 16, K] (k twice where q is not asked for), read by every warp before any is overwritten"""
    K: gl.constexpr = T.K
    L: gl.constexpr = channel_layout(K)
    k = kq.reshape([2, 32, K]).slice(0, 16, dim=1).load(L)
    q = k
    if T.outputs:
        q = kq.reshape([2, 32, K]).slice(16, 16, dim=1).load(L)
    gl.thread_barrier()
    return k, q


@gluon.jit
def store_decayed(kq, k, q, G, T: gl.constexpr):
    """kq = (kd, qd)"""
    K: gl.constexpr = T.K
    e = ex2(G)
    kq.reshape([2, 32, K]).slice(0, 16, dim=1).store((to_f32(k) * e).to(kq.dtype))
    if T.outputs:
        kq.reshape([2, 32, K]).slice(16, 16, dim=1).store((to_f32(q) * e).to(kq.dtype))


@gluon.jit
def product_step(kq, ki, tz, rows, columns, G, G_end, T: gl.constexpr):
    """Tiles and blocks of a step whose decays stay in the product form's range"""
    K: gl.constexpr = T.K
    k, q = load_rows(kq, T)
    ki.reshape([2, 16, K]).store(scaled_exp2(k, -G))
    store_decayed(kq, k, q, G, T)
    fence_async_shared()
    sc = pair_scores(kq, ki)
    if T.kg:
        gl.thread_barrier()  # every warp's scores are done with ki
        ki.reshape([2, 16, K]).store(scaled_exp2(k, gl.expand_dims(G_end, 1) - G))
        fence_async_shared()
    finish_blocks(sc, tz, rows, columns, T)


@gluon.jit
def level_step(kq, ki, tz, rows, columns, G, G_end, T: gl.constexpr):
    """The same for fp16, any gate, in the level form (levels.py)"""
    K: gl.constexpr = T.K
    k, q = load_rows(kq, T)
    sc = level_scores(kq, ki, k, q, G, T)
    store_decayed(kq, k, q, G, T)
    ki.reshape([2, 16, K]).store(scaled_exp2(k, gl.expand_dims(G_end, 1) - G))
    fence_async_shared()
    finish_blocks(sc, tz, rows, columns, T)


@gluon.jit
def prepare_step(ring, src, work, it, columns, beta, consts, T: gl.constexpr):
    K: gl.constexpr = T.K
    slots: gl.constexpr = T.slots
    mma: gl.constexpr = block_layout()
    per_slot: gl.constexpr = src.g.dtype.primitive_bitwidth // 16
    slot = it % slots
    kq = ring.kq.index(slot)
    ki = ring.ki.index(slot * per_slot)
    tz = ring.tz.index(slot)
    rows = ring.rows.index(slot)
    valid = work.end - work.start - it * 32
    if valid < 32:
        clear_tail(kq, ring.g.index(slot), ring.v.index(slot), valid, T)
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
    odd = (b % 2) == 1
    rr = row_norms(kq, T) if T.l2norm else gl.full([4, 16, 1], 1.0, gl.float32, mma)
    down: gl.constexpr = 2.0 ** -anchor(T)
    rows.store((rr * (gl.where(odd, src.scale, -1.0) * down)).reshape([4, 16]))
    columns.store((beta * rr).reshape([4, 16]))
    if T.form == "halves":
        sc = half_step(kq, ki, ring.g.index(slot), ring.decay.index(slot), consts, T)
        finish_blocks(sc, tz, rows, columns, T)
    else:
        raw = ring.g.index(slot).reshape([2, 16, K]).load(channel_layout(K))
        G = gl.associative_scan(log2_decay(raw, consts, T), 1, add)
        G_end = gl.reduce(G, 1, last)  # [2, K]
        ring.decay.index(slot).store(ex2(G_end))
        if T.form == "levels":
            level_step(kq, ki, tz, rows, columns, G, G_end, T)
        else:
            product_step(kq, ki, tz, rows, columns, G, G_end, T)


@gluon.jit
def prep_role(ring, src, work, columns, first: gl.constexpr, T: gl.constexpr):
    """Steps first, first + preps, ... of this block's work. columns [4, 16] fp32: this partition's own scratch (beta * r_k)."""
    slots: gl.constexpr = T.slots
    preps: gl.constexpr = T.preps
    if first < work.steps:
        load_step(ring, src, work, first + work.steps * 0, T)
    consts = decay_constants(src, work, T)
    raw, live = load_beta(src, work, first + work.steps * 0)
    for turn in range((work.steps + preps - 1 - first) // preps):
        it = turn * preps + first
        slot = it % slots
        if it + preps < work.steps:
            load_step(ring, src, work, it + preps, T)
        mbarrier.wait(ring.full.index(slot), (it // slots) & 1)
        beta = activate_beta(raw, live, T)
        raw, live = load_beta(src, work, it + preps)  # a turn ahead: nothing waits for it
        prepare_step(ring, src, work, it, columns, beta, consts, T)
        mbarrier.arrive(ring.ready.index(slot), count=1)
