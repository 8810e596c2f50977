"""The reverse walk: gradients of the states, from the last chunk (docs/backward.md, (1), (2), (4)); ring, tiles, places: backward_walk.py.

    X  = do Aqk + dSb kg^T        dSb = dS in bf16, which is dh           dr = X in bf16
    dS = dS Diag(decay) + do qg + dr w        dv = dr T, T in two parts

with do, X, dr, dv transposed, [rows of V, 32 tokens], and dS [rows, K]; 64 rows, or beside fused_gradients 128 (backward_follow.py).

Grid (V / rows, head, sequence). rows / 16 warps walk: only dSb kg^T, its rounding and dr w follow from one another; do qg runs behind the
first, dv and the next chunk's do Aqk behind the second. Four warps write dh and dv from shared memory. The others, one a role: two request
tiles, since one has the copy engine wait for requests, and one announces what is written (backward_follow.py): the walk waits for no store,
and who stores waits for no release."""

from __future__ import annotations

from typing import NamedTuple

import torch

from openkda.hopper.backward_follow import GROUP, clear_flags, raise_flag, walk_rows
from openkda.hopper.backward_prepare import Prepared
from openkda.hopper.backward_tiles import to_bf16
from openkda.hopper.backward_walk import (
    FINAL,
    FLAGS,
    GIVEN,
    SEQUENCES,
    STATE,
    TOKENS,
    Maps,
    Walk,
    decay_layout,
    first_state,
    land,
    last_state,
    locate,
    make_ring,
    rows_layout,
    tiles_of,
)
from openkda.hopper.compat import gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.launch import dense, packed_rows
from openkda.hopper.runtime import Launch, Pointer, full_name, start
from openkda.hopper.tiles import group_layout, tile_layout
from openkda.plan import Plan
from openkda.problem import Problem

REGISTERS = 128  # a thread at launch
STORE_REGISTERS = gl.constexpr(96)
COPY_REGISTERS = gl.constexpr(32)


class Leaving(NamedTuple):
    """What is handed to those who write it: `tiles` of each"""

    dh: object  # shared [tiles, rows, K]
    dv: object  # shared [tiles, 32, rows], of the chunk met before
    full: object  # [tiles] barriers
    free: object
    there: object  # [2] barriers: GROUP chunks are written; others where nothing is announced
    told: object  # [2]: their flag is raised


