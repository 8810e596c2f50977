"""The scan roles of the Hopper forward: the recurrence over blocks of 16 tokens, with the state transposed, S [R rows of V, K], in fp32
accumulators of one or two warpgroups. Per block, from what prep.py left in the ring:

    X, Oq = S (kd, qd)^T            one product, N = 32
    D     = v - r_k X               values minus what the state predicts
    Rt, Oz = D (T0, Z T0)^T         one product, N = 32
    O     = scale r_q (Oq + Oz)
    S     = (S + Rt ki) * exp(G_C)  or, with a kg tile, S * exp(G_C) + Rt kg

Operand A comes from registers throughout: an accumulator converts to it without moving data between threads."""

from __future__ import annotations

from typing import NamedTuple

from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.tiles import group_layout, to_f32

DROP_BITS = gl.constexpr(40)  # a tail's M with no entry above 2^-DROP_BITS drops what lies before it (segments.py)


class States(NamedTuple):
    """Where states come from and go to; each may be None"""

    initial_ptr: object  # [N, HV, V, K] or [N, HV, K, V], fp32 or bf16
    final_ptr: object  # the same
    entry_ptr: object  # [segments, HV, V, K] fp32, entry states of segments (segments.py)


class Sink(NamedTuple):
    """Where a state-only pass writes"""

    summary_ptr: object  # [NS, HV, 2, V, K] fp32: b, then M as bf16 [2, K, K], its rounding and the rest
    known_ptr: object  # [HV, NS] int32 (segments.py)
    tail: object  # steps of a tail, 0: whole segments


class Output(NamedTuple):
    desc: object  # [B*T, HV*V], boxes of 16 rows x R
    ptr: object
    tile: object  # shared [2, 16, R]


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
def first_state(states, segment, work, HV, T: gl.constexpr):
    """S at the segment's start: initial_state, the segment's entry state, or 0"""
    R: gl.constexpr = T.R
    K: gl.constexpr = T.K
    L: gl.constexpr = group_layout(K, gl.num_warps())
    row = gl.arange(0, R, layout=gl.SliceLayout(1, L))[:, None]
    col = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
    S = gl.zeros([R, K], gl.float32, L)
    if states.initial_ptr is not None:
        if work.from_initial:
            S = gl.load(states.initial_ptr + state_offsets(work, row, col, T, HV)).to(gl.float32)
    if T.split == "segments" or T.split == "segments_all" or T.split == "rest":
        if work.from_entry:
            V: gl.constexpr = T.V
            base = states.entry_ptr + (segment.to(gl.int64) * HV + work.head) * (K * V)
            S = gl.load(base + (work.row0 + row) * K + col)
    return S


@gluon.jit
def last_state(states, S, work, HV, T: gl.constexpr):
    """Write S to final_state where this segment ends its sequence"""
    R: gl.constexpr = T.R
    K: gl.constexpr = T.K
    L: gl.constexpr = group_layout(K, gl.num_warps())
    if states.final_ptr is not None:
        if work.is_last:
            row = gl.arange(0, R, layout=gl.SliceLayout(1, L))[:, None]
            col = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
            ptr = states.final_ptr + state_offsets(work, row, col, T, HV)
            gl.store(ptr, S.to(states.final_ptr.dtype.element_ty))


@gluon.jit
def store_rows(out, o, row, c: gl.constexpr, work, HV, T: gl.constexpr):
    """Store 16 rows of o [R, 16]: by the copy engine where all belong to this segment, masked at its end"""
    R: gl.constexpr = T.R
    V: gl.constexpr = T.V
    L: gl.constexpr = group_layout(16, gl.num_warps())
    if row + 16 <= work.end:
        tile = out.tile.index(c)
        tma.store_wait(1)
        tile.permute((1, 0)).store(o)
        fence_async_shared()
        tma.async_copy_shared_to_global(out.desc, [row, work.head * V + work.row0], tile)
    else:
        token = row + gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :]
        r = gl.arange(0, R, layout=gl.SliceLayout(1, L))[:, None]
        at = (token.to(gl.int64) * HV + work.head) * V + work.row0 + r
        gl.store(out.ptr + at, o, mask=token < work.end)


