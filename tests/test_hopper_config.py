"""The Hopper backend without a GPU: what it refuses and why, how calls are cut, and what its kernels compile to."""

from dataclasses import replace
from itertools import accumulate, pairwise, product

import pytest
import torch

from openkda.hopper import cluster, config, launch, why_not
from openkda.hopper.config import (
    COSTS,
    MULTIPROCESSORS,
    SHARED_BYTES,
    STEP,
    TAIL,
    Cut,
    base_tiles,
    choose,
    expected,
    group_bytes,
    lane_parts,
    makespan,
    own_tail_blocks,
)
from openkda.hopper.runtime import Pointer
from openkda.hopper.segments import DROPPED
from openkda.hopper.tiles import stack_layout
from openkda.plan import Plan
from openkda.testing import make_case


@pytest.fixture(scope="module")
def problem():
    p, _ = make_case("init", T=64, H=4, K=128, dtype=torch.bfloat16).described()
    return p.replace(device_type="cuda", capability=(9, 0))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (dict(capability=(8, 0)), "capability"), (dict(capability=(10, 0)), "capability"),
        (dict(capability=None, device_type="cpu"), "capability"),
        (dict(dtype=torch.float32), "float32"), (dict(K=96), "K and V"), (dict(V=256), "K and V"),
        (dict(T=2**31), "2\\^31"),
    ],
)  # fmt: skip
def test_refusals_name_what_is_missing(problem, change, word):
    assert why_not(problem) is None
    with pytest.raises(ValueError, match=word):
        raise ValueError(why_not(problem.replace(**change)))


@pytest.mark.parametrize(
    "change",
    [
        dict(HV=8), dict(K=64), dict(V=64), dict(dtype=torch.float16), dict(gate="softplus", lower_bound=None),
        dict(return_intermediate_states=True), dict(return_intermediate_states=True, chunk_size=32),
    ],
)  # fmt: skip
def test_served(problem, change):
    assert why_not(problem.replace(**change)) is None


@pytest.mark.parametrize("T", [1, 31, 1024, 2048, 8192, 32768, 10**6])
@pytest.mark.parametrize("H", [1, 4, 12, 16, 40, 64, 96, 200])
def test_choice_is_pure_and_fits_the_device(problem, T, H):
    p = problem.replace(T=T, H=H, HV=H)
    found = choose(p)
    assert found == choose.__wrapped__(p)
    assert found.reason
    for tiles in (found.forward, found.state, found.whole):
        if tiles is not None:
            assert tiles.groups >= 2 or tiles.split == "tails"
            assert tiles.groups * group_bytes(tiles, p.gate_dtype.itemsize) < SHARED_BYTES
    if found.steps:
        assert 1 <= found.tail <= min(TAIL, 2 * found.steps if found.state else TAIL)
        if found.forward.split == "tails":
            assert 2 * found.steps + found.tail <= own_tail_blocks(found.forward)


