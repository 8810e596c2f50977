"""`openkda bench` and what it is made of, at toy size on the CPU: shapes, inputs, floors, rows, peers' calls, table, files, refusals."""

import io
import json
import math
import sys
import types

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from openkda import benchmarking, benchmarking_training, chunk_kda, peers
from openkda.benchmarking import (
    CPU_SHAPES,
    GPU_SHAPES,
    Implementation,
    Row,
    Shape,
    cells_of,
    floor_bytes,
    make_cases,
    measure,
    oracles,
    our,
)
from openkda.benchmarking_training import LEAVES, TRAINING, gradient_oracle
from openkda.cli import bench_plot, bench_run
from openkda.cli.bench import bench
from openkda.testing import Case, oracle, relative_error
from openkda.timing import copy_bandwidth, eager_ms

CPU = torch.device("cpu")
TOY = "T48_H2_D16"
app = typer.Typer()
app.command()(bench)


@pytest.fixture(autouse=True)
def one_thread():
    """Toy sizes gain nothing from more, and lose much where other processes hold the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def command(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def toy_cell(name=TOY, regime="random", gate="bounded"):
    return cells_of(Shape.parse(name), [regime], [gate], CPU, 1e9)[0]


@pytest.mark.parametrize(
    ("name", "lengths", "H", "HV", "D"),
    [
        ("T8192_H96", (8192,), 96, 96, 128),
        ("T8192_H12_N4", (2048,) * 4, 12, 12, 128),
        ("8x1024_H64", (1024,) * 8, 64, 64, 128),
        ("mix6_H64", (1300, 547, 2048, 963, 271, 3063), 64, 64, 128),
        ("T64_H2_HV6_N2_D16", (32, 32), 2, 6, 16),
        ("short60_H4", tuple(7 + 11 * i % 293 for i in range(60)), 4, 4, 128),
    ],
)
def test_shape_names(name, lengths, H, HV, D):
    assert Shape.parse(name) == Shape(name, lengths, H, HV, D)


@pytest.mark.parametrize("name", ["", "T64", "H4_T64", "T64_H0", "T10_H2_N3", "T10_H2_N0", "T64_H4_HV6", "T64_H2_D300", "T0_H1", "t64_h2"])
def test_shape_refusals(name):
    with pytest.raises(ValueError, match="shape is"):
        Shape.parse(name)


def test_every_named_shape_parses():
    assert Shape.parse("longtail_H4").tokens == Shape.parse("short60_H4").tokens + 16384
    assert len(GPU_SHAPES) == 9
    assert all(Shape.parse(name).name == name for name in GPU_SHAPES + CPU_SHAPES)


@pytest.mark.parametrize("name", [TOY, "3x20_H2_HV4_D16"])
def test_inputs(name):
    shape = Shape.parse(name)
    wanted = [("bounded", "init"), ("softplus", "random")]
    cases, again = make_cases(shape, wanted, CPU), make_cases(shape, wanted[::-1], CPU)[::-1]
    for case, same, (gate, _) in zip(cases, again, wanted):
        problem, _ = case.described()
        assert (problem.gate, problem.varlen, problem.N) == (gate, len(shape.lengths) > 1, len(shape.lengths))
        assert problem.dtype == problem.gate_dtype == problem.beta_dtype == torch.bfloat16
        assert problem.qk_l2norm and problem.beta_sigmoid and problem.state_v_first and problem.output_final_state
        assert all(torch.equal(x, same.args[n]) for n, x in case.args.items() if isinstance(x, torch.Tensor))
    assert cases[0].args["q"] is cases[1].args["q"] and not torch.equal(cases[0].args["g"], cases[1].args["g"])


@pytest.mark.parametrize("name", ["2x20_H3_HV6_D8", "T30_H2_D8"])
def test_oracles_are_the_first_heads_of_the_whole_calls(name):
    cases = make_cases(Shape.parse(name), [("bounded", "mixed"), ("softplus", "init"), ("bounded", "random")], CPU)
    for case, (o, S) in zip(cases, oracles(cases, 2)):
        whole_o, whole_S = case.oracle
        heads = 2 * whole_o.shape[2] // case.args["q"].shape[2]
        torch.testing.assert_close(o, whole_o[:, :, :heads], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(S, whole_S[:, :heads], rtol=1e-12, atol=1e-14)


def test_floor_bytes():
    problem = toy_cell().problem
    T, H, D = 48, 2, 16
    assert floor_bytes(problem) == 2 * T * H * (5 * D + 1) + 2 * 4 * H * D * D + 4 * H * (1 + D)
    big = problem.replace(T=8192, H=96, HV=96, K=128, V=128)
    assert math.isclose(1e3 * floor_bytes(big) / 4.3e12, 0.237, rel_tol=0.01)
    bare = big.replace(has_initial_state=False, output_final_state=False, has_A_log=False, has_dt_bias=False)
    assert floor_bytes(bare) == 8192 * 96 * 2 * (5 * 128 + 1)


def test_copy_bandwidth_and_eager_time_are_positive():
    assert copy_bandwidth(CPU, size=4096) > 0
    assert eager_ms(lambda: None, CPU, calls=2) >= 0


def test_copy_kernel(device):
    from openkda.portable.copy import copy

    x = torch.arange(1000, dtype=torch.int32, device=device)
    y = torch.zeros(1100, dtype=torch.int32, device=device)
    copy(x, y, block=256)
    assert torch.equal(y[:1000], x) and not y[1000:].any()


@pytest.mark.parametrize("name", [TOY, "3x17_H3_HV6_D16"])
def test_measure_on_the_cpu(name):
    row = measure(toy_cell(name, "init", "softplus"), our("torch"))
    assert row.error is None and row.ours and row.bit_equal
    assert row.eager_ms > 0 and row.first_s > 0 and row.floor_ms > 0
    assert row.graph_ms is row.cold_ms is row.host_us is None
    assert 0 < row.err_o < 0.01 and row.err_state < 0.01
    assert row.over_floor == row.eager_ms / row.floor_ms


def test_no_oracle_for_long_calls(monkeypatch):
    monkeypatch.setattr(benchmarking, "ORACLE_TOKENS", 10)
    row = measure(toy_cell(), our("torch"))
    assert row.error is None and row.err_o is None and row.err_state is None


def test_a_failure_is_a_row_and_an_interrupt_is_not():
    def broken(args):
        raise RuntimeError("\nno such kernel\nand a long story")

    def interrupted(args):
        raise KeyboardInterrupt

    row = measure(toy_cell(), Implementation("broken", False, lambda problem: None, broken))
    assert row.error == "RuntimeError: no such kernel" and row.over_floor is None
    row = measure(toy_cell(), Implementation("broken", False, lambda problem: "broken serves nothing", broken))
    assert row.error == "broken serves nothing"
    row = measure(toy_cell(), Implementation("broken", False, lambda problem: None, broken, shapes=("T8192_H64",)))
    assert "left out" in row.error
    with pytest.raises(KeyboardInterrupt):
        measure(toy_cell(), Implementation("interrupted", False, lambda problem: None, interrupted))


def test_a_wrong_result_shows():
    def wrong(args):
        return lambda: (torch.zeros_like(args["v"]), torch.randn_like(args["initial_state"]))

    row = measure(toy_cell(), Implementation("wrong", False, lambda problem: None, wrong))
    assert row.err_o == pytest.approx(1.0) and row.err_state > 0.5 and row.bit_equal is False


def our_twin(q, k, v, g, beta, **options):
    return chunk_kda(q, k, v, g, beta, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, state_v_first=True,
                     output_final_state=True, use_beta_sigmoid_in_kernel=True, **options)  # fmt: skip


def fake_fla_chunk_kda(*, safe_gate, dt_bias, **args):
    assert dt_bias.ndim == 1 and safe_gate == ("lower_bound" in args)
    return chunk_kda(**args, safe_gate=safe_gate, dt_bias=dt_bias)


def fake_cudnn(q, k, v, g, beta, cu_seqlens, *, initial_state=None, gate_lower_bound=None, a_log=None, dt_bias=None, **flags):
    assert cu_seqlens.dtype == torch.int32 and q.ndim == 3
    if not flags.get("safe_gate"):  # the plain form, as trained
        assert g.dtype == beta.dtype == torch.float32 and (g <= 0).all()
        return (chunk_kda(*(x[None] for x in (q, k, v, g, beta)), cu_seqlens=cu_seqlens)[0][0],)
    assert flags.keys() == {"output_final_state", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate"} and all(
        flags.values()
    )
    o, S = our_twin(*(x[None] for x in (q, k, v, g, beta)), cu_seqlens=cu_seqlens, initial_state=initial_state,
                    lower_bound=gate_lower_bound, A_log=a_log, dt_bias=dt_bias)  # fmt: skip
    return o[0], S, "a third result"


def fake_flash_kda(q, k, v, g, beta, scale, o, *, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens):
    result = our_twin(q, k, v, g, beta, scale=scale, lower_bound=lower_bound, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state,
                      cu_seqlens=cu_seqlens)  # fmt: skip
    o.copy_(result[0])
    final_state.copy_(result[1])


@pytest.fixture
def fake_peers(monkeypatch):
    """Modules under the peers' names whose functions take what the peers' take and compute through our torch backend."""
    for name in ("fla", "fla.ops", "cudnn", "cudnn.linear_attention", "cudnn.linear_attention.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, members in {
        "fla.ops.kda": dict(chunk_kda=fake_fla_chunk_kda),
        "cudnn.linear_attention.ops.kda": dict(kimi_delta_attention=fake_cudnn),
        "flash_kda": dict(fwd=fake_flash_kda),
    }.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("FLA_FLASH_KDA", "1")  # restored afterwards; the fla peer sets it


@pytest.mark.parametrize("name", [TOY, "2x24_H2_D16"])
@pytest.mark.parametrize("peer", list(peers.PEERS.values()), ids=list(peers.PEERS))
def test_peers_are_called_as_they_want_to_be(fake_peers, peer, name):
    cell = toy_cell(name)
    o, S = peer.bind(cell.case.args)()
    expected = our("torch").bind(cell.case.args)()
    assert relative_error(o.reshape(expected[0].shape), expected[0]) < 5e-3
    assert relative_error(S, expected[1]) < 5e-3
    assert cell.errors((o, S))["err_o"] < 0.01


def test_peers_refuse_by_name():
    problem = toy_cell().problem
    for peer in peers.PEERS.values():
        assert isinstance(peer.why_not(problem), str)
    on_gpu = problem.replace(device_type="cuda", K=128, V=128)
    assert all(peer.why_not(on_gpu) is None for peer in peers.PEERS.values())
    assert peers.PEERS["fla"].why_not(on_gpu.replace(gate="softplus")) is None
    for name in ("cudnn", "flash_kda"):
        assert "gate" in peers.PEERS[name].why_not(on_gpu.replace(gate="softplus"))
    assert "K = V = 128" in peers.PEERS["flash_kda"].why_not(on_gpu.replace(HV=4))
    assert "raw inputs" in peers.PEERS["cudnn"].why_not(on_gpu.replace(qk_l2norm=False))


def a_row(**changes):
    values = dict(shape="T8192_H64", tokens=8192, sequences=1, H=64, HV=64, D=128, regime="init", gate="bounded", impl="hopper", ours=True,
                  floor_ms=0.158, first_s=1.0, graph_ms=0.3, cold_ms=0.316, eager_ms=0.35, host_us=50.0, peak_mib=100.0, err_o=4e-3,
                  err_state=3e-3, bit_equal=True)  # fmt: skip
    return Row(**values | changes)


def test_table():
    rows = [
        a_row(host_split_us=dict(checks=9.0, choice=1.0, launches=40.0)),
        a_row(impl="fla", ours=False, graph_ms=1.5, cold_ms=1.6, bit_equal=False),
        a_row(impl="cudnn", ours=False, graph_ms=0.6, cold_ms=0.6),
        a_row(impl="flash_kda", ours=False, graph_ms=None, error="RuntimeError: [bold]broken"),
        a_row(impl="fla", ours=False, graph_ms=0.01, regime="random"),
    ]
    assert bench_run.speedup(rows[0], rows) == pytest.approx(2.0)
    assert bench_run.speedup(rows[1], rows) is None
    console = Console(width=bench_run.WIDTH, record=True, file=io.StringIO())
    console.print(bench_run._table(rows, "T8192_H64"))
    bench_run._print_reasons(console, rows)
    text = console.export_text()
    assert "…" not in text
    line = next(line for line in text.splitlines() if "hopper" in line)
    for number in ("0.3000", "0.3160", "0.3500", "50", "9+1+40", "1.00", "2.00", "4.00e-03", "yes"):
        assert number in line
    assert "flash_kda has no times in 1 cell: RuntimeError: [bold]broken" in text
    assert " no" in next(line for line in text.splitlines() if "1.5000" in line)


def test_rotated_inputs_have_versions(monkeypatch):
    """A graph's calls must not read cu_seqlens anew, whatever mode the copies are made in."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(L2_cache_size=1))
    with torch.inference_mode():
        copies = toy_cell("T48_H2_N3_D16").rotated()
    assert len(copies) >= 2 and not any(x.is_inference() for args in copies for x in args.values() if isinstance(x, torch.Tensor))
    assert copies[0]["cu_seqlens"].data_ptr() != copies[1]["cu_seqlens"].data_ptr()