@gluon.jit
def advance(S, ring, slot, c: gl.constexpr, values: gl.constexpr, T: gl.constexpr):
    """S [rows, K] after block c of a step, without output; rows of a map (values False) get no values"""
    K: gl.constexpr = T.K
    L: gl.constexpr = group_layout(K, gl.num_warps())
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    dtype: gl.constexpr = ring.kq.dtype
    per_slot: gl.constexpr = ring.g.dtype.primitive_bitwidth // 16
    kd = ring.kq.index(slot).slice(32 * c, 16, dim=0).permute((1, 0))
    ki = ring.ki.index(slot * per_slot).slice(16 * c, 16, dim=0)
    t0 = ring.tz.index(slot).slice(32 * c, 16, dim=0).permute((1, 0))
    decay = ring.decay.index(slot).slice(c, 1, dim=0)
    zero = gl.zeros([S.shape[0], 16], gl.float32, L16)
    X = warpgroup_mma(gl.convert_layout(S.to(dtype), gl.DotOperandLayout(0, L16, 2)), kd, zero, use_acc=False, is_async=True)
    X = warpgroup_mma_wait(0, deps=(X,)) * ring.rows.index(slot).slice(2 * c, 1, dim=0).load(L16)
    if values:
        X += to_f32(ring.v.index(slot).slice(16 * c, 16, dim=0).permute((1, 0)).load(L16))
    R = warpgroup_mma(gl.convert_layout(X.to(dtype), gl.DotOperandLayout(0, L16, 2)), t0, zero, use_acc=False, is_async=True)
    if T.kg:
        S = S * decay.load(L)
    R = warpgroup_mma_wait(0, deps=(R,))
    S = warpgroup_mma(gl.convert_layout(R.to(dtype), gl.DotOperandLayout(0, L, 2)), ki, S, is_async=True)
    S = warpgroup_mma_wait(0, deps=(S,))
    if not T.kg:
        S = S * decay.load(L)
    return S


