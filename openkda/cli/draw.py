"""The picture of `openkda explain --draw`: how programs map to tokens, heads, value columns and sub-blocks."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from openkda.cli.explain import Device, sizes
from openkda.cli.pipeline import BLOCK, Mapping, mapping
from openkda.problem import Problem

MAX_CHUNKS, MAX_HEADS, MAX_ROWS = 16, 4, 8
CELL, OTHER, TAIL = "#8ecae6", "#cfe8f3", "#ffd28f"
LEVELS = {1: "#fde0c5", 2: "#facba6", 4: "#f8b58b", 8: "#f2855d", 16: "#ca4f6b", 32: "#7a2f7f"}


def draw_mapping(p: Problem, backend: str, device: Device, lengths: tuple[int, ...] | None, path: Path) -> None:
    """Draw the map of the forward on `backend` to the PNG file `path`."""
    m = mapping(p, backend)
    figure = Figure(figsize=(11, 9), layout="constrained", dpi=110)
    figure.suptitle(f"{backend} backend on {device}\n{sizes(p)}", fontsize=10)
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.15), width_ratios=(1.25, 1))
    draw_chunks(figure.add_subplot(grid[0, :]), p, m, lengths)
    draw_scan(figure.add_subplot(grid[1, 0]), p, m, lengths)
    draw_scores(figure.add_subplot(grid[1, 1]), m)
    figure.savefig(path, format="png")


def chunk_cells(p: Problem, chunk: int, lengths: tuple[int, ...] | None) -> list[tuple[int, int, int]]:
    """(sequence, first row, end row) of every chunk on the flat token axis."""
    bounds = [0, *accumulate(lengths if lengths is not None else [p.T] * p.B)]
    return [(n, row, min(row + chunk, b)) for n, (a, b) in enumerate(pairwise(bounds)) for row in range(a, b, chunk)]


def draw_chunks(axes: Axes, p: Problem, m: Mapping, lengths: tuple[int, ...] | None) -> None:
    """The chunk-parallel stages: one cell per chunk and value head."""
    cells = chunk_cells(p, m.chunk, lengths)
    shown, heads = cells[:MAX_CHUNKS], min(p.HV, MAX_HEADS)
    last = shown[-1][2] if shown else 1
    first_rows: dict[int, int] = {}
    for n, first, end in shown:
        first_rows.setdefault(n, first)
        for head in range(heads):
            colour = TAIL if end - first < m.chunk else (CELL, OTHER)[n % 2]
            axes.add_patch(Rectangle((first, head + 0.06), end - first, 0.88, facecolor=colour, edgecolor="0.3", lw=0.8))
    for (n, first), after in zip(first_rows.items(), [*list(first_rows.values())[1:], last]):
        if after - first > last / 12:  # else there is no room for its name
            axes.annotate(f"sequence {n}", (first, -0.08), fontsize=8)
    axes.set(xlim=(0, last), ylim=(heads, -0.3), xlabel="token (rows of the flattened batch)", ylabel="value head")
    axes.set_yticks([head + 0.5 for head in range(heads)], [str(head) for head in range(heads)])
    partial = [f"{n} of {all_} {what}" for n, all_, what in ((len(shown), len(cells), "steps"), (heads, p.HV, "heads")) if n < all_]
    rest = "; shown: " + " and ".join(partial) if partial else ""
    axes.set_title(f"Steps of {m.chunk} tokens: {len(cells)} x {p.HV} heads; {m.chunk_programs}{rest}", fontsize=9, loc="left")
    handles = [
        Patch(facecolor=CELL, edgecolor="0.3", label=f"{m.chunk} tokens"),
        Patch(facecolor=TAIL, edgecolor="0.3", label="shorter tail"),
    ]
    axes.legend(handles=handles, fontsize=8, loc="lower right", ncols=2)


def draw_scan(axes: Axes, p: Problem, m: Mapping, lengths: tuple[int, ...] | None) -> None:
    """The serial pass: one row per sequence, head and block of value columns; time runs to the right."""
    blocks = -(-p.V // m.columns) if p.V else 0
    per_sequence: dict[int, int] = {}
    for n, _, _ in chunk_cells(p, m.chunk, lengths):
        per_sequence[n] = per_sequence.get(n, 0) + 1
    rows = [(n, head, block) for n in range(p.N) for head in range(p.HV) for block in range(blocks)]
    shown = rows[:MAX_ROWS]
    for y, (n, _, _) in enumerate(shown):
        count = min(per_sequence.get(n, 0), 6)
        for c in range(count):
            axes.add_patch(Rectangle((c + 0.12, y + 0.2), 0.7, 0.6, facecolor=(CELL, OTHER)[n % 2], edgecolor="0.3", lw=0.8))
            axes.annotate("", (c + 1.12, y + 0.5), (c + 0.82, y + 0.5), arrowprops={"arrowstyle": "->", "lw": 1})
        if per_sequence.get(n, 0) > count:
            axes.annotate("...", (count + 0.15, y + 0.58), fontsize=9)
    widest = min(max(per_sequence.values(), default=1), 6)
    axes.set(xlim=(0, widest + 0.6), ylim=(max(len(shown), 1), 0), xlabel="step of the sequence, in turn")
    axes.set_xticks([c + 0.47 for c in range(widest)], [str(c) for c in range(widest)])
    columns = [f"{b * m.columns}..{min(p.V, (b + 1) * m.columns) - 1}" for _, _, b in shown]
    labels = [f"seq {n}, head {head}, V {c}" for (n, head, _), c in zip(shown, columns)]
    axes.set_yticks([y + 0.5 for y in range(len(shown))], labels, fontsize=8)
    rest = f", {len(shown)} of {len(rows)} rows shown" if len(shown) < len(rows) else ""
    axes.set_title(f"State pass: each row carries a {p.K} x {m.columns} state\n{m.scan_programs}{rest}", fontsize=9, loc="left")


def draw_scores(axes: Axes, m: Mapping) -> None:
    """One chunk's scores: which pairs of rows meet in which product."""
    C = m.scores
    for s in (s for s in LEVELS if s < C):
        inside = s < BLOCK
        if inside and m.form == "product":
            continue
        for start in range(0, C, 2 * s):
            axes.add_patch(Rectangle((start, start + s), s, s, facecolor=LEVELS[s], edgecolor="white", lw=0.6))
    if m.form == "product":
        for start in range(0, C, BLOCK):
            axes.fill([start, start, start + BLOCK], [start, start + BLOCK, start + BLOCK], facecolor="#f2b56b", edgecolor="white", lw=0.8)
    else:
        for row in range(C):
            axes.add_patch(Rectangle((row, row), 1, 1, facecolor="0.35"))
    for line in range(0, C + 1, BLOCK):
        axes.axhline(line, color="0.4", lw=0.6)
        axes.axvline(line, color="0.4", lw=0.6)
    handles = [
        Patch(facecolor=LEVELS[s], label=f"{s} rows x {s}, about the row before")
        for s in reversed(LEVELS)
        if s < C and (s >= BLOCK or m.form == "levels")
    ]
    if m.form == "product":
        handles.append(Patch(facecolor="#f2b56b", label="inside 16 x 16, about one row of it"))
    else:
        handles.append(Patch(facecolor="0.35", label="q.k of one token, no decay"))
    axes.legend(handles=handles, fontsize=8, loc="upper right")
    axes.set(xlim=(0, C), ylim=(C, 0), aspect="equal", xlabel="key token i of the chunk", ylabel="query token r")
    axes.set_xticks(range(0, C + 1, BLOCK))
    axes.set_yticks(range(0, C + 1, BLOCK))
    axes.set_title(f"Pairs (r, i), i <= r, of Aqk and L in {C} tokens", fontsize=9, loc="left")
