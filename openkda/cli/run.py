"""`openkda run`: KDA on recorded tensors with the best backend, timed, checked against the token recurrence, written and drawn."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import openkda
from openkda import backends, testing
from openkda.cli import recording as files
from openkda.cli.errors import BadInput, refusals
from openkda.cli.recording import Recording
from openkda.ops import chunk_kda
from openkda.problem import Problem

SHOWN_PROVENANCE = ("text", "layer", "training_loss", "device", "date")  # all of it goes into the results' metadata
TIMED_RUNS, TIMED_SECONDS = 20, 2.0  # the median of up to 20 runs, as many as fit in 2 seconds, one at least


@dataclass(frozen=True)
class Measurement:
    """Results and cost of one call."""

    o: torch.Tensor
    final_state: torch.Tensor
    seconds: float  # median
    runs: int
    memory: int  # bytes: GPU memory beyond the inputs at the peak, or on a CPU the process's own peak


@dataclass(frozen=True)
class Check:
    """One output against the fp64 recurrence, by relative L2 distance."""

    name: str
    error: float
    largest: float  # absolute
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error stays within its tolerance."""
        return self.error <= self.allowed


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress display on stderr, on terminals alone, gone when the work is done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


def measure(call: dict[str, object], backend: str, bar: Progress) -> Measurement:
    """Run chunk_kda once to warm up, then time it."""
    device = call["q"].device
    on_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    task = bar.add_task(f"{backend} backend, runs", total=1 + TIMED_RUNS)
    base = 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
    o, final_state = chunk_kda(**call, backend=backend)
    wait()
    bar.advance(task)
    seconds: list[float] = []
    while not seconds or (len(seconds) < TIMED_RUNS and sum(seconds) < TIMED_SECONDS):
        start = time.perf_counter()
        chunk_kda(**call, backend=backend)
        wait()
        seconds.append(time.perf_counter() - start)
        bar.advance(task)
    bar.update(task, visible=False)
    memory = torch.cuda.max_memory_allocated() - base if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Measurement(o, final_state, statistics.median(seconds), len(seconds), memory)


def reference(recorded: Recording, device: torch.device, bar: Progress) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(o, final state) by the fp64 recurrence, and by the chunk form in torch at the recording's dtype."""
    problem, inputs = recorded.described(device)
    task = bar.add_task("token recurrence in fp64, tokens", total=problem.B * problem.T)
    exact = testing.oracle(problem, inputs, lambda tokens: bar.advance(task, tokens))
    bar.update(task, visible=False)
    return exact, testing.rounded_chunk(problem, inputs)


def compare(measured: Measurement, exact: tuple[torch.Tensor, ...], twin: tuple[torch.Tensor, ...]) -> list[Check]:
    """o and final_state against the recurrence; allowed is the tolerance that openkda.testing.assert_close earns."""
    checks = []
    for name, actual, true, rounded in zip(("o", "final_state"), (measured.o, measured.final_state), exact, twin):
        largest = (actual.double() - true).abs().max().item() if true.numel() else 0.0
        allowed = testing.allowed_error(rounded, true)
        checks.append(Check(name, testing.relative_error(actual, true), largest, allowed))
    return checks


def run(
    path: Path, *, out: Path | None, backend: str | None, device: torch.device, check: bool, plot: Path | None, checkpoint: Path | None,
    layer: int | None,
) -> bool:  # fmt: skip
    """Run the recording in `path` and report. Returns False when an output is further from the recurrence than it may be.

    checkpoint, layer: `path` holds hidden states, which pass through the projections of that layer first.
    out: file for o and final_state, default NAME_out.safetensors in the working directory.
    plot: a directory for one picture per subject, or a .png file for all in one.
    Raises BadInput for anything in the file or the options that cannot be used."""
    if (checkpoint is None) != (layer is None):
        raise BadInput("--checkpoint and --layer belong together; give both or neither")
    recorded = files.read(path) if checkpoint is None else files.through_layer(path, checkpoint, layer)
    problem, _ = recorded.described(device)
    with refusals():
        name = backends.choose(problem, backend)
    out = Path(f"{path.stem}_out.safetensors") if out is None else out
    if plot is not None and not problem.B * problem.T:
        raise BadInput(f"{path} holds no token, so there is nothing to draw: leave --plot out")
    subjects = ("decay", "state", "error") if check else ("decay", "state")
    pictures = picture_files(plot, path.stem, subjects)
    files.distinct({"the recording": path, "--out": out, **{f"the picture {p.name}": p for p in pictures}})
    call = recorded.call(device)
    checks: list[Check] = []
    with ExitStack() as outputs, torch.no_grad(), progress() as bar:
        partial = outputs.enter_context(files.replacing(out))
        drawn = [outputs.enter_context(files.replacing(target)) for target in pictures]
        measured = measure(call, name, bar)
        exact = twin = None
        if check:
            exact, twin = reference(recorded, device, bar)
            checks = compare(measured, exact, twin)
        if plot is not None:
            from openkda.cli import plots

            shown = dict(zip(drawn, split(subjects, len(drawn))))
            true, rounded = (exact[0], twin[0]) if check else (None, None)
            plots.draw(recorded, problem, call, name, measured.o, true, rounded, shown)
        metadata = {"source": path.name, "backend": name, "openkda": openkda.__version__, **recorded.provenance}
        files.write(partial, {"o": measured.o, "final_state": measured.final_state}, metadata)
    report(Console(), recorded, problem, name, measured, checks, [out, *pictures])
    return all(c.passed for c in checks)


