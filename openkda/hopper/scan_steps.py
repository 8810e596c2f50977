"""The scan of a step, two blocks of 16 tokens, in one turn (steps.py), for 64 rows of V in a block of a cluster. S is the state before the
step, transposed, [64 rows of V, K]:

    X_1, Oq_1, X_2, Oq_2 = S (kd_1, qd_1, kd_2, qd_2)^T
    Rt_1, Oz_1           = D_1 (T_1, Z_1 T_1)^T             D_1 = v_1 - r_k X_1, then Rt_1 <- Rt_1 beta r_k, as in scan.py
    X_2, Oq_2            = X_2, Oq_2 + D_1 cross^T
    S                    = S * decay_1 + Rt_1 kg_1
    Rt_2, Oz_2           = D_2 (T_2, Z_2 T_2)^T             D_2 = v_2 - r_k X_2
    S                    = (S + Rt_2 ki_2) * decay_2"""

from __future__ import annotations

from openkda.hopper.cluster import group_place, rank_of
from openkda.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from openkda.hopper.entries import store_entry
from openkda.hopper.scan import (
    difference,
    first_state,
    halves,
    last_state,
    live_values,
    load_values,
    start_solve,
    start_update,
    store_live_rows,
    update_state,
)
from openkda.hopper.tiles import first_row, group_layout, quiet


@gluon.jit
def store_step(out, first, second, row, work, HV, T: gl.constexpr):
    """Store 32 rows of o, [64, 16] of either block: by the copy engine where the block writes all of them, else masked"""
    if (row >= first_row(work)) & (row + 32 <= work.end) if quiet(T) else row + 32 <= work.end:
        tma.store_wait(0)
        out.tile.index(0).permute((1, 0)).store(first)
        out.tile.index(1).permute((1, 0)).store(second)
        fence_async_shared()
        column = work.head * T.V + work.row0
        tma.async_copy_shared_to_global(out.desc, [row, column], out.tile.index(0))
        tma.async_copy_shared_to_global(out.desc, [row + 16, column], out.tile.index(1))
    else:
        store_live_rows(out, (first,), row, work, HV, T)
        store_live_rows(out, (second,), row + 16, work, HV, T)


