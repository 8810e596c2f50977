"""Chunk-entry states of the Hopper forward: S, in a scan's accumulators [64 rows of V, K], written at the entry of a chunk as `h` in the
caller's layout and the inputs' dtype, by plain stores under a block's first product."""

from __future__ import annotations

from openkda.hopper.compat import gl, gluon
from openkda.hopper.tiles import first_row, late


@gluon.constexpr_function
def entry_layout(K):
    """[64, K], 16 bytes a thread and 64 bytes of a row side by side. An accumulator comes to it without leaving its warp."""
    columns = [[0, 2**i] for i in range(K.bit_length() - 1)]
    lanes = [*columns[3:5], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*columns[:3], *columns[5:], [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, K])


@gluon.jit
def transposed(x):
    """x, a 16-bit accumulator, with each block of 8x8 transposed in place"""
    code: gl.constexpr = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return gl.inline_asm_elementwise(code, "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def store_entry(states, S, row, work, HV, first: gl.constexpr, T: gl.constexpr):
    """Where a chunk begins at `row`, write S [64, K], the rows from `first` on of the state before it.

    Wider pieces take an exchange between threads. T8192 H64, chunks of 64, microseconds at 6646188 where tails suffice and where
    not: V first 387 and 438, without it 418 and 492; K first 436 and 475, without it 375 and 485."""
    if T.chunk > 0:
        since = row - work.first
        due = since % T.chunk == 0
        if late(T):
            due &= row >= first_row(work)
        if due:
            K: gl.constexpr = T.K
            V: gl.constexpr = T.V
            base = states.h_ptr + ((work.chunk + since // T.chunk).to(gl.int64) * HV + work.head) * (K * V)
            x = S.to(states.h_ptr.dtype.element_ty)
            if T.state_v_first:
                x = gl.convert_layout(x, entry_layout(K))
            else:
                x = transposed(x)
            r = gl.arange(0, 64, layout=gl.SliceLayout(1, x.type.layout))[:, None]
            c = gl.arange(0, K, layout=gl.SliceLayout(0, x.type.layout))[None, :]
            if T.state_v_first:
                gl.store(base + (work.row0 + first) * K + (r * K + c), x)
            else:
                gl.store(base + (work.row0 + first) + ((c // 8 * 8 + r % 8) * V + (r // 8 * 8 + c % 8)), x)
