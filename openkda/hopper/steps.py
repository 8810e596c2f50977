"""A step, two blocks of 16 tokens, as one turn of the scan's chain: what the preparation adds, under a bounded gate (K = 128). Tiles as in
prep.py, but for the decay between the two blocks, with n the floor of the first block's log2 decay G_C:

    first block     decay = exp2(n)
    second block    kd, qd = k, q exp2(G_C - n + G) 2^n     ki = k / exp2(G_C - n + G)     decay = exp2(G_C - n + G of its last row)
                    2^n multiplies rows that are rounded already, exactly; the scores of the block itself come before it
    cross           (kd_2, qd_2) ki_1^T diag(beta r_k) T_1: what the first block's D adds to the second block's X and Oq, which the scan
                    reads from the state before both

The scan (scan_steps.py) has four dependent products in 32 tokens instead of six, and converts the state once. A group is two steps; a warp
takes 64 channels of both blocks of a step, then a block's scores as in prep.py, then 16 rows of a step's cross."""

from __future__ import annotations

from openkda.hopper.compat import gl, gluon, mma_v2
from openkda.hopper.decay import gate_line, log2_decay
from openkda.hopper.tiles import add, ex2, floor, last, outward, plain_shared, row_bases, scaled_exp2, shifted


@gluon.constexpr_function
def step_layout(rows, columns, bits, swizzle=128):
    """[2, 2 rows, columns]: two steps, the two blocks of a step above one another, each [rows, columns] as in `tile_layout`"""
    bases = [[0, *x] for x in row_bases(rows, columns, bits, swizzle)]
    return gl.SharedLinearLayout([*bases, [0, rows, 0], [1, 0, 0]], [], 1024)


@gluon.jit
def step_view(tiles, at, c, rows: gl.constexpr, columns: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr, T: gl.constexpr):
    """Group `at` of ring buffer `tiles` [blocks, rows, columns] as [2, 2 rows, columns], begun c blocks late"""
    parts = tiles._reinterpret(dtype, [T.groups * T.wide, rows * columns], plain_shared(1))
    return parts.index(T.wide * at + c)._reinterpret(dtype, [2, 2 * rows, columns], layout)


@gluon.constexpr_function
def channels_of_step():
    """[2, 16, K]: a warp holds 64 channels of a block of a step"""
    return gl.BlockedLayout([1, 16, 2], [1, 1, 32], [2, 1, 2], [2, 1, 0])


@gluon.constexpr_function
def rows_of_step(rows):
    """[2, rows, K] likewise"""
    return gl.BlockedLayout([1, rows, 2], [1, 1, 32], [2, 1, 2], [2, 1, 0])


@gluon.constexpr_function
def cross_layout():
    """[2, 32, 16] accumulators: a warp holds 16 rows of a step's"""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2, 1], instr_shape=[1, 16, 8])


