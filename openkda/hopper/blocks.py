"""Products of 16x16 blocks on the matrix unit, a block per warp: scores, transposes, the inverse. Nothing but registers between them."""

from __future__ import annotations

from openkda.hopper.compat import gl, gluon, mma_v2
from openkda.hopper.tiles import block_layout, rsqrt


@gluon.jit
def places():
    """(row, column) of [warps, 16, 16] blocks"""
    mma: gl.constexpr = block_layout(gl.num_warps())
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    return i, j


@gluon.jit
def both_operands(tile, row: gl.constexpr, c: gl.constexpr):
    """Rows row to row + 16 of the c-th 32 channels of tile [warps, rows, K], x as the left operand and x^T as the right one"""
    mma: gl.constexpr = block_layout(gl.num_warps())
    x = tile.slice(row, 16, dim=1).slice(32 * c, 32, dim=2).load(gl.DotOperandLayout(0, mma, 2))
    return x, gl.convert_layout(x.permute((0, 2, 1)), gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def product(a, bt, acc):
    """acc + a b, with b given as its transpose in a's layout: the registers of one operand serve as the other, nothing moves"""
    mma: gl.constexpr = block_layout(gl.num_warps())
    d0: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    d1: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    return mma_v2(gl.convert_layout(a, d0), gl.convert_layout(bt.permute((0, 2, 1)), d1), acc)


@gluon.jit
def transposed(x):
    """x^T of 16-bit blocks x [warps, 16, 16], inside each warp"""
    code: gl.constexpr = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    x = gl.inline_asm_elementwise(code, "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)  # of each quarter
    x = x.reshape([x.shape[0], 2, 8, 2, 8]).permute((0, 3, 2, 1, 4)).reshape([x.shape[0], 16, 16])
    return gl.convert_layout(x, block_layout(gl.num_warps()), assert_trivial=True)


@gluon.jit
def scores(kq, ki, T: gl.constexpr):
    """kd ki^T and qd ki^T [warps, 16, 16], the former in two chains of products, for the inverse waits for it"""
    mma: gl.constexpr = block_layout(gl.num_warps())
    count: gl.constexpr = kq.shape[0]
    zero = gl.zeros([count, 16, 16], gl.float32, mma)
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
    zero = gl.zeros([gl.num_warps(), 16, 16], gl.float32, block_layout(gl.num_warps()))
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


@gluon.jit
def diagonal(x):
    """The diagonals of blocks, [warps, 16]"""
    i, j = places()
    return gl.sum(gl.where(i == j, x, 0.0), axis=2)


@gluon.jit
def query_norms(kq):
    """rsqrt(|q|^2 + 1e-6) of the raw rows of kq [n, 32, K] as [n, 16]: the diagonal of their Gram matrix"""
    count: gl.constexpr = kq.shape[0]
    gram = gl.zeros([count, 16, 16], gl.float32, block_layout(gl.num_warps()))
    for c in gl.static_range(kq.shape[2] // 32):
        x, xt = both_operands(kq, 16, c)
        gram = mma_v2(x, xt, gram)
    return rsqrt(diagonal(gram) + 1e-6)


@gluon.constexpr_function
def newton_code(dtype, row16, row8, pack):
    """PTX of T <- T + T (I - (I - A) T) with A in two parts, after the inverse in `solve_code`"""
    turn = "movmatrix.sync.aligned.m8n8.trans.b16"

    def wide(low, high, x):
        if dtype == gl.bfloat16:
            return f"shl.b32 {low}, {x}, 16; and.b32 {high}, {x}, 0xffff0000;"
        return f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, {x}; cvt.f32.f16 {low}, l; cvt.f32.f16 {high}, h; }}"

    return [
        ".reg .b32 Q1, W1, L1, L2, L3, F1, F2, F3, e0, e1, e2, e3, f0, f1, f2, f3, g0, g1;",
        f"{pack} Q1, x1, x0; {turn} W1, Q1; {turn} U2, P2;",
        *(f"{wide('g0', 'g1', a)} sub.f32 {x}, {x}, g0; sub.f32 {y}, {y}, g1; {pack} {low}, {y}, {x};"
          for a, x, y, low in (("A1", "a0", "a1", "L1"), ("A2", "a2", "a3", "L2"), ("A3", "a6", "a7", "L3"))),
        f"{wide('t0', 't1', 'P1')} {wide('x0', 'x1', 'Q1')} {wide('t2', 't3', 'P2')}",
        "neg.f32 e0, t0; neg.f32 e1, t1; neg.f32 e2, x0; neg.f32 e3, x1; neg.f32 f2, t2; neg.f32 f3, t3;",
        "selp.b32 e0, 0, e0, d; selp.b32 e1, 0, e1, e; selp.b32 f2, 0, f2, d; selp.b32 f3, 0, f3, e;",
        f"{row16} {{e0, e1, e2, e3}}, {{L1, L2, z, L3}}, {{U1, W1}}, {{e0, e1, e2, e3}};",
        f"{row16} {{e0, e1, e2, e3}}, {{A1, A2, z, A3}}, {{U1, W1}}, {{e0, e1, e2, e3}};",
        f"{row8} {{f0, f1, f2, f3}}, {{z, L3}}, {{U2}}, {{z, z, f2, f3}};",
        f"{row8} {{f0, f1, f2, f3}}, {{z, A3}}, {{U2}}, {{z, z, f2, f3}};",
        f"{pack} F1, e1, e0; {pack} F2, e3, e2; {pack} F3, f3, f2; {turn} F1, F1; {turn} F2, F2; {turn} F3, F3;",
        f"{row16} {{t0, t1, x0, x1}}, {{P1, Q1, z, P2}}, {{F1, F2}}, {{t0, t1, x0, x1}};",
        f"{row8} {{f0, f1, t2, t3}}, {{z, P2}}, {{F3}}, {{z, z, t2, t3}};",
    ]  # fmt: skip


@gluon.constexpr_function
def solve_code(dtype, outputs, strong):
    """PTX of `solve`. Operands: four or eight pairs of results, then eight elements each of kk, factor, columns, qk: columns 2 t, 2 t + 1
    of rows g and g + 8 in lane 4 g + t, of the left half, then of the right. Products of the two 8x8 diagonal blocks are one product: in
    the left operand they lie as in the block, in the right one below each other. movmatrix makes right operands of 8x8 blocks."""
    kind = "bf16" if dtype == gl.bfloat16 else "f16"
    row16 = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    row8 = f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32"
    pack = f"cvt.rn.{kind}x2.f32"
    turn = "movmatrix.sync.aligned.m8n8.trans.b16"
    first = 8 if outputs else 4
    kk, factor, columns, qk = ([f"${first + 8 * n + i}" for i in range(8)] for n in range(4))
    lines = [
        "{ .reg .b32 l, g, t, j, m, z, A1, A2, A3, B1, B2, P1, P2, U1, U2, S1, S2, Y1, Y2, c0, c1, c4, c5, Z0, Z1, Z3, V1, V2, V3;",
        ".reg .b32 a0, a1, a2, a3, a6, a7, t0, t1, t2, t3, y0, y1, y2, y3, x0, x1, x2, x3, w0, w1, w2, w3; .reg .pred p, q, d, e, n;",
        "mov.u32 l, %laneid; shr.u32 g, l, 2; and.b32 t, l, 3; shl.b32 j, t, 1; mov.b32 z, 0;",
        "setp.gt.u32 p, g, j; setp.eq.u32 d, g, j; add.u32 m, j, 1; setp.gt.u32 q, g, m; setp.eq.u32 e, g, m;",
        # the columns' factors from the rows'
        "shl.b32 m, t, 3;",
        f"shfl.sync.idx.b32 c0, {columns[0]}, m, 31, -1; shfl.sync.idx.b32 c4, {columns[2]}, m, 31, -1; add.u32 m, m, 4;",
        f"shfl.sync.idx.b32 c1, {columns[0]}, m, 31, -1; shfl.sync.idx.b32 c5, {columns[2]}, m, 31, -1;",
        # A: blocks A1, A3 on the diagonal, A2 below
        *(f"mul.f32 a{i}, {kk[i]}, {factor[i]}; mul.f32 a{i}, a{i}, c{i - i // 2 % 2 * 2};" for i in (0, 1, 2, 3, 6, 7)),
        "selp.b32 a0, a0, 0, p; selp.b32 a1, a1, 0, q; selp.b32 a6, a6, 0, p; selp.b32 a7, a7, 0, q;",
        f"{pack} A1, a1, a0; {pack} A2, a3, a2; {pack} A3, a7, a6; {turn} B1, A1; {turn} B2, A3;",
        # blocks of 2
        "selp.b32 t0, a0, 0, e; selp.b32 t0, 0f3F800000, t0, d; selp.b32 t1, 0f3F800000, 0, e;",
        "selp.b32 t2, a6, 0, e; selp.b32 t2, 0f3F800000, t2, d; mov.b32 t3, t1;",
    ]
    for size in (2, 4):  # what of A joins blocks of `size`: its transpose's places, row g and columns 2 t, 2 t + 1
        lines += [f"{pack} P1, t1, t0; {pack} P2, t3, t2; {turn} U1, P1; {turn} U2, P2;"]
        if size == 2:
            lines += ["shr.u32 m, g, 1; setp.gt.u32 n, t, m; shr.u32 m, t, 1; shr.u32 y0, g, 2; setp.eq.and.u32 n, m, y0, n;"]
        else:
            lines += ["setp.ge.u32 n, t, 2; setp.lt.and.u32 n, g, 4, n;"]
        lines += [
            "selp.b32 S1, B1, 0, n; selp.b32 S2, B2, 0, n;",
            f"{row16} {{y0, y1, y2, y3}}, {{P1, z, z, P2}}, {{S1, S2}}, {{z, z, z, z}};",
            f"{pack} Y1, y1, y0; {pack} Y2, y3, y2; {row16} {{t0, t1, t2, t3}}, {{Y1, z, z, Y2}}, {{U1, U2}}, {{t0, t1, t2, t3}};",
        ]
    lines += [  # T21 = T22 (A21 T11)
        f"{pack} P1, t1, t0; {pack} P2, t3, t2; {turn} U1, P1;",
        f"{row8} {{y0, y1, y2, y3}}, {{U1, z}}, {{A2}}, {{z, z, z, z}}; {pack} Y1, y1, y0;",
        f"{row8} {{x0, x1, x2, x3}}, {{P2, z}}, {{Y1}}, {{z, z, z, z}};",
        *(newton_code(dtype, row16, row8, pack) if strong else ()),
        f"{pack} P1, t1, t0; {pack} Y1, x1, x0; {pack} P2, t3, t2; mov.b32 $0, P1; mov.b32 $1, Y1; mov.b32 $2, z; mov.b32 $3, P2;",
    ]
    if outputs:
        lines += [
            f"{turn} V1, P1; {turn} V2, Y1; {turn} V3, P2; or.pred p, p, d; or.pred q, q, e;",
            f"mul.f32 w0, {qk[0]}, c0; mul.f32 w1, {qk[1]}, c1; mul.f32 w2, {qk[6]}, c4; mul.f32 w3, {qk[7]}, c5;",
            "selp.b32 w0, w0, 0, p; selp.b32 w1, w1, 0, q; selp.b32 w2, w2, 0, p; selp.b32 w3, w3, 0, q;",
            f"mul.f32 y0, {qk[2]}, c0; mul.f32 y1, {qk[3]}, c1;",
            f"{pack} Z0, w1, w0; {pack} Z1, y1, y0; {pack} Z3, w3, w2;",
            f"{row16} {{y0, y1, y2, y3}}, {{Z0, Z1, z, Z3}}, {{V1, V2}}, {{z, z, z, z}};",
            f"{row8} {{w0, w1, w2, w3}}, {{z, Z3}}, {{V3}}, {{z, z, z, z}};",
            f"{pack} $4, y1, y0; {pack} $5, y3, y2; mov.b32 $6, z; {pack} $7, w3, w2;",
        ]
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def result_types(dtype, outputs):
    return (dtype, dtype) if outputs else (dtype,)


@gluon.jit
def solve(kk, qk, factor, columns, dtype: gl.constexpr, outputs: gl.constexpr, strong: gl.constexpr):
    """(T, Z T) of 16x16 blocks, T = (I - A)^-1, A = diag(factor) tril(kk, -1) diag(columns), Z = tril(qk) diag(columns); factor, columns
    [warps, 16]. Without outputs (T, T). T <- T + (T A_s) T over block sizes 2, 4, 8, then the lower left of 16; operands in `dtype`, fp32
    sums. One opaque step on registers: seven products where whole 16x16 ones would be twenty. strong: beta may exceed 1; nearly equal keys
    then make T of alternating numbers, which a rounded A alone moves by a tenth, so a step of Newton's follows, six products more."""
    code: gl.constexpr = solve_code(dtype, outputs, strong)
    form: gl.constexpr = "=&r" + ",=&r" * (7 if outputs else 3) + ",r" * (32 if outputs else 24)
    zero = gl.zeros([kk.shape[0], 16, 16], gl.float32, block_layout(gl.num_warps()))
    factor = gl.expand_dims(factor, 2) + zero
    columns = gl.expand_dims(columns, 2) + zero
    types: gl.constexpr = result_types(dtype, outputs)
    if outputs:
        return gl.inline_asm_elementwise(code, form, [kk, factor, columns, qk], dtype=types, is_pure=True, pack=8)
    else:
        T = gl.inline_asm_elementwise(code, form, [kk, factor, columns], dtype=types, is_pure=True, pack=8)[0]
        return T, T