def test_command_writes_everything(tmp_path):
    plot = tmp_path / "plots" / "times.png"
    result = command("--device", "cpu", "--shapes", f"{TOY},2x16_H1_D8", "--regimes", "random,init", "--json", tmp_path, "--plot", plot,
                     "--commit", "0123abc")  # fmt: skip
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("*-forward.json")
    report = json.loads(written.read_text())
    assert report["schema"] == 1 and report["rows_asked"] == len(report["rows"]) == 8
    assert report["command"].startswith("openkda ") and report["versions"]["torch"] and report["copy_bandwidth_tbps"] > 0
    assert (report["commit"], report["uncommitted_changes"]) == ("0123abc", None) and report["date"][:10] == written.name[:10]
    row = report["rows"][0]
    assert set(row) == {*Row.__dataclass_fields__, "over_floor"}
    assert row["impl"] == "torch" and row["error"] is None and row["bit_equal"] is True and row["floor_ms"] > 0
    assert {(r["shape"], r["gate"], r["regime"]) for r in report["rows"]} == {
        (s, g, r) for s in (TOY, "2x16_H1_D8") for g in benchmarking.GATES for r in ("random", "init")
    }
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert TOY in result.output and "wrote" in result.output


def test_command_stops_at_its_limit(tmp_path):
    out = tmp_path / "out.json"
    result = command("--device", "cpu", "--shapes", TOY, "--regimes", "init", "--limit", 0, "--json", out, "--plot", tmp_path / "p.png")
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["rows"] == [] and report["rows_asked"] == 2
    assert "2 of 2 rows were not started" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shapes", "T64"], "shape is 'T64'"),
        (["--shapes", ","], "--shapes is empty"),
        (["--regimes", "fast"], "--regimes names 'fast'"),
        (["--gates", "linear"], "--gates names 'linear'"),
        (["--backends", "cuda"], "--backends names 'cuda'"),
        (["--peers", "flux"], "--peers names 'flux'"),
        (["--peers", "fla"], "'fla', which is not installed here (package fla-core)"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--limit", "-1"], "--limit is -1"),
        (["--limit", "nan"], "--limit is nan"),
        (["--plot", "p.txt"], "--plot is p.txt; it must be a .png file"),
        (["--json", "/proc/openkda/x.json"], "cannot be written"),
    ],
)
def test_bad_options_are_one_sentence(arguments, says, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarking.Benchmark, "run", lambda *args, **kwargs: pytest.fail("started to time"))
    monkeypatch.setattr(
        peers.importlib.metadata, "version", lambda name: (_ for _ in ()).throw(peers.importlib.metadata.PackageNotFoundError)
    )
    result = command("--device", "cpu", "--plot", tmp_path / "p.png", *arguments)
    assert result.exit_code == 2, result.output
    assert says in result.output and result.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command()
    assert result.exit_code == 2 and "no GPU" in result.output and "--device cpu" in result.output


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    arguments = ("--device", "cpu", "--shapes", TOY, "--regimes", "init", "--gates", "bounded")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    result = command(*arguments, "--plot", tmp_path / "p.png")
    assert result.exit_code == 2 and "the picture cannot be written: No space" in result.output
    monkeypatch.setattr(bench_run.Path, "write_text", full)
    result = command(*arguments, "--json", tmp_path / "r.json")
    assert result.exit_code == 2 and "the results cannot be written: No space" in result.output
    assert not list(tmp_path.iterdir())