@gluon.jit
def tail_state(ring, states, known_ptr, work, segment, HV, NS, T: gl.constexpr):
    """(S after the steps before the segment, 1 if it is the segment's entry state). The map M of these steps comes first, alone: beside S
    it would not fit into the registers."""
    R: gl.constexpr = T.R
    K: gl.constexpr = T.K
    slots: gl.constexpr = T.slots
    L: gl.constexpr = group_layout(K, gl.num_warps())
    row = gl.arange(0, K, layout=gl.SliceLayout(1, L))[:, None]
    col = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
    M = gl.where(row == col, 1.0, gl.zeros([K, K], gl.float32, L))
    for it in range(work.tail):
        slot = it % slots
        mbarrier.wait(ring.full.index(slot), (it // slots) & 1)
        mbarrier.wait(ring.ready.index(slot), (it // slots) & 1)
        for c in gl.static_range(2):
            M = advance(M, ring, slot, c, False, T)
    small = ((gl.max(gl.max(gl.abs(M), 1), 0) <= 2.0**-DROP_BITS) | work.from_initial).to(gl.int32)
    S = first_state(states, segment, work, HV, T)
    for it in range(work.tail):
        slot = it % slots
        for c in gl.static_range(2):
            S = advance(S, ring, slot, c, True, T)
        mbarrier.arrive(ring.empty.index(slot), count=1)
    if work.steps > 0:
        gl.store(known_ptr + work.head * NS + segment, small)
        if states.entry_ptr is not None:
            r = gl.arange(0, R, layout=gl.SliceLayout(1, L))[:, None]
            base = states.entry_ptr + (segment.to(gl.int64) * HV + work.head) * (T.V * K)
            gl.store(base + (work.row0 + r) * K + col, S)
    return S, small


@gluon.jit
def forward_scan(ring, out, states, known_ptr, work, segment, HV, NS, T: gl.constexpr):
    warps: gl.constexpr = gl.num_warps()
    K: gl.constexpr = T.K
    L: gl.constexpr = group_layout(K, warps)
    L16: gl.constexpr = group_layout(16, warps)
    L32: gl.constexpr = group_layout(32, warps)
    R: gl.constexpr = T.R
    slots: gl.constexpr = T.slots
    dtype: gl.constexpr = ring.kq.dtype
    per_slot: gl.constexpr = ring.g.dtype.primitive_bitwidth // 16
    first = work.tail
    stop = work.steps
    if T.split == "tails":
        S, small = tail_state(ring, states, known_ptr, work, segment, HV, NS, T)
        stop = gl.where(small != 0, stop, first)
    else:
        S = first_state(states, segment, work, HV, T)
    for it in range(first, stop):
        slot = it % slots
        phase = (it // slots) & 1
        mbarrier.wait(ring.full.index(slot), phase)
        mbarrier.wait(ring.ready.index(slot), phase)
        for c in gl.static_range(2):
            kd = ring.kq.index(slot).slice(32 * c, 32, dim=0)
            ki = ring.ki.index(slot * per_slot).slice(16 * c, 16, dim=0)
            tz = ring.tz.index(slot).slice(32 * c, 32, dim=0)
            decay = ring.decay.index(slot).slice(c, 1, dim=0)
            SA = gl.convert_layout(S.to(dtype), gl.DotOperandLayout(0, L32, 2))
            XO = warpgroup_mma(SA, kd.permute((1, 0)), gl.zeros([R, 32], gl.float32, L32), use_acc=False, is_async=True)
            XO = warpgroup_mma_wait(0, deps=(XO,))
            X, O = gl.split(XO.reshape([R, 2, 16]).permute((0, 2, 1)))
            X = gl.convert_layout(X, L16)
            O = gl.convert_layout(O, L16)
            v = to_f32(ring.v.index(slot).slice(16 * c, 16, dim=0).permute((1, 0)).load(L16))
            D = (v + X * ring.rows.index(slot).slice(2 * c, 1, dim=0).load(L16)).to(dtype)
            D = gl.convert_layout(D, gl.DotOperandLayout(0, L32, 2))
            RO = warpgroup_mma(D, tz.permute((1, 0)), gl.zeros([R, 32], gl.float32, L32), use_acc=False, is_async=True)
            if T.kg:
                S = S * decay.load(L)
            RO = warpgroup_mma_wait(0, deps=(RO,))
            Rt, Oz = gl.split(RO.reshape([R, 2, 16]).permute((0, 2, 1)))
            Rt = gl.convert_layout(gl.convert_layout(Rt, L16).to(dtype), gl.DotOperandLayout(0, L, 2))
            S = warpgroup_mma(Rt, ki, S, is_async=True)
            o = (O + gl.convert_layout(Oz, L16)) * ring.rows.index(slot).slice(2 * c + 1, 1, dim=0).load(L16)
            store_rows(out, o.to(out.tile.dtype), work.start + it * 32 + 16 * c, c, work, HV, T)
            S = warpgroup_mma_wait(0, deps=(S,))
            if not T.kg:
                S = S * decay.load(L)
        mbarrier.arrive(ring.empty.index(slot), count=1)
    if T.split == "tails":
        for it in range(stop, work.steps):  # what is in flight must land before the block ends
            slot = it % slots
            mbarrier.wait(ring.ready.index(slot), (it // slots) & 1)
            mbarrier.arrive(ring.empty.index(slot), count=1)
    tma.store_wait(0)
    last_state(states, S, work, HV, T)


@gluon.jit
def summary_scan(ring, states, sink, work, segment, HV, NS, T: gl.constexpr):
    """State only, as two interleaved chains: b (rows of V, from 0 or initial_state) and M (K rows, from the identity, without values):
    these steps turn an entry state E into E M + b. Writes (b, M), or for a tail the next segment's entry state b and if it is known."""
    K: gl.constexpr = T.K
    slots: gl.constexpr = T.slots
    L: gl.constexpr = group_layout(K, gl.num_warps())
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    DS: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    D16: gl.constexpr = gl.DotOperandLayout(0, L16, 2)
    dtype: gl.constexpr = ring.kq.dtype
    per_slot: gl.constexpr = ring.g.dtype.primitive_bitwidth // 16
    row = gl.arange(0, K, layout=gl.SliceLayout(1, L))[:, None]
    col = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
    B = first_state(states, segment, work, HV, T)
    M = gl.where(row == col, 1.0, gl.zeros([K, K], gl.float32, L))
    zero = gl.zeros([K, 16], gl.float32, L16)
    for it in range(work.steps):
        slot = it % slots
        phase = (it // slots) & 1
        mbarrier.wait(ring.full.index(slot), phase)
        mbarrier.wait(ring.ready.index(slot), phase)
        for c in gl.static_range(2):
            kd = ring.kq.index(slot).slice(32 * c, 16, dim=0).permute((1, 0))
            ki = ring.ki.index(slot * per_slot).slice(16 * c, 16, dim=0)
            t0 = ring.tz.index(slot).slice(32 * c, 16, dim=0).permute((1, 0))
            decay = ring.decay.index(slot).slice(c, 1, dim=0)
            read = ring.rows.index(slot).slice(2 * c, 1, dim=0).load(L16)
            XB = warpgroup_mma(gl.convert_layout(B.to(dtype), D16), kd, zero, use_acc=False, is_async=True)
            v = to_f32(ring.v.index(slot).slice(16 * c, 16, dim=0).permute((1, 0)).load(L16))
            XB = warpgroup_mma_wait(0, deps=(XB,))
            DB = gl.convert_layout((v + XB * read).to(dtype), D16)
            RB = warpgroup_mma(DB, t0, zero, use_acc=False, is_async=True)
            XM = warpgroup_mma(gl.convert_layout(M.to(dtype), D16), kd, zero, use_acc=False, is_async=True)
            RB = warpgroup_mma_wait(1, deps=(RB,))
            if T.kg:
                B = B * decay.load(L)
            B = warpgroup_mma(gl.convert_layout(RB.to(dtype), DS), ki, B, is_async=True)
            XM = warpgroup_mma_wait(1, deps=(XM,))
            DM = gl.convert_layout((XM * read).to(dtype), D16)
            RM = warpgroup_mma(DM, t0, zero, use_acc=False, is_async=True)
            B = warpgroup_mma_wait(1, deps=(B,))
            if not T.kg:
                B = B * decay.load(L)
            RM = warpgroup_mma_wait(0, deps=(RM,))
            if T.kg:
                M = M * decay.load(L)
            M = warpgroup_mma(gl.convert_layout(RM.to(dtype), DS), ki, M, is_async=True)
            M = warpgroup_mma_wait(0, deps=(M,))
            if not T.kg:
                M = M * decay.load(L)
        mbarrier.arrive(ring.empty.index(slot), count=1)
    if work.steps > 0:
        at = segment.to(gl.int64) * HV + work.head
        if sink.tail > 0:
            small = (gl.max(gl.max(gl.abs(M), 1), 0) <= 2.0**-DROP_BITS) | work.from_initial
            gl.store(sink.known_ptr + work.head * NS + segment + 1, small.to(gl.int32))
            gl.store(states.entry_ptr + (at + HV) * (K * K) + row * K + col, B)
        else:
            base = sink.summary_ptr + at * (2 * K * K)
            gl.store(base + row * K + col, B)
            high = M.to(gl.bfloat16)
            parts = (base + K * K).to(gl.pointer_type(gl.bfloat16), bitcast=True)
            gl.store(parts + row * K + col, high)
            gl.store(parts + K * K + row * K + col, (M - high.to(gl.float32)).to(gl.bfloat16))
