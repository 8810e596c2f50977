"""Shared memory of the fused gradients (backward_fused.py), and how its tiles come.

Beside the reverse walk h is there for every second chunk of a sequence, the first of a pair, as the forward walk left it: half of what h
takes of the memory's time both ways. A block of the second brings what the walk took there, r and kg of the chunk before, into dh's place,
and takes the walk's step itself before dh comes:

    S = S Diag(decay) + r kg

h is rounded to bf16 once more then, as every h that the walk leaves is."""

from __future__ import annotations

from typing import NamedTuple

from openkda.hopper.backward_follow import await_flags
from openkda.hopper.backward_tiles import quotient, to_bf16, widen
from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.tiles import group_layout, plain_shared, tile_layout


class Sources(NamedTuple):
    """Tensor maps of what is read"""

    q: object  # [R, H*K], boxes [32, K]
    k: object
    g: object  # [R, HV*K], boxes [32, K]
    do: object  # [R, HV*V], boxes [32, V]
    dv: object
    h: object  # [NC*HV*V, K], boxes [V, K]
    dh: object
    r: object  # [NC*HV*V, 32], boxes [V, 32]
    kg: object  # [NC*HV*32, K], boxes [32, K], or None: h is there for every chunk


class Buffers(NamedTuple):
    """Shared memory"""

    q: object  # [32, K], then qx
    k: object  # then kx
    g: object  # in the gate's dtype
    dd: object  # [64, V] do, dv
    h: object  # [V, K]
    dh: object
    r: object  # [V, 32]
    pairs: object  # [64, 32] dZ, dA over size, in the bytes of r
    sums: object  # [warps, 32, 2] fp32, in the bytes of do, dv: each warp's sums over its channels
    totals: object  # [2, 32] fp32, in those of kx: over all channels
    along: object  # its rows
    kept: object  # [2, K, 32] fp32, in the bytes of dh where they suffice: of `any`
    kg: object  # [32, K] of the chunk before, in the bytes of dh
    r_before: object  # [V, 32], likewise
    dq: object  # [32, K], in the bytes of h
    dk: object  # of do, dv
    dg: object  # of dh, or of g where dh's are taken
    norms: object  # two of [32] fp32
    bias: object  # [K] fp32
    peaks: object  # [4, warps / 4] int32: the bits of each warp's largest element
    landed: object  # barriers, one a copy, for two on one would wait for each other: h, g, do, k, q, r, dh, dv; kg and r_before


