"""The layer's output norm, and its gradients.

    n = x / sqrt(mean(x^2) + eps)        y = n w s        s = sigmoid(gate)
    dgate = dy n w s (1 - s)             dn = dy w s      dx = (dn - n mean(dn n)) / sqrt(mean(x^2) + eps)        dw = sum dy n s

Rows are the tokens of all heads, [R, V]; a tile is [BR, V padded to a power of two] in fp32, and every tensor passes through memory once.
Grid: blocks of rows, several tiles each; in the backward each writes its own sum for w, and these are added in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from openkda.autograd import first_order
from openkda.backends import on_its_device
from openkda.portable.tile import load_tile, load_vector, sigmoid, store_tile

TILE = 2048  # elements: 16 a thread
FORWARD_TILES, BACKWARD_TILES = 4, 16  # tiles a program, at least
MAX_PROGRAMS = 1024  # of the backward, each with a [V] fp32 sum of its own


@triton.jit
def normalised(x_ptr, rows, cols, live, eps, V: tl.constexpr, BV: tl.constexpr):
    """n [BR, BV] and the factor [BR] that made it."""
    x = load_tile(x_ptr, rows, V, cols, live, V, BV).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / V + eps)
    return x * factor[:, None], factor


@triton.jit
def norm_forward_kernel(
    x_ptr,  # [R, V]
    gate_ptr,  # [R, V]
    weight_ptr,  # [V]
    y_ptr,  # [R, V]
    R,
    tiles,  # of a program
    eps,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    cols = tl.arange(0, BV)
    w = load_vector(weight_ptr, cols, V, BV)
    for i in range(tiles):
        rows = (tl.program_id(0).to(tl.int64) * tiles + i) * BR + tl.arange(0, BR)
        live = rows < R
        n, _ = normalised(x_ptr, rows, cols, live, eps, V, BV)
        s = sigmoid(load_tile(gate_ptr, rows, V, cols, live, V, BV).to(tl.float32))
        store_tile(y_ptr, n * w[None, :] * s, rows, V, cols, live, V, BV)


@triton.jit
def norm_backward_kernel(
    x_ptr,  # [R, V]
    gate_ptr,  # [R, V]
    weight_ptr,  # [V]
    dy_ptr,  # [R, V]
    dx_ptr,  # [R, V]
    dgate_ptr,  # [R, V]
    sums_ptr,  # [programs, V] fp32
    R,
    tiles,  # of a program
    eps,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    cols = tl.arange(0, BV)
    w = load_vector(weight_ptr, cols, V, BV)
    dw = tl.zeros([BV], tl.float32)
    for i in range(tiles):
        rows = (tl.program_id(0).to(tl.int64) * tiles + i) * BR + tl.arange(0, BR)
        live = rows < R
        n, factor = normalised(x_ptr, rows, cols, live, eps, V, BV)
        s = sigmoid(load_tile(gate_ptr, rows, V, cols, live, V, BV).to(tl.float32))
        dy = load_tile(dy_ptr, rows, V, cols, live, V, BV).to(tl.float32)
        dw += tl.sum(dy * n * s, 0)
        dn = dy * w[None, :] * s
        store_tile(dgate_ptr, dn * n * (1.0 - s), rows, V, cols, live, V, BV)
        store_tile(dx_ptr, (dn - n * (tl.sum(dn * n, 1) / V)[:, None]) * factor[:, None], rows, V, cols, live, V, BV)
    tl.store(sums_ptr + tl.program_id(0) * V + cols, dw, mask=cols < V)


def launch(rows: int, V: int, tiles: int) -> tuple[tuple[int], int, dict[str, int]]:
    """Grid, tiles a program (at most `tiles`), and the tile's sizes."""
    BV = triton.next_power_of_2(V)
    BR = max(TILE // BV, 1)
    tiles = min(tiles, triton.cdiv(rows, BR))
    return (triton.cdiv(rows, BR * tiles),), tiles, dict(V=V, BR=BR, BV=BV, num_warps=4)


class GatedNorm(torch.autograd.Function):
    """apply(x [R, V], gate [R, V], weight [V], eps) -> [R, V] in x's dtype; arithmetic in fp32."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        R, V = x.shape
        y = torch.empty_like(x)
        grid, tiles, sizes = launch(R, V, FORWARD_TILES)
        norm_forward_kernel[grid](x, gate, weight, y, R, tiles, eps, **sizes)
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return y

    @first_order("the output norm's kernels", "the layer has them on a CPU")
    def backward(ctx, saved: tuple, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, gate, weight = saved
        R, V = x.shape
        dx, dgate = torch.empty_like(x), torch.empty_like(gate)
        blocks = triton.cdiv(R, max(TILE // triton.next_power_of_2(V), 1))
        grid, tiles, sizes = launch(R, V, max(BACKWARD_TILES, triton.cdiv(blocks, MAX_PROGRAMS)))
        sums = torch.empty(grid[0], V, dtype=torch.float32, device=x.device)
        norm_backward_kernel[grid](x, gate, weight, dy.contiguous(), dx, dgate, sums, R, tiles, ctx.eps, **sizes)
        return dx, dgate, sums.sum(0).to(weight.dtype), None


@on_its_device
def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x) * weight * sigmoid(gate) over the last dim. x, gate [..., V] bf16, fp16 or fp32 on a GPU; weight [V]; eps added to the
    mean square. Returns x's shape and dtype; differentiable once in all three tensors."""
    if x.numel() == 0:
        return (x * gate).to(x.dtype)
    V = x.shape[-1]
    return GatedNorm.apply(x.reshape(-1, V).contiguous(), gate.reshape(-1, V).contiguous(), weight.contiguous(), eps).view(x.shape)
