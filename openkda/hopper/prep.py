"""The preparation roles of the Hopper forward: from the raw tiles of a group (T.wide blocks of 16 tokens) to what
the scan reads.

Per block, r_k, r_q the inverse norms (1 without l2norm; |k|^2 is the diagonal of kd ki^T), G the inclusive base-2 prefix sum of the log
decay:

    kd = k exp(G)    qd = q exp(G)    ki = k / exp(G)  (or kg = k exp(G_C - G))        norms, beta, scale: rows of 16x16 blocks only
                                                  kd, qd with a factor 2^anchor, read and write with its inverse (halves.py; else 1)
    gain = beta r_k
    A  = diag(r_k) tril(kd ki^T, -1) diag(gain)   Z = tril(qd ki^T) diag(gain)
    T  = (I + A)^-1                               by doubling the block size 2, 4, 8, 16: every iterate is the exact inverse of a
                                                  block-diagonal part, so nothing grows. Its diagonal is 1, which no rounding moves
    tz = (T, Z T)     read = -r_k     write = scale r_q     decay = exp(G_C)

A partition takes every `preps`-th group, one warp per block: what a warp writes, it alone reads before the group is ready; two warps per
block in the form of spread.py. Raw tiles are overwritten in place: kq by (kd, qd), the gate by ki. Four warps request them. Rows past the
segment's end are overwritten by neutral values first, before any exponential."""

from __future__ import annotations

from openkda.hopper.blocks import diagonal, query_norms, scores, solve
from openkda.hopper.cluster import copied_bytes, own_places, rank_of, release, send
from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma
from openkda.hopper.decay import decay_constants, log2_decay, neutral_gate
from openkda.hopper.halves import anchor, half_constants, half_tiles
from openkda.hopper.levels import level_tiles
from openkda.hopper.own import parted, try_tail
from openkda.hopper.segments import begin_item, each_item
from openkda.hopper.spread import await_group, spread_constants, spread_tiles
from openkda.hopper.steps import cross_blocks, cross_scores, step_constants, step_tiles
from openkda.hopper.tiles import (
    WIDTH,
    add,
    block_layout,
    channel_layout,
    computed_here,
    ex2,
    last,
    outward,
    own_groups,
    plain_shared,
    quiet,
    quiet_groups,
    rcp,
    rsqrt,
    scaled_exp2,
    share,
    slice_views,
    stack_layout,
    state_only,
    steps_awaited,
)


@gluon.jit
def request(ring, src, work, at, row, full, more: gl.constexpr, operands: gl.constexpr, n: gl.constexpr, T: gl.constexpr):
    """Two blocks of the n-th of `operands` ("g", "k", "q", "v"), from `row` on, for the ring's step `at`; the barrier `full` awaits them
    and `more` bytes"""
    what: gl.constexpr = operands[n]
    desc = src.g if what == "g" else src.k if what == "k" else src.q if what == "q" else src.v
    tiles = ring.g if what == "g" else ring.v if what == "v" else ring.kq
    if what == "g":
        column = work.head * T.K
    elif what == "v":
        column = work.head * T.V + work.row0
    else:
        column = work.qk_head * T.K
    mbarrier.expect(full, 2 * desc.block_type.nbytes + more)
    for c in gl.static_range(2):
        tile = tiles.index(2 * at + c)
        if what == "k" or what == "q":
            tile = tile.slice(16 if what == "q" else 0, 16, dim=0)
        tma.async_copy_global_to_shared(desc, [row + 16 * c, column], full, tile)


@gluon.jit
def request_needed(ring, src, work, at, row, full, step, operands: gl.constexpr, n: gl.constexpr, T: gl.constexpr):
    """The same, but q only of groups that have rows which the block writes"""
    what: gl.constexpr = operands[n]
    if what == "q" and quiet(T):
        if step < T.wide // 2 * quiet_groups(work, T):
            mbarrier.arrive(full, count=1)
        else:
            request(ring, src, work, at, row, full, 0, operands, n, T)
    else:
        request(ring, src, work, at, row, full, 0, operands, n, T)