@gluon.jit
def step_constants(src, work, T: gl.constexpr):
    """gate_line of all channels"""
    L: gl.constexpr = channels_of_step()
    channel = gl.arange(0, T.K, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return gate_line(src, work.head, channel, T)


@gluon.jit
def step_tiles(ring, at, consts, T: gl.constexpr):
    """kq = (kd, qd), ki over the gate, decay of group `at`: a warp takes 64 channels of both blocks of a step, one after the other. Returns
    what the second blocks' rows are to be multiplied by."""
    K: gl.constexpr = T.K
    L: gl.constexpr = channels_of_step()
    dtype: gl.constexpr = ring.kq.dtype
    bits: gl.constexpr = ring.g.dtype.primitive_bitwidth
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    start = gl.zeros([2, K], gl.float32, gl.SliceLayout(1, L))
    whole = start
    for c in range(2):
        kq = step_view(ring.kq, at, c, 32, K, dtype, step_layout(32, K, 16), T)
        g = step_view(ring.g, at, c, 16, K, ring.g.dtype, step_layout(16, K, bits), T)
        ki = step_view(ring.ki, at, c, bits, K, dtype, step_layout(bits, K, 16), T)
        decay = ring.decay._reinterpret(gl.float32, [T.groups * T.wide, K], plain_shared(1)).index(T.wide * at + c)
        decay = decay._reinterpret(gl.float32, [2, 2 * K], plain_shared(2)).slice(0, K, dim=1)
        graw = g.slice(0, 16, dim=1).load(L)
        k = kq.slice(0, 16, dim=1).load(L)
        if T.outputs:
            q = kq.slice(16, 16, dim=1).load(L)
        x = log2_decay(graw, consts, T)
        x = gl.where(i == 0, x + gl.expand_dims(start, 1), x)
        G = gl.associative_scan(x, 1, add)
        total = gl.reduce(G, 1, last)
        here = gl.where(c == 0, floor(total), total)
        start = total - here
        whole = gl.where(c == 0, here, whole)
        decay.store(ex2(here))
        if T.outputs:
            kd, qd, columns = outward(k, q, G)
            both = gl.join(kd, qd).permute((0, 3, 1, 2))
            kq.reshape([2, 4, 16, K]).slice(0, 2, dim=1).store(both)
        else:
            kq.slice(0, 16, dim=1).store(scaled_exp2(k, G))
            columns = scaled_exp2(k, -G)
        ki.slice(0, 16, dim=1).store(columns)
    return ex2(whole)


@gluon.jit
def cross_scores(ring, at, up, T: gl.constexpr):
    """Multiplies the rows of second blocks, of k and q or of k alone, by `up` and returns their products with the columns of the first
    blocks, [2, rows, 16]"""
    K: gl.constexpr = T.K
    count: gl.constexpr = 32 if T.outputs else 16
    L: gl.constexpr = rows_of_step(count)
    mma: gl.constexpr = cross_layout()
    dtype: gl.constexpr = ring.kq.dtype
    bits: gl.constexpr = ring.g.dtype.primitive_bitwidth
    rows = step_view(ring.kq, at, 0, 32, K, dtype, step_layout(32, K, 16), T).slice(32, count, dim=1)
    columns = step_view(ring.ki, at, 0, bits, K, dtype, step_layout(bits, K, 16), T).permute((0, 2, 1)).slice(0, 16, dim=2)
    up = gl.expand_dims(gl.convert_layout(up, gl.SliceLayout(1, L), assert_trivial=True), 1)
    rows.store(shifted(rows.load(L), (up + gl.zeros([2, count, K], gl.float32, L)).to(dtype)))
    acc = gl.zeros([2, count, 16], gl.float32, mma)
    for c in gl.static_range(K // 32):
        x = rows.slice(32 * c, 32, dim=2).load(gl.DotOperandLayout(0, mma, 2))
        acc = mma_v2(x, columns.slice(32 * c, 32, dim=1).load(gl.DotOperandLayout(1, mma, 2)), acc)
    return acc


@gluon.jit
def cross_blocks(ring, at, acc, up, T: gl.constexpr):
    """cross of group `at`: the products times diag(beta r_k) T of the first blocks. Then ki of the first blocks times 2^n, exactly: kg"""
    mma: gl.constexpr = cross_layout()
    dtype: gl.constexpr = ring.kq.dtype
    tz = step_view(ring.tz, at, 0, 32, 16, dtype, step_layout(32, 16, 16, 32), T)
    inverse = tz.slice(0, 16, dim=1).load(gl.DotOperandLayout(1, mma, 2))
    gain = ring.gain._reinterpret(gl.float32, [T.groups, 2, 32], plain_shared(2)).index(at).slice(0, 16, dim=1)
    acc = acc * gl.expand_dims(gain.load(gl.SliceLayout(1, mma)), 1)
    x = gl.convert_layout(acc.to(dtype), gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    count: gl.constexpr = 32 if T.outputs else 16
    found = mma_v2(x, inverse, gl.zeros([2, count, 16], gl.float32, mma)).to(dtype)
    cross = ring.beside._reinterpret(dtype, [T.groups, 2, 32, 16], cross_shared()).index(at)
    cross.slice(0, count, dim=1).store(found)
    K: gl.constexpr = T.K
    L: gl.constexpr = rows_of_step(16)
    bits: gl.constexpr = ring.g.dtype.primitive_bitwidth
    columns = step_view(ring.ki, at, 0, bits, K, dtype, step_layout(bits, K, 16), T).slice(0, 16, dim=1)
    up = gl.expand_dims(gl.convert_layout(up, gl.SliceLayout(1, L), assert_trivial=True), 1)
    columns.store(shifted(columns.load(L), (up + gl.zeros([2, 16, K], gl.float32, L)).to(dtype)))


@gluon.constexpr_function
def cross_shared():
    """[2, 32, 16]: two tiles of rows of 32 bytes"""
    return gl.SharedLinearLayout([*([0, *x] for x in row_bases(32, 16, 16, 32)), [1, 0, 0]], [], 1024)
