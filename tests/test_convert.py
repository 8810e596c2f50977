"""Published names of a layer's weights, there and back, and one layer out of a sharded checkpoint."""

import json

import pytest
import torch
from safetensors.torch import save_file

from openkda.convert import SCHEMES, detect_scheme, from_openkda, layer_from_state_dict, load_kda_layer, to_openkda
from openkda.layer import KimiDeltaAttention

COMMON = {f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "b_proj", "o_proj", "o_norm")}
CONVS = {f"{name}_conv1d.weight" for name in "qkv"}
NAMES = {
    "openkda": COMMON | CONVS | {f"{n}.weight" for n in ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")} | {"A_log", "dt_bias"},
    "moonshot": COMMON | CONVS | {f"{n}.weight" for n in ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")} | {"A_log", "dt_bias"},
    "fla": COMMON | CONVS | {f"{n}.weight" for n in ("f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1")} | {"A_log", "dt_bias"},
    "transformers": COMMON
    | {f"{n}.weight" for n in ("conv1d", "forget_gate.f_a_proj", "forget_gate.f_b_proj", "g_a_proj", "g_b_proj")}
    | {"forget_gate.A_log", "forget_gate.dt_bias"},
}


def small_layer(**options) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(20, 2, 8, **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_round_trip_is_bit_equal(scheme):
    layer = small_layer(num_v_heads=4, head_v_dim=6, conv_bias=True)
    theirs = from_openkda(layer.state_dict(), scheme)
    biases = {name for name in theirs if name.endswith("conv1d.bias")}
    assert set(theirs) - biases == NAMES[scheme]
    ours = to_openkda(theirs, None if scheme != "openkda" else "openkda")
    assert set(ours) == set(layer.state_dict())
    assert all(torch.equal(ours[name], x) for name, x in layer.state_dict().items())
    again = layer_from_state_dict(theirs, norm_eps=layer.o_norm.eps)
    x = torch.randn(1, 9, 20)
    assert torch.equal(again(x), layer(x))


def test_shapes_of_the_decay_parameters():
    state = small_layer().state_dict()
    assert from_openkda(state, "moonshot")["A_log"].shape == (1, 1, 2, 1)
    assert from_openkda(state, "transformers")["forget_gate.A_log"].shape == (1, 1, 2, 1)
    assert from_openkda(state, "fla")["A_log"].shape == (2,)


def test_fla_output_gate_bias_survives_and_has_no_place_elsewhere():
    layer = small_layer(output_gate_bias=True)
    theirs = from_openkda(layer.state_dict(), "fla")
    assert "g_proj.1.bias" in theirs
    assert layer_from_state_dict(theirs).g_b_proj.bias is not None
    for scheme in ("moonshot", "transformers"):
        with pytest.raises(ValueError, match=f"g_b_proj.bias has no place in {scheme} names"):
            from_openkda(layer.state_dict(), scheme)


def test_wrong_keys_are_listed():
    state = from_openkda(small_layer().state_dict(), "fla")
    del state["f_proj.1.weight"], state["A_log"]
    state["D"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"in fla names lacks A_log, f_proj.1.weight and has unknown D"):
        to_openkda(state)
    with pytest.raises(ValueError, match=r"no KDA layer's parameters in any known scheme.*: wq"):
        detect_scheme(["wq"])
    with pytest.raises(ValueError, match="scheme is 'mamba'; it must be one of openkda, fla"):
        to_openkda(state, "mamba")


def test_wrong_shapes_are_listed():
    state = small_layer().state_dict()
    with pytest.raises(ValueError, match=r"do not fit: k_proj.weight \(12, 20\) instead of \(16, 20\)"):
        layer_from_state_dict(state | {"k_proj.weight": torch.zeros(12, 20)})
    with pytest.raises(ValueError, match="dt_bias has 15 entries, no multiple of A_log's 2 heads"):
        layer_from_state_dict(state | {"dt_bias": torch.zeros(15)})
    stacked = from_openkda(state, "transformers")
    with pytest.raises(ValueError, match=r"conv1d.weight has 40 channels; .*\[16, 16, 16\], 48 in all"):
        to_openkda(stacked | {"conv1d.weight": torch.zeros(40, 1, 4)})


def test_weights_keep_their_dtype_and_decay_becomes_single_precision():
    layer = layer_from_state_dict({name: x.bfloat16() for name, x in small_layer().state_dict().items()})
    assert layer.q_proj.weight.dtype == torch.bfloat16
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32


def test_transformers_own_layer_computes_the_same():
    """An independent implementation with its own weights: ours, loaded from them, gives its output."""
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    from transformers.models.kimi_linear import KimiLinearConfig

    torch.manual_seed(0)
    config = KimiLinearConfig(
        hidden_size=32, num_hidden_layers=2, linear_num_heads=2, linear_head_dim=16, layer_types=["linear_attention"] * 2
    )
    theirs = kimi.KimiLinearDeltaAttention(config, 0)
    with torch.no_grad():
        theirs.forget_gate.A_log.copy_(torch.rand(1, 1, 2, 1))
        theirs.forget_gate.dt_bias.copy_(torch.randn(32))
        ours = layer_from_state_dict(theirs.state_dict(), norm_eps=config.rms_norm_eps)
        x = torch.randn(2, 70, 32)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def write_checkpoint(folder, scheme: str, mixer: str, config: dict) -> list[KimiDeltaAttention]:
    """Three blocks, the middle one without KDA, over two shards; the second shard of block 2 also has a tensor of block 0."""
    layers = [small_layer(lower_bound=-3.0), None, small_layer(lower_bound=-3.0)]
    with torch.no_grad():
        layers[2].A_log.add_(0.5)
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    first, second = shards.values()
    for n in (0, 2):
        for i, (name, x) in enumerate(sorted(from_openkda(layers[n].state_dict(), scheme).items())):
            shard = second if n == 2 or i % 3 == 0 else first
            shard[f"model.layers.{n}.{mixer}.{name}"] = x.contiguous()
    first["model.layers.1.self_attn.kv_a_proj.weight"] = torch.zeros(3)
    first["model.embed_tokens.weight"] = torch.zeros(5)
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return layers


@pytest.mark.parametrize(
    ("scheme", "mixer", "config"),
    [
        ("moonshot", "self_attn", {"rms_norm_eps": 1e-4, "linear_attn_config": {"gate_lower_bound": -3.0}}),
        ("transformers", "self_attn", {"rms_norm_eps": 1e-4, "lower_bound": -3.0}),
        ("fla", "attn", {"norm_eps": 1e-4, "lower_bound": -3.0}),
    ],
)
def test_one_layer_is_lifted_without_the_rest(tmp_path, scheme, mixer, config):
    layers = write_checkpoint(tmp_path, scheme, mixer, config)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()  # nothing of block 2 is in it, so nobody may open it
    lifted = load_kda_layer(tmp_path, 2)
    assert lifted.lower_bound == -3.0 and lifted.o_norm.eps == 1e-4
    lifted.o_norm.eps = layers[2].o_norm.eps
    x = torch.randn(1, 12, 20)
    assert torch.equal(lifted(x), layers[2](x))
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors is missing, which holds tensors of layer 0"):
        load_kda_layer(tmp_path, 0)


def test_what_cannot_be_lifted_is_refused(tmp_path):
    write_checkpoint(tmp_path, "moonshot", "self_attn", {})
    with pytest.raises(ValueError, match=r"layer=1 is no KDA layer of .*; those are 0, 2"):
        load_kda_layer(tmp_path, 1)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"holds neither model.safetensors.index.json nor model.safetensors"):
        load_kda_layer(empty, 0)


PREFIX = "model.layers.1.self_attn."


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json cannot be read as JSON"),
        ("config.json", "[1]", "config.json holds a JSON list; it must be an object"),
        ("config.json", '{"lower_bound": "x"}', "lower_bound is a str"),
        ("config.json", '{"rms_norm_eps": null}', "norm_eps is a NoneType"),
        ("model.safetensors", "", "model.safetensors cannot be read as safetensors"),
        ("model.safetensors", "\x10\0\0\0\0\0\0\0{", "model.safetensors cannot be read as safetensors"),
        ("model.safetensors.index.json", "{}", "index.json has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"model.layers.1.self_attn.A_log": 3}}', "index.json has no weight_map"),
        ("model.safetensors.index.json", json.dumps({"weight_map": dict.fromkeys((PREFIX + "A_log", PREFIX + "B"), "model.safetensors")}),
         "model.safetensors cannot be read as safetensors.*B"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_named(tmp_path, file, content, message):
    save_file({PREFIX + name: x for name, x in small_layer().state_dict().items()}, tmp_path / "model.safetensors")
    (tmp_path / file).write_bytes(content.encode())
    with pytest.raises((ValueError, TypeError), match=message):
        load_kda_layer(tmp_path, 1)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("q_proj.weight", torch.tensor(1.0)),
        ("q_conv1d.weight", torch.zeros(16, 4)),
        ("A_log", torch.zeros(0)),
        ("dt_bias", torch.zeros(0)),
        ("o_proj.weight", torch.zeros(20, 16, dtype=torch.int32)),
    ],
)
def test_weights_that_are_none(name, weight):
    with pytest.raises(ValueError, match=f"{name} is .* it must have . dimensions, none of them 0, and floating-point values"):
        layer_from_state_dict(small_layer().state_dict() | {name: weight})


def test_a_single_file_checkpoint_needs_no_index(tmp_path):
    layer = small_layer()
    save_file(
        {f"model.layers.3.self_attn.{name}": x.contiguous() for name, x in layer.state_dict().items()}, tmp_path / "model.safetensors"
    )
    x = torch.randn(1, 6, 20)
    assert torch.equal(load_kda_layer(tmp_path, 3)(x), layer(x))
