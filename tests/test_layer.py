"""The KDA layer against a plain rewrite of its equations, and its cache, masks and packing against one-shot runs."""

import math

import pytest
import torch
import torch.nn.functional as F

from openkda import layer as layer_module
from openkda.layer import KDACache, KimiDeltaAttention, Packing, gated_rms_norm

HIDDEN = 24
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
KINDS = {
    "softplus": {},
    "bounded": {"lower_bound": -5.0},
    "grouped": {"num_v_heads": 4, "head_v_dim": 12, "conv_bias": True, "output_gate_bias": True},
    "negative_eigenvalues": {"allow_neg_eigval": True, "lower_bound": -2.0, "conv_size": 3},
}


def make_layer(kind: str = "softplus", dtype: torch.dtype = torch.float64) -> KimiDeltaAttention:
    """A small layer; in fp64 by default, so that equivalences hold to 1e-9 instead of to rounding."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(HIDDEN, 2, 8, **KINDS[kind])
    with torch.no_grad():
        layer.o_norm.weight.uniform_(0.5, 1.5)
        for p in (layer.f_a_proj.weight, layer.f_b_proj.weight, layer.b_proj.weight):
            p.mul_(4)  # gates and write strengths that differ from token to token
    return layer.to(dtype)


def rewrite(layer: KimiDeltaAttention, x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer for x [B, T, hidden] with parameters p, straight from the paper's equations, token by token."""
    B, T, _ = x.shape
    H, HV, K, V, W = layer.num_heads, layer.num_v_heads, layer.head_dim, layer.head_v_dim, layer.conv_size

    def convolved(name):
        y = x @ p[f"{name}_proj.weight"].T
        taps = p[f"{name}_conv1d.weight"][:, 0]  # [channels, W]
        rows = []
        for t in range(T):
            row = sum(y[:, t - j] * taps[:, W - 1 - j] for j in range(W) if t - j >= 0)
            rows.append(row + p.get(f"{name}_conv1d.bias", 0))
        y = torch.stack(rows, 1)
        return y / (1 + torch.exp(-y))

    q, k = (convolved(n).view(B, T, H, K) for n in "qk")
    v = convolved("v").view(B, T, HV, V)
    q, k = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(HV // H, 2) for y in (q, k))
    gate = (x @ p["f_a_proj.weight"].T @ p["f_b_proj.weight"].T + p["dt_bias"]).view(B, T, HV, K)
    a = p["A_log"].exp()[:, None]
    g = -a * torch.log1p(gate.exp()) if layer.lower_bound is None else layer.lower_bound / (1 + torch.exp(-a * gate))
    beta = (2 if layer.allow_neg_eigval else 1) / (1 + torch.exp(-(x @ p["b_proj.weight"].T)))
    S = x.new_zeros(B, HV, K, V)
    outs = []
    for t in range(T):
        S = torch.diag_embed(g[:, t].exp()) @ S
        kt = k[:, t, :, :, None]  # [B, HV, K, 1]
        S = S + beta[:, t, :, None, None] * kt @ (v[:, t, :, None] - kt.mT @ S)
        outs.append((S.mT @ q[:, t, :, :, None])[..., 0] / math.sqrt(K))
    o = torch.stack(outs, 1)  # [B, T, HV, V]
    o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * p["o_norm.weight"]
    z = x @ p["g_a_proj.weight"].T @ p["g_b_proj.weight"].T + p.get("g_b_proj.bias", 0)
    o = o / (1 + torch.exp(-z.view(B, T, HV, V)))
    return o.flatten(-2) @ p["o_proj.weight"].T


@pytest.fixture(autouse=True)
def double_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_papers_equations(kind):
    layer = make_layer(kind)
    x = torch.randn(2, 37, HIDDEN, requires_grad=True)
    upstream = torch.randn(2, 37, HIDDEN)
    parameters = dict(layer.named_parameters())
    inputs = {"x": x, **parameters}
    y, expected = layer(x), rewrite(layer, x, parameters)
    torch.testing.assert_close(y, expected, **TIGHT)
    grads = (torch.autograd.grad(out, list(inputs.values()), upstream) for out in (y, expected))
    for name, a, b in zip(inputs, *grads):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"gradient of {name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_stays_close(kind):
    """Output and every gradient. A log decay summed over a chunk reaches hundreds of nats; fp32's 2^-24 of that is 4e-5 of an exponential.

    A_log's few numbers are sums of what dt_bias has many of, and are judged with them."""
    layer, x, upstream = make_layer(kind), torch.randn(2, 37, HIDDEN), torch.randn(2, 37, HIDDEN)

    def results(dtype):
        layer.to(dtype)
        low = x.to(dtype).requires_grad_()
        y = layer(low)
        found = dict(zip(["x", *dict(layer.named_parameters())], torch.autograd.grad(y, [low, *layer.parameters()], upstream.to(dtype))))
        return found | {"y": y, "dt_bias": torch.cat([found.pop("A_log"), found["dt_bias"]])}

    exact, found = results(torch.float64), results(torch.float32)
    for name, reference in exact.items():
        error = ((found[name].double() - reference).norm() / reference.norm()).item()
        assert error < 4e-5, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [[1] * 23, [2, 1, 20], [1, 17, 5], [20, 3]])
