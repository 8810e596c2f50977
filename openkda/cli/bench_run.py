"""The work of `openkda bench`: options to cells and implementations, then table, dated JSON and plot. The clocks are in benchmarking.py."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from openkda import __version__
from openkda.benchmarking import FORWARD, GATES, Benchmark, Implementation, Row, Shape
from openkda.benchmarking_training import TRAINING
from openkda.cli.errors import BadInput, refusals
from openkda.cli.recording import replacing
from openkda.peers import PEERS, installed
from openkda.testing import REGIMES
from openkda.timing import copy_bandwidth

SCHEMA = 1  # of the JSON file; benchmarks/README.md describes it
WIDTH = 132  # columns that the table needs


def run_bench(
    *, training: bool, shapes: str, regimes: str, gates: str, ours: str, peers: str, device: str, json_path: Path | None,
    plot_path: Path | None, host: bool, limit: float | None, commit: str | None,
) -> None:  # fmt: skip
    """Check every option, time, show, write. BadInput for an option that cannot be used.

    The JSON file is written anew, whole, after every row, so that a run that is cut short keeps what it measured; the plot at the end."""
    where = _device(device)
    if limit is not None and not limit >= 0:
        raise BadInput(f"--limit is {limit:g}; it must be a number of seconds, at least 0")
    if plot_path is not None and plot_path.suffix != ".png":
        raise BadInput(f"--plot is {plot_path}; it must be a .png file")
    what = TRAINING if training else FORWARD
    names = _names("shapes", shapes, all_=what.cpu_shapes if where.type == "cpu" else what.gpu_shapes, parsed=True)
    cells = [Shape.parse(name) for name in names], _names("regimes", regimes, REGIMES), _names("gates", gates, GATES)
    impls = _ours(what, ours, where) + _peers(what, peers, where)
    now = datetime.now(timezone.utc)
    if json_path is not None and (json_path.is_dir() or json_path.suffix != ".json"):
        json_path = json_path / f"{now:%Y-%m-%d}-{what.name}.json"
    console = Console(width=max(WIDTH, Console().width))
    with ExitStack() as outputs:
        json_file = outputs.enter_context(replacing(json_path)) if json_path else None
        plot_file = outputs.enter_context(replacing(plot_path)) if plot_path else None
        report = _header(now, where, impls, commit) | dict(benchmark=what.name)
        console.print(_headline(report))
        asked = prod(map(len, cells)) * len(impls)
        report["rows_asked"] = asked

        def save(rows: list[Row], path: Path) -> None:
            report.update(seconds=round(time.time() - now.timestamp(), 1), rows=[_plain(row) for row in rows])
            try:
                path.write_text(json.dumps(report, indent=1) + "\n")
            except OSError as error:
                raise BadInput(f"the results cannot be written: {error.strerror}") from error

        def keep(rows: list[Row]) -> None:
            if json_path:
                with replacing(json_path) as part:
                    save(rows, part)

        rows = _timed(console, what, cells, impls, where, report, host, limit, asked, keep)
        _print_reasons(console, rows)
        if len(rows) < asked:
            console.print(f"{asked - len(rows)} of {asked} rows were not started within {limit:g} seconds.")
        if json_file:
            save(rows, json_file)
        if plot_file:
            from openkda.cli.bench_plot import draw

            draw(rows, report, plot_file)
    for path in filter(None, (json_path, plot_path)):
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


def _ours(what: Benchmark, text: str, where: torch.device) -> list[Implementation]:
    if text == "auto":
        return [what.ours(name) for name in (what.gpu_names if where.type == "cuda" else ("torch",))]
    return [what.ours(name) for name in _names("backends", text, what.names)]


def _peers(what: Benchmark, text: str, where: torch.device) -> list[Implementation]:
    if text == "none" or (text == "auto" and where.type == "cpu"):
        return []
    if text == "auto":
        return [what.foreign(peer, None) for peer in installed()]
    chosen = []
    for part in text.split(","):
        name, _, limits = part.strip().partition("@")
        _names("peers", name, tuple(PEERS))
        peer = PEERS[name]
        if peer.version is None:
            raise BadInput(f"--peers names {name!r}, which is not installed here (package {peer.package})")
        only = tuple(_names("peers", limits.replace("+", ","), parsed=True)) if limits else None
        chosen.append(what.foreign(peer, only))
    return chosen


def _timed(
    console: Console, what: Benchmark, cells: tuple[list[Shape], list[str], list[str]], impls: list[Implementation], where: torch.device,
    report: dict[str, object], host: bool, limit: float | None, asked: int, keep: Callable[[list[Row]], None],
) -> list[Row]:  # fmt: skip
    """Rows of the whole run, handed to `keep` after each; the table of each shape printed when its last row is there."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.monotonic()
    rows: list[Row] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("copy bandwidth", total=asked)
        bandwidth = copy_bandwidth(where)
        report["copy_bandwidth_tbps"] = bandwidth / 1e12
        console.print(f"copy bandwidth {bandwidth / 1e12:.3g} TB/s, read plus written")
        console.print(
            "floor x: time over the memory floor, inputs cold where that is measured; peers x: fastest peer's graph time over ours"
        )
        out_of_time = lambda: limit is not None and time.monotonic() - started > limit
        for row in what.run(*cells, impls, where, bandwidth, split_host=host, out_of_time=out_of_time):
            if rows and rows[-1].shape != row.shape:
                console.print(_table(rows, rows[-1].shape))
            rows.append(row)
            keep(rows)
            progress.update(task, advance=1, description=f"{row.shape} {row.gate} {row.regime} {row.impl}")
        if rows:
            console.print(_table(rows, rows[-1].shape))
    return rows


