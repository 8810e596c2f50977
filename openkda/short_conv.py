"""The layer's short convolution: depthwise, causal, with SiLU, carrying its window over calls and packed sequences.

One of three runs it: an installed `causal_conv1d` package, the library's Triton kernels on a GPU, or torch.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from openkda.problem import FLOAT_DTYPES, fail, transform_of

MAX_TAPS = 8  # of the Triton kernels, which unroll them
MAX_BATCH = 2**16 - 1  # of the same: an axis of their grids


@cache
def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return find_spec(package) is not None


def uses_causal_conv1d(stream: Tensor, taps: int) -> bool:
    """Whether the causal_conv1d package (CUDA, two to four taps) is installed and runs this convolution."""
    return not torch.compiler.is_compiling() and stream.is_cuda and 2 <= taps <= 4 and installed("causal_conv1d")


def kernels_serve(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the library's Triton kernels take the layer's pointwise work on x, whose other operands are `others`. A compiled graph fuses
    torch's operators instead, and torch.func's transforms need them."""
    served = not torch.compiler.is_compiling() and x.is_cuda and x.dtype in FLOAT_DTYPES and installed("triton")
    return served and transform_of((x, *others)) == "none"


def _filter(stream: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """SiLU of the depthwise convolution of stream [B, L, D] with weight [D, 1, W]: [B, L-W+1, D], no padding."""
    taps = weight.shape[-1]
    if stream.shape[1] < taps:
        return stream[:, :0]
    if uses_causal_conv1d(stream, taps):
        from causal_conv1d import causal_conv1d_fn

        # It pads W-1 zeros on the left; the outputs that saw them are the first W-1.
        bias = None if bias is None else bias.to(stream.dtype)
        y = causal_conv1d_fn(stream.transpose(1, 2), weight.squeeze(1).to(stream.dtype), bias, activation="silu")[..., taps - 1 :]
    elif kernels_serve(stream, weight, bias) and taps <= MAX_TAPS and stream.shape[0] <= MAX_BATCH:
        from openkda.portable.short_conv import silu_conv

        return silu_conv(stream, weight, bias)
    else:
        y = F.silu(F.conv1d(stream.transpose(1, 2), weight, bias, groups=weight.shape[0]))
    return y.transpose(1, 2)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution with SiLU, carrying its window over calls.

    Args:
        x: [B, T, D]; with `cu_seqlens` [1, T, D].
        weight: [D, 1, W]; tap W-1 multiplies the current token.
        bias: [D] or None.
        state: the W-1 inputs before x, [N, D, W-1], or None for zeros. N is B, or the number of packed sequences.
        cu_seqlens: [N+1] integer sequence bounds, or None.

    Returns:
        y [B, T, D] and the new state [N, D, W-1]. Both carry gradients, for sequences shorter than W-1 as well.

    Raises:
        ValueError: shapes that do not fit. The values of cu_seqlens are the caller's: from 0, never falling, at most T.
    """
    if x.ndim != 3:
        raise fail("x's shape", list(x.shape), "[B, T, D]")
    B, T, D = x.shape
    W = weight.shape[-1] if weight.ndim == 3 else 0
    if W < 1 or weight.shape != (D, 1, W):
        raise fail("weight's shape", list(weight.shape), f"[{D}, 1, W], W at least 1")
    if bias is not None and bias.shape != (D,):
        raise fail("bias's shape", list(bias.shape), f"[{D}]")
    if cu_seqlens is not None and (B != 1 or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1):
        raise fail("cu_seqlens's shape", f"{list(cu_seqlens.shape)} with B={B}", "[N + 1] with B=1")
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state is not None and state.shape != (N, D, W - 1):
        raise fail("state's shape", list(state.shape), str([N, D, W - 1]))
    window = x.new_zeros(N, W - 1, D) if state is None else state.to(x.dtype).transpose(1, 2)
    if W == 1:
        return _filter(x, weight, bias), x.new_zeros(N, D, 0)
    if cu_seqlens is None:
        stream = torch.cat([window, x], 1)  # [B, W-1+T, D]
        # A clone: a view would keep the whole stream alive in the cache.
        return _filter(stream, weight, bias), stream[:, T:].transpose(1, 2).clone(memory_format=torch.contiguous_format)
    # Packed: one stream in which each sequence is preceded by its own window, so a single convolution serves all and
    # the rows that mix two sequences are never read. Tokens after the last sequence follow the last block.
    if N == 0:
        return x * 0, window.transpose(1, 2)
    bounds = cu_seqlens.long()
    taps, n, token = (torch.arange(count, device=x.device) for count in (W - 1, N, T))
    sequence = torch.searchsorted(bounds[1:], token, right=True).clamp(max=N - 1)
    row = token + (sequence + 1) * (W - 1)  # where token t sits in the stream
    head = (bounds[:-1] + n * (W - 1))[:, None] + taps  # [N, W-1] rows of the windows
    tail = (bounds[1:] + n * (W - 1))[:, None] + taps  # [N, W-1] the last W-1 rows of each block
    stream = x.new_zeros(T + N * (W - 1), D)
    stream = stream.index_copy(0, row, x[0]).index_copy(0, head.flatten(), window.reshape(-1, D))
    y = _filter(stream[None], weight, bias)
    return y.index_select(1, row - (W - 1)), stream[tail].transpose(1, 2)