def test_cache_carries_any_split(kind, pieces):
    layer = make_layer(kind)
    x = torch.randn(2, 23, HIDDEN)
    with torch.no_grad():
        whole_cache, cache = KDACache(), KDACache()
        whole = layer(x, cache=whole_cache)
        parts = torch.cat([layer(piece, cache=cache) for piece in x.split(pieces, 1)], 1)
        torch.testing.assert_close(parts, whole, **TIGHT)
        torch.testing.assert_close(layer(x), whole, rtol=0, atol=0)
    torch.testing.assert_close(cache.recurrent_state, whole_cache.recurrent_state, **TIGHT)
    torch.testing.assert_close(cache.conv_state, whole_cache.conv_state, **TIGHT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_decoding_step_equals_the_stages(kind, tokens, monkeypatch):
    """Single precision decodes through the fused step, double precision stage by stage."""
    used = []
    step = layer_module.kda_fused_decode
    monkeypatch.setattr(layer_module, "kda_fused_decode", lambda *args, **options: used.append(1) or step(*args, **options))
    exact, low = make_layer(kind), make_layer(kind, torch.float32)
    x = torch.randn(3, 12, HIDDEN)
    caches = KDACache(), KDACache(rollback_window=4)
    with torch.no_grad():
        for piece in x.split([5, *[tokens] * (6 // tokens), 1], 1):
            expected, y = exact(piece, cache=caches[0]), low(piece.float(), cache=caches[1])
            torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-5)
        assert len(used) == 6 // tokens + 1
        low.rollback(caches[1], 2)
        again = low(x[:, 10:].float(), cache=caches[1])
        torch.testing.assert_close(again.double(), exact(x)[:, 10:], rtol=1e-3, atol=1e-5)
    for a, b in zip((caches[1].conv_state, caches[1].recurrent_state), (caches[0].conv_state, caches[0].recurrent_state)):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["softplus", "grouped"])
def test_masks_of_any_shape_equal_the_sequences_alone(kind):
    layer = make_layer(kind)
    mask = torch.ones(5, 21, dtype=torch.long)
    mask[0, :9] = 0  # left padding
    mask[1, 14:] = 0  # right padding
    mask[2, [3, 4, 11]] = 0  # holes
    mask[3] = 0  # nothing
    x = torch.randn(5, 21, HIDDEN).masked_fill(mask[..., None] == 0, float("nan"))
    follow = torch.randn(5, 4, HIDDEN)
    cache = KDACache()
    with torch.no_grad():
        y = layer(x, attention_mask=mask, cache=cache)
        wide = torch.cat([mask, torch.ones(5, 4, dtype=torch.long)], 1)
        z = layer(follow, attention_mask=wide, cache=cache)
        assert torch.equal(layer(x, attention_mask=Packing.of(mask)), y)
        for n in range(5):
            alone = KDACache()
            valid = mask[n].bool()
            expected = layer(x[n : n + 1, valid], cache=alone)
            torch.testing.assert_close(y[n : n + 1, valid], expected, **TIGHT)
            assert torch.all(y[n, ~valid] == 0)
            torch.testing.assert_close(z[n : n + 1], layer(follow[n : n + 1], cache=alone), **TIGHT)


def test_masked_token_leaves_the_state_untouched():
    layer, cache = make_layer(), KDACache()
    with torch.no_grad():
        layer(torch.randn(3, 5, HIDDEN), cache=cache)
        conv, state = cache.conv_state.clone(), cache.recurrent_state.clone()
        layer(torch.randn(3, 1, HIDDEN), attention_mask=torch.tensor([[1], [0], [1]]), cache=cache)
    assert torch.equal(cache.conv_state[1], conv[1]) and torch.equal(cache.recurrent_state[1], state[1])
    assert not torch.equal(cache.recurrent_state[0], state[0])


@pytest.mark.parametrize("lengths", [[5, 0, 1, 2, 19], [0], [1, 1, 1], [33, 3]])
def test_packed_sequences_equal_each_alone(lengths):
    layer = make_layer("bounded")
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    tail = 3  # tokens that belong to no sequence
    x = torch.randn(1, sum(lengths) + tail, HIDDEN, requires_grad=True)
    y = layer(x, cu_seqlens=bounds)
    upstream = torch.randn_like(y)
    upstream[:, sum(lengths) :] = 0
    (dx,) = torch.autograd.grad(y, x, upstream)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        piece = x[:, start:end].detach().requires_grad_()
        alone = layer(piece)
        torch.testing.assert_close(y[:, start:end], alone, **TIGHT)
        (expected,) = torch.autograd.grad(alone, piece, upstream[:, start:end])
        torch.testing.assert_close(dx[:, start:end], expected, **TIGHT)
    assert torch.all(dx[:, sum(lengths) :] == 0)


def test_packed_sequences_carry_their_own_states():
    layer = make_layer()
    first, second = [4, 0, 2], [1, 7, 2]
    bounds = lambda lengths: torch.tensor([0, *lengths]).cumsum(0).int()
    a, b = torch.randn(1, 6, HIDDEN), torch.randn(1, 10, HIDDEN)
    cache = KDACache()
    with torch.no_grad():
        layer(a, cu_seqlens=bounds(first), cache=cache)
        y = layer(b, cu_seqlens=bounds(second), cache=cache).split(second, 1)
        for n, (p, q) in enumerate(zip(a.split(first, 1), b.split(second, 1))):
            torch.testing.assert_close(y[n], layer(torch.cat([p, q], 1))[:, first[n] :], **TIGHT)


def test_later_tokens_never_reach_earlier_ones():
    layer = make_layer("bounded")
    x = torch.randn(1, 40, HIDDEN)
    changed = x.clone()
    changed[:, 23:] = torch.randn(1, 17, HIDDEN) * 3
    assert torch.equal(layer(x)[:, :23], layer(changed)[:, :23])


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 6])
def test_rollback_equals_never_having_run(tokens):
    layer = make_layer()
    calls = torch.randn(2, 17, HIDDEN).split([10, 3, 1, 3], 1)
    kept = torch.cat(calls, 1)[:, : 17 - tokens]
    cache, expected = KDACache(rollback_window=6), KDACache()
    with torch.no_grad():
        for call in calls:
            layer(call, cache=cache)
        layer.rollback(cache, tokens)
        layer(kept, cache=expected)
        torch.testing.assert_close(cache.recurrent_state, expected.recurrent_state, **TIGHT)
        torch.testing.assert_close(cache.conv_state, expected.conv_state, **TIGHT)
        draft = torch.randn(2, 5, HIDDEN)  # and the window still works afterwards
        layer(draft, cache=cache)
        layer.rollback(cache, 4)
        layer(draft[:, :1], cache=expected)
    torch.testing.assert_close(cache.recurrent_state, expected.recurrent_state, **TIGHT)


