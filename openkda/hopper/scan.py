"""The scan roles of the Hopper forward: the recurrence over blocks of 16 tokens, with the state transposed, S [R rows of V, K], in fp32
accumulators of one or two warpgroups. Per block, from what prep.py left in the ring:

    X, Oq = S (kd, qd)^T            one product, N = 32
    D     = v - r_k X               values minus what the state predicts
    Rt, Oz = D (T, Z T)^T           one product, N = 32; then Rt <- Rt beta r_k
    O     = scale r_q (Oq + Oz)
    S     = (S + Rt ki) * exp(G_C)  or, with a kg tile, S * exp(G_C) + Rt kg

Operand A comes from registers throughout: an accumulator converts to it without moving data between threads."""

from __future__ import annotations

from typing import NamedTuple

from openkda.hopper.cluster import group_place, rank_of
from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.entries import store_entry
from openkda.hopper.own import await_ready, parted, read_verdict
from openkda.hopper.spread import spread_constants, take_norms, turn_odd
from openkda.hopper.tiles import by_scan, first_row, fused, group_count, group_layout, kept, late, quiet, to_f32


class States(NamedTuple):
    """Where states come from and go to; each may be None"""

    initial_ptr: object  # [N, HV, V, K] or [N, HV, K, V], fp32 or bf16
    final_ptr: object  # the same
    entry_ptr: object  # [segments, HV, V, K] fp32, entry states of segments (segments.py)
    h_ptr: object  # [chunks, HV, V, K] or [chunks, HV, K, V] in the dtype of o, chunk-entry states


class Sink(NamedTuple):
    """Where a state-only pass writes"""

    summary_ptr: object  # [NS, HV, 2, V, K] fp32: b, then M as bf16 [2, K, K], its rounding and the rest
    known_ptr: object  # [HV, NS] int32 (segments.py)
    tail: object  # blocks of a tail, 0: whole segments


class Output(NamedTuple):
    desc: object  # [B*T, HV*V], boxes of 16 rows x R
    ptr: object
    tile: object  # shared [2, 16, R]
    scale: object  # of o, where the scan takes the norms of q (spread.py), else None


@gluon.jit
def state_offsets(work, row, col, T: gl.constexpr, HV):
    """Element offsets of rows `row` (V) and columns `col` (K) of this sequence's and head's state in the caller's layout"""
    K: gl.constexpr = T.K
    V: gl.constexpr = T.V
    base = (work.sequence.to(gl.int64) * HV + work.head) * (K * V)
    if T.state_v_first:
        return base + (work.row0 + row) * K + col
    else:
        return base + col * V + (work.row0 + row)


@gluon.jit
def first_state(states, segment, work, HV, first: gl.constexpr, rows: gl.constexpr, T: gl.constexpr):
    """Rows first to first + rows of S at the segment's start: initial_state, the segment's entry state, or 0"""
    K: gl.constexpr = T.K
    L: gl.constexpr = group_layout(K, gl.num_warps())
    row = first + gl.arange(0, rows, layout=gl.SliceLayout(1, L))[:, None]
    col = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
    S = gl.zeros([rows, K], gl.float32, L)
    if states.initial_ptr is not None:
        if work.from_initial:
            S = gl.load(states.initial_ptr + state_offsets(work, row, col, T, HV)).to(gl.float32)
    if T.split == "segments" or T.split == "segments_all":
        if work.from_entry:
            V: gl.constexpr = T.V
            base = states.entry_ptr + (segment.to(gl.int64) * HV + work.head) * (K * V)
            S = gl.load(base + (work.row0 + row) * K + col)
    return S


@gluon.jit
def last_state(states, S, work, HV, first: gl.constexpr, T: gl.constexpr):
    """Write S, the rows from `first` on, to final_state where this segment ends its sequence"""
    K: gl.constexpr = T.K
    L: gl.constexpr = group_layout(K, gl.num_warps())
    if states.final_ptr is not None:
        if work.is_last:
            row = first + gl.arange(0, S.shape[0], layout=gl.SliceLayout(1, L))[:, None]
            col = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
            ptr = states.final_ptr + state_offsets(work, row, col, T, HV)
            gl.store(ptr, S.to(states.final_ptr.dtype.element_ty))


