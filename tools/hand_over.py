"""The least kernel whose warp-specialised partitions are handed values and a tile, for tools/sanitize.py: what a race checker says of it
lies in Triton's lowering of `warp_specialize`, not in ours."""

from __future__ import annotations

import torch

from openkda.hopper.compat import gl, gluon, mbarrier


@gluon.jit
def index():
    return gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))


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
    """Has nothing to do: no value is that large"""
    if values[0] + values[1] + values[2] + values[3] > rounds + 1000:
        gl.store(y_ptr, 0.0)


@gluon.jit(do_not_specialize=["rounds"])
def hand_over_kernel(x_ptr, y_ptr, values_ptr, rounds):
    """y [128] = x [128] fp32, `rounds` times through shared memory. values_ptr [4] int32. Grid (any,)."""
    values = (gl.load(values_ptr), gl.load(values_ptr + 1), gl.load(values_ptr + 2), gl.load(values_ptr + 3))
    tile = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [
            (take, (tile, full, empty, y_ptr, values, rounds)),
            (give, (tile, full, empty, x_ptr, values, rounds)),
            (look, (y_ptr, values, rounds)),
            (look, (y_ptr, values, rounds)),
        ],
        [4, 1, 1],
        [40, 24, 24],
    )


def run() -> None:
    """Some launches, checked."""
    x = torch.arange(128, dtype=torch.float32, device="cuda")
    y = torch.zeros_like(x)
    values = torch.arange(4, dtype=torch.int32, device="cuda")
    for rounds in (1, 3, 20):
        hand_over_kernel[(200,)](x, y, values, rounds, num_warps=4)
    torch.cuda.synchronize()
    assert torch.equal(x, y)
