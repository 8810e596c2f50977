"""What the roles of the Hopper forward share: PTX one-liners, layouts, the shared-memory ring and the description of a block's work."""

from __future__ import annotations

from typing import NamedTuple

from openkda.hopper.cluster import EMPTY, READY, SCALES, own_places
from openkda.hopper.compat import gl, gluon, mbarrier

LOG2E = gl.constexpr(1.4426950408889634)
WIDTH = gl.constexpr(64)  # channels that a warp turns at a time: two a thread, which suits the matrix loads and stores of shared memory


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
def computed_here(x):
    """The int32 x, computed where this stands: the compiler neither moves nor repeats it"""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


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
def outward_key(k, up, e, w):
    """(k up, k 2^-e, k 2^-e w) of a bf16 tile, as scaled_exp2; w may be denormal"""
    code: gl.constexpr = """{ .reg .b32 a, b, s, t; shl.b32 a, $3, 16; and.b32 b, $3, 0xffff0000;
        neg.f32 s, $6; neg.f32 t, $7; ex2.approx.ftz.f32 s, s; ex2.approx.ftz.f32 t, t; mul.f32 s, s, a; mul.f32 t, t, b;
        mul.f32 a, a, $4; mul.f32 b, b, $5; cvt.rn.bf16x2.f32 $0, b, a;
        cvt.rn.bf16x2.f32 $1, t, s; mul.f32 s, s, $8; mul.f32 t, t, $9; cvt.rn.bf16x2.f32 $2, t, s; }"""
    types: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16)
    return gl.inline_asm_elementwise(code, "=&r,=&r,=&r,r,r,r,r,r,r,r", [k, up, e, w], dtype=types, is_pure=True, pack=2)


@gluon.jit
def scaled(x, up):
    """x up of a bf16 tile, rounded to bf16"""
    code: gl.constexpr = """{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;
        mul.f32 a, a, $2; mul.f32 b, b, $3; cvt.rn.bf16x2.f32 $0, b, a; }"""
    return gl.inline_asm_elementwise(code, "=r,r,r,r", [x, up], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def ex2_denormal(x):
    """2^x down to 2^-149"""
    return gl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def shifted(x, a):
    """x a, bf16 throughout: exact for powers of two a"""
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, a], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def fused(x, a, y):
    """x a + y, bf16 throughout, rounded once"""
    return gl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, a, y], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def kept(x, mask):
    """16-bit x where `mask` is -1, 0 where it is 0, two elements at a time: a selection of single elements takes the pairs apart"""
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def floor(x):
    return gl.inline_asm_elementwise("cvt.rmi.ftz.f32.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2p(e):
    """log2(1 + e), e in [0, 1], as e P(e). P, of degree 5, has relative error 8.5e-6, however small e is."""
    s = e * -0.03443590924143791 + 0.1460328996181488
    s = s * e - 0.3030362129211426
    s = s * e + 0.4691740870475769
    s = s * e - 0.7204261422157288
    return (s * e + 1.4426828622817993) * e


@gluon.jit
def softplus2(x):
    """log2(1 + 2^x)"""
    code: gl.constexpr = "{ .reg .f32 e; abs.f32 e, $1; neg.f32 e, e; ex2.approx.ftz.f32 $0, e; }"
    e = gl.inline_asm_elementwise(code, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)
    return log2p(e) + gl.maximum(x, 0.0)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def last(a, b):
    return b


@gluon.constexpr_function
def channel_layout(K, rows, warps):
    """[warps, rows, K]: a warp holds a block, a thread `rows` tokens of K/32 channels, so sums over tokens need no exchange"""
    return gl.BlockedLayout([1, rows, K // 32], [1, 1, 32], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def block_layout(warps):
    """[warps, 16, 16] accumulators, one block per warp"""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def group_layout(n, warps):
    """[rows, n] accumulators of the warpgroup unit"""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, n, 16])


@gluon.constexpr_function
def tile_layout(bits, swizzle=128):
    """A tile as the copy engine and the warpgroup unit know it: rows of `swizzle` bytes"""
    return gl.NVMMASharedLayout(swizzle, bits, 2)


@gluon.constexpr_function
def row_bases(rows, columns, bits, swizzle):
    """Where the elements of a tile of `tile_layout` lie: (row, column) of element 1, 2, 4, ..."""
    vec = 128 // bits
    chunks = swizzle // 16
    bases = [[0, 1 << i] for i in range(vec.bit_length() - 1)]
    bases += [[0, vec << i] for i in range(chunks.bit_length() - 1)]
    r = 1
    while r < rows:
        turn = r * chunks // 8 if r < 8 else 0  # which 16-byte chunk comes first turns with the row
        bases += [[r, vec * turn]]
        r *= 2
    c = vec * chunks
    while c < columns:
        bases += [[0, c]]
        c *= 2
    return bases


@gluon.constexpr_function
def row_layout(rows, columns, bits, swizzle=128):
    """[rows, columns]: a tile of `tile_layout`, of which parts can be read"""
    return gl.SharedLinearLayout(row_bases(rows, columns, bits, swizzle), [], 1024)


@gluon.constexpr_function
def stack_layout(count, rows, columns, bits, swizzle=128):
    """[count, rows, columns]: tiles of `tile_layout` one after another"""
    bases = [[0, *x] for x in row_bases(rows, columns, bits, swizzle)]
    return gl.SharedLinearLayout([*bases, *([1 << i, 0, 0] for i in range(count.bit_length() - 1))], [], 1024)


@gluon.constexpr_function
def plain_shared(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])


