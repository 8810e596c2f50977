"""The layer's short convolution and the window it carries, and its Triton kernels, against torch in fp64."""

import importlib
import sys

import pytest
import torch
import torch.nn.functional as F

from openkda import chunk_kda
from openkda import short_conv as conv_module
from openkda.portable.short_conv import silu_conv
from openkda.short_conv import kernels_serve, short_conv
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
    kernels = importlib.import_module("openkda.portable.short_conv")
    monkeypatch.setattr(kernels, "MAX_PROGRAMS", 2)
    monkeypatch.setattr(kernels, "BACKWARD_TILES", 1)
    (x, weight, bias), dy = inputs(1, 90, 4, 4, bias=True, dtype=FP32, weight_dtype=FP32, device=device)
    found = torch.autograd.grad(silu_conv(x, weight, bias), (x, weight, bias), dy)
    doubles = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    for a, b in zip(found, torch.autograd.grad(exact(*doubles), doubles, dy.double())):
        assert relative_error(a, b) < 2e-6


def test_who_runs_it(device):
    """On a GPU the kernels, in every dtype but fp64."""
    assert kernels_serve(torch.zeros(1, device=device)) == (device.type == "cuda")
    assert not kernels_serve(torch.zeros(1, device=device, dtype=torch.float64))


def naive_conv(x, weight, bias, state):
    """short_conv of one sequence by the definition: x [T, D], weight [D, W], state [D, W-1]."""
    stream = torch.cat([state.T, x])
    W = weight.shape[1]
    rows = [F.silu((stream[t : t + W] * weight.T).sum(0) + bias) for t in range(x.shape[0])]
    return torch.stack(rows) if rows else x, stream[x.shape[0] :].T


@pytest.mark.parametrize(("T", "W"), [(1, 4), (2, 4), (1, 3), (3, 4), (7, 4), (5, 1), (0, 4)])
@pytest.mark.parametrize("packed", [False, True])
def test_short_conv_and_its_state_have_right_gradients(T, W, packed):
    torch.manual_seed(0)
    lengths = [T, 0, 2, T] if packed else [T]
    N, D, rows = len(lengths), 3, sum(lengths)
    x = torch.randn(rows, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(D, 1, W, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(D, dtype=torch.float64, requires_grad=True)
    state = torch.randn(N, D, W - 1, dtype=torch.float64, requires_grad=True)
    bounds = torch.tensor([0, *lengths]).cumsum(0) if packed else None
    y, new = short_conv(x[None], weight, bias, state=state, cu_seqlens=bounds)
    parts = [naive_conv(piece, weight[:, 0], bias, s) for piece, s in zip(x.split(lengths), state)]
    expected, expected_new = torch.cat([p[0] for p in parts])[None], torch.stack([p[1] for p in parts])
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(new, expected_new)
    dy, dnew = torch.randn_like(y), torch.randn_like(new)
    pick = lambda y, new: torch.autograd.grad(
        (y * dy).sum() + (new * dnew).sum(), (x, weight, bias, state), allow_unused=True, materialize_grads=True
    )
    for a, b in zip(pick(y, new), pick(expected, expected_new)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(x=torch.zeros(5, 6)), r"x's shape is \[5, 6\]; it must be \[B, T, D\]"),
        (dict(weight=torch.zeros(7, 1, 4)), r"weight's shape is \[7, 1, 4\]; it must be \[6, 1, W\], W at least 1"),
        (dict(weight=torch.zeros(6, 4)), "weight's shape"),
        (dict(bias=torch.zeros(7)), r"bias's shape is \[7\]; it must be \[6\]"),
        (dict(state=torch.zeros(2, 6, 4)), r"state's shape is \[2, 6, 4\]; it must be \[2, 6, 3\]"),
        (dict(cu_seqlens=torch.tensor([0, 5])), r"cu_seqlens's shape is \[2\] with B=2; it must be \[N \+ 1\] with B=1"),
        (dict(x=torch.zeros(1, 5, 6), cu_seqlens=torch.tensor([], dtype=torch.int64)), "cu_seqlens's shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(wrong, message):
    """A window of another size would give another number of tokens; the kernel's pointers would leave a weight that is too small."""
    with pytest.raises(ValueError, match=message):
        short_conv(**dict(x=torch.zeros(2, 5, 6), weight=torch.zeros(6, 1, 4)) | wrong)


def test_short_conv_without_any_sequence():
    y, state = short_conv(torch.randn(1, 5, 3), torch.randn(3, 1, 4), cu_seqlens=torch.tensor([0]))
    assert torch.equal(y, torch.zeros(1, 5, 3)) and state.shape == (0, 3, 3)


def test_short_conv_of_a_fused_projection_has_the_gradients_of_its_copies():
    """The views of one fused projection are strided; a convolution backward that assumes otherwise gives wrong gradients."""
    torch.manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    fused = randn(2, 19, 3 * 16 + 5).requires_grad_()
    weights = [randn(16, 1, 4) for _ in range(3)]
    gate, beta, upstream = randn(2, 19, 2, 8), randn(2, 19, 2), randn(2, 19, 2, 8)

    def run(views):
        q, k, v = (short_conv(x, w)[0].unflatten(-1, (2, 8)) for x, w in zip(views, weights))
        o, _ = chunk_kda(q, k, v, -gate.exp(), beta, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        return torch.autograd.grad(o, fused, upstream)[0]

    views = fused.split([16, 16, 16, 5], -1)[:3]
    torch.testing.assert_close(run(views), run([x.clone(memory_format=torch.contiguous_format) for x in views]), rtol=1e-6, atol=1e-7)


def test_an_installed_causal_conv1d_gets_the_windowed_stream(monkeypatch):
    """The package needs CUDA, so a stand-in with its contract (left padding of zeros, [B, D, L], weight [D, W]) takes its place."""
    calls = []

    class Package:
        @staticmethod
        def causal_conv1d_fn(x, weight, bias, activation):
            calls.append(tuple(x.shape))
            assert activation == "silu" and weight.dim() == 2
            return F.silu(F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[1]))

    x, weight, state = torch.randn(2, 6, 5), torch.randn(5, 1, 4), torch.randn(2, 5, 3)
    expected = short_conv(x, weight, state=state)[0]
    monkeypatch.setitem(sys.modules, "causal_conv1d", Package)
    monkeypatch.setattr(conv_module, "uses_causal_conv1d", lambda stream, taps: True)
    torch.testing.assert_close(short_conv(x, weight, state=state)[0], expected)
    assert calls == [(2, 5, 9)]
