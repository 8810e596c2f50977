"""The reverse walk: gradients of the states, from the last chunk (docs/backward.md, (1), (2), (4)); ring, tiles, places: backward_walk.py.

    X  = do Aqk + dSb kg^T        dSb = dS in bf16, which is dh           dr = X in bf16
    dS = dS Diag(decay) + do qg + dr w        dv = dr T, T in two parts

with do, X, dr, dv transposed, [64 rows of V, 32 tokens], and dS [64, K].

Grid (V / 64, head, sequence). 4 warps walk: only dSb kg^T, its rounding and dr w follow from one another; do qg runs behind the first, dv
and the next chunk's do Aqk behind the second, everything else is done while a product runs. One warp requests tiles; one stores dh and dv
from shared memory and says when they are there (backward_follow.py): the walk waits for no store."""

from __future__ import annotations

from typing import NamedTuple

import torch

from openkda.hopper.backward_follow import GROUP, clear_flags, raise_flag, stores_complete
from openkda.hopper.backward_prepare import Prepared
from openkda.hopper.backward_tiles import of_tokens, to_bf16
from openkda.hopper.backward_walk import (
    FINAL,
    FLAGS,
    GIVEN,
    REQUEST_REGISTERS,
    ROWS,
    SEQUENCES,
    STATE,
    TOKENS,
    WARPS,
    Maps,
    Walk,
    decay_layout,
    first_state,
    land,
    last_state,
    load_role,
    locate,
    make_ring,
    tiles_of,
)
from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.launch import dense, packed_rows
from openkda.hopper.runtime import Launch, Matrix, Pointer, full_name, start
from openkda.hopper.tiles import group_layout, tile_layout
from openkda.plan import Plan
from openkda.problem import Problem

REGISTERS = 144  # a thread at launch


class Leaving(NamedTuple):
    """What is on its way to memory, two tiles of each"""

    dh_desc: object  # [NC*HV*V, K], boxes [64, K]
    dv_desc: object  # [R, HV*V], boxes [32, 64]
    dh: object  # shared [2, 64, K]
    dv: object  # shared [2, 32, 64], of the chunk met before
    full: object  # [2] barriers
    free: object  # [2]


@gluon.jit
def make_leaving(dh_desc, dv_desc, W: gl.constexpr):
    dh = gl.allocate_shared_memory(dh_desc.dtype, [2, 64, W.K], tile_layout(16))
    dv = gl.allocate_shared_memory(dv_desc.dtype, [2, 32, 64], tile_layout(16))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    return Leaving(dh_desc, dv_desc, dh, dv, full, free)


