"""The segment table of the Hopper forward: the kernel that builds it for ragged batches, against the same in Python."""

from itertools import pairwise

import pytest
import torch

from openkda.hopper.config import STEP
from openkda.hopper.launch import TABLE
from openkda.hopper.segments import table_kernel

BATCHES = {
    "one": (100,),
    "empty": (0,),
    "uneven": (5, 0, 33, 530, 1, 64, 0),
    "many": tuple(37 * i % 200 for i in range(150)),
    "ends early": (64, 65),
}


def expected(lengths, target, rows):
    """(segments, whole) as Python lists"""
    segments, whole, lo = [], [], 0
    for n, length in enumerate(lengths):
        steps = -(-length // STEP)
        count = max(1, -(-steps // target))
        hi, before = lo + length, len(segments)
        cut = [min(lo + STEP * (i * steps // count), hi) for i in range(count + 1)]
        segments += [[n, a, b, lo, hi, before, count] for a, b in pairwise(cut)]
        whole.append([n, lo, hi, lo, hi, before, count])
        lo = hi
    unused = [[-1, 0, 0, 0, 0, 0, 1]] * (rows - len(segments))
    return segments + unused, sorted(whole, key=lambda row: row[1] - row[2])  # the longest first


def table(cu, T, target, device):
    N = len(cu) - 1
    NS = N + T // (STEP * target)
    segments, whole = (torch.full((rows, TABLE), -7, dtype=torch.int32, device=device) for rows in (NS, N))
    cu = torch.tensor(cu, device=device, dtype=torch.int64)
    table_kernel[(-(-max(NS, N) // 64),)](cu, segments, whole, N, T, target, NS, 64, num_warps=2)
    return segments[:, :7].tolist(), whole[:, :7].tolist()


@pytest.mark.parametrize("target", [1, 3, 1000])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_table(lengths, target, device):
    T = sum(lengths) + (31 if lengths == (64, 65) else 0)
    cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    found = table(cu, T, target, device)
    assert found == expected(lengths, target, len(found[0]))


def test_a_bad_table_stays_inside(device):
    """Values that the host could not check (use_graph): every row within [0, T], no token twice."""
    segments, _ = table([0, 90, 40, 500, -3], 128, 2, device)
    covered = sorted((a, b) for n, a, b, *_ in segments if n >= 0)
    assert all(0 <= a <= b <= 128 for a, b in covered)
    assert all(one[1] <= two[0] for one, two in pairwise(covered))