def test_rollback_of_the_first_call_gives_a_fresh_state():
    layer, cache = make_layer(), KDACache(rollback_window=8)
    with torch.no_grad():
        layer(torch.randn(1, 4, HIDDEN), cache=cache)
        layer.rollback(cache, 4)
        x = torch.randn(1, 6, HIDDEN)
        torch.testing.assert_close(layer(x, cache=cache), layer(x), **TIGHT)


def test_rollback_refuses_what_it_does_not_remember():
    layer, cache = make_layer(), KDACache(rollback_window=4)
    with torch.no_grad():
        layer(torch.randn(1, 9, HIDDEN), cache=cache)
        for _ in range(5):
            layer(torch.randn(1, 1, HIDDEN), cache=cache)
    with pytest.raises(ValueError, match=r"tokens=5 must be in \[0, 4\].*rollback_window=4"):
        layer.rollback(cache, 5)
    with pytest.raises(ValueError, match="tokens=-1"):
        layer.rollback(cache, -1)
    cache.reorder(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"in \[0, 0\]"):
        layer.rollback(cache, 1)
    with pytest.raises(ValueError, match="rollback_window is -1; it must be at least 0"):
        KDACache(rollback_window=-1)
    with pytest.raises(TypeError, match=r"rollback_window is 2\.5; it must be an int"):
        KDACache(rollback_window=2.5)


def test_reorder_selects_sequences():
    layer, cache = make_layer(), KDACache()
    cache.reorder(torch.tensor([0]))  # nothing there yet
    x, y = torch.randn(3, 4, HIDDEN), torch.randn(2, 2, HIDDEN)
    with torch.no_grad():
        layer(x, cache=cache)
        cache.reorder(torch.tensor([2, 0]))
        expected = layer(torch.cat([x[[2, 0]], y], 1))[:, 4:]
        torch.testing.assert_close(layer(y, cache=cache), expected, **TIGHT)


