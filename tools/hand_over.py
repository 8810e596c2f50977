"""The least kernel that hands its warp-specialised partitions as much as ours do: two dozen values, to six partitions with registers of
their own, in a block that fills a multiprocessor's shared memory. For tools/sanitize.py: what a race checker says of it lies in Triton's
lowering of `warp_specialize`, not in our kernels."""

from __future__ import annotations

import torch

from openkda.hopper.compat import gl, gluon, mbarrier

VALUES = 24


@gluon.jit
def index():
    return gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def total(values):
    found = values[0] * 0
    for i in gl.static_range(len(values)):
        found += values[i]
    return found


@gluon.jit
def take(tile, full, empty, y_ptr, values, rounds):
    for r in range(rounds):
        mbarrier.wait(full, r & 1)
        gl.store(y_ptr + index(), tile.load(gl.BlockedLayout([1], [32], [4], [0])) - values[0])
        gl.thread_barrier()
        mbarrier.arrive(empty, count=1)


@gluon.jit
def give(tile, full, empty, x_ptr, values, rounds):
    for r in range(rounds):
        mbarrier.wait(empty, (r & 1) ^ 1)
        tile.store(gl.load(x_ptr + index()) + values[0])
        gl.thread_barrier()
        mbarrier.arrive(full, count=1)


@gluon.jit
def look(y_ptr, values, rounds):
    """Has nothing to do: no sum is that large"""
    if total(values) > rounds + 100000:
        gl.store(y_ptr, 0.0)


@gluon.jit
def look_by_four(y_ptr, values, rounds):
    """The same with four warps"""
    if total(values) > rounds + 100000:
        gl.store(y_ptr + index(), 0.0)


@gluon.jit
def watch(full, empty, y_ptr, values, rounds):
    """The same after it has seen all rounds"""
    for r in range(rounds):
        mbarrier.wait(full, r & 1)
        mbarrier.arrive(empty, count=1)
    look(y_ptr, values, rounds)


@gluon.jit
def run_roles(tile, full, empty, x_ptr, y_ptr, values, rounds):
    gl.warp_specialize(
        [
            (take, (tile, full, empty, y_ptr, values, rounds)),
            (give, (tile, full, empty, x_ptr, values, rounds)),
            (look_by_four, (y_ptr, values, rounds)),
            (watch, (full, empty, y_ptr, values, rounds)),
            (look, (y_ptr, values, rounds)),
            (watch, (full, empty, y_ptr, values, rounds)),
            (look, (y_ptr, values, rounds)),
        ],
        [4, 4, 1, 1, 1, 1],
        [160, 160, 24, 24, 24, 24],
    )


@gluon.jit(do_not_specialize=["rounds"])
def hand_over_kernel(x_ptr, y_ptr, values_ptr, rounds, N: gl.constexpr):
    """y [128] = x [128] fp32, `rounds` times through shared memory. values_ptr [N] int32. Grid (any,)."""
    values = ()
    for i in gl.static_range(N):
        values = values + (gl.load(values_ptr + i),)  # noqa: RUF005 (a tuple of Gluon's)
    rest = gl.allocate_shared_memory(gl.float32, [45, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rest.index(0).store(gl.zeros([1024], gl.float32, gl.BlockedLayout([1], [32], [4], [0])))
    tile = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=3)  # takers and watchers
    run_roles(tile, full, empty, x_ptr, y_ptr, values, rounds)


def run() -> None:
    """Some launches, checked."""
    x = torch.arange(128, dtype=torch.float32, device="cuda")
    y = torch.zeros_like(x)
    values = torch.arange(VALUES, dtype=torch.int32, device="cuda")
    for rounds in (1, 3, 20):
        hand_over_kernel[(132,)](x, y, values, rounds, VALUES, num_warps=4)
    torch.cuda.synchronize()
    assert torch.equal(x, y)
