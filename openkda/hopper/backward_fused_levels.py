"""backward_levels.py in Gluon, for the device: gradients of the pairs that rows of a fast gate take by levels, added to the others.

The equations are there. Here tiles stand transposed, [K, 32], 16 channels a warp, as in backward_fused.py: a row's anchor is found among
four threads, tiles times a level's factor go to the matrix unit from registers, and the chunk's dZ and dA lie in shared memory once for
each level, masked. An L2 norm's q.dq and k.dk are those of the sums.

Grid (groups of GROUP chunks times heads,): a group of which no chunk is cut ends at once. 8 warps and 72 KB of shared memory for K = 128.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from openkda.hopper.backward_tiles import (
    DEAD,
    bounds,
    channel_sums,
    clear_rows,
    form,
    gate_chain,
    gate_constants,
    level_factor,
    load_gate,
    of_tokens,
    store_tiles,
    sums_from_first,
    sums_from_last,
    to_bf16,
    token_decay,
    total_sums,
    widen,
)
from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.launch import dense, packed_rows
from openkda.hopper.runtime import Launch, Pointer, full_name, start
from openkda.hopper.tiles import group_layout, plain_shared, tile_layout
from openkda.plan import Plan
from openkda.problem import Inputs, Problem

GROUP = gl.constexpr(8)
REGISTERS = 128  # a thread: two blocks a multiprocessor


class Buffers(NamedTuple):
    """Shared memory"""

    q: object  # [32, K]
    k: object
    g: object
    dq: object  # [32, K] in bf16, where dq comes in bf16
    dk: object
    dg: object
    pairs: object  # [5, 64, 32] dZ, dA over size of each level
    sums: object  # [2, warps, 32] fp32: each warp's sums over its channels
    landed: object  # barrier: q, k, g, dq, dk, dg


@gluon.jit
def mask_pairs(buf, pairs_ptr, cut):
    """dZ and dA [64, 32] to each level's tile, but for rows before the cut"""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    i = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :]
    r = row % 32
    x = gl.load(pairs_ptr + row * 32 + i)
    x = gl.where(r >= cut, x, 0.0)
    for level in gl.static_range(5):
        below = ((r >> level) == (i >> level) + 1) & ((r >> (level + 1)) == (i >> (level + 1)))
        buf.pairs.index(level).store(gl.where(below, x, 0.0))


@gluon.jit
def scaled(tile, norm, x, L: gl.constexpr):
    """Normalised rows times a level's factor, rounded"""
    return to_bf16(widen(tile.permute((1, 0)).load(L)) * (x * norm[None, :]))


@gluon.jit
def by_queries(buf, G, diagonal, nq, nk, L: gl.constexpr):
    """dq over size of normalised rows, and its part of dG: [K, 32]"""
    zero = gl.zeros([G.shape[0], 32], gl.float32, L)
    dq = widen(buf.k.permute((1, 0)).load(L)) * (nk * diagonal)[None, :]
    dG = zero
    for level in range(5):
        x = level_factor(G, level)
        dZ = buf.pairs.index(level).slice(0, 32, dim=0)
        kx = gl.convert_layout(scaled(buf.k, nk, x, L), gl.DotOperandLayout(0, L, 2))
        sum_q = warpgroup_mma(kx, dZ.permute((1, 0)), zero, use_acc=False, is_async=True)
        sum_q = warpgroup_mma_wait(0, deps=(sum_q,))
        dq += x * sum_q
        dG += widen(scaled(buf.q, nq, x, L)) * sum_q
    return dq, dG


