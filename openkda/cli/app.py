"""The commands of `openkda` and their options. Each command's work is in the module of its name, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from openkda.cli.bench import bench
from openkda.cli.errors import CHECK_FAILED, BadInput, guarded

app = typer.Typer(name="openkda", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Backend = Annotated[str | None, typer.Option(help="hopper, portable or torch; default: the best that serves the call")]
Device = Annotated[str | None, typer.Option(help="torch device, as cuda, cuda:1 or cpu; default: the GPU if there is one")]


@app.callback()
def options() -> None:
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
) -> None:
    """Run KDA on recorded tensors: time, errors, results, pictures."""
    from openkda.cli.run import run as work

    if not work(recording, out=out, backend=backend, device=torch_device(device), check=check, plot=plot):
        raise typer.Exit(CHECK_FAILED)


app.command()(bench)


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
