"""Gradients of a chunk in one kernel: of the scores, of q, k, the gate and beta (docs/backward.md, (5) to (8)).

    dZ = tril(do r^T)        N = dv r^T        dA = -tril(N, -1)        dbeta_r = N_rr / beta_r^2
    dq = scale 2^G (do S^T)           + x (dZ ky)             S: entry state h, dS': gradient of the exit state dh
    dk = -2^G (dv S^T)                + x (dA ky)             as the row that reads
         + 2^(G_C - G) (r dS'^T)      + y (dZ^T qx + dA^T kx) as the row that is written
    dG = q dq + k dk_read - k dk_written
    dg_t = 2^G_C rowsum(S dS') + sum_j (k dk_written)_j [state part] + sum_{j >= t} dG_j

x = 2^(G + shift), y = 2^(-G - shift) and the normalised rows qx, kx, ky are those of backward_prepare.py, rounded to bf16, and dG
multiplies by them as rounded: inside the suffix sum the two ends of a pair must cancel. dZ and dA are over `size`, a power of two near
their largest element: they are multiplied by factors of up to 2^116. So is r dS'^T, which is added to y's products: where it is more than
2^10 times as large, it decides. An L2 norm's q.dq and k.dk are sums over the channels of dG's own terms.

Gates without a bound (`any`) keep the state's part of a written key apart, in dh's bytes: sums that hold it may not cancel.

    dg_t = 2^G_C rowsum(S dS') + sum_{j < t} (k dk_written)_j [state part] + sum_{j >= t} dG_j [written: pairs only]

Rows from `cut` on (backward_prepare.py) leave their pairs to backward_fused_levels.py. In x and y, G is held at -2 shift, 2^G being zero.

In Gluon. Grid (chunk times head,), heads first; 8 warps and 112 KB of shared memory (K = V = 128, bf16 gate), so that two blocks share a
multiprocessor and one computes while the other waits. Tiles come and go by the copy engine; qx and kx take the place of q and k, dZ and dA
that of r, and results leave from where their inputs lay. Tiles stand transposed, channels by tokens, 16 channels a warp: an accumulator is
the next product's left operand, and sums over tokens stay inside four threads. fp32 accumulators [K, 32]: do S^T, dv S^T, r dS'^T."""

from __future__ import annotations

from typing import NamedTuple

import torch

from openkda.hopper.backward_prepare import SPAN, C, half_span
from openkda.hopper.backward_tiles import (
    DEAD,
    bounds,
    channel_sums,
    clear_rows,
    form,
    gate_constants,
    hold,
    inverse,
    load_beta,
    of_chunks,
    of_tokens,
    state_products,
    store_tile,
    sums_before,
    sums_from_first,
    sums_from_last,
    to_bf16,
    token_decay,
    total_sums,
    widen,
)
from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.launch import dense, packed_rows
from openkda.hopper.runtime import Launch, Pointer, start
from openkda.hopper.tiles import LOG2E, ex2, group_layout, plain_shared, rcp, softplus2, tile_layout
from openkda.plan import Plan
from openkda.portable.backward_inputs import CUT
from openkda.portable.tile import as_rows
from openkda.problem import Inputs, Problem

WARPS = 8
CUT_BITS = gl.constexpr(CUT.value * 1.4426950408889634)


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


class Buffers(NamedTuple):
    """Shared memory"""

    q: object  # [32, K], then dq
    k: object  # then dk
    g: object  # then dg, in the gate's dtype
    dd: object  # [64, V] do, dv
    h: object  # [V, K]
    dh: object
    r: object  # [V, 32]
    pairs: object  # [64, 32] dZ, dA over size, in the bytes of r
    sums: object  # [2, warps, 32] fp32, likewise: each warp's sums over its channels
    kept: object  # [2, K, 32] fp32, in the bytes of dh where they suffice: of `any`
    inputs: object  # barriers: q, k, g, r have landed
    states: object  # h, dh, do, dv have landed