def test_interrupt_keeps_the_rows_so_far(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        yield measure(toy_cell(), our("torch"))
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmarking.Benchmark, "run", interrupted)
    result = command("--device", "cpu", "--shapes", TOY, "--json", tmp_path / "new" / "out.json", "--plot", tmp_path / "p.png")
    assert result.exit_code == 130, result.output
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "out.json"]
    report = json.loads((tmp_path / "new" / "out.json").read_text())
    assert len(report["rows"]) == 1 and report["rows_asked"] == 6


def test_peers_option(monkeypatch):
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: "1.0")
    chosen = bench_run._peers(benchmarking.FORWARD, "cudnn,fla@T8192_H64+T1024_H4", CPU)
    assert [(p.name, p.shapes) for p in chosen] == [("cudnn", None), ("fla", ("T8192_H64", "T1024_H4"))]
    assert [p.name for p in bench_run._peers(benchmarking.FORWARD, "auto", torch.device("cuda"))] == list(peers.PEERS)
    assert bench_run._peers(benchmarking.FORWARD, "none", CPU) == bench_run._peers(benchmarking.FORWARD, "auto", CPU) == []


@pytest.mark.parametrize("name", ["T40_H3_HV6_D8", "3x16_H2_D8"])
@pytest.mark.parametrize("gate", benchmarking.GATES)
def test_training_step(name, gate):
    (cell,) = TRAINING.cells(Shape.parse(name), ["mixed"], [gate], CPU, 1e9)
    assert cell.problem.needs_grad and not cell.problem.has_initial_state
    row = TRAINING.measure(cell, TRAINING.ours("torch"))
    assert row.error is None and row.bit_equal and row.gradients_by == "torch"
    assert row.eager_ms > 0 and row.forward_ms > 0
    assert set(row.err_grads) == {*LEAVES[:5], "A_log, dt_bias"} and max(row.err_grads.values()) < 0.02
    p = cell.problem
    inputs = floor_bytes(p) - 2 * p.T * p.HV * p.V
    assert math.isclose(row.floor_ms, 1e3 * (3 * inputs + 4 * p.T * p.HV * p.V) / 1e9)


