"""What the roles of the Hopper forward share: PTX one-liners, layouts, the shared-memory ring and the description of a block's work."""

from __future__ import annotations

from typing import NamedTuple

from openkda.hopper.compat import gl, gluon, mbarrier

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def ex2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rcp(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rsqrt(x):
    return gl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def to_f32(x):
    """fp32 of a tile; bf16 two at a time, one shift and one mask"""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def scaled_exp2(x, e):
    """x 2^e, rounded to x's dtype, two elements at a time. One opaque step, so that no fp32 copy of x or 2^e stays in registers."""
    if x.dtype == gl.bfloat16:
        code: gl.constexpr = """{ .reg .b32 a, b, s, t; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;
            ex2.approx.ftz.f32 s, $2; ex2.approx.ftz.f32 t, $3; mul.f32 a, a, s; mul.f32 b, b, t; cvt.rn.bf16x2.f32 $0, b, a; }"""
    else:
        code: gl.constexpr = """{ .reg .b16 l, h; .reg .b32 a, b, s, t; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h;
            ex2.approx.ftz.f32 s, $2; ex2.approx.ftz.f32 t, $3; mul.f32 a, a, s; mul.f32 b, b, t; cvt.rn.f16x2.f32 $0, b, a; }"""
    return gl.inline_asm_elementwise(code, "=r,r,r,r", [x, e], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def outward(k, q, e):
    """(k 2^e, q 2^e, k 2^-e) of bf16 tiles, as scaled_exp2"""
    code: gl.constexpr = """{ .reg .b32 a, b, s, t, u, v, c, d; shl.b32 a, $3, 16; and.b32 b, $3, 0xffff0000;
        ex2.approx.ftz.f32 s, $5; ex2.approx.ftz.f32 t, $6; neg.f32 u, $5; neg.f32 v, $6; ex2.approx.ftz.f32 u, u; ex2.approx.ftz.f32 v, v;
        mul.f32 c, a, s; mul.f32 d, b, t; cvt.rn.bf16x2.f32 $0, d, c; mul.f32 a, a, u; mul.f32 b, b, v; cvt.rn.bf16x2.f32 $2, b, a;
        shl.b32 a, $4, 16; and.b32 b, $4, 0xffff0000; mul.f32 a, a, s; mul.f32 b, b, t; cvt.rn.bf16x2.f32 $1, b, a; }"""
    types: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16)
    return gl.inline_asm_elementwise(code, "=&r,=&r,=&r,r,r,r,r", [k, q, e], dtype=types, is_pure=True, pack=2)


@gluon.jit
def shifted(x, a, b):
    """x a b, bf16 throughout: exact for powers of two a and b"""
    code: gl.constexpr = "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $2; mul.rn.bf16x2 $0, t, $3; }"
    return gl.inline_asm_elementwise(code, "=r,r,r,r", [x, a, b], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def floor(x):
    return gl.inline_asm_elementwise("cvt.rmi.ftz.f32.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def softplus2(x):
    """log2(1 + 2^x) = max(x, 0) + e P(e), e = 2^-|x|. P, of degree 6, has relative error 1.4e-6, however small e is."""
    code: gl.constexpr = """{ .reg .f32 e, s, m; abs.f32 e, $1; neg.f32 e, e; ex2.approx.ftz.f32 e, e;
        fma.rn.f32 s, e, 0f3CA72064, 0fBDC43183; fma.rn.f32 s, s, e, 0f3E5C738F; fma.rn.f32 s, s, e, 0fBEAD9D14;
        fma.rn.f32 s, s, e, 0f3EF490F3; fma.rn.f32 s, s, e, 0fBF389DE8; fma.rn.f32 s, s, e, 0f3FB8AA2C;
        max.f32 m, $1, 0f00000000; fma.rn.f32 $0, s, e, m; }"""
    return gl.inline_asm_elementwise(code, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def last(a, b):
    return b


@gluon.constexpr_function
def channel_layout(K):
    """[2, 16, K]: a thread holds the 16 tokens of a block for K/64 channels, so sums over tokens need no exchange"""
    return gl.BlockedLayout([1, 16, K // 64], [1, 1, 32], [2, 1, 2], [2, 1, 0])


@gluon.constexpr_function
def half_layout(K):
    """[2, 8, K]: 8 tokens of each block, otherwise as channel_layout"""
    return gl.BlockedLayout([1, 8, K // 64], [1, 1, 32], [2, 1, 2], [2, 1, 0])


@gluon.constexpr_function
def block_layout():
    """[4, 16, 16] accumulators, one 16x16 block per warp: (k rows, q rows) of the first and of the second block"""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def group_layout(n, warps):
    """[rows, n] accumulators of the warpgroup unit"""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, n, 16])


@gluon.constexpr_function
def shared_layout(bits):
    return gl.NVMMASharedLayout(128, bits, 2)


@gluon.constexpr_function
def plain_shared():
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


class Source(NamedTuple):
    """Where a block's inputs come from"""

    q: object  # tensor descriptors over [B*T, H*K], boxes of 16 rows; q is k's where no output is asked
    k: object
    v: object  # [B*T, HV*V], boxes of 32 rows x R
    g: object  # [B*T, HV*K], boxes of 32 rows
    beta_ptr: object  # [B*T, HV]
    A_log_ptr: object  # [HV] fp32 or None
    dt_bias_ptr: object  # [HV, K] fp32 or None
    HV: object
    lower_bound: object  # natural log, fp32; read by the bounded gate alone
    scale: object


class Work(NamedTuple):
    """What one block does: the steps of one segment of one sequence, for one value head and R rows of V"""

    sequence: object
    start: object  # first row
    end: object
    steps: object
    tail: object  # how many of them come before the segment, to find its entry state
    head: object
    qk_head: object
    row0: object  # first row of V
    from_initial: object  # start is the sequence's first row: the state starts from initial_state
    from_entry: object  # the state starts from the segment's entry state
    is_last: object  # the segment ends its sequence: the state ends in final_state


class Ring(NamedTuple):
    """Shared memory: `slots` steps of 32 tokens in flight, and their barriers"""

    kq: object  # [slots, 64, K] raw (k0, q0, k1, q1), then decayed (kd0, qd0, kd1, qd1)
    g: object  # [slots, 32, K] raw gate
    ki: object  # [slots * (gate bytes / 2), 32, K], the bytes of g in kq's dtype: k / exp(G), or kg
    v: object  # [slots, 32, R]
    tz: object  # [slots, 64, 16] (T0, Z0 T0, T1, Z1 T1)
    decay: object  # [slots, 2, K] fp32 exp(G_C)
    rows: object  # [slots, 4, 16] fp32 row scales (-rk, scale * rq) of the two blocks
    full: object  # barriers: raw tiles have landed
    ready: object  # the step is prepared
    empty: object  # the scan is done with the slot


@gluon.jit
def make_ring(src, T: gl.constexpr):
    K: gl.constexpr = T.K
    R: gl.constexpr = T.R
    slots: gl.constexpr = T.slots
    dtype: gl.constexpr = src.k.dtype
    g_dtype: gl.constexpr = src.g.dtype
    g_bits: gl.constexpr = src.g.dtype.primitive_bitwidth
    per_slot: gl.constexpr = g_bits // 16
    kq = gl.allocate_shared_memory(dtype, [slots, 64, K], shared_layout(16))
    g = gl.allocate_shared_memory(g_dtype, [slots, 32, K], shared_layout(g_bits))
    ki = g._reinterpret(dtype, [slots * per_slot, 32, K], shared_layout(16))
    v = gl.allocate_shared_memory(dtype, [slots, 32, R], shared_layout(16))
    tz = gl.allocate_shared_memory(dtype, [slots, 64, 16], gl.NVMMASharedLayout(32, 16, 2))
    decay = gl.allocate_shared_memory(gl.float32, [slots, 2, K], plain_shared())
    rows = gl.allocate_shared_memory(gl.float32, [slots, 4, 16], plain_shared())
    full = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(slots):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    return Ring(kq, g, ki, v, tz, decay, rows, full, ready, empty)
