"""The Hugging Face model: cache against one-shot runs, generation, masks, packing, saving and loading, training options."""

from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from openkda.model import CACHE_NAME, KDAConfig, KDAForCausalLM, KDAModel
from openkda.model_cache import KDAModelCache, extended

LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = {"kda": [LINEAR, LINEAR], "hybrid": [LINEAR, FULL], "softmax": [FULL, FULL], "one": [LINEAR]}
MIXES = ("kda", "hybrid", "softmax")
POSITIONS = [("kda", None), ("hybrid", None), ("hybrid", 100.0), ("softmax", 100.0)]


def small_model(mix: str = "hybrid", **options) -> KDAForCausalLM:
    """Two blocks in fp64, so that equivalences hold tightly; weights large enough that logits differ clearly."""
    torch.manual_seed(0)
    config = KDAConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=len(LAYERS[mix]), layer_types=LAYERS[mix],
        num_heads=2, head_dim=8, num_attention_heads=4, num_key_value_heads=2, attention_head_dim=6, initializer_range=0.3,
        pad_token_id=0, **options,
    )  # fmt: skip
    return KDAForCausalLM(config).double().eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 31, shape, generator=torch.Generator().manual_seed(seed))


def cache_of(output):
    return getattr(output, CACHE_NAME)


@pytest.mark.parametrize(("mix", "rope_theta"), POSITIONS)
@pytest.mark.parametrize("pieces", [[1] * 11, [4, 1, 6]])
def test_cache_equals_the_full_forward(mix, rope_theta, pieces):
    model, ids = small_model(mix, rope_theta=rope_theta), tokens(2, 11)
    with torch.no_grad():
        whole = model(ids, use_cache=False)
        assert cache_of(whole) is None
        cache, parts = None, []
        for piece in ids.split(pieces, 1):
            output = model(piece, **{CACHE_NAME: cache}, use_cache=True)
            cache = cache_of(output)
            parts.append(output.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole.logits, rtol=1e-9, atol=1e-9)
        assert cache.get_seq_length() == 11
        torch.testing.assert_close(model(ids, logits_to_keep=3).logits, whole.logits[:, -3:])


@pytest.mark.parametrize("mix", ["kda", "hybrid"])
def test_single_precision_decodes_in_place(mix):
    """fp32 decodes through the fused step, which writes into the cache's own tensors."""
    model, ids = small_model(mix).float(), tokens(2, 11)
    cache = KDAModelCache(model.config)
    with torch.no_grad():
        parts = [model(ids[:, :6], **{CACHE_NAME: cache}).logits]
        states = [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]
        keys = [layer.keys.data_ptr() for layer in cache.layers if hasattr(layer, "keys")]
        parts += [model(piece, **{CACHE_NAME: cache}).logits for piece in ids[:, 6:].split(1, 1)]
        assert keys == [layer.keys.data_ptr() for layer in cache.layers if hasattr(layer, "keys")]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-4, atol=1e-4)
    after = [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]
    assert all(a is b for a, b in zip(states, after, strict=True))


def test_keys_and_values_grow_in_place():
    """Appended to their own storage while it has room, in any state that a cache's own operations leave them."""
    torch.manual_seed(0)
    parts = torch.randn(2, 3, 400, 4).split([100, 20, 1, 1, 278], 2)
    held, places = torch.tensor([]), []
    for part in parts:
        held = extended(held, part)
        places.append(held.data_ptr())
    assert torch.equal(held, torch.cat(parts, 2)) and places[0] == places[1] == places[3] != places[4]
    assert held.untyped_storage().nbytes() == 2 * 3 * 500 * 4 * 4
    new = torch.randn(2, 3, 2, 4)
    for view in (held[:, :, :90], held[:1], held[[1, 0]], held[:, :, 7:], held[:, 1:], held.mT.contiguous().mT, held.expand(2, 3, 400, 4)):
        before, fresh = view.clone(), new[: view.shape[0], : view.shape[1]]
        expected = torch.cat([before, fresh], 2)
        assert torch.equal(extended(view, fresh), expected) and torch.equal(view, before)


