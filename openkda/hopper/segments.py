"""Exact parallelism over the sequence: the segment table, how far back a segment must start, and the chain of entry states.

A sequence is cut into segments of nearly equal numbers of 32-token steps, by lengths alone. `segment table [NS, 8] int32`, one row each:

    sequence (-1: unused row), first row, end row, sequence's first row, sequence's end row, sequence's first segment, its segment count, 0

Warm-up: `warm [HV, NS] int32` holds, per head and segment, after how many steps before its first row the state may start from 0, or -1.
For normalised keys and beta in [0, 2] one token maps the state by (I - beta k k^T) Diag(exp(g)), whose norm is at most the largest
channel's decay (channels mix through k k^T, so their own sums prove nothing). The product over tokens of that largest decay bounds what is
dropped: at most 2^-DROP_BITS of the norm of the state that is dropped, where fp32 keeps 2^-25 of the norm of what is stored.
A row of `warm` depends on earlier tokens only.

Summaries: where a segment needs its true entry state, every segment before it gives (M, b) with exit state = entry state M + b (scan.py),
and `combine_kernel` chains them."""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.hopper.compat import gdc_launch_dependents, gdc_wait, gl, gluon
from openkda.hopper.decay import activate, gate_line
from openkda.hopper.tiles import Source, Work, to_f32

DROP_BITS = tl.constexpr(40.0)
COLUMNS = tl.constexpr(8)  # of the segment table