def test_training_that_keeps(monkeypatch):
    """A name with -kept is its backend with disable_recompute."""
    (cell,) = TRAINING.cells(Shape.parse("T40_H2_D8"), ["mixed"], ["bounded"], CPU, 1e9)
    asked = []

    def call(backend, disable_recompute, **args):
        asked.append((backend, disable_recompute))
        return (None,)

    monkeypatch.setattr(benchmarking_training, "chunk_kda", call)
    for name in TRAINING.names:
        TRAINING.ours(name).bind(cell.case.args).forward()
    assert asked == [(name.partition("-")[0], name.endswith("-kept")) for name in TRAINING.names]
    assert set(TRAINING.gpu_names) <= set(TRAINING.names) == set(bench_plot.OURS)


def test_gradient_oracle_is_the_recurrence(device):
    (case,) = make_cases(Shape.parse("2x20_H2_HV4_D8"), [("bounded", "mixed")], CPU)
    do = torch.randn(case.args["v"].shape, generator=torch.Generator().manual_seed(0))
    leaves = {n: case.args[n].double().requires_grad_() for n in LEAVES}
    problem, inputs = Case(case.args | leaves | dict(initial_state=None), "mixed").described()
    expected = torch.autograd.grad(oracle(problem, inputs)[0], list(leaves.values()), do.double())
    found = gradient_oracle(case, do, 1)
    for (name, mine), whole in zip(found.items(), expected):
        part = whole[:2] if name in ("A_log", "dt_bias") else whole[:, :, : mine.shape[2]]
        assert relative_error(mine, part) < 1e-9, name


