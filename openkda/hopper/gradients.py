"""The Hopper backward: prepare_operands -> both scans in one launch, or a walk each way -> the gradients of each chunk in one kernel
(fused_gradients), what rows of very fast gates add (fused_levels), and the sums over chunks. A forward that `keep`s is what this begins
with, up to the forward walk. For fp16, in tiles of tf32, and under the interpreter, which knows no Gluon: prepare_chunks -> scans ->
score_gradients -> chunk_gradients -> level_gradients -> sums. See docs/backward.md.

Shaped for Hopper's matrix unit: chunks of 32 tokens, states transposed. What passes through memory, per token and value head: w, kg, qg (K
each), Aqk (C), T (2 C), r, dv (V each), and per chunk dh and h [V, K], beside a walk every second h.

Where walks leave multiprocessors idle (`Scans.beside`), what makes their tiles or takes their states runs there, launched right behind
them, chunk by chunk (backward_follow.py).

On a device the call is rehearsed once per problem (rehearsal.py): later calls allocate the gradients and one workspace, and launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from operator import or_
from typing import NamedTuple

import torch

from openkda.hopper.backward_chunk import chunk_gradients
from openkda.hopper.backward_config import Scans, choose_scans, fitted, keeping
from openkda.hopper.backward_follow import block_flags, state_flags, tile_flags
from openkda.hopper.backward_fused import fused_gradients
from openkda.hopper.backward_fused_levels import fused_levels
from openkda.hopper.backward_levels import level_gradients
from openkda.hopper.backward_operands import empty_operands, prepare_operands
from openkda.hopper.backward_plan import ragged_plan
from openkda.hopper.backward_prepare import C, Prepared, prepare_chunks
from openkda.hopper.backward_scan import both_scans
from openkda.hopper.backward_scores import score_gradients
from openkda.hopper.backward_sums import parameter_gradients
from openkda.hopper.backward_walk import forward_walk
from openkda.hopper.backward_walk_reverse import reverse_walk
from openkda.hopper.launch import Kinds, dense, forward, packed_rows
from openkda.hopper.rehearsal import Script, rehearse
from openkda.hopper.runtime import Launch, Program, load
from openkda.plan import Plan
from openkda.problem import Inputs, Problem

Tensors = Sequence[torch.Tensor | None]
STRIDED = 5  # operands whose rows may lie apart: q, k, v, g, do


class Walked(NamedTuple):
    """What the forward walk leaves for the gradients, and the tiles that it walked over"""

    h: torch.Tensor | None  # [NC, HV, V, K] states at the chunks' entries, beside: every second's; None where nothing reads them, as r
    r: torch.Tensor | None  # [NC, HV, V, C]
    tiles: Prepared


def walked(
    problem: Problem, plan: Plan, inputs: Inputs, beside: bool, o: torch.Tensor | None = None, final_state: torch.Tensor | None = None
) -> Walked:
    """The tiles of all chunks and the forward walk over them. Args: beside: both at once; o [B, T, HV, V], final_state
    (problem.state_shape): filled, where given."""
    device = inputs.q.device
    tiles = empty_operands(problem, plan, device)
    if not beside:
        prepare_operands(problem, plan, inputs, tiles)
        return Walked(*forward_walk(problem, plan, inputs, tiles, o, final_state), tiles)
    flags, gave_up = tile_flags(problem, plan, device), block_flags(problem, device)
    found = forward_walk(problem, plan, inputs, tiles, o, final_state, flags, gave_up)
    prepare_operands(problem, plan, inputs, tiles, flags)
    return Walked(*forward_walk(problem, plan, inputs, tiles, o, final_state, None, gave_up, found), tiles)


def both_walks(
    problem: Problem, plan: Plan, inputs: Inputs, kept: Walked | None, do: torch.Tensor, dfinal_state: torch.Tensor | None,
    dv: torch.Tensor | None, initial_state: bool, beside: bool,
) -> tuple[Walked, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The forward walk, kept or done now, and the reverse one: Walked, dh, the flags that it raises as they are there (None unless beside),
    the gradient of the initial state (None unless asked for). dv [B, T, HV, V]: filled; None: the initial state's gradient alone is."""
    device = do.device
    dS0 = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=device) if initial_state else None
    flags = state_flags(problem, plan, device) if beside and dv is not None else None
    if kept is None:
        kept = Walked(None, None, prepare_operands(problem, plan, inputs)) if dv is None else walked(problem, plan, inputs, beside)
    dv = torch.empty(do.shape, dtype=problem.dtype, device=device) if dv is None else dv
    dh = reverse_walk(problem, plan, kept.tiles, do, dfinal_state, dv, dS0, flags)
    return kept, dh, flags, dS0