@gluon.jit
def load_item(work, before, ring, src, what: gl.constexpr, T: gl.constexpr):
    """Request the raw tiles of the operands `what` of all groups that this block prepares, two blocks at a time, as soon as their place is
    free. `before` groups have been in the ring."""
    per: gl.constexpr = T.wide // 2  # steps of a group
    halves: gl.constexpr = per * own_places(T)
    rank = rank_of(T)
    row = work.start - before * 16 * T.wide
    for it in range(per * before, per * before + own_groups(work, rank, T) * per):
        at = it % halves
        step = 2 * (it + rank) - it % 2 if T.cluster else it
        mbarrier.wait(ring.empty.index(at), ((it // halves) & 1) ^ 1)
        if step < per * before + work.steps:
            for n in gl.static_range(len(what)):
                request_needed(ring, src, work, at, row + step * 32, ring.full.index(at // steps_awaited(T)), step, what, n, T)
        else:
            mbarrier.arrive(ring.full.index(at // steps_awaited(T)), count=len(what))


@gluon.jit
def receive_role(ring, src, deal, first, T: gl.constexpr):
    """v of the groups that the other block of a cluster prepares; the same barriers await what comes from there. When the scan is done with
    two blocks, their owner is told."""
    own: gl.constexpr = own_places(T)
    work = begin_item(deal, first, False, T)
    rank = rank_of(T)
    steps = work.steps - 2 * (1 - rank)  # from the first of those groups on
    for n in range(own_groups(work, 1 - rank, T) + 1):
        for half in gl.static_range(2):
            step = 4 * n + half
            if step - 4 < steps:
                mbarrier.wait(ring.empty.index(2 * own + half), (n & 1) ^ 1)
                if n > 0:
                    release((n - 1) % own, half, rank, T)
            if step < steps:
                full = ring.ready.index(own + half)
                row = work.start + 32 * (step + 2 * (1 - rank))
                if quiet(T):
                    if 2 * n + 1 - rank < quiet_groups(work, T):
                        request(ring, src, work, 2 * own + half, row, full, copied_bytes(state_only(T)), "v", 0, T)
                    else:
                        request(ring, src, work, 2 * own + half, row, full, copied_bytes(T), "v", 0, T)
                else:
                    request(ring, src, work, 2 * own + half, row, full, copied_bytes(T), "v", 0, T)


@gluon.jit
def send_role(ring, deal, first, T: gl.constexpr):
    """Copy the groups that this block prepares to the other, as soon as they are ready and their place there is free. The block does not
    end before the other is done with all of them."""
    own: gl.constexpr = own_places(T)
    work = begin_item(deal, first, False, T)
    rank = rank_of(T)
    groups = own_groups(work, rank, T)
    for n in range(groups + 1):
        if n < groups:
            mbarrier.wait(ring.ready.index(n % own), (n // own) & 1)
        before = gl.maximum(n - 1, 0)
        for half in gl.static_range(2):
            step = 4 * n + 2 * rank + half
            if step - 4 < work.steps:
                mbarrier.wait(ring.empty.index(2 * (before % own) + half), (before // own) & 1, pred=n > 0)
            if step < work.steps:
                if quiet(T):
                    if 2 * n + rank < quiet_groups(work, T):
                        send(n % own, half, rank, state_only(T))
                    else:
                        send(n % own, half, rank, T)
                else:
                    send(n % own, half, rank, T)


@gluon.jit
def load_role(ring, src, deal, queue, first, what: gl.constexpr, T: gl.constexpr):
    """A warp per operand: requests take long enough to hold up the preparation if one warp makes them all. Where blocks take items in turn
    they do not, and one warp tells the other roles what comes next."""
    work = begin_item(deal, first, False, T)
    each_item(load_item, work, deal, queue, True, (ring, src, what), T)


@gluon.jit
def clear_rows(tiles, at, valid, neutral, height: gl.constexpr, columns: gl.constexpr, T: gl.constexpr):
    """Overwrite the rows from `valid` on of a group's tiles [height, columns] of ring buffer `tiles`; in tiles of 32 rows, both halves.
    A loop over pieces of 8 rows by 128 bytes, one a warp at a time: it runs once per segment, and code is dear."""
    width: gl.constexpr = 1024 // tiles.dtype.primitive_bitwidth
    W: gl.constexpr = gl.num_warps()
    each: gl.constexpr = height * columns // (8 * width)  # pieces of a tile
    steps: gl.constexpr = each * T.wide // W  # of a piece a warp
    L: gl.constexpr = gl.BlockedLayout([1, 1, 128 // tiles.dtype.primitive_bitwidth], [1, 4, 8], [W, 1, 1], [2, 1, 0])
    bits: gl.constexpr = tiles.dtype.primitive_bitwidth
    pieces = tiles._reinterpret(tiles.dtype, [T.groups * steps, W, 8, width], stack_layout(gl.num_warps(), 8, width, bits))
    piece = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    place = computed_here(piece * 8 + i)  # kept in registers it would cost those of every group
    for s in range(gl.minimum(valid, 0) + steps):  # valid > 0; a bound known to the compiler would be unrolled
        n = W * s + place // 8
        row = n // each * 16 + n % 2 * 8 + place % 8
        tile = pieces.index(at * steps + s)
        tile.store(gl.where(row < valid, tile.load(L), neutral).to(tile.dtype))


@gluon.jit
def load_beta(src, work, group, T: gl.constexpr):
    """(raw beta, in range) of the rows of a group as [wide, 16]"""
    mma: gl.constexpr = block_layout(gl.num_warps())
    b = gl.arange(0, T.wide, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None]
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :]
    first = work.start + group * (16 * T.wide)
    base = src.beta_ptr + first.to(gl.int64) * src.HV + work.head
    live = b * 16 + i < work.end - first
    return gl.load(base + (b * 16 + i) * src.HV, mask=live, other=0.0), live


@gluon.jit
def activate_beta(x, live, T: gl.constexpr):
    """beta of a group's rows from its raw values, 0 past the segment's end"""
    x = x.to(gl.float32)
    if T.beta != "given":
        top: gl.constexpr = 2.0 if T.beta == "twice" else 1.0
        x = top * rcp(1.0 + ex2(x * -1.4426950408889634))
    return gl.where(live, x, 0.0)


@gluon.jit
def product_tiles(ring, at, consts, T: gl.constexpr):
    """kq = (kd, qd), ki over the gate, decay = exp(G_C) of group `at`, WIDTH channels at a time: a loop, for code is dear"""
    K: gl.constexpr = T.K
    L: gl.constexpr = channel_layout(WIDTH, 16, gl.num_warps())
    c0, c1 = consts
    for c in range(K // WIDTH):
        kq, g, ki, decay = slice_views(ring, at, c, T)
        here = c0[0], gl.where(c == 0, c0[1], c1[1]), c0[2]
        graw = g.slice(0, WIDTH, dim=2).load(L)
        k = kq.slice(0, 16, dim=1).slice(0, WIDTH, dim=2).load(L)
        if T.outputs:
            q = kq.slice(16, 16, dim=1).slice(0, WIDTH, dim=2).load(L)
        G = gl.associative_scan(log2_decay(graw, here, T), 1, add)
        decay.slice(0, WIDTH, dim=1).store(ex2(gl.reduce(G, 1, last)))
        if T.outputs:
            kd, qd, columns = outward(k, q, G)
            both = gl.join(kd, qd).permute((0, 3, 1, 2))
            kq.reshape([gl.num_warps(), 2, 16, K]).slice(0, WIDTH, dim=3).store(both)  # one store: two would have a barrier between them
        else:
            kq.slice(0, 16, dim=1).slice(0, WIDTH, dim=2).store(scaled_exp2(k, G))
            columns = scaled_exp2(k, -G)
        ki.slice(0, 16, dim=1).slice(0, WIDTH, dim=2).store(columns)


@gluon.jit
def prepare_group(ring, src, work, group, at, phase, beta, consts, T: gl.constexpr):
    """Group `group` of the item, in place `at` of the ring, whose barriers have that phase"""
    K: gl.constexpr = T.K
    groups: gl.constexpr = T.groups
    wide: gl.constexpr = T.wide
    dtype: gl.constexpr = src.k.dtype
    bits: gl.constexpr = src.g.dtype.primitive_bitwidth
    kq = ring.kq._reinterpret(dtype, [groups, wide, 32, K], stack_layout(wide, 32, K, 16)).index(at)
    ki = ring.ki._reinterpret(dtype, [groups, wide, bits, K], stack_layout(wide, bits, K, 16)).index(at)
    tz = ring.tz._reinterpret(dtype, [groups, wide, 32, 16], stack_layout(wide, 32, 16, 16, 32)).index(at)
    read = ring.read._reinterpret(gl.float32, [groups, wide, 16], plain_shared(2)).index(at)
    write = ring.write._reinterpret(gl.float32, [groups, wide, 16], plain_shared(2)).index(at)
    gain = ring.gain._reinterpret(gl.float32, [groups, wide, 16], plain_shared(2)).index(at)
    valid = work.end - work.start - group * (16 * wide)
    together: gl.constexpr = 32 if T.form == "steps" else 16  # rows that the scan reads at once, some of which may lie past the end
    if T.outputs or not quiet(T):  # what is quiet ends before the sequence does
        if (valid < 16 * wide) & (valid % together != 0):
            if T.spread:
                await_group(ring, at, phase, T)
            clear_rows(ring.kq, at, valid, 0.0, 32, K, T)
            clear_rows(ring.g, at, valid, neutral_gate(T), 16, K, T)
            clear_rows(ring.v, at, valid, 0.0, 16, T.R, T)
    down: gl.constexpr = 2.0 ** -anchor(T)
    rk = gl.full([wide, 16], 1.0, gl.float32, gl.SliceLayout(2, block_layout(gl.num_warps())))
    if T.outputs and not (T.spread and T.l2norm):
        rq = query_norms(kq) if T.l2norm else rk
        write.store(rq * (src.scale * down))
    if T.spread:
        kk, qk = spread_tiles(ring, at, phase, work, group, kq, ki, consts, T)
    elif T.form == "product":
        product_tiles(ring, at, consts, T)
        kk, qk = scores(kq, ki, T)
    elif T.form == "steps":
        up = step_tiles(ring, at, consts, T)
        kk, qk = scores(kq, ki, T)
        across = cross_scores(ring, at, up, T)
    elif T.form == "halves":
        kk, qk = half_tiles(ring, at, consts, T)
    else:
        kk, qk = level_tiles(ring, at, src, work, T)
    if T.l2norm:
        rk = rsqrt(diagonal(kk) + 1e-6)  # the decay cancels there
    read.store(rk * -down)
    strength = beta * rk
    gain.store(strength)
    inverse, ZT = solve(kk, qk, -rk, strength, dtype, T.outputs, T.beta != "sigmoid")
    tz.slice(0, 16, dim=1).store(inverse)
    if T.outputs:
        tz.slice(16, 16, dim=1).store(ZT)
    if T.form == "steps":
        cross_blocks(ring, at, across, up, T)
    fence_async_shared()


@gluon.jit
def prep_item(work, before, ring, src, part: gl.constexpr, T: gl.constexpr):
    """Groups first, first + preps, ... of those of the item that this block prepares: those whose number in the ring, where `before` groups
    have been, is `part` modulo the preparation partitions"""
    preps: gl.constexpr = 1 if parted(T) else T.preps
    first = (part + (preps - 1) * before) % preps
    rank = rank_of(T)
    turns = (own_groups(work, rank, T) + preps - 1 - first) // preps
    if quiet(T):
        begin = (share(quiet_groups(work, T), rank, T) + preps - 1 - first) // preps
        prep_turns(ring, src, work, before, first, 0, begin, state_only(T))
        prep_turns(ring, src, work, before, first, begin, turns, T)
    else:
        prep_turns(ring, src, work, before, first, 0, turns, T)


@gluon.jit
def prep_turns(ring, src, work, before, first, begin, end, T: gl.constexpr):
    """Those of them from the begin-th to the end-th"""
    own: gl.constexpr = own_places(T)
    sharers: gl.constexpr = 2 if T.cluster else 1
    rank = rank_of(T)
    preps: gl.constexpr = 1 if parted(T) else T.preps
    if T.spread:
        consts = spread_constants(src, work, T)
    elif T.form == "halves":
        consts = half_constants(src, work, T)
    elif T.form == "steps":
        consts = step_constants(src, work, T)
    else:
        consts = decay_constants(src, work, T)
    raw, live = load_beta(src, work, sharers * (begin * preps + first) + rank + work.steps * 0, T)
    for turn in range(begin, end):
        n = turn * preps + first
        group = sharers * n + rank
        at = (before + n) % own
        phase = ((before + n) // own) & 1
        beta = activate_beta(raw, live, T)
        raw, live = load_beta(src, work, group + sharers * preps, T)  # a turn ahead: nothing waits for it
        if not T.spread:
            mbarrier.wait(ring.full.index(at), phase)
        prepare_group(ring, src, work, group, at, phase, beta, consts, T)
        mbarrier.arrive(ring.ready.index(at), count=1)


@gluon.jit
def prep_role(ring, src, deal, queue, verdict, first, part: gl.constexpr, T: gl.constexpr):
    """The groups of the ring whose number is `part`, modulo the preparation partitions"""
    work = begin_item(deal, first, False, T)
    if part < (1 if parted(T) else T.groups):
        each_item(prep_item, work, deal, queue, False, (ring, src, part), T)
    if T.split == "tails" and (part == 1 or not parted(T)):
        if work.steps > 0:
            try_tail(ring, verdict, work, part, T)