@gluon.jit
def make_barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def make_buffers(src, F: gl.constexpr):
    K: gl.constexpr = F.K
    V: gl.constexpr = F.V
    dtype: gl.constexpr = src.q.dtype
    h = gl.allocate_shared_memory(dtype, [V, K], tile_layout(16))
    dh = gl.allocate_shared_memory(dtype, [V, K], tile_layout(16))
    dd = gl.allocate_shared_memory(dtype, [64, V], tile_layout(16))
    q = gl.allocate_shared_memory(dtype, [32, K], tile_layout(16))
    k = gl.allocate_shared_memory(dtype, [32, K], tile_layout(16))
    g = gl.allocate_shared_memory(src.g.dtype, [32, K], tile_layout(src.g.dtype.primitive_bitwidth))
    both = gl.allocate_shared_memory(dtype, [2, 64, 32], tile_layout(16, 64))
    r = both._reinterpret(dtype, [V, 32], tile_layout(16, 64))
    if V == 128 or not F.any:
        kept = dh._reinterpret(gl.float32, [V // 64, K, 32], tile_layout(32))
    else:
        kept = gl.allocate_shared_memory(gl.float32, [2, K, 32], tile_layout(32))
    sums = dd._reinterpret(gl.float32, [K // 16, 32, 2], plain_shared(3))
    totals = k._reinterpret(gl.float32, [2, 32], plain_shared(2))
    along = k._reinterpret(gl.float32, [2, 32], plain_shared(1))
    dq = h._reinterpret(dtype, [V // 32, 32, K], tile_layout(16)).index(0)
    dk = dd._reinterpret(dtype, [2 * V // K, 32, K], tile_layout(16)).index(0)
    if F.any:
        dg = g
    else:
        bits: gl.constexpr = src.g.dtype.primitive_bitwidth
        dg = dh._reinterpret(src.g.dtype, [V // 2 // bits, 32, K], tile_layout(bits)).index(0)
    kg = dh._reinterpret(dtype, [V // 32, 32, K], tile_layout(16)).index(0)
    r_before = dh._reinterpret(dtype, [K // 32, V, 32], tile_layout(16, 64)).index(K // 32 - 1)
    norms = gl.allocate_shared_memory(gl.float32, [32], plain_shared(1)), gl.allocate_shared_memory(gl.float32, [32], plain_shared(1))
    bias = gl.allocate_shared_memory(gl.float32, [K], plain_shared(1))
    W: gl.constexpr = gl.num_warps() // 4
    peaks = gl.allocate_shared_memory(gl.int32, [4, W], plain_shared(2))
    landed = (
        make_barrier(), make_barrier(), make_barrier(), make_barrier(), make_barrier(), make_barrier(), make_barrier(), make_barrier(),
        make_barrier(),
    )  # fmt: skip
    pairs = both.index(0)
    along = along.index(0), along.index(1)
    return Buffers(q, k, g, dd, h, dh, r, pairs, sums, totals, along, kept, kg, r_before, dq, dk, dg, norms, bias, peaks, landed)


@gluon.jit
def expect(src, buf, odd, begin: gl.constexpr, end: gl.constexpr, F: gl.constexpr):
    """Announce what `request` brings, from tile number `begin` to `end`, and where `odd` what `request_before` does"""
    maps = src.h, src.g, src.do, src.k, src.q, src.r, src.dh, src.dv
    for n in gl.static_range(begin, end):
        mbarrier.expect(buf.landed[n], maps[n].block_type.nbytes)
    if F.beside and begin == 0:
        mbarrier.expect(buf.landed[8], src.kg.block_type.nbytes + src.r.block_type.nbytes, pred=odd)


@gluon.jit
def request(src, buf, tiles, begin: gl.constexpr, end: gl.constexpr, F: gl.constexpr):
    """Bring the tiles from number `begin` to `end`. tiles: numbers of the chunk's tile and of h, first row, head, the group's `divider`"""
    entry, state, first, head, group = tiles
    K: gl.constexpr = F.K
    V: gl.constexpr = F.V
    shared = quotient(head, group) * K
    maps = src.h, src.g, src.do, src.k, src.q, src.r, src.dh, src.dv
    to = buf.h, buf.g, buf.dd.slice(0, 32, dim=0), buf.k, buf.q, buf.r, buf.dh, buf.dd.slice(32, 32, dim=0)
    rows = state * V, first, first, first, first, entry * V, entry * V, first
    columns = 0, head * K, head * V, shared, shared, 0, 0, head * V
    for n in gl.static_range(begin, end):
        tma.async_copy_global_to_shared(maps[n], [rows[n], columns[n]], buf.landed[n], to[n])


@gluon.jit
def request_before(src, buf, before, F: gl.constexpr):
    """Bring what `advance` takes, of the chunk `before`"""
    tma.async_copy_global_to_shared(src.kg, [before * 32, 0], buf.landed[8], buf.kg)
    tma.async_copy_global_to_shared(src.r, [before * F.V, 0], buf.landed[8], buf.r_before)


@gluon.jit
def advance(buf, decay_ptr, F: gl.constexpr):
    """Make buf.h, the state at the entry of the chunk before, that at this one's: S Diag(decay) + r kg, as the walk does"""
    K: gl.constexpr = F.K
    L: gl.constexpr = group_layout(F.V, gl.num_warps())
    decay = gl.load(decay_ptr + gl.arange(0, K, layout=gl.SliceLayout(1, L)))
    mbarrier.wait(buf.landed[0], 0)
    mbarrier.wait(buf.landed[8], 0)
    h = buf.h.permute((1, 0))
    S = warpgroup_mma(buf.kg.permute((1, 0)), buf.r_before.permute((1, 0)), widen(h.load(L)) * decay[:, None], is_async=True)
    S = warpgroup_mma_wait(0, deps=(S,))
    h.store(to_bf16(S))
    fence_async_shared()
    gl.thread_barrier()  # other tiles may come into dh's place


@gluon.jit
def bring_tiles(src, buf, tiles, odd, HV, decay_ptr, flags_ptr, groups, F: gl.constexpr):
    """Have all tiles brought, what is needed first first; dh and dv, which a walk beside this launch writes, when its flags are raised.

    tiles: as `request`; odd: whether h is that of the chunk before, decay_ptr: [NC, HV, K], where the walk is beside."""
    expect(src, buf, odd, 0, 3, F)
    if F.beside:
        if odd:
            request(src, buf, tiles, 0, 1, F)
            request_before(src, buf, tiles[0] - HV, F)
    request(src, buf, tiles, 1, 3, F)
    expect(src, buf, False, 3, 8, F)  # brings the barrier that else would stand between do and dv, behind the flags
    request(src, buf, tiles, 3, 6, F)
    if F.beside:
        if not odd:
            request(src, buf, tiles, 0, 1, F)
        await_flags(flags_ptr, F.announcers, groups)
        if odd:
            advance(buf, decay_ptr + (tiles[0] - HV).to(gl.int64) * F.K, F)
    else:
        request(src, buf, tiles, 0, 1, F)
    request(src, buf, tiles, 6, 8, F)