@gluon.jit
def by_keys(buf, G, dG, diagonal, nq, nk, L: gl.constexpr):
    """dk over size of normalised rows, and dG with its part added: [K, 32]. A row is odd, and reads, or even, and is read."""
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    zero = gl.zeros([G.shape[0], 32], gl.float32, L)
    token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    dk = widen(buf.q.permute((1, 0)).load(L)) * (nq * diagonal)[None, :]
    for level in range(5):
        x = level_factor(G, level)
        dZ = buf.pairs.index(level).slice(0, 32, dim=0)
        dA = buf.pairs.index(level).slice(32, 32, dim=0)
        kx = scaled(buf.k, nk, x, L)
        kxA = gl.convert_layout(kx, A)
        sum_k = warpgroup_mma(kxA, dA.permute((1, 0)), zero, use_acc=False, is_async=True)
        sum_k = warpgroup_mma(kxA, dA, sum_k, is_async=True)
        sum_k = warpgroup_mma(gl.convert_layout(scaled(buf.q, nq, x, L), A), dZ, sum_k, is_async=True)
        sum_k = warpgroup_mma_wait(0, deps=(sum_k,))
        dk += x * sum_k
        dG += widen(kx) * gl.where(((token >> level) % 2 == 1)[None, :], sum_k, -sum_k)
    return dk, dG


@gluon.jit
def project(dx, x, buf, part: gl.constexpr, L: gl.constexpr):
    """dx without its part along the normalised rows x"""
    channel_sums(buf, x * dx, part)
    gl.thread_barrier()
    return dx - x * total_sums(buf, part, gl.SliceLayout(0, L))[None, :]


@gluon.jit
def add_tile(x, desc, ptr, tile, first, length, head, HV, K: gl.constexpr):
    """Add x [K, 32] to rows first to first + length; what was there has landed in `tile` where that has their dtype."""
    L: gl.constexpr = x.type.layout
    if ptr.dtype.element_ty == tile.dtype:
        x += widen(tile.permute((1, 0)).load(L))
    else:
        channel = gl.arange(0, K, layout=gl.SliceLayout(1, L))[:, None]
        token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :]
        x += gl.load(ptr + (first.to(gl.int64) * HV + head) * K + token * (HV * K) + channel, mask=token < length, other=0.0)
    store_tiles((x,), (desc,), (ptr,), (tile,), first, length, head, HV, K)