def test_transformers_own_cache_serves():
    model, ids = small_model("hybrid"), tokens(2, 9)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(piece, **{CACHE_NAME: cache}).logits for piece in ids.split([4, 5], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("mix", "rope_theta"), POSITIONS)
def test_padding_changes_nothing(mix, rope_theta):
    model, ids, follow = small_model(mix, rope_theta=rope_theta), tokens(3, 12), tokens(3, 2, seed=2)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :5], mask[1, 8:] = 0, 0
    with torch.no_grad():
        output = model(ids, attention_mask=mask, use_cache=True)
        wide = torch.cat([mask, torch.ones(3, 2, dtype=torch.long)], 1)
        after = model(follow, attention_mask=wide, **{CACHE_NAME: cache_of(output)}).logits
        for n in range(3):
            row = torch.cat([ids[n : n + 1, mask[n].bool()], follow[n : n + 1]], 1)
            alone = model(row, use_cache=False).logits
            torch.testing.assert_close(output.logits[n : n + 1, mask[n].bool()], alone[:, :-2], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(after[n : n + 1], alone[:, -2:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mix", MIXES)
def test_packed_documents_equal_each_alone(mix):
    model, ids, lengths = small_model(mix, rope_theta=100.0), tokens(1, 17), [4, 1, 12]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    with torch.no_grad():
        packed = model(ids, cu_seqlens=bounds).logits.split(lengths, 1)
        for piece, logits in zip(ids.split(lengths, 1), packed):
            torch.testing.assert_close(logits, model(piece).logits, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="excludes attention_mask and a cache"):
        model(ids, cu_seqlens=bounds, attention_mask=torch.ones(1, 17))
    with pytest.raises(ValueError, match="B=1 with cu_seqlens, got B=2"):
        model(tokens(2, 17), cu_seqlens=bounds)
    with pytest.raises(ValueError, match="cu_seqlens's last entry is 17; it must be at most T = 16"):
        model(ids[:, :16], cu_seqlens=bounds)


@pytest.mark.parametrize("shape", [(1, 3), (3, 5), (2, 1, 5, 5)])
def test_masks_that_do_not_fit(shape):
    """Of ones, too, which would hide nothing."""
    with pytest.raises(ValueError, match=r"attention_mask must be \[B=2, past \+ T=5\], got"):
        small_model()(tokens(2, 5), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("mix", MIXES)
def test_generate_greedy_equals_argmax_of_full_forwards(mix):
    model, ids = small_model(mix), tokens(2, 7)
    expected = ids
    with torch.no_grad():
        for _ in range(5):
            expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None), expected)


@pytest.mark.parametrize("mix", MIXES)
def test_generate_by_beam_and_sampling_is_the_same_with_and_without_cache(mix):
    model, ids = small_model(mix), tokens(2, 5)
    ways = ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 5})
    for way in ways:
        found = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            found.append(model.generate(ids, max_new_tokens=4, use_cache=use_cache, eos_token_id=None, **way))
        assert torch.equal(*found)


@pytest.mark.parametrize("mix", MIXES)
def test_generate_with_left_padding(mix):
    model, ids = small_model(mix), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None)
    alone = model.generate(ids[:1, 3:], max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(found[:1, 8:], alone[:, 5:])


def test_generate_goes_on_from_a_cache():
    model, ids = small_model("hybrid"), tokens(1, 9)
    cache = KDAModelCache(model.config)
    with torch.no_grad():
        model(ids[:, :6], **{CACHE_NAME: cache})
    mask = torch.ones_like(ids)
    greedy = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    assert torch.equal(model.generate(ids, **{CACHE_NAME: cache}, **greedy), model.generate(ids, **greedy))
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"num_v_heads": 4, "output_gate_bias": True, "lower_bound": -5.0}])
def test_save_and_load_are_bit_equal(tmp_path, options):
    """transformers from 5 on once re-applied its initialisation to a loaded A_log (fault 36)."""
    model = small_model("hybrid", **options).float()
    model.save_pretrained(tmp_path)
    again, info = KDAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert again.config.layer_types == model.config.layer_types
    state = again.state_dict()
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == bool(options.get("tie_word_embeddings"))
    ids = tokens(2, 9)
    assert torch.equal(again.eval()(ids).logits, model(ids).logits)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), KDAForCausalLM)


