"""Tensors on a GPU that is not the current one, as where a model is spread over several: kernels run there, with the same bits."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from serving_case import make

from openkda import backends, chunk_kda, fused_recurrent_kda, kda_decode, kda_prefill
from openkda.layer import KDACache, KimiDeltaAttention
from openkda.testing import gradients, make_case

BF16 = torch.bfloat16


def chunks(device):
    case = make_case("init", T=300, H=2, K=64, dtype=BF16, device=device)
    return [*chunk_kda(**case.args), *chunk_kda(**case.args, backend="portable"), *gradients(case).values()]


def portable_gradients(device):
    case = make_case("init", lengths=(70, 0, 31), H=2, K=64, device=device)
    return [x for kept in (False, True) for x in gradients(case, backend="portable", disable_recompute=kept).values()]


def tokens(device):
    args = make_case("init", T=20, H=2, K=64, device=device).args
    return fused_recurrent_kda(**{name: x for name, x in args.items() if name not in ("safe_gate", "chunk_size")})


def serving(device):
    indices = lambda *slots: torch.tensor(slots, dtype=torch.int32, device=device)
    case, prompts = make(N=2, device=device), make(lengths=[40, 3], device=device)
    cu = torch.tensor([0, 40, 43], dtype=torch.int32, device=device)
    more = dict(has_initial_state=None, cu_seqlens=cu, backend="portable")
    prompt = kda_prefill(**prompts.arguments(state_indices=indices(1, -1)), **more)
    return [kda_decode(**case.arguments(state_indices=indices(1, 2))), case.pool[1:3], prompt, prompts.pool[1]]


def layer(device):
    torch.manual_seed(0)
    mixer = KimiDeltaAttention(32, 2, 64, lower_bound=-5.0).to(device)
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    mixer(x).square().sum().backward()
    with torch.no_grad():
        cache = KDACache()
        parts = [mixer(part, cache=cache) for part in x.split([39, 1], 1)]
    return [*parts, cache.recurrent_state, x.grad, *(p.grad for p in mixer.parameters())]


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("results", [chunks, portable_gradients, tokens, serving, layer])
def test_kernels_run_where_the_tensors_are(results):
    first, second = (results(torch.device("cuda", index)) for index in (0, 1))
    assert torch.cuda.current_device() == 0
    for a, b in zip(first, second, strict=True):
        assert b.device.index == 1 and torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize("index, entered", [(0, []), (1, [1])])
def test_the_device_is_changed_where_it_must_be(monkeypatch, index, entered):
    changed = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: changed.append(device.index) or nullcontext())
    inputs = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda", index)))
    call = backends.on_its_device(lambda problem, given, *rest, last=0: (problem, given, rest, last))
    assert call("problem", inputs, 3) == ("problem", inputs, (3,), 0) and changed == entered
    assert backends.on_its_device(torch.neg)(torch.ones(())) == -1 and changed == entered  # a tensor on the CPU
