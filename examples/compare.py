"""Curves of several training runs in one picture, and their numbers in one JSON file.

    python examples/compare.py curves.png KDA=out/lm softmax=out/lm_softmax --json curves.json --commit "$(git rev-parse HEAD)"

Each run is a name and the folder that `lm.py` or `synthetic.py` wrote. Left the training loss, right the figure of merit, both by step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

SMOOTH = 60  # points of a training loss's curve, each the mean of as many records as that takes
POINTS = 200  # of a curve in the JSON file
STYLES = ("-", "--", ":")  # in turn, so that equal curves show


def read(folder: Path) -> dict:
    """History and summary of one run."""
    summaries = [folder / name for name in ("summary.json", "train.json") if (folder / name).exists()]
    if not summaries:
        raise FileNotFoundError(f"{folder} holds no finished run: neither summary.json nor train.json")
    return {"summary": json.loads(summaries[0].read_text()), "history": json.loads((folder / "history.json").read_text())}


def smoothed(history: dict) -> tuple[np.ndarray, np.ndarray]:
    """Step and training loss, at most about SMOOTH points of each."""
    step, loss = np.asarray(history["step"]), np.asarray(history["loss"])
    width = max(len(step) // SMOOTH, 1)
    count = len(step) // width
    return tuple(x[: count * width].reshape(count, width).mean(1) for x in (step, loss))


def thinned(history: dict) -> dict:
    """At most POINTS entries of each list, the last included."""
    pick = lambda values: values[:: -max(1, -(-len(values) // POINTS))][::-1]
    return {name: pick(values) for name, values in history.items()}


def plot(runs: dict[str, dict], path: Path, merit: str, scale: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for i, (name, run) in enumerate(runs.items()):
        look = dict(label=name, linestyle=STYLES[i % len(STYLES)], linewidth=1.2)
        left.plot(*smoothed(run["history"]), **look)
        right.plot(run["history"]["eval_step"], run["history"]["eval_value"], marker=".", **look)
    for axis, label in ((left, "training loss (nats)"), (right, merit)):
        axis.set_xscale(scale)
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="runs to draw")
    parser.add_argument("--json", type=Path, default=None, help="also write summaries and thinned histories to this file")
    parser.add_argument("--commit", default=None, help="of the sources that made the runs, for the JSON file")
    parser.add_argument("--merit", default="accuracy", help="name of the figure of merit (default accuracy)")
    parser.add_argument("--log-steps", action="store_true", help="logarithmic axis of steps, for runs of unlike length")
    options = parser.parse_args(arguments)
    if bad := [run for run in options.runs if "=" not in run]:
        parser.error(f"a run is NAME=FOLDER, got {bad[0]!r}")
    runs = {name: read(Path(folder)) for name, folder in (run.split("=", 1) for run in options.runs)}
    plot(runs, options.picture, options.merit, "log" if options.log_steps else "linear")
    if options.json:
        thin = {name: {"summary": run["summary"], "history": thinned(run["history"])} for name, run in runs.items()}
        options.json.write_text(json.dumps({"commit": options.commit, "runs": thin}))
    return runs


if __name__ == "__main__":
    main()
