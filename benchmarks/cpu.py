"""The CPU's path: the torch backend beside the token recurrence, on the same fp32 tensors in one run, and its peak memory at long T.

    python benchmarks/cpu.py --json benchmarks/results

Forward without gradients, B = 1, K = V = 128, inputs normalised and activated before the clock starts, since the recurrence takes no
others. Rounds alternate between the two, so that a busy machine slows both; times are minima and medians over the rounds. Memory is the
peak of resident memory (VmHWM) of a process that makes the inputs and one call, beside that of one that makes the inputs alone.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import openkda
from openkda import chunk_kda, naive_recurrent_kda
from openkda.testing import make_case, relative_error

D = 128
TENSORS = ("q", "k", "v", "g", "beta")
CALLS = 3  # of the torch backend per call of the recurrence in a round


def arguments(regime: str, T: int, H: int, bounded: bool) -> dict[str, object]:
    """Keyword arguments of chunk_kda, activated."""
    return make_case(regime, T=T, H=H, K=D, raw=False, bounded=bounded, qk_l2norm=False, initial_state=False).args


def seconds(call, *args: object, **options: object) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    o, _ = call(*args, **options)
    return time.perf_counter() - start, o


def compare(regime: str, T: int, H: int, bounded: bool, rounds: int) -> dict[str, object]:
    """One row: times of both and the distance between their outputs."""
    options = arguments(regime, T, H, bounded)
    tensors = [options[name] for name in TENSORS]
    recurrence, torch_backend = [], []
    with torch.no_grad():
        chunk_kda(**options, backend="torch")
        for _ in range(rounds):
            took, reference = seconds(naive_recurrent_kda, *tensors)
            recurrence.append(took)
            for _ in range(CALLS):
                took, o = seconds(chunk_kda, **options, backend="torch")
                torch_backend.append(took)
    row: dict[str, object] = dict(
        regime=regime, gate="bounded" if bounded else "softplus", T=T, H=H, difference=relative_error(o, reference)
    )
    for name, times in (("recurrence", recurrence), ("torch", torch_backend)):
        row[f"{name}_ms"], row[f"{name}_median_ms"] = 1e3 * min(times), 1e3 * statistics.median(times)
    row["ratio"] = row["recurrence_ms"] / row["torch_ms"]
    row["ratio_of_medians"] = row["recurrence_median_ms"] / row["torch_median_ms"]
    return row


def resident_mib() -> float:
    """Peak resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def peak(T: int, H: int, call: bool) -> float:
    """resident_mib of a fresh process that makes the inputs and, with `call`, runs the torch backend once."""
    run = f"chunk_kda(**cpu.arguments('init', {T}, {H}, True), backend='torch')" if call else f"cpu.arguments('init', {T}, {H}, True)"
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import cpu; from openkda import chunk_kda; {run}"
    result = subprocess.run([sys.executable, "-c", f"{code}; print(cpu.resident_mib())"], capture_output=True, text=True, check=True)
    return float(result.stdout)


def main(
    t: int = typer.Option(2048, "-T", help="tokens"),
    h: int = typer.Option(4, "-H", help="heads"),
    rounds: int = typer.Option(5, help="rounds of one recurrence and three calls of the torch backend"),
    threads: int = typer.Option(2, help="torch threads"),
    long: int = typer.Option(16384, help="tokens of the memory measurement; 0: none"),
    json_dir: Path | None = typer.Option(None, "--json", help="write <date>-cpu.json into this directory"),  # noqa: B008
    commit: str | None = typer.Option(None, help="commit to record where the sources have no git history beside them"),
) -> None:
    """Time the torch backend beside the token recurrence on this CPU."""
    torch.set_num_threads(threads)
    cases = [(regime, True) for regime in ("random", "init", "trained")] + [("mixed", False)]
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("timing", total=len(cases) + 2)
        rows = []
        for regime, bounded in cases:
            rows.append(compare(regime, t, h, bounded, rounds))
            progress.advance(task)
        memory = {}
        if long:
            memory = dict(T=long, H=h, inputs_mib=peak(long, h, False), with_call_mib=peak(long, h, True))
        progress.update(task, completed=len(cases) + 2)
    table = Table(title=f"B=1 T={t} H={h} D={D} fp32, {threads} threads: best of {rounds} rounds")
    for name in ("regime", "gate", "recurrence ms", "torch ms", "ratio", "ratio of medians", "difference"):
        table.add_column(name, justify="left" if name in ("regime", "gate") else "right")
    for row in rows:
        cells = [f"{row[name]:.1f}" for name in ("recurrence_ms", "torch_ms", "ratio", "ratio_of_medians")]
        table.add_row(row["regime"], row["gate"], *cells, f"{row['difference']:.1e}")
    console.print(table)
    if memory:
        console.print(
            f"T={long} H={h}: peak memory {memory['with_call_mib']:.0f} MiB, of which the inputs' process {memory['inputs_mib']:.0f}"
        )
    if json_dir is not None:
        date = datetime.date.today().isoformat()
        processor = next(
            (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
        )
        git = lambda *args: subprocess.run(["git", *args], capture_output=True, text=True).stdout.strip()
        record = dict(
            benchmark="cpu", date=date, device=f"{processor} {platform.machine()}, {threads} threads",
            commit=commit or git("rev-parse", "HEAD"),
            uncommitted_changes=None if commit else bool(git("status", "--porcelain", "--untracked-files=no", "--", "openkda")),
            load_average=os.getloadavg(),  # of the machine after the run: other work stretches every wait between two threads
            real_time_priority=os.sched_getscheduler(0) == os.SCHED_FIFO,
            versions=dict(openkda=openkda.__version__, torch=torch.__version__, python=platform.python_version()),
            command=" ".join(["python", *sys.argv]), processors=sorted(os.sched_getaffinity(0)), rows=rows, memory=memory,
        )  # fmt: skip
        json_dir.mkdir(parents=True, exist_ok=True)
        (json_dir / f"{date}-cpu.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
