"""Segments that begin with a tail of their own: the map M of the tail, run by the preparation partitions beside the scan.

A block starts `tail` blocks of 16 tokens before its segment, from (0, I). The scan carries the state on. The preparation partitions take
M through the tail, 16 rows a warp (rows do not depend on one another), when all groups are prepared: in the midst of the preparation M's
registers would be too many. So the tail's tiles must still be there, and such blocks have no more groups than the ring: one of four blocks
or of eight, or two of four, on one partition of eight warps, which then runs M; with fp16 inputs also one of four that the first partition
prepares while the second is free for M; or as many as fit, all prepared by the first partition, while the second runs M, 64 rows after 64
(`parted`). The scan goes on before it reads the verdict, in the last form, where M takes longer, for as many blocks as the tail has and
two, else to the segment's end.

    M <- (M + R ki) exp(G_C), R = (-r_k M kd^T) T^T beta r_k      or, with a kg tile, M exp(G_C) + R kg

Where M is small, the state after the tail is the entry state (segments.py)."""

from __future__ import annotations

from typing import NamedTuple

from openkda.hopper.compat import gl, gluon, mbarrier, mma_v2
from openkda.hopper.segments import DROPPED
from openkda.hopper.tiles import plain_shared, row_layout


class Verdict(NamedTuple):
    """By which the preparation partitions tell the scan if their rows of M are small; None where blocks have no tails of their own"""

    small: object  # [partitions that run M, 1] int32
    told: object  # barrier


@gluon.constexpr_function
def parted(T):
    """Whether the first preparation partition prepares all groups and the second runs all of M"""
    return T.split == "tails" and T.preps == 2 and T.groups > 1


@gluon.jit
def make_verdict(T: gl.constexpr):
    parts: gl.constexpr = 1 if parted(T) else T.preps
    small = gl.allocate_shared_memory(gl.int32, [parts, 1], plain_shared(1))
    told = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(told.index(0), count=parts)
    return Verdict(small, told)


@gluon.jit
def read_verdict(verdict, T: gl.constexpr):
    """1 if all rows of M are small"""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(verdict.told.index(0), 0)
    gl.thread_barrier()  # each thread has waited; without it racecheck reports the words, read here first
    small = gl.max(verdict.small.index(0).load(L), 0)
    if T.preps > 1 and not parted(T):
        small = gl.minimum(small, gl.max(verdict.small.index(1).load(L), 0))
    return small


@gluon.jit
def await_ready(ring, group):
    """The group is prepared, which is the first in its place of the ring"""
    mbarrier.wait(ring.ready.index(group), 0)
    gl.thread_barrier()  # each thread has waited; without it racecheck reports the decay, read here first


@gluon.constexpr_function
def map_layout(warps):
    """[16 warps, n] accumulators, 16 rows a warp"""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.jit
def piece(tiles, n, rows: gl.constexpr, columns: gl.constexpr, count: gl.constexpr, swizzle: gl.constexpr):
    """The n-th of `count` [rows, columns] that the tiles of a ring buffer consist of"""
    return tiles._reinterpret(tiles.dtype, [count, rows, columns], row_layout(rows, columns, 16, swizzle)).index(n)


@gluon.jit
def advance_map(M0, M1, ring, b, T: gl.constexpr):
    """Rows of M, its columns in two halves [rows, 64], after block b. Rows are independent and a warp has its own: nothing waits."""
    L: gl.constexpr = map_layout(gl.num_warps())
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    dtype: gl.constexpr = ring.kq.dtype
    blocks: gl.constexpr = T.wide * T.groups
    zero = gl.zeros([M0.shape[0], 16], gl.float32, L)
    X0 = mma_v2(gl.convert_layout(M0.to(dtype), A), piece(ring.kq, 4 * b, 16, 64, 4 * blocks, 128).permute((1, 0)).load(B), zero)
    X1 = mma_v2(gl.convert_layout(M1.to(dtype), A), piece(ring.kq, 4 * b + 2, 16, 64, 4 * blocks, 128).permute((1, 0)).load(B), zero)
    X = (X0 + X1) * ring.read.index(b).load(L)
    inverse = piece(ring.tz, 2 * b, 16, 16, 2 * blocks, 32).permute((1, 0)).load(B)
    R = mma_v2(gl.convert_layout(X.to(dtype), A), inverse, zero) * ring.gain.index(b).load(L)
    R = gl.convert_layout(R.to(dtype), A)
    return advance_columns(M0, R, ring, b, 0, T), advance_columns(M1, R, ring, b, 1, T)


@gluon.jit
def advance_columns(M, R, ring, b, c: gl.constexpr, T: gl.constexpr):
    """The c-th 64 columns of M"""
    L: gl.constexpr = map_layout(gl.num_warps())
    per: gl.constexpr = ring.g.dtype.primitive_bitwidth // 16  # ki has the rows of the gate's tile
    blocks: gl.constexpr = T.wide * T.groups
    decay = ring.decay._reinterpret(gl.float32, [2 * blocks, 1, 64], plain_shared(2)).index(2 * b + c).load(L)
    ki = piece(ring.ki, (2 * b + c) * per, 16, 64, 2 * per * blocks, 128).load(gl.DotOperandLayout(1, L, 2))
    if T.kg:
        M = M * decay
    M = mma_v2(R, ki, M)
    if not T.kg:
        M = M * decay
    return M


@gluon.jit
def map_places(c: gl.constexpr):
    """(row, column) of a partition's rows of M, 16 a warp, its c-th 64 columns"""
    L: gl.constexpr = map_layout(gl.num_warps())
    row = gl.arange(0, 16 * gl.num_warps(), layout=gl.SliceLayout(1, L))[:, None]
    return row, 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(0, L))[None, :]


@gluon.jit
def identity(part, c: gl.constexpr):
    row, col = map_places(c)
    rows: gl.constexpr = 16 * gl.num_warps()
    return gl.where(row + rows * part == col, 1.0, gl.zeros([rows, 64], gl.float32, map_layout(gl.num_warps())))


@gluon.jit
def try_rows(ring, work, part, T: gl.constexpr):
    """1 if the part-th rows of M are small after the tail, or if nothing lies before it"""
    M0 = identity(part, 0)
    M1 = identity(part, 1)
    for n in range(work.tail):
        M0, M1 = advance_map(M0, M1, ring, n, T)
    most = gl.maximum(gl.abs(M0), gl.abs(M1))
    return ((gl.sum(gl.max(most, 1), 0) <= DROPPED) | work.from_initial).to(gl.int32)


@gluon.jit
def try_tail(ring, verdict, work, part: gl.constexpr, T: gl.constexpr):
    """Tell the scan if these rows of M are small after the tail, or if nothing lies before it"""
    await_ready(ring, 0)
    if parted(T):
        small = work.tail * 0 + 1
        for turn in range(gl.minimum(work.tail, 0) + 2):  # a bound known to the compiler would be unrolled
            small = gl.minimum(small, try_rows(ring, work, turn, T))
    else:
        small = try_rows(ring, work, part, T)
    verdict.small.index(0 if parted(T) else part).store(gl.full([1], small, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    mbarrier.arrive(verdict.told.index(0), count=1)
