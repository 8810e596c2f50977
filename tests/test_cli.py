"""The command line: what it writes and prints, how it refuses, and what an interrupt leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, safe_open
from typer.testing import CliRunner

from openkda import __version__, backends
from openkda.cli import check as check_module
from openkda.cli import explain as explain_module
from openkda.cli.app import app
from openkda.cli.draw import draw_mapping
from openkda.cli.errors import BadInput
from openkda.cli.pipeline import chunk_count, launch, mapping, portable_backward_stages, stages
from openkda.cli.recording import FLAGS, NUMBERS, OPTIONAL, REQUIRED, read, write
from openkda.model import KDAConfig, KDAForCausalLM
from openkda.ops import chunk_kda
from openkda.testing import make_case

CASES = {
    "raw, bounded": dict(regime="mixed", T=70, H=2, K=16),
    "activated, softplus": dict(regime="init", B=2, T=40, H=1, HV=2, K=8, V=24, raw=False, bounded=False, initial_state=False),
    "ragged, V first": dict(regime="random", lengths=(33, 0, 1, 20), H=1, HV=2, K=16, V=8, state_v_first=True, dtype=torch.bfloat16),
}


def save(path: Path, args: dict, **metadata: str) -> Path:
    """A recording of the call `args`."""
    tensors = {name: x for name, x in args.items() if name in (*REQUIRED, *OPTIONAL)}
    options = {name: str(value).lower() for name, value in args.items() if name in (*FLAGS, *NUMBERS)}
    write(path, tensors, options | metadata)
    return path


@pytest.fixture
def recording(tmp_path):
    return save(tmp_path / "layer.safetensors", make_case("mixed", T=70, H=2, K=16).args, text="some text", loss="1.23")


def openkda(*arguments: object, code: int = 0) -> str:
    """Run a command in this process, check its exit code and return what it printed, both streams."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def refused(*arguments: object) -> str:
    """The one sentence of a command that must refuse with exit code 2."""
    lines = openkda(*arguments, code=2).strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("openkda: "), lines
    return lines[0]


@pytest.mark.parametrize("name", CASES)
def test_run_writes_the_oracles_results(tmp_path, name):
    case = make_case(**CASES[name])
    path, out = save(tmp_path / "in.safetensors", case.args, loss="1.5"), tmp_path / "out.safetensors"
    printed = openkda("run", path, "--out", out, "--device", "cpu")
    assert "tokens/s" in printed and printed.count(" ok ") == 2
    results = load_file(out)
    for key, exact, twin in zip(("o", "final_state"), case.oracle, case.twin):
        assert (results[key].double() - exact).norm() <= 2 * (twin.double() - exact).norm() + 1e-6 * exact.norm()
    with safe_open(out, framework="pt") as file:
        assert file.metadata()["loss"] == "1.5" and file.metadata()["backend"] == "torch"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]