def test_gated_rms_norm():
    x, gate, weight = torch.randn(4, 6).double(), torch.randn(4, 6).double(), torch.rand(6).double()
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight * gate.sigmoid()
    torch.testing.assert_close(gated_rms_norm(x.float(), gate.float(), weight.float(), 1e-5).double(), expected, rtol=1e-5, atol=1e-6)


def test_published_initialisation():
    torch.manual_seed(0)
    softplus, bounded = KimiDeltaAttention(8, 64, 16), KimiDeltaAttention(8, 64, 16, lower_bound=-5.0)
    assert softplus.A_log.exp().min() >= 1 and softplus.A_log.exp().max() <= 16 and softplus.A_log.exp().std() > 3
    assert torch.all(bounded.A_log == 0)
    dt = F.softplus(bounded.dt_bias)
    assert dt.min() >= 0.99e-3 and dt.max() <= 1.01e-1
    assert abs(dt.log().mean() - math.log(1e-2)) < 0.1  # log-uniform
    assert softplus.A_log.dtype == softplus.dt_bias.dtype == torch.float32


def test_sixteen_bit_weights_and_autocast():
    layer = make_layer("bounded", torch.float32)
    x = torch.randn(1, 50, HIDDEN, dtype=torch.float32)
    exact = rewrite(layer, x, dict(layer.named_parameters())).detach()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
    assert mixed.dtype == torch.bfloat16
    low = make_layer("bounded", torch.bfloat16)
    assert torch.isfinite(low(x.bfloat16())).all()
    error = (mixed.float() - exact).norm() / exact.norm()
    assert error < 0.03, f"relative error {error:.4f} is beyond a few bf16 roundings (2^-9 each)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_v_heads": 3}, "num_v_heads=3 must be a multiple of num_heads=2"),
        ({"lower_bound": -6.0}, r"lower_bound=-6.0 must be None or in \[-5, 0\)"),
        ({"lower_bound": 0.0}, "lower_bound=0.0"),
        ({"conv_size": 0}, "conv_size must be at least 1, got 0"),
        ({"num_v_heads": 2.0}, "num_v_heads is 2.0; it must be an int"),
        ({"conv_size": True}, "conv_size is True; it must be an int"),
        ({"lower_bound": "a"}, "lower_bound is a str; it must be a number or None"),
        ({"norm_eps": None}, "norm_eps is a NoneType; it must be a number"),
        ({"norm_eps": -1e-5}, "norm_eps=-1e-05 must be finite and at least 0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan"),
    ],
)
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        KimiDeltaAttention(16, 2, 8, **options)


def test_impossible_calls_are_refused():
    layer, x, bounds = make_layer(), torch.randn(2, 5, HIDDEN), torch.tensor([0, 5])
    with pytest.raises(ValueError, match="exclude each other"):
        layer(x, attention_mask=torch.ones(2, 5), cu_seqlens=bounds)
    with pytest.raises(ValueError, match=r"attention_mask must be \[B=2, at least T=5\], got \[2, 4\]"):
        layer(x, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="B=1 with cu_seqlens, got B=2"):
        layer(x, cu_seqlens=bounds)
    with pytest.raises(ValueError, match=r"attention_mask is the Packing of \[5, 2\] tokens; it must be that of \[2, 5\]"):
        layer(x, attention_mask=Packing.of(torch.ones(5, 2)))
    with pytest.raises(ValueError, match="attention_mask is on meta; it must be on cpu"):
        layer(x, attention_mask=torch.ones(2, 5, device="meta"))
    with pytest.raises(ValueError, match="cu_seqlens's device is meta; it must be cpu"):
        layer(x[:1], cu_seqlens=bounds.to("meta"))
    with pytest.raises(TypeError, match="hidden_states is a list"):
        layer([1.0])
    with pytest.raises(TypeError, match="tokens is None; it must be an int"):
        layer.rollback(KDACache(), None)


def test_a_mask_over_no_tokens():
    layer = make_layer()
    assert layer(torch.randn(2, 0, HIDDEN), attention_mask=torch.ones(2, 3)).shape == (2, 0, HIDDEN)