def steps(
    problem: Problem, plan: Plan, inputs: Inputs, needs: tuple[bool, ...], scans: Scans, o: torch.Tensor, do: torch.Tensor,
    dfinal_state: torch.Tensor | None, zero: bool, fused: bool, kept: Walked | None = None,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients of q, k (per value head, in fp32 where there are several), v, g, beta, A_log, dt_bias, initial_state; None where `needs` is
    False.

    Args: o: not read if fused; zero: there are rows outside every sequence, whose gradients are zero; fused: by the Gluon kernels, one of
    which takes scores and channels; kept: what the forward has left, if it has."""
    tokens = any(needs[:7])
    create = torch.zeros if zero else torch.empty
    contiguous_like = lambda x, dtype: create(x.shape, dtype=dtype, device=x.device)
    dv = contiguous_like(inputs.v, problem.dtype) if tokens else None
    flags = dr = None
    if fused and scans.walks:
        (h, r, p), dh, flags, dS0 = both_walks(problem, plan, inputs, kept, do, dfinal_state, dv, needs[7], scans.beside)
    else:
        p = (prepare_operands if fused else prepare_chunks)(problem, plan, inputs)
        h, dh, r, dr, dS0 = both_scans(
            problem, plan, inputs, p, do, dfinal_state, tokens=tokens, initial_state=needs[7], dv=dv if fused else None, scans=scans
        )
    found: list[torch.Tensor | None] = [None] * 7
    if tokens:
        of_heads = torch.float32 if problem.group > 1 else problem.dtype
        dq, dk, dg = (contiguous_like(inputs.g, dtype) for dtype in (of_heads, of_heads, problem.gate_dtype))
        dbeta = contiguous_like(inputs.beta, problem.beta_dtype)
        if fused:
            dA_log, ddt_bias, pairs, size = fused_gradients(problem, plan, inputs, p, do, h, dh, r, dv, dq, dk, dg, dbeta, flags)
            if p.cut is not None:
                fused_levels(problem, plan, inputs, p.norms, p.cut, pairs, size, dq, dk, dg, dA_log, ddt_bias)
        else:
            scores = score_gradients(problem, plan, inputs, p, o, do, r, dr, dv, dbeta)
            dA_log, ddt_bias = chunk_gradients(problem, plan, inputs, p, scores, do, h, dh, r, dr, dq, dk, dg)
            if p.cut is not None:
                level_gradients(problem, plan, inputs, p.norms, p.cut, scores.pairs, scores.sums[:, :, 2], dq, dk, dg, dA_log, ddt_bias)
        found = [dq, dk, dv, dg, dbeta, *parameter_gradients(problem, plan, inputs, dA_log, ddt_bias)]
    return [dx if need else None for need, dx in zip(needs, [*found, dS0], strict=True)]


class Rehearsed(NamedTuple):
    """A call on a device"""

    program: Program
    results: list[torch.Tensor | None]  # what each looks like, one element expanded: `empty_like` takes half the time of `empty`
    work: torch.Tensor  # the same of the workspace
    constants: list[torch.Tensor]

    def run(self, operands: Tensors, zero: bool, device: torch.device) -> list[torch.Tensor | None]:
        """New results of the call on these operands, arranged as they were at its rehearsal"""
        create = torch.zeros_like if zero else torch.empty_like
        results = [None if x is None else create(x, memory_format=torch.contiguous_format) for x in self.results]
        work = torch.empty_like(self.work, memory_format=torch.contiguous_format)
        if self.constants and torch.cuda.is_current_stream_capturing():
            _captured[id(self.constants)] = self.constants
        addresses = [0 if x is None else x.data_ptr() for x in (*operands, *results, *self.constants, work)]
        self.program.run(addresses, device.index)
        return results


_rehearsed: dict[tuple, Rehearsed] = {}
_captured: dict[int, list[torch.Tensor]] = {}  # constants that CUDA graphs read: theirs for good


def script(
    problem: Problem, needs: tuple[bool, ...], scans: Scans, strides: tuple[int, ...] | None, kinds: Kinds, of_state: torch.dtype | None,
    zero: bool, part: str = "all",
) -> Script:  # fmt: skip
    """The launches of a call.

    Args: strides: elements between rows of q, k, v, g and do, None: all are contiguous; kinds: dtypes of A_log, dt_bias and cu_seqlens;
    of_state: dtype of the final state's gradient, None without one; part: "forward", of `keep`, whose results are o, the final state and
    Walked, "rest", what is left to the gradients then, or "all"; the rest as for `steps`."""
    p = problem
    NC = p.B * -(-p.T // C)
    tables = None if p.varlen else torch.int32
    meta = torch.device("meta")

    def rows(D: int, heads: int, dtype: torch.dtype, stride: int) -> torch.Tensor:
        return torch.empty_strided((p.B, p.T, heads, D), (p.T * stride, stride, D, 1), dtype=dtype, device=meta)

    new = lambda dtype, *shape: None if dtype is None else torch.empty(shape, dtype=dtype, device=meta)
    q, k, v, g, do = (
        rows(D, heads, dtype, strides[n] if strides else D * heads)
        for n, (D, heads, dtype) in enumerate(
            ((p.K, p.H, p.dtype), (p.K, p.H, p.dtype), (p.V, p.HV, p.dtype), (p.K, p.HV, p.gate_dtype), (p.V, p.HV, p.dtype))
        )
    )
    state = p.state_dtype if p.has_initial_state else None
    given = (
        q, k, v, g, do, new(p.dtype, p.B, p.T, p.HV, p.V), new(p.beta_dtype, p.B, p.T, p.HV), new(kinds[0], p.HV), new(kinds[1], p.HV, p.K),
        new(state, *p.state_shape), new(kinds[2], p.N + 1), new(of_state, *p.state_shape), new(tables, NC, 4), new(tables, p.N, 4),
    )  # fmt: skip
    if part == "rest":
        given += tuple(script(p, needs, scans, strides, kinds, of_state, zero, "forward").results[2:])

    def call(q, k, v, g, do, o, beta, A_log, dt_bias, initial_state, cu_seqlens, dfinal_state, chunks, sequences, h=None, r=None, *tiles):
        inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
        plan = ragged_plan(p, cu_seqlens) if p.varlen else Plan(chunks, sequences, C)
        if part == "forward":
            o, final_state = new(p.dtype, *v.shape), new(p.state_dtype, *p.state_shape) if p.output_final_state else None
            h, r, tiles = walked(p, plan, inputs, scans.beside, o, final_state)
            return [o, final_state, h, r, *tiles]
        kept = None if h is None else Walked(h, r, Prepared(*tiles))
        return steps(p, plan, inputs, needs, scans, o, do, dfinal_state, False, p.dtype == torch.bfloat16, kept)

    return rehearse(call, given, part != "forward" and not zero)


def ahead(problem: Problem, kinds: Kinds, part: str = "all") -> list[Launch]:
    """The launches of the gradients of a call that is still to run forward: those of all inputs, given a gradient of all outputs."""
    p = problem
    needs = (*(True,) * 5, p.has_A_log, p.has_dt_bias, p.has_initial_state)
    scans = choose_scans(p) if part == "all" else keeping(p)
    return script(p, needs, scans, None, kinds, p.state_dtype if p.output_final_state else None, False, part).launches


def rehearsed(device: torch.device, soon: Callable[[], list[Launch]], *call: object) -> Rehearsed:
    """The call `script` describes, with its kernels loaded on a device; with them, where any is compiled, what `soon` says."""
    key = (device, *call)
    found = _rehearsed.get(key)
    if found is None:
        if len(_rehearsed) >= 1024:
            _rehearsed.clear()
        launches, results, constants, size = script(*call)
        like = lambda dtype, *shape: torch.empty(1, dtype=dtype, device=device).expand(shape)
        found = _rehearsed[key] = Rehearsed(
            Program(load(launches, device.index, soon)), [None if x is None else like(x.dtype, *x.shape) for x in results],
            like(torch.float32, -(-size // 4)), [x.to(device) for x in constants],
        )  # fmt: skip
    return found


def arranged(operands: Tensors) -> tuple[list[torch.Tensor | None], tuple[int, ...] | None]:
    """The operands of a call as its kernels read them, copied where they must be, and the strides of the first STRIDED."""
    packed, strides = zip(*map(packed_rows, operands[:STRIDED]))
    same = strides == tuple(t.shape[2] * t.shape[3] for t in packed)
    return [*packed, *(None if t is None else dense(t) for t in operands[STRIDED:])], None if same else strides


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def run(
    problem: Problem, inputs: Inputs, needs: tuple[bool, ...], scans: Scans, o: torch.Tensor, do: torch.Tensor,
    dfinal_state: torch.Tensor | None, zero: bool, part: str, kept: Tensors = (),
) -> list[torch.Tensor | None]:  # fmt: skip
    """The results of a part of a call on a device: see `script`. kept: Walked, of the rest"""
    p, x, device = problem, inputs, inputs.q.device
    plan = None if p.varlen else x.plan(p, C)  # a ragged batch's tables are a launch's
    tables = (None, None) if plan is None else (plan.chunks, plan.sequences)
    operands: Tensors = (
        x.q, x.k, x.v, x.g, do, o, x.beta, x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens, dfinal_state, *tables, *kept
    )  # fmt: skip
    strides = None
    addresses = [0 if t is None else t.data_ptr() for t in operands]
    if reduce(or_, addresses) % 16 or False in [t is None or t.is_contiguous() for t in operands]:
        operands, strides = arranged(operands)
    kinds = tuple(None if t is None else t.dtype for t in (x.A_log, x.dt_bias, x.cu_seqlens))
    of_state = None if dfinal_state is None else dfinal_state.dtype
    scans = fitted(scans, p, multiprocessors(device))
    soon = partial(ahead, p, kinds, "rest") if part == "forward" else tuple
    return rehearsed(device, soon, p, needs, scans, strides, kinds, of_state, zero, part).run(operands, zero, device)


def keep(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
    """o, final_state, and what the gradients would else compute anew: Walked, flat, or nothing where that is no gain."""
    scans = keeping(problem)
    if scans is None:
        o, final_state, _ = forward(problem, inputs)
        return o, final_state, ()
    v = inputs.v  # stands for o and its gradient, which a forward does not read
    o, final_state, *kept = run(problem, inputs, (True,) * 8, scans, v, v, None, False, "forward")
    return o, final_state, tuple(kept)


def gradients(
    problem: Problem, inputs: Inputs, needs: tuple[bool, ...], o: torch.Tensor, do: torch.Tensor | None, dfinal_state: torch.Tensor | None,
    kept: Tensors = (),
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, g, beta, A_log, dt_bias, initial_state; None where `needs` is False.

    Args: o [B, T, HV, V], the forward's result; do (o's shape), dfinal_state (problem.state_shape), either None for zero; kept: what `keep`
    left. Gradients come in their inputs' dtypes; sums over tokens run in fp32 in a fixed order."""
    p, x, device = problem, inputs, inputs.q.device
    do = torch.zeros_like(o) if do is None else do.to(p.dtype)
    scans = keeping(p) if kept else choose_scans(p, x.lengths)
    zero = p.varlen and (x.lengths is None or sum(x.lengths) != p.T)
    if device.type == "cpu":  # Triton's interpreter, which knows no Gluon
        found = steps(p, x.plan(p, C), x, needs, scans, o, do, dfinal_state, zero, False)
    else:
        found = run(p, x, tuple(needs), scans, o, do, dfinal_state, zero, "rest" if kept else "all", kept)
    if p.group > 1:
        for n, like in enumerate((x.q, x.k)):
            if found[n] is not None:
                found[n] = found[n].unflatten(2, (p.H, p.group)).sum(3).to(like.dtype)
    return found
