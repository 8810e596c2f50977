"""The Triton kernels of the short convolution against torch's convolution in fp64."""

import pytest
import torch
import torch.nn.functional as F

from openkda.portable.short_conv import silu_conv
from openkda.short_conv import kernels_serve
from openkda.testing import relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def inputs(B: int, L: int, D: int, W: int, *, bias: bool, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device):
    gen = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(*shape, generator=gen) for shape in ((B, L, D), (D, 1, W), (D,)))
    dy = torch.randn(B, L - W + 1, D, generator=gen)
    tensors = (x.to(device, dtype), weight.to(device, weight_dtype), b.to(device, weight_dtype) if bias else None)
    return tuple(None if t is None else t.requires_grad_() for t in tensors), dy.to(device, dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.silu(F.conv1d(x.transpose(1, 2), weight, bias, groups=weight.shape[0])).transpose(1, 2)


@pytest.mark.parametrize(
    ("B", "L", "D", "W", "bias"),
    [(1, 4, 3, 4, False), (1, 19, 130, 4, True), (1, 40, 16, 3, True), (3, 5, 8, 1, False), (1, 9, 8, 8, True), (2, 5, 9, 2, False)],
)
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(FP32, FP32), (BF16, FP32), (FP16, FP16)])
def test_values_and_gradients(device, B, L, D, W, bias, dtype, weight_dtype):
    tensors, dy = inputs(B, L, D, W, bias=bias, dtype=dtype, weight_dtype=weight_dtype, device=device)
    present = [t for t in tensors if t is not None]
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    y, expected = silu_conv(*tensors), exact(*doubles)
    assert y.dtype == dtype and y.shape == expected.shape
    rounding = {FP32: 2e-6, BF16: 2**-8, FP16: 2**-11}
    assert relative_error(y, expected) < rounding[dtype]
    wanted = torch.autograd.grad(expected, [t for t in doubles if t is not None], dy.double())
    found = torch.autograd.grad(y, present, dy)
    for t, gradient, reference in zip(present, found, wanted, strict=True):
        assert gradient.dtype == t.dtype and relative_error(gradient, reference) < rounding[t.dtype]


def test_views_and_repeated_runs(device):
    """Channels of a wider projection, a gradient of any stride: the results of their copies, bit for bit."""
    (x, weight, _), dy = inputs(2, 21, 24, 4, bias=False, dtype=FP32, weight_dtype=FP32, device=device)
    results = []
    for stream, upstream in ((x[..., 3:19], dy[..., 3:19]), (x[..., 3:19].contiguous(), dy[..., 3:19].contiguous())):
        y = silu_conv(stream, weight[3:19], None)
        results.append((y, *torch.autograd.grad(y, (x, weight), upstream.mT.contiguous().mT)))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_many_rows_are_summed_in_few_programs(device, monkeypatch):
    """The sums of the weight's gradient stay small however long the stream is."""
    from openkda.portable import short_conv

    monkeypatch.setattr(short_conv, "MAX_PROGRAMS", 2)
    monkeypatch.setattr(short_conv, "BACKWARD_TILES", 1)
    (x, weight, bias), dy = inputs(1, 90, 4, 4, bias=True, dtype=FP32, weight_dtype=FP32, device=device)
    found = torch.autograd.grad(silu_conv(x, weight, bias), (x, weight, bias), dy)
    doubles = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    for a, b in zip(found, torch.autograd.grad(exact(*doubles), doubles, dy.double())):
        assert relative_error(a, b) < 2e-6


def test_who_runs_it(device):
    """On a GPU the kernels, in every dtype but fp64."""
    assert kernels_serve(torch.zeros(1, device=device)) == (device.type == "cuda")
    assert not kernels_serve(torch.zeros(1, device=device, dtype=torch.float64))
