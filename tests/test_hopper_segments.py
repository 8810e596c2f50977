"""The small kernels of the Hopper forward, which the interpreter runs: the segment table of ragged batches and the chain of summaries."""

from itertools import accumulate, pairwise

import pytest
import torch

from openkda.hopper.config import STEP
from openkda.hopper.launch import TABLE, TABLE_ROWS, fixed_tables, packed
from openkda.hopper.segments import combine_kernel, table_kernel
from openkda.portable.forward import interpreted

BATCHES = {
    "one": (100,),
    "empty": (0,),
    "uneven": (5, 0, 33, 530, 1, 64, 0),
    "many": tuple(37 * i % 200 for i in range(150)),
    "ends early": (64, 65),
}


def expected(lengths, target, rows, lanes=(0,), later=False):
    """(segments, whole) as Python lists, the longest sequences first; a sequence's lanes one after another, without rows -1"""
    segments, whole = [], []
    for n, length in sorted(enumerate(lengths), key=lambda pair: -pair[1]):
        steps = -(-length // STEP)
        count = max(1, -(-steps // target))
        lo, before = sum(lengths[:n]), len(segments)
        shift = 16 * (later and (length - 1) % STEP >= 16)
        cut = [min(lo + STEP * -(-i * steps // count) + shift * (i > 0), lo + length) for i in range(count + 1)]
        segments += [[n, a, b, lo, lo + length, before, count] for a, b in pairwise(cut)]
        ends = [lo + 2 * STEP * (-(-length // (2 * STEP)) * part // 1024) for part in lanes] + [lo + length]
        whole += [[n if a < b else -1, a, b, lo, lo + length, before, count] for a, b in pairwise(ends)]
        whole[-1][0] = n
    return segments + [[-1, 0, 0, 0, 0, 0, 1]] * (rows - len(segments)), whole


def table(cu, T, target, device, lanes=(0,), later=False):
    N = len(cu) - 1
    NS = N + T // (STEP * target)
    segments, whole = (torch.full((rows, TABLE), -7, dtype=torch.int32, device=device) for rows in (NS, len(lanes) * N))
    cu = torch.tensor(cu, device=device, dtype=torch.int64)
    chunks = torch.full((N,), -7, dtype=torch.int32, device=device)
    table_kernel[(-(-N // TABLE_ROWS),)](
        cu, segments, whole, chunks, N, T, target, NS, int(later), len(lanes), packed(lanes), TABLE_ROWS, 64, num_warps=4
    )  # fmt: skip
    assert not segments[:, 7].any() and not whole[:, 7].any()  # tickets
    counts = [-(-max(b - a, 0) // 64) for a, b in pairwise(accumulate((min(max(x, 0), T) for x in cu.tolist()), max))]
    assert chunks.tolist() == list(accumulate([0, *counts]))[:N]
    return segments[:, :7].tolist(), whole[:, :7].tolist()


@pytest.mark.parametrize("target", [1, 3, 1000])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_table(lengths, target, device):
    T = sum(lengths) + (31 if lengths == (64, 65) else 0)
    cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    for lanes, later in (((0,), False), ((0,), True), ((0, 759), True), ((0, 1, 512, 1023), False)):
        found = table(cu, T, target, device, lanes, later)
        assert found == expected(lengths, target, len(found[0]), lanes, later)
        assert all(a < b for n, a, b, lo, hi, *_ in found[0] if n >= 0 and lo < hi)  # no segment without rows


@pytest.mark.parametrize("T", [1, 64, 65, 1000])
@pytest.mark.parametrize("lanes", [(0,), (0, 759), (0, 676, 912, 995)])
@pytest.mark.parametrize("later", [False, True])
def test_a_fixed_batch_has_the_table_of_a_ragged_one(T, lanes, later):
    segments, whole = expected((T, T), 3, 0, lanes, later)
    assert [row[:7] for row in fixed_tables(2, T, 3, lanes, later)] == segments + whole


def test_a_bad_table_stays_inside(device):
    """Values that the host could not check (use_graph): every row within [0, T], no token twice."""
    segments, _ = table([0, 90, 40, 500, -3], 128, 2, device)
    covered = sorted((a, b) for n, a, b, *_ in segments if n >= 0)
    assert all(0 <= a <= b <= 128 for a, b in covered)
    assert all(one[1] <= two[0] for one, two in pairwise(covered))


@pytest.mark.parametrize("known", [(), (1,), (2,), (1, 3), (4,), (1, 2, 3, 4)], ids=str)
def test_chain_of_summaries(known, device):
    """Entry states where they are not known, from known ones and (M, b); nothing is read of segments before a known one."""
    N, S, HV, K = 1, 5, 2, 32
    gen = torch.Generator().manual_seed(0)
    b, M = (torch.randn(S, HV, K, K, generator=gen) for _ in range(2))
    M = M / K**0.5
    entry = torch.full((S, HV, K, K), float("nan"))
    flags = torch.zeros(HV, S, dtype=torch.int32)
    flags[:, 0] = 1
    for s in known:
        flags[1, s], entry[s, 1] = 1, torch.randn(K, K, generator=gen)
        b[s - 1, 1], M[s - 1, 1] = float("nan"), float("nan")
    high = M.bfloat16()
    parts = torch.stack((high, (M - high.float()).bfloat16()), 2).view(torch.float32).flatten(2)
    summary = torch.cat((b.flatten(2), parts), 2)
    expected = entry.double()
    for h in range(HV):
        state = torch.zeros(K, K, dtype=torch.float64)
        for s in range(S - 1):
            state = expected[s + 1, h] if flags[h, s + 1] else state @ M[s, h].double() + b[s, h].double()
            expected[s + 1, h] = state
    entry, flags, summary = (x.to(device) for x in (entry, flags, summary))
    whole = torch.tensor([[0, 0, 320, 0, 320, 0, S, 0]], dtype=torch.int32, device=device)
    if known == (2,):  # three sequences for one program: that one twice, and one that is not cut
        N, flags = 3, flags.repeat(1, 2)
        entry, summary = torch.cat((entry, entry)), torch.cat((summary, summary))
        whole = torch.cat((whole, whole, whole))
        whole[1, 5], whole[2, 6] = S, 1
    assert interpreted() or device.type == "cuda"  # importing it also repairs the interpreter's bf16
    combine_kernel[(1, HV, K // 16)](summary, entry, flags, whole, HV, flags.shape[1], N, K, K, 16, False, True, num_warps=4)
    if N > 1:
        assert torch.equal(entry[1:S], entry[S + 1 :])
        entry = entry[:S]
    error = (entry[1:].double().cpu() - expected[1:]).norm() / expected[1:].norm()
    assert error < 2e-5
