"""Two blocks of a cluster share the preparation of a head: block r, its rank, owns half r of V, prepares the groups n with n % 2 = r and
copies them to the other block, from shared memory to shared memory. Each loads v for all groups and runs its own scan.

The last place of a block's ring is for what the other block prepares, the others take the block's own groups in turn: a group has the same
place for its owner, and the same for the other, in both blocks. Barriers mean, beyond what tiles.py says of them:

    empty   of an own place: both scans are done with two blocks, so that their copy has left and the place that it went to is free
    ready   of the last place, one for each two blocks: the copy and v, requested by the block itself, have landed

A copy of a group takes about as long as the scan of one, 18 bytes a cycle.

Copies and arrivals across the cluster are inline PTX on addresses. Gluon gives no address of a buffer, but Triton lays buffers out by
falling size from the first byte on: `addresses` says where those of the ring lie, and what was compiled is compared with it."""

from __future__ import annotations

from openkda.hopper.compat import buffer_offsets, gl, gluon

# `ready` and `empty` in barriers, `read`, `write` and `gain` in blocks are allocated larger than anything that the compiler adds, at most
# 2 KB for the stores of chunk-entry states, so that their places in the order of sizes are known.
READY = gl.constexpr(300)
EMPTY = gl.constexpr(290)
SCALES = gl.constexpr(36)


@gluon.constexpr_function
def own_places(T):
    """Places of the ring for groups that the block itself prepares"""
    return T.groups - 1 if T.cluster else T.groups


@gluon.constexpr_function
def addresses(T):
    """Buffers of the ring and their bytes from the beginning of shared memory"""
    blocks = T.wide * T.groups
    sizes = dict(kq=64 * T.K, g=32 * T.K, v=32 * T.R, tz=1024, cross=512 * (T.form == "steps"), decay=4 * T.K)  # of a block
    sizes = {name: blocks * size for name, size in sizes.items()}
    sizes |= dict(out=64 * T.R, ready=8 * READY.value, empty=8 * EMPTY.value)
    sizes |= dict.fromkeys(("read", "write", "gain"), 64 * SCALES.value)
    at, found = 0, {}
    for name, size in sizes.items():
        found |= {name: at} if size else {}
        at += size
    return found


@gluon.constexpr_function
def address(T, name):
    return addresses(T)[name]


def check_addresses(ttgir: str, T: object) -> None:
    """Raise RuntimeError where the compiler has laid out the buffers of these tiles otherwise."""
    found = buffer_offsets(ttgir)
    for name, at in addresses(T).items():
        if found.get(name) != at:
            raise RuntimeError(f"shared memory of blocks in a cluster: {name} lies at {found.get(name)}, not at {at} as cluster.py says")


@gluon.constexpr_function
def pieces(T):
    """What is copied of two blocks, three numbers a piece: where it lies for the first two blocks, its bytes, those to the next two blocks.
    Large tiles in two: a copy holds up what the copy engine is asked for behind it (kq and ki whole: 3 % slower). Where no output is asked,
    without what comes from q: every second 16 rows of some tiles."""
    where = addresses(T)
    sizes = dict(kq=128 * T.K, g=64 * T.K, tz=2048, cross=1024, decay=8 * T.K, read=128, write=128, gain=128)
    rows = dict(kq=2048, tz=512, cross=512, write=0)  # bytes of 16 rows, or of as many as lie together
    found = []
    for name, size in sizes.items():
        if name not in where:
            continue
        if T.outputs or name not in rows:
            parts = 2 if name in ("kq", "g") else 1
            for n in range(parts):
                found += [where[name] + n * size // parts, size // parts, size]
        elif rows[name]:
            for at in range(0, size, 2 * rows[name]):
                found += [where[name] + at, rows[name], size]
    return found


@gluon.constexpr_function
def copied_bytes(T):
    """of two blocks"""
    return sum(pieces(T)[1::3])


@gluon.jit
def rank_of(T: gl.constexpr):
    if T.cluster:
        return gl.program_id(1)
    else:
        return 0


@gluon.jit
def group_place(group, rank, T: gl.constexpr):
    """(place in the ring, phase of its barriers) of a group of a cluster"""
    own: gl.constexpr = own_places(T)
    n = group // 2
    mine = group % 2 == rank
    return gl.where(mine, n % own, own), gl.where(mine, n // own, n) & 1


@gluon.jit
def threads():
    """A number for each thread of the role"""
    return gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def meet():
    """Wait for all threads of both blocks: before one of them reaches into the other block"""
    code: gl.constexpr = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(code, "=r,r", [threads()], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release(at, half: gl.constexpr, rank, T: gl.constexpr):
    """Tell the other block that this one's scan is done with two blocks that it prepared in its place `at`. Nothing is written before that
    the other reads, so the arrival need not be a release in the cluster, a wait for all that the thread has under way: in the scan such
    waits made the whole 20 % slower."""
    where: gl.constexpr = address(T, "empty")
    t = threads()
    empty = t * 0 + where + 8 * (2 * at + half)
    code: gl.constexpr = """{ .reg .pred p; .reg .b32 b; setp.eq.s32 p, $3, 0; mov.u32 b, global_smem; add.u32 b, b, $1;
        mapa.shared::cluster.u32 b, b, $2; @p mbarrier.arrive.shared::cluster.b64 _, [b]; mov.b32 $0, $1; }"""
    gl.inline_asm_elementwise(code, "=r,r,r,r", [empty, t * 0 + (1 - rank), t], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send(at, half: gl.constexpr, rank, T: gl.constexpr):
    """Copy two prepared blocks of the place `at` to the other block's last place, a lane a piece"""
    what: gl.constexpr = pieces(T)
    last: gl.constexpr = T.groups - 1
    ready: gl.constexpr = address(T, "ready") + 8 * (T.groups - 1)
    t = threads()
    base = t * 0
    size = base
    stride = base
    for n in gl.static_range(len(what) // 3):
        base = gl.where(t == n, what[3 * n], base)
        size = gl.where(t == n, what[3 * n + 1], size)
        stride = gl.where(t == n, what[3 * n + 2], stride)
    code: gl.constexpr = """{ .reg .pred p; .reg .b32 s, d, b; setp.ne.s32 p, $3, 0; mov.u32 s, global_smem; add.u32 d, s, $2;
        add.u32 b, s, $4; add.u32 s, s, $1; mapa.shared::cluster.u32 d, d, $5; mapa.shared::cluster.u32 b, b, $5;
        @p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [s], $3, [b]; mov.b32 $0, $1; }"""
    args = [base + (2 * at + half) * stride, base + (2 * last + half) * stride, size, t * 0 + (ready + 8 * half), t * 0 + (1 - rank)]
    gl.inline_asm_elementwise(code, "=r,r,r,r,r,r", args, dtype=gl.int32, is_pure=False, pack=1)
