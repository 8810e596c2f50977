"""Exact parallelism over the sequence for both scans of the backward (docs/backward.md): the states at which segments begin.

A sequence is cut into segments as in the forward (segments.py: the table). Both scans are affine in the state, about the same M:

    forward    S  -> S  M + b          M = product over the segment's chunks of Diag(decay) + w^T kg, from the first   [K, K]
    reverse    dS -> dS M^T + b'       b, b': what the scan makes of a zero state                                      [V, K]

so one matrix serves both directions: `entry[s + 1] = entry[s] M_s + b_s` and `exit[s - 1] = exit[s] M_s^T + b'_s` chain the segments.

    tails       M of the last and of the first `tail` chunks of every segment. Where every |M| is at most 2^-DROP_BITS, what a state before
                those chunks adds is below half an ulp of what fp32 keeps, and `tail` chunks from zero give the state behind them.
    summaries   b, b' and M of segments, at most `tail` chunks of them where that is enough; M only between two unknown states
    combine     the two chains, 16 rows of V a program, up to the last unknown state

Grids (row block, head, segment), combine (row block, head, sequence). Nothing depends on what the host knows of gates, keys or beta, and
nothing is accumulated atomically. The carried M is fp32 and its operands are rounded to bf16 like the state's, so its error is of the
state's own kind; stored, it is a sum of two bf16 matrices."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from openkda.hopper.backward_prepare import C, Prepared
from openkda.hopper.backward_steps import forward_steps, locate, map_steps, reverse_steps, state_offsets
from openkda.hopper.config import STEP
from openkda.hopper.launch import TABLE, TABLE_ROWS, dense, fixed_tables
from openkda.hopper.runtime import launch, on_device
from openkda.hopper.segments import COLUMNS, table_kernel
from openkda.plan import Plan
from openkda.problem import Inputs, Problem

BLOCK = 64  # rows of a block, of V or of M
DROP_BITS = tl.constexpr(40.0)  # chunks whose M has no entry above 2^-DROP_BITS drop what lies before them
ROWS = 16  # rows of V in a chain
STAGES = 3  # chunks in flight: two blocks share a multiprocessor


class Table(NamedTuple):
    """How sequences are cut (segments.py)."""

    segments: torch.Tensor  # [NS, 8] int32
    whole: torch.Tensor  # [N, 8] int32
    inner: int  # no segment of a cut sequence lies past the first so many,
    cut: int  # no cut sequence past the first so many of `whole`


def segment_table(problem: Problem, inputs: Inputs, steps: int) -> Table:
    """The table of a call; steps: of a segment at most, 0 for sequences that are not cut."""
    p, device = problem, inputs.q.device
    target = steps or max(1, p.T)
    if not p.varlen:
        rows = on_device(torch.tensor(fixed_tables(p.B, p.T, target), dtype=torch.int32).view(-1, TABLE), device)
        NS = len(rows) - p.B
        return Table(rows[:NS], rows[NS:], NS, p.B)
    fits = max(1, p.T // (STEP * target))  # no more sequences have more than `target` steps, and no more cuts are made
    NS = p.N + (fits if steps and p.N else 0)
    segments, whole = (torch.empty(rows, TABLE, dtype=torch.int32, device=device) for rows in (NS, p.N))
    if p.N:
        grid = (-(-p.N // TABLE_ROWS), 1, 1)
        launch(table_kernel, grid, (dense(inputs.cu_seqlens), segments, whole, None), (p.N, p.T, target, NS, 0, 1, 0), (TABLE_ROWS, 0))
    return Table(segments, whole, min(NS, 2 * fits), min(p.N, fits))


@triton.jit
def largest(reach_ptr, way, s, h, NS, HV, K: tl.constexpr, BK: tl.constexpr):
    """Largest |M| of tails: way 0 the last chunks of segments s (one or many), 1 the first."""
    at = reach_ptr + ((way * NS + s).to(tl.int64) * HV + h) * (K // BK)
    reach = tl.load(at)
    for i in tl.static_range(1, K // BK):
        reach = tl.maximum(reach, tl.load(at + i))
    return reach


@triton.jit(do_not_specialize=["HV", "NS", "tail"])
def tails_kernel(
    w_ptr, kg_ptr, decay_ptr,  # as Prepared
    reach_ptr,  # [2, NS, HV, K / BK] fp32: largest |M| of BK rows
    segments_ptr, sequences_ptr, HV, NS, tail,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    s = tl.program_id(2)
    n, _, _, chunk, count, is_first, is_last = locate(segments_ptr, sequences_ptr, s, C)
    way = block // (K // BK)
    if (n < 0) | ((way == 0) & is_last) | ((way == 1) & is_first):
        return
    steps = tl.minimum(tail, count)
    chunk += tl.where(way == 0, count - steps, 0)
    kk = block % (K // BK) * BK + tl.arange(0, BK)
    M = map_steps(w_ptr, kg_ptr, decay_ptr, chunk, steps, h, kk, HV, K, C, STAGES)
    at = reach_ptr + ((way * NS + s).to(tl.int64) * HV + h) * (K // BK) + block % (K // BK)
    tl.store(at, tl.max(tl.max(tl.abs(M), 1), 0))


@triton.jit(do_not_specialize=["v_eights", "do_eights", "HV", "NS", "tail"])
def summaries_kernel(
    Aqk_ptr, T_ptr, w_ptr, kg_ptr, qg_ptr, decay_ptr,  # as Prepared
    v_ptr, do_ptr,  # [R, HV, V], rows 8 v_eights and 8 do_eights elements apart
    S0_ptr, dS_final_ptr,  # [N, HV, K, V] or None
    entry_ptr, exit_ptr,  # [NS, HV, V, K] fp32: b_s goes to entry[s + 1], b'_s to exit[s - 1]
    M_ptr,  # [NS, HV, 2, 2, K, K] bf16: M, then its transpose; each rounded, and what the rounding took
    reach_ptr,  # [2, NS, HV, K / BV] fp32
    segments_ptr, sequences_ptr, v_eights, do_eights, HV, NS, tail,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    s = tl.program_id(2)
    n, first, length, chunk, count, is_first, is_last = locate(segments_ptr, sequences_ptr, s, C)
    if (n < 0) | (is_first & is_last):
        return
    forgets = 2.0**-(DROP_BITS)
    kk = tl.arange(0, K)
    if block < V // BV:
        if not is_first:
            vv = block * BV + tl.arange(0, BV)
            steps = tl.where(largest(reach_ptr, 1, s, h, NS, HV, K, BV) <= forgets, tl.minimum(tail, count), count)
            dS = tl.zeros([BV, K], tl.float32)
            if dS_final_ptr is not None:
                state = dS_final_ptr + state_offsets(n, h, vv, kk, HV, K, V, V_FIRST)
                dS = tl.load(state, mask=is_last & (steps == count), other=0.0).to(tl.float32)
            dS = reverse_steps(
                dS, Aqk_ptr, T_ptr, w_ptr, kg_ptr, qg_ptr, decay_ptr, do_ptr, 8 * do_eights, None, None, None, first, length, chunk,
                steps, h, vv, HV, K, V, C, BV, STAGES,
            )  # fmt: skip
            tl.store(exit_ptr + ((s - 1).to(tl.int64) * HV + h) * (K * V) + vv[:, None] * K + kk[None, :], dS)
        return
    block -= V // BV
    if TOKENS:
        if block < V // BV:
            if not is_last:
                vv = block * BV + tl.arange(0, BV)
                steps = tl.where(largest(reach_ptr, 0, s, h, NS, HV, K, BV) <= forgets, tl.minimum(tail, count), count)
                S = tl.zeros([BV, K], tl.float32)
                if S0_ptr is not None:
                    state = S0_ptr + state_offsets(n, h, vv, kk, HV, K, V, V_FIRST)
                    S = tl.load(state, mask=is_first & (steps == count), other=0.0).to(tl.float32)
                skip = count - steps
                S = forward_steps(
                    S, T_ptr, w_ptr, kg_ptr, decay_ptr, v_ptr, 8 * v_eights, None, None, first + skip * C, length - skip * C, chunk + skip,
                    steps, h, vv, HV, K, V, C, BV, STAGES,
                )  # fmt: skip
                tl.store(entry_ptr + ((s + 1).to(tl.int64) * HV + h) * (K * V) + vv[:, None] * K + kk[None, :], S)
            return
        block -= V // BV
    if is_first | is_last:
        return
    reach = largest(reach_ptr, 1, s, h, NS, HV, K, BV)
    if TOKENS:
        reach = tl.maximum(reach, largest(reach_ptr, 0, s, h, NS, HV, K, BV))
    if reach > forgets:
        rows = block * BV + tl.arange(0, BV)
        M = map_steps(w_ptr, kg_ptr, decay_ptr, chunk, count, h, rows, HV, K, C, STAGES)
        high = M.to(tl.bfloat16)
        low = (M - high.to(tl.float32)).to(tl.bfloat16)
        at = M_ptr + (s.to(tl.int64) * HV + h) * (4 * K * K)
        tile = rows[:, None] * K + kk[None, :]
        tl.store(at + tile, high)
        tl.store(at + K * K + tile, low)
        tile = kk[:, None] * K + rows[None, :]
        tl.store(at + 2 * K * K + tile, tl.trans(high))
        tl.store(at + 3 * K * K + tile, tl.trans(low))


@triton.jit(do_not_specialize=["HV", "NS"])
def combine_kernel(
    entry_ptr, exit_ptr, M_ptr, reach_ptr, whole_ptr, HV, NS,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """entry[s + 1] += entry[s] M_s over the inner segments of a sequence where it is not known, or exit[s - 1] += exit[s] M_s^T from the
    last, for ROWS rows of V. M and the state are sums of two bf16 matrices: three products, in fp32 sums."""
    h = tl.program_id(1).to(tl.int64)
    row = whole_ptr + tl.program_id(2) * COLUMNS
    count = tl.load(row + 6)
    way = tl.where(tl.program_id(0) < V // ROWS, 1, 0)
    step = 1 - 2 * way
    start = tl.load(row + 5) + tl.where(way == 1, count - 2, 1)
    state_ptr = entry_ptr
    if way == 1:
        state_ptr = exit_ptr
    forgets = 2.0**-(DROP_BITS)
    links = 0  # up to the last state that is not known
    for base in range(0, count - 2, 64):
        j = tl.minimum(base + tl.arange(0, 64), count - 3)
        links = tl.maximum(links, tl.max(tl.where(largest(reach_ptr, way, start + step * j, h, NS, HV, K, BK) <= forgets, 0, j + 1), 0))
    if links > 0:
        kk = tl.arange(0, K)
        tile = (tl.program_id(0) % (V // ROWS) * ROWS + tl.arange(0, ROWS))[:, None] * K + kk[None, :]
        square = way * (2 * K * K) + kk[:, None] * K + kk[None, :]
        S = tl.load(state_ptr + (start.to(tl.int64) * HV + h) * (K * V) + tile)
        for j in tl.range(0, links, num_stages=3):
            at = (start + step * j).to(tl.int64) * HV + h
            after = state_ptr + (at + step * HV) * (K * V) + tile
            b = tl.load(after)
            high = tl.load(M_ptr + at * (4 * K * K) + square)
            low = tl.load(M_ptr + at * (4 * K * K) + K * K + square)
            known = largest(reach_ptr, way, start + step * j, h, NS, HV, K, BK) <= forgets
            S_high = S.to(tl.bfloat16)
            S_low = (S - S_high.to(tl.float32)).to(tl.bfloat16)
            S = tl.where(known, b, tl.dot(S_high, high, tl.dot(S_low, high, tl.dot(S_high, low, b))))
            tl.store(after, S)


def segment_states(
    problem: Problem, plan: Plan, table: Table, tail: int, p: Prepared, v: torch.Tensor, v_row: int, S0: torch.Tensor | None,
    do: torch.Tensor, do_row: int, dfinal_state: torch.Tensor | None, tokens: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The states at which the scans of segments begin, where that is no end of a sequence.

    Args: v, do as rows [R, HV, V] with their strides; S0, dfinal_state contiguous (problem.state_shape) or None for zero; tail: chunks to
    try; tokens: the forward's states too.
    Returns: entry states (never read without tokens), gradients of exit states, both [table.inner, HV, V, K] fp32."""
    HV, K, V, NS, directions = problem.HV, problem.K, problem.V, table.inner, 2 if tokens else 1
    new = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device=v.device)
    exit_ = new(NS, HV, V, K)
    entry = new(NS, HV, V, K) if tokens else exit_
    M, reach = new(NS, HV, 2, 2, K, K, dtype=torch.bfloat16), new(2, NS, HV, K // BLOCK)
    tables = (table.segments, plan.sequences)
    operands = (p.w, p.kg, p.decay, reach, *tables)
    launch(tails_kernel, (2 * K // BLOCK, HV, NS), operands, (HV, NS, tail), (K, C, BLOCK, STAGES))
    operands = (*p[:6], v, do, S0, dfinal_state, entry, exit_, M, reach, *tables)
    grid = ((directions * V + K) // BLOCK, HV, NS)
    launch(
        summaries_kernel, grid, operands, (v_row // 8, do_row // 8, HV, NS, tail), (K, V, C, BLOCK, problem.state_v_first, tokens, STAGES)
    )
    grid = (directions * V // ROWS, HV, table.cut)
    launch(combine_kernel, grid, (entry, exit_, M, reach, table.whole), (HV, NS), (K, V, BLOCK, ROWS))
    return entry, exit_
