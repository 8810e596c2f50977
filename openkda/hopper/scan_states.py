"""The scan of the state-only passes: a segment, or a tail, as the map of its entry state E to its exit state,

    E -> E M + b        b: the exit state from a zero state or initial_state; M: the product over its tokens, from the identity

Both go through the recurrence of scan.py, M's K rows without values, as two chains of products that fill each other's waits."""

from __future__ import annotations

from openkda.hopper.compat import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.scan import difference, first_state, ki_tile
from openkda.hopper.segments import DROPPED
from openkda.hopper.tiles import group_layout


@gluon.constexpr_function
def line_layouts(columns, bits, warps):
    """(shared, registers) of a matrix on the way to memory, such that a warp writes whole cache lines"""
    vector = 128 // bits
    lanes = columns // vector
    return gl.SwizzledSharedLayout(vector, 1, 8, [1, 0]), gl.BlockedLayout([1, vector], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def store_lines(ring, x, ptr):
    """Write x [rows, K] to ptr, row after row, by way of the ring, where nothing is to come. An accumulator's own stores fill a quarter of
    each cache line: a segment's (b, M), 128 KB, took 8 us longer."""
    rows: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[1]
    layouts: gl.constexpr = line_layouts(K, x.dtype.primitive_bitwidth, gl.num_warps())
    L: gl.constexpr = layouts[1]
    tile = ring.kq._reinterpret(x.dtype, [1, rows, K], layouts[0]).index(0)
    gl.thread_barrier()  # every warp is done with what lies there
    tile.store(x)
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, L))[:, None]
    col = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
    gl.store(ptr + row * K + col, tile.load(L))


@gluon.jit
def summary_scan(ring, states, sink, work, segment, HV, NS, T: gl.constexpr):
    """State only, as two interleaved chains: b (rows of V, from 0 or initial_state) and M (K rows, from the identity, without values):
    these steps turn an entry state E into E M + b. Writes (b, M), or for a tail the next segment's entry state b and if it is known."""
    K: gl.constexpr = T.K
    blocks: gl.constexpr = T.wide * T.groups
    L: gl.constexpr = group_layout(K, gl.num_warps())
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    DS: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    D16: gl.constexpr = gl.DotOperandLayout(0, L16, 2)
    dtype: gl.constexpr = ring.kq.dtype
    row = gl.arange(0, K, layout=gl.SliceLayout(1, L))[:, None]
    col = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
    B = first_state(states, segment, work, HV, 0, K, T)
    M = gl.where(row == col, 1.0, gl.zeros([K, K], gl.float32, L))
    zero = gl.zeros([K, 16], gl.float32, L16)
    for n in range((work.end - work.start + 15) // 16 * (work.steps > 0).to(gl.int32)):
        b = n % blocks
        mbarrier.wait(ring.ready.index(b // T.wide), (n // blocks) & 1)
        if n % T.wide == 0:
            gl.thread_barrier()  # each thread has waited; without it racecheck reports the decay, read here first
        kd = ring.kq.index(b).slice(0, 16, dim=0).permute((1, 0))
        ki = ki_tile(ring, b)
        inverse = ring.tz.index(b).slice(0, 16, dim=0).permute((1, 0))
        decay = ring.decay.index(b)
        read = ring.read.index(b).load(L16)
        XB = warpgroup_mma(gl.convert_layout(B.to(dtype), D16), kd, zero, use_acc=False, is_async=True)
        v = ring.v.index(b).permute((1, 0)).load(L16)
        XB = warpgroup_mma_wait(0, deps=(XB,))
        DB = gl.convert_layout(difference(v, XB, read), D16)
        RB = warpgroup_mma(DB, inverse, zero, use_acc=False, is_async=True)
        XM = warpgroup_mma(gl.convert_layout(M.to(dtype), D16), kd, zero, use_acc=False, is_async=True)
        gain = ring.gain.index(b).load(L16)
        RB = warpgroup_mma_wait(1, deps=(RB,))
        if T.kg:
            B = B * decay.load(L)
        B = warpgroup_mma(gl.convert_layout((RB * gain).to(dtype), DS), ki, B, is_async=True)
        XM = warpgroup_mma_wait(1, deps=(XM,))
        DM = gl.convert_layout((XM * read).to(dtype), D16)
        RM = warpgroup_mma(DM, inverse, zero, use_acc=False, is_async=True)
        B = warpgroup_mma_wait(1, deps=(B,))
        if not T.kg:
            B = B * decay.load(L)
        RM = warpgroup_mma_wait(0, deps=(RM,))
        if T.kg:
            M = M * decay.load(L)
        M = warpgroup_mma(gl.convert_layout((RM * gain).to(dtype), DS), ki, M, is_async=True)
        M = warpgroup_mma_wait(0, deps=(M,))
        if not T.kg:
            M = M * decay.load(L)
        if n % 2 == 1:
            gl.thread_barrier()  # both warpgroups are done with the tiles: one thread's arrival stands for all
            mbarrier.arrive(ring.empty.index(b // 2), count=1)
    if work.steps > 0:
        at = segment.to(gl.int64) * HV + work.head
        if sink.tail > 0:
            small = ((gl.sum(gl.max(gl.abs(M), 1), 0) <= DROPPED) | work.from_initial).to(gl.int32)
            gl.store(sink.known_ptr + work.head * NS + segment + 1, small)
            if small != 0:
                store_lines(ring, B, states.entry_ptr + (at + HV) * (K * K))
        else:
            base = sink.summary_ptr + at * (2 * K * K)
            store_lines(ring, B, base)
            high = M.to(gl.bfloat16)
            parts = (base + K * K).to(gl.pointer_type(gl.bfloat16), bitcast=True)
            store_lines(ring, high, parts)
            store_lines(ring, (M - high.to(gl.float32)).to(gl.bfloat16), parts + K * K)