@gluon.jit
def read_step(ring, s, S):
    """(X, Oq) of both blocks of step s from the state before it, begun"""
    L32: gl.constexpr = group_layout(32, gl.num_warps())
    SA = gl.convert_layout(S.to(ring.kq.dtype), gl.DotOperandLayout(0, L32, 2))
    zero = gl.zeros([S.shape[0], 32], gl.float32, L32)
    first = warpgroup_mma(SA, ring.kq.index(2 * s).permute((1, 0)), zero, use_acc=False, is_async=True)
    return first, warpgroup_mma(SA, ring.kq.index(2 * s + 1).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def solve_first(ring, s, XO, v, read, XO2):
    """(Rt, Oz of the first block begun, Oq of the first block, X, Oq of the second block from the state after the first, begun)"""
    L32: gl.constexpr = group_layout(32, gl.num_warps())
    X, O = halves(XO)
    D = gl.convert_layout(difference(v, X, read), gl.DotOperandLayout(0, L32, 2))
    zero = gl.zeros([v.shape[0], 32], gl.float32, L32)
    RO = warpgroup_mma(D, ring.tz.index(2 * s).permute((1, 0)), zero, use_acc=False, is_async=True)
    return RO, O, warpgroup_mma(D, ring.beside.index(s).permute((1, 0)), XO2, is_async=True)


@gluon.jit
def next_step(ring, n, rank, T: gl.constexpr):
    """Where step n of the item lies, once it is ready"""
    at, phase = group_place(n // 2, rank, T)
    if (n % 2 == 0) | (at == T.groups - 1):
        mbarrier.wait(ring.ready.index(at + n % 2), phase)
    return 2 * at + n % 2


@gluon.jit
def skip_steps(ring, S, count, rank, T: gl.constexpr):
    """S after `count` steps, without output: the same products with the rows of k alone, so the same bits"""
    R: gl.constexpr = T.R
    L: gl.constexpr = group_layout(T.K, gl.num_warps())
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    D16: gl.constexpr = gl.DotOperandLayout(0, L16, 2)
    dtype: gl.constexpr = ring.kq.dtype
    zero = gl.zeros([R, 16], gl.float32, L16)
    for n in range(count):
        s = next_step(ring, n, rank, T)
        SA = gl.convert_layout(S.to(dtype), D16)
        X = warpgroup_mma(SA, ring.kq.index(2 * s).slice(0, 16, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
        Y = warpgroup_mma(SA, ring.kq.index(2 * s + 1).slice(0, 16, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
        v = load_values(ring, 2 * s, 0, R)
        S = S * ring.decay.index(2 * s).load(L)
        read = ring.read.index(2 * s).load(L16)
        X = warpgroup_mma_wait(1, deps=(X,))
        D = gl.convert_layout(difference(v, X, read), D16)
        Rt = warpgroup_mma(D, ring.tz.index(2 * s).slice(0, 16, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
        Y = warpgroup_mma(D, ring.beside.index(s).slice(0, 16, dim=0).permute((1, 0)), Y, is_async=True)
        v = load_values(ring, 2 * s + 1, 0, R)
        read = ring.read.index(2 * s + 1).load(L16)
        gain = ring.gain.index(2 * s).load(L16)
        Rt = warpgroup_mma_wait(1, deps=(Rt,))
        S = update_state(S, Rt, ring, 2 * s, gain)
        Y = warpgroup_mma_wait(1, deps=(Y,))
        D = gl.convert_layout(difference(v, Y, read), D16)
        Rt = warpgroup_mma(D, ring.tz.index(2 * s + 1).slice(0, 16, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
        gain = ring.gain.index(2 * s + 1).load(L16)
        S = warpgroup_mma_wait(1, deps=(S,))
        Rt = warpgroup_mma_wait(0, deps=(Rt,))
        S = update_state(S, Rt, ring, 2 * s + 1, gain)
        decay = ring.decay.index(2 * s + 1).load(L)
        S = warpgroup_mma_wait(0, deps=(S,))
        S = S * decay
        mbarrier.arrive(ring.empty.index(s), count=1)
    return S


@gluon.jit
def scan_steps(ring, out, states, work, HV, T: gl.constexpr):
    """An item. Outputs are stored a step late, under the next step's first products."""
    R: gl.constexpr = T.R
    L: gl.constexpr = group_layout(T.K, gl.num_warps())
    L16: gl.constexpr = group_layout(16, gl.num_warps())
    S = first_state(states, 0, work, HV, 0, R, T)
    rank = rank_of(T)
    first = 0
    if quiet(T):
        first = work.tail // 2
        S = skip_steps(ring, S, first, rank, T)
    o = gl.zeros([R, 16], out.tile.dtype, L16)
    p = o
    row = work.start
    for n in range(first, work.steps):
        s = next_step(ring, n, rank, T)
        X, Y = read_step(ring, s, S)
        store_entry(states, S, row + 32 * n, work, HV, 0, T)
        v = live_values(ring, 2 * s, work.end - (row + 32 * n), T)
        read = ring.read.index(2 * s).load(L16)
        S = S * ring.decay.index(2 * s).load(L)
        if n > first:
            store_step(out, o, p, row + 32 * (n - 1), work, HV, T)
        X = warpgroup_mma_wait(1, deps=(X,))
        RO, O, Y = solve_first(ring, s, X, v, read, Y)
        gain = ring.gain.index(2 * s).load(L16)
        v = live_values(ring, 2 * s + 1, work.end - (row + 32 * n + 16), T)
        read = ring.read.index(2 * s + 1).load(L16)
        RO = warpgroup_mma_wait(1, deps=(RO,))
        S, Oz = start_update(ring, 2 * s, RO, S, gain)
        Y = warpgroup_mma_wait(1, deps=(Y,))
        RO, P = start_solve(ring, 2 * s + 1, Y, v, read)
        gain = ring.gain.index(2 * s + 1).load(L16)
        o = ((O + Oz) * ring.write.index(2 * s).load(L16)).to(out.tile.dtype)
        S = warpgroup_mma_wait(1, deps=(S,))
        RO = warpgroup_mma_wait(0, deps=(RO,))
        S, Oz = start_update(ring, 2 * s + 1, RO, S, gain)
        decay = ring.decay.index(2 * s + 1).load(L)
        p = ((P + Oz) * ring.write.index(2 * s + 1).load(L16)).to(out.tile.dtype)
        S = warpgroup_mma_wait(0, deps=(S,))
        S = S * decay
        mbarrier.arrive(ring.empty.index(s), count=1)
    if work.steps > 0:
        store_step(out, o, p, row + 32 * (work.steps - 1), work, HV, T)
    tma.store_wait(0)
    last_state(states, S, work, HV, 0, T)
