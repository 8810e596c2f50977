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

In Gluon. Grid (chunk times head,), heads first; 8 warps and 113 KB of shared memory (K = V = 128, bf16 gate), so that two blocks share a
multiprocessor and one computes while the other waits. Tiles come and go by the copy engine; qx and kx take the place of q and k, dZ and dA
that of r, and results leave from where nothing is read any more. Tiles stand transposed, channels by tokens, 16 channels a warp: an
accumulator is the next product's left operand, and sums over tokens stay inside four threads. fp32 accumulators [K, 32]: do S^T, dv S^T,
r dS'^T. With them the registers are full: what is small and needed again late, norms and dt_bias, waits in shared memory."""

from __future__ import annotations

import torch

from openkda.hopper.backward_follow import GROUP, end_with_neighbour, walk_rows, walked
from openkda.hopper.backward_fused_memory import Sources, bring_tiles, make_buffers
from openkda.hopper.backward_prepare import SPAN, C, Prepared, half_span
from openkda.hopper.backward_tiles import (
    DEAD,
    both_sums,
    bounds,
    clear_rows,
    divider,
    form,
    gate_chain,
    gate_constants,
    hold,
    inverse,
    load_beta,
    load_gate,
    of_chunks,
    of_tokens,
    quotient,
    state_products,
    store_tiles,
    sums_before,
    sums_from_first,
    sums_from_last,
    to_bf16,
    token_decay,
    widen,
    without_norms,
)
from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.launch import dense, packed_rows
from openkda.hopper.runtime import Launch, Pointer, full_name, start
from openkda.hopper.tiles import ex2, group_layout
from openkda.plan import Plan
from openkda.portable.tile import as_rows
from openkda.problem import Inputs, Problem

WARPS = 8


@gluon.constexpr_function
def pair_layout(warps):
    """[64, 32] accumulators"""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 32 // (warps // 4), 16])


