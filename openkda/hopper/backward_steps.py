"""The steps of the backward's two scans over chunks, shared by the scans (backward_scan.py) and what cuts them (backward_segments.py).

States are transposed, [rows of V, K], fp32 accumulators (docs/backward.md, (1) and (4)); what flows through a row needs no other row:

    forward, from the first chunk      r = v T^T + S w^T                 S = S Diag(decay) + r kg               (w is negative)
    reverse, from the last             dr = do Aqk + dS kg^T             dS = dS Diag(decay) + do qg + dr w      dv = dr T

with v, do, r, dr transposed too, [rows of V, C]. An accumulator then turns into the next product's left operand without leaving its
registers; the right operands are the tiles of backward_prepare.py as they lie in shared memory, and v and do are transposed by the matrix
unit."""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.hopper.instructions import rounded
from openkda.hopper.segments import COLUMNS
from openkda.portable.backward_inputs import store_channels
from openkda.portable.tile import load_tile


@triton.jit
def locate(segments_ptr, sequences_ptr, s, C: tl.constexpr):
    """A row of the segment table: (sequence, -1 for an unused row; first row; number of rows; first chunk; number of chunks; whether it is
    its sequence's first and last segment)."""
    row = segments_ptr + s * COLUMNS
    n = tl.load(row).to(tl.int64)
    begin = tl.load(row + 1)
    end = tl.load(row + 2)
    first = tl.load(row + 3)
    chunk = tl.load(sequences_ptr + tl.maximum(n, 0) * 4 + 2).to(tl.int64) + (begin - first) // C
    return n, begin.to(tl.int64), end - begin, chunk, (end - begin + C - 1) // C, begin == first, end == tl.load(row + 4)


