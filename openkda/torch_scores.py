"""What the torch backend's two passes, with and without autograd, have in common: chunks of 16 tokens and their scores, for any gate.

With G the base-2 log decay summed from the chunk's entry, the decayed scores are

    (x_r exp2(G_r)) . (k_i exp2(-G_i))   for rows with G_r >= -SAFE_SPAN, which bounded gates never leave
    level by level                       for the other rows, where exp2(-G_i) could overflow

The choice of form is made row by row from the gates up to that row, so an output never depends on a later token, not even by rounding.
Level s = 1, 2, 4, 8: in every 2s rows the odd half meets the even half about the even half's last row a, exp2(G_r - G_a) exp2(G_a - G_i).
"""

from __future__ import annotations

import math

import torch

CHUNK = 16
SAFE_SPAN = 116.0  # 16 tokens at a lower bound of -5, and rounding; 2^-SAFE_SPAN is a normal fp32 number
SHIFT = 2.0**57  # taken off exp2(-G), which then stays within 2^+-59 and cannot overflow on a large key; exact, given back in the scores


def sum_in_base_2(like: torch.Tensor) -> torch.Tensor:
    """[CHUNK, CHUNK] in the dtype and on the device of `like`: times natural-log decays, their running sums in base 2."""
    return torch.full((CHUNK, CHUNK), 1 / math.log(2), dtype=like.dtype, device=like.device).tril_()


def chunk_cumsum(g: torch.Tensor, triangle: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """G [B, T, HV, K]: the natural-log decay g [B, T, HV, K] summed within each chunk, in base 2; T whole chunks.

    In `out` [B * T / CHUNK, CHUNK, HV * K] where it is given. On a CPU a product with sum_in_base_2(g), in two thirds of the time of a
    cumulative sum. Elsewhere a cumulative sum: a decay over a few tokens is a difference of sums of up to SAFE_SPAN, and cuBLAS adds in an
    order that changes with the number of chunks and can leave such a difference several of their ulps off."""
    rows = g.reshape(-1, CHUNK, g.shape[-2] * g.shape[-1])
    if g.device.type == "cpu":
        G = torch.bmm(triangle.expand(rows.shape[0], -1, -1), rows, out=out)
    else:
        G = torch.cumsum(torch.mul(rows, 1 / math.log(2), out=out), 1, out=out)
    return G.view(g.shape)


def exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x, zero below the normal range: subnormal results take a CPU ten times as long."""
    return torch.nn.functional.threshold(x, math.log2(torch.finfo(x.dtype).tiny), -math.inf).exp2()


def unsafe_chunks(G: torch.Tensor) -> torch.Tensor | None:
    """Indices into the flattened leading dimensions of the chunks with a row beyond SAFE_SPAN, None where there are none.

    G [.., CHUNK, K], falling from row to row."""
    total = G[..., -1, :]
    if total.numel() == 0 or total.amin().item() >= -SAFE_SPAN:
        return None
    return (total.amin(-1).flatten() < -SAFE_SPAN).nonzero().squeeze(-1)


def level_scores(q: torch.Tensor, k: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """Scores within a block for any gate: sum_c x_r k_i exp2(G_r - G_i) for x = q (i <= r) above those for x = k (i < r).

    q, k, G [N, C, K], G falling from row to row -> [N, 2C, C]."""
    N, C, _ = q.shape
    out = torch.diag_embed(torch.stack([(q * k).sum(-1), q.new_zeros(N, C)], 1))  # [N, 2, C, C]
    s = 1
    while s < C:
        halves = lambda x, s=s: x.unflatten(1, (-1, 2, s)).unbind(2)  # even and odd blocks of s rows, [N, C / 2s, s, K] each
        even, odd = halves(G)
        anchor = even[:, :, -1:]
        decay = exp2(odd - anchor)
        rows = torch.cat([halves(q)[1] * decay, halves(k)[1] * decay], -2)  # [N, C / 2s, 2s, K]
        block = rows @ (halves(k)[0] * exp2(anchor - even)).mT  # [N, C / 2s, 2s, s]
        target = out.unflatten(3, (-1, 2, s)).unflatten(2, (-1, 2, s))  # [N, 2, C / 2s, 2, s, C / 2s, 2, s]
        target.diagonal(dim1=2, dim2=5)[:, :, 1, :, 0].copy_(block.unflatten(2, (2, s)).permute(0, 2, 3, 4, 1))
        s *= 2
    return out.flatten(1, 2)


def any_gate(q: torch.Tensor, k: torch.Tensor, G: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and kg of chunks with rows beyond SAFE_SPAN: `scores` [N, 2C, C] with those rows replaced, and k exp2(G_C - G) [N, C, K].

    q, k, G [N, C, K]; scores of q above those of k, less SHIFT, right in the rows within SAFE_SPAN."""
    safe = (G.amin(-1, keepdim=True) >= -SAFE_SPAN).repeat(1, 2, 1)  # [N, 2C, 1]; G falls, so they come first
    return torch.where(safe, scores, level_scores(q, k, G) / SHIFT), k * exp2(G[:, -1:] - G)


def whole_chunks(x: torch.Tensor) -> torch.Tensor:
    """[B, T, ..] with T filled up to whole chunks by zeros (log decay 0, key 0: rows that change nothing)."""
    B, T = x.shape[:2]
    return torch.cat([x, x.new_zeros(B, -T % CHUNK, *x.shape[2:])], 1) if T % CHUNK else x


def by_chunk(x: torch.Tensor) -> torch.Tensor:
    """[B, T, HV, D], T whole chunks, seen as [chunks, B, HV, CHUNK, D]; [B, T, HV] as [chunks, B, HV, CHUNK]."""
    return x.unflatten(1, (x.shape[1] // CHUNK, CHUNK)).permute((1, 0, 3, 2) if x.ndim == 3 else (1, 0, 3, 2, 4))