def picture_files(plot: Path | None, stem: str, subjects: tuple[str, ...]) -> list[Path]:
    """The files that --plot asks for: none, the one named, or one per subject in the directory named."""
    if plot is None:
        return []
    if plot.suffix == ".png":
        return [plot]
    if plot.suffix and not plot.is_dir():
        raise BadInput(f"--plot is {plot}; it must be a directory or a .png file")
    return [plot / f"{stem}_{subject}.png" for subject in subjects]


def split(subjects: tuple[str, ...], count: int) -> list[tuple[str, ...]]:
    """Which subjects each of `count` pictures shows."""
    return [subjects] if count == 1 else [(subject,) for subject in subjects]


def report(
    console: Console, recorded: Recording, problem: Problem, backend: str, measured: Measurement, checks: list[Check], written: list[Path]
) -> None:
    """Print what was run, how fast, how exact, and where it went."""
    p = problem
    facts = Table(title=f"Kimi Delta Attention on {recorded.path.name}", show_header=False, title_justify="left")
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    sequences = f"{p.N} sequences in {p.T:,} tokens" if p.varlen else f"B={p.B}, T={p.T:,}"
    facts.add_row("problem", f"{sequences}, H={p.H}, HV={p.HV}, K={p.K}, V={p.V}, {dtype_name(p.dtype)}, gate {gate_name(p)}")
    known = [f"{name.replace('_', ' ')} {recorded.provenance[name]}" for name in SHOWN_PROVENANCE if name in recorded.provenance]
    if known:
        facts.add_row("recording", "; ".join(known))
    facts.add_row("backend", f"{backend} on {device_name(p)}")
    facts.add_row("time", f"{seconds_text(measured.seconds)}, median of {measured.runs} runs")
    facts.add_row("speed", f"{p.B * p.T / measured.seconds:,.0f} tokens/s" if p.B * p.T else "no tokens")
    where = "GPU memory beyond the inputs" if p.device_type == "cuda" else "peak of the whole process"
    facts.add_row("memory", f"{measured.memory / 2**20:,.0f} MiB, {where}")
    console.print(facts)
    if checks:
        errors = Table(title="Against the token recurrence in fp64", title_justify="left")
        for column in ("output", "relative L2 error", "allowed", "largest error", "verdict"):
            errors.add_column(column, justify="left" if column in ("output", "verdict") else "right")
        for c in checks:
            errors.add_row(
                c.name, f"{c.error:.2e}", f"{c.allowed:.2e}", f"{c.largest:.2e}", "[green]ok[/]" if c.passed else "[red]too far[/]"
            )
        console.print(errors)
        console.print("allowed: twice the error of the same chunk algorithm in torch at the recording's dtype", style="dim")
    for path in written:
        console.print(f"wrote {path}", highlight=False)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def gate_name(p: Problem) -> str:
    """The gate in a few words."""
    if p.gate == "none":
        return f"given, promised in [{p.lower_bound:g}, 0)" if p.safe_gate else "given as log decay"
    return p.gate if p.lower_bound is None else f"{p.gate} at {p.lower_bound:g}"


def device_name(p: Problem) -> str:
    """What the call runs on, in words."""
    return torch.cuda.get_device_name() if p.device_type == "cuda" else f"the CPU, {torch.get_num_threads()} threads"


def seconds_text(seconds: float) -> str:
    """A duration in the unit that gives it between 1 and 1000."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
