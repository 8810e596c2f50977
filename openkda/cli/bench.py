"""`openkda bench`: its options. The work is in bench_run.py, imported when the command runs, so that help stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from openkda.cli.errors import guarded


@guarded
def bench(
    shapes: Annotated[str, typer.Option(help="Names such as T8192_H64,8x1024_H64, or 'all'.")] = "all",
    regimes: Annotated[str, typer.Option(help="Gate regimes: random, init, trained, zero, extreme, mixed.")] = "random,init,trained",
    gates: Annotated[str, typer.Option(help="Gate forms: bounded, softplus.")] = "bounded,softplus",
    ours: Annotated[
        str,
        typer.Option(
            "--backends",
            help="Ours: hopper, portable, torch, or 'auto' (torch on a CPU, the other two on a GPU); of a training step hopper-kept and \
portable-kept too, with disable_recompute.",
        ),
    ] = "auto",
    peers: Annotated[
        str,
        typer.Option(help="'auto' (all installed), 'none', or names, each with the shapes it is limited to: cudnn,fla@T8192_H64+T1024_H4."),
    ] = "auto",
    device: Annotated[str, typer.Option(help="'cuda', or 'cpu' for the torch backend at small shapes.")] = "cuda",
    json: Annotated[
        Path | None, typer.Option(help="Write every number here; a directory gets DATE-forward.json or DATE-training.json.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times to this PNG.")] = None,
    training: Annotated[bool, typer.Option("--training", help="Time forward + backward with gradients of every input instead.")] = False,
    host: Annotated[bool, typer.Option("--host", help="Also split our host time: checks, choice of backend, launches.")] = False,
    limit: Annotated[float | None, typer.Option(help="Start no new cell after this many seconds.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit to record, where the history beside the sources is not theirs or absent.")
    ] = None,
) -> None:
    """Time the forward (or a training step) beside every installed peer, on the same tensors in one run.

    Shows GPU time (CUDA graph; inputs warm in L2, and cold), eager time, host time per call, first call, the ratio to the memory floor, \
errors against fp64 on two heads, and whether two runs agree bit for bit. The JSON file is written after every row."""
    from openkda.cli.bench_run import run_bench

    run_bench(
        training=training, shapes=shapes, regimes=regimes, gates=gates, ours=ours, peers=peers, device=device, json_path=json,
        plot_path=plot, host=host, limit=limit, commit=commit,
    )  # fmt: skip
