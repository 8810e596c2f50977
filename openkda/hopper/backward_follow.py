"""How a launch runs beside the one before it, chunk by chunk (docs/backward.md). A walk, which is launched first, fills half of the chip;
on the rest of it runs what it waits for (prepare_operands) or what waits for it (fused_gradients), launched programmatically: it starts
when all blocks of the walk have started, so nobody waits for a block that has no place.

What is done is said by flags, int32 in the workspace, each written by one block:

    tiles    [HV, NC]                    prepare_operands: a chunk's tiles are there
    progress [HV, N, LINE], behind them  the forward walk: how many chunks of a sequence it has requested
    states   [N, HV, V / rows, groups]   the reverse walk: dh and dv of GROUP chunks are there, counted in its order

The walk's blocks clear them before they let the other launch start. A flag is raised when what it speaks of is in memory, copies complete
and not only read from shared memory, behind a release. It is read behind an acquire, and a fence lets the copy engine see what was
announced.

The preparation is faster than the walk. Left alone it runs ahead further than the second-level cache holds, and the walk reads its tiles
from memory. Its blocks therefore wait until the walk is within LEAD chunks; a hint, which they heed for some microseconds only.

A walk that waits for tiles waits for a later launch. Where launches do not overlap (tools that run kernels one by one, a part of the chip,
a module loaded between the two by another thread) it would do so for good. Blocks whose first tile is not there in PATIENCE therefore give
up, and the same walk, launched once more behind the preparation, does their work; its other blocks end at once. Once a first tile is there,
the preparation runs, and its blocks wait for nobody.

    gave_up  [N, HV, V / 64]             written by every block of a walk that waits for tiles"""

from __future__ import annotations

import torch

from openkda.hopper.backward_tiles import quotient
from openkda.hopper.compat import gdc_launch_dependents, gdc_wait, gl, gluon
from openkda.plan import Plan
from openkda.problem import Problem

PATIENCE = gl.constexpr(10_000_000)  # nanoseconds
LEAD = gl.constexpr(14)  # chunks that the preparation is ahead of the walk
LOOKS = gl.constexpr(100)  # that a block of the preparation takes at how far the walk is
LINE = gl.constexpr(32)  # int32 in a line of the cache
GROUP = gl.constexpr(4)  # chunks of a walk that are announced together: a release takes about a chunk's time


def tile_flags(problem: Problem, plan: Plan, device: torch.device) -> torch.Tensor:
    """Memory for the flags of tiles, and the walk's progress; the walk clears it."""
    return torch.empty(problem.HV * (plan.num_chunks + LINE.value * problem.N), dtype=torch.int32, device=device)