@triton.jit(do_not_specialize=["N", "T", "target", "NS"])
def table_kernel(cu_ptr, segments_ptr, whole_ptr, N, T, target, NS, BN: tl.constexpr, BS: tl.constexpr):
    """Segment tables of a ragged batch: `segments` [NS, 8] with at most `target` steps a segment, `whole` [N, 8] one segment a sequence.

    cu_ptr [N + 1] int32 or int64. Grid (ceil(max(NS, N) / BS),): a program writes BS rows of both."""
    s = tl.program_id(0) * BS + tl.arange(0, BS)
    sequence = tl.zeros([BS], tl.int32)
    before = tl.zeros([BS], tl.int32)
    total = 0
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        lo = tl.minimum(tl.load(cu_ptr + n, mask=n < N, other=0), T).to(tl.int32)
        hi = tl.minimum(tl.load(cu_ptr + n + 1, mask=n < N, other=0), T).to(tl.int32)
        count = tl.where(n < N, tl.maximum(((hi - lo + 31) // 32 + target - 1) // target, 1), 0)
        after = total + tl.cumsum(count, 0)
        passed = after[None, :] <= s[:, None]  # [BS, BN]
        sequence += tl.sum((passed & (n < N)[None, :]).to(tl.int32), 1)
        before += tl.sum(tl.where(passed, count[None, :], 0), 1)
        total += tl.sum(count, 0)
        own = n[None, :] == s[:, None]  # rows of `whole`: sequence s
        mine = s < N
        seg0 = tl.sum(tl.where(own, (after - count)[None, :], 0), 1)
        cnt = tl.sum(tl.where(own, count[None, :], 0), 1)
        here = mine & (s >= n0) & (s < n0 + BN)
        low = tl.sum(tl.where(own, lo[None, :], 0), 1)
        high = tl.maximum(tl.sum(tl.where(own, hi[None, :], 0), 1), low)
        _store_row(whole_ptr, s, here, s, low, high, low, high, seg0, cnt)
    used = (sequence < N) & (s < NS)
    lo = tl.minimum(tl.load(cu_ptr + sequence, mask=used, other=0), T).to(tl.int32)
    hi = tl.maximum(tl.minimum(tl.load(cu_ptr + sequence + 1, mask=used, other=0), T).to(tl.int32), lo)
    steps = (hi - lo + 31) // 32
    count = tl.maximum((steps + target - 1) // target, 1)
    i = s - before
    begin = tl.minimum(lo + 32 * (i * steps // count), hi)
    end = tl.minimum(lo + 32 * ((i + 1) * steps // count), hi)
    _store_row(segments_ptr, s, s < NS, tl.where(used, sequence, -1), begin, end, lo, hi, before, count)


@triton.jit
def _store_row(ptr, s, mask, sequence, begin, end, first, stop, segment, count):
    row = ptr + s * COLUMNS
    tl.store(row, sequence, mask=mask)
    tl.store(row + 1, begin, mask=mask)
    tl.store(row + 2, end, mask=mask)
    tl.store(row + 3, first, mask=mask)
    tl.store(row + 4, stop, mask=mask)
    tl.store(row + 5, segment, mask=mask)
    tl.store(row + 6, count, mask=mask)


@gluon.jit
def all_warm(warm, first, count):
    """1 where every segment of [first, first + count) may start from 0 after its warm-up; warm is this head's row"""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    low = first * 0
    for j in range(0, count, 128):
        s = j + gl.arange(0, 128, layout=L)
        w = gl.load(warm + first + s, mask=s < count, other=0)
        low = gl.minimum(low, gl.min(w, 0))
    return (low >= 0).to(gl.int32)


@gluon.jit
def locate(segments_ptr, warm_ptr, segment, head, group, row0, NS, T: gl.constexpr):
    """The work of one block. T.split says what the block serves:

    none          the segment, which is a whole sequence
    segments      the segment, from its warm-up or its entry state
    segments_all  the segment after its warm-up, if every segment of the sequence has one; `whole` serves the other sequences
    whole         the sequence, if not every segment of it has a warm-up
    summary       the segment's (M, b), if the next segment needs its entry state"""
    row = segments_ptr + segment * COLUMNS
    sequence = gl.load(row)
    begin = gl.load(row + 1)
    end = gl.load(row + 2)
    first = gl.load(row + 3)
    is_last = (end == gl.load(row + 4)).to(gl.int32)
    active = (sequence >= 0).to(gl.int32)
    start = begin
    needs_entry = 0
    if T.split != "none":
        warm = warm_ptr + head * NS
        if T.split == "segments_all" or T.split == "whole":
            every = all_warm(warm, gl.load(row + 5), gl.load(row + 6))
            active = active * (every if T.split == "segments_all" else 1 - every)
        if T.split == "summary":
            active = active * (1 - is_last)
            if active != 0:
                active = (gl.load(warm + segment + 1) < 0).to(gl.int32)
        if T.split != "whole":
            if active != 0:
                steps = gl.load(warm + segment)
                start = begin - 32 * gl.maximum(steps, 0)
                needs_entry = (steps < 0).to(gl.int32)
    live = active != 0
    steps = gl.where(live, (end - start + 31) // 32, 0)
    from_initial = live & (start == first)
    from_entry = live & (needs_entry != 0)
    return Work(sequence, start, begin, end, steps, head, head // group, row0, from_initial, from_entry, live & (is_last != 0))


@gluon.jit(do_not_specialize=["HV", "NS", "limit"])
def decide_kernel(
    g_ptr, A_log_ptr, dt_bias_ptr, warm_ptr, segments_ptr, HV, NS, limit, g_stride, lower_bound, T: gl.constexpr, num_warps: gl.constexpr
):
    """warm[head, segment]: the fewest steps before the segment over which the bound falls below 2^-DROP_BITS, or that reach the sequence's
    first token; -1 beyond `limit` steps. Grid (NS, HV), 4 warps, four steps a turn. The activations rise or fall with their argument, so
    the slowest channel of a token is found before the activation."""
    segment = gl.program_id(0)
    head = gl.program_id(1)
    K: gl.constexpr = T.K
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    L4: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    if T.pdl:
        gdc_launch_dependents()
    row = segments_ptr + segment * COLUMNS
    begin = gl.load(row + 1)
    first = gl.load(row + 3)
    none: gl.constexpr = None
    src = Source(none, none, none, none, none, A_log_ptr, dt_bias_ptr, HV, lower_bound, 0.0)
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
    slope, offset, factor = gate_line(src, head, channel, T)
    token = gl.arange(0, 128, layout=gl.SliceLayout(1, L))[:, None]
    step = gl.arange(0, 4, layout=gl.SliceLayout(1, L4))
    nearer = gl.arange(0, 4, layout=gl.SliceLayout(0, L4))[None, :] >= 3 - step[:, None]
    bits = 0.0
    found = gl.where(begin == first, 0, -1)
    turns = gl.where(begin == first, 0, limit // 4)
    for turn in range(turns):
        if found < 0 and bits * (limit // 4) <= -DROP_BITS * turn / 2:
            base = begin - 128 * (turn + 1)
            at = (base.to(gl.int64) + token) * g_stride + head * K + channel
            gate = gl.load(g_ptr + at, mask=base + token >= first, other=0.0)
            x = to_f32(gate) * slope + offset
            slowest = gl.min(x, axis=1) if T.gate == "softplus" else gl.max(x, axis=1)  # [128]
            decay = activate(slowest, factor, T)
            per_step = gl.convert_layout(gl.sum(decay.reshape([4, 32]), axis=1), gl.SliceLayout(0, L4))  # in token order
            total = bits + gl.sum(gl.where(nearer, per_step[None, :], 0.0), axis=1)
            back = begin - 32 * (4 * turn + step + 1)  # first row of the step
            hit = ((total <= -DROP_BITS) & (back >= first)) | (back == first)
            steps = gl.min(gl.where(hit, 4 * turn + step + 1, 1 << 30), 0)
            found = gl.where(steps < (1 << 30), steps, found)
            bits = bits + gl.sum(per_step, 0)
    gl.store(warm_ptr + head * NS + segment, found)


@triton.jit(do_not_specialize=["HV", "NS"])
def combine_kernel(
    summary_ptr, entry_ptr, warm_ptr, whole_ptr, HV, NS, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Entry states: entry[s + 1] = entry[s] M_s + b_s over the segments of a sequence, for ROWS rows of V; a segment with a warm-up
    contributes b_s alone. Stops at the last segment that needs its entry state. Grid (N, HV, V / ROWS)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = whole_ptr + tl.program_id(0) * COLUMNS
    head = tl.program_id(1)
    s0 = tl.load(row + 5)
    count = tl.load(row + 6)
    warm = warm_ptr + head * NS + s0
    end = 0
    for j in range(0, count, 128):
        s = j + tl.arange(0, 128)
        w = tl.load(warm + s, mask=s < count, other=0)
        end = tl.maximum(end, tl.max(tl.where(w < 0, s, 0), 0))
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, K)
    S = tl.zeros([ROWS, K], tl.float32)
    for j in tl.range(0, end, num_stages=3):
        base = summary_ptr + ((s0 + j).to(tl.int64) * HV + head) * (K * V + K * K)
        b = tl.load(base + r * K + k[None, :])
        M = tl.load(base + K * V + k[:, None] * K + k[None, :])
        S = tl.where(tl.load(warm + j) < 0, S, 0.0)
        S = tl.dot(S, M, b, input_precision="tf32x3")
        tl.store(entry_ptr + ((s0 + j + 1).to(tl.int64) * HV + head) * (K * V) + r * K + k[None, :], S)
