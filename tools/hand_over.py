"""The least kernel that hands a tile from one warp-specialised partition to another, for tools/sanitize.py: what a race checker says of it
lies in Triton's lowering of `warp_specialize`, not in ours."""

from __future__ import annotations

import torch

from openkda.hopper.compat import gl, gluon, mbarrier


@gluon.jit
def give(tile, full, x_ptr):
    i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    tile.store(gl.load(x_ptr + i))
    gl.thread_barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def take(tile, full, y_ptr):
    i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    mbarrier.wait(full, 0)
    gl.store(y_ptr + i, tile.load(gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def hand_over_kernel(x_ptr, y_ptr):
    """y [128] = x [128] fp32, through shared memory and a barrier. Grid (1,)."""
    tile = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    gl.warp_specialize([(take, (tile, full, y_ptr)), (give, (tile, full, x_ptr))], [4], [40])


def run() -> None:
    """One launch, checked."""
    x = torch.arange(128, dtype=torch.float32, device="cuda")
    y = torch.zeros_like(x)
    hand_over_kernel[(1,)](x, y, num_warps=4)
    torch.cuda.synchronize()
    assert torch.equal(x, y)
