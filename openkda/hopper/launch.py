"""Host side of the Hopper forward: tensor views, segment tables, one workspace, and the launches of a `Config`.

No host-device synchronisation; nothing is allocated besides o, final_state and one workspace. Tables of fixed batches are cached."""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from openkda.hopper import prefill, segments
from openkda.hopper.config import BLOCK, STEP, Config, Tiles
from openkda.hopper.runtime import Box, launch
from openkda.problem import Inputs, Problem

TABLE = 8  # columns of the segment table


def matrix(x: torch.Tensor, box_rows: int, box_columns: int) -> Box:
    """x [B, T, H, D] as a matrix [B*T, H*D]: in place where the copy engine can read it (heads packed, rows evenly spaced, 16-byte
    aligned), else a contiguous copy."""
    B, T, H, D = x.shape
    step = H * D
    if not x.is_contiguous() or x.data_ptr() % 16:
        step = x.stride(1) if T > 1 else x.stride(0) if B > 1 else step
        packed = x.stride(3) == 1 and (H == 1 or x.stride(2) == D) and (B == 1 or T == 1 or x.stride(0) == T * step)
        if not (packed and step >= H * D and step * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0):
            x = x.clone(memory_format=torch.contiguous_format)
            step = H * D
    return Box(x, B * T, H * D, step, box_rows, box_columns)


def fixed_rows(B: int, T: int, target: int) -> list[list[int]]:
    """Segment table of B sequences of T tokens, at most `target` steps a segment, as Python integers (see segments.py)."""
    steps = -(-T // STEP)
    count = max(1, -(-steps // target))
    cut = lambda b, i: min(b * T + STEP * (i * steps // count), (b + 1) * T)
    return [[b, cut(b, i), cut(b, i + 1), b * T, (b + 1) * T, b * count, count, 0] for b in range(B) for i in range(count)]


@lru_cache(maxsize=256)
def fixed_tables(B: int, T: int, target: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(segments [NS, 8], whole [B, 8]) int32 of a fixed batch"""
    split = fixed_rows(B, T, target)
    whole = [[b, b * T, (b + 1) * T, b * T, (b + 1) * T, b * (len(split) // B), len(split) // B, 0] for b in range(B)]
    return tuple(torch.tensor(rows, dtype=torch.int32).to(device) for rows in (split, whole))


def ragged_tables(cu: torch.Tensor, T: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(segments [NS, 8], whole [N, 8]) int32 of a ragged batch, built on the device; NS is a bound from N and T alone"""
    N = cu.shape[0] - 1
    NS = N + T // (STEP * target)
    table = torch.empty(NS + N, TABLE, dtype=torch.int32, device=cu.device)
    args = (cu.contiguous(), table, table[NS:], N, T, target, NS)
    launch(segments.table_kernel, (-(-NS // 64), 1, 1), args, (128, 64), num_warps=4, pdl=False, device=cu.device.index)
    return table[:NS], table[NS:]


def forward(problem: Problem, inputs: Inputs, config: Config) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o [B, T, HV, V] and final_state (None unless asked for)"""
    p, x = problem, inputs
    device = x.q.device
    used = p.T if x.lengths is None else sum(x.lengths)
    ragged_end = p.varlen and (x.lengths is None or used < p.T)
    o = (torch.zeros if ragged_end else torch.empty)(p.B, p.T, p.HV, p.V, dtype=p.dtype, device=device)
    final = torch.empty(p.state_shape, dtype=p.state_dtype, device=device) if p.output_final_state else None
    if p.N == 0:
        return o, final
    if p.B * p.T == 0:
        if final is not None:
            final.copy_(x.initial_state) if x.initial_state is not None else final.zero_()
        return o, final
    target = config.steps if config.steps else max(1, p.T)
    split, whole = ragged_tables(x.cu_seqlens, p.T, target) if p.varlen else fixed_tables(p.B, p.T, target, device)
    NS, HV, K, V = split.shape[0], p.HV, p.K, p.V
    bound = p.lower_bound or 0.0
    q, k, g = matrix(x.q, BLOCK, K), matrix(x.k, BLOCK, K), matrix(x.g, STEP, K)
    v, out = matrix(x.v, STEP, V), matrix(o, BLOCK, V)
    beta = x.beta.contiguous()
    initial = None if x.initial_state is None else x.initial_state.contiguous()
    A_log, dt_bias = (None if t is None else t.contiguous() for t in (x.A_log, x.dt_bias))

    run = partial(launch, device=device.index)

    def run_forward(tiles: Tiles, table: torch.Tensor, entry: torch.Tensor | None, known: torch.Tensor | None) -> None:
        R = tiles.R
        args = (
            q, k, v._replace(box_columns=R), g, out._replace(box_columns=R), o, beta, A_log, dt_bias, initial, final, entry, known, table,
            HV, p.group, NS, bound, p.scale,
        )  # fmt: skip
        run(prefill.forward_kernel, (table.shape[0], HV, V // R), args, (tiles,), num_warps=tiles.scan_warps, pdl=tiles.pdl)

    if not config.steps:
        run_forward(config.forward, split, None, None)
        return o, final
    state = config.state
    states = NS * HV * K * V
    chained = config.whole is None
    work = torch.empty(states * (3 if chained else 1) + NS * HV, dtype=torch.float32, device=device)
    entry, known = work[:states], work[-NS * HV :].view(torch.int32)
    summary = work[states : 3 * states] if chained else entry  # without summaries nothing is written there

    def run_state(tail: int) -> None:
        args = (k, v, g, beta, A_log, dt_bias, initial, entry, summary, known, split, HV, p.group, NS, tail, bound)
        # Never a dependent launch, so that both passes are one compiled kernel; it lets its successors start early all the same.
        run(prefill.state_kernel, (NS, HV, 1), args, (state,), num_warps=state.scan_warps, pdl=False)

    run_state(config.tail)
    if chained:
        run_state(0)
        args = (summary, entry, known, whole, HV, NS)
        run(segments.combine_kernel, (p.N, HV, V // BLOCK), args, (K, V, BLOCK, state.pdl), num_warps=8, pdl=state.pdl)
    else:
        run_forward(config.whole, whole, None, known)
    run_forward(config.forward, split, entry, known)
    return o, final
