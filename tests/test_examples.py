"""The examples at toy size: they run, resume, learn, and what they write is what they say."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
pytest.importorskip("rich")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module", autouse=True)
def example_modules():
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


TOY_LM = [
    "--steps",
    "24",
    "--lr",
    "0.02",
    "--hidden",
    "16",
    "--layers",
    "2",
    "--heads",
    "2",
    "--head-dim",
    "8",
    "--batch",
    "2",
    "--length",
    "16",
    "--eval-every",
    "8",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    import lm

    folder = tmp_path_factory.mktemp("lm")
    summary = lm.main(["--out", str(folder), *TOY_LM])
    return folder, summary


def test_language_model_learns(trained):
    folder, summary = trained
    assert summary["steps"] == 24
    history = json.loads((folder / "history.json").read_text())
    assert history["step"] == [10, 20, 24] and history["eval_step"] == [8, 16, 24]
    assert history["eval_value"][-1] < 4.5 < np.log(256)  # nats per byte; guessing gives log(256)
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((folder / "train.json").read_text()) == summary


def test_resumed_run_equals_an_uninterrupted_one(trained, tmp_path, monkeypatch):
    import lm
    import training

    save = torch.save

    def save_then_stop(state, path):
        save(state, path)
        if state["step"] == 16:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training.torch, "save", save_then_stop)
        with pytest.raises(KeyboardInterrupt):  # in the middle of saving step 16: step 8 is what there is to go on from
            lm.main(["--out", str(tmp_path), *TOY_LM])
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 8
    lm.main(["--out", str(tmp_path), *TOY_LM, "--resume"])
    whole, resumed = (torch.load(folder / "state.pt", weights_only=True) for folder in (trained[0], tmp_path))
    assert all(torch.equal(whole["model"][name], x) for name, x in resumed["model"].items())
    assert whole["history"]["loss"] == resumed["history"]["loss"]


def test_resume_without_a_state_is_refused(tmp_path):
    import lm

    with pytest.raises(FileNotFoundError, match=r"--resume: there is no .*state.pt"):
        lm.main(["--out", str(tmp_path), *TOY_LM, "--resume"])


@pytest.mark.parametrize("mixer", ["hybrid", "softmax"])
def test_other_mixers_and_sampling(mixer, tmp_path, capsys):
    import lm

    summary = lm.main(["--out", str(tmp_path), *TOY_LM, "--steps", "3", "--mixer", mixer, "--layers", "4", "--sample", "5"])
    assert summary["steps"] == 3
    assert "held out" in capsys.readouterr().out


def test_recorded_layer_is_what_the_layer_computes_on(trained, tmp_path):
    import record_layer
    from safetensors import safe_open

    from openkda import chunk_kda
    from openkda.model import KDAForCausalLM

    folder, summary = trained
    path = tmp_path / "layer.safetensors"
    record_layer.main([str(folder), "--layer", "1", "--length", "40", "--out", str(path), "--device", "cpu"])
    with safe_open(path, framework="pt") as f:
        metadata, tensors = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (no iterator)
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        "q": (1, 40, 2, 8), "k": (1, 40, 2, 8), "v": (1, 40, 2, 8), "g": (1, 40, 2, 8), "beta": (1, 40, 2), "A_log": (2,), "dt_bias": (16,),
    }  # fmt: skip
    assert metadata["use_gate_in_kernel"] == "true" and metadata["lower_bound"] == "none"
    assert metadata["command"] == summary["command"] and metadata["steps"] == "24"

    model = KDAForCausalLM.from_pretrained(folder)
    text = record_layer.as_tensor(record_layer.corpus(held_out=True), "cpu")[None, :40].long()
    with torch.no_grad():
        states = model(text, output_hidden_states=True).hidden_states
        block = model.model.layers[1]
        options = block.self_attn.kernel_options() | {"A_log": tensors["A_log"], "dt_bias": tensors["dt_bias"]}
        recorded, _ = chunk_kda(*(tensors[n].float() for n in ("q", "k", "v", "g", "beta")), **options)
        exact, _ = chunk_kda(**block.self_attn.kernel_inputs(block.input_layernorm(states[1])))
    assert (recorded - exact).norm() < 0.02 * exact.norm()  # bf16 storage
    with pytest.raises(IndexError):
        record_layer.main([str(folder), "--layer", "7", "--length", "8", "--out", str(path), "--device", "cpu"])


def test_shipped_recording_is_complete_and_from_a_trained_model():
    from safetensors import safe_open

    path = EXAMPLES / "data" / "kda_layer.safetensors"
    assert path.stat().st_size <= 8 * 2**20
    with safe_open(path, framework="pt") as f:
        metadata, tensors = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (no iterator)
    B, T, H, K = tensors["q"].shape
    assert B == 1 and T >= 1024 and H >= 4 and K == 128
    assert all(torch.isfinite(x).all() for x in tensors.values())
    assert float(metadata["held_out_nats_per_byte"]) < 2.0
    assert {"command", "seed", "steps", "training_loss", "date", "device", "versions", "lower_bound", "scale"} <= set(metadata)


def test_palindrome_targets():
    import synthetic

    tokens, targets = synthetic.palindrome(np.random.default_rng(0), 3, 20)
    for row, target in zip(tokens, targets):
        word = row[:10].tolist()
        assert row[10] == 0 and row[11:].tolist() == word[::-1][:9]
        assert target[:10].tolist() == [synthetic.IGNORE] * 10 and target[10:].tolist() == word[::-1]


def test_mqar_targets():
    import synthetic

    tokens, targets = synthetic.mqar(np.random.default_rng(0), 3, 64)
    for row, target in zip(tokens.tolist(), targets.tolist()):
        pairs = dict(zip(row[:16:2], row[1:16:2]))
        assert len(pairs) == 8 and target[:16] == [synthetic.IGNORE] * 16
        assert target[16::2] == [pairs[key] for key in row[16::2]] == row[17::2]
        assert target[17::2] == [synthetic.IGNORE] * 24


def test_stack_targets():
    import synthetic

    tokens, targets = synthetic.stack(np.random.default_rng(0), 4, 150)
    pops = 0
    for row, target in zip(tokens.reshape(4, -1, 3).tolist(), targets.reshape(4, -1, 3).tolist()):
        stacks = {}
        for (operation, which, symbol), wanted in zip(row, target):
            if operation == 0:
                stacks.setdefault(which, []).append(symbol)
                assert wanted == [synthetic.IGNORE] * 3
            else:
                assert wanted == [synthetic.IGNORE, stacks[which].pop(), synthetic.IGNORE] and wanted[1] == symbol
                pops += 1
    assert pops > 40


@pytest.mark.parametrize("task", ["palindrome", "mqar", "stack"])
def test_synthetic_task_runs_and_stops_at_its_aim(task, tmp_path):
    import synthetic

    toy = ["--hidden", "16", "--heads", "2", "--head-dim", "8", "--batch", "2", "--length", "16", "--eval-every", "2", "--device", "cpu"]
    summary = synthetic.main([task, "--out", str(tmp_path), "--steps", "6", *toy])
    assert summary["steps"] == 6 and 0 <= summary["accuracy"] <= 1
    stopped = synthetic.main([task, "--out", str(tmp_path), "--steps", "8", *toy, "--resume", "--stop-at", "0"])
    assert stopped["steps"] == 8
    assert synthetic.main([task, "--out", str(tmp_path), "--steps", "8", *toy, "--stop-at", "0"])["steps"] == 2


def test_learning_rate_warms_up_and_decays():
    from training import learning_rate

    rates = [learning_rate(i / 100, 1.0) for i in range(101)]
    assert rates[0] == pytest.approx(0.02) and max(rates) == pytest.approx(1.0) and rates[-1] == pytest.approx(0.05)
    assert rates[:6] == sorted(rates[:6]) and rates[5:] == sorted(rates[5:], reverse=True)


def test_context_cost_shows_a_constant_cache_for_kda(tmp_path):
    import context_cost

    toy = [
        "--contexts",
        "8",
        "24",
        "--decoded",
        "2",
        "--hidden",
        "16",
        "--layers",
        "4",
        "--heads",
        "2",
        "--head-dim",
        "8",
        "--device",
        "cpu",
    ]
    results = context_cost.main(["--out", str(tmp_path), *toy, "--batch", "2", "--train-tokens", "48"])["results"]
    assert all(row["training_tokens_per_second"] > 0 for rows in results.values() for row in rows)
    sizes = {name: [row["cache_bytes"] for row in rows] for name, rows in results.items()}
    assert sizes["KDA"][0] == sizes["KDA"][1] == 4 * (2 * 8 * 8 + 3 * 3 * 16) * 4  # states and windows of four layers, fp32
    assert sizes["softmax"][1] == 3 * sizes["softmax"][0] == 4 * 2 * 2 * 8 * 24 * 4  # keys and values
    assert json.loads((tmp_path / "cost.json").read_text())["results"] == results
    assert (tmp_path / "cost.png").exists()


def test_runs_side_by_side(trained, tmp_path):
    import compare

    folder, summary = trained
    compare.main(
        [str(tmp_path / "c.png"), f"a={folder}", f"b={folder}", "--json", str(tmp_path / "c.json"), "--commit", "abc", "--log-steps"]
    )
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["commit"] == "abc"
    written = written["runs"]
    assert written["a"] == written["b"] and written["a"]["summary"] == summary
    assert written["a"]["history"]["step"] == [10, 20, 24]
    steps = list(range(10, 10010, 10))
    assert len(compare.thinned({"step": steps})["step"]) == 200 and compare.thinned({"step": steps})["step"][-1] == 10000
    with pytest.raises(FileNotFoundError, match=r"neither summary\.json nor train\.json"):
        compare.main([str(tmp_path / "c.png"), f"a={tmp_path}"])
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path / "c.png"), "a"])


@pytest.mark.gpu
def test_recorded_steps_equal_ordinary_ones(tmp_path, monkeypatch):
    """Replays read the batch and the learning rate of their own step: the same losses and weights as step by step."""
    import synthetic
    import training

    toy = ["palindrome", "--steps", "40", "--hidden", "64", "--heads", "1", "--head-dim", "64", "--batch", "4", "--length", "32"]
    toy += ["--start-length", "16", "--stage", "20", "--eval-every", "20"]
    runs = []
    for name, warm_up in (("recorded", 3), ("ordinary", 1000)):
        monkeypatch.setattr(training.Step, "WARM_UP", warm_up)
        synthetic.main([*toy, "--out", str(tmp_path / name)])
        runs.append(torch.load(tmp_path / name / "state.pt", weights_only=True, map_location="cpu"))
    assert runs[0]["history"]["loss"] == pytest.approx(runs[1]["history"]["loss"], rel=0.01)
    start = torch.cat([x.flatten() for x in runs[0]["model"].values()])
    assert (start - torch.cat([x.flatten() for x in runs[1]["model"].values()])).norm() < 0.02 * start.norm()
