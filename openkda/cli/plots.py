"""Pictures of a run: how long each channel remembers, how large the state is over time, and where the errors are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, PowerNorm
from matplotlib.figure import Figure

from openkda.cli.errors import BadInput
from openkda.cli.recording import Recording
from openkda.ops import chunk_kda
from openkda.problem import Problem
from openkda.reference import activate_gate

CHUNK = 64
LONGEST = 1e6  # tokens; a channel that forgets more slowly is drawn as this
MAX_LINES = 8  # heads that get a line and a name of their own


@dataclass(frozen=True)
class Run:
    """What the pictures show of a run: the first batch element, all packed sequences."""

    name: str
    problem: Problem
    backend: str
    g: torch.Tensor  # [T, HV, K] fp32, log decay
    bounds: list[int]  # first row of every sequence, and the end of the last
    h: torch.Tensor  # [NT, HV, K, V] fp32, state at the entry of every chunk
    o: torch.Tensor  # [T, HV, V] fp64
    exact: torch.Tensor | None  # [T, HV, V] fp64
    twin: torch.Tensor | None  # [T, HV, V] fp64


def draw(
    recorded: Recording, problem: Problem, call: dict[str, object], backend: str, o: torch.Tensor,
    exact: torch.Tensor | None, twin: torch.Tensor | None, pictures: dict[Path, tuple[str, ...]],
) -> None:  # fmt: skip
    """Draw each of `pictures`: a file and the subjects it shows, of "decay", "state", "error". o, exact, twin: [B, T, HV, V]."""
    first = lambda x: None if x is None else x[0].double().cpu()
    g = call["g"][0].float()
    if problem.gate != "none":
        A_log, dt_bias = (call.get(name) for name in ("A_log", "dt_bias"))
        A_log = None if A_log is None else A_log.reshape(problem.HV)
        dt_bias = None if dt_bias is None else dt_bias.reshape(problem.HV, problem.K)
        g = activate_gate(g, A_log, dt_bias, problem.lower_bound)
    states = chunk_kda(**call, return_intermediate_states=True, chunk_size=CHUNK)[2]  # not every backend writes them: the best that does
    states = states.mT if problem.state_v_first else states
    bounds = call["cu_seqlens"].tolist() if problem.varlen else [0, problem.T]
    run = Run(recorded.path.name, problem, backend, g.cpu(), bounds, states[0].float().cpu(), first(o), first(exact), first(twin))
    for path, subjects in pictures.items():
        figure = Figure(figsize=(9, 6.4 * len(subjects)), layout="constrained", dpi=110)
        parts = figure.subfigures(len(subjects), 1, squeeze=False)[:, 0]
        for part, subject in zip(parts, subjects):
            curves, field = part.subplots(2, 1)
            {"decay": draw_decay, "state": draw_state, "error": draw_error}[subject](run, curves, field)
        save(figure, path)


def save(figure: Figure, path: Path, dpi: float | None = None) -> None:
    """Write the figure as PNG, by default at its own dots per inch. BadInput where the disk refuses."""
    try:
        figure.savefig(path, dpi=dpi or "figure", format="png")
    except OSError as error:
        raise BadInput(f"the picture cannot be written: {error.strerror}") from error


def draw_decay(run: Run, curves: Axes, field: Axes) -> None:
    """Half-life of every channel: sorted within each head, and as a map."""
    rate = -run.g.mean(0)  # [HV, K] nats per token
    life = (math.log(2.0) / rate.clamp(min=math.log(2.0) / LONGEST)).numpy()
    for head, colour in heads(run.problem.HV):
        curves.plot(sorted(life[head]), color=colour, label=f"head {head}", lw=1.4)
    curves.axhline(CHUNK, color="0.6", lw=0.8, ls="--")
    curves.annotate(f"one chunk, {CHUNK} tokens", (0, CHUNK), xytext=(2, 2), textcoords="offset points", fontsize=8, color="0.4")
    curves.set(yscale="log", xlabel="key channel, sorted by half-life", ylabel="half-life (tokens)", xlim=(-0.5, life.shape[1] - 0.5))
    curves.set_title(f"How long the state remembers: mean decay over {run.g.shape[0]:,} tokens, {run.name}", fontsize=10)
    legend(curves, run.problem.HV)
    low, high = max(life.min(), 1e-3), max(life.max(), life.min() * 1.01, 2e-3)
    image = field.imshow(life, aspect="auto", interpolation="nearest", norm=LogNorm(low, high), cmap="viridis")
    field.set(xlabel="key channel", ylabel="value head")
    whole_ticks(field, run.problem.HV)
    field.figure.colorbar(image, ax=field, label="half-life (tokens)", pad=0.01)


def draw_state(run: Run, curves: Axes, field: Axes) -> None:
    """Frobenius norm of the state at the entry of every chunk, by head, and of its rows, by key channel."""
    starts = [t for a, b in pairwise(run.bounds) for t in range(a, b, CHUNK)]
    h = run.h[: len(starts)]  # a ragged batch's table may have unused rows
    norms = h.flatten(2).norm(dim=-1)  # [NT, HV]
    for head, colour in heads(run.problem.HV):
        curves.plot(starts, norms[:, head].numpy(), color=colour, label=f"head {head}", lw=1.4, marker=".", ms=4)
    mark_sequences(run, curves)
    curves.set(xlabel="token", ylabel="norm of the state", ylim=(0, None), xlim=(0, max(run.bounds[-1], 1)))
    curves.set_title(f"State at the entry of every chunk of {CHUNK} tokens, {run.name}", fontsize=10)
    legend(curves, run.problem.HV)
    rows = h.norm(dim=-1).flatten(1).T  # [HV * K, NT]
    K, HV = run.problem.K, run.problem.HV
    image = field.pcolormesh([*starts, run.bounds[-1]], range(HV * K + 1), rows.numpy(), cmap="magma", norm=PowerNorm(0.5), rasterized=True)
    field.invert_yaxis()
    for head in range(1, HV):
        field.axhline(head * K, color="white", lw=0.6)
    field.set(xlabel="token", ylabel="value head, its key channels downwards")
    shown = range(0, HV, max(1, HV // MAX_LINES))
    field.set_yticks([head * K + K / 2 for head in shown], [str(head) for head in shown])
    field.figure.colorbar(image, ax=field, label="norm of one key channel's row", pad=0.01)


def draw_error(run: Run, curves: Axes, field: Axes) -> None:
    """Relative error of o by token, against the fp64 recurrence, beside the same algorithm in torch."""
    size = run.exact.flatten(1).norm(dim=-1).clamp(min=1e-30)  # [T]
    rounded = str(run.problem.dtype).removeprefix("torch.")
    series = ((run.twin, f"chunk form in torch at {rounded}", "0.65"), (run.o, f"{run.backend} backend", "tab:blue"))
    for o, label, colour in series:
        error = (o - run.exact).flatten(1).norm(dim=-1) / size
        curves.plot(error.clamp(min=1e-9).numpy(), ".", ms=2.5, color=colour, label=label)
    mark_sequences(run, curves)
    curves.set(yscale="log", xlabel="token", ylabel="relative error of o", xlim=(0, max(run.bounds[-1], 1)))
    curves.set_title(f"Error by token against the fp64 recurrence, {run.name}", fontsize=10)
    curves.legend(fontsize=8, markerscale=4)
    by_head = (run.o - run.exact).norm(dim=-1) / run.exact.norm(dim=-1).clamp(min=1e-30)  # [T, HV]
    high = max(by_head.max().item(), 1e-8)
    norm = LogNorm(max(by_head.min().item(), high / 1e3), high * 1.01, clip=True)
    extent = (0, by_head.shape[0], by_head.shape[1] - 0.5, -0.5)
    image = field.imshow(by_head.T.numpy(), aspect="auto", interpolation="nearest", norm=norm, cmap="inferno", extent=extent)
    field.set(xlabel="token", ylabel="value head")
    whole_ticks(field, run.problem.HV)
    field.figure.colorbar(image, ax=field, label="relative error of o", pad=0.01)


def heads(count: int) -> list[tuple[int, tuple[float, ...] | str]]:
    """Every head with its colour: distinct ones for a few heads, a ramp for many."""
    if count <= MAX_LINES:
        return [(head, f"C{head}") for head in range(count)]
    return [(head, colormaps["turbo"](head / (count - 1))) for head in range(count)]


def legend(axes: Axes, count: int) -> None:
    """A legend of `count` heads, or one line about their colours where they are many."""
    if count <= MAX_LINES:
        axes.legend(fontsize=8, ncols=min(count, 4))
    else:
        axes.annotate(f"{count} value heads, blue to red", (0.99, 0.02), xycoords="axes fraction", ha="right", fontsize=8, color="0.4")


def whole_ticks(axes: Axes, count: int) -> None:
    """At most MAX_LINES ticks at whole numbers below `count`."""
    axes.set_yticks(range(0, count, max(1, count // MAX_LINES)))


def mark_sequences(run: Run, axes: Axes) -> None:
    """A line where a packed sequence begins."""
    for start in run.bounds[1:-1]:
        axes.axvline(start, color="0.8", lw=0.7, zorder=0)
