"""The commands of `openkda` and their options. Each command's work is in the module of its name, imported when it runs."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from openkda.cli.bench import bench
from openkda.cli.errors import CHECK_FAILED, BadInput, guarded

app = typer.Typer(name="openkda", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Backend = Annotated[str | None, typer.Option(help="hopper, portable or torch; default: the best that serves the call")]
Device = Annotated[str | None, typer.Option(help="torch device, as cuda, cuda:1 or cpu; default: the GPU if there is one")]


def show_version(asked: bool) -> None:
    """Print the version and end, where that was asked for."""
    if asked:
        typer.echo(f"openkda {version('openkda')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="show the version and exit")] = False,
) -> None:
    """Kimi Delta Attention: run it on recorded tensors, check it on this machine, explain how a call is served."""


@app.command()
@guarded
def run(
    recording: Annotated[Path, typer.Argument(metavar="INPUT.safetensors", help="tensors of one call, by the names of its arguments")],
    out: Annotated[Path | None, typer.Option(help="file for o and final_state; default: INPUT_out.safetensors here")] = None,
    backend: Backend = None,
    device: Device = None,
    check: Annotated[bool, typer.Option(help="compare with the token recurrence in fp64")] = True,
    plot: Annotated[Path | None, typer.Option(help="directory for pictures, or one .png file for all of them")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="folder of a model: INPUT holds hidden_states, which pass through --layer")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="number of a KDA layer of --checkpoint")] = None,
) -> None:
    """Run KDA on recorded tensors: time, errors, results, pictures."""
    from openkda.cli.run import run as work

    options = dict(out=out, backend=backend, check=check, plot=plot, checkpoint=checkpoint, layer=layer)
    if not work(recording, device=torch_device(device), **options):
        raise typer.Exit(CHECK_FAILED)


@app.command()
@guarded
def check(
    backend: Annotated[list[str] | None, typer.Option(help="hopper, portable or torch; may be repeated; default: all")] = None,
    regime: Annotated[list[str] | None, typer.Option(help="gate regime of openkda.testing; may be repeated; default: all")] = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="also compare gradients with fp64 autograd of the recurrence")] = False,
    device: Device = None,
    interpret: Annotated[bool, typer.Option("--interpret", help="also run the Triton kernels on the CPU, in Triton's interpreter")] = False,
) -> None:
    """Check every backend of this machine against the token recurrence; exit code 1 when one is too far off or none was checked."""
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, so before any is imported
    from openkda.backends import NAMES
    from openkda.cli.check import check as work
    from openkda.testing import REGIMES

    where = torch_device("cpu" if interpret else device)
    if not work(wanted=tuple(backend or NAMES), regimes=tuple(regime or REGIMES), device=where, gradients=gradients):
        raise typer.Exit(CHECK_FAILED)


@app.command()
@guarded
def explain(
    B: Annotated[int, typer.Option("--B", help="batch")] = 1,
    T: Annotated[int, typer.Option("--T", help="tokens")] = 1024,
    heads: Annotated[int, typer.Option("--heads", "--H", help="q/k heads")] = 4,
    value_heads: Annotated[int | None, typer.Option("--value-heads", "--HV", help="value heads; default: as many as q/k heads")] = None,
    K: Annotated[int, typer.Option("--K", help="key dim")] = 128,
    V: Annotated[int | None, typer.Option("--V", help="value dim; default: K")] = None,
    lengths: Annotated[str | None, typer.Option(help="lengths of packed sequences, as 100,20,7; replaces --B and --T")] = None,
    dtype: Annotated[str, typer.Option(help="of q, k, v: bf16, fp16, fp32 or fp64")] = "bf16",
    gate_dtype: Annotated[str | None, typer.Option(help="of g; default: dtype")] = None,
    beta_dtype: Annotated[str | None, typer.Option(help="of beta; default: dtype")] = None,
    gate: Annotated[str, typer.Option(help="bounded, softplus, or none: g is the log decay")] = "bounded",
    lower_bound: Annotated[float, typer.Option(help="of a bounded or safe gate, in [-5, 0)")] = -5.0,
    safe_gate: Annotated[bool, typer.Option("--safe-gate", help="promise that a given decay lies in [lower bound, 0)")] = False,
    initial_state: Annotated[bool, typer.Option("--initial-state", help="start from a state")] = False,
    states: Annotated[bool, typer.Option("--states", help="return the states at chunk entries")] = False,
    v_first: Annotated[bool, typer.Option("--v-first", help="states are [.., V, K]")] = False,
    chunk_size: Annotated[int, typer.Option(help="32 or 64")] = 64,
    grad: Annotated[bool, typer.Option("--grad", help="an input needs its gradient")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, rocm, or cuda:9.0 for a compute capability; default: this machine's")] = None,
    backend: Backend = None,
    draw: Annotated[Path | None, typer.Option(help=".png file for a picture of how programs map to tokens and heads")] = None,
) -> None:
    """Explain a call: which backend serves it and why the others do not, the launch, the stages with shapes and bytes."""
    from openkda.cli.explain import describe_call, parse_device
    from openkda.cli.explain import explain as work

    kind, pieces = parse_device(device), parse_lengths(lengths)
    problem = describe_call(
        device=kind, B=B, T=T, H=heads, HV=value_heads, K=K, V=V, lengths=pieces, dtype=dtype, gate_dtype=gate_dtype, beta_dtype=beta_dtype,
        gate=gate, lower_bound=lower_bound, safe_gate=safe_gate, initial_state=initial_state, states=states, v_first=v_first,
        chunk_size=chunk_size, grad=grad,
    )  # fmt: skip
    work(problem, device=kind, backend=backend, lengths=pieces, draw=draw)


@app.command()
@guarded
def info() -> None:
    """Show versions, devices, backends and caches of this machine."""
    from openkda.cli.info import info as work

    work()


app.command()(bench)


def parse_lengths(text: str | None) -> tuple[int, ...] | None:
    """Comma-separated lengths. BadInput for anything else."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise BadInput(f"--lengths is {text!r}; it must be whole numbers with commas between, as 100,20,7") from error


def torch_device(name: str | None):
    """The torch device of that name. BadInput where there is none."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"--device is {name!r}; it must be a torch device such as cuda, cuda:1 or cpu") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise BadInput(f"--device is {name!r}; this machine has cpu and {torch.cuda.device_count()} CUDA devices")
    return device


def run_app() -> None:
    """Run the command line of this process."""
    app()