def _header(now: datetime, where: torch.device, impls: list[Implementation], commit: str | None) -> dict[str, object]:
    """Where, when and of what the numbers are."""
    packages = {"torch": "torch", "triton": "triton"}
    packages |= {impl.name: PEERS[impl.name].package for impl in impls if not impl.ours}
    versions: dict[str, str | None] = {"openkda": __version__, "python": platform.python_version()}
    for name, package in packages.items():
        try:
            versions[name] = version(package)
        except PackageNotFoundError:
            versions[name] = None
    cuda = where.type == "cuda"
    properties = torch.cuda.get_device_properties(where) if cuda else None
    here = Path(__file__).resolve().parent
    changes = None if commit else _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no")
    return dict(
        schema=SCHEMA,
        date=now.isoformat(timespec="seconds"),
        command="openkda " + shlex.join(sys.argv[1:]),
        commit=commit or _output("git", "-C", str(here), "rev-parse", "HEAD"),
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


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 10 else f"{value:.1f}"


def _largest(errors: dict[str, float] | None) -> str:
    if not errors:
        return ""
    name = max(errors, key=errors.get)
    return f"{errors[name]:.2e} {name}"


COLUMNS = {  # of the table: title -> text of a row, given its speedup over the fastest peer
    "gate": lambda row, faster: row.gate,
    "regime": lambda row, faster: row.regime,
    "what": lambda row, faster: row.impl,
    "graph\nms": lambda row, faster: _ms(row.graph_ms),
    "cold\nms": lambda row, faster: _ms(row.cold_ms),
    "eager\nms": lambda row, faster: _ms(row.eager_ms),
    "forward\nms": lambda row, faster: _ms(row.forward_ms),
    "host\nµs": lambda row, faster: "" if row.host_us is None else f"{row.host_us:.0f}",
    "checks+choice\n+launch µs": lambda row, faster: "+".join(f"{us:.0f}" for us in (row.host_split_us or {}).values()),
    "first\ns": lambda row, faster: f"{row.first_s:.2f}",
    "MiB": lambda row, faster: "" if row.peak_mib is None else f"{row.peak_mib:.0f}",
    "floor\nx": lambda row, faster: f"{row.over_floor:.3g}",
    "peers\nx": lambda row, faster: "" if faster is None else f"{faster:.2f}",
    "error\nof o": lambda row, faster: "" if row.err_o is None else f"{row.err_o:.2e}",
    "error\nof state": lambda row, faster: "" if row.err_state is None else f"{row.err_state:.2e}",
    "largest error\nof gradients": lambda row, faster: _largest(row.err_grads),
    "gradients\nby": lambda row, faster: row.gradients_by or "",
    "same\nbits": lambda row, faster: "yes" if row.bit_equal else "[red]no[/red]",
}


def _table(rows: list[Row], shape: str) -> Table:
    """The rows of one shape that have times; a column that would be empty is left out."""
    rows = [row for row in rows if row.shape == shape]
    head = rows[0]
    title = f"{shape}: {head.tokens} tokens in {head.sequences} sequence{'s' * (head.sequences > 1)}, floor {head.floor_ms:.4f} ms"
    rows = [row for row in rows if row.error is None]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = {name: [text(row, speedup(row, rows)) for row in rows] for name, text in COLUMNS.items()}
    columns = {name: texts for name, texts in columns.items() if any(texts)}
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position < 3 else "right", no_wrap=True)
    for number, row in enumerate(rows):
        last = number + 1 == len(rows) or (row.gate, row.regime) != (rows[number + 1].gate, rows[number + 1].regime)
        table.add_row(*(texts[number] for texts in columns.values()), style="bold" if row.ours else None, end_section=last)
    return table


def _print_reasons(console: Console, rows: list[Row]) -> None:
    """Why rows have no times, each reason once."""
    for (impl, reason), count in Counter((row.impl, row.error) for row in rows if row.error is not None).items():
        console.print(f"{impl} has no times in {count} cell{'s' * (count > 1)}: {reason}", markup=False)