def state_flags(problem: Problem, plan: Plan, device: torch.device) -> torch.Tensor:
    """Memory for the flags of states, of a fixed batch; the walk clears it."""
    p = problem
    groups = -(-plan.num_chunks // (p.B * GROUP.value))
    return torch.empty(p.N, p.HV, p.V // 64, groups, dtype=torch.int32, device=device)


def block_flags(problem: Problem, device: torch.device) -> torch.Tensor:
    """Memory for which blocks of a walk gave up."""
    return torch.empty(problem.N, problem.HV, problem.V // 64, dtype=torch.int32, device=device)


def walk_rows(problem: Problem) -> int:
    """Rows of V of a block of the reverse walk beside fused_gradients: all of them where it pays. Half as many multiprocessors walk then,
    on which a chunk takes 1.3 us in place of .8. What has the others, 0.04 us a chunk and head, keeps pace where it has more to do than
    that, and finds what the walk writes in the second-level cache (T 8192, H 32: 462 us for both, 490 with 64 rows)."""
    return problem.V if problem.N * problem.HV >= 32 else 64


@gluon.jit
def clear_flags(ptr, count):
    """Zero `count` flags, then let the next launch start."""
    t = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for n in range((count + 127) // 128):
        gl.store(ptr + 128 * n + t, t * 0, mask=128 * n + t < count)
    code: gl.constexpr = "fence.acq_rel.gpu; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(code, "=r,r", [t], dtype=gl.int32, is_pure=False, pack=1)
    gl.thread_barrier()
    gdc_launch_dependents()


@gluon.jit
def say_progress(ptr, chunk):
    """Leave `chunk` at ptr. One warp."""
    t = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    code: gl.constexpr = "st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, $2;"
    gl.inline_asm_elementwise(code, "=r,l,r", [ptr + t * 0, t * 0 + chunk], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_progress(ptr, chunk):
    """Wait until the walk is within LEAD chunks of `chunk`, LOOKS looks at most, by one thread: many hold up the stores they look for."""
    code: gl.constexpr = """{ .reg .pred p; .reg .b32 x, n; mov.b32 n, $3; setp.ne.s32 p, $4, 0; @p bra DONE;
        AGAIN: ld.relaxed.gpu.global.b32 x, [$1]; setp.ge.s32 p, x, $2; @p bra DONE; sub.s32 n, n, 1; setp.le.s32 p, n, 0; @p bra DONE;
        nanosleep.u32 500; bra AGAIN; DONE: mov.b32 $0, n; }"""
    t = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    places = [ptr + t * 0, t * 0 + (chunk - LEAD), t * 0 + LOOKS, t]
    gl.inline_asm_elementwise(code, "=r,l,r,r,r", places, dtype=gl.int32, is_pure=False, pack=1)
    gl.thread_barrier()


@gluon.jit
def await_first(ptr):
    """Wait until the flag at ptr is raised, PATIENCE at most: 1 if it is, else 0."""
    code: gl.constexpr = """{ .reg .pred p; .reg .b32 x; .reg .b64 begin, now; mov.u64 begin, %globaltimer;
        AGAIN: ld.acquire.gpu.global.b32 x, [$1]; setp.ne.s32 p, x, 0; @p bra DONE;
        nanosleep.u32 200; mov.u64 now, %globaltimer; sub.u64 now, now, begin; setp.lt.u64 p, now, $2; @p bra AGAIN;
        DONE: mov.b32 $0, x; }"""
    t = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    limit = t.to(gl.int64) * 0 + PATIENCE
    return gl.max(gl.inline_asm_elementwise(code, "=r,l,l", [ptr + t * 0, limit], dtype=gl.int32, is_pure=False, pack=1), 0)


@gluon.jit
def stores_complete():
    """Wait until all copies that this thread has requested from shared memory are in memory."""
    t = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    code: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(code, "=r,r", [t], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def raise_flag(ptr):
    """Announce what these warps have stored and waited for."""
    code: gl.constexpr = """{ .reg .pred p; setp.eq.s32 p, $2, 0; @p st.release.gpu.global.b32 [$1], 1; mov.b32 $0, $2; }"""
    t = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.thread_barrier()
    gl.inline_asm_elementwise(code, "=r,l,r", [ptr + t * 0, t], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_flags(ptr, count: gl.constexpr, stride):
    """Wait until `count` flags, `stride` apart, are raised; then the copy engine may read what they announce. The compiler divides a tile
    with rows of 256 bytes among requests of the first two warps: those look, and only what they request is behind their look."""
    code: gl.constexpr = """{ .reg .pred p; .reg .b32 x; mov.u32 x, %tid.x; setp.ge.u32 p, x, 64; @p bra DONE;
        AGAIN: ld.acquire.gpu.global.b32 x, [$1]; setp.eq.s32 p, x, 0; @p nanosleep.u32 100; @p bra AGAIN;
        fence.proxy.async; DONE: mov.b32 $0, 0; }"""
    t = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for i in gl.static_range(count):
        gl.inline_asm_elementwise(code, "=r,l", [ptr + i * stride + t * 0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def walked(rank, steps, sequences, back: gl.constexpr):
    """(sequence, place in its order, chunk of all) of the chunk that a walk meets as number `rank`, all sequences side by side. steps:
    chunks of a sequence; sequences: how many, and their `divider`; back: in reverse."""
    n = quotient(rank, sequences[1:])
    sequence = rank - n * sequences[0]
    c = steps - 1 - n if back else n
    return sequence, n, sequence * steps + c


@gluon.jit
def end_with_neighbour():
    """The last block ends after the launch that this one started beside: what comes next waits for this one alone."""
    if gl.program_id(0) == gl.num_programs(0) - 1:
        gdc_wait()