@pytest.mark.parametrize("T", [1, 7])  # the first a fused step
def test_half_a_cache_is_refused(T):
    layer, x = make_layer(), torch.randn(2, 7, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        full = KDACache()
        layer(x, cache=full)
        for cache, words in (
            (KDACache(None, full.recurrent_state), "cache.conv_state is a NoneType"),
            (KDACache(full.conv_state, None), "cache.recurrent_state is a NoneType"),
            (KDACache(full.conv_state[:1], full.recurrent_state), r"cache.conv_state is \[1, .* it must be \[2, "),
            (KDACache(full.conv_state[..., :1], full.recurrent_state), r"cache.conv_state is \[2, .*, 1\]"),
            (KDACache(full.conv_state.long(), full.recurrent_state), "torch.int64; it must be .* floating-point"),
            ([full], "cache is a list; it must be a KDACache or None"),
        ):
            with pytest.raises((ValueError, TypeError), match=words):
                layer(x[:, :T], cache=cache)


def test_bounds_and_caches_that_do_not_fit_are_refused():
    layer, x = make_layer(), torch.randn(2, 7, HIDDEN, dtype=torch.float64)
    for bounds, words in (([0, 9], "at most T = 7"), ([0, 5, 3], "cu_seqlens.2. is 3"), ([2, 5], "first entry is 2"), (7, "shape is ..;")):
        with pytest.raises(ValueError, match=words):
            layer(x[:1], cu_seqlens=torch.tensor(bounds))
    with pytest.raises(TypeError, match="cu_seqlens is a list"):
        layer(x[:1], cu_seqlens=[0, 7])
    with pytest.raises(TypeError, match="attention_mask is a list"):
        layer(x, attention_mask=[1] * 7)
    for wrong in (x[0], x[..., 1:]):
        with pytest.raises(ValueError, match=f"hidden_states must be .B, T, {HIDDEN}., got"):
            layer(wrong)
    with torch.no_grad():
        cache = KDACache()
        layer(x, cache=cache)
        before = cache.recurrent_state.clone()
        for T in (1, 7):  # the first a fused step, whose slots would be those of other sequences
            with pytest.raises(ValueError, match="cache holds the states of 2 sequences; it must hold 1"):
                layer(x[:1, :T], cache=cache)
        assert torch.equal(cache.recurrent_state, before)


def test_kernel_inputs_are_what_the_layer_runs_on():
    from openkda import chunk_kda

    layer, x = make_layer("grouped"), torch.randn(1, 20, HIDDEN)
    o, _ = chunk_kda(**layer.kernel_inputs(x))
    y = layer.g_b_proj(layer.g_a_proj(x)).unflatten(-1, (4, 12))
    torch.testing.assert_close(layer.o_proj(layer.o_norm(o, y).flatten(-2)), layer(x))
    assert "gate=softplus" in repr(layer) and "HV=4" in repr(layer)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["softplus", "bounded"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_device_kernels_serve_the_layer(kind, head_dim):
    """bf16 on a GPU, whatever backend is chosen: output, gradients, cache, mask and packing against fp64 on the CPU."""
    torch.manual_seed(0)
    exact = KimiDeltaAttention(64, 2, head_dim, **KINDS[kind])
    layer = KimiDeltaAttention(64, 2, head_dim, **KINDS[kind])
    layer.load_state_dict(exact.state_dict())
    layer = layer.cuda().bfloat16()
    layer.A_log.data, layer.dt_bias.data = exact.A_log.data.float().cuda(), exact.dt_bias.data.float().cuda()
    x = torch.randn(2, 150, 64)
    low = x.cuda().bfloat16().requires_grad_()
    high = x.requires_grad_()
    y, expected = layer(low), exact(high)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(y, [low, *layer.parameters()], upstream.cuda().bfloat16())
    wanted = torch.autograd.grad(expected, [high, *exact.parameters()], upstream)
    names = ["y", "x", *(name for name, _ in exact.named_parameters())]
    for name, a, b in zip(names, [y, *grads], [expected, *wanted], strict=True):
        error = ((a.double().cpu() - b).norm() / b.norm()).item()
        assert error < 0.05, f"{name}: relative error {error:.4f} is beyond bf16 weights and activations"
    with torch.no_grad():
        close = lambda a, b: ((a - b).float().norm() / b.float().norm()).item() < 0.02
        cache = KDACache()
        parts = torch.cat([layer(piece, cache=cache) for piece in low.split([100, 1, 1, 48], 1)], 1)
        assert close(parts, y)
        mask = torch.ones(2, 150, device="cuda")
        mask[0, :70] = 0
        assert close(layer(low, attention_mask=mask)[0, 70:], layer(low[:1, 70:])[0])
        bounds = torch.tensor([0, 64, 65, 150], device="cuda")
        packed = layer(low[:1], cu_seqlens=bounds)
        assert close(packed[:, 65:], layer(low[:1, 65:]))
