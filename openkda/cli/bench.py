"""`openkda bench`: time ours beside every installed peer on the same tensors; table, dated JSON, plot. The clocks are in benchmarking.py."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from openkda import backends
from openkda.benchmarking import CPU_SHAPES, GATES, GPU_SHAPES, Implementation, Row, Shape, foreign, our, run
from openkda.cli.errors import BadInput, refusals
from openkda.cli.recording import replacing
from openkda.peers import PEERS, installed
from openkda.testing import REGIMES

SCHEMA = 1  # of the JSON file; benchmarks/README.md describes it
WIDTH = 130  # of tables that do not go to a terminal


def bench(
    shapes: Annotated[str, typer.Option(help="Names such as T8192_H64,8x1024_H64, or 'all'.")] = "all",
    regimes: Annotated[str, typer.Option(help="Gate regimes: " + ", ".join(REGIMES) + ".")] = "random,init,trained",
    gates: Annotated[str, typer.Option(help="Gate forms: bounded, softplus.")] = ",".join(GATES),
    backends_: Annotated[
        str, typer.Option("--backends", help="Ours: hopper, portable, torch, or 'auto' (torch on a CPU, the other two on a GPU).")
    ] = "auto",
    peers: Annotated[
        str,
        typer.Option(help="'auto' (all installed), 'none', or names, each with the shapes it is limited to: cudnn,fla@T8192_H64+T8192_H16."),
    ] = "auto",
    device: Annotated[str, typer.Option(help="'cuda', or 'cpu' for the torch backend at small shapes.")] = "cuda",
    json_: Annotated[Path | None, typer.Option("--json", help="Write every number here; a directory gets DATE-forward.json.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times to this PNG.")] = None,
    host: Annotated[bool, typer.Option("--host", help="Also split our host time: checks, choice of backend, launches.")] = False,
    limit: Annotated[float | None, typer.Option(help="Start no new cell after this many seconds; the JSON file says what is left.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record where the sources have no git history beside them.")] = None,
) -> None:
    """Time the forward on the benchmark shapes beside every installed peer, in one run on the same tensors.

    Shows GPU time (CUDA graph; inputs warm in L2, and cold), eager time, host time per call, first call, the ratio to the memory floor,
    errors against the fp64 recurrence on two heads, and whether two runs agree bit for bit."""
    where = _device(device)
    cells = [Shape.parse(n) for n in _names("shapes", shapes, all_=CPU_SHAPES if where.type == "cpu" else GPU_SHAPES, parsed=True)]
    chosen_regimes = _names("regimes", regimes, REGIMES)
    chosen_gates = _names("gates", gates, GATES)
    impls = _ours(backends_, where) + _peers(peers, where)
    now = datetime.now(timezone.utc)
    if json_ is not None and (json_.is_dir() or json_.suffix != ".json"):
        json_ = json_ / f"{now:%Y-%m-%d}-forward.json"
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    with ExitStack() as outputs:
        json_file = outputs.enter_context(replacing(json_)) if json_ else None
        plot_file = outputs.enter_context(replacing(plot)) if plot else None
        report = _header(now, where, impls, commit)
        console.print(_headline(report))
        asked = len(cells) * len(chosen_regimes) * len(chosen_gates) * len(impls)
        rows = _timed(console, cells, chosen_regimes, chosen_gates, impls, where, report, host, limit, asked)
        _print_reasons(console, rows)
        if len(rows) < asked:
            console.print(f"{asked - len(rows)} of {asked} rows were not started within {limit:g} seconds.")
        report.update(rows_asked=asked, seconds=round(time.time() - now.timestamp(), 1), rows=[_plain(row) for row in rows])
        if json_file:
            json_file.write_text(json.dumps(report, indent=1) + "\n")
        if plot_file:
            from openkda.cli.bench_plot import draw

            draw(rows, report, plot_file)
    for path in filter(None, (json_, plot)):
        console.print(f"wrote {path}")


def _device(name: str) -> torch.device:
    if name not in ("cuda", "cpu"):
        raise BadInput(f"--device is {name!r}; it must be cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("bench found no GPU here; with --device cpu it times the torch backend at small shapes")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def _names(option: str, text: str, known: tuple[str, ...] = (), *, all_: tuple[str, ...] = (), parsed: bool = False) -> list[str]:
    """The comma-separated names of an option, each known or a shape that parses; 'all' stands for all of them."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise BadInput(f"--{option} is empty; it must name at least one")
    if names == ["all"]:
        return list(all_ or known)
    for name in names:
        if parsed:
            with refusals():
                Shape.parse(name)
        elif name not in known:
            raise BadInput(f"--{option} names {name!r}; it must be among " + ", ".join(known))
    return names


def _ours(text: str, where: torch.device) -> list[Implementation]:
    if text == "auto":
        return [our(name) for name in (("hopper", "portable") if where.type == "cuda" else ("torch",))]
    return [our(name) for name in _names("backends", text, backends.NAMES)]


def _peers(text: str, where: torch.device) -> list[Implementation]:
    if text == "none" or (text == "auto" and where.type == "cpu"):
        return []
    if text == "auto":
        return [foreign(peer) for peer in installed()]
    chosen = []
    for part in text.split(","):
        name, _, limits = part.strip().partition("@")
        _names("peers", name, tuple(PEERS))
        peer = PEERS[name]
        if peer.version is None:
            raise BadInput(f"--peers names {name!r}, which is not installed here (package {peer.package})")
        only = tuple(_names("peers", limits.replace("+", ","), parsed=True)) if limits else None
        chosen.append(foreign(peer, only))
    return chosen