@gluon.jit
def store_rows(out, o, row, c, work, HV, T: gl.constexpr):
    """Store 16 rows of o, a tuple of [rows, 16]: by the copy engine where all belong to this segment, masked at its end"""
    V: gl.constexpr = T.V
    rows: gl.constexpr = o[0].shape[0]
    if row + 16 <= work.end:
        tile = out.tile.index(c)
        tma.store_wait(1)
        for h in gl.static_range(len(o)):
            tile.slice(rows * h, rows, dim=1).permute((1, 0)).store(o[h])
        fence_async_shared()
        tma.async_copy_shared_to_global(out.desc, [row, work.head * V + work.row0], tile)
    else:
        store_live_rows(out, o, row, work, HV, T)


@gluon.jit
def store_live_rows(out, o, row, work, HV, T: gl.constexpr):
    """Store what of 16 rows of o belongs to this segment"""
    V: gl.constexpr = T.V
    L: gl.constexpr = group_layout(16, gl.num_warps())
    rows: gl.constexpr = o[0].shape[0]
    token = row + gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :]
    r = gl.arange(0, rows, layout=gl.SliceLayout(1, L))[:, None]
    for h in gl.static_range(len(o)):
        at = (token.to(gl.int64) * HV + work.head) * V + work.row0 + rows * h + r
        if quiet(T):
            gl.store(out.ptr + at, o[h], mask=(token < work.end) & (token >= first_row(work)))
        else:
            gl.store(out.ptr + at, o[h], mask=token < work.end)


@gluon.jit
def ki_tile(ring, b):
    """ki [16, K] of the ring's block b"""
    return ring.ki.index(b).slice(0, 16, dim=0)