def test_lengths_choose_among_few_kernels(problem):
    for H in (4, 16, 40, 64):
        tiles = {(c.forward, c.state, c.whole) for c in (choose(problem.replace(T=T, H=H, HV=H)) for T in range(16, 70000, 517))}
        assert len(tiles) <= 5


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocks", [5, 8])
def test_two_warps_a_block_have_room_for_eight_blocks(problem, gate_dtype, blocks):
    p = problem.replace(gate_dtype=gate_dtype, gate="softplus", lower_bound=None)
    tiles = config.own_tail_tiles(p, blocks)
    assert tiles.spread and own_tail_blocks(tiles) == 8
    assert tiles.groups * group_bytes(tiles, gate_dtype.itemsize) + config.spread_bytes(tiles) < SHARED_BYTES


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
def test_own_tails_stay_in_the_ring(problem, gate_dtype):
    p = problem.replace(gate_dtype=gate_dtype)
    most = own_tail_blocks(base_tiles(p, config.FULL, split="tails"))
    kinds = (torch.float32, torch.float32, None)
    fits = config.config_of(p, Cut("tails", "half", most // 2 - 2, 4), (0.0, 0.0))
    assert len(launch.launches(p, fits, None, kinds)[0]) == 2
    with pytest.raises(ValueError, match=f"at most {most} blocks"):
        launch.launches(p, replace(fits, tail=5), None, kinds)


def test_makespan_counts_waves_and_work():
    assert makespan([(5.0, 132)]) == 5.0 and makespan([(5.0, 133)]) == 10.0
    assert makespan([(100.0, 1), (1.0, 132 * 300)]) == 301.0  # the long block lies beside the short ones
    assert makespan([]) == 0.0


def test_a_long_sequence_is_cut_as_if_it_were_alone(problem):
    """Sixty short sequences beside a long one: the long one in about the parts it has alone, the short ones whole."""
    lengths = (*(7 + 11 * i % 293 for i in range(60)), 16384)
    p = problem.replace(T=sum(lengths), N=len(lengths), varlen=True, H=16, HV=16)
    alone = choose(problem.replace(T=16384, H=16, HV=16))
    together = choose(p, lengths)
    assert alone.steps <= together.steps <= 2 * alone.steps and together.steps * STEP > 300
    assert together == choose(p, tuple(reversed(lengths)))
    unsplit, cut = (
        expected(way, [(512, 1.0), (5, 60.0)], 16, COSTS["product"]) for way in (Cut("unsplit", "half"), Cut("summaries", "full", 64, 4))
    )
    assert max(cut) < unsplit[0]


def test_unknown_lengths_may_hide_a_long_one(problem):
    """Without lengths (CUDA graphs) a batch of a few long sequences' worth of tokens is cut where a long one would be."""
    p = problem.replace(T=24576, N=61, varlen=True, H=16, HV=16)
    config = choose(p)
    assert config.steps and config.steps * STEP < 16384
    found, _ = launch.launches(p, config, None, (torch.float32, torch.float32, torch.int64))
    assert max(one.grid[0] for one in found[1:3]) < 2 * 24576 // (config.steps * STEP) * 16 + 1  # only what may be cut has entry states


def test_form_of_the_scores(problem):
    assert choose(problem).forward.form == "steps" and choose(problem.replace(T=4096, H=96, HV=96)).forward.form == "product"
    assert choose(problem.replace(gate="softplus", lower_bound=None)).forward.form == "halves"
    assert choose(problem.replace(dtype=torch.float16)).forward.form == "levels"


def test_blocks_that_share_a_head_form_clusters(problem):
    """Where V is in two and there is a place in the ring to spare."""
    half = lambda split="none", **change: base_tiles(problem.replace(**change), config.HALF, split=split)
    for change in (dict(gate="softplus", lower_bound=None), dict(dtype=torch.float16)):
        assert half(**change).cluster and half("whole", **change).cluster
    for change in (dict(), dict(return_intermediate_states=True)):
        for split in ("none", "lanes", "rest"):
            assert half(split, **change).cluster and half(split, **change).form == "steps"
        assert half("whole", **change).cluster and half("whole", **change).form == "product"  # as segments that it may serve
    for tiles in (half("turns"), half(gate_dtype=torch.float32), half(K=64, V=64), base_tiles(problem, config.FULL)):
        assert not tiles.cluster and tiles.form == "product"
    (one,) = launches_of(problem)[0]
    assert one.cluster and one.grid == (4, 2, 1)


@pytest.mark.parametrize("change", [dict(), dict(dtype=torch.float16)], ids=["steps", "levels"])
def test_what_blocks_of_a_cluster_copy(problem, change):
    """Each byte once; where the state alone is asked, half of the tiles that have rows of q beside rows of k, and no scales of outputs."""
    tiles = base_tiles(problem.replace(**change), config.HALF)
    found = []
    for t in (tiles, tiles.without_outputs()):
        pieces = iter(cluster.pieces(t))
        places = [(where + n, stride) for where, size, stride in zip(pieces, pieces, pieces, strict=True) for n in range(size)]
        assert len(set(places)) == len(places) == cluster.copied_bytes(t)
        found.append(set(places))
    assert found[1] < found[0]
    left = found[0] - found[1]
    where = cluster.addresses(tiles)
    sizes = dict(kq=64 * 128, tz=1024, write=128) | (dict(cross=512) if tiles.form == "steps" else {})
    assert len(left) == sum(sizes.values())
    assert all(where["kq"] + 2048 <= at or at >= where["tz"] for at, _ in left)  # the first rows of k are among what is copied


@pytest.mark.parametrize("quiet", [0.5, 0.65, 0.9])
@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_lanes_end_together(lanes, quiet):
    """Each goes through what lies before its part, and then its part."""
    parts = [part / 1024 for part in (*lane_parts(lanes, quiet), 1024)]
    times = [quiet * a + (b - a) for a, b in pairwise(parts)]
    assert parts[0] == 0.0 and max(times) - min(times) < 3 / 1024
    assert lanes == 1 or max(times) < 1.0


def test_lanes_where_multiprocessors_idle(problem):
    """So many that all blocks still start at once; the kernel depends on sequences and heads alone, not on lengths."""
    for H in (1, 4, 16, 24, 32, 40, 64):
        for T in (64, 200, 2048, 8192):
            p = problem.replace(T=T, H=H, HV=H)
            found = choose(p)
            tiles = found.whole or found.forward
            assert len(found.lanes) == 1 or (tiles.cluster and 2 * H * len(found.lanes) <= MULTIPROCESSORS)
            assert not tiles.cluster or (tiles.split == "none") == (4 * H > MULTIPROCESSORS and not found.steps)
    assert len(choose(problem.replace(T=2048, H=32, HV=32)).lanes) == 2
    assert choose(problem.replace(T=2048, H=32, HV=32, gate_dtype=torch.float32)).lanes == (0,)


def test_lanes_are_rows_of_one_launch(problem):
    p = problem.replace(T=1024, H=32, HV=32)
    (one,), _ = launch.launches(p, choose(p), None, (torch.float32, torch.float32, None))
    assert one.grid == (64, 2, 1) and one.constants[0].split == "lanes"
    p = p.replace(N=2, H=8, HV=8, varlen=True)
    found = choose(p, (2000, 48))
    table, *rest = launch.launches(p, found, None, (torch.float32, torch.float32, torch.int64))[0]
    assert dict(zip(table.function().arg_names, table.args, strict=False))["lanes"] == len(found.lanes) > 1
    assert max(one.grid[0] for one in rest) >= len(found.lanes) * 8


def test_buffers_that_lie_elsewhere_are_refused(problem, monkeypatch):
    tiles = base_tiles(problem, config.HALF)
    where = cluster.addresses(tiles)
    monkeypatch.setattr(cluster, "buffer_offsets", lambda text: where | dict(full=7))
    cluster.check_addresses("", tiles)
    monkeypatch.setattr(cluster, "buffer_offsets", lambda text: where | dict(tz=64))
    with pytest.raises(RuntimeError, match="tz lies at 64, not at 172032"):
        cluster.check_addresses("", tiles)
    monkeypatch.setattr(cluster, "buffer_offsets", lambda text: {})
    with pytest.raises(RuntimeError, match="kq lies at None, not at 0"):
        cluster.check_addresses("", tiles)


PARAMETERS = (torch.float32, torch.float32, None)  # dtypes of A_log, dt_bias and cu_seqlens


def launches_of(problem, strides=None, **changes):
    p = problem.replace(**changes)
    kinds = (*PARAMETERS[:2], torch.int64 if p.varlen else None)
    return launch.launches(p, choose(p), strides, kinds)


@pytest.mark.parametrize(
    "change", [dict(T=1024), dict(T=8192), dict(T=8192, HV=64, H=64), dict(T=1000, N=3, varlen=True), dict(T=2048, HV=40)], ids=str
)
def test_workspace_holds_each_buffer_once(problem, change):
    """Buffers of a call's launches start at different places, 256 bytes apart at least, within the workspace."""
    found, size = launches_of(problem, **change)
    pointers = {x for one in found for x in one.args if isinstance(x, Pointer) and x.operand == launch.WORK}
    offsets = sorted({x.offset for x in pointers})
    assert len(offsets) == len({(x.offset, x.dtype) for x in pointers})
    assert all(x % 16 == 0 and x < size for x in offsets)


@pytest.mark.parametrize("H", [4, 64, 96, 200])
@pytest.mark.parametrize("change", [dict(T=4096, N=3, B=3), dict(T=4096, N=3, varlen=True), dict(T=64)], ids=str)
def test_blocks_take_turns_where_multiprocessors_are_fewer(problem, H, change):
    """By tickets, one column of a table, where lengths may differ."""
    p = problem.replace(H=H, HV=H, **change)
    config = choose(p)
    one = launches_of(p)[0][-1]
    args = dict(zip(one.function().arg_names, one.args, strict=False))
    if config.forward.split == "turns":
        assert args["items"] == p.N * H and one.grid[0] == MULTIPROCESSORS // one.grid[1] < args["items"]
        assert args["tickets_ptr"] == (args["segments_ptr"]._replace(offset=0) if p.varlen else None)
    elif not config.steps:
        assert args["items"] == one.grid[0] and args["tickets_ptr"] is None
        assert one.grid[0] * one.grid[1] <= MULTIPROCESSORS or config.forward.cluster  # these take no turns


@pytest.mark.parametrize("change", [dict(T=64), dict(T=1024), dict(T=2048, H=12, HV=12), dict(T=1000, N=3, varlen=True)], ids=str)
def test_chunk_entry_states_change_no_other_kernel(problem, change):
    """Asked for, they are one more output of the forward kernels, and one more table; else nothing depends on the chunk size."""
    plain, _ = launches_of(problem, **change)
    assert [x.key for x in launches_of(problem, chunk_size=32, **change)[0]] == [x.key for x in plain]
    asked, size = launches_of(problem, return_intermediate_states=True, **change)
    for one, other in zip(asked, plain, strict=True):
        args = dict(zip(one.function().arg_names, one.args, strict=False))
        forward, ragged = "h_ptr" in args, one.kernel.endswith("table_kernel")
        assert (one.key == other.key) == (not forward and not ragged) and one.grid == other.grid
        if forward:
            assert args["h_ptr"] == Pointer(launch.ENTRIES, torch.bfloat16) and one.constants[0].chunk == 64
        if forward or ragged:
            numbers = args["chunks_ptr"]
            assert numbers.operand == (launch.WORK if "N" in change else launch.TABLES)
            assert numbers.offset + 4 * problem.replace(**change).N <= (size if "N" in change else numbers.offset + 4)


@pytest.mark.parametrize("lengths", [None, (), (0, 0), (1, 0, 32, 33, 100)], ids=str)
def test_chunk_entry_states_are_as_many_as_portable_has(problem, lengths):
    """Also where lengths never reach the host, and without a token."""
    cu = None if lengths is None else torch.tensor([0, *accumulate(lengths)])
    B, T = (3, 70) if lengths is None else (1, sum(lengths or ()))
    p = problem.replace(B=B, T=T, N=B if lengths is None else len(lengths), varlen=lengths is not None, chunk_size=32)
    plan = Plan.build(cu, B, T, 32, torch.device("cpu"))
    assert B * launch.chunks(p, None) == plan.num_chunks
    assert lengths is None or launch.chunks(p, lengths) == plan.sequences[:, 3].sum()
    if T == 0:
        _, inputs = make_case("init", T=0, H=4, K=128, dtype=torch.bfloat16).described()
        asked = p.replace(return_intermediate_states=True, output_final_state=False)
        for known in (lengths, None):
            h = launch.of_nothing(asked, replace(inputs, lengths=known))[2]
            assert h.shape == (1, launch.chunks(p, known), 4, 128, 128) and h.dtype == torch.bfloat16 and not h.any()


def test_lengths_and_strides_compile_nothing_new(problem):
    big = dict(H=16, HV=16)
    keys = {frozenset(x.key for x in launches_of(problem, T=T, **big)[0]) for T in range(4096, 9000, 517)}
    keys |= {frozenset(x.key for x in launches_of(problem, (4096, 4096, 2048, 2048), T=4096, **big)[0])}
    assert len(keys) == 1


def test_inputs_are_copied_only_where_kernels_cannot_read_them():
    x = make_case("init", T=64, H=2, K=64, dtype=torch.bfloat16).described()[1]
    operands = (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, None)
    found, strides = launch.arranged(operands)
    assert strides is None and all(a is b for a, b in zip(found, operands))
    rows = torch.zeros(1, 64, 384, dtype=torch.bfloat16)[..., 128:256].unflatten(2, (2, 64))  # heads packed, a row of three tensors
    fewer = x.q.expand(1, 64, 2, 64).transpose(1, 2).contiguous().transpose(1, 2)  # heads outermost: no matrix of rows
    found, strides = launch.arranged((rows, fewer, *operands[2:7], x.initial_state.transpose(2, 3), None))
    assert strides == (384, 128, 128, 128)
    assert found[0] is rows and found[1].is_contiguous() and torch.equal(found[1], fewer)
    assert found[2] is x.v and found[7].is_contiguous() and found[8] is None


def token_maps(decay, k, beta):
    """(I - beta k k^T) Diag(decay) of each token, fp64 [T, K, K]: what maps a state over the token, besides what it adds"""
    return (torch.eye(k.shape[1], dtype=torch.float64) - beta[:, None, None] * k[:, :, None] * k[:, None]) * decay[:, None]


@pytest.mark.parametrize(("slow", "dropped"), [("none", True), ("channel", False), ("stretch", False), ("keys", True)])
def test_tail_bound(slow, dropped):
    """What a tail drops is what its M says: of the state before it at most the sum of its columns' largest |M|; and M shows every way of
    remembering. (M and states transposed to what the kernels hold.)"""
    T, K = 96, 64
    gen = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.rand(*shape, generator=gen, dtype=torch.float64)
    decay = torch.exp(-5 * rand(T, K))
    k = torch.nn.functional.normalize(rand(T, K) - (0.5 if slow != "keys" else 0.0), dim=-1)  # keys: nearly equal, all positive
    beta = rand(T) * (2 if slow == "keys" else 1)
    if slow == "channel":
        decay[:, 7], k[:, 7] = 1.0, 0.0
    if slow == "stretch":
        decay[:] = 1.0 - 1e-4
    M = torch.linalg.multi_dot(tuple(token_maps(decay, k, beta).flip(0)))  # exit state = M entry state + b, states [K, V]
    halves = M.abs().amax(0).view(2, K // 2).sum(1)
    assert (halves <= DROPPED.value).all() == dropped
    E = rand(K, 5) * 1e3
    E[:, 0] = E[:, 0].sum() * (M.abs().amax(0) == M.abs().max())  # all of it where most is kept
    lost = (M @ E).abs().amax(0)
    assert (lost <= halves.sum() * E.abs().amax(0)).all()
    if dropped:
        assert (lost <= 2.0**-33 * E.abs().amax(0)).all()  # half an ulp of fp32 of a state 256 times smaller than what was dropped


@pytest.mark.parametrize(("B", "T", "target"), [(1, 1, 4), (2, 300, 4), (3, 256, 2), (1, 8192, 32), (2, 33, 1)])
def test_fixed_segments_cover_every_token_once(B, T, target):
    rows = launch.fixed_rows(B, T, target)
    covered = sorted((begin, end) for _, begin, end, *_ in rows)
    assert covered[0][0] == 0 and covered[-1][1] == B * T
    assert all(a[1] == b[0] for a, b in pairwise(covered))
    for index, (b, begin, end, first, stop, first_segment, count, _) in enumerate(rows):
        assert first == b * T and stop == (b + 1) * T and first_segment <= index < first_segment + count
        assert 0 < end - begin <= target * STEP and (begin - first) % STEP == 0


def test_only_what_the_copy_engine_cannot_read_is_copied():
    packed = torch.zeros(2, 8, 6, 64, dtype=torch.bfloat16)
    inside = packed[:, :, 2:4]
    assert launch.packed_rows(inside) == (inside, 6 * 64)
    across = packed.transpose(1, 2)
    copied, step = launch.packed_rows(across)
    assert copied is not across and step == 8 * 64
    short = packed[:, :5]
    assert launch.packed_rows(short)[0] is not short  # rows of the two batches are not evenly spaced
    odd = torch.zeros(1 + 2 * 64, dtype=torch.bfloat16)[1:].view(1, 1, 2, 64)
    assert launch.packed_rows(odd)[0].data_ptr() % 16 == 0 and launch.dense(odd).data_ptr() % 16 == 0


def test_kernels_compile_within_the_device():
    import offline

    kernels = offline.in_subprocess("sm_90", "offline_hopper:compile_hopper")
    assert {"forward_kernel", "state_kernel", "combine_kernel"} <= {k.name for k in kernels}
    for k in kernels:
        assert k.shared <= offline.SHARED_LIMIT["sm_90"]
        assert k.spills <= 160, f"{k.name}: {k.spills} bytes"  # loop-invariant addresses; around a segment's own tail


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "swizzle"), [(32, 128, 16, 128), (32, 64, 16, 128), (16, 128, 32, 128), (8, 64, 16, 128), (32, 16, 16, 32)]
)
def test_stacked_tiles_lie_as_the_copy_engine_writes_them(rows, columns, bits, swizzle):
    """stack_layout against the copy engine's rule: rows of `swizzle` bytes, the wider ones in pieces, 16-byte chunks turned by the row."""
    layout = stack_layout(4, rows, columns, bits, swizzle)
    width = swizzle * 8 // bits  # elements of a row of a piece
    vector, chunks, period = 128 // bits, swizzle // 16, 128 // swizzle
    for tile, r, c in product((0, 1, 3), range(rows), range(0, columns, 3)):
        inside = c % width
        chunk = (inside // vector) ^ ((r // period) % chunks)
        offset = ((tile * columns // width + c // width) * rows + r) * width + chunk * vector + inside % vector
        found = [0, 0, 0]
        for bit, basis in enumerate(layout.offset_bases):
            if offset >> bit & 1:
                found = [a ^ b for a, b in zip(found, basis, strict=True)]
        assert found == [tile, r, c]


def test_any_gate_compiles_within_the_device():
    import offline

    kernels = offline.in_subprocess("sm_90", "offline_hopper:compile_any_gate")
    assert len(kernels) == 4
    for k in kernels:
        assert k.shared <= offline.SHARED_LIMIT["sm_90"]
        assert k.spills <= 160, f"{k.name}: {k.spills} bytes"  # constants and addresses


def test_blocks_that_take_tickets_compile_within_the_device():
    import offline

    kernels = offline.in_subprocess("sm_90", "offline_hopper:compile_tickets")
    assert {"forward_kernel", "table_kernel"} == {k.name for k in kernels}
    for k in kernels:
        assert k.shared <= offline.SHARED_LIMIT["sm_90"]
        assert k.spills <= 160, f"{k.name}: {k.spills} bytes"


def test_kernels_that_write_chunk_entry_states_compile_within_the_device():
    import offline

    kernels = [k for k in offline.in_subprocess("sm_90", "offline_hopper:compile_with_states") if k.name == "forward_kernel"]
    assert len(kernels) == 6
    for k in kernels:
        assert k.shared <= offline.SHARED_LIMIT["sm_90"]
        assert k.spills <= 160, f"{k.name}: {k.spills} bytes"  # addresses