def test_what_a_checkpoint_lacks_is_drawn_and_nothing_else(tmp_path):
    model = small_model("kda").float()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    del saved["model.layers.0.self_attn.dt_bias"]
    save_file(saved, file, metadata={"format": "pt"})
    again, info = KDAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"model.layers.0.self_attn.dt_bias"}
    state = again.state_dict()
    assert all(torch.equal(state[name], x) for name, x in saved.items())
    assert state["model.layers.0.self_attn.dt_bias"].isfinite().all()


def test_plain_tuples_and_head_counts():
    model, ids = small_model(), tokens(2, 5)
    loss, logits, *_ = model(ids, labels=ids, return_dict=False)
    whole = model(ids, labels=ids)
    assert torch.equal(loss, whole.loss) and torch.equal(logits, whole.logits)
    assert isinstance(model.model(ids, return_dict=False), tuple)
    with pytest.raises(ValueError, match="num_attention_heads=3 must be a multiple of num_key_value_heads=2"):
        KDAConfig(num_attention_heads=3, num_key_value_heads=2)


def test_decay_parameters_stay_single_precision_when_loaded_in_sixteen_bit(tmp_path):
    model = small_model("kda").float()
    model.save_pretrained(tmp_path)
    low = KDAForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    mixer = low.model.layers[0].self_attn
    assert mixer.q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(mixer.A_log, model.model.layers[0].self_attn.A_log)
    assert torch.equal(mixer.dt_bias, model.model.layers[0].self_attn.dt_bias)
    assert torch.isfinite(low(tokens(1, 9)).logits).all()