class Source(NamedTuple):
    """Where a block's inputs come from"""

    q: object  # tensor descriptors over [B*T, H*K], boxes of 16 rows; q is k's where no output is asked
    k: object
    v: object  # [B*T, HV*V], boxes of 16 rows x R
    g: object  # [B*T, HV*K], boxes of 16 rows
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
    tail: object  # blocks of 16 tokens before what the block writes, for its entry state
    head: object
    qk_head: object
    row0: object  # first row of V
    from_initial: object  # start is the sequence's first row: the state starts from initial_state
    from_entry: object  # the state starts from the segment's entry state
    is_last: object  # the segment ends its sequence: the state ends in final_state
    first: object  # the sequence's first row
    chunk: object  # the number of its first chunk, where chunk-entry states are written


class Ring(NamedTuple):
    """Shared memory: `groups` groups of `wide` blocks of 16 tokens in flight, block by block, and their barriers"""

    kq: object  # [blocks, 32, K] raw (k, q), then decayed (kd, qd)
    g: object  # [blocks, 16, K] raw gate
    ki: object  # [blocks, 16, K], or the first of twice as many rows: k / exp(G) or kg, in the bytes of g
    v: object  # [blocks, 16, R]
    tz: object  # [blocks, 32, 16] (T, Z T)
    beside: object  # what a form needs beside these: [blocks / 2, 32, 16], steps.py; Spread, spread.py; else tz
    decay: object  # [blocks, 1, K] fp32 exp(G_C)
    read: object  # [blocks, 1, 16] fp32 -r_k
    write: object  # [blocks, 1, 16] fp32 scale r_q
    gain: object  # [blocks, 1, 16] fp32 beta r_k
    full: object  # [groups] barriers (spread.py: [blocks / 2]): the raw tiles have landed, requested by operand and two blocks at a time
    ready: object  # [groups] the group is prepared
    empty: object  # [blocks / 2] the scan is done with two blocks


class Spread(NamedTuple):
    """What spread.py keeps beside the ring; of a bounded gate the first two alone"""

    normed: object  # [blocks / 4] barriers: norms of q are taken, its raw tiles may go
    edges: object  # [4, K] fp32: the last rows of the sums of a step's halves
    columns: object  # [wide, 16, K] k exp(-G) of a group
    across: object  # [wide, 16, K] the same times exp(n + SHIFT); the last 8 rows are not read
    grown: object  # [4, K] fp32: their q
    down: object  # [wide / 2, 2, K] exp(n)
    odd: object  # [2, 2, K] fp32: edges and grown of a block that the scan's warps turn
    turned: object  # barrier: they have


@gluon.constexpr_function
def steps_awaited(T):
    """Steps whose tiles one of `full` awaits: a group's, or one where steps are turned one by one"""
    return 1 if T.spread else T.wide // 2


@gluon.constexpr_function
def by_scan(T):
    """Whether the scan's warps turn the last block of an odd number of them, while the preparation turns the others (spread.py)"""
    return T.spread and T.form == "halves" and T.groups == 1


@gluon.constexpr_function
def late(T):
    """Whether the rows that a block writes may begin after those that it goes through"""
    return T.split in ("whole", "rest", "lanes")


@gluon.constexpr_function
def quiet(T):
    """Whether what comes before those rows goes through loops of its own, without q and outputs"""
    return late(T) and T.R == 64


@gluon.jit
def first_row(work):
    """The first row that the block writes"""
    return work.start + 16 * work.tail


@gluon.constexpr_function
def state_only(T):
    """Tiles of a preparation without q"""
    return T.without_outputs()


@gluon.jit
def group_count(steps, T: gl.constexpr):
    """Groups that so many steps fill"""
    per: gl.constexpr = T.wide // 2  # steps of a group
    return (steps + per - 1) // per


@gluon.jit
def share(groups, rank, T: gl.constexpr):
    """How many of so many groups the block prepares; in a cluster, the one of that rank"""
    if T.cluster:
        return (groups + 1 - rank) // 2
    else:
        return groups


@gluon.jit
def own_groups(work, rank, T: gl.constexpr):
    """How many of an item's groups the block prepares"""
    return share(group_count(work.steps, T), rank, T)


@gluon.jit
def quiet_groups(work, T: gl.constexpr):
    """How many of an item's first groups hold no row that the block writes"""
    if quiet(T):
        return work.tail // T.wide
    else:
        return 0