def _timed(
    console: Console, cells: list[Shape], regimes: list[str], gates: list[str], impls: list[Implementation], where: torch.device,
    report: dict[str, object], host: bool, limit: float | None, asked: int,
) -> list[Row]:  # fmt: skip
    """Rows of the whole run, the table of each shape printed when its last row is there."""
    from openkda.bandwidth import copy_bandwidth

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.monotonic()
    rows: list[Row] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("copy bandwidth", total=asked)
        bandwidth = copy_bandwidth(where)
        report["copy_bandwidth_tbps"] = bandwidth / 1e12
        console.print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, read and written")
        out_of_time = lambda: limit is not None and time.monotonic() - started > limit
        for row in run(cells, regimes, gates, impls, where, bandwidth, split_host=host, out_of_time=out_of_time):
            if rows and rows[-1].shape != row.shape:
                console.print(_table(rows, rows[-1].shape, host))
            rows.append(row)
            progress.update(task, advance=1, description=f"{row.shape} {row.gate} {row.regime} {row.impl}")
        if rows:
            console.print(_table(rows, rows[-1].shape, host))
    return rows


def _header(now: datetime, where: torch.device, impls: list[Implementation], commit: str | None) -> dict[str, object]:
    """Where, when and of what the numbers are."""
    packages = {"openkda": "openkda", "torch": "torch", "triton": "triton"}
    packages |= {impl.name: PEERS[impl.name].package for impl in impls if not impl.ours}
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name, package in packages.items():
        try:
            versions[name] = version(package)
        except PackageNotFoundError:
            versions[name] = None
    cuda = where.type == "cuda"
    properties = torch.cuda.get_device_properties(where) if cuda else None
    here = Path(__file__).resolve().parent
    changes = _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no")
    return dict(
        schema=SCHEMA,
        date=now.isoformat(timespec="seconds"),
        command="openkda " + shlex.join(sys.argv[1:]),
        commit=_output("git", "-C", str(here), "rev-parse", "HEAD") or commit,
        uncommitted_changes=None if changes is None else bool(changes),
        device=properties.name if cuda else platform.processor() or platform.machine(),
        multiprocessors=properties.multi_processor_count if cuda else None,
        l2_bytes=properties.L2_cache_size if cuda else None,
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        cuda=torch.version.cuda,
        threads=torch.get_num_threads(),
        versions=versions,
    )


def _output(*command: str) -> str | None:
    """First line a program prints, None where there is no such program or it fails; '' when it prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.splitlines() or [""])[0].strip() if done.returncode == 0 else None


def _headline(report: dict[str, object]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    return f"{report['device']}, driver {report['driver']}, {versions}" if report["driver"] else f"{report['device']}, {versions}"


def _plain(row: Row) -> dict[str, object]:
    return asdict(row) | dict(over_floor=row.over_floor)


def speedup(row: Row, rows: list[Row]) -> float | None:
    """Time of the fastest peer in the row's cell over the row's time, by CUDA graph; None for a peer's row or without peers."""
    cell = (row.shape, row.gate, row.regime)
    peers = [r.graph_ms for r in rows if not r.ours and r.graph_ms and (r.shape, r.gate, r.regime) == cell]
    return min(peers) / row.graph_ms if row.ours and row.graph_ms and peers else None


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(rows: list[Row], shape: str, host: bool) -> Table:
    """The rows of one shape that have times."""
    rows = [row for row in rows if row.shape == shape]
    head = rows[0]
    title = f"{shape}: {head.tokens} tokens in {head.sequences} sequence{'s' * (head.sequences > 1)}, floor {head.floor_ms:.4f} ms"
    table = Table(title=title, title_justify="left")
    table.add_column("gate")
    table.add_column("regime")
    table.add_column("implementation")
    numbers = ["graph ms", "cold ms", "eager ms", "host µs", "first s", "/ floor", "vs peers", "err o", "err state", "same bits"]
    for name in numbers + (["checks + choice + launches µs"] if host else []):
        table.add_column(name, justify="right")
    previous = None
    for row in rows:
        if row.error is not None:
            continue
        if previous not in (None, (row.gate, row.regime)):
            table.add_section()
        previous = (row.gate, row.regime)
        faster = speedup(row, rows)
        values = [
            row.gate, row.regime, row.impl, _cell(row.graph_ms, ".4f"), _cell(row.cold_ms, ".4f"), _cell(row.eager_ms, ".4f"),
            _cell(row.host_us, ".0f"), _cell(row.first_s, ".2f"), _cell(row.over_floor, ".2f"),
            "" if faster is None else f"{faster:.2f}x", _cell(row.err_o, ".2e"), _cell(row.err_state, ".2e"),
            {True: "yes", False: "[red]no[/red]", None: ""}[row.bit_equal],
        ]  # fmt: skip
        if host:
            values.append(" + ".join(f"{t:.0f}" for t in row.host_split_us.values()) if row.host_split_us else "")
        table.add_row(*values, style="bold" if row.ours else None)
    return table


def _print_reasons(console: Console, rows: list[Row]) -> None:
    """Why rows have no times, each reason once."""
    for (impl, reason), count in Counter((row.impl, row.error) for row in rows if row.error is not None).items():
        console.print(f"{impl} has no times in {count} cell{'s' * (count > 1)}: {reason}", markup=False)
