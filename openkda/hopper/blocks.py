"""Products of 16x16 blocks on the matrix unit, a block per warp: scores, transposes, the inverse. Nothing but registers between them."""

from __future__ import annotations

from openkda.hopper.compat import gl, gluon, mma_v2
from openkda.hopper.tiles import block_layout


@gluon.jit
def places():
    """(row, column) of [4, 16, 16] blocks"""
    mma: gl.constexpr = block_layout()
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    return i, j


@gluon.jit
def both_operands(tile, row: gl.constexpr, c: gl.constexpr):
    """Rows row to row + 16 of the c-th 32 channels of tile [4, rows, K], x as the left operand and x^T as the right one"""
    mma: gl.constexpr = block_layout()
    x = tile.slice(row, 16, dim=1).slice(32 * c, 32, dim=2).load(gl.DotOperandLayout(0, mma, 2))
    xt = tile.permute((0, 2, 1)).slice(row, 16, dim=2).slice(32 * c, 32, dim=1).load(gl.DotOperandLayout(1, mma, 2))
    return x, xt


@gluon.jit
def product(a, bt, acc):
    """acc + a b, with b given as its transpose in a's layout: the registers of one operand serve as the other, nothing moves"""
    mma: gl.constexpr = block_layout()
    d0: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    d1: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    return mma_v2(gl.convert_layout(a, d0), gl.convert_layout(bt.permute((0, 2, 1)), d1), acc)


@gluon.jit
def transposed(x):
    """x^T of 16-bit blocks x [4, 16, 16], inside each warp"""
    code: gl.constexpr = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    x = gl.inline_asm_elementwise(code, "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)  # of each quarter
    x = x.reshape([4, 2, 8, 2, 8]).permute((0, 3, 2, 1, 4)).reshape([4, 16, 16])
    return gl.convert_layout(x, block_layout(), assert_trivial=True)


@gluon.jit
def scores(kq, ki, T: gl.constexpr):
    """kd ki^T and qd ki^T [4, 16, 16], the former in two chains of products, for the inverse waits for it"""
    mma: gl.constexpr = block_layout()
    zero = gl.zeros([4, 16, 16], gl.float32, mma)
    kk0, kk1, qk = zero, zero, zero
    for c in gl.static_range(T.K // 32):
        columns = ki.permute((0, 2, 1)).slice(0, 16, dim=2).slice(32 * c, 32, dim=1).load(gl.DotOperandLayout(1, mma, 2))
        k = kq.slice(0, 16, dim=1).slice(32 * c, 32, dim=2).load(gl.DotOperandLayout(0, mma, 2))
        if c % 2 == 0:
            kk0 = mma_v2(k, columns, kk0)
        else:
            kk1 = mma_v2(k, columns, kk1)
        if T.outputs:
            qk = mma_v2(kq.slice(16, 16, dim=1).slice(32 * c, 32, dim=2).load(gl.DotOperandLayout(0, mma, 2)), columns, qk)
    return kk0 + kk1, qk


@gluon.jit
def invert(A, dtype: gl.constexpr):
    """((I - A)^-1, its transpose) of strictly lower 16x16 blocks A by T <- T + (T A_s) T over block sizes 2, 4, 8, 16; operands in `dtype`,
    fp32 sums. The transpose is carried along because it is the other operand's register layout."""
    i, j = places()
    zero = gl.zeros([4, 16, 16], gl.float32, block_layout())
    At = transposed(A.to(dtype))
    T = gl.where(i == j, 1.0, gl.where(i // 2 == j // 2, A, 0.0))
    U = gl.where(i == j, 1.0, gl.where(i // 2 == j // 2, At.to(gl.float32), 0.0))
    for lv in gl.static_range(1, 4):
        part = ((i >> (lv + 1)) == (j >> (lv + 1))) & ((i >> lv) != (j >> lv))
        Ub = U.to(dtype)
        Y = product(T.to(dtype), gl.where(part, At, 0.0), zero).to(dtype)
        T = product(Y, Ub, T)
        U = product(Ub, Y, U)
    return T, U