@pytest.mark.parametrize("peer", ["fla", "cudnn_fp32"])
def test_training_of_peers(fake_peers, peer):
    (cell,) = TRAINING.cells(Shape.parse("2x20_H2_D16"), ["random"], ["bounded"], CPU, 1e9)
    known = peers.PEERS[peer]
    impl = Implementation(peer, False, lambda problem: None, TRAINING.foreign(known, None).bind)
    row = TRAINING.measure(cell, impl)
    assert row.error is None and row.bit_equal and row.eager_ms > 0 and row.gradients_by is None
    if peer == "fla":
        assert max(row.err_grads.values()) < 0.02
    else:
        assert row.err_grads is None
    assert "no training step" in TRAINING.foreign(peers.PEERS["cudnn"], None).why_not(cell.problem)
    assert "CUDA" in TRAINING.foreign(known, None).why_not(cell.problem)


def test_training_command(tmp_path):
    result = command(
        "--training", "--device", "cpu", "--shapes", "T40_H2_D8", "--regimes", "init", "--json", tmp_path, "--plot", tmp_path / "p.png"
    )
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("*-training.json")
    report = json.loads(written.read_text())
    assert report["benchmark"] == "training" and len(report["rows"]) == 2
    assert all(row["err_grads"]["q"] < 0.02 and row["gradients_by"] == "torch" for row in report["rows"])
    assert "of gradients" in result.output


@pytest.mark.gpu
def test_clocks_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    bandwidth = copy_bandwidth(device, size=2**28)
    row = measure(cells_of(Shape.parse("T512_H2"), ["init"], ["bounded"], device, bandwidth)[0], our("portable"), split_host=True)
    assert row.error is None and row.bit_equal and row.err_o < 0.01
    assert row.graph_ms > 0 and row.cold_ms > 0 and row.host_us > 0 and set(row.host_split_us) == {"checks", "choice", "launches"}