@gluon.constexpr_function
def whole_layout(warps):
    """[4, warps / 4], all of it in every thread"""
    return gl.BlockedLayout([4, warps // 4], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def score_gradients(DN, least, buf, beta, floor, dbeta_ptr, norms_ptr, late, cut, length, HV, scale, F: gl.constexpr):
    """Write dZ, dA over size to buf.pairs, dbeta to memory. Returns (size, 1 / size). A chunk that is cut leaves its pairs and size in
    `late`, for backward_fused_levels.py, and keeps those of the rows before.

    DN [64, 32] = (do, dv) r^T; least [K, 32]: size is at least 2^-10 of its largest element, not so for gates without a bound; beta,
    floor as load_beta."""
    L: gl.constexpr = DN.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :]
    lower = row >= 32
    token = row % 32
    per_N_rr = 1.0 / (floor * floor)
    if F.beta_sigmoid:
        per_N_rr *= beta * (1.0 - (0.5 * beta if F.neg_eigval else beta))
    mine = (lower & (token < length))[:, None] & (column == token[:, None])
    gl.store(dbeta_ptr + token[:, None] * HV + column * 0, (DN * per_N_rr[:, None]).to(dbeta_ptr.dtype.element_ty), mask=mine)
    factor = gl.where(lower, -1.0, scale)
    if not F.l2norm:
        factor = gl.where(token < length, factor / gl.load(norms_ptr + row), 0.0)
        key = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
        DN = DN * gl.where(key < length, 1.0 / gl.load(norms_ptr + 32 + key), 0.0)[None, :]
    DN = gl.where(column < (token + 1 - lower.to(gl.int32))[:, None], DN * factor[:, None], 0.0)
    W: gl.constexpr = gl.num_warps()
    peaks = gl.max(gl.max(gl.max(gl.abs(DN).reshape([4, 2, 8, W // 4, 16 // W, 4, 2]), 6), 4), 1).permute((0, 2, 1, 3))
    peaks = peaks.reshape([4, W // 4, 32])  # a number of each thread
    if not F.any:
        least = gl.max(gl.max(gl.max(gl.abs(least).reshape([W // 4, 4, 2, 8, 4, 4, 2]), 6), 4), 2).permute((1, 0, 2, 3))
        peaks = gl.maximum(peaks, gl.convert_layout(least.reshape([4, W // 4, 32]), peaks.type.layout, assert_trivial=True) * 2.0**-10)
    buf.peaks.store(gl.max(peaks.to(gl.int32, bitcast=True), 2))  # a warp finds the largest of integers in one instruction
    gl.thread_barrier()  # and other tiles may come into r's place
    peaks = gl.max(gl.max(buf.peaks.load(whole_layout(W)), 1), 0)
    bits = gl.maximum(peaks, 0x21800000) & 0x7F800000  # at least 2^-60
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
def decays(gate, slope, offset, factor, shift, L: gl.constexpr, F: gl.constexpr):
    """x [K, 32] from the gate's tile, and log2 of the chunk's decay [K]"""
    s = token_decay(gate, slope, offset, factor, L, F)
    last = gl.sum(s, 1)
    G = sums_from_first(s)
    if F.any:
        return ex2(hold(G, -2.0 * shift) + shift), last
    else:
        return ex2(G * factor + shift), last * factor


@gluon.jit
def divide_by_decay(buf, nq, nk, up, L: gl.constexpr):
    """Leave qx and kx in the places of q and k; ky in bf16"""
    q = buf.q.permute((1, 0)).load(L)
    k = buf.k.permute((1, 0)).load(L)
    gl.thread_barrier()  # one for both tiles, in whose places others come
    buf.q.permute((1, 0)).store(to_bf16(widen(q) * nq[None, :] * up))
    k = widen(k) * nk[None, :]
    buf.k.permute((1, 0)).store(to_bf16(k * up))
    return to_bf16(k * inverse(up))


@gluon.jit
def over_size(sum_q, read, written, per_size, last, norms, length, scale, shift, L: gl.constexpr, F: gl.constexpr):
    """The state's parts of dq and dk over size and the factor of their tile, x or y; without one of a written key where it is kept apart"""
    K: gl.constexpr = F.K
    unit = ex2(-shift)
    for_q, for_read = unit * scale, -unit
    if gl.minimum(gl.abs(for_q), unit) * per_size >= 2.0**-126:
        sum_q *= for_q * per_size
        read *= for_read * per_size
    else:  # per_size first: the factors' own products leave fp32's range
        sum_q = sum_q * per_size * for_q
        read = read * per_size * for_read
    if F.any:
        written = gl.zeros([K, 32], gl.float32, L)
    else:
        written = written * per_size * ex2(last + shift)[:, None]
    if not F.l2norm:
        token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
        per_q = gl.where(token < length, 1.0 / gl.load(norms + token), 0.0)[None, :]
        per_k = gl.where(token < length, 1.0 / gl.load(norms + 32 + token), 0.0)[None, :]
        sum_q *= per_q
        read *= per_k
    return sum_q, read, written


@gluon.jit
def add_pairs(buf, sum_q, read, written, ky, L: gl.constexpr):
    """The three sums [K, 32], (6), with their pairs"""
    dZ = buf.pairs.slice(0, 32, dim=0)
    dA = buf.pairs.slice(32, 32, dim=0)
    left = gl.convert_layout(ky, gl.DotOperandLayout(0, L, 2))
    sum_q = warpgroup_mma(left, dZ.permute((1, 0)), sum_q, is_async=True)
    read = warpgroup_mma(left, dA.permute((1, 0)), read, is_async=True)
    written = warpgroup_mma(buf.q.permute((1, 0)), dZ, written, is_async=True)
    written = warpgroup_mma(buf.k.permute((1, 0)), dA, written, is_async=True)
    return warpgroup_mma_wait(0, deps=(sum_q, read, written))


@gluon.jit(
    do_not_specialize=[
        "steps", "tokens", "sequences", "per_sequence", "sequences_shift", "groups", "beta_row", "HV", "heads", "heads_shift", "group",
        "group_shift",
    ],
    do_not_specialize_on_alignment=["beta_ptr"],
)  # fmt: skip
def fused_gradients_kernel(
    q_desc, k_desc, g_desc, do_desc, dv_desc, h_desc, dh_desc, r_desc, kg_desc,  # as Sources
    dq_desc, dk_desc, dg_desc,  # [R, HV*K], boxes [32, K]
    dq_ptr, dk_ptr, dg_ptr,  # the same memory; dq, dk in fp32 where their heads are added afterwards
    beta_ptr,  # [R, HV], row stride beta_row
    A_log_ptr, dt_bias_ptr,  # [HV], [HV, K] or None
    norms_ptr, cut_ptr,  # [NC, HV, 2, 32] fp32, [NC, HV] int32 or None: as backward_prepare.py
    pairs_ptr, size_ptr,  # [NC, HV, 2, 32, 32] bf16, [NC, HV] fp32: what chunks that are cut leave, or None
    dbeta_ptr,  # [R, HV]
    dA_log_ptr, ddt_bias_ptr,  # [NC, HV, K / 16], [NC, HV, K] fp32 partial sums, or None
    decay_ptr,  # [NC, HV, K] fp32, or None: as kg_desc
    flags_ptr,  # [N, HV, announcers, groups] int32, or None
    chunks_ptr,  # [NC, 4] int32
    beta_row, HV, heads, heads_shift, group, group_shift, scale, lower_bound, shift,
    steps, tokens, sequences, per_sequence, sequences_shift, groups,  # of a fixed batch: as `walked` takes them; its length; its flags
    F: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    K: gl.constexpr = F.K
    L: gl.constexpr = group_layout(32, num_warps)
    src = Sources(q_desc, k_desc, g_desc, do_desc, dv_desc, h_desc, dh_desc, r_desc, kg_desc)
    buf = make_buffers(src, F)
    channel = gl.arange(0, K, layout=gl.SliceLayout(1, L))
    token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    zero = gl.zeros([K, 32], gl.float32, L)
    zero_pairs = gl.zeros([64, 32], gl.float32, pair_layout(num_warps))
    entry = gl.program_id(0)
    chunk = quotient(entry, (heads, heads_shift))
    head = entry - chunk * HV
    if F.beside:
        sequence, met, chunk = walked(chunk, steps, (sequences, per_sequence, sequences_shift), True)
        entry = chunk * HV + head
        flags_ptr += (sequence * HV + head) * F.announcers * groups + met // GROUP
        before = (steps - 1 - met) * 32  # not read from a table: nothing else begins before it is known
        first, length = sequence * tokens + before, gl.minimum(tokens - before, 32)
        odd = before % 64 > 0
        state = (sequence * ((steps + 1) // 2) + before // 64) * HV + head
    else:
        first, length = bounds(chunks_ptr, chunk)
        odd = False
        state = entry
    A_log, bias = load_gate(A_log_ptr, dt_bias_ptr, head, channel, F)
    norms = norms_ptr + entry.to(gl.int64) * 64
    if length > 0:
        nq = gl.load(norms + token)
        nk = gl.load(norms + 32 + token)
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, pair_layout(num_warps)))
        beta_ptr += first.to(gl.int64) * beta_row + head
        beta, floor = load_beta(beta_ptr + row % 32 * beta_row, (row >= 32) & (row % 32 < length), F)
        at = first.to(gl.int64) * HV + head
        tiles = entry, state, first, head, (group, group_shift)
        bring_tiles(src, buf, tiles, odd, HV, decay_ptr, flags_ptr, groups, F)
        rate, bias, slope, offset, factor = gate_constants(A_log, bias, lower_bound, F)
        buf.bias.store(bias)
        buf.norms[0].store(nq)
        buf.norms[1].store(nk)

        mbarrier.wait(buf.landed[1], 0)
        if length < 32:
            clear_rows(buf.g, length, 0.0 if F.gate == "none" else DEAD)
            gl.thread_barrier()
        up, last = decays(buf.g, slope, offset, factor, shift, L, F)
        mbarrier.wait(buf.landed[3], 0)
        mbarrier.wait(buf.landed[4], 0)
        if length < 32:
            clear_rows(buf.q, length, 0.0)
            clear_rows(buf.k, length, 0.0)
            gl.thread_barrier()
        ky = divide_by_decay(buf, nq, nk, up, L)

        mbarrier.wait(buf.landed[0], 0)
        mbarrier.wait(buf.landed[2], 0)
        for n in gl.static_range(5, 8):
            mbarrier.wait(buf.landed[n], 0)
        if length < 32:
            clear_rows(buf.dd, length, 0.0)
            fence_async_shared()
            gl.thread_barrier()
        rho = state_products(buf.h, buf.dh, K, L)
        DN = warpgroup_mma(buf.dd, buf.r, zero_pairs, use_acc=False, is_async=True)
        written = warpgroup_mma(buf.dh.permute((1, 0)), buf.r, zero, use_acc=False, is_async=True)
        DN, written = warpgroup_mma_wait(0, deps=(DN, written))
        late = None
        cut = 32
        if F.any:
            gl.thread_barrier()  # other tiles may come into dh's place
            cut = gl.load(cut_ptr + entry)
            late = pairs_ptr + entry.to(gl.int64) * 2048, size_ptr + entry
            rho = keep_state_part(written, ky, up, last, rho, cut, norms, length, slope, offset, factor, buf, F)
        else:
            if not F.l2norm:
                written *= gl.where(token < length, 1.0 / gl.load(norms + 32 + token), 0.0)[None, :]
        size, per_size = score_gradients(DN, written, buf, beta, floor, dbeta_ptr + at, norms, late, cut, length, HV, scale, F)
        both = gl.zeros([K, 64], gl.float32, group_layout(64, num_warps))  # in one product h is read once
        both = warpgroup_mma(buf.h.permute((1, 0)), buf.dd.permute((1, 0)), both, use_acc=False, is_async=True)
        both = warpgroup_mma_wait(0, deps=(both,))
        sum_q, read = gl.split(both.reshape([K, 2, 32]).permute((0, 2, 1)))
        sum_q, read = gl.convert_layout(sum_q, L, assert_trivial=True), gl.convert_layout(read, L, assert_trivial=True)
        fence_async_shared()
        gl.thread_barrier()  # other tiles may come into the places of h, do, dv, too

        # Gradients over size and the tile's factor: dq = up sum_q, dk = up read + down written.
        # 2^G = up 2^-shift, 2^(G_C - G) = down 2^(G_C + shift).
        sum_q, read, written = over_size(sum_q, read, written, per_size, last, norms, length, scale, shift, L, F)
        if not F.any:
            rho = ex2(last) * rho + gl.sum(widen(ky) * written, 1) * size
        sum_q, read, written = add_pairs(buf, sum_q, read, written, ky, L)

        dG = widen(buf.q.permute((1, 0)).load(L)) * sum_q
        along_q = dG
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
            both_sums(buf.sums, along_q, by_reading + lost)
        dg = sums_from_last(dG)
        if F.l2norm:
            sum_q, dk = without_norms(buf, sum_q, dk, ky, up, L)
        dq = sum_q * (buf.norms[0].load(gl.SliceLayout(0, L)) * size)[None, :]
        dk *= (buf.norms[1].load(gl.SliceLayout(0, L)) * size)[None, :]
        store_tiles((dq, dk), (dq_desc, dk_desc), (dq_ptr, dk_ptr), (buf.dq, buf.dk), first, length, head, HV, K)

        if F.gate == "bounded":
            dg = dg * (size * (lower_bound * rate)) + (rho * (lower_bound * rate))[:, None]
        else:
            dg = dg * size + rho[:, None]
            if F.any:
                dg += buf.kept.index(1).load(L)
            dg = gl.where((token < length)[None, :], dg, 0.0)
        bias = buf.bias.load(gl.SliceLayout(1, L))
        dg, total, to_A_log = gate_chain(dg, buf.g, slope, bias * slope, rate, bias, L, F)
        if dA_log_ptr is not None:
            W: gl.constexpr = K // 16
            of_warps = gl.sum(to_A_log.reshape([W, 16]), 1)
            gl.store(dA_log_ptr + entry.to(gl.int64) * W + gl.arange(0, W, layout=of_warps.type.layout), of_warps)
        if ddt_bias_ptr is not None:
            gl.store(ddt_bias_ptr + entry.to(gl.int64) * K + channel, total)
        store_tiles((dg,), (dg_desc,), (dg_ptr,), (buf.dg,), first, length, head, HV, K)
        tma.store_wait(0)
    if F.beside:
        end_with_neighbour()


(
    Q, K_, G, DO, DV, H, DH, R, DQ, DK, DG, BETA, A_LOG, DT_BIAS, NORMS, CUTS, PAIRS, SIZE, DBETA, DA_LOG, DDT_BIAS, KG, DECAY, FLAGS,
    CHUNKS,
) = range(25)  # fmt: skip


def launch(
    p: Problem, NC: int, strides: tuple[int, ...], dtypes: tuple[torch.dtype | None, torch.dtype | None], groups: int
) -> Launch:  # fmt: skip
    """Operands by the numbers above. strides: elements between rows of q, k, g, do, beta; dtypes of A_log and dt_bias, None: absent;
    groups: flags of a block of the walk that runs beside, 0: none does"""
    K, V, HV, tiles = p.K, p.V, p.HV, NC * p.HV
    states = p.B * -(-NC // (2 * p.B)) * HV if groups else tiles
    gate, of_heads, fp32 = p.gate_dtype, torch.float32 if p.group > 1 else p.dtype, torch.float32
    optional = lambda there, operand, dtype: Pointer(operand, dtype) if there else None
    of_A_log, of_bias = (dtype is not None for dtype in dtypes)
    args = (
        of_tokens(Q, p.dtype, p, p.H * K, K, strides[0]), of_tokens(K_, p.dtype, p, p.H * K, K, strides[1]),
        of_tokens(G, gate, p, HV * K, K, strides[2]),
        of_tokens(DO, p.dtype, p, HV * V, V, strides[3]), of_tokens(DV, p.dtype, p, HV * V, V),
        of_chunks(H, p.dtype, states, V, K), of_chunks(DH, p.dtype, tiles, V, K), of_chunks(R, p.dtype, tiles, V, C),
        of_chunks(KG, p.dtype, tiles, C, K) if groups else None,
        of_tokens(DQ, of_heads, p, HV * K, K), of_tokens(DK, of_heads, p, HV * K, K), of_tokens(DG, gate, p, HV * K, K),
        Pointer(DQ, of_heads), Pointer(DK, of_heads), Pointer(DG, gate), Pointer(BETA, p.beta_dtype),
        optional(of_A_log, A_LOG, dtypes[0]), optional(of_bias, DT_BIAS, dtypes[1]), Pointer(NORMS, fp32),
        optional(not p.bounded, CUTS, torch.int32), optional(not p.bounded, PAIRS, p.dtype), optional(not p.bounded, SIZE, fp32),
        Pointer(DBETA, p.beta_dtype), optional(of_A_log, DA_LOG, fp32), optional(of_bias, DDT_BIAS, fp32),
        optional(groups, DECAY, fp32), optional(groups, FLAGS, torch.int32), Pointer(CHUNKS, torch.int32), strides[4], HV, *divider(HV),
        *divider(p.group), float(p.scale), float(p.lower_bound or 0.0), half_span(p), NC // p.B, p.T, p.B, *divider(p.B), groups,
    )  # fmt: skip
    constants = (form(p, beside=groups > 0, announcers=p.V // walk_rows(p) if groups else 1),)
    warps, registers = min(WARPS, K // 16), 1024 // WARPS
    return Launch(full_name(fused_gradients_kernel), (tiles, 1, 1), args, constants, warps, pdl=groups > 0, registers=registers)


def fused_gradients(
    problem: Problem, plan: Plan, inputs: Inputs, p: Prepared, do: torch.Tensor, h: torch.Tensor, dh: torch.Tensor, r: torch.Tensor,
    dv: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dg: torch.Tensor, dbeta: torch.Tensor, flags: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Write dq, dk (per value head), dg [B, T, HV, K] and dbeta [B, T, HV]; return the terms of A_log's [NC, HV, K / 16] and dt_bias's
    [NC, HV, K] gradient in fp32 (None if absent), to be added in one order: no atomics. Then, for fused_levels, what chunks that are cut
    left: dZ, dA [NC, HV, 2, C, C] over size, and size [NC, HV, 1] fp32 (None without cut).

    Args: do, dv [B, T, HV, V]; h, dh, r from both_scans; flags (backward_follow.state_flags): those of the reverse walk that was launched
    just before, beside which this runs (fixed batches), and h is that of every second chunk."""
    HV, K, NC, device, cut = problem.HV, problem.K, plan.num_chunks, do.device, p.cut
    partial = lambda present, *n: torch.empty(NC, HV, *n, dtype=torch.float32, device=device) if present else None
    dA_log, ddt_bias = partial(problem.has_A_log, K // 16), partial(problem.has_dt_bias, K)
    pairs = size = None
    if cut is not None:
        pairs, size = torch.empty(NC, HV, 2, C, C, dtype=problem.dtype, device=device), torch.empty(NC, HV, 1, device=device)
    if NC and problem.T:  # a batch of empty sequences has chunks of no rows
        rows, strides = zip(*map(packed_rows, (inputs.q, inputs.k, inputs.g, do)))
        beta = as_rows(inputs.beta)
        parameters = [None if x is None else dense(x) for x in (inputs.A_log, inputs.dt_bias)]
        dtypes = tuple(None if x is None else x.dtype for x in parameters)
        key = (problem, NC, (*strides, beta.stride(0)), dtypes, 0 if flags is None else flags.shape[-1])
        sums = (dbeta, dA_log, ddt_bias)
        of_walk = (None, None, None) if flags is None else (p.kg, p.decay, flags)
        operands = (*rows, dv, h, dh, r, dq, dk, dg, beta, *parameters, p.norms, cut, pairs, size, *sums, *of_walk, plan.chunks)
        start(launch, key, operands, device)
    return dA_log, ddt_bias, pairs, size
