"""Host side of the Hopper forward: tensor views, segment tables, one workspace, and the launches of a `Config`.

No host-device synchronisation; nothing is allocated besides o, final_state and one workspace. Tables of fixed batches are cached."""

from __future__ import annotations

from functools import lru_cache

import torch

from openkda.hopper import prefill, segments
from openkda.hopper.compat import TensorDescriptor, gl
from openkda.hopper.config import STEP, Config, Tiles
from openkda.problem import Inputs, Problem

TABLE = 8  # columns of the segment table


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, H, D] as rows [B*T, H*D]: a view where the copy engine can read it (heads packed, rows evenly spaced, 16-byte
    aligned), else a contiguous copy."""
    B, T, H, D = x.shape
    size = x.element_size()
    packed = x.stride(3) == 1 and (H == 1 or x.stride(2) == D) and (B == 1 or x.stride(0) == T * x.stride(1))
    if not (packed and x.stride(1) * size % 16 == 0 and x.data_ptr() % 16 == 0 and x.stride(1) >= H * D):
        x = x.contiguous()
    return x.as_strided((B * T, H * D), (x.stride(1), 1))


def box(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tensor descriptor of x [rows, columns] for boxes of [rows, columns]"""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], gl.NVMMASharedLayout(128, 8 * x.element_size(), 2))


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
    split = torch.empty(NS + N, TABLE, dtype=torch.int32, device=cu.device)
    grid = (-(-NS // 64),)
    segments.table_kernel[grid](cu, split, split[NS:], N, T, target, NS, BN=128, BS=64, num_warps=4)
    return split[:NS], split[NS:]


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
    q, k, v, g = (rows_of(t) for t in (x.q, x.k, x.v, x.g))
    beta = x.beta.contiguous()
    initial = None if x.initial_state is None else x.initial_state.contiguous()
    flat_o = o.view(p.B * p.T, p.HV * p.V)
    NS, HV = split.shape[0], p.HV
    K, V = p.K, p.V
    bound = p.lower_bound or 0.0
    k_desc, q_desc, g_desc = box(k, 16, K), box(q, 16, K), box(g, STEP, K)

    def run_forward(tiles: Tiles, table: torch.Tensor, entry: torch.Tensor | None, warm: torch.Tensor | None) -> None:
        R = tiles.R
        prefill.forward_kernel[(table.shape[0], HV, V // R)](
            q_desc, k_desc, box(v, STEP, R), g_desc, box(flat_o, 16, R), o, beta, x.A_log, x.dt_bias, initial, final, entry, warm, table,
            HV, p.group, NS, bound, p.scale, tiles, num_warps=tiles.scan_warps, launch_pdl=tiles.pdl,
        )  # fmt: skip

    if not config.steps:
        run_forward(config.forward, split, None, None)
        return o, final
    states = NS * HV * K * V if config.summary else 0
    work = torch.empty(NS * HV + states * 3, dtype=torch.float32, device=device)
    warm = work[states * 3 :].view(torch.int32)
    segments.decide_kernel[(NS, HV)](
        g, x.A_log, x.dt_bias, warm, split, HV, NS, config.warm_limit, g.stride(0), bound, config.forward, num_warps=4
    )  # fmt: skip
    if config.whole is not None:
        run_forward(config.whole, whole, None, warm)
    entry = None
    if config.summary is not None:
        entry, summary = work[:states], work[states : 3 * states]
        prefill.summary_kernel[(NS, HV)](
            k_desc, box(v, STEP, V), g_desc, beta, x.A_log, x.dt_bias, initial, summary, warm, split, HV, p.group, NS, bound,
            config.summary, num_warps=config.summary.scan_warps, launch_pdl=config.summary.pdl,
        )  # fmt: skip
        segments.combine_kernel[(p.N, HV, V // 16)](
            summary, entry, warm, whole, HV, NS, K=K, V=V, ROWS=16, PDL=config.summary.pdl, num_warps=8, launch_pdl=config.summary.pdl
        )  # fmt: skip
    run_forward(config.forward, split, entry, warm)
    return o, final
