"""The Triton kernels of the layer's output norm against its definition in fp64."""

import pytest
import torch

from openkda.layer import gated_rms_norm
from openkda.portable import gated_norm as kernels
from openkda.portable.gated_norm import gated_norm
from openkda.testing import relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def inputs(shape: tuple[int, ...], dtype: torch.dtype, gate_dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device):
    gen = torch.Generator().manual_seed(0)
    x, gate, dy = (torch.randn(*shape, generator=gen) for _ in range(3))
    weight = 0.5 + torch.rand(shape[-1], generator=gen)
    tensors = (x.to(device, dtype), gate.to(device, gate_dtype), weight.to(device, weight_dtype))
    return tuple(t.requires_grad_() for t in tensors), dy.to(device, dtype)


def check(tensors: tuple[torch.Tensor, ...], dy: torch.Tensor) -> None:
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    y, expected = gated_norm(*tensors, 1e-5), gated_rms_norm(*doubles, 1e-5)
    rounding = {FP32: 2e-6, BF16: 2**-8, FP16: 2**-11}
    assert y.dtype == tensors[0].dtype and y.shape == tensors[0].shape and relative_error(y, expected) < rounding[y.dtype]
    wanted = torch.autograd.grad(expected, doubles, dy.double())
    for t, gradient, reference in zip(tensors, torch.autograd.grad(y, tensors, dy), wanted):
        assert gradient.dtype == t.dtype and relative_error(gradient, reference) < rounding[t.dtype]


@pytest.mark.parametrize("shape", [(2, 9, 3, 16), (1, 1, 1, 128), (5, 3), (40, 100), (3, 256)])
@pytest.mark.parametrize("dtypes", [(FP32, FP32, FP32), (BF16, BF16, FP32), (FP16, FP32, FP16)])
def test_values_and_gradients(device, shape, dtypes):
    check(*inputs(shape, *dtypes, device))


def test_many_rows_are_summed_in_few_programs(device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_PROGRAMS", 2)
    monkeypatch.setattr(kernels, "BACKWARD_TILES", 1)
    monkeypatch.setattr(kernels, "TILE", 64)
    check(*inputs((77, 16), FP32, FP32, FP32, device))


def test_views_and_repeated_runs(device):
    (x, gate, weight), dy = inputs((2, 7, 3, 16), BF16, BF16, FP32, device)
    results = []
    for strided in (False, True, True):
        a, b, c = (t.transpose(1, 2).contiguous().transpose(1, 2) if strided else t for t in (x, gate, dy))
        y = gated_norm(a, b, weight, 1e-5)
        results.append((y, *torch.autograd.grad(y, (x, gate, weight), c)))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*results))


def test_no_rows(device):
    (x, gate, weight), _ = inputs((2, 0, 3, 16), BF16, FP32, FP32, device)
    y = gated_norm(x, gate, weight, 1e-5)
    assert y.shape == (2, 0, 3, 16) and y.dtype == BF16


@pytest.mark.parametrize(("name", "shape"), [("gate", (2, 1, 4)), ("gate", (4,)), ("weight", (3,)), ("weight", (1, 4))])
def test_nothing_is_broadcast(name, shape, device):
    """The kernels would read past the end of what is smaller."""
    tensors = dict(x=torch.zeros(2, 3, 4, device=device), gate=torch.zeros(2, 3, 4, device=device), weight=torch.zeros(4, device=device))
    with pytest.raises(ValueError, match=f"{name}'s shape is .*; it must be "):
        gated_rms_norm(**tensors | {name: torch.zeros(shape, device=device)}, eps=1e-5)