@gluon.jit
def store_role(ring, leaving, flags_ptr, place, HV, W: gl.constexpr):
    """Send dh of the chunk met as number n and dv of the one before; raise a flag two steps after the last of its GROUP chunks"""
    column = place.head * W.V + place.row0
    for n in range(place.count + 1):
        b = n % 2
        mbarrier.wait(leaving.full.index(b), n // 2 & 1)
        if n > 0:
            mbarrier.arrive(ring.free.index((n - 1) % W.slots), count=1)  # what has stored dv has read the slot
        c = place.count - 1 - n
        if n < place.count:
            row = ((place.chunk + c) * HV + place.head) * W.V + place.row0
            tma.async_copy_shared_to_global(leaving.dh_desc, [row, 0], leaving.dh.index(b))
        if (n > 1) | ((n == 1) & (place.length % 32 == 0)):
            tma.async_copy_shared_to_global(leaving.dv_desc, [place.first + 32 * (c + 1), column], leaving.dv.index(b))
        tma.store_wait(0)
        mbarrier.arrive(leaving.free.index(b), count=1)
        if flags_ptr is not None:
            if (n > GROUP) & (n % GROUP == 2):
                stores_complete(4)
                raise_flag(flags_ptr + n // GROUP - 1)
    stores_complete(0)
    if flags_ptr is not None:
        for g in range(gl.maximum((place.count - 2) // GROUP, 0), (place.count + GROUP - 1) // GROUP):
            raise_flag(flags_ptr + g)


@gluon.jit
def start_scores(ring, at):
    """do^T Aqk [64, 32], begun"""
    zero = gl.zeros([64, 32], gl.float32, group_layout(32, gl.num_warps()))
    return warpgroup_mma(ring.x.index(at).permute((1, 0)), ring.Aqk.index(at), zero, use_acc=False, is_async=True)


@gluon.jit
def store_live(ptr, dv, place, HV, W: gl.constexpr):
    """dv of the last chunk, of which the sequence has some rows"""
    L: gl.constexpr = dv.type.layout
    token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :]
    v = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    c = place.count - 1
    at = ((place.first + 32 * c).to(gl.int64) * HV + place.head) * W.V + place.row0
    gl.store(ptr + at + token * (HV * W.V) + v, dv, mask=(token < place.length - 32 * c) & (v >= 0))


@gluon.jit
def reverse_role(ring, leaving, given_ptr, first_ptr, dv_ptr, place, HV, W: gl.constexpr):
    K: gl.constexpr = W.K
    L: gl.constexpr = group_layout(K, gl.num_warps())
    L32: gl.constexpr = group_layout(32, gl.num_warps())
    zero = gl.zeros([64, 32], gl.float32, L32)
    dS = first_state(given_ptr, place, HV, W)
    if place.count > 0:
        at = land(ring, place.count - 1, 0, place, W)
        dv = zero.to(ring.kg.dtype)
        X = warpgroup_mma_wait(0, deps=(start_scores(ring, at),))
        for n in range(place.count):
            b = n % 2
            dSb = to_bf16(dS)
            left = gl.convert_layout(dSb, gl.DotOperandLayout(0, L32, 2))
            X = warpgroup_mma(left, ring.kg.index(at).permute((1, 0)), X, is_async=True)
            decay = ring.decay.index(at)._reinterpret(gl.float32, [1, K], decay_layout(K)).load(L)
            dS = dS * decay
            dS = warpgroup_mma(ring.x.index(at).permute((1, 0)), ring.qg.index(at), dS, is_async=True)
            mbarrier.wait(leaving.free.index(b), (n // 2 & 1) ^ 1)
            leaving.dh.index(b).store(dSb)
            leaving.dv.index(b).permute((1, 0)).store(dv)
            if (n == 1) & (place.length % 32 > 0):
                store_live(dv_ptr, dv, place, HV, W)
            fence_async_shared()
            mbarrier.arrive(leaving.full.index(b), count=1)
            following = gl.minimum(n + 1, place.count - 1)
            after = following % W.slots
            mbarrier.wait(ring.landed.index(after), (following // W.slots) & 1)
            X = warpgroup_mma_wait(1, deps=(X,))
            dr = to_bf16(X)
            dS = warpgroup_mma(gl.convert_layout(dr, gl.DotOperandLayout(0, L, 2)), ring.w.index(at), dS, is_async=True)
            left = gl.convert_layout(dr, gl.DotOperandLayout(0, L32, 2))
            T = ring.T.index(at)
            dv = warpgroup_mma(left, T.slice(0, 32, dim=0), zero, use_acc=False, is_async=True)
            dv = warpgroup_mma(left, T.slice(32, 32, dim=0), dv, is_async=True)
            X = start_scores(ring, after)
            dS, dv, X = warpgroup_mma_wait(0, deps=(dS, dv, X))
            dv = to_bf16(dv)
            at = after
        b = place.count % 2
        mbarrier.wait(leaving.free.index(b), (place.count // 2 & 1) ^ 1)
        leaving.dv.index(b).permute((1, 0)).store(dv)
        if (place.count == 1) & (place.length % 32 > 0):
            store_live(dv_ptr, dv, place, HV, W)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(leaving.full.index(b), count=1)
    last_state(first_ptr, dS, place, HV, W)


@gluon.jit(do_not_specialize=["HV", "groups"])
def reverse_walk_kernel(
    w_desc, kg_desc, qg_desc, T_desc, Aqk_desc, decay_desc, do_desc,  # as Maps
    dh_desc, dv_desc,  # as Leaving
    dv_ptr,  # the same memory
    dS_final_ptr, dS0_ptr,  # [N, HV, K, V] or [N, HV, V, K], or None
    flags_ptr,  # [N, HV, V / 64, groups] int32, or None
    sequences_ptr,  # [N, 4] int32
    HV, groups, W: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    maps = Maps(w_desc, kg_desc, qg_desc, T_desc, Aqk_desc, decay_desc, do_desc)
    place = locate(sequences_ptr)
    if flags_ptr is not None:
        flags_ptr += ((place.sequence * HV + place.head) * gl.num_programs(0) + gl.program_id(0)) * groups
        clear_flags(flags_ptr, groups)
    ring = make_ring(maps, W)
    leaving = make_leaving(dh_desc, dv_desc, W)
    gl.warp_specialize(
        [
            (reverse_role, (ring, leaving, dS_final_ptr, dS0_ptr, dv_ptr, place, HV, W)),
            (load_role, (ring, maps, place, None, HV, W)),
            (store_role, (ring, leaving, flags_ptr, place, HV, W)),
        ],
        [1, 1],
        [REQUEST_REGISTERS, REQUEST_REGISTERS],
    )


def reverse_launch(
    p: Problem, NC: int, stride: int, dtypes: tuple[torch.dtype | None, torch.dtype | None], groups: int, slots: int
) -> Launch:  # fmt: skip
    """stride: elements between rows of do; dtypes of the final state's gradient and of the initial one's, None: absent;
    groups: flags of a block, 0: none"""
    V, HV = p.V, p.HV
    dh = Matrix(STATE, p.dtype, NC * HV * V, p.K, p.K, ROWS, p.K)
    dv = (of_tokens(TOKENS, p.dtype, p, HV * V, ROWS), Pointer(TOKENS, p.dtype))
    given, first = (None if dtype is None else Pointer(x, dtype) for x, dtype in zip((GIVEN, FINAL), dtypes))
    raised = Pointer(FLAGS, torch.int32) if groups else None
    args = (
        *tiles_of(p, NC, stride, True), dh, *dv, given, first, raised, Pointer(SEQUENCES, torch.int32), HV, groups,
    )  # fmt: skip
    walk = Walk(p.K, V, slots, p.state_v_first, False, reverse=True)
    return Launch(full_name(reverse_walk_kernel), (V // ROWS, HV, p.N), args, (walk,), WARPS, registers=REGISTERS)


def reverse_walk(
    problem: Problem, plan: Plan, p: Prepared, do: torch.Tensor, dfinal_state: torch.Tensor | None, dv: torch.Tensor,
    dS0: torch.Tensor | None, flags: torch.Tensor | None = None, slots: int = 4,
) -> torch.Tensor:  # fmt: skip
    """dh [NC, HV, V, K], the gradients of the chunks' exit states.

    Args: do [B, T, HV, V]; dfinal_state (problem.state_shape), None for zero; dv [B, T, HV, V], contiguous: filled with the gradient of v;
    dS0 (problem.state_shape) or None: filled with the initial state's; flags (backward_follow.state_flags): raised as dh and
    dv are there, for a launch beside this one."""
    HV, K, V, NC = problem.HV, problem.K, problem.V, plan.num_chunks
    dh = torch.empty(NC, HV, V, K, dtype=p.w.dtype, device=do.device)
    do, stride = packed_rows(do)
    given = None if dfinal_state is None else dense(dfinal_state)
    key = (problem, NC, stride, tuple(None if x is None else x.dtype for x in (given, dS0)), 0 if flags is None else flags.shape[-1], slots)
    operands = (p.w, p.kg, p.qg, p.T, p.Aqk, p.decay, do, dh, None, dv, given, dS0, plan.sequences, flags)
    start(reverse_launch, key, operands, do.device)
    return dh
