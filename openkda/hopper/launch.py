"""Host side of the Hopper forward: a `Config` becomes a list of launches, kept by problem; a call fills in addresses.

No host-device synchronisation; nothing is allocated besides o, final_state and one workspace. Everything that does not depend on
addresses is found by one dictionary lookup, and the arguments of a call by another where memory is reused from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import chain, pairwise
from operator import or_
from typing import NamedTuple

import torch

from openkda.hopper.config import BLOCK, MULTIPROCESSORS, STEP, Config, Tiles, choose, own_tail_blocks
from openkda.hopper.runtime import Launch, Matrix, Pointer, Program, load
from openkda.problem import Inputs, Problem

FORWARD, STATE = "openkda.hopper.prefill.forward_kernel", "openkda.hopper.prefill.state_kernel"
TABLE_OF, COMBINE = "openkda.hopper.segments.table_kernel", "openkda.hopper.segments.combine_kernel"
TABLE = 8  # columns of the segment table
TABLE_ROWS = 32  # sequences of a program that makes one
Q, K_, V_, G, BETA, A_LOG, DT_BIAS, INITIAL, CU, O, FINAL, TABLES, WORK, ENTRIES = range(14)  # the operands of a call


def packed_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [B, T, H, D] as a matrix [B*T, H*D], and the elements from row to row: x itself where the copy engine can read it (heads packed,
    rows evenly spaced, 16-byte aligned), else a contiguous copy."""
    B, T, H, D = x.shape
    step = H * D
    if not x.is_contiguous() or x.data_ptr() % 16:
        step = x.stride(1) if T > 1 else x.stride(0) if B > 1 else step
        packed = x.stride(3) == 1 and (H == 1 or x.stride(2) == D) and (B == 1 or T == 1 or x.stride(0) == T * step)
        if not (packed and step >= H * D and step * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0):
            x = x.clone(memory_format=torch.contiguous_format)
            step = H * D
    return x, step


