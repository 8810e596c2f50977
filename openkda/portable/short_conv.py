"""Depthwise causal convolution with SiLU over the rows of a stream, and its gradients.

    z[t] = sum_j w[j] x[t + j] + b        y = z sigmoid(z)        L rows in, L - W + 1 rows out (no padding)
    dz[t] = dy[t] sigmoid(z[t]) (1 + z[t] (1 - sigmoid(z[t])))
    dx[s] = sum_j w[j] dz[s - j]          dw[j] = sum_t dz[t] x[t + j]          db = sum_t dz[t]

Grid (block of rows, block of BD channels, batch); a tile is [BT, BD] in fp32, and neighbouring rows come from the cache, so every tensor
passes through memory once. The backward finds z again, W times for each dz that a row of x meets. Sums over rows are written per program
and added in one order: repeated runs are equal bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.autograd import first_order
from openkda.backends import on_its_device
from openkda.portable.tile import sigmoid

BT, BD = 16, 128  # rows and channels of a tile: 16 elements a thread
FORWARD_TILES, BACKWARD_TILES = 4, 16  # tiles a program, at least where there are as many
MAX_PROGRAMS = 256  # row blocks of the backward, each with [W + 1, D] fp32 sums of its own, unless the batch is larger


@triton.jit
def rows_of(ptr, rows, cols, count, D: tl.constexpr):
    """[BT, BD] fp32 rows of a [count, D] matrix, zero outside it."""
    mask = ((rows >= 0) & (rows < count))[:, None] & (cols < D)[None, :]
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def tap(weight_ptr, j, cols, D: tl.constexpr, W: tl.constexpr):
    """[BD] weights of tap j, fp32."""
    return tl.load(weight_ptr + cols * W + j, mask=cols < D, other=0.0).to(tl.float32)


@triton.jit
def response(x_ptr, weight_ptr, bias_ptr, rows, cols, L, D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """z [BT, BD] at output rows `rows`."""
    z = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    for j in tl.static_range(W):
        z += tap(weight_ptr, j, cols, D, W)[None, :] * rows_of(x_ptr, rows + j, cols, L, D)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def conv_forward_kernel(
    x_ptr,  # [B, L, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D]
    y_ptr,  # [B, L - W + 1, D]
    L,
    tiles,  # of a program
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    out = L - W + 1
    for i in range(tiles):
        rows = (tl.program_id(0).to(tl.int64) * tiles + i) * BT + tl.arange(0, BT)
        z = response(x_ptr + batch * L * D, weight_ptr, bias_ptr, rows, cols, L, D, W, HAS_BIAS)
        mask = (rows < out)[:, None] & (cols < D)[None, :]
        tl.store(y_ptr + (batch * out + rows[:, None]) * D + cols[None, :], (z * sigmoid(z)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def conv_backward_kernel(
    x_ptr,  # [B, L, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D]
    dy_ptr,  # [B, L - W + 1, D]
    dx_ptr,  # [B, L, D]
    sums_ptr,  # [B, programs, W + 1, D] fp32: dw, db
    L,
    tiles,  # of a program
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    out = L - W + 1
    x_ptr += batch * L * D
    at = sums_ptr + (batch * tl.num_programs(0) + tl.program_id(0)) * (W + 1) * D + cols
    taps = tl.arange(0, triton.next_power_of_2(W + 1))
    sums = tl.zeros([triton.next_power_of_2(W + 1), BD], tl.float32)
    for i in range(tiles):
        rows = (tl.program_id(0).to(tl.int64) * tiles + i) * BT + tl.arange(0, BT)
        dx = tl.zeros([BT, BD], tl.float32)
        for j in tl.static_range(W):
            z = response(x_ptr, weight_ptr, bias_ptr, rows - j, cols, L, D, W, HAS_BIAS)
            s = sigmoid(z)
            dz = rows_of(dy_ptr + batch * out * D, rows - j, cols, out, D) * (s * (1.0 + z * (1.0 - s)))
            dx += tap(weight_ptr, j, cols, D, W)[None, :] * dz
            if j == 0:
                for n in tl.static_range(W):
                    sums += (taps == n)[:, None] * tl.sum(dz * rows_of(x_ptr, rows + n, cols, L, D), 0)[None, :]
                sums += (taps == W)[:, None] * tl.sum(dz, 0)[None, :]
        mask = (rows < L)[:, None] & (cols < D)[None, :]
        tl.store(dx_ptr + (batch * L + rows[:, None]) * D + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(at[None, :] + taps[:, None] * D, sums, mask=(taps <= W)[:, None] & (cols < D)[None, :])


class SiluConv(torch.autograd.Function):
    """apply(stream [B, L, D], weight [D, W], bias [D] or None) -> [B, L - W + 1, D] in the stream's dtype; arithmetic in fp32."""

    @staticmethod
    def forward(ctx, stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        stream, weight = stream.contiguous(), weight.contiguous()
        B, L, D = stream.shape
        W = weight.shape[1]
        y = stream.new_empty(B, L - W + 1, D)
        tiles = min(FORWARD_TILES, triton.cdiv(L - W + 1, BT))
        programs = triton.cdiv(L - W + 1, BT * tiles)
        conv_forward_kernel[(programs, triton.cdiv(D, BD), B)](
            stream, weight, bias, y, L, tiles, D=D, W=W, HAS_BIAS=bias is not None, BT=BT, BD=BD, num_warps=4
        )
        ctx.save_for_backward(stream, weight, bias)
        return y

    @first_order("the short convolution's kernels", "the layer has them on a CPU")
    def backward(ctx, saved: tuple, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        stream, weight, bias = saved
        B, L, D = stream.shape
        W = weight.shape[1]
        blocks = triton.cdiv(L, BT)
        tiles = min(blocks, max(BACKWARD_TILES, triton.cdiv(blocks * B, MAX_PROGRAMS)))
        programs = triton.cdiv(L, BT * tiles)
        dx = torch.empty_like(stream)
        sums = torch.empty(B * programs, W + 1, D, dtype=torch.float32, device=stream.device)
        conv_backward_kernel[(programs, triton.cdiv(D, BD), B)](
            stream, weight, bias, dy.contiguous(), dx, sums, L, tiles, D=D, W=W, HAS_BIAS=bias is not None, BT=BT, BD=BD, num_warps=4
        )
        total = sums.sum(0)  # [W + 1, D]
        return dx, total[:W].T.to(weight.dtype), None if bias is None else total[W].to(bias.dtype)


@on_its_device
def silu_conv(stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """SiLU of the depthwise convolution of stream [B, L, D], L >= W, with weight [D, 1, W] and bias [D] or None: [B, L - W + 1, D].

    bf16, fp16 or fp32 on a GPU; the result has the stream's dtype. Differentiable once in all three."""
    return SiluConv.apply(stream, weight.squeeze(1), bias)
