"""The tiles of backward_prepare.py in Gluon, for devices (docs/backward.md).

    S = (qx; kx) ky^T      Aqk = scale tril(S_q)      A = -beta tril(S_k, -1)      X = (I - A)^-1      T = X Diag(beta)
    w = -2^-shift T kx     kg = 2^(G_C + shift) ky    qg = scale 2^-shift qx       decay = 2^G_C

X from its blocks of 16: X = (X_1, 0; X_2 A_21 X_1, X_2), X_1 and X_2 by doubling (blocks.py), all with bf16 operands; then a step of
Newton's, X <- X + X (I - (I - A) X), with A in two parts: keys that nearly repeat make an inverse of alternating numbers, which a rounded A
alone moves by a tenth.

Grid (chunk times head,), heads first; 4 warps, four blocks a multiprocessor. Tiles stand transposed in registers, channels by tokens, as in
backward_fused.py: 32 channels a warp, sums over tokens inside four threads, all tiles moved by the copy engine and the matrix loads.
Norms are diagonals of Gram matrices on the matrix unit. qx, kx take the place of q, k; qg that of the gate; w that of ky.

Gates without a bound: see backward_prepare.py. A second launch, compiled for `levels`, ends at once where a chunk is not cut, else writes
kg, and Aqk, T and w of the rows from the cut on. Each level's pairs are a product of its own; its factor is multiplied into q and k in
place.

Beside a walk that waits for its tiles (`beside`), blocks take chunks in the walk's order and raise a flag each (backward_follow.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from openkda.hopper.backward_follow import LINE, await_progress, end_with_neighbour, raise_flag, stores_complete, walked
from openkda.hopper.backward_prepare import C, Prepared, half_span
from openkda.hopper.backward_tiles import (
    DEAD,
    bounds,
    clear_rows,
    divider,
    form,
    gate_constants,
    hold,
    inverse,
    level_factor,
    load_beta,
    load_gate,
    of_chunks,
    of_tokens,
    sums_from_first,
    to_bf16,
    token_decay,
    widen,
)
from openkda.hopper.blocks import both_operands, invert, places
from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, mma_v2, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.launch import dense, packed_rows
from openkda.hopper.runtime import Launch, Pointer, full_name, start
from openkda.hopper.tiles import block_layout, ex2, group_layout, plain_shared, rsqrt, tile_layout
from openkda.plan import Plan
from openkda.portable.tile import as_rows
from openkda.problem import Inputs, Problem

WARPS = 4
REGISTERS = 128  # a thread: four blocks a multiprocessor
LEVEL_REGISTERS = 168  # three


class Maps(NamedTuple):
    """Tensor maps"""

    q: object  # [R, H*K], boxes [32, K]
    k: object
    g: object  # [R, HV*K]
    w: object  # [NC*HV*32, K], boxes [32, K]
    kg: object
    qg: object
    Aqk: object  # [NC*HV*32, 32], boxes [32, 32]


class Buffers(NamedTuple):
    """Shared memory"""

    qk: object  # [64, K] q, k, then qx, kx
    g: object  # [32, K], in the gate's dtype
    qg: object  # [32, K] in its bytes
    ky: object  # [32, K], then w
    kg: object  # [32, K]
    pairs: object  # [64, 32] Aqk, A
    A: object  # [32, 32], in their bytes
    X: object  # [32, 32] the first inverse, in the bytes of ky
    error: object  # [32, 32] I - (I - A) X, behind it
    rest: object  # [64, 32] what the rounding of pairs took, in the bytes of qx
    high: object  # [32, 32] then what w is multiplied with: rounded,
    low: object  # and what the rounding took
    norms: object  # [4, 16] fp32: of the rows of qk
    inputs: object  # barrier: q, k, g have landed


@gluon.constexpr_function
def row_blocks(K):
    """[4, 16, K] view of a tile [64, K] of `tile_layout`: groups of 16 rows"""
    columns = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    rows = [[0, 1, 8], [0, 2, 16], [0, 4, 32], [0, 8, 0], [1, 0, 0], [2, 0, 0]]
    return gl.SharedLinearLayout(columns + rows + [[0, 0, 64]] * (K // 128), [], 1024)


@gluon.constexpr_function
def quarters():
    """[4, 16, 16] view of a tile [32, 32] with rows of 64 bytes: block 2 c + r has rows 16 r and columns 16 c"""
    bases = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [2, 0, 0], [0, 1, 0], [0, 2, 8], [2, 4, 0], [0, 8, 0], [1, 0, 0]]
    return gl.SharedLinearLayout(bases, [], 1024)


@gluon.jit
def make_buffers(src, F: gl.constexpr):
    K: gl.constexpr = F.K
    dtype: gl.constexpr = src.q.dtype
    bits: gl.constexpr = src.g.dtype.primitive_bitwidth
    qk = gl.allocate_shared_memory(dtype, [64, K], tile_layout(16))
    g = gl.allocate_shared_memory(src.g.dtype, [32, K], tile_layout(bits))
    qg = g._reinterpret(dtype, [2 * bits, K], tile_layout(16)).slice(0, 32, dim=0)
    ky = gl.allocate_shared_memory(dtype, [32, K], tile_layout(16))
    kg = gl.allocate_shared_memory(dtype, [32, K], tile_layout(16))
    both = gl.allocate_shared_memory(dtype, [2, 32, 32], tile_layout(16, 64))
    parts = qk._reinterpret(dtype, [K // 16, 32, 32], tile_layout(16, 64))
    squares = ky._reinterpret(dtype, [K // 32, 32, 32], tile_layout(16, 64))
    norms = gl.allocate_shared_memory(gl.float32, [4, 16], plain_shared(2))
    inputs = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(inputs, count=1)
    pairs = both._reinterpret(dtype, [64, 32], tile_layout(16, 64))
    A = both.index(1)
    rest = qk._reinterpret(dtype, [K // 32, 64, 32], tile_layout(16, 64)).index(0)
    return Buffers(qk, g, qg, ky, kg, pairs, A, squares.index(0), squares.index(1), rest, parts.index(0), parts.index(1), norms, inputs)


@gluon.jit
def activated_beta(ptr, token, stride, live, F: gl.constexpr):
    """beta of the rows `token`, after the sigmoid; 0 on rows past the end"""
    _, beta = load_beta(ptr + token * stride, live, F)
    return gl.where(live, beta, 0.0)


@gluon.jit
def row_norms(buf, length, F: gl.constexpr):
    """1 / |x| of the rows of q and k as [4, 16]: 0 past the end"""
    mma: gl.constexpr = block_layout(gl.num_warps())
    tile = buf.qk._reinterpret(buf.qk.dtype, [4, 16, F.K], row_blocks(F.K))
    i, j = places()
    gram = gl.zeros([4, 16, 16], gl.float32, mma)
    for c in gl.static_range(F.K // 32):
        x, xt = both_operands(tile, 0, c)
        gram = mma_v2(x, xt, gram)
    n = rsqrt(gl.sum(gl.where(i == j, gram, 0.0), axis=2) + (1e-6 if F.l2norm else 2.0**-40))
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None]
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :]
    n = gl.where(b % 2 * 16 + i < length, n, 0.0)
    return n, b * 16 + i


@gluon.jit
def first_inverse(buf):
    """(I - A)^-1 into buf.X from buf.A, all operands rounded"""
    mma: gl.constexpr = block_layout(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    A = buf.A._reinterpret(buf.A.dtype, [4, 16, 16], quarters())
    tiles = buf.X._reinterpret(buf.X.dtype, [4, 16, 16], quarters())
    X, _ = invert(A.load(mma).to(gl.float32), buf.X.dtype)
    tiles.store(to_bf16(X))
    zero = gl.zeros([1, 16, 16], gl.float32, mma)
    A_21 = A.slice(1, 1, dim=0).load(right)  # every warp computes X_2 A_21 X_1
    Y = mma_v2(tiles.slice(3, 1, dim=0).load(left), A_21, zero)
    below = mma_v2(gl.convert_layout(to_bf16(Y), left), tiles.slice(0, 1, dim=0).load(right), zero)
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
    tiles.store(to_bf16(gl.where(b == 1, below, gl.where(b == 2, 0.0, X))))


@gluon.constexpr_function
def square_layout():
    """[32, 32] accumulators, a quarter a warp"""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8])


@gluon.jit
def inverse_of(buf, rows, columns):
    """(I - A)^-1 [32, 32] in fp32 from A, rounded in buf.A and the rest in buf.low; rows, columns: its places"""
    L: gl.constexpr = square_layout()
    left: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    first_inverse(buf)
    X = widen(buf.X.load(L))
    column = buf.X.load(right)
    error = mma_v2(buf.low.load(left), column, gl.where(rows == columns, 1.0, 0.0) - X)
    error = mma_v2(buf.A.load(left), column, error)
    buf.error.store(to_bf16(error))
    return mma_v2(buf.X.load(left), buf.error.load(right), X)


@gluon.jit
def level_products(buf, G, nq, nk, L: gl.constexpr):
    """(q; k) k^T [64, 32] of normalised rows with their decay, by levels; the diagonal as it is"""
    S = gl.zeros([64, 32], gl.float32, L)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None] % 32
    i = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :]
    q = buf.qk.slice(0, 32, dim=0).permute((1, 0))
    k = buf.qk.slice(32, 32, dim=0).permute((1, 0))
    query = q.load(L)
    key = k.load(L)
    for n in range(6):
        level = gl.maximum(n - 1, 0)
        x = gl.where(n == 0, 1.0, level_factor(G, level))
        pairs = ((r >> level) == (i >> level) + 1) & ((r >> (level + 1)) == (i >> (level + 1)))
        pairs = ((n == 0) & (r == i)) | ((n > 0) & pairs)
        q.store(to_bf16(widen(query) * (x * nq[None, :])))
        k.store(to_bf16(widen(key) * (x * nk[None, :])))
        fence_async_shared()
        gl.thread_barrier()
        products = warpgroup_mma(buf.qk, k, gl.zeros([64, 32], gl.float32, L), use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, deps=(products,))
        S = gl.where(pairs, products, S)
        gl.thread_barrier()
    k.store(key)
    return S


@gluon.jit
def request(maps, buf, first, head, group, F: gl.constexpr):
    """q, k and g of a chunk on their way"""
    mbarrier.expect(buf.inputs, maps.q.block_type.nbytes + maps.k.block_type.nbytes + maps.g.block_type.nbytes)
    tma.async_copy_global_to_shared(maps.g, [first, head * F.K], buf.inputs, buf.g)
    tma.async_copy_global_to_shared(maps.q, [first, head // group * F.K], buf.inputs, buf.qk.slice(0, 32, dim=0))
    tma.async_copy_global_to_shared(maps.k, [first, head // group * F.K], buf.inputs, buf.qk.slice(32, 32, dim=0))


@gluon.jit
def decayed_tiles(buf, up, nq, nk, scale, shift, length, F: gl.constexpr, L: gl.constexpr):
    """qx, qg, kx and ky into their places; ky in fp32 [K, 32]. up: 2^(G + shift)"""
    q = buf.qk.slice(0, 32, dim=0).permute((1, 0))
    k = buf.qk.slice(32, 32, dim=0).permute((1, 0))
    query = widen(q.load(L)) * nq[None, :] * up
    q.store(to_bf16(query))
    query *= scale * ex2(-shift)
    if not F.l2norm:
        token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
        query *= gl.where(token < length, 1.0 / nq, 0.0)[None, :]
    buf.qg.permute((1, 0)).store(to_bf16(query))
    key = widen(k.load(L)) * nk[None, :]
    k.store(to_bf16(key * up))
    key *= inverse(up)
    buf.ky.permute((1, 0)).store(to_bf16(key))
    return key


@gluon.jit
def times_keys(buf, T, F: gl.constexpr, L: gl.constexpr):
    """kx^T T^T [K, 32] of T [32, 32], fp32 in two parts; all other use of qx is over"""
    K: gl.constexpr = F.K
    high = to_bf16(T)
    buf.high.store(high)
    buf.low.store(to_bf16(T - widen(high)))
    fence_async_shared()
    gl.thread_barrier()
    k = buf.qk.slice(32, 32, dim=0).permute((1, 0))
    w = warpgroup_mma(k, buf.high.permute((1, 0)), gl.zeros([K, 32], gl.float32, L), use_acc=False, is_async=True)
    w = warpgroup_mma(k, buf.low.permute((1, 0)), w, is_async=True)
    return warpgroup_mma_wait(0, deps=(w,))


@gluon.jit(
    do_not_specialize=["steps", "sequences", "per_sequence", "sequences_shift", "beta_row", "HV", "group"],
    do_not_specialize_on_alignment=["beta_ptr"],
)
def prepare_operands_kernel(
    q_desc, k_desc, g_desc, w_desc, kg_desc, qg_desc, Aqk_desc,  # as Maps
    Aqk_ptr, T_ptr, w_ptr, decay_ptr, norms_ptr, cut_ptr,  # as Prepared
    beta_ptr,  # [R, HV], row stride beta_row
    A_log_ptr, dt_bias_ptr,  # [HV], [HV, K] or None
    flags_ptr,  # as `tile_flags` says, or None
    chunks_ptr,  # [NC, 4] int32
    beta_row, HV, group, scale, lower_bound, shift,
    steps, sequences, per_sequence, sequences_shift,  # of a fixed batch: as `walked` takes them
    F: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    K: gl.constexpr = F.K
    L: gl.constexpr = group_layout(32, num_warps)
    square: gl.constexpr = square_layout()
    maps = Maps(q_desc, k_desc, g_desc, w_desc, kg_desc, qg_desc, Aqk_desc)
    buf = make_buffers(maps, F)
    entry = gl.program_id(0)
    head = entry % HV
    chunk = entry // HV
    if F.beside:
        sequence, met, chunk = walked(chunk, steps, (sequences, per_sequence, sequences_shift), False)
        entry = chunk * HV + head
        await_progress(flags_ptr + HV * (steps * sequences) + (head * sequences + sequence) * LINE, met)
    first, length = bounds(chunks_ptr, chunk)
    cut = 0
    if F.levels:
        cut = gl.load(cut_ptr + entry)
        length = gl.where(cut < 32, length, 0)
    if length > 0:
        request(maps, buf, first, head, group, F)
        channel = gl.arange(0, K, layout=gl.SliceLayout(1, L))
        token = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
        _, _, slope, offset, factor = gate_constants(*load_gate(A_log_ptr, dt_bias_ptr, head, channel, F), lower_bound, F)
        beta_ptr += first.to(gl.int64) * beta_row + head
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
        beta_rows = activated_beta(beta_ptr, row % 32, beta_row, (row >= 32) & (row % 32 < length), F)
        i = gl.arange(0, 32, layout=gl.SliceLayout(1, square))[:, None]
        column = gl.arange(0, 32, layout=gl.SliceLayout(0, square))[None, :]
        beta_columns = activated_beta(beta_ptr, column, beta_row, column < length, F)
        norms_ptr += entry.to(gl.int64) * 64

        mbarrier.wait(buf.inputs, 0)
        if length < 32:
            clear_rows(buf.qk, length, 0.0)
            clear_rows(buf.g, length, 0.0 if F.gate == "none" else DEAD)
        norms, place = row_norms(buf, length, F)
        buf.norms.store(norms)
        if not F.levels:
            gl.store(norms_ptr + place, norms)
        s = token_decay(buf.g, slope, offset, factor, L, F)
        last = gl.sum(s, 1)
        G = sums_from_first(s)
        if F.any:
            low = -2.0 * shift
            if not F.levels:
                rows = gl.sum(gl.where(low > G, 0, 1), 1)  # of each channel before it leaves the span
                gl.store(cut_ptr + entry, gl.min(rows, 0))
            up = ex2(hold(G, low) + shift)
        else:
            last *= factor
            up = ex2(G * factor + shift)
        if not F.levels:
            gl.store(decay_ptr + entry.to(gl.int64) * K + channel, ex2(last))
        flat = buf.norms._reinterpret(gl.float32, [64], plain_shared(1))
        nq = flat.slice(0, 32, dim=0).load(gl.SliceLayout(0, L))
        nk = flat.slice(32, 32, dim=0).load(gl.SliceLayout(0, L))
        k = buf.qk.slice(32, 32, dim=0).permute((1, 0))
        if F.levels:
            S = level_products(buf, G, nq, nk, L)
            key = widen(k.load(L)) * nk[None, :]
            k.store(to_bf16(key * up))
            key *= ex2(last[:, None] - G)
        else:
            key = decayed_tiles(buf, up, nq, nk, scale, shift, length, F, L) * ex2(last + shift)[:, None]
        if not F.l2norm:
            key *= gl.where(token < length, 1.0 / nk, 0.0)[None, :]
        buf.kg.permute((1, 0)).store(to_bf16(key))
        fence_async_shared()
        gl.thread_barrier()
        if not F.levels:
            tma.async_copy_shared_to_global(maps.qg, [entry * 32, 0], buf.qg)
            zero = gl.zeros([64, 32], gl.float32, L)
            S = warpgroup_mma(buf.qk, buf.ky.permute((1, 0)), zero, use_acc=False, is_async=True)
            S = warpgroup_mma_wait(0, deps=(S,))
        tma.async_copy_shared_to_global(maps.kg, [entry * 32, 0], buf.kg)
        lower = row >= 32
        row_factor = gl.where(lower, -beta_rows, scale)
        if not F.l2norm:
            row_factor = gl.where(row % 32 < length, row_factor / flat.load(gl.SliceLayout(1, L)), 0.0)
            S *= gl.where(token < length, 1.0 / nk, 0.0)[None, :]
        S = gl.where(token[None, :] < (row % 32 + 1 - lower.to(gl.int32))[:, None], S * row_factor[:, None], 0.0)
        rounded = to_bf16(S)
        buf.pairs.store(rounded)
        fence_async_shared()
        gl.thread_barrier()
        buf.rest.store(to_bf16(S - widen(rounded)))
        if F.levels:
            at = Aqk_ptr + entry.to(gl.int64) * 1024 + row[:, None] * 32 + token[None, :]
            gl.store(at, to_bf16(S), mask=((row >= cut) & (row < 32))[:, None])
        else:
            tma.async_copy_shared_to_global(maps.Aqk, [entry * 32, 0], buf.pairs.slice(0, 32, dim=0))

        T = inverse_of(buf, i, column) * beta_columns
        high = to_bf16(T)
        at = T_ptr + entry.to(gl.int64) * 2048 + i * 32 + column
        mask = (i >= cut) & (column >= 0)
        gl.store(at, high, mask=mask)
        gl.store(at + 1024, to_bf16(T - widen(high)), mask=mask)
        half = -ex2(-0.5 * shift)  # of the factor 2^-shift; not all of it, so that a small beta stays a normal number
        T *= half
        if not F.l2norm:
            T *= gl.where(column < length, 1.0 / gl.load(norms_ptr + 32 + column), 0.0)
        w = to_bf16(times_keys(buf, T, F, L) * -half)
        if F.levels:
            gl.store(w_ptr + (entry.to(gl.int64) * 32 + token[None, :]) * K + channel[:, None], w, mask=(token >= cut)[None, :])
        else:
            buf.ky.permute((1, 0)).store(w)
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(maps.w, [entry * 32, 0], buf.ky)
        if flags_ptr is not None:
            stores_complete()
            raise_flag(flags_ptr + head * (steps * sequences) + chunk)
        else:
            tma.store_wait(0)
    if F.beside:
        end_with_neighbour()


Q, K_, G, W, KG, QG, AQK, T_, DECAY, NORMS, CUTS, BETA, A_LOG, DT_BIAS, FLAGS, CHUNKS = range(16)  # the operands


def launch(
    p: Problem, NC: int, strides: tuple[int, ...], dtypes: tuple[torch.dtype | None, torch.dtype | None], levels: bool, beside: bool
) -> Launch:  # fmt: skip
    """strides: elements between rows of q, k, g, beta; dtypes of A_log and dt_bias, None: absent; beside: the walk before"""
    K, HV, tiles = p.K, p.HV, NC * p.HV
    args = (
        of_tokens(Q, p.dtype, p, p.H * K, K, strides[0]), of_tokens(K_, p.dtype, p, p.H * K, K, strides[1]),
        of_tokens(G, p.gate_dtype, p, HV * K, K, strides[2]), *(of_chunks(x, p.dtype, tiles, C, K) for x in (W, KG, QG)),
        of_chunks(AQK, p.dtype, tiles, C, C), *(Pointer(x, p.dtype) for x in (AQK, T_, W)), Pointer(DECAY, torch.float32),
        Pointer(NORMS, torch.float32), None if p.bounded else Pointer(CUTS, torch.int32), Pointer(BETA, p.beta_dtype),
        *(None if dtype is None else Pointer(x, dtype) for x, dtype in zip((A_LOG, DT_BIAS), dtypes)),
        Pointer(FLAGS, torch.int32) if beside else None, Pointer(CHUNKS, torch.int32), strides[3], HV, p.group, float(p.scale),
        float(p.lower_bound or 0.0), half_span(p), NC // p.B, p.B, *divider(p.B),
    )  # fmt: skip
    registers = LEVEL_REGISTERS if levels else REGISTERS
    constants = (form(p, levels, beside),)
    return Launch(full_name(prepare_operands_kernel), (tiles, 1, 1), args, constants, WARPS, pdl=beside, registers=registers)


def empty_operands(problem: Problem, plan: Plan, device: torch.device) -> Prepared:
    """Memory for the tiles"""
    HV, K, NC, dtype = problem.HV, problem.K, plan.num_chunks, problem.dtype
    new = lambda *shape, dtype=dtype: torch.empty(NC, HV, *shape, dtype=dtype, device=device)
    decay, norms = new(K, dtype=torch.float32), new(2, C, dtype=torch.float32)
    cut = None if problem.bounded else new(dtype=torch.int32)
    return Prepared(new(C, C), new(2, C, C), new(C, K), new(C, K), new(C, K), decay, norms, cut)


def prepare_operands(
    problem: Problem, plan: Plan, inputs: Inputs, p: Prepared | None = None, flags: torch.Tensor | None = None
) -> Prepared:  # fmt: skip
    """As prepare_chunks.

    Args: p: memory for the tiles, if not new; flags [HV, NC] int32: raised chunk by chunk for a walk that runs beside (fixed batches and
    bounded gates)."""
    NC, device = plan.num_chunks, inputs.q.device
    p = p or empty_operands(problem, plan, device)
    if NC and problem.T:
        rows, strides = zip(*map(packed_rows, (inputs.q, inputs.k, inputs.g)))
        beta = as_rows(inputs.beta)
        parameters = [None if x is None else dense(x) for x in (inputs.A_log, inputs.dt_bias)]
        key = (problem, NC, (*strides, beta.stride(0)), tuple(None if x is None else x.dtype for x in parameters))
        operands = (*rows, p.w, p.kg, p.qg, p.Aqk, p.T, p.decay, p.norms, p.cut, beta, *parameters, flags, plan.chunks)
        for levels in (False,) if problem.bounded else (False, True):
            start(launch, (*key, levels, flags is not None), operands, device)
    return p
