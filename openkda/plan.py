"""Sequence bookkeeping: which tokens belong to which sequence and chunk. The only place that knows about ragged batches.

Tokens live on one flat axis of R = B * T rows, row = b * T + t. A fixed batch is B sequences of T rows; a ragged batch (B = 1) is N
sequences cut by cu_seqlens. Kernels read two tables and have no branch for either case:

    chunks    [NC, 4] int32  (sequence, first row, end row, chunk index within the sequence); unused rows are (0, 0, 0, 0)
    sequences [N, 4]  int32  (first row, end row, first chunk, number of chunks)

Both are built on the device without waiting for it, so lengths never reach the host: NC is the bound floor(T / C) + N that the host
knows. On a GPU they are one launch (tables.py), else, and for fixed batches, whose tables are cached, operators of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch

Tables = TypeVar("Tables")


@dataclass(frozen=True)
class Plan:
    """Chunk and sequence tables of one call."""

    chunks: torch.Tensor  # [NC, 4] int32
    sequences: torch.Tensor  # [N, 4] int32
    chunk_size: int

    @property
    def num_chunks(self) -> int:
        """Rows of the chunk table, an upper bound on the chunks in use."""
        return self.chunks.shape[0]

    @staticmethod
    def build(cu_seqlens: torch.Tensor | None, B: int, T: int, chunk_size: int, device: torch.device) -> Plan:
        """Tables for B sequences of T tokens, or for the sequences of cu_seqlens [N + 1] within T tokens."""
        if cu_seqlens is None:
            return recorded(_fixed(B, T, chunk_size, device), device)
        if cu_seqlens.device.type == "cuda":
            from openkda.tables import ragged_tables

            return Plan(*ragged_tables(cu_seqlens, T, chunk_size), chunk_size)
        return _ragged(cu_seqlens, T, chunk_size)


_recorded: dict[int, object] = {}


def recorded(tables: Tables, device: torch.device) -> Tables:
    """Tables out of a cache. Where a CUDA graph is being captured they are its own for good: it reads them whatever the cache forgets."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _recorded[id(tables)] = tables
    return tables


@lru_cache(maxsize=256)
def _fixed(B: int, T: int, chunk_size: int, device: torch.device) -> Plan:
    with torch.inference_mode(False), torch.no_grad():  # cached: an inference tensor could not be used under autograd later
        cu = torch.arange(B + 1, device=device, dtype=torch.int64) * T
        return _ragged(cu, B * T, chunk_size, bound=B * (-(-T // chunk_size)))


def _ragged(cu: torch.Tensor, T: int, chunk_size: int, bound: int | None = None) -> Plan:
    N = cu.shape[0] - 1
    NC = T // chunk_size + N if bound is None else bound
    cu = cu.clamp(0, T).cummax(0).values  # whatever a table that the host did not check holds, no row or chunk beyond the bounds
    first, end = cu[:-1], cu[1:]
    count = ((end - first).clamp(min=0) + chunk_size - 1) // chunk_size  # [N] chunks per sequence
    after = count.cumsum(0)
    first_chunk = after - count
    sequences = torch.stack([first, end, first_chunk, count], 1).to(torch.int32)
    if NC == 0 or N == 0:
        return Plan(torch.zeros(NC, 4, dtype=torch.int32, device=cu.device), sequences, chunk_size)
    c = torch.arange(NC, device=cu.device)
    n = torch.searchsorted(after, c, right=True).clamp(max=N - 1)
    index = c - first_chunk[n]
    start = first[n] + index * chunk_size
    stop = torch.minimum(start + chunk_size, end[n])
    chunks = torch.stack([n, start, stop, index], 1)
    used = (c < after[-1])[:, None]
    return Plan(torch.where(used, chunks, 0).to(torch.int32), sequences, chunk_size)