def test_run_draws_a_picture_per_subject(tmp_path, recording):
    openkda("run", recording, "--out", tmp_path / "o.safetensors", "--plot", tmp_path / "pictures", "--device", "cpu")
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [p.name for p in pictures] == ["layer_decay.png", "layer_error.png", "layer_state.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


@pytest.mark.parametrize("name", list(CASES))
def test_run_draws_one_picture_without_the_check(tmp_path, name):
    path = save(tmp_path / "in.safetensors", make_case(**CASES[name]).args)
    printed = openkda("run", path, "--no-check", "--out", tmp_path / "o.safetensors", "--plot", tmp_path / "all.png", "--device", "cpu")
    assert "recurrence" not in printed
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_run_without_tokens(tmp_path):
    path = save(tmp_path / "in.safetensors", make_case(T=0, K=8).args)
    assert "no tokens" in openkda("run", path, "--out", tmp_path / "o.safetensors", "--device", "cpu")
    assert "holds no token" in refused("run", path, "--plot", tmp_path / "pictures")


def test_run_fails_when_results_are_too_far(tmp_path, recording, monkeypatch):
    monkeypatch.setattr("openkda.testing.allowed_error", lambda twin, exact: 0.0)
    out = tmp_path / "o.safetensors"
    assert "too far" in openkda("run", recording, "--out", out, "--device", "cpu", code=1)
    assert out.exists()


def spoil(**tensors: torch.Tensor | None) -> dict:
    """A good call with some tensors replaced, or left out where None."""
    args = make_case("init", T=20, H=2, K=8).args | tensors
    return {name: x for name, x in args.items() if x is not None}


def with_value(value: float) -> torch.Tensor:
    v = torch.randn(1, 20, 2, 8)
    v[0, 3, 1, 5] = value
    return v


BAD_CALLS = {
    "no k": (spoil(k=None), "has no tensor k"),
    "short beta": (spoil(beta=torch.zeros(1, 19, 2)), "beta's shape is [1, 19, 2]"),
    "k of another width": (spoil(k=torch.zeros(1, 20, 2, 9)), "k's shape is [1, 20, 2, 9]"),
    "wide state": (spoil(initial_state=torch.zeros(1, 2, 8, 9)), "initial_state's shape is [1, 2, 8, 9]"),
    "integer v": (spoil(v=torch.zeros(1, 20, 2, 8, dtype=torch.int32)), "v's dtype is torch.int32"),
    "NaN": (spoil(v=with_value(float("nan"))), "v in "),
    "infinity": (spoil(v=with_value(float("inf"))), "non-finite, the first inf at [0, 3, 1, 5]"),
    "three dimensions": (spoil(q=torch.zeros(20, 2, 8)), "q's shape is [20, 2, 8]"),
    "falling lengths": (spoil(cu_seqlens=torch.tensor([0, 9, 4]), initial_state=None), "cu_seqlens[2] is 4"),
    "lower bound": (spoil() | {"lower_bound": -7.0}, "lower_bound is -7.0"),
    "no A_log": ({n: x for n, x in spoil(A_log=None).items() if n != "lower_bound"}, "A_log is None"),
    "growing state": (make_case(T=9, K=8, raw=False).args | {"g": torch.full((1, 9, 2, 8), 0.5)}, "positive (g is a log decay"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_tensors_are_refused_in_one_sentence(tmp_path, name):
    args, words = BAD_CALLS[name]
    path = save(tmp_path / "in.safetensors", args)
    assert words in refused("run", path, "--out", tmp_path / "out" / "o.safetensors", "--device", "cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def header_edit(change):
    """A damage that rewrites the JSON header of a safetensors file."""

    def damage(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = change(json.loads(data[8 : 8 + length]))
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return damage


def relabel(header: dict) -> dict:
    header["g"]["dtype"] = "F4"
    return header


def shrink(header: dict) -> dict:
    header["g"]["shape"] = [1, 2, 3, 4]
    return header


DAMAGES = {
    "truncated data": (lambda data: data[:-100], "the data of v ends 100 bytes after the end of the file"),
    "truncated header": (lambda data: data[:40], "is cut off inside its header"),
    "empty": (lambda data: b"", "is not a safetensors file"),
    "text": (lambda data: b"just a few words, nothing more\n" * 9, "is not a safetensors file"),
    "garbage header": (lambda data: (9).to_bytes(8, "little") + b"not json!" + data, "its header is not JSON"),
    "a list": (lambda data: (2).to_bytes(8, "little") + b"[]", "no table of tensors"),
    "unknown dtype": (header_edit(relabel), "g's dtype in"),
    "shape that does not fit": (header_edit(shrink), "cannot be read as safetensors"),
    "offsets": (header_edit(lambda header: header | {"g": header["g"] | {"data_offsets": "all"}}), "g's data_offsets in"),
    "stranger": (header_edit(lambda header: header | {"x": header["g"]}), "has a tensor x, which is none of"),
    "flag": (header_edit(lambda header: header | {"__metadata__": {"safe_gate": "maybe"}}), "metadata safe_gate of"),
    "number": (header_edit(lambda header: header | {"__metadata__": {"scale": "big"}}), "metadata scale of"),
    "infinite number": (header_edit(lambda header: header | {"__metadata__": {"scale": "inf"}}), "metadata scale of"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused_in_one_sentence(tmp_path, recording, name):
    damage, words = DAMAGES[name]
    recording.write_bytes(damage(recording.read_bytes()))
    assert words in refused("run", recording, "--out", tmp_path / "out" / "o.safetensors", "--device", "cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["layer.safetensors"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_gives_anything_but_a_sentence(recording, data):
    """Bytes overwritten, cut off or added anywhere: the file is read, or refused as bad input."""
    whole = recording.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    at = data.draw(st.integers(0, header) | st.integers(0, len(whole)))
    piece = data.draw(st.binary(max_size=6) | st.sampled_from([b"[", b"null", b"-1", b'"F32"', b"1e999", b"{}"]))
    keep = data.draw(st.sampled_from([0, len(piece), len(whole)]))
    damaged = recording.with_name("damaged.safetensors")
    damaged.write_bytes(whole[:at] + piece + whole[at + keep :])
    try:
        read(damaged)
    except BadInput as error:
        assert "\n" not in str(error)


def test_files_and_options_that_cannot_be_used(tmp_path, recording):
    assert "cannot be read: No such file" in refused("run", tmp_path / "none.safetensors")
    assert "is not a file" in refused("run", tmp_path)
    assert "is both the recording and --out" in refused("run", recording, "--out", recording)
    picture, pipe = tmp_path / "same.png", tmp_path.parent / f"{tmp_path.name}.png"
    os.mkfifo(pipe)
    assert "is both --out and the picture same.png" in refused("run", recording, "--out", picture, "--plot", picture)
    assert not picture.exists()
    assert "cannot be written" in refused("run", recording, "--out", tmp_path / ("a" * 300))
    assert "head count is 0" in refused("explain", "--HV", 0)
    assert "is a directory" in refused("run", recording, "--out", tmp_path)
    assert "is a device or a pipe" in refused("run", recording, "--out", "/dev/null")
    assert "is a device or a pipe" in refused("run", recording, "--out", tmp_path / "o", "--plot", pipe)
    assert "cannot be written" in refused("run", recording, "--out", recording / "below" / "o.safetensors")
    assert "must be a directory or a .png file" in refused("run", recording, "--plot", tmp_path / "x.jpg")
    assert "--device is 'tpu'" in refused("run", recording, "--device", "tpu")
    assert "--device is 'cuda:99'" in refused("run", recording, "--device", "cuda:99")
    assert "backend is 'best'" in refused("run", recording, "--backend", "best")
    assert "backend is 'hopper', which cannot serve this call" in refused("run", recording, "--backend", "hopper", "--device", "cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["layer.safetensors"]


def test_a_full_disk_is_one_sentence(tmp_path, recording, monkeypatch):
    full = lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    out, pictures = tmp_path / "o.safetensors", tmp_path / "pictures"
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert "the picture cannot be written: No space" in refused("run", recording, "--out", out, "--plot", pictures, "--device", "cpu")
    monkeypatch.setattr("openkda.cli.recording.save_file", full)
    assert "the results cannot be written: " in refused("run", recording, "--out", out, "--device", "cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["layer.safetensors"]


def test_an_old_result_survives_a_refusal(tmp_path, recording):
    out = tmp_path / "o.safetensors"
    out.write_text("precious")
    refused("run", recording, "--out", out, "--plot", recording / "below")
    assert out.read_text() == "precious"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_behind(tmp_path, sent, code):
    path = save(tmp_path / "in.safetensors", make_case("random", T=20000, H=2, K=64, dtype=torch.bfloat16).args)
    out = tmp_path / "results" / "o.safetensors"
    command = [sys.executable, "-m", "openkda", "run", str(path), "--out", str(out), "--plot", str(tmp_path / "p"), "--device", "cpu"]
    unignored = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are born with SIGINT ignored
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, **pipes, env=os.environ | {"OMP_NUM_THREADS": "1"}, preexec_fn=unignored)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("results/.o*")) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == code and "Traceback" not in errors, errors
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize("moment", ["torch", "numpy", "typer"])
@pytest.mark.parametrize("how", [("-c", "from openkda_command import main; main()"), ("-m", "openkda")], ids=["command", "module"])
def test_an_interrupt_while_modules_are_imported(tmp_path, how, moment):
    """The command as it is installed, and as a module, interrupted when it begins to import something."""
    code = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *rest):
        if name == MOMENT:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
    (tmp_path / "sitecustomize.py").write_text(code.replace("MOMENT", repr(moment)))  # Python reads it before anything else
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *how, "info"], capture_output=True, text=True, cwd=Path(__file__).parents[1], env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "openkda: interrupted\n")


def test_run_through_a_layer_of_a_checkpoint(tmp_path):
    config = KDAConfig(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_heads=2, head_dim=16)
    model = KDAForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    path, out = tmp_path / "hidden.safetensors", tmp_path / "o.safetensors"
    hidden = torch.randn(1, 40, 32)
    write(path, {"hidden_states": hidden}, {"text": "a text"})
    openkda("run", path, "--checkpoint", tmp_path / "model", "--layer", 1, "--out", out, "--device", "cpu")
    mixer = model.model.layers[1].self_attn
    expected, _ = chunk_kda(**mixer.kernel_inputs(hidden))
    torch.testing.assert_close(load_file(out)["o"], expected)
    assert "belong together" in refused("run", path, "--layer", 1)
    assert "layer=7 is no KDA layer" in refused("run", path, "--checkpoint", tmp_path / "model", "--layer", 7)
    assert "holds neither" in refused("run", path, "--checkpoint", tmp_path, "--layer", 1)
    write(path, {"hidden_states": hidden[..., :9]}, {})
    assert "hidden_states's shape in" in refused("run", path, "--checkpoint", tmp_path / "model", "--layer", 1)
    write(path, {"hidden_states": hidden.int()}, {})
    assert "hidden_states's dtype in" in refused("run", path, "--checkpoint", tmp_path / "model", "--layer", 1)
    write(path, {"hidden_states": hidden}, {})
    with torch.no_grad():
        mixer.k_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    assert "k in layer 1 of " in refused("run", path, "--checkpoint", tmp_path / "model", "--layer", 1)


def test_recordings_survive_a_round_trip(recording):
    problem, inputs = read(recording).described(torch.device("cpu"))
    wanted, given = make_case("mixed", T=70, H=2, K=16).described()
    assert problem == wanted
    assert torch.equal(inputs.g, given.g) and torch.equal(inputs.initial_state, given.initial_state)


def test_check_passes_here_and_names_who_was_not_asked(monkeypatch):
    monkeypatch.setattr(check_module, "SHAPES", {"ragged": check_module.SHAPES["ragged"]})
    asked = ("--backend", "torch", "--backend", "hopper", "--regime", "init", "--regime", "extreme")
    printed = openkda("check", *asked, "--gradients", "--device", "cpu")
    assert "all" in printed and "within tolerance" in printed and "gradient" in printed
    assert "hopper, chunk form: not checked: " in printed


def test_check_fails_when_a_backend_is_wrong(monkeypatch):
    wrong = lambda **args: tuple(x + 1 for x in check_module.chunk_kda(**args))
    monkeypatch.setitem(check_module.FORMS, "chunk", wrong)
    monkeypatch.setattr(check_module, "SHAPES", {"small": dict(T=20, H=1, K=8)})
    printed = openkda("check", "--regime", "init", "--backend", "torch", "--device", "cpu", code=1)
    assert " far " in printed and "too far off" in printed
    assert "--regime is 'odd'" in refused("check", "--regime", "odd")
    assert "--backend is 'odd'" in refused("check", "--backend", "odd")


def test_check_of_no_backend_is_no_success():
    printed = openkda("check", "--regime", "init", "--backend", "hopper", "--device", "cpu", code=1)
    assert "hopper, chunk form: not checked: " in printed and "nothing was checked" in printed and "tolerance" not in printed


def test_explain_says_who_serves_and_what_moves(tmp_path):
    picture = tmp_path / "map.png"
    printed = openkda("explain", "--device", "cuda:8.0", "--T", 4096, "--grad", "--draw", picture)
    assert "chunk_kda runs on portable" in printed
    assert "scan_block_v" in printed and "solve" in printed and "MiB" in printed
    assert "Gradients: " in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = openkda("explain", "--device", "cpu", "--lengths", "100,0,7", "--heads", 2, "--value-heads", 4, "--draw", picture)
    assert "chunk_kda runs on torch" in printed and "3 sequences in T=107" in printed
    assert "chunk_kda runs on portable" in openkda("explain", "--device", "rocm", "--gate", "softplus", "--draw", picture)


def test_explain_says_what_a_forward_keeps():
    device = explain_module.Device("cuda", (9, 0))
    says = lambda **sizes: explain_module.choices(explain_module.describe_call(device=device, grad=True, **sizes), "hopper")[-1]
    if backends.why_not("hopper", explain_module.describe_call(device=device)) is None:
        assert "beside the kernels" in says(T=8192, H=32)
        assert (
            "by themselves" in says(T=8192, H=32, gate="softplus")
            and "by themselves" in says(T=1024, H=32, B=4)
            and "nothing is kept" in says(T=1024, H=4)
        )
        assert all("nothing is kept" in says(**sizes) for sizes in (dict(lengths=(3, 4)), dict(T=2**17, H=1), dict(dtype="fp16")))


def test_explain_refuses_in_one_sentence(tmp_path):
    assert "K is -1" in refused("explain", "--K", -1)
    assert f"T is {10**22}; it must be at least 0 and at most" in refused("explain", "--T", 10**22)
    assert "q's last dimension is 300" in refused("explain", "--K", 300)
    assert "gate is 'hard'" in refused("explain", "--gate", "hard")
    assert "dtype is 'int8'" in refused("explain", "--dtype", "int8")
    assert "--device is 'abacus'" in refused("explain", "--device", "abacus")
    assert "--lengths is '1;2'" in refused("explain", "--lengths", "1;2")
    assert "lengths is [3, -1]" in refused("explain", "--lengths", "3,-1")
    assert f"lengths is [{10**22}]" in refused("explain", "--lengths", 10**22)
    assert "--draw is map.jpg" in refused("explain", "--draw", "map.jpg")
    assert "cannot serve this call" in refused("explain", "--device", "cpu", "--backend", "portable", "--dtype", "fp64")


STAGED = {
    ("torch", "plain"): dict(K=24, V=40),
    ("torch", "states, V first"): dict(K=24, V=40, states=True, initial_state=True, v_first=True),
    ("portable", "plain"): dict(K=24, V=40),
    ("portable", "states"): dict(K=24, V=40, states=True),
    ("portable", "ragged"): dict(lengths=(5, 70), gate="none"),
    ("hopper", "many heads"): dict(H=64, initial_state=True),
    ("hopper", "segments"): dict(T=65536),
    ("hopper", "ragged segments"): dict(lengths=(5, 40000)),
}


@pytest.mark.parametrize(("backend", "name"), STAGED)
def test_stages_hand_on_what_they_write(tmp_path, backend, name):
    device = explain_module.Device("cuda", (9, 0))
    p = explain_module.describe_call(**{**dict(device=device, T=75, H=2, HV=None), **STAGED[backend, name]})
    steps = stages(p, backend)
    known = {"q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"}
    for step in steps:
        assert {item.name for item in step.reads} <= known, step
        known |= {item.name for item in step.writes}
    assert "o" in known and ("h" in {item.name for item in steps[-1].writes}) == p.return_intermediate_states
    assert ("segments" in name) == (backend == "hopper" and len(steps) > 1)
    m = mapping(p, backend)
    assert 1 <= m.columns <= p.V and chunk_count(p, m.chunk) >= -(-p.T // m.chunk)
    assert bool(launch(p, backend)) == (backend != "torch")
    draw_mapping(p, backend, device, STAGED[backend, name].get("lengths"), tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options", [{}, dict(K=24, V=40, gate="none", initial_state=True), dict(lengths=(5, 70), dtype="fp16", gate="softplus")]
)
def test_backward_stages_hand_on_what_they_write(options):
    p = explain_module.describe_call(device=explain_module.Device("cuda", (9, 0)), T=75, H=2, HV=4, grad=True, **options)
    known = {"q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "o", "do"}
    for step in portable_backward_stages(p):
        assert {item.name for item in step.reads} <= known, step
        known |= {item.name for item in step.writes}
    wanted = {"dq", "dk", "dv", "dg", "dbeta"} | ({"dA_log", "ddt_bias"} if p.has_A_log else set())
    assert wanted <= known and ("dS_0" in known) == p.has_initial_state


def test_info_shows_versions_and_backends():
    assert openkda("--version").strip() == f"openkda {__version__}"
    printed = openkda("info")
    assert torch.__version__.split("+")[0] in printed and "Triton cache" in printed
    assert all(f"backend {name}" in printed for name in ("hopper", "portable", "torch"))


def test_help_loads_no_library_it_does_not_need():
    code = (
        "import sys; from openkda.cli import app; sys.exit(any(name in sys.modules for name in ('matplotlib', 'transformers', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=100).returncode == 0
