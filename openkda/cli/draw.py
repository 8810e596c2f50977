"""The picture of `openkda explain --draw`: how programs map to tokens, heads, value columns and sub-blocks."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from openkda.cli.explain import Device, sizes
from openkda.cli.pipeline import BLOCK, Mapping, mapping
from openkda.cli.plots import save
from openkda.problem import Problem

MAX_CHUNKS, MAX_HEADS, MAX_ROWS, MAX_STEPS = 16, 4, 8, 6
CELL, OTHER, TAIL, INSIDE = "#8ecae6", "#cfe8f3", "#ffd28f", "#f2b56b"
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
    save(figure, path)


def chunk_cells(p: Problem, chunk: int, lengths: tuple[int, ...] | None) -> list[tuple[int, int, int]]:
    """(sequence, first row, end row) of every chunk on the flat token axis."""
    bounds = [0, *accumulate(lengths if lengths is not None else [p.T] * p.B)]
    return [(n, row, min(row + chunk, b)) for n, (a, b) in enumerate(pairwise(bounds)) for row in range(a, b, chunk)]


def draw_chunks(axes: Axes, p: Problem, m: Mapping, lengths: tuple[int, ...] | None) -> None:
    """The work that runs in parallel over steps of tokens: one cell per step and value head."""
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
            axes.annotate(f"sequence {n}", (first, -0.06), fontsize=8)
    axes.set(xlim=(0, last), ylim=(heads, -0.35), xlabel="token (rows of the flattened batch)", ylabel="value head")
    axes.set_yticks([head + 0.5 for head in range(heads)], [str(head) for head in range(heads)])
    counts = ((len(shown), len(cells), "steps"), (heads, p.HV, "heads"))
    partial = [f"{some} of {total:,} {what}" for some, total, what in counts if some < total]
    rest = "; shown: " + " and ".join(partial) if partial else ""
    axes.set_title(f"Steps of {m.chunk} tokens: {len(cells):,} x {p.HV} heads; {m.chunk_programs}{rest}", fontsize=9, loc="left")
    if any(end - first < m.chunk for _, first, end in shown):
        axes.legend(handles=[Patch(facecolor=TAIL, edgecolor="0.3", label="shorter tail")], fontsize=8, loc="lower right")


def scan_rows(p: Problem, m: Mapping, lengths: tuple[int, ...] | None) -> list[tuple[str, int, int]]:
    """(label, sequence, steps) of every program of the state pass: sequence or segment, value head, block of value columns."""
    steps = dict.fromkeys(range(p.N), 0)
    for n, _, _ in chunk_cells(p, m.chunk, lengths):
        steps[n] += 1
    pieces = []
    for n, count in steps.items():
        size = m.segment_steps or max(count, 1)
        name = "seq {}, segment {}" if m.segment_steps else "seq {}"
        pieces += [(name.format(n, i), n, min(size, count - i * size)) for i in range(max(1, -(-count // size)))]
    columns = [(start, min(p.V, start + m.columns) - 1) for start in range(0, p.V, m.columns)]
    return [
        (f"{name}, head {head}, V {low}..{high}", n, count)
        for head in range(p.HV) for name, n, count in pieces for low, high in columns
    ]  # fmt: skip


def draw_scan(axes: Axes, p: Problem, m: Mapping, lengths: tuple[int, ...] | None) -> None:
    """The serial pass: one row per program; time runs to the right."""
    rows = scan_rows(p, m, lengths)
    shown = rows[:MAX_ROWS]
    widest = max(1, min(MAX_STEPS, max((count for _, _, count in shown), default=1)))
    for y, (_, n, count) in enumerate(shown):
        for c in range(min(count, widest)):
            axes.add_patch(Rectangle((c + 0.1, y + 0.2), 0.65, 0.6, facecolor=(CELL, OTHER)[n % 2], edgecolor="0.3", lw=0.8))
            axes.annotate("", (c + 1.1, y + 0.5), (c + 0.75, y + 0.5), arrowprops={"arrowstyle": "->", "lw": 1})
        end = "..." if count > widest else "S_final" if not m.segment_steps else "exit"
        axes.annotate(end, (min(count, widest) + 0.15, y + 0.56), fontsize=8)
    axes.set(xlim=(0, widest + 0.9), ylim=(max(len(shown), 1), 0), xlabel=f"step of {m.chunk} tokens, in turn")
    axes.set_xticks([c + 0.42 for c in range(widest)], [str(c) for c in range(widest)])
    axes.set_yticks([y + 0.5 for y in range(len(shown))], [label for label, _, _ in shown], fontsize=8)
    rest = f"; shown: {len(shown)} of {len(rows):,}" if len(shown) < len(rows) else ""
    axes.set_title(f"State pass: each row carries a {p.K} x {m.columns} state\n{m.scan_programs}{rest}", fontsize=9, loc="left")


def draw_scores(axes: Axes, m: Mapping) -> None:
    """The scores of one chunk: which pairs of rows meet in which product."""
    C, inside = m.scores, {"product": BLOCK, "halves": BLOCK // 2, "levels": 1}[m.form]  # rows that share an anchor
    levels = [s for s in LEVELS if inside <= s < C]
    for s in levels:
        for start in range(0, C, 2 * s):
            axes.add_patch(Rectangle((start, start + s), s, s, facecolor=LEVELS[s], edgecolor="white", lw=0.6))
    handles = [Patch(facecolor=LEVELS[s], label=f"{s} x {s}: decay counted from the row before") for s in reversed(levels)]
    if inside > 1:
        for start in range(0, C, inside):
            axes.fill([start, start, start + inside], [start, start + inside, start + inside], facecolor=INSIDE, edgecolor="white", lw=0.8)
        handles.append(Patch(facecolor=INSIDE, label=f"{inside} x {inside}: decay counted from one row"))
    else:
        for row in range(C):
            axes.add_patch(Rectangle((row, row), 1, 1, facecolor="0.35"))
        handles.append(Patch(facecolor="0.35", label="a token with itself: no decay"))
    for line in range(0, C + 1, BLOCK):
        axes.axhline(line, color="0.4", lw=0.6)
        axes.axvline(line, color="0.4", lw=0.6)
    axes.legend(handles=handles, fontsize=7.5, loc="upper right")
    axes.set(xlim=(0, C), ylim=(C, 0), aspect="equal", xlabel="key token i", ylabel="query token r")
    axes.set_xticks(range(0, C + 1, BLOCK))
    axes.set_yticks(range(0, C + 1, BLOCK))
    axes.set_title(f"Pairs i <= r of Aqk and L in {C} tokens", fontsize=9, loc="left")