@gluon.constexpr_function
def pair_layout(warps):
    """[64, 32] accumulators"""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 32 // (warps // 4), 16])


@gluon.jit
def request_inputs(src, buf, entry, first, HV, group, F: gl.constexpr):
    K: gl.constexpr = F.K
    V: gl.constexpr = F.V
    head = entry % HV
    mbarrier.expect(buf.inputs, src.q.block_type.nbytes + src.k.block_type.nbytes + src.g.block_type.nbytes + src.r.block_type.nbytes)
    tma.async_copy_global_to_shared(src.g, [first, head * K], buf.inputs, buf.g)
    tma.async_copy_global_to_shared(src.k, [first, head // group * K], buf.inputs, buf.k)
    tma.async_copy_global_to_shared(src.q, [first, head // group * K], buf.inputs, buf.q)
    tma.async_copy_global_to_shared(src.r, [entry * V, 0], buf.inputs, buf.r)


@gluon.jit
def request_states(src, buf, entry, first, HV, F: gl.constexpr):
    V: gl.constexpr = F.V
    head = entry % HV
    mbarrier.expect(buf.states, src.do.block_type.nbytes + src.dv.block_type.nbytes + src.h.block_type.nbytes + src.dh.block_type.nbytes)
    tma.async_copy_global_to_shared(src.h, [entry * V, 0], buf.states, buf.h)
    tma.async_copy_global_to_shared(src.do, [first, head * V], buf.states, buf.dd.slice(0, 32, dim=0))
    tma.async_copy_global_to_shared(src.dv, [first, head * V], buf.states, buf.dd.slice(32, 32, dim=0))
    tma.async_copy_global_to_shared(src.dh, [entry * V, 0], buf.states, buf.dh)


@gluon.jit
def gate_chain(dg, gate, slope, offset, rate, lower_bound, bias, L: gl.constexpr, F: gl.constexpr):
    """From dg [K, 32]: the gate's gradient, its sums over the tokens [K], and those of A_log's terms"""
    x = widen(gate.permute((1, 0)).load(L))
    if F.gate == "softplus":
        x = x * slope + offset[:, None]
        bits = softplus2(x) * -rate
        dg = gl.where(bits < CUT_BITS, 0.0, dg)
        to_A_log = gl.sum(dg * bits, 1) * (1.0 / LOG2E)
        dg *= rcp(1.0 + ex2(-x)) * -rate
        return dg, gl.sum(dg, 1), to_A_log
    else:
        if F.gate == "bounded":
            e = ex2(x * slope + offset[:, None])
            s = rcp(1.0 + e)
            dg *= gl.minimum(e, 2.0**126) * s * s * (lower_bound * rate)
        elif F.any:
            dg = gl.where(x < CUT, 0.0, dg)
        total = gl.sum(dg, 1)
        return dg, total, gl.sum(dg * x, 1) + bias * total


@gluon.jit
def score_gradients(DN, least, buf, beta_ptr, beta_row, dbeta_ptr, norms_ptr, late, cut, length, HV, scale, F: gl.constexpr):
    """Write dZ, dA over size to buf.pairs, dbeta to memory; DN [64, 32] = (do, dv) r^T. Returns (size, 1 / size), size at least `least`.
    A chunk that is cut leaves its pairs and size in `late`, for backward_fused_levels.py, and keeps those of the rows before."""
    L: gl.constexpr = DN.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :]
    lower = row >= 32
    token = row % 32
    N_rr = gl.sum(gl.where(column == token[:, None], DN, 0.0), 1)
    mine = lower & (token < length)
    beta, floor = load_beta(beta_ptr + token * beta_row, mine, F)
    dbeta = N_rr / (floor * floor)
    if F.beta_sigmoid:
        dbeta *= beta * (1.0 - (0.5 * beta if F.neg_eigval else beta))
    gl.store(dbeta_ptr + token * HV, dbeta.to(dbeta_ptr.dtype.element_ty), mask=mine)
    factor = gl.where(lower, -1.0, scale)
    if not F.l2norm:
        factor = gl.where(token < length, factor / gl.load(norms_ptr + row), 0.0)
        key = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
        DN = DN * gl.where(key < length, 1.0 / gl.load(norms_ptr + 32 + key), 0.0)[None, :]
    DN = gl.where(column < (token + 1 - lower.to(gl.int32))[:, None], DN * factor[:, None], 0.0)
    bits = gl.maximum(gl.maximum(gl.max(gl.max(gl.abs(DN), 1), 0), least), 2.0**-60).to(gl.int32, bitcast=True) & 0x7F800000
    per_size = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    if F.any:
        if cut < 32:
            pairs_ptr, size_ptr = late
            gl.store(pairs_ptr + row[:, None] * 32 + column, to_bf16(DN * per_size))
            gl.store(size_ptr, bits.to(gl.float32, bitcast=True))
        DN = gl.where((token < cut)[:, None], DN, 0.0)
    buf.pairs.store(to_bf16(DN * per_size))
    return bits.to(gl.float32, bitcast=True), per_size


@gluon.jit
def keep_state_part(written, ky, up, last, rho, cut, norms, length, slope, offset, factor, buf, F: gl.constexpr):
    """Leave in buf.kept the state's part of dk, 2^(G_C - G) (r dS'^T), and the sums over earlier tokens of k times it; 2^G_C rho."""
    L: gl.constexpr = written.type.layout
    if cut < 32:
        to_end = ex2(last[:, None] - sums_from_first(token_decay(buf.g, slope, offset, factor, L, F)))
    else:
        to_end = inverse(up) * ex2(last + 0.5 * SPAN)[:, None]
    stored = written * to_end
    if not F.l2norm:
        token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
        stored *= gl.where(token < length, 1.0 / gl.load(norms + 32 + token), 0.0)[None, :]
    buf.kept.index(0).store(stored)
    buf.kept.index(1).store(sums_before(widen(ky) * up * stored))
    return ex2(last) * rho


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
    sums = both.index(1)._reinterpret(gl.float32, [2, K // 16, 32], plain_shared(2))
    if V == 128 or not F.any:
        kept = dh._reinterpret(gl.float32, [V // 64, K, 32], tile_layout(32))
    else:
        kept = gl.allocate_shared_memory(gl.float32, [2, K, 32], tile_layout(32))
    inputs = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    states = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(inputs, count=1)
    mbarrier.init(states, count=1)
    return Buffers(q, k, g, dd, h, dh, r, both.index(0), sums, kept, inputs, states)


@gluon.jit(do_not_specialize=["HV", "group", "beta_row"], do_not_specialize_on_alignment=["beta_ptr"])
def fused_gradients_kernel(
    q_desc, k_desc, g_desc, do_desc, dv_desc, h_desc, dh_desc, r_desc,  # as Sources
    dq_desc, dk_desc, dg_desc,  # [R, HV*K], boxes [32, K]
    dq_ptr, dk_ptr, dg_ptr,  # the same memory; dq, dk in fp32 where their heads are added afterwards
    beta_ptr,  # [R, HV], row stride beta_row
    A_log_ptr, dt_bias_ptr,  # [HV], [HV, K] or None
    norms_ptr, cut_ptr,  # [NC, HV, 2, 32] fp32, [NC, HV] int32 or None: as backward_prepare.py
    pairs_ptr, size_ptr,  # [NC, HV, 2, 32, 32] bf16, [NC, HV] fp32: what chunks that are cut leave, or None
    dbeta_ptr,  # [R, HV]
    dA_log_ptr, ddt_bias_ptr,  # [NC, HV], [NC, HV, K] fp32 partial sums, or None
    chunks_ptr,  # [NC, 4] int32
    beta_row, HV, group, scale, lower_bound, shift, F: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    K: gl.constexpr = F.K
    L: gl.constexpr = group_layout(32, num_warps)
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    src = Sources(q_desc, k_desc, g_desc, do_desc, dv_desc, h_desc, dh_desc, r_desc)
    buf = make_buffers(src, F)
    channel = gl.arange(0, K, layout=gl.SliceLayout(1, L))
    token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    zero = gl.zeros([K, 32], gl.float32, L)
    zero_pairs = gl.zeros([64, 32], gl.float32, pair_layout(num_warps))
    entry = gl.program_id(0)
    head = entry % HV
    first, length = bounds(chunks_ptr, entry // HV)
    if length > 0:
        request_inputs(src, buf, entry, first, HV, group, F)
        request_states(src, buf, entry, first, HV, F)
        rate, bias, slope, offset, factor = gate_constants(A_log_ptr, dt_bias_ptr, head, channel, lower_bound, F)
        norms = norms_ptr + entry.to(gl.int64) * 64
        nq = gl.load(norms + token)
        nk = gl.load(norms + 32 + token)
        at = first.to(gl.int64) * HV + head

        mbarrier.wait(buf.inputs, 0)
        if length < 32:
            clear_rows(buf.q, length, 0.0)
            clear_rows(buf.k, length, 0.0)
            clear_rows(buf.g, length, 0.0 if F.gate == "none" else DEAD)
        s = token_decay(buf.g, slope, offset, factor, L, F)
        last = gl.sum(s, 1)
        G = sums_from_first(s)
        if F.any:
            up = ex2(hold(G, -2.0 * shift) + shift)
        else:
            last *= factor
            up = ex2(G * factor + shift)
        buf.q.permute((1, 0)).store(to_bf16(widen(buf.q.permute((1, 0)).load(L)) * nq[None, :] * up))
        k = widen(buf.k.permute((1, 0)).load(L)) * nk[None, :]
        buf.k.permute((1, 0)).store(to_bf16(k * up))
        ky = to_bf16(k * inverse(up))

        mbarrier.wait(buf.states, 0)
        if length < 32:
            clear_rows(buf.dd, length, 0.0)
            fence_async_shared()
            gl.thread_barrier()
        rho = state_products(buf.h, buf.dh, K, L)
        DN = warpgroup_mma(buf.dd, buf.r, zero_pairs, use_acc=False, is_async=True)
        written = warpgroup_mma(buf.dh.permute((1, 0)), buf.r, zero, use_acc=False, is_async=True)
        DN, written = warpgroup_mma_wait(0, deps=(DN, written))
        gl.thread_barrier()  # other tiles may come into r's place, and into dh's
        least = 0.0
        late = None
        cut = 32
        if F.any:
            cut = gl.load(cut_ptr + entry)
            late = pairs_ptr + entry.to(gl.int64) * 2048, size_ptr + entry
            rho = keep_state_part(written, ky, up, last, rho, cut, norms, length, slope, offset, factor, buf, F)
        else:
            if not F.l2norm:
                written *= gl.where(token < length, 1.0 / gl.load(norms + 32 + token), 0.0)[None, :]
            least = gl.max(gl.max(gl.abs(written), 1), 0) * 2.0**-10
        size, per_size = score_gradients(
            DN, least, buf, beta_ptr + first.to(gl.int64) * beta_row + head, beta_row, dbeta_ptr + at, norms, late, cut, length, HV,
            scale, F,
        )  # fmt: skip
        fence_async_shared()
        gl.thread_barrier()

        # Gradients over size and the tile's factor: dq = up sum_q, dk = up read + down written.
        # 2^G = up 2^-shift, 2^(G_C - G) = down 2^(G_C + shift).
        h = buf.h.permute((1, 0))
        sum_q = warpgroup_mma(h, buf.dd.slice(0, 32, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
        read = warpgroup_mma(h, buf.dd.slice(32, 32, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
        sum_q, read = warpgroup_mma_wait(0, deps=(sum_q, read))
        unit = ex2(-shift)  # per_size first: the factors' own products may leave fp32's range
        sum_q = sum_q * per_size * (unit * scale)
        read = read * per_size * -unit
        if F.any:
            written = zero
        else:
            written = written * per_size * ex2(last + shift)[:, None]
        if not F.l2norm:
            per_q = gl.where(token < length, 1.0 / gl.load(norms + token), 0.0)[None, :]
            per_k = gl.where(token < length, 1.0 / gl.load(norms + 32 + token), 0.0)[None, :]
            sum_q *= per_q
            read *= per_k
        if not F.any:
            rho = ex2(last) * rho + gl.sum(widen(ky) * written, 1) * size
        dZ = buf.pairs.slice(0, 32, dim=0)
        dA = buf.pairs.slice(32, 32, dim=0)
        kyA = gl.convert_layout(ky, A)
        sum_q = warpgroup_mma(kyA, dZ.permute((1, 0)), sum_q, is_async=True)
        read = warpgroup_mma(kyA, dA.permute((1, 0)), read, is_async=True)
        written = warpgroup_mma(buf.q.permute((1, 0)), dZ, written, is_async=True)
        written = warpgroup_mma(buf.k.permute((1, 0)), dA, written, is_async=True)
        sum_q, read, written = warpgroup_mma_wait(0, deps=(sum_q, read, written))

        dG = widen(buf.q.permute((1, 0)).load(L)) * sum_q
        if F.l2norm:
            channel_sums(buf, dG, 0)
        sum_q *= up
        by_reading = widen(buf.k.permute((1, 0)).load(L)) * read
        dG += by_reading
        lost = widen(ky) * written
        dG -= lost
        dk = up * read + inverse(up) * written
        if F.any:
            stored = buf.kept.index(0).load(L) * per_size
            dk += stored
            lost += widen(ky) * up * stored
        if F.l2norm:
            channel_sums(buf, by_reading + lost, 1)
        nq = gl.load(norms + token) * size
        nk = gl.load(norms + 32 + token) * size
        if F.l2norm:
            gl.thread_barrier()
            along_q = total_sums(buf, 0, gl.SliceLayout(0, L))[None, :]
            along_k = total_sums(buf, 1, gl.SliceLayout(0, L))[None, :]
            dq = (sum_q - widen(buf.q.permute((1, 0)).load(L)) * (inverse(up) * along_q)) * nq[None, :]
            dk = (dk - widen(ky) * (up * along_k)) * nk[None, :]
        else:
            dq = sum_q * nq[None, :]
            dk *= nk[None, :]
        store_tile(dq, dq_desc, dq_ptr, buf.q, first, length, head, HV, K)
        store_tile(dk, dk_desc, dk_ptr, buf.k, first, length, head, HV, K)

        dg = sums_from_last(dG) * size
        if F.any:
            dg += buf.kept.index(1).load(L)
        dg = gl.where((token < length)[None, :], dg + rho[:, None], 0.0)
        dg, total, to_A_log = gate_chain(dg, buf.g, slope, offset, rate, lower_bound, bias, L, F)
        if dA_log_ptr is not None:
            gl.store(dA_log_ptr + entry, gl.sum(to_A_log, 0))
        if ddt_bias_ptr is not None:
            gl.store(ddt_bias_ptr + entry.to(gl.int64) * K + channel, total)
        store_tile(dg, dg_desc, dg_ptr, buf.g, first, length, head, HV, K)
        tma.store_wait(0)


Q, K_, G, DO, DV, H, DH, R, DQ, DK, DG, BETA, A_LOG, DT_BIAS, NORMS, CUTS, PAIRS, SIZE, DBETA, DA_LOG, DDT_BIAS, CHUNKS = range(22)


def launch(p: Problem, NC: int, strides: tuple[int, ...], dtypes: tuple[torch.dtype | None, torch.dtype | None]) -> Launch:
    """Operands by the numbers above. strides: elements between rows of q, k, g, do, beta; dtypes of A_log and dt_bias, None: absent"""
    K, V, HV, tiles = p.K, p.V, p.HV, NC * p.HV
    gate, of_heads, fp32 = p.gate_dtype, torch.float32 if p.group > 1 else p.dtype, torch.float32
    optional = lambda there, operand, dtype: Pointer(operand, dtype) if there else None
    of_A_log, of_bias = (dtype is not None for dtype in dtypes)
    args = (
        of_tokens(Q, p.dtype, p, p.H * K, K, strides[0]), of_tokens(K_, p.dtype, p, p.H * K, K, strides[1]),
        of_tokens(G, gate, p, HV * K, K, strides[2]),
        of_tokens(DO, p.dtype, p, HV * V, V, strides[3]), of_tokens(DV, p.dtype, p, HV * V, V),
        of_chunks(H, p.dtype, tiles, V, K), of_chunks(DH, p.dtype, tiles, V, K), of_chunks(R, p.dtype, tiles, V, C),
        of_tokens(DQ, of_heads, p, HV * K, K), of_tokens(DK, of_heads, p, HV * K, K), of_tokens(DG, gate, p, HV * K, K),
        Pointer(DQ, of_heads), Pointer(DK, of_heads), Pointer(DG, gate), Pointer(BETA, p.beta_dtype),
        optional(of_A_log, A_LOG, dtypes[0]), optional(of_bias, DT_BIAS, dtypes[1]), Pointer(NORMS, fp32),
        optional(not p.bounded, CUTS, torch.int32), optional(not p.bounded, PAIRS, p.dtype), optional(not p.bounded, SIZE, fp32),
        Pointer(DBETA, p.beta_dtype), optional(of_A_log, DA_LOG, fp32), optional(of_bias, DDT_BIAS, fp32), Pointer(CHUNKS, torch.int32),
        strides[4], HV, p.group, float(p.scale), float(p.lower_bound or 0.0), half_span(p),
    )  # fmt: skip
    return Launch(fused_gradients_kernel, (tiles, 1, 1), args, (form(p),), min(WARPS, K // 16), registers=1024 // WARPS)


def fused_gradients(
    problem: Problem, plan: Plan, inputs: Inputs, norms: torch.Tensor, do: torch.Tensor, h: torch.Tensor, dh: torch.Tensor, r: torch.Tensor,
    dv: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dg: torch.Tensor, dbeta: torch.Tensor, cut: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Write dq, dk (per value head), dg [B, T, HV, K] and dbeta [B, T, HV]; return the terms of A_log's [NC, HV, 1] and dt_bias's
    [NC, HV, K] gradient in fp32 (None if absent), to be added in one order: no atomics. Then, for fused_levels, what chunks that are cut
    left: dZ, dA [NC, HV, 2, C, C] over size, and size [NC, HV, 1] fp32 (None without cut).

    Args: norms, cut as Prepared; do, dv [B, T, HV, V]; h, dh, r from both_scans."""
    HV, K, NC, device = problem.HV, problem.K, plan.num_chunks, do.device
    partial = lambda present, *n: torch.empty(NC, HV, *n, dtype=torch.float32, device=device) if present else None
    dA_log, ddt_bias = partial(problem.has_A_log, 1), partial(problem.has_dt_bias, K)
    pairs = size = None
    if cut is not None:
        pairs, size = torch.empty(NC, HV, 2, C, C, dtype=problem.dtype, device=device), torch.empty(NC, HV, 1, device=device)
    if NC and problem.T:  # a batch of empty sequences has chunks of no rows
        rows, strides = zip(*map(packed_rows, (inputs.q, inputs.k, inputs.g, do)))
        beta = as_rows(inputs.beta)
        parameters = [None if x is None else dense(x) for x in (inputs.A_log, inputs.dt_bias)]
        key = (problem, NC, (*strides, beta.stride(0)), tuple(None if x is None else x.dtype for x in parameters))
        operands = (*rows, dv, h, dh, r, dq, dk, dg, beta, *parameters, norms, cut, pairs, size, dbeta, dA_log, ddt_bias, plan.chunks)
        start(launch, key, operands, device)
    return dA_log, ddt_bias, pairs, size