@gluon.jit
def start_read(ring, b, S):
    """X, Oq = S (kd, qd)^T, begun"""
    L32: gl.constexpr = group_layout(32, gl.num_warps())
    SA = gl.convert_layout(S.to(ring.kq.dtype), gl.DotOperandLayout(0, L32, 2))
    zero = gl.zeros([S.shape[0], 32], gl.float32, L32)
    return warpgroup_mma(SA, ring.kq.index(b).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def halves(x):
    """The two [rows, 16] of an accumulator [rows, 32]"""
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    x0, x1 = gl.split(x.reshape([x.shape[0], 2, 16]).permute((0, 2, 1)))
    return gl.convert_layout(x0, L16), gl.convert_layout(x1, L16)


@gluon.jit
def load_values(ring, b, h: gl.constexpr, rows: gl.constexpr):
    return ring.v.index(b).slice(rows * h, rows, dim=1).permute((1, 0)).load(group_layout(16, gl.num_warps()))


@gluon.jit
def live_values(ring, b, left, T: gl.constexpr):
    """v of block b, of which `left` rows belong to the item; in a cluster the rows past the end are clear in a block's own groups alone"""
    R: gl.constexpr = T.R
    v = load_values(ring, b, 0, R)
    if T.cluster:
        if left < 16:
            row = gl.arange(0, 16, layout=gl.SliceLayout(0, group_layout(16, gl.num_warps())))
            v = kept(v, gl.where(row[None, :] < left, -1, 0).to(gl.int16))
    return v


@gluon.jit
def difference(v, X, read):
    """D = v - r_k X in v's type, read = -r_k. In bf16 it is one multiply-add of pairs, of X and r_k as they are rounded: what the state
    predicts moves by 2^-9 of itself, v by nothing. In fp32 it was 20 instructions for every 8, 2 % of the whole (docs/hopper_tried.md)."""
    if v.dtype == gl.bfloat16:
        return fused(X.to(gl.bfloat16), read.to(gl.bfloat16), v)
    else:
        return (to_f32(v) + X * read).to(v.dtype)


@gluon.jit
def start_solve(ring, b, XO, v, read):
    """(Rt, Oz = D (T, Z T)^T begun, Oq)"""
    L32: gl.constexpr = group_layout(32, gl.num_warps())
    X, O = halves(XO)
    D = gl.convert_layout(difference(v, X, read), gl.DotOperandLayout(0, L32, 2))
    zero = gl.zeros([v.shape[0], 32], gl.float32, L32)
    return warpgroup_mma(D, ring.tz.index(b).permute((1, 0)), zero, use_acc=False, is_async=True), O


@gluon.jit
def start_update(ring, b, RO, S, gain):
    """(S + Rt ki begun, Oz), Rt <- Rt beta r_k"""
    Rt, Oz = halves(RO)
    Rt = gl.convert_layout((Rt * gain).to(ring.kq.dtype), gl.DotOperandLayout(0, S.type.layout, 2))
    return warpgroup_mma(Rt, ki_tile(ring, b), S, is_async=True), Oz


@gluon.jit
def read_state(S, ring, b):
    """X = S kd^T, begun"""
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    zero = gl.zeros([S.shape[0], 16], gl.float32, L16)
    kd = ring.kq.index(b).slice(0, 16, dim=0).permute((1, 0))
    return warpgroup_mma(gl.convert_layout(S.to(ring.kq.dtype), gl.DotOperandLayout(0, L16, 2)), kd, zero, use_acc=False, is_async=True)


@gluon.jit
def solve_values(X, ring, b, h: gl.constexpr, rows: gl.constexpr):
    """Rt = D T^T, begun; X is None where S = 0"""
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    zero = gl.zeros([rows, 16], gl.float32, L16)
    D = load_values(ring, b, h, rows)
    if X is not None:
        D = difference(D, X, ring.read.index(b).load(L16))
    inverse = ring.tz.index(b).slice(0, 16, dim=0).permute((1, 0))
    return warpgroup_mma(gl.convert_layout(D, gl.DotOperandLayout(0, L16, 2)), inverse, zero, use_acc=False, is_async=True)


@gluon.jit
def update_state(S, R, ring, b, gain, whole: gl.constexpr = True):
    """S + Rt ki, begun; Rt = R beta r_k. Without `whole`, S = 0"""
    Rt = gl.convert_layout((R * gain).to(ring.kq.dtype), gl.DotOperandLayout(0, S.type.layout, 2))
    return warpgroup_mma(Rt, ki_tile(ring, b), S, use_acc=whole, is_async=True)


@gluon.jit
def advance_two(S0, S1, ring, b, T: gl.constexpr):
    """Two chains of 64 rows of S after block b, without output"""
    L: gl.constexpr = S0.type.layout
    decay = ring.decay.index(b)
    X0 = read_state(S0, ring, b)
    X0 = warpgroup_mma_wait(0, deps=(X0,))
    R0 = solve_values(X0, ring, b, 0, 64)
    X1 = read_state(S1, ring, b)
    if T.kg:
        S0 = S0 * decay.load(L)
    gain = ring.gain.index(b).load(group_layout(16, gl.num_warps()))
    R0 = warpgroup_mma_wait(1, deps=(R0,))
    S0 = update_state(S0, R0, ring, b, gain)
    X1 = warpgroup_mma_wait(1, deps=(X1,))
    R1 = solve_values(X1, ring, b, 1, 64)
    S0 = warpgroup_mma_wait(1, deps=(S0,))
    if T.kg:
        S1 = S1 * decay.load(L)
    else:
        S0 = S0 * decay.load(L)
    R1 = warpgroup_mma_wait(0, deps=(R1,))
    S1 = update_state(S1, R1, ring, b, gain)
    S1 = warpgroup_mma_wait(0, deps=(S1,))
    if not T.kg:
        S1 = S1 * decay.load(L)
    return S0, S1


@gluon.jit
def begin_two(ring, b, T: gl.constexpr):
    """The same from S = 0, which predicts nothing: without the first product"""
    K: gl.constexpr = T.K
    L: gl.constexpr = group_layout(K, gl.num_warps())
    zero = gl.zeros([64, K], gl.float32, L)
    R0 = solve_values(None, ring, b, 0, 64)
    R1 = solve_values(None, ring, b, 1, 64)
    gain = ring.gain.index(b).load(group_layout(16, gl.num_warps()))
    decay = ring.decay.index(b)
    R0 = warpgroup_mma_wait(1, deps=(R0,))
    S0 = update_state(zero, R0, ring, b, gain, False)
    R1 = warpgroup_mma_wait(1, deps=(R1,))
    S1 = update_state(zero, R1, ring, b, gain, False)
    S0 = warpgroup_mma_wait(1, deps=(S0,))
    if not T.kg:
        S0 = S0 * decay.load(L)
    S1 = warpgroup_mma_wait(0, deps=(S1,))
    if not T.kg:
        S1 = S1 * decay.load(L)
    return S0, S1


@gluon.jit
def drain(ring, stop, end, T: gl.constexpr):
    """Free the steps from `stop` to `end`: what is in flight must land before the block ends, or the ring goes on"""
    per: gl.constexpr = T.wide // 2  # steps of a group
    halves: gl.constexpr = per * T.groups
    for it in range(stop, end):
        at = it % halves
        mbarrier.wait(ring.ready.index(at // per), (it // halves) & 1)
        mbarrier.arrive(ring.empty.index(at), count=1)


@gluon.jit
def end_item(ring, stop, before, work, T: gl.constexpr):
    """Free what of the item's groups the scan has not freed, from block `stop` on"""
    per: gl.constexpr = T.wide // 2  # steps of a group
    if T.split == "turns":
        gl.thread_barrier()  # every warp has read the last block: one thread's arrival stands for all
        drain(ring, stop // 2, per * before + group_count(work.steps, T) * per, T)


@gluon.jit
def next_block(ring, n, rank, T: gl.constexpr):
    """Where block n of the item lies, once it is ready"""
    if T.cluster:
        at, phase = group_place(n // 4, rank, T)
        b = 4 * at + n % 4
        if (n % 4 == 0) | ((n % 4 == 2) & (at == T.groups - 1)):
            mbarrier.wait(ring.ready.index(at + n % 4 // 2), phase)
    else:
        blocks: gl.constexpr = T.wide * T.groups
        b = n % blocks
        if n % T.wide == 0:
            mbarrier.wait(ring.ready.index(b // T.wide), (n // blocks) & 1)
    return b


@gluon.jit
def skip_rows(ring, S, count, rank, T: gl.constexpr):
    """R rows of S after `count` blocks, without output: the same products with the rows of k alone, so the same bits"""
    L: gl.constexpr = S.type.layout
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    D16: gl.constexpr = gl.DotOperandLayout(0, L16, 2)
    zero = gl.zeros([S.shape[0], 16], gl.float32, L16)
    for n in range(count):
        b = next_block(ring, n, rank, T)
        X = read_state(S, ring, b)
        v = load_values(ring, b, 0, T.R)
        read = ring.read.index(b).load(L16)
        gain = ring.gain.index(b).load(L16)
        X = warpgroup_mma_wait(0, deps=(X,))
        D = gl.convert_layout(difference(v, X, read), D16)
        R = warpgroup_mma(D, ring.tz.index(b).slice(0, 16, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
        decay = ring.decay.index(b).load(L)
        if T.kg:
            S = S * decay
        R = warpgroup_mma_wait(0, deps=(R,))
        S = update_state(S, R, ring, b, gain)
        S = warpgroup_mma_wait(0, deps=(S,))
        if not T.kg:
            S = S * decay
        if n % 2 == 1:
            mbarrier.arrive(ring.empty.index(b // 2), count=1)
    return S


@gluon.jit
def scan_rows(ring, before, out, states, work, segment, HV, NS, T: gl.constexpr):
    """R rows of V, one chain of products"""
    K: gl.constexpr = T.K
    R: gl.constexpr = T.R
    L: gl.constexpr = group_layout(K, gl.num_warps())
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    first = T.wide * before
    stop = T.wide * before + (work.end - work.start + 15) // 16 * (work.steps > 0).to(gl.int32)
    row = work.start - 16 * T.wide * before
    S = first_state(states, segment, work, HV, 0, R, T)
    o = gl.zeros([R, 16], out.tile.dtype, L16)
    rank = rank_of(T)
    if quiet(T):
        S = skip_rows(ring, S, work.tail, rank, T)
        first += work.tail
    for n in range(first, stop):
        b = next_block(ring, n, rank, T)
        XO = start_read(ring, b, S)
        store_entry(states, S, row + 16 * n, work, HV, 0, T)
        v = live_values(ring, b, work.end - (row + 16 * n), T)
        read = ring.read.index(b).load(L16)
        if n > first:
            store_rows(out, (o,), row + 16 * (n - 1), n & 1, work, HV, T)
        XO = warpgroup_mma_wait(0, deps=(XO,))
        RO, O = start_solve(ring, b, XO, v, read)
        gain = ring.gain.index(b).load(L16)
        decay = ring.decay.index(b).load(L)
        write = ring.write.index(b).load(L16)
        if T.kg:
            S = S * decay
        RO = warpgroup_mma_wait(0, deps=(RO,))
        S, Oz = start_update(ring, b, RO, S, gain)
        o = ((O + Oz) * write).to(out.tile.dtype)
        S = warpgroup_mma_wait(0, deps=(S,))
        if not T.kg:
            S = S * decay
        if n % 2 == 1:
            mbarrier.arrive(ring.empty.index(b // 2), count=1)
    if T.cluster:
        if stop % 2 == 1:  # the other block waits for every step
            gl.thread_barrier()
            at, _ = group_place(stop // 4, rank, T)
            mbarrier.arrive(ring.empty.index(2 * at + stop % 4 // 2), count=1)
    if stop > first:
        store_rows(out, (o,), row + 16 * (stop - 1), stop & 1, work, HV, T)
    end_item(ring, stop, before, work, T)
    tma.store_wait(0)
    last_state(states, S, work, HV, 0, T)


@gluon.jit
def scan_two_rows(ring, before, src, out, states, known_ptr, verdict, work, segment, HV, NS, T: gl.constexpr):
    """128 rows of V as two chains of products that fill each other's waits"""
    K: gl.constexpr = T.K
    L: gl.constexpr = group_layout(K, gl.num_warps())
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    blocks: gl.constexpr = T.wide * T.groups
    first = T.wide * before + work.tail
    begin = T.wide * before if late(T) else first
    stop = T.wide * before + (work.end - work.start + 15) // 16 * (work.steps > 0).to(gl.int32)
    row = work.start - 16 * T.wide * before
    if by_scan(T):
        consts = spread_constants(src, work, T)
    if T.spread and T.l2norm:
        take_norms(ring, work, out.scale, T)
    if by_scan(T):
        turn_odd(ring, work, consts, T)
    S0 = first_state(states, segment, work, HV, 0, 64, T)
    S1 = first_state(states, segment, work, HV, 64, 64, T)
    if T.split == "tails":
        passed = work.tail * 0
        if (work.tail > 0) & (work.from_initial == 0):
            await_ready(ring, 0)
            S0, S1 = begin_two(ring, 0, T)
            passed += 1
        for n in range(passed, first):
            if n % T.wide == 0:
                await_ready(ring, n // T.wide)
            S0, S1 = advance_two(S0, S1, ring, n, T)
    o0 = gl.zeros([64, 16], out.tile.dtype, L16)
    o1 = o0
    end = stop
    parts: gl.constexpr = 2 if parted(T) else 1
    for part in range(gl.minimum(work.tail, 0) + parts if parts > 1 else parts):  # a loop: code is dear
        if parted(T):  # M takes longer than the state; what a segment writes in vain, the launch that serves its head writes again
            check = gl.minimum(stop, 2 * work.tail + 2)
            begin = gl.where(part == 0, first, check)
            end = check
            if part != 0:
                if work.steps > 0:
                    known = read_verdict(verdict, T)
                    gl.store(known_ptr + work.head * NS + segment, known)
                    stop = gl.where(known != 0, stop, check)
                    end = stop
        for n in range(begin, end):
            b = n % blocks
            if n % T.wide == 0:
                mbarrier.wait(ring.ready.index(b // T.wide), (n // blocks) & 1)
            XO0 = start_read(ring, b, S0)
            store_entry(states, S0, row + 16 * n, work, HV, 0, T)
            v = load_values(ring, b, 0, 64)
            read = ring.read.index(b).load(L16)
            if n > first:
                store_rows(out, (o0, o1), row + 16 * (n - 1), n & 1, work, HV, T)
            XO0 = warpgroup_mma_wait(0, deps=(XO0,))
            RO0, O0 = start_solve(ring, b, XO0, v, read)
            XO1 = start_read(ring, b, S1)
            store_entry(states, S1, row + 16 * n, work, HV, 64, T)
            v = load_values(ring, b, 1, 64)
            decay = ring.decay.index(b)
            if T.kg:
                S0 = S0 * decay.load(L)
            gain = ring.gain.index(b).load(L16)
            RO0 = warpgroup_mma_wait(1, deps=(RO0,))
            S0, Oz0 = start_update(ring, b, RO0, S0, gain)
            write = ring.write.index(b).load(L16)
            o0 = ((O0 + Oz0) * write).to(out.tile.dtype)
            XO1 = warpgroup_mma_wait(1, deps=(XO1,))
            RO1, O1 = start_solve(ring, b, XO1, v, read)
            S0 = warpgroup_mma_wait(1, deps=(S0,))
            if T.kg:
                S1 = S1 * decay.load(L)
            else:
                S0 = S0 * decay.load(L)
            if T.kg:  # short of registers
                gain = ring.gain.index(b).load(L16)
            RO1 = warpgroup_mma_wait(0, deps=(RO1,))
            S1, Oz1 = start_update(ring, b, RO1, S1, gain)
            o1 = ((O1 + Oz1) * write).to(out.tile.dtype)
            S1 = warpgroup_mma_wait(0, deps=(S1,))
            if not T.kg:
                S1 = S1 * decay.load(L)
            if n % 2 == 1:
                mbarrier.arrive(ring.empty.index(b // 2), count=1)
    if stop > first:
        store_rows(out, (o0, o1), row + 16 * (stop - 1), stop & 1, work, HV, T)
    if T.split == "tails" and not parted(T):
        if work.steps > 0:
            gl.store(known_ptr + work.head * NS + segment, read_verdict(verdict, T))
    end_item(ring, stop, before, work, T)
    tma.store_wait(0)
    last_state(states, S0, work, HV, 0, T)
    last_state(states, S1, work, HV, 64, T)