@gluon.jit
def make_spread(dtype: gl.constexpr, T: gl.constexpr):
    edges = gl.allocate_shared_memory(gl.float32, [4, T.K], plain_shared(2))
    normed = gl.allocate_shared_memory(gl.int64, [T.wide * T.groups // 4, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(T.wide * T.groups // 4):
        mbarrier.init(normed.index(c), count=1)
    if T.form == "product":
        return Spread(normed, edges, edges, edges, edges, edges, edges, normed)
    else:
        columns = gl.allocate_shared_memory(dtype, [T.wide, 16, T.K], tile_layout(16))
        across = gl.allocate_shared_memory(dtype, [T.wide, 16, T.K], tile_layout(16))
        grown = gl.allocate_shared_memory(gl.float32, [4, T.K], plain_shared(2))
        down = gl.allocate_shared_memory(dtype, [T.wide // 2, 2, T.K], plain_shared(2))
        odd = gl.allocate_shared_memory(gl.float32, [2, 2, T.K], plain_shared(2))
        turned = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(turned.index(0), count=1)
        return Spread(normed, edges, columns, across, grown, down, odd, turned)


@gluon.jit
def make_ring(src, T: gl.constexpr):
    K: gl.constexpr = T.K
    R: gl.constexpr = T.R
    groups: gl.constexpr = T.groups
    blocks: gl.constexpr = T.wide * T.groups
    dtype: gl.constexpr = src.k.dtype
    g_dtype: gl.constexpr = src.g.dtype
    g_bits: gl.constexpr = src.g.dtype.primitive_bitwidth
    kq = gl.allocate_shared_memory(dtype, [blocks, 32, K], tile_layout(16))
    g = gl.allocate_shared_memory(g_dtype, [blocks, 16, K], tile_layout(g_bits))
    ki = g._reinterpret(dtype, [blocks, g_bits, K], tile_layout(16))
    v = gl.allocate_shared_memory(dtype, [blocks, 16, R], tile_layout(16))
    tz = gl.allocate_shared_memory(dtype, [blocks, 32, 16], tile_layout(16, 32))
    cross = gl.allocate_shared_memory(dtype, [blocks // 2, 32, 16], tile_layout(16, 32)) if T.form == "steps" else tz
    beside = make_spread(dtype, T) if T.spread else cross
    decay = gl.allocate_shared_memory(gl.float32, [blocks, 1, K], plain_shared(2))
    scales: gl.constexpr = SCALES if T.cluster else blocks
    read = gl.allocate_shared_memory(gl.float32, [scales, 1, 16], plain_shared(2))
    write = gl.allocate_shared_memory(gl.float32, [scales, 1, 16], plain_shared(2))
    gain = gl.allocate_shared_memory(gl.float32, [scales, 1, 16], plain_shared(2))
    full = gl.allocate_shared_memory(gl.int64, [blocks // 2 // steps_awaited(T), 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [READY if T.cluster else groups, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [EMPTY if T.cluster else blocks // 2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(blocks // 2):
        mbarrier.init(empty.index(s), count=2 if T.cluster and s < 2 * own_places(T) else 1)
    for s in gl.static_range(blocks // 2 // steps_awaited(T)):
        mbarrier.init(full.index(s), count=steps_awaited(T) * (4 if T.outputs else 3))
        if s < groups:
            mbarrier.init(ready.index(s), count=1)
    if T.cluster:
        mbarrier.init(ready.index(groups), count=1)
    return Ring(kq, g, ki, v, tz, beside, decay, read, write, gain, full, ready, empty)


@gluon.jit
def slice_view(tiles, at, c, rows: gl.constexpr, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, T: gl.constexpr):
    """Group `at` of ring buffer `tiles` as `shape`, begun c slices late: its first WIDTH channels are those of slice c"""
    slices: gl.constexpr = T.K // WIDTH
    parts = tiles._reinterpret(dtype, [T.groups * T.wide * slices, rows * WIDTH], plain_shared(1))
    return parts.index(T.wide * slices * at + c)._reinterpret(dtype, shape, layout)


@gluon.jit
def slice_views(ring, at, c, T: gl.constexpr):
    """kq, g, ki and decay of group `at`, their first WIDTH channels those of slice c: so a loop over slices is one copy of its code"""
    K: gl.constexpr = T.K
    dtype: gl.constexpr = ring.kq.dtype
    bits: gl.constexpr = ring.g.dtype.primitive_bitwidth
    kq = slice_view(ring.kq, at, c, 32, dtype, [gl.num_warps(), 32, K], stack_layout(gl.num_warps(), 32, K, 16), T)
    g = slice_view(ring.g, at, c, 16, ring.g.dtype, [gl.num_warps(), 16, K], stack_layout(gl.num_warps(), 16, K, bits), T)
    ki = slice_view(ring.ki, at, c, bits, dtype, [gl.num_warps(), bits, K], stack_layout(gl.num_warps(), bits, K, 16), T)
    decay = slice_view(ring.decay, at, c, 1, gl.float32, [gl.num_warps(), K], plain_shared(2), T)
    return kq, g, ki, decay
