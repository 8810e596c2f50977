"""The chunk and sequence tables against a plain loop over the sequences."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch

from openkda import plan as plans
from openkda.plan import Plan

CPU = torch.device("cpu")


def by_loop(cu: list[int], chunk_size: int) -> tuple[list, list]:
    chunks, sequences = [], []
    for n, (first, end) in enumerate(pairwise(cu)):
        starts = range(first, end, chunk_size)
        sequences.append([first, end, len(chunks), len(starts)])
        chunks += [[n, start, min(start + chunk_size, end), index] for index, start in enumerate(starts)]
    return chunks, sequences


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (16,), (17,), (0, 0, 64, 0), (33, 1, 0, 64, 2), (1,) * 40, (0, 5, 0)])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ragged(lengths, chunk_size, dtype):
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0]
    T = cu[-1] + 7
    plan = Plan.build(torch.tensor(cu, dtype=dtype), 1, T, chunk_size, CPU)
    chunks, sequences = by_loop(cu, chunk_size)
    used = len(chunks)
    assert plan.chunks.dtype == plan.sequences.dtype == torch.int32 and plan.chunk_size == chunk_size
    assert plan.num_chunks == T // chunk_size + len(lengths) >= used
    assert plan.chunks[:used].tolist() == chunks and not plan.chunks[used:].any()
    assert plan.sequences.tolist() == sequences


@pytest.mark.parametrize("B, T", [(1, 0), (0, 5), (1, 1), (3, 64), (2, 65)])
def test_fixed(B, T):
    """Exactly the chunks in use, and one table for equal sizes."""
    plan = Plan.build(None, B, T, 32, CPU)
    chunks, sequences = by_loop([n * T for n in range(B + 1)], 32)
    assert plan.chunks.tolist() == chunks and plan.sequences.tolist() == sequences
    assert Plan.build(None, B, T, 32, CPU) is plan


def test_cached_tables_serve_inference_and_autograd():
    with torch.inference_mode():
        plan = Plan.build(None, 5, 77, 32, CPU)
    assert not plan.chunks.is_inference() and not plan.sequences.is_inference()


@pytest.mark.parametrize("capturing", [False, True])
def test_a_cuda_graph_keeps_the_tables_that_it_reads(monkeypatch, capturing):
    monkeypatch.setattr(plans, "_fixed", lambda B, T, chunk_size, device: Plan(torch.zeros(0, 4), torch.zeros(0, 4), chunk_size))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(plans, "_recorded", {})
    tables = weakref.ref(Plan.build(None, 1, 64, 32, torch.device("cuda", 0)))
    gc.collect()
    assert (tables() is not None) == capturing  # once the cache has forgotten them


@pytest.mark.parametrize("cu", [[0, 12, 8, 16], [-5, 3, 40], [20, 30, 99], [0, 2**40, 2**41], [0, 64, 0, 64, 0, 64]])
def test_an_unchecked_table_stays_in_range(cu):
    """With use_graph nobody checks cu_seqlens: whatever it holds, every row and every chunk addressed exists."""
    plan = Plan.build(torch.tensor(cu), 1, 64, 16, CPU)
    for table, first, end in ((plan.chunks, 1, 2), (plan.sequences, 0, 1)):
        assert (table[:, first] >= 0).all() and (table[:, first] <= table[:, end]).all() and (table[:, end] <= 64).all()
    assert (plan.sequences[:, 2:].sum(1) <= plan.num_chunks).all()