def dense(x: torch.Tensor) -> torch.Tensor:
    """x itself where it is contiguous and 16-byte aligned, else a copy"""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def fixed_rows(B: int, T: int, target: int, later: bool = False) -> list[list[int]]:
    """Segment table of B sequences of T tokens, at most `target` steps a segment, as Python integers (see segments.py). later: every cut a
    block of 16 later, where the last step has more than one."""
    steps = -(-T // STEP)
    count = max(1, -(-steps // target))
    shift = BLOCK * (later and (T - 1) % STEP >= BLOCK)
    # Rounded up: the last, which writes final_state, is a short one.
    cut = lambda b, i: min(b * T + STEP * -(-i * steps // count) + shift * (0 < i < count), (b + 1) * T)
    return [[b, cut(b, i), cut(b, i + 1), b * T, (b + 1) * T, b * count, count, 0] for b in range(B) for i in range(count)]


def fixed_tables(B: int, T: int, target: int, lanes: tuple[int, ...] = (0,), later: bool = False) -> list[list[int]]:
    """`segments` [NS, 8] and below it `whole` [B, lanes, 8] of a fixed batch"""
    split = fixed_rows(B, T, target, later)
    count, groups = len(split) // B, -(-T // (2 * STEP))
    cuts = [2 * STEP * (groups * x // 1024) for x in lanes] + [T]
    return split + [
        [b if begin < end or end == T else -1, b * T + begin, b * T + end, b * T, (b + 1) * T, b * count, count, 0]
        for b in range(B)
        for begin, end in pairwise(cuts)
    ]


def packed(lanes: tuple[int, ...]) -> int:
    """Where lanes begin, but for the first, as the kernel that makes tables is told"""
    return sum(part << 10 * n for n, part in enumerate(lanes[1:]))


def chunks(problem: Problem, lengths: tuple[int, ...] | None) -> int:
    """Chunks of each of the B batches: all sequences' of a ragged one, at most so many where their lengths are not known"""
    p = problem
    if not p.varlen:
        return -(-p.T // p.chunk_size)
    return p.T // p.chunk_size + p.N if lengths is None else sum(-(-n // p.chunk_size) for n in lengths)


Strides = tuple[int, int, int, int] | None  # elements between rows of q, k, v and g; None: all are contiguous
Kinds = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]  # dtypes of A_log, dt_bias and cu_seqlens, None: absent


def launches(problem: Problem, config: Config, strides: Strides, kinds: Kinds) -> tuple[list[Launch], int]:
    """The launches of a call and the bytes of its workspace."""
    p, HV, K, V = problem, problem.HV, problem.K, problem.V
    R, sizes = p.B * p.T, (p.H * K, p.H * K, HV * V, HV * K)
    steps = strides or sizes
    target = config.steps or max(1, p.T)
    fits = max(1, p.T // (STEP * target))  # a ragged batch holds no more sequences of more than `target` steps, and no more cuts
    lanes = len(config.lanes)
    NS = p.N + fits if p.varlen else len(fixed_rows(p.B, p.T, target))
    cut = min(p.N, fits) if p.varlen else p.N  # sequences that may be cut, the first ones of the tables,
    inner = min(NS, 2 * fits) if p.varlen else NS  # and their segments
    found: list[Launch] = []
    work = 0

    def take(size: int) -> int:
        """Offset of `size` more bytes of the workspace"""
        nonlocal work
        work += -(-size // 256) * 256
        return work - -(-size // 256) * 256

    asked = p.return_intermediate_states
    place = (WORK, take(4 * (TABLE * (NS + lanes * p.N) + p.N * asked))) if p.varlen else (TABLES, 0)
    split, whole, numbers = (Pointer(place[0], torch.int32, place[1] + 4 * TABLE * rows) for rows in (0, NS, NS + lanes * p.N))
    numbers = numbers if asked else None  # of the sequences' first chunks
    if p.varlen:
        args = (Pointer(CU, kinds[2]), split, whole, numbers, p.N, p.T, target, NS, int(config.later), lanes, packed(config.lanes))
        found.append(Launch(TABLE_OF, (-(-p.N // TABLE_ROWS), 1, 1), args, (TABLE_ROWS, config.forward.chunk), 4))

    matrix = lambda operand, rows, columns: Matrix(
        operand, p.gate_dtype if operand == G else p.dtype, R, sizes[operand], steps[operand], rows, columns
    )
    optional = lambda there, operand, dtype: Pointer(operand, dtype) if there else None
    q, k, g = matrix(Q, BLOCK, K), matrix(K_, BLOCK, K), matrix(G, BLOCK, K)
    beta = Pointer(BETA, p.beta_dtype)
    A_log, dt_bias = optional(p.has_A_log, A_LOG, kinds[0]), optional(p.has_dt_bias, DT_BIAS, kinds[1])
    initial, final = optional(p.has_initial_state, INITIAL, p.state_dtype), optional(p.output_final_state, FINAL, p.state_dtype)
    bound = p.lower_bound or 0.0

    def forward(tiles: Tiles, table: Pointer, rows: int, entry: Pointer | None = None, known: Pointer | None = None) -> Launch:
        out = Matrix(O, p.dtype, R, HV * V, HV * V, BLOCK, tiles.R)
        items, turns = rows * HV, tiles.split == "turns"
        args = (
            q, k, matrix(V_, BLOCK, tiles.R), g, out, Pointer(O, p.dtype), beta, A_log, dt_bias, initial, final, entry,
            optional(asked, ENTRIES, p.dtype), known, table, split if p.varlen and turns else None, numbers, items, HV, p.group, NS,
            config.tail, bound, p.scale,
        )  # fmt: skip
        blocks = min(items, MULTIPROCESSORS * tiles.R // V) if turns else items
        return Launch(FORWARD, (blocks, V // tiles.R, 1), args, (tiles,), tiles.scan_warps, tiles.pdl, tiles.cluster)

    if not config.steps:
        return [*found, forward(config.forward, whole, lanes * p.N)], work
    known = Pointer(WORK, torch.int32, take(4 * NS * HV))
    if config.forward.split == "tails":
        if 2 * config.steps + config.tail > own_tail_blocks(config.forward):
            raise ValueError(
                f"segments of {config.steps} steps with tails of {config.tail} blocks must have at most "
                f"{own_tail_blocks(config.forward)} blocks of 16 tokens"
            )
        found.append(forward(config.forward, split, NS, None, known))
        return [*found, forward(config.whole, whole, lanes * cut, None, known)], work
    state, chained = config.state, config.whole is None
    entry = Pointer(WORK, torch.float32, take(4 * inner * HV * K * V))
    summary = Pointer(WORK, torch.float32, take(8 * inner * HV * K * V)) if chained else entry  # without summaries nothing is written there

    def pass_of_states(tail: int) -> Launch:
        args = (k, matrix(V_, BLOCK, V), g, beta, A_log, dt_bias, initial, entry, summary, known, split, HV, p.group, NS, tail, bound)
        return Launch(STATE, (inner * HV, 1, 1), args, (state,), state.scan_warps, state.pdl)

    found.append(pass_of_states(config.tail))
    if chained:
        found.append(pass_of_states(0))
        args = (summary, entry, known, whole, HV, NS, cut)
        abreast = min(cut, -(-MULTIPROCESSORS * BLOCK // (HV * V)))  # a program takes a multiprocessor's shared memory
        found.append(Launch(COMBINE, (abreast, HV, V // BLOCK), args, (K, V, BLOCK, state.pdl, not p.varlen), 4, state.pdl))
    else:
        found.append(forward(config.whole, whole, lanes * cut, None, known))
    return [*found, forward(config.forward, split, NS, entry, known)], work


class Plan(NamedTuple):
    """Everything of a call that does not depend on addresses"""

    program: Program
    final: torch.Tensor | None  # what final_state looks like, one element expanded: `empty_like` takes half the time of `empty`
    work: torch.Tensor | None  # the same of the workspace
    tables: torch.Tensor | None  # segment tables of a fixed batch


_plans: dict[tuple, Plan] = {}  # by what kernels and tables depend on
_calls: dict[tuple, Plan] = {}  # the same by what a call gives, without the choice between
_recorded: dict[int, torch.Tensor] = {}  # segment tables that CUDA graphs read: theirs for good, however many plans come and go


def plan(problem: Problem, config: Config, strides: Strides, kinds: Kinds, device: torch.device) -> Plan:
    """Kernels loaded, tables of a fixed batch on the device"""
    p = problem
    found, size = launches(p, config, strides, kinds)
    tables = None
    if not p.varlen:
        rows = fixed_tables(p.B, p.T, config.steps or p.T, config.lanes, config.later)
        tables = torch.tensor([*chain(*rows), *(b * chunks(p, None) for b in range(p.B))], dtype=torch.int32).to(device)
    final, work = (
        torch.empty(1, dtype=dtype, device=device).expand(shape) if there else None
        for there, shape, dtype in ((p.output_final_state, p.state_shape, p.state_dtype), (size > 0, (size // 4,), torch.float32))
    )
    return Plan(Program(load(found, device.index, partial(gradients_of, p, kinds))), final, work, tables)


def gradients_of(problem: Problem, kinds: Kinds) -> list[Launch]:
    """What the gradients of a call will launch, as far as that is known: where kernels are compiled, theirs are too."""
    from openkda.hopper import why_not_backward

    if not problem.needs_grad or problem.return_intermediate_states or why_not_backward(problem) is not None:
        return []
    from openkda.hopper.gradients import ahead

    return ahead(problem, kinds)


def planned(problem: Problem, config: Config, *rest: object) -> Plan:
    """The plan of a call, kept: batches of many lengths share few"""
    key = (problem, config, *rest)
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= 1024:
            _plans.clear()
        found = _plans[key] = plan(*key)
    return found


def arranged(operands: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], Strides]:
    """The inputs of a call as its kernels read them, copied where they must be, and the strides of q, k, v and g."""
    tiles, (beta, *others) = operands[:BETA], operands[BETA:]
    packed, strides = zip(*map(packed_rows, tiles))
    rest = [beta.contiguous(), *[None if t is None else dense(t) for t in others]]
    return [*packed, *rest], None if strides == tuple(t.shape[2] * t.shape[3] for t in tiles) else strides


Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # o, final_state and chunk-entry states, None unless asked for


def forward(problem: Problem, inputs: Inputs, config: Config | None = None) -> Results:
    """o [B, T, HV, V], final_state (Problem.state_shape) and chunk-entry states [B, NT, HV, K, V] (or V first) in o's dtype, by `config`
    (default: what `choose` says)"""
    p, x = problem, inputs
    if p.N == 0 or p.B * p.T == 0:
        return of_nothing(p, x)
    operands: Sequence[torch.Tensor | None] = (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens)
    strides = None
    addresses = [0 if t is None else t.data_ptr() for t in operands]
    if reduce(or_, addresses) % 16 or False in [t is None or t.is_contiguous() for t in operands]:
        operands, strides = arranged(operands)
        addresses = [0 if t is None else t.data_ptr() for t in operands]
    A_log, dt_bias, cu = operands[A_LOG], operands[DT_BIAS], operands[CU]
    kinds = (A_log if A_log is None else A_log.dtype, dt_bias if dt_bias is None else dt_bias.dtype, cu if cu is None else cu.dtype)
    device = x.v.device
    key = (p, x.lengths if config is None else config, strides, kinds, device)
    found = _calls.get(key)
    if found is None:
        if len(_calls) >= 4096:
            _calls.clear()
        found = _calls[key] = planned(p, config or choose(p, x.lengths), strides, kinds, device)
    filled = not p.varlen or (x.lengths is not None and sum(x.lengths) == p.T)
    o = (torch.empty_like if filled else torch.zeros_like)(x.v, memory_format=torch.contiguous_format)
    final, work = [t if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in (found.final, found.work)]
    h = entries(p, x, torch.zeros if p.varlen and x.lengths is None else torch.empty)
    addresses += [0 if t is None else t.data_ptr() for t in (o, final, found.tables, work, h)]
    if found.tables is not None and torch.cuda.is_current_stream_capturing():
        _recorded[found.tables.data_ptr()] = found.tables
    found.program.run(addresses, device.index)
    return o, final, h


def entries(problem: Problem, inputs: Inputs, create: Callable[..., torch.Tensor]) -> torch.Tensor | None:
    """Memory for the chunk-entry states, None unless asked for"""
    p = problem
    if not p.return_intermediate_states:
        return None
    return create(p.B, chunks(p, inputs.lengths), *p.state_shape[1:], dtype=p.dtype, device=inputs.v.device)


def of_nothing(problem: Problem, inputs: Inputs) -> Results:
    """The result without sequences or without tokens: the states as they were"""
    p, initial = problem, inputs.initial_state
    final = inputs.v.new_zeros(p.state_shape, dtype=p.state_dtype) if p.output_final_state else None
    if final is not None and initial is not None:
        final.copy_(initial)
    return torch.zeros_like(inputs.v, memory_format=torch.contiguous_format), final, entries(p, inputs, torch.zeros)