@gluon.jit
def chunk_levels(
    descs, ptrs, buf, entry, cut, first, length, phase, A_log_ptr, dt_bias_ptr, norms_ptr, pairs_ptr, size_ptr, dA_log_ptr, ddt_bias_ptr,
    HV, group, F: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    K: gl.constexpr = F.K
    q_desc, k_desc, g_desc, dq_desc, dk_desc, dg_desc = descs
    dq_ptr, dk_ptr, dg_ptr = ptrs
    in_bf16: gl.constexpr = dq_ptr.dtype.element_ty == buf.dq.dtype
    head = entry % HV
    channel = gl.arange(0, K, layout=gl.SliceLayout(1, L))
    token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    mbarrier.expect(buf.landed, q_desc.block_type.nbytes * (4 if in_bf16 else 2) + g_desc.block_type.nbytes * 2)
    tma.async_copy_global_to_shared(g_desc, [first, head * K], buf.landed, buf.g)
    tma.async_copy_global_to_shared(k_desc, [first, head // group * K], buf.landed, buf.k)
    tma.async_copy_global_to_shared(q_desc, [first, head // group * K], buf.landed, buf.q)
    tma.async_copy_global_to_shared(dg_desc, [first, head * K], buf.landed, buf.dg)
    if in_bf16:
        tma.async_copy_global_to_shared(dq_desc, [first, head * K], buf.landed, buf.dq)
        tma.async_copy_global_to_shared(dk_desc, [first, head * K], buf.landed, buf.dk)
    pairs_ptr += entry.to(gl.int64) * 2048
    mask_pairs(buf, pairs_ptr, cut)
    diagonal = gl.where(token >= cut, gl.load(pairs_ptr + token * 33).to(gl.float32), 0.0)
    size = gl.load(size_ptr + entry)
    rate, bias, slope, offset, factor = gate_constants(*load_gate(A_log_ptr, dt_bias_ptr, head, channel, F), 0.0, F)
    norms = norms_ptr + entry.to(gl.int64) * 64
    nq = gl.load(norms + token)
    nk = gl.load(norms + 32 + token)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.wait(buf.landed, phase)
    if length < 32:
        clear_rows(buf.q, length, 0.0)
        clear_rows(buf.k, length, 0.0)
        clear_rows(buf.g, length, 0.0 if F.gate == "none" else DEAD)
    G = sums_from_first(token_decay(buf.g, slope, offset, factor, L, F))
    dq, dG = by_queries(buf, G, diagonal, nq, nk, L)
    if F.l2norm:
        dq = project(dq, widen(buf.q.permute((1, 0)).load(L)) * nq[None, :], buf, 0, L)
    add_tile(dq * (nq * size)[None, :], dq_desc, dq_ptr, buf.dq, first, length, head, HV, K)
    dk, dG = by_keys(buf, G, dG, diagonal, nq, nk, L)
    if F.l2norm:
        dk = project(dk, widen(buf.k.permute((1, 0)).load(L)) * nk[None, :], buf, 1, L)
    add_tile(dk * (nk * size)[None, :], dk_desc, dk_ptr, buf.dk, first, length, head, HV, K)
    dg = gl.where((token < length)[None, :], sums_from_last(dG) * size, 0.0)
    dg, total, to_A_log = gate_chain(dg, buf.g, slope, offset, rate, bias, L, F)
    if dA_log_ptr is not None:
        at = dA_log_ptr + entry.to(gl.int64) * (K // 16)
        gl.store(at, gl.load(at) + gl.sum(to_A_log, 0))
    if ddt_bias_ptr is not None:
        at = ddt_bias_ptr + entry.to(gl.int64) * K + channel
        gl.store(at, gl.load(at) + total)
    add_tile(dg, dg_desc, dg_ptr, buf.dg, first, length, head, HV, K)
    tma.store_wait(0)
    gl.thread_barrier()


@gluon.jit(do_not_specialize=["HV", "group", "entries"])
def fused_levels_kernel(
    q_desc, k_desc, g_desc,  # [R, H*K], [R, HV*K], boxes [32, K]
    dq_desc, dk_desc, dg_desc,  # [R, HV*K], likewise
    dq_ptr, dk_ptr, dg_ptr,  # the same memory; dq, dk in fp32 where their heads are added afterwards
    A_log_ptr, dt_bias_ptr,  # [HV], [HV, K] or None
    norms_ptr, cut_ptr,  # [NC, HV, 2, 32] fp32, [NC, HV] int32: as backward_prepare.py
    pairs_ptr, size_ptr,  # [NC, HV, 2, 32, 32] bf16, [NC, HV] fp32: as backward_fused.py left them
    dA_log_ptr, ddt_bias_ptr,  # [NC, HV, K / 16], [NC, HV, K] fp32 partial sums, or None
    chunks_ptr,  # [NC, 4] int32
    HV, group, entries, F: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    K: gl.constexpr = F.K
    L: gl.constexpr = group_layout(32, num_warps)
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    base = gl.program_id(0) * GROUP
    all_entries = base + gl.arange(0, GROUP, layout=lane)
    cuts = gl.load(cut_ptr + all_entries, mask=all_entries < entries, other=32)
    _, lengths = bounds(chunks_ptr, gl.minimum(all_entries, entries - 1) // HV)
    if gl.min(gl.where(lengths > 0, cuts, 32), 0) < 32:
        dtype: gl.constexpr = q_desc.dtype
        gate: gl.constexpr = g_desc.dtype
        tile: gl.constexpr = tile_layout(16)
        gate_tile: gl.constexpr = tile_layout(gate.primitive_bitwidth)
        buf = Buffers(
            gl.allocate_shared_memory(dtype, [32, K], tile), gl.allocate_shared_memory(dtype, [32, K], tile),
            gl.allocate_shared_memory(gate, [32, K], gate_tile), gl.allocate_shared_memory(dtype, [32, K], tile),
            gl.allocate_shared_memory(dtype, [32, K], tile), gl.allocate_shared_memory(gate, [32, K], gate_tile),
            gl.allocate_shared_memory(dtype, [5, 64, 32], tile_layout(16, 64)),
            gl.allocate_shared_memory(gl.float32, [2, K // 16, 32], plain_shared(2)),
            gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        )  # fmt: skip
        mbarrier.init(buf.landed, count=1)
        phase = 0
        for entry in range(base, gl.minimum(base + GROUP, entries)):
            cut = gl.load(cut_ptr + entry)
            first, length = bounds(chunks_ptr, entry // HV)
            if (length > 0) & (cut < 32):
                chunk_levels(
                    (q_desc, k_desc, g_desc, dq_desc, dk_desc, dg_desc), (dq_ptr, dk_ptr, dg_ptr), buf, entry, cut, first, length, phase,
                    A_log_ptr, dt_bias_ptr, norms_ptr, pairs_ptr, size_ptr, dA_log_ptr, ddt_bias_ptr, HV, group, F, L,
                )  # fmt: skip
                phase ^= 1


Q, K_, G, DQ, DK, DG, A_LOG, DT_BIAS, NORMS, CUTS, PAIRS, SIZE, DA_LOG, DDT_BIAS, CHUNKS = range(15)  # the operands


def launch(p: Problem, NC: int, strides: tuple[int, ...], dtypes: tuple[torch.dtype | None, torch.dtype | None]) -> Launch:
    """Operands by the numbers above. strides: elements between rows of q, k, g; dtypes of A_log and dt_bias, None: absent"""
    K, HV, tiles, of_heads, fp32 = p.K, p.HV, NC * p.HV, torch.float32 if p.group > 1 else p.dtype, torch.float32
    optional = lambda operand, dtype: None if dtype is None else Pointer(operand, dtype)
    partial = lambda operand, dtype: None if dtype is None else Pointer(operand, fp32)
    args = (
        of_tokens(Q, p.dtype, p, p.H * K, K, strides[0]), of_tokens(K_, p.dtype, p, p.H * K, K, strides[1]),
        of_tokens(G, p.gate_dtype, p, HV * K, K, strides[2]), of_tokens(DQ, of_heads, p, HV * K, K), of_tokens(DK, of_heads, p, HV * K, K),
        of_tokens(DG, p.gate_dtype, p, HV * K, K), Pointer(DQ, of_heads), Pointer(DK, of_heads), Pointer(DG, p.gate_dtype),
        optional(A_LOG, dtypes[0]), optional(DT_BIAS, dtypes[1]), Pointer(NORMS, fp32), Pointer(CUTS, torch.int32), Pointer(PAIRS, p.dtype),
        Pointer(SIZE, fp32), partial(DA_LOG, dtypes[0]), partial(DDT_BIAS, dtypes[1]), Pointer(CHUNKS, torch.int32), HV, p.group, tiles,
    )  # fmt: skip
    return Launch(full_name(fused_levels_kernel), (-(-tiles // GROUP.value), 1, 1), args, (form(p),), K // 16, registers=REGISTERS)


def fused_levels(
    problem: Problem, plan: Plan, inputs: Inputs, norms: torch.Tensor, cut: torch.Tensor, pairs: torch.Tensor, size: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dg: torch.Tensor, dA_log: torch.Tensor | None, ddt_bias: torch.Tensor | None,
) -> None:  # fmt: skip
    """Add to dq, dk (per value head), dg [B, T, HV, K] and the partial sums dA_log [NC, HV, 1], ddt_bias [NC, HV, K].

    Args: norms, cut as Prepared; pairs [NC, HV, 2, C, C] over size [NC, HV, 1], as fused_gradients returned them."""
    if plan.num_chunks and problem.T:
        rows, strides = zip(*map(packed_rows, (inputs.q, inputs.k, inputs.g)))
        parameters = [None if x is None else dense(x) for x in (inputs.A_log, inputs.dt_bias)]
        key = (problem, plan.num_chunks, strides, tuple(None if x is None else x.dtype for x in parameters))
        start(launch, key, (*rows, dq, dk, dg, *parameters, norms, cut, pairs, size, dA_log, ddt_bias, plan.chunks), dq.device)