def test_fresh_weights_follow_the_published_initialisation():
    torch.manual_seed(0)
    model = KDAForCausalLM(KDAConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, layer_types=[LINEAR], num_heads=8, head_dim=16))
    mixer = model.model.layers[0].self_attn
    assert abs(mixer.q_proj.weight.std() - 0.02) < 0.002
    assert mixer.A_log.exp().min() >= 1 and mixer.A_log.exp().max() <= 16
    dt = torch.nn.functional.softplus(mixer.dt_bias)
    assert dt.min() >= 0.99e-3 and dt.max() <= 1.01e-1


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    model, ids = small_model("hybrid").train(), tokens(2, 15)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert model.model.layers[0].gradient_checkpointing
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_compiled_model_is_one_graph():
    """Forward and backward under a mask, without a graph break; the kernels are operators to the compiler."""
    model, ids = small_model("one").train(), tokens(2, 5)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        loss = run(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_compiled_decoding_is_one_graph():
    model, ids = small_model("hybrid").float(), tokens(2, 8)
    compiled, cache = torch.compile(model, backend="eager", fullgraph=True), KDAModelCache(model.config)
    with torch.no_grad():
        parts = [compiled(piece, **{CACHE_NAME: cache}).logits for piece in ids.split([3, 2, 1, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_loss_is_the_shifted_cross_entropy():
    model, ids = small_model("kda"), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    logits = model(ids).logits
    terms = [-logits[b, t].log_softmax(-1)[ids[b, t + 1]] for b in range(2) for t in range(8) if labels[b, t + 1] != -100]
    torch.testing.assert_close(model(ids, labels=labels).loss.double(), torch.stack(terms).mean(), rtol=1e-5, atol=1e-6)


def test_hidden_states_and_embeddings_as_input():
    model, ids = small_model("hybrid"), tokens(1, 6)
    output = model(ids, output_hidden_states=True)
    assert [x.shape for x in output.hidden_states] == [(1, 6, 16)] * 3
    torch.testing.assert_close(model(inputs_embeds=model.model.embed_tokens(ids)).logits, output.logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        KDAModel(model.config)()


def test_configuration():
    assert KDAConfig(num_hidden_layers=5).layer_types == [LINEAR] * 3 + [FULL, LINEAR]
    with pytest.raises(ValueError, match=r"layer_types must name .* num_hidden_layers=2 layers, got"):
        KDAConfig(num_hidden_layers=2, layer_types=[LINEAR])
    with pytest.raises(ValueError, match=r"got .*mamba"):
        KDAConfig(num_hidden_layers=1, layer_types=["mamba"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(vocab_size=0), "vocab_size=0 must be an int of at least 1"),
        (dict(hidden_size="8"), "hidden_size='8' must be an int of at least 1"),
        (dict(num_attention_heads=0), "num_attention_heads=0"),
        (dict(num_key_value_heads=0), "num_key_value_heads=0"),
        (dict(rope_theta=0.0), "rope_theta=0.0 must be positive"),
        (dict(rope_theta=1e4, attention_head_dim=3), "attention_head_dim=3 even"),
        (dict(rope_theta="x"), "rope_theta is a str; it must be a number or None"),
    ],
)
def test_impossible_configurations(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        KDAConfig(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("bounded", [True, False])
def test_device_kernels_serve_the_model(bounded):
    """A hybrid with heads of 128 under autocast: loss and gradients at most twice as far from fp64 as with the torch backend; decoding."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_heads=2, head_dim=128, num_attention_heads=2,
        attention_head_dim=64, lower_bound=-5.0 if bounded else None, initializer_range=0.09,
    )  # fmt: skip
    exact = KDAForCausalLM(KDAConfig(**sizes)).double().cuda()
    batches = torch.randint(1, 64, (4, 2, 150), generator=torch.Generator().manual_seed(1)).cuda()  # 0 pads

    def loss_and_gradients(model):
        """By name, the four batches' values; A_log, one number a head, of all layers: a ratio of errors needs more than two numbers."""
        values = defaultdict(list)
        for ids in batches:
            loss = model(ids, labels=ids).loss
            values["loss"].append(loss.detach().double().view(1))
            for (name, _), x in zip(model.named_parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                values["A_log" if name.endswith("A_log") else name].append(x.double().flatten())
        return {name: torch.cat(found) for name, found in values.items()}

    expected, found = loss_and_gradients(exact), []
    for backend in (None, "torch"):
        model = KDAForCausalLM(KDAConfig(**sizes, kda_backend=backend)).cuda()
        model.load_state_dict(exact.state_dict())
        with torch.autocast("cuda", torch.bfloat16):
            found.append(loss_and_gradients(model))
    distance = lambda x, y: ((x - y).norm() / y.norm()).item()
    for name, wanted in expected.items():
        kernels, twin = (distance(values[name], wanted) for values in found)
        print(f"{name}: kernels {kernels:.5f} torch {twin:.5f}")
        assert kernels <= 2 * twin + 2**-9, name

    ids = batches[0]
    model = KDAForCausalLM(KDAConfig(**sizes)).cuda().eval()
    model.load_state_dict(exact.state_dict())
    with torch.no_grad():
        cache = KDAModelCache(model.config)
        parts = [model(piece, **{CACHE_NAME: cache}).logits for piece in ids.split([100, 1, 1, 48], 1)]
        torch.testing.assert_close(torch.cat(parts, 1).double(), exact.eval()(ids).logits, rtol=0.02, atol=0.02)
        text = model.generate(ids[:, :20], max_new_tokens=8, do_sample=False, pad_token_id=0)
        best = model(text[:, :-1], use_cache=False).logits[:, 19:].topk(2)
    clear = best.values[..., 0] - best.values[..., 1] > 0.02  # nearly equal logits may fall either way
    assert clear.any() and torch.equal(best.indices[..., 0][clear], text[:, 20:][clear])
