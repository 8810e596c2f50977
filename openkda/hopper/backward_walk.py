"""The walks: the scans over chunks of a sequence in Gluon (docs/backward.md), each beside the kernel that makes or takes its tiles.

    forward, from the first chunk      r = v T^T + S w^T      S = S Diag(decay) + r kg      o = S qg^T + r Aqk^T

States are transposed, [64 rows of V, K] fp32 in accumulators, v, r, o [64 rows of V, 32 tokens]: an accumulator becomes the next product's
left operand in its registers. w is negative, T comes in two parts, tiles hold all scales (backward_prepare.py). S as operand is rounded to
bf16: those are the entry states h.

Grid (V / 64, head, sequence). 4 warps walk; another requests the tiles of a chunk, a slot of the ring, as soon as the slot is free.
v T^T of the next chunk follows the update of S in the matrix unit's queue, so that two products a chunk are all that waits for another.
Four warps write h, r and o from shared memory by plain stores: the copy engine is busy with what is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from openkda.hopper.backward_follow import LINE, await_first, clear_flags, say_progress
from openkda.hopper.backward_prepare import C, Prepared
from openkda.hopper.backward_tiles import clear_rows, of_chunks, of_tokens, to_bf16
from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.launch import dense, packed_rows
from openkda.hopper.runtime import Launch, Matrix, Pointer, full_name, start
from openkda.hopper.tiles import group_layout, row_bases, tile_layout
from openkda.plan import Plan
from openkda.problem import Inputs, Problem

ROWS = 64  # of V per block: one warpgroup's product
WARPS = 4
REGISTERS = 112  # a thread at launch; the walk takes what the other roles, of 4 warps each to the hardware, leave
STORE_REGISTERS = gl.constexpr(96)
REQUEST_REGISTERS = gl.constexpr(40)


@dataclass(frozen=True)
class Walk:
    """What a walk is compiled for"""

    K: int
    V: int
    slots: int  # chunks in the ring
    v_first: bool  # given and final states are [V, K]
    outputs: bool  # the forward walk writes o
    rows: int = 64  # of V a block
    reverse: bool = False  # from the last chunk
    every: int = 1  # the forward walk writes h of the first of so many chunks


class Maps(NamedTuple):
    """Tensor maps of a chunk's tiles; those that the walk does not read are None"""

    w: object  # [NC*HV*32, K], boxes [32, K]
    kg: object
    qg: object
    T: object  # [NC*HV*64, 32], boxes [64, 32]: both parts
    Aqk: object  # [NC*HV*32, 32], boxes [32, 32]
    decay: object  # [NC*HV*8, K/8] fp32, boxes [8, K/8]
    x: object  # v or do, [R, HV*V], boxes [32, rows]


class Ring(NamedTuple):
    """Shared memory: the tiles of so many chunks as `slots` says; of qg and Aqk where they are read"""

    w: object  # [slots, 32, K]
    kg: object
    qg: object
    T: object  # [slots, 64, 32]
    Aqk: object  # [slots, 32, 32]
    decay: object  # [slots, 8, K/8] fp32; the reverse walk's has one more
    x: object  # [slots, 32, rows]
    landed: object  # barriers
    free: object


class Place(NamedTuple):
    """What a block walks"""

    sequence: object
    first: object  # row of its first token
    length: object  # tokens
    chunk: object  # its first
    count: object  # chunks
    head: object
    row0: object  # first row of V


class Leaving(NamedTuple):
    """What is handed to those who write it, two tiles of each: h of a chunk, r and o of the one before"""

    h: object  # shared [2 / every, 64, K]
    r: object  # shared [2, 64, 32]
    o: object  # shared [2, 32, 64], where it is written
    full: object  # [2] barriers
    free: object


@gluon.constexpr_function
def decay_layout(K):
    """[1, K] view of a slot [8, K / 8] fp32"""
    width = K // 8
    return gl.SharedLinearLayout([[0, r * width + c] for r, c in row_bases(8, width, 32, 4 * width)], [], 256)