@triton.jit
def state_offsets(n, h, vv, kk, HV, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Offsets [rows of V, K] into a state [N, HV, K, V], or [N, HV, V, K] when V_FIRST."""
    base = (n * HV + h) * (K * V)
    if V_FIRST:
        return base + vv[:, None] * K + kk[None, :]
    else:
        return base + kk[None, :] * V + vv[:, None]


@triton.jit
def load_first(ptr, entry, C: tl.constexpr, D: tl.constexpr):
    """The first [C, D] of two tiles, the second of which is its transpose"""
    return tl.load(ptr + entry * (2 * C * D) + tl.arange(0, C)[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def load_transposed(ptr, n, C: tl.constexpr, D: tl.constexpr):
    """The tile [C, D] whose transpose is number n at ptr"""
    rows = tl.arange(0, C)
    cols = tl.arange(0, D)
    ptr += n * (C * D)
    return tl.trans(tl.load(ptr + cols[:, None] * C + rows[None, :]))


@triton.jit
def load_keys(w_ptr, kg_ptr, entry, tile, C: tl.constexpr, K: tl.constexpr):
    """(w, kg) [C, K] of a chunk as the forward's products take them; fp32 tiles come in pairs, each beside its transpose"""
    if w_ptr.dtype.element_ty == tl.float32:
        w = load_first(w_ptr, entry, C, K)
        kg = load_transposed(kg_ptr, 2 * entry + 1, C, K)
    else:
        w = tl.load(w_ptr + entry * (C * K) + tile)
        kg = tl.load(kg_ptr + entry * (C * K) + tile)
    return w, kg


@triton.jit
def forward_steps(
    S, T_ptr, w_ptr, kg_ptr, decay_ptr, v_ptr, v_row, h_ptr, r_ptr, first, length, chunk, count, h, vv, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The state after `count` chunks from S. Writes every chunk's entry state and r where asked for."""
    rows = tl.arange(0, C)
    kk = tl.arange(0, K)
    tile = rows[:, None] * K + kk[None, :]
    square = rows[:, None] * C + rows[None, :]
    for c in tl.range(0, count, num_stages=STAGES):
        entry = (chunk + c) * HV + h
        v = load_tile(v_ptr + (first + c * C) * v_row + h * V, rows, v_row, vv, rows < length - c * C, V, BV)
        T = tl.load(T_ptr + entry * (2 * C * C) + square)
        rest = tl.load(T_ptr + entry * (2 * C * C) + C * C + square)
        w, kg = load_keys(w_ptr, kg_ptr, entry, tile, C, K)
        decay = tl.load(decay_ptr + entry * K + kk)
        Sb = rounded(S, w.dtype)
        if h_ptr is not None:
            tl.store(h_ptr + entry * (K * V) + vv[:, None] * K + kk[None, :], Sb)
        r = tl.dot(tl.trans(v.to(w.dtype)), tl.trans(rest), acc=tl.dot(tl.trans(v.to(w.dtype)), tl.trans(T)))
        r = rounded(tl.dot(Sb, tl.trans(w), acc=r), w.dtype)
        if r_ptr is not None:
            tl.store(r_ptr + entry * (C * V) + vv[:, None] * C + rows[None, :], r)
        S = tl.dot(r, kg, acc=S * decay[None, :])
    return S


@triton.jit
def reverse_steps(
    dS, Aqk_ptr, T_ptr, w_ptr, kg_ptr, qg_ptr, decay_ptr, do_ptr, do_row, dh_ptr, dr_ptr, dv_ptr, first, length, chunk, count, h,
    vv, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of the state before `count` chunks from that of the state after them. Writes the gradient of every chunk's exit state,
    dr and dv where asked for."""
    rows = tl.arange(0, C)
    kk = tl.arange(0, K)
    tile = rows[:, None] * K + kk[None, :]
    square = rows[:, None] * C + rows[None, :]
    for back in tl.range(0, count, num_stages=STAGES):
        c = count - 1 - back
        entry = (chunk + c) * HV + h
        do = load_tile(do_ptr + (first + c * C) * do_row + h * V, rows, do_row, vv, rows < length - c * C, V, BV)
        if w_ptr.dtype.element_ty == tl.float32:
            Aqk = load_transposed(Aqk_ptr, entry, C, C)
            kg = load_first(kg_ptr, entry, C, K)
            qg = load_transposed(qg_ptr, entry, C, K)
            w = load_transposed(w_ptr, 2 * entry + 1, C, K)
        else:
            Aqk = tl.load(Aqk_ptr + entry * (C * C) + square)
            kg = tl.load(kg_ptr + entry * (C * K) + tile)
            qg = tl.load(qg_ptr + entry * (C * K) + tile)
            w = tl.load(w_ptr + entry * (C * K) + tile)
        decay = tl.load(decay_ptr + entry * K + kk)
        dSb = rounded(dS, w.dtype)
        if dh_ptr is not None:
            tl.store(dh_ptr + entry * (K * V) + vv[:, None] * K + kk[None, :], dSb)
        dr = tl.dot(tl.trans(do.to(w.dtype)), Aqk)
        dr = rounded(tl.dot(dSb, tl.trans(kg), acc=dr), w.dtype)
        if dr_ptr is not None:
            tl.store(dr_ptr + entry * (C * V) + vv[:, None] * C + rows[None, :], dr)
        if dv_ptr is not None:
            T = tl.load(T_ptr + entry * (2 * C * C) + square)
            rest = tl.load(T_ptr + entry * (2 * C * C) + C * C + square)
            dv = tl.dot(dr, rest, acc=tl.dot(dr, T))
            store_channels(dv_ptr + ((first + c * C) * HV + h) * V, dv, rows, HV * V, vv, rows < length - c * C, V, BV)
        dS = tl.dot(tl.trans(do.to(w.dtype)), qg, acc=dS * decay[None, :])
        dS = tl.dot(dr, w, acc=dS)
    return dS


@triton.jit
def map_steps(w_ptr, kg_ptr, decay_ptr, chunk, count, h, rows, HV, K: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr):
    """`rows` of the matrix M [K, K] that takes a state S over `count` chunks to S M."""
    tile = tl.arange(0, C)[:, None] * K + tl.arange(0, K)[None, :]
    M = tl.where(rows[:, None] == tl.arange(0, K)[None, :], 1.0, 0.0)
    for c in tl.range(0, count, num_stages=STAGES):
        entry = (chunk + c) * HV + h
        w, kg = load_keys(w_ptr, kg_ptr, entry, tile, C, K)
        decay = tl.load(decay_ptr + entry * K + tl.arange(0, K))
        r = rounded(tl.dot(rounded(M, w.dtype), tl.trans(w)), w.dtype)
        M = tl.dot(r, kg, acc=M * decay[None, :])
    return M
