"""The picture of `openkda bench`: one panel per gate regime, bars grouped by shape on a log axis, the memory floor as a line per group."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from openkda.benchmarking import Row
from openkda.cli.plots import save

OURS = {  # bounded, softplus
    "hopper": ("#0b6e4f", "#7cc9a8"), "hopper-kept": ("#3f7d20", "#a9cf7c"), "portable": ("#12355b", "#7fa3cf"),
    "portable-kept": ("#4a3f7d", "#a59fcf"), "torch": ("#555555", "#aaaaaa"),
}  # fmt: skip
PEERS = ("#c1440e", "#e08e45", "#f2c57c", "#8d6a9f", "#bfa2cf", "#d9b8b0", "#7a5c58")


def draw(rows: list[Row], report: dict[str, object], path: Path) -> None:
    """Draw the time per call of every row that has one to a PNG file."""
    rows = [row for row in rows if row.best_ms is not None]
    regimes = list(dict.fromkeys(row.regime for row in rows))
    shapes = list(dict.fromkeys(row.shape for row in rows))
    series = list(dict.fromkeys((row.impl, row.gate, row.ours) for row in sorted(rows, key=lambda row: not row.ours)))
    several_gates = len({gate for _, gate, _ in series}) > 1
    others = cycle(PEERS)
    colours = {one: OURS[one[0]][one[1] == "softplus"] if one[2] else next(others) for one in series}
    width = max(7.0, 1.45 * len(shapes) + 1.5)  # inches
    figure = Figure(figsize=(width, 1.3 + 3.0 * max(1, len(regimes))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, len(regimes)), 1, squeeze=False, sharex=True)[:, 0]
    for axis, regime in zip(axes, regimes):
        _panel(axis, [row for row in rows if row.regime == regime], shapes, series, colours)
        axis.set_title(f"gate regime: {regime}", loc="left", fontsize=10)
    handles = [Patch(color=colours[one], label=f"{one[0]}, {one[1]} gate" if several_gates else one[0]) for one in series]
    handles.append(Line2D([], [], color="black", linewidth=1.5, label="memory floor"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(int(width / 2.3), len(handles)), fontsize=9, frameon=False)
    what = {"forward": "forward", "training": "forward + backward"}[report["benchmark"]]
    figure.suptitle(f"KDA {what}, {report['device']}, {report['date'][:10]}", fontsize=11)
    save(figure, path, dpi=130)


def _panel(axis, rows: list[Row], shapes: list[str], series: list[tuple], colours: dict) -> None:
    width = 0.84 / max(1, len(series))
    for row in rows:
        one = (row.impl, row.gate, row.ours)
        at = shapes.index(row.shape) + width * (series.index(one) - (len(series) - 1) / 2)
        axis.bar(at, row.best_ms, 0.94 * width, color=colours[one])
        axis.annotate(
            f"{row.best_ms:.3g}", (at, row.best_ms), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=6, rotation=90
        )
    floors = {row.shape: row.floor_ms for row in rows}
    for shape, floor in floors.items():
        middle = shapes.index(shape)
        axis.hlines(floor, middle - 0.46, middle + 0.46, color="black", linewidth=1.5)
    axis.set_yscale("log")
    low, high = min(floors.values(), default=1.0), max((row.best_ms for row in rows), default=1.0)
    axis.set_ylim(low / 1.6, max(high, low) * 2.6)
    axis.set_xlim(-0.6, len(shapes) - 0.4)
    axis.set_xticks(range(len(shapes)), shapes, fontsize=8)
    axis.set_ylabel("ms per call")
    axis.grid(axis="y", which="major", linewidth=0.4, alpha=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