@gluon.jit
def locate(sequences_ptr, rows: gl.constexpr):
    row = sequences_ptr + gl.program_id(2) * 4
    first = gl.load(row)
    length = gl.load(row + 1) - first
    return Place(gl.program_id(2), first, length, gl.load(row + 2), (length + 31) // 32, gl.program_id(1), gl.program_id(0) * rows)


@gluon.constexpr_function
def row_tiles(width, bits):
    return tile_layout(bits, min(128, width * bits // 8))


@gluon.jit
def make_slots(desc, height: gl.constexpr, width: gl.constexpr, W: gl.constexpr):
    bits: gl.constexpr = desc.dtype.primitive_bitwidth
    return gl.allocate_shared_memory(desc.dtype, [W.slots, height, width], row_tiles(width, bits))


@gluon.jit
def make_ring(maps, W: gl.constexpr):
    K: gl.constexpr = W.K
    slots: gl.constexpr = W.slots
    landed = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(slots):
        mbarrier.init(landed.index(s), count=2 if W.reverse else 1)
        mbarrier.init(free.index(s), count=1)
    w = make_slots(maps.w, 32, K, W)
    T = make_slots(maps.T, 64, 32, W)
    qg = make_slots(maps.qg, 32, K, W) if maps.qg is not None else w
    Aqk = make_slots(maps.Aqk, 32, 32, W) if maps.Aqk is not None else T
    decay = gl.allocate_shared_memory(gl.float32, [slots + W.reverse, 8, K // 8], row_tiles(K // 8, 32))
    return Ring(w, make_slots(maps.kg, 32, K, W), qg, T, Aqk, decay, make_slots(maps.x, 32, W.rows, W), landed, free)


@gluon.jit
def await_run(ptr, count):
    """Wait until the first of `count` flags is raised; how many of the first 32 are, without a gap. One warp."""
    code: gl.constexpr = """{ .reg .pred p, q; .reg .b32 x, m;
        AGAIN: ld.acquire.gpu.global.b32 x, [$1]; setp.ne.s32 p, x, 0; vote.sync.ballot.b32 m, p, 0xffffffff; and.b32 x, m, 1;
        setp.eq.s32 q, x, 0; @q nanosleep.u32 100; @q bra AGAIN;
        fence.proxy.async; not.b32 m, m; brev.b32 m, m; clz.b32 m, m; min.s32 $0, m, $2; }"""
    t = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    run = gl.inline_asm_elementwise(code, "=r,l,r", [ptr + gl.minimum(t, count - 1), t * 0 + count], dtype=gl.int32, is_pure=False, pack=1)
    return gl.max(run, 0)


@gluon.constexpr_function
def slot_bytes(W):
    """Of a chunk's tiles"""
    wide, square = (3, 3) if W.outputs or W.reverse else (2, 2)
    return wide * 64 * W.K + square * 2048 + 4 * W.K + 4096


@gluon.jit
def load_role(ring, maps, place, flags_ptr, progress_ptr, HV, W: gl.constexpr):
    """Request the tiles of all chunks, in the order of the walk"""
    ready = 0
    for c in range(place.count):
        at = c % W.slots
        if flags_ptr is not None:
            if c == ready:
                ready += await_run(flags_ptr + c, place.count - c)
            say_progress(progress_ptr, c)
        mbarrier.wait(ring.free.index(at), ((c // W.slots) & 1) ^ 1)
        i = place.count - 1 - c if W.reverse else c
        entry = (place.chunk + i) * HV + place.head
        landed = ring.landed.index(at)
        mbarrier.expect(landed, slot_bytes(W))
        tma.async_copy_global_to_shared(maps.x, [place.first + 32 * i, place.head * W.V + place.row0], landed, ring.x.index(at))
        request(maps.T, ring.T, entry * 64, landed, at)
        request(maps.w, ring.w, entry * 32, landed, at)
        request(maps.decay, ring.decay, entry * 8, landed, at)
        request(maps.kg, ring.kg, entry * 32, landed, at)
        request(maps.qg, ring.qg, entry * 32, landed, at)
        request(maps.Aqk, ring.Aqk, entry * 32, landed, at)


@gluon.jit
def request(desc, slots, row, landed, at):
    """A tile on its way to slot `at`, if there is one"""
    if desc is not None:
        tma.async_copy_global_to_shared(desc, [row, 0], landed, slots.index(at))


@gluon.jit
def state_offsets(place, HV, L: gl.constexpr, W: gl.constexpr):
    """Element offsets [rows, K] into a given or final state"""
    K: gl.constexpr = W.K
    R: gl.constexpr = W.rows
    v = place.row0 + gl.arange(0, R, layout=gl.SliceLayout(1, L))[:, None]
    k = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
    base = (place.sequence.to(gl.int64) * HV + place.head) * (W.K * W.V)
    if W.v_first:
        return base + v * W.K + k
    else:
        return base + k * W.V + v


@gluon.jit
def first_state(ptr, place, HV, W: gl.constexpr):
    K: gl.constexpr = W.K
    L: gl.constexpr = group_layout(K, gl.num_warps())
    R: gl.constexpr = W.rows
    S = gl.zeros([R, K], gl.float32, L)
    if ptr is not None:
        S = gl.load(ptr + state_offsets(place, HV, L, W)).to(gl.float32)
    return S


@gluon.jit
def last_state(ptr, S, place, HV, W: gl.constexpr):
    if ptr is not None:
        L: gl.constexpr = S.type.layout
        gl.store(ptr + state_offsets(place, HV, L, W), S.to(ptr.dtype.element_ty))


@gluon.jit
def land(ring, i, c, place, W: gl.constexpr):
    """The slot of chunk i, number c of the walk, when its tiles are there; rows past the sequence's end, another's, are zero"""
    at = c % W.slots
    mbarrier.wait(ring.landed.index(at), (c // W.slots) & 1)
    length = place.length - 32 * i
    if length < 32:
        clear_rows(ring.x.index(at), length, 0.0)
        fence_async_shared()
        gl.thread_barrier()
    return at


@gluon.jit
def start_values(ring, at):
    """v^T T^T [64, 32], begun"""
    L: gl.constexpr = group_layout(32, gl.num_warps())
    zero = gl.zeros([64, 32], gl.float32, L)
    v = ring.x.index(at).permute((1, 0))
    T = ring.T.index(at)
    X = warpgroup_mma(v, T.slice(0, 32, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(v, T.slice(32, 32, dim=0).permute((1, 0)), X, is_async=True)


@gluon.jit
def make_leaving(dtype: gl.constexpr, W: gl.constexpr):
    K: gl.constexpr = W.K
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(2):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(free.index(b), count=1)
    h = gl.allocate_shared_memory(dtype, [2 // W.every, 64, K], tile_layout(16))
    r = gl.allocate_shared_memory(dtype, [2, 64, 32], tile_layout(16, 64))
    o = gl.allocate_shared_memory(dtype, [2, 32, 64], tile_layout(16)) if W.outputs else r
    return Leaving(h, r, o, full, free)


@gluon.jit
def leave(ring, leaving, Sb, r, o, c, W: gl.constexpr):
    """Hand h of chunk c, r and o of the one before to those who write them; the slot of the one before is free"""
    b = c % 2
    mbarrier.wait(leaving.free.index(b), ((c // 2) & 1) ^ 1)
    if c % W.every == 0:
        leaving.h.index(b).store(Sb)
    leaving.r.index(b).store(r)
    if W.outputs:
        leaving.o.index(b).permute((1, 0)).store(o)
    gl.thread_barrier()
    mbarrier.arrive(leaving.full.index(b), count=1)
    mbarrier.arrive(ring.free.index((c + W.slots - 1) % W.slots), count=1, pred=c > 0)


@gluon.constexpr_function
def rows_layout(width):
    """[rows, width] bf16, 16 bytes a thread, whole rows side by side; 4 warps"""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.jit
def store_role(leaving, h_ptr, r_ptr, o_ptr, place, HV, W: gl.constexpr):
    """Write h of the chunk met as number n, r and o of the one before"""
    K: gl.constexpr = W.K
    LH: gl.constexpr = rows_layout(K)
    LR: gl.constexpr = rows_layout(32)
    LO: gl.constexpr = rows_layout(64)
    at_h = gl.arange(0, 64, layout=gl.SliceLayout(1, LH))[:, None] * K + gl.arange(0, K, layout=gl.SliceLayout(0, LH))[None, :]
    at_r = gl.arange(0, 64, layout=gl.SliceLayout(1, LR))[:, None] * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, LR))[None, :]
    token = gl.arange(0, 32, layout=gl.SliceLayout(1, LO))[:, None]
    at_o = token * (HV * W.V) + gl.arange(0, 64, layout=gl.SliceLayout(0, LO))[None, :]
    row = (place.chunk.to(gl.int64) * HV + place.head) * W.V + place.row0
    entry = place.sequence * ((place.count + 1) // 2) if W.every == 2 else place.chunk
    h_ptr += ((entry.to(gl.int64) * HV + place.head) * W.V + place.row0) * K
    r_ptr += (row - HV * W.V) * 32
    if W.outputs:
        o_ptr += ((place.first - 32).to(gl.int64) * HV + place.head) * W.V + place.row0
    for n in range(place.count + gl.minimum(place.count, 1)):
        b = n % 2
        mbarrier.wait(leaving.full.index(b), (n // 2) & 1)
        r = leaving.r.index(b).load(LR)
        if W.outputs:
            o = leaving.o.index(b).load(LO)
        if n % W.every == 0:
            h = leaving.h.index(b).load(LH)
            gl.store(h_ptr + at_h, h, mask=(n < place.count) & (at_h >= 0))
            h_ptr += HV * W.V * K
        gl.thread_barrier()
        mbarrier.arrive(leaving.free.index(b), count=1)
        gl.store(r_ptr + at_r, r, mask=(n > 0) & (at_r >= 0))
        if W.outputs:
            gl.store(o_ptr + at_o, o, mask=(n > 0) & (token < place.length + 32 - 32 * n) & (at_o >= 0))
            o_ptr += 32 * HV * W.V
        r_ptr += HV * W.V * 32


@gluon.jit
def forward_role(ring, leaving, S0_ptr, final_ptr, place, HV, W: gl.constexpr):
    K: gl.constexpr = W.K
    L: gl.constexpr = group_layout(K, gl.num_warps())
    L32: gl.constexpr = group_layout(32, gl.num_warps())
    zero = gl.zeros([64, 32], gl.float32, L32)
    S = first_state(S0_ptr, place, HV, W)
    if place.count > 0:
        r = zero.to(leaving.h.dtype)
        o = r
        at = land(ring, 0, 0, place, W)
        X = warpgroup_mma_wait(0, deps=(start_values(ring, at),))
        for c in range(place.count):
            Sb = to_bf16(S)
            left = gl.convert_layout(Sb, gl.DotOperandLayout(0, L32, 2))
            X = warpgroup_mma(left, ring.w.index(at).permute((1, 0)), X, is_async=True)
            if W.outputs:
                O = warpgroup_mma(left, ring.qg.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
            decay = ring.decay.index(at)._reinterpret(gl.float32, [1, K], decay_layout(K)).load(L)
            leave(ring, leaving, Sb, r, o, c, W)
            S = S * decay
            n = gl.minimum(c + 1, place.count - 1)
            after = land(ring, n, n, place, W)
            X = warpgroup_mma_wait(1 if W.outputs else 0, deps=(X,))
            r = to_bf16(X)
            S = warpgroup_mma(gl.convert_layout(r, gl.DotOperandLayout(0, L, 2)), ring.kg.index(at), S, is_async=True)
            X = start_values(ring, after)
            if W.outputs:
                left = gl.convert_layout(r, gl.DotOperandLayout(0, L32, 2))
                O = warpgroup_mma(left, ring.Aqk.index(at).permute((1, 0)), O, is_async=True)
                S, X, O = warpgroup_mma_wait(0, deps=(S, X, O))
                o = to_bf16(O)
            else:
                S, X = warpgroup_mma_wait(0, deps=(S, X))
            at = after
        leave(ring, leaving, to_bf16(S), r, o, place.count, W)
    last_state(final_ptr, S, place, HV, W)


@gluon.jit(do_not_specialize=["HV", "NC"])
def forward_walk_kernel(
    w_desc, kg_desc, qg_desc, T_desc, Aqk_desc, decay_desc, v_desc,  # as Maps
    h_ptr, r_ptr,  # [NC, HV, V, K], [NC, HV, V, 32]
    o_ptr,  # [R, HV, V], or None
    S0_ptr, final_ptr,  # [N, HV, K, V] or [N, HV, V, K], or None
    sequences_ptr,  # [N, 4] int32
    flags_ptr,  # int32: raised when a chunk's tiles are there (backward_follow.py); None: they are
    gave_up_ptr,  # [N, HV, V / 64] int32: blocks that wait for flags write whether they gave up, others go on where one did; or None
    HV, NC, W: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    maps = Maps(w_desc, kg_desc, qg_desc, T_desc, Aqk_desc, decay_desc, v_desc)
    place = locate(sequences_ptr, 64)
    progress_ptr = sequences_ptr  # not written where there are no flags
    if flags_ptr is not None:
        progress_ptr = flags_ptr + HV * NC + (place.head * gl.num_programs(2) + place.sequence) * LINE
        gl.store(progress_ptr, 0)
        flags_ptr += place.head * NC + place.chunk
        clear_flags(flags_ptr, place.count)
    if gave_up_ptr is not None:
        gave_up_ptr += (place.sequence * HV + place.head) * gl.num_programs(0) + gl.program_id(0)
        if flags_ptr is not None:
            there = await_first(flags_ptr)
            gl.store(gave_up_ptr, 1 - there)
            if there == 0:
                gl.store(progress_ptr, place.count)
        else:
            there = gl.load(gave_up_ptr)
        if there == 0:
            return
    ring = make_ring(maps, W)
    leaving = make_leaving(w_desc.dtype, W)
    gl.warp_specialize(
        [
            (forward_role, (ring, leaving, S0_ptr, final_ptr, place, HV, W)),
            (store_role, (leaving, h_ptr, r_ptr, o_ptr, place, HV, W)),
            (load_role, (ring, maps, place, flags_ptr, progress_ptr, HV, W)),
        ],
        [4, 1],
        [STORE_REGISTERS, REQUEST_REGISTERS],
    )


W_, KG, QG, T_, AQK, DECAY, X, STATE, VALUES, TOKENS, GIVEN, FINAL, SEQUENCES, FLAGS, GAVE_UP = range(15)  # the operands


def tiles_of(p: Problem, NC: int, stride: int, all: bool, rows: int = ROWS) -> tuple[Matrix | None, ...]:
    """The tensor maps of Maps; all: qg and Aqk too. stride: elements between rows of x"""
    K, tiles = p.K, NC * p.HV
    some = lambda x: x if all else None
    return (
        of_chunks(W_, p.dtype, tiles, C, K), of_chunks(KG, p.dtype, tiles, C, K), some(of_chunks(QG, p.dtype, tiles, C, K)),
        of_chunks(T_, p.dtype, tiles, 2 * C, C), some(of_chunks(AQK, p.dtype, tiles, C, C)),
        of_chunks(DECAY, torch.float32, tiles, 8, K // 8), of_tokens(X, p.dtype, p, p.HV * p.V, rows, stride),
    )  # fmt: skip


def forward_launch(
    p: Problem, NC: int, stride: int, dtypes: tuple[torch.dtype | None, torch.dtype | None], outputs: bool, slots: int,
    follows: bool, gave_up: bool, every: int,
) -> Launch:  # fmt: skip
    """stride: elements between rows of v; dtypes of the given and of the final state, None: absent; outputs, follows, gave_up: which
    operands there are; every: chunks of an h"""
    V, HV = p.V, p.HV
    written = (Pointer(STATE, p.dtype), Pointer(VALUES, p.dtype), Pointer(TOKENS, p.dtype) if outputs else None)
    given, final = (None if dtype is None else Pointer(x, dtype) for x, dtype in zip((GIVEN, FINAL), dtypes))
    flags = Pointer(FLAGS, torch.int32) if follows else None
    args = (
        *tiles_of(p, NC, stride, outputs), *written, given, final, Pointer(SEQUENCES, torch.int32), flags,
        Pointer(GAVE_UP, torch.int32) if gave_up else None, HV, NC,
    )  # fmt: skip
    walk = Walk(p.K, V, slots, p.state_v_first, outputs, every=every)
    return Launch(full_name(forward_walk_kernel), (V // ROWS, HV, p.N), args, (walk,), WARPS, registers=REGISTERS)


def forward_walk(
    problem: Problem, plan: Plan, inputs: Inputs, p: Prepared, o: torch.Tensor | None = None, final: torch.Tensor | None = None,
    flags: torch.Tensor | None = None, gave_up: torch.Tensor | None = None, into: tuple[torch.Tensor, torch.Tensor] | None = None,
    slots: int = 5,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """h [NC, HV, V, K] and r [NC, HV, V, C] of every chunk, as both_scans; where gave_up is given, h of every second chunk of a sequence,
    beginning with the first: [N * ceil(chunks of a sequence / 2), HV, V, K].

    Args: o [B, T, HV, V], final (problem.state_shape, state_dtype), contiguous: filled with the outputs and the last states. flags: the
    next launch prepares the tiles, beside this one; gave_up: filled with which blocks did; without flags: those alone walk
    (backward_follow.py has both). into: memory for h and r."""
    HV, K, V, NC = problem.HV, problem.K, problem.V, plan.num_chunks
    every = 1 if gave_up is None else 2
    states = problem.B * -(-NC // (problem.B * every)) if every > 1 else NC
    h, r = into or (torch.empty(n, HV, V, width, dtype=p.w.dtype, device=p.w.device) for n, width in ((states, K), (NC, C)))
    v, stride = packed_rows(inputs.v)
    given = None if inputs.initial_state is None else dense(inputs.initial_state)
    key = (problem, NC, stride, tuple(None if x is None else x.dtype for x in (given, final)), o is not None, slots)
    key = (*key, flags is not None, gave_up is not None, every)
    operands = (p.w, p.kg, p.qg, p.T, p.Aqk, p.decay, v, h, r, o, given, final, plan.sequences, flags, gave_up)
    start(forward_launch, key, operands, p.w.device)
    return h, r