@gluon.jit
def make_leaving(dtype: gl.constexpr, announced: gl.constexpr, W: gl.constexpr):
    tiles: gl.constexpr = 128 // W.rows
    dh = gl.allocate_shared_memory(dtype, [tiles, W.rows, W.K], tile_layout(16))
    dv = gl.allocate_shared_memory(dtype, [tiles, 32, W.rows], tile_layout(16))
    full = gl.allocate_shared_memory(gl.int64, [tiles, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [tiles, 1], mbarrier.MBarrierLayout())
    there = full
    told = free
    for i in gl.static_range(tiles):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    if announced:
        there = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(there.index(i), count=1)
            mbarrier.init(told.index(i), count=1)
    return Leaving(dh, dv, full, free, there, told)


@gluon.jit
def load_first_role(ring, maps, place, HV, W: gl.constexpr):
    """Request what a chunk's first products read"""
    shared: gl.constexpr = maps.Aqk.block_type.nbytes + maps.kg.block_type.nbytes + maps.decay.block_type.nbytes
    bytes: gl.constexpr = shared + maps.x.block_type.nbytes
    for n in range(place.count):
        at = n % W.slots
        c = place.count - 1 - n
        entry = (place.chunk + c) * HV + place.head
        landed = ring.landed.index(at)
        mbarrier.wait(ring.free.index(at), ((n // W.slots) & 1) ^ 1)
        mbarrier.expect(landed, bytes)
        tma.async_copy_global_to_shared(maps.x, [place.first + 32 * c, place.head * W.V + place.row0], landed, ring.x.index(at))
        tma.async_copy_global_to_shared(maps.Aqk, [entry * 32, 0], landed, ring.Aqk.index(at))
        tma.async_copy_global_to_shared(maps.kg, [entry * 32, 0], landed, ring.kg.index(at))
        tma.async_copy_global_to_shared(maps.decay, [entry * 8, 0], landed, ring.decay.index(at))


@gluon.jit
def load_rest_role(ring, maps, place, HV, W: gl.constexpr):
    """Request what its other products read"""
    bytes: gl.constexpr = maps.qg.block_type.nbytes + maps.w.block_type.nbytes + maps.T.block_type.nbytes
    for n in range(place.count):
        at = n % W.slots
        entry = (place.chunk + place.count - 1 - n) * HV + place.head
        landed = ring.landed.index(at)
        mbarrier.wait(ring.free.index(at), ((n // W.slots) & 1) ^ 1)
        mbarrier.expect(landed, bytes)
        tma.async_copy_global_to_shared(maps.qg, [entry * 32, 0], landed, ring.qg.index(at))
        tma.async_copy_global_to_shared(maps.w, [entry * 32, 0], landed, ring.w.index(at))
        tma.async_copy_global_to_shared(maps.T, [entry * 64, 0], landed, ring.T.index(at))


@gluon.jit
def store_role(ring, leaving, dh_ptr, dv_ptr, flags_ptr, place, HV, W: gl.constexpr):
    """Write dh of the chunk met as number n and dv of the one before, by plain stores: the copy engine is busy with what is read"""
    K: gl.constexpr = W.K
    R: gl.constexpr = W.rows
    tiles: gl.constexpr = 128 // R
    L: gl.constexpr = rows_layout(K)
    LV: gl.constexpr = rows_layout(R)
    states = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None] * K + gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
    token = gl.arange(0, 32, layout=gl.SliceLayout(1, LV))[:, None]
    values = token * (HV * W.V) + gl.arange(0, R, layout=gl.SliceLayout(0, LV))[None, :]
    dv_ptr += (place.first.to(gl.int64) * HV + place.head) * W.V + place.row0
    dh_ptr += ((place.chunk.to(gl.int64) * HV + place.head) * W.V + place.row0) * K
    for n in range(place.count + 1):
        b = n % tiles
        mbarrier.wait(leaving.full.index(b), n // tiles & 1)
        if n > 0:
            mbarrier.arrive(ring.free.index((n - 1) % W.slots), count=1)  # what has stored dv has read the slot
        c = place.count - 1 - n
        at = dh_ptr + c.to(gl.int64) * HV * (W.V * K) + states
        dh = leaving.dh.index(b).slice(0, 64, dim=0).load(L)
        dv = leaving.dv.index(b).load(LV)
        if R > 64:
            if n < place.count:
                gl.store(at, dh)
            dh = leaving.dh.index(b).slice(64, 64, dim=0).load(L)
            at += 64 * K
        mbarrier.arrive(leaving.free.index(b), count=1)
        if n < place.count:
            gl.store(at, dh)
        if n > 0:
            left = place.length - 32 * (c + 1)
            gl.store(dv_ptr + (c + 1).to(gl.int64) * HV * (32 * W.V) + values, dv, mask=(token < left) & (values >= 0))
        if flags_ptr is not None:
            if (n > 0) & ((n % GROUP == 0) | (n == place.count)):
                g = (n - 1) // GROUP
                mbarrier.wait(leaving.told.index(g % 2), (g // 2 & 1) ^ 1)
                mbarrier.arrive(leaving.there.index(g % 2), count=1)


@gluon.jit
def announce_role(leaving, flags_ptr, place):
    """Raise the flags. A release takes longer than a chunk: time that the storing role does not have"""
    if flags_ptr is not None:
        for g in range((place.count + GROUP - 1) // GROUP):
            mbarrier.wait(leaving.there.index(g % 2), g // 2 & 1)
            raise_flag(flags_ptr + g)
            mbarrier.arrive(leaving.told.index(g % 2), count=1)


@gluon.jit
def line(ring, at, K: gl.constexpr):
    """A chunk's decay [1, K]"""
    return ring.decay.index(at)._reinterpret(gl.float32, [1, K], decay_layout(K))


@gluon.jit
def start_scores(ring, at):
    """do^T Aqk [rows, 32], begun"""
    R: gl.constexpr = ring.x.shape[2]
    zero = gl.zeros([R, 32], gl.float32, group_layout(32, gl.num_warps()))
    return warpgroup_mma(ring.x.index(at).permute((1, 0)), ring.Aqk.index(at), zero, use_acc=False, is_async=True)


@gluon.jit
def reverse_role(ring, leaving, given_ptr, first_ptr, place, HV, W: gl.constexpr):
    K: gl.constexpr = W.K
    R: gl.constexpr = W.rows
    tiles: gl.constexpr = 128 // R
    L: gl.constexpr = group_layout(K, gl.num_warps())
    L32: gl.constexpr = group_layout(32, gl.num_warps())
    zero = gl.zeros([R, 32], gl.float32, L32)
    dS = first_state(given_ptr, place, HV, W)
    if place.count > 0:
        at = land(ring, place.count - 1, 0, place, W)
        X = warpgroup_mma_wait(0, deps=(start_scores(ring, at),))
        dv = zero.to(ring.kg.dtype)
        dSb = to_bf16(dS)
        line(ring, W.slots, K).store(gl.full([1, K], 1.0, gl.float32, L))  # before the first chunk nothing decays
        dS = dS * line(ring, at, K).load(L)
        for n in range(place.count):
            b = n % tiles
            left = gl.convert_layout(dSb, gl.DotOperandLayout(0, L32, 2))
            X = warpgroup_mma(left, ring.kg.index(at).permute((1, 0)), X, is_async=True)
            dS = warpgroup_mma(ring.x.index(at).permute((1, 0)), ring.qg.index(at), dS, is_async=True)
            mbarrier.wait(leaving.free.index(b), (n // tiles & 1) ^ 1)
            leaving.dh.index(b).store(dSb)
            leaving.dv.index(b).permute((1, 0)).store(dv)
            mbarrier.arrive(leaving.full.index(b), count=1)
            X = warpgroup_mma_wait(1, deps=(X,))
            dr = to_bf16(X)
            dS = warpgroup_mma(gl.convert_layout(dr, gl.DotOperandLayout(0, L, 2)), ring.w.index(at), dS, is_async=True)
            left = gl.convert_layout(dr, gl.DotOperandLayout(0, L32, 2))
            T = ring.T.index(at)
            D = warpgroup_mma(left, T.slice(0, 32, dim=0), zero, use_acc=False, is_async=True)
            D = warpgroup_mma(left, T.slice(32, 32, dim=0), D, is_async=True)
            following = gl.minimum(n + 1, place.count - 1)
            after = following % W.slots
            mbarrier.wait(ring.landed.index(after), (following // W.slots) & 1)
            X = start_scores(ring, after)
            decay = line(ring, gl.where(n + 1 < place.count, after, W.slots), K).load(L)
            dS = warpgroup_mma_wait(3, deps=(dS,))
            dSb = to_bf16(dS)
            dS = dS * decay
            D, X = warpgroup_mma_wait(0, deps=(D, X))
            dv = to_bf16(D)
            at = after
        b = place.count % tiles
        mbarrier.wait(leaving.free.index(b), (place.count // tiles & 1) ^ 1)
        leaving.dv.index(b).permute((1, 0)).store(dv)
        mbarrier.arrive(leaving.full.index(b), count=1)
    last_state(first_ptr, dS, place, HV, W)


@gluon.jit(do_not_specialize=["HV", "groups"])
def reverse_walk_kernel(
    w_desc, kg_desc, qg_desc, T_desc, Aqk_desc, decay_desc, do_desc,  # as Maps
    dh_ptr,  # [NC, HV, V, K]
    dv_ptr,  # [R, HV, V]
    dS_final_ptr, dS0_ptr,  # [N, HV, K, V] or [N, HV, V, K], or None
    flags_ptr,  # [N, HV, V / rows, groups] int32, or None
    sequences_ptr,  # [N, 4] int32
    HV, groups, W: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    maps = Maps(w_desc, kg_desc, qg_desc, T_desc, Aqk_desc, decay_desc, do_desc)
    place = locate(sequences_ptr, W.rows)
    if flags_ptr is not None:
        flags_ptr += ((place.sequence * HV + place.head) * gl.num_programs(0) + gl.program_id(0)) * groups
        clear_flags(flags_ptr, groups)
    ring = make_ring(maps, W)
    leaving = make_leaving(w_desc.dtype, flags_ptr is not None, W)
    gl.warp_specialize(
        [
            (reverse_role, (ring, leaving, dS_final_ptr, dS0_ptr, place, HV, W)),
            (store_role, (ring, leaving, dh_ptr, dv_ptr, flags_ptr, place, HV, W)),
            (load_first_role, (ring, maps, place, HV, W)),
            (load_rest_role, (ring, maps, place, HV, W)),
            (announce_role, (leaving, flags_ptr, place)),
        ],
        [4, 1, 1, 1],
        [STORE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )


def reverse_launch(
    p: Problem, NC: int, stride: int, dtypes: tuple[torch.dtype | None, torch.dtype | None], groups: int
) -> Launch:  # fmt: skip
    """stride: elements between rows of do; dtypes of the final state's gradient and of the initial one's, None: absent;
    groups: flags of a block, 0: none"""
    V, HV = p.V, p.HV
    rows = walk_rows(p) if groups else 64  # by itself the walk is fastest in many blocks
    given, first = (None if dtype is None else Pointer(x, dtype) for x, dtype in zip((GIVEN, FINAL), dtypes))
    raised = Pointer(FLAGS, torch.int32) if groups else None
    args = (
        *tiles_of(p, NC, stride, True, rows), Pointer(STATE, p.dtype), Pointer(TOKENS, p.dtype), given, first, raised,
        Pointer(SEQUENCES, torch.int32), HV, groups,
    )  # fmt: skip
    slots = 4 if rows > 64 else 5  # what fits
    walk = Walk(p.K, V, slots, p.state_v_first, False, rows, reverse=True)
    return Launch(full_name(reverse_walk_kernel), (V // rows, HV, p.N), args, (walk,), rows // 16, registers=REGISTERS)


def reverse_walk(
    problem: Problem, plan: Plan, p: Prepared, do: torch.Tensor, dfinal_state: torch.Tensor | None, dv: torch.Tensor,
    dS0: torch.Tensor | None, flags: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """dh [NC, HV, V, K], the gradients of the chunks' exit states.

    Args: do [B, T, HV, V]; dfinal_state (problem.state_shape), None for zero; dv [B, T, HV, V], contiguous: filled with the gradient of v;
    dS0 (problem.state_shape) or None: filled with the initial state's; flags (backward_follow.state_flags): raised as dh and
    dv are there, for a launch beside this one."""
    HV, K, V, NC = problem.HV, problem.K, problem.V, plan.num_chunks
    dh = torch.empty(NC, HV, V, K, dtype=p.w.dtype, device=do.device)
    do, stride = packed_rows(do)
    given = None if dfinal_state is None else dense(dfinal_state)
    key = (problem, NC, stride, tuple(None if x is None else x.dtype for x in (given, dS0)), 0 if flags is None else flags.shape[-1])
    operands = (p.w, p.kg, p.qg, p.T, p.Aqk, p.decay, do, dh, None, dv, given, dS0, plan.sequences, flags)
    start(reverse_launch, key, operands, do.device)
    return dh
