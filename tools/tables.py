"""The tables of the documents from the files under benchmarks/results.

python tools/tables.py            says which cells and phrases differ from their files
python tools/tables.py --write    puts the cells in

A table is known by its header, a row by its first cells; cells that no file has (None) stay as they are. Phrases are the figures that
stand in sentences: they are only looked for, since the sentence around them may have to change with them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
Rows = dict[tuple[str, ...], list[str | None]]  # the first cells of a row -> the others

SHAPES = {  # a shape's names in openkda/benchmarking.py, README.md and docs/hopper_prefill.md
    "T8192_H96": ("8192, 96", "T8192 H96"),
    "T8192_H64": ("8192, 64", "T8192 H64"),
    "mix6_H64": ("8192 in 6 sequences, 64", "6 sequences, 8192 tokens, H64"),
    "8x1024_H64": ("8 x 1024, 64", "8 x 1024, H64"),
    "T8192_H16": ("8192, 16", "T8192 H16"),
    "T32768_H8": ("32768, 8", "T32768 H8"),
    "T2048_H12": ("2048, 12", "T2048 H12"),
    "T1024_H4": ("1024, 4", "T1024 H4"),
    "T8192_H12_N4": ("4 x 2048, 12", "4 x 2048, H12"),
}
REGIMES = ("random", "init", "trained")
TARGETS = {  # microseconds, random and init
    "T8192_H96": (330, 420), "T8192_H64": (220, 320), "mix6_H64": (250, 300), "8x1024_H64": (240, 280), "T8192_H16": (75, 150),
    "T32768_H8": (140, 300), "T2048_H12": (20, 50), "T1024_H4": (10, 30), "T8192_H12_N4": (55, 100),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One table of a document and the file its cells come from."""

    document: str
    header: str  # how its first line begins
    file: str
    rows: Callable[[dict], Rows]
    after: str = ""  # text above it, where another table has the same header


@dataclass(frozen=True)
class Phrases:
    """Figures in a document's sentences and the file they come from."""

    document: str
    file: str
    texts: Callable[[dict], Iterable[str]]


@cache
def load(file: str) -> dict:
    """A file of benchmarks/results."""
    return json.loads((ROOT / "benchmarks/results" / f"{file}.json").read_text())


def three(x: float) -> str:
    """Three digits from 100 on, else one behind the point."""
    return f"{x:.0f}" if x >= 99.95 else f"{x:.1f}"


def power(x: float) -> str:
    """4.1e-3."""
    digits, exponent = f"{x:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def between(values: Iterable[float], form: Callable[[float], str]) -> str:
    """The least to the largest."""
    values = list(values)
    return f"{form(min(values))} to {form(max(values))}"


def forward_times(data: dict) -> Callable[[str, str, str, str], float]:
    """time(shape, gate, regime, implementation) in microseconds."""
    found = {(r["shape"], r["gate"], r["regime"], r["impl"]): r["graph_ms"] for r in data["rows"]}
    return lambda *key: 1e3 * found[key]


def forward_in_brief(data: dict) -> Rows:
    """Milliseconds of README.md."""
    time = forward_times(data)
    cells = (("bounded", "random", "hopper"), ("bounded", "init", "hopper"), ("softplus", "init", "hopper"))
    peers = (("bounded", "random", "cudnn_fp32"), ("bounded", "init", "cudnn_fp32"))
    return {(names[0],): [f"{time(shape, *cell) / 1e3:.3f}" for cell in cells + peers] for shape, names in SHAPES.items()}


def forward(data: dict) -> Rows:
    """Microseconds of docs/hopper_prefill.md."""
    time = forward_times(data)
    floor = {r["shape"]: 1e3 * r["floor_ms"] for r in data["rows"] if r["gate"] == "bounded"}
    rows = {}
    for shape, (_, name) in SHAPES.items():
        ours, softplus, cudnn = (
            [three(time(shape, gate, regime, impl)) for regime in REGIMES]
            for gate, impl in (("bounded", "hopper"), ("softplus", "hopper"), ("bounded", "cudnn_fp32"))
        )
        rows[name,] = [f"{floor[shape]:.1f}", *ours, " / ".join(softplus), " / ".join(cudnn), None]
    return rows


def forward_ratios(data: dict) -> Rows:
    """The times of docs/hopper_prefill.md against the targets, the bounded gate and the fastest peer, random and init."""
    time = forward_times(data)
    over = lambda x: "met" if x <= 1 else f"{x - 1:.0%}".replace("%", " %")
    rows = {}
    for shape, (_, name) in SHAPES.items():
        ours, softplus, cudnn = (
            [time(shape, gate, regime, impl) for regime in REGIMES[:2]]
            for gate, impl in (("bounded", "hopper"), ("softplus", "hopper"), ("bounded", "cudnn_fp32"))
        )
        both = lambda form, above, below: " / ".join(form(a / b) for a, b in zip(above, below))
        ratio = lambda x: f"{x:.2f}" if x < 9.995 else f"{x:.1f}"
        target = TARGETS[shape]
        rows[name,] = [" / ".join(map(str, target)), both(over, ours, target), both(ratio, softplus, ours), both(ratio, cudnn, ours)]
    return rows


def beside_fla(data: dict) -> Rows:
    """Microseconds of docs/hopper_prefill.md on the shapes that fla ran."""
    found = {(r["shape"], r["gate"], r["regime"], r["impl"]): r["graph_ms"] for r in data["rows"]}
    times = lambda *key: [found.get((*key[:2], regime, key[2])) for regime in REGIMES]
    cell = lambda *key: " / ".join("-" if x is None else three(1e3 * x) for x in times(*key))
    ran = [shape for shape in SHAPES if any(times(shape, "bounded", "fla"))]
    return {(SHAPES[s][1],): [cell(s, gate, impl) for gate in ("bounded", "softplus") for impl in ("hopper", "fla")] for s in ran}


def forward_phrases(data: dict) -> Iterable[str]:
    """Errors, hosts and the second peer in docs/hopper_prefill.md."""
    of = lambda impl, field: [r[field] for r in data["rows"] if r["impl"] == impl and r.get(field) is not None]
    errors = lambda impl: (between(of(impl, "err_o"), power), between(of(impl, "err_state"), power))
    ours, cudnn, fla = errors("hopper"), errors("cudnn_fp32"), errors("fla")
    yield f"o {ours[0]}, states {ours[1]} (cuDNN {cudnn[0]}, {cudnn[1]}; fla {fla[0]}, {fla[1]})"
    found = {(r["shape"], r["gate"], r["regime"], r["impl"]): r for r in data["rows"]}
    pairs = [(r, found[(*key[:3], "hopper")]) for key, r in found.items() if key[3] == "fla" and r["err_o"] is not None]
    figures = [(hopper[field], other[field]) for other, hopper in pairs for field in ("err_o", "err_state")]
    nearer = [(a, b) for a, b in figures if a <= b]
    farther = "; ".join(f"{a:.2e} against {b:.2e}".replace("e-0", "e-") for a, b in figures if a > b)
    yield f"nearer to fp64 than fla in {len(nearer)} of {len(figures)} figures" + (f" (else {farther})" if farther else "")
    whole = lambda x: f"{x:.0f}"
    yield f"{between(of('hopper', 'host_us'), whole)} us (cuDNN {between(of('cudnn_fp32', 'host_us'), whole)})"
    yield f"at the {data['copy_bandwidth_tbps']:.2f} TB/s of a copy"
    yield f"commit {data['commit'][:7]}"
    yield fla_times(data, lambda gate: f"{gate[0]:.0f} to {gate[1]:.0f}", "at T8192 H16 with a bounded gate and {} with softplus")
    small = [r for r in data["rows"] if r["impl"] == "hopper" and r["shape"] == "T1024_H4"]
    yield f"{between((r['host_us'] for r in small), whole)} us (medians {between((r['host_median_us'] for r in small), whole)}"


def fla_times(data: dict, form: Callable[[tuple[float, float]], str], rest: str) -> str:
    """fla's times at T8192 H16 with either gate, microseconds."""
    times = [
        [1e3 * r["graph_ms"] for r in data["rows"] if r["impl"] == "fla" and r["gate"] == gate and r["graph_ms"]]
        for gate in ("bounded", "softplus")
    ]
    bounded, softplus = (form((min(t), max(t))) for t in times)
    return f"{bounded} {rest}".format(softplus)


def forward_phrases_in_brief(data: dict) -> Iterable[str]:
    """The second peer in README.md, milliseconds."""
    yield fla_times(data, lambda gate: f"{gate[0] / 1e3:.3f} to {gate[1] / 1e3:.3f}", "at 8192, 16")


def portable(data: dict) -> Rows:
    """Milliseconds of docs/portable.md."""
    time = forward_times(data)
    floor = {r["shape"]: r["floor_ms"] for r in data["rows"]}
    cells = lambda shape: [time(shape, "bounded", regime, "portable") / 1e3 for regime in ("random", "init")]
    return {(names[0],): [f"{x:.3f}" for x in (*cells(shape), floor[shape])] for shape, names in SHAPES.items()}


def portable_phrases(data: dict) -> Iterable[str]:
    """Errors in docs/portable.md."""
    o, state = (between((r[field] for r in data["rows"]), power) for field in ("err_o", "err_state"))
    yield f"o {o}, states {state}"


def training(data: dict) -> Rows:
    """Milliseconds of docs/backward.md."""
    names = {
        "T8192_H32": "T 8192, H 32",
        "T32768_H16": "T 32768, H 16",
        "2x4096_H64": "2 x 4096, H 64",
        "docs64_H32": "64 documents, 49363 tokens, H 32",
    }
    found = {(r["shape"], r["regime"], r["impl"]): r for r in data["rows"]}
    large = lambda x: f"{x:.2f}" if x < 9.995 else f"{x:.1f}"
    rows = {}
    for shape, name in names.items():
        for regime in ("random", "init"):
            ours, cudnn = found[shape, regime, "hopper"], found[shape, regime, "cudnn_fp32"]
            both = [f"{large(r['graph_ms'])} ({large(r['eager_ms'])})" for r in (ours, cudnn)]
            rows[name, regime] = [large(ours["forward_ms"]), *both, largest_error(ours), f"{ours['peak_mib'] / 1024:.2f} GiB"]
    return rows


def training_kept(data: dict) -> Rows:
    """T 8192, H 32 recomputed and kept, docs/backward.md."""
    found = {(r["regime"], r["impl"]): r for r in data["rows"] if r["shape"] == "T8192_H32"}
    cells = lambda r: [f"{r['forward_ms']:.2f}", f"{r['graph_ms']:.2f} ({r['eager_ms']:.2f})", f"{r['peak_mib'] / 1024:.2f} GiB"]
    either = lambda regime: [cells(found[regime, impl]) if (regime, impl) in found else [None] * 3 for impl in ("hopper", "hopper-kept")]
    return {(regime,): [*chain(*either(regime))] for regime in REGIMES[:2]}


def training_peer_phrases(data: dict) -> Iterable[str]:
    """The second peer of a training step in docs/backward.md."""
    found = {(r["impl"], r["regime"]): r for r in data["rows"]}
    pair = lambda impl, field: [f"{found[impl, regime][field]:.2f}" for regime in REGIMES[:2]]
    both = lambda values: " and ".join(values)
    times = pair("fla", "graph_ms")
    either = f"{times[0]} ms with either gate" if times[0] == times[1] else f"{both(times)} ms"
    worst = max((found["fla", regime] for regime in REGIMES[:2]), key=lambda row: max(row["err_grads"].values()))
    name, error = max(worst["err_grads"].items(), key=lambda item: item[1])
    yield (
        f"{either} ({both(pair('fla', 'eager_ms'))} eager), {worst['peak_mib'] / 1024:.2f} GiB, its largest gradient error {power(error)} "
        f"(`{name}`); here {both(pair('hopper', 'graph_ms'))} ({both(pair('hopper', 'eager_ms'))})"
    )


def step_times(data: dict, impl: str) -> list[str]:
    """Milliseconds of a training step, T 8192, H 32, random and init."""
    found = {r["regime"]: r["graph_ms"] for r in data["rows"] if (r["shape"], r["impl"]) == ("T8192_H32", impl)}
    return [f"{found[regime]:.2f}" for regime in REGIMES[:2]]


def training_phrases_in_brief(data: dict) -> Iterable[str]:
    """A training step and its peer in README.md."""
    yield "8192 tokens with 32 heads take {} ms with `random` and {} with `init`".format(*step_times(data, "hopper"))
    yield "`disable_recompute=True` makes them {} and {}".format(*step_times(data, "hopper-kept"))
    yield "cuDNN took {} and {} without gate, norms and sigmoid".format(*step_times(data, "cudnn_fp32"))


def training_peer_phrases_in_brief(data: dict) -> Iterable[str]:
    """The second peer of a training step in README.md."""
    yield "flash-linear-attention {} and {}. [The gradients]".format(*step_times(data, "fla"))


def largest_error(row: dict) -> str:
    """The largest of the gradients' errors and whose it is."""
    errors = row.get("err_grads") or ({row["of"]: row["largest_error"]} if row.get("of") else {})  # or of a printed table
    if not errors:
        return "not measured"
    name, error = max(errors.items(), key=lambda item: item[1])
    return f"{power(error)} ({name})"


def cpu(data: dict) -> Rows:
    """Milliseconds of docs/cpu.md."""
    names = dict(random="random", init="init", trained="trained (recorded from a layer)")
    rows = {}
    for r in data["rows"]:
        name = names[r["regime"]] if r["gate"] == "bounded" else "half of the channels at -50 nats a token (softplus)"
        ratios = [f"{r[field]:.1f}" for field in ("ratio", "ratio_of_medians")]
        rows[name,] = [f"{r['recurrence_ms']:.0f}", f"{r['torch_ms']:.1f}", *ratios]
    return rows


def states(data: dict) -> Rows:
    """Microseconds with chunk-entry states, docs/hopper_prefill.md."""
    rows = {}
    for name, regimes in data["record"].items():
        name = name.split(", ", 1)[1].replace(", V first", "") + ", portable" if name.startswith("portable") else name
        cells = [[three(regimes[r][every]) for r in ("random", "init") if every in regimes[r]] for every in ("none", "64", "32")]
        rows[name,] = [" / ".join(cell) for cell in cells]
    return rows


def context_cost(data: dict) -> Rows:
    """Tokens per second of docs/training.md."""
    thousands = lambda x: f"{x / 1e3:.1f}k"
    rows = {}
    for name, results in data["results"].items():
        for r in results:
            speed = [thousands(r["tokens_per_second"]), thousands(r["recorded_tokens_per_second"])]
            cache_size, trained = f"{r['cache_bytes'] / 2**20:.2f}", f"{r['training_tokens_per_second'] / 1e6:.2f} M"
            rows[name, str(r["context"])] = [*speed, cache_size, trained]
    return rows


def decode_phrases(data: dict) -> Iterable[str]:
    """Microseconds of README.md."""
    time = {(r["what"], r["N"], r.get("state"), r.get("v_first")): r["us"] for r in data["rows"]}
    ours = [time["kda_decode", n, "float32", True] for n in (1, 64, 256)]
    fla = [time["fla", n, None, True] for n in (1, 64, 256)]
    share = time["copy", 64, None, None] / ours[1]
    yield f"{ours[0]:.1f} us for one sequence, {ours[1]:.0f} us for 64 ({share:.0%} of a plain copy's bandwidth), {ours[2]:.0f} us for 256"
    yield f"{fla[0]:.1f}, {fla[1]:.0f} and {fla[2]:.0f} us"


def longtail_phrases(data: dict) -> Iterable[str]:
    """Sixty sequences beside a long one, docs/hopper_prefill.md."""
    time = {(r["shape"], r["regime"]): 1e3 * r["graph_ms"] for r in data["rows"]}
    at = lambda shape, regime: f"{time[shape, regime]:.0f}"
    yield f"init {at('longtail_H16', 'init')}, random {at('longtail_H16', 'random')}"
    yield f"the short ones alone {at('short60_H16', 'init')}"
    yield f"the long one alone {at('T16384_H16', 'init')} and {at('T16384_H16', 'random')}"


def counted(data: dict) -> str:
    """What became of tests."""
    return f"{data['passed']} passed, {data['failed'] or 'none'} failed"


def gpu_tests_phrases(data: dict) -> Iterable[str]:
    """The tests that need a GPU, CONTRIBUTING.md."""
    yield f"At {data['commit'][:7]}, on an H200: {counted(data)}, {data['skipped']} skipped"


def any_device_phrases(data: dict) -> Iterable[str]:
    """Those that run on any device, on a GPU, CONTRIBUTING.md."""
    yield f"of those that run on any device {counted(data)}"


def sanitizer_phrases(data: dict) -> Iterable[str]:
    """How much compute-sanitizer saw, docs/hopper_prefill.md."""
    yield f"{len({r['case'] for r in data['rows']})} cases, commit {data['commit'][:7]}"


def kernels_and_torch_phrases(data: dict) -> Iterable[str]:
    """One model trained with the kernels and in torch, docs/training.md."""
    pairs = [[data["runs"][f"{name}, seed {seed}"]["history"]["eval_value"] for name in ("kernels", "torch")] for seed in range(4)]
    listed = lambda texts: ", ".join(texts[:-1]) + " and " + texts[-1]
    apart = [f"{max(abs(a - b) for a, b in zip(*pair, strict=True)):.4f}" for pair in pairs]
    yield f"commit {data['commit'][:7]}). The held-out losses of the two differ by at most {listed(apart)} nats, seed by seed"
    yield "at the end they are " + ", ".join(f"{a[-1]:.3f} and {b[-1]:.3f}" for a, b in pairs)


FORWARD = "2026-11-30-forward"
LARGE, SMALL = "2026-12-01-forward-beside-fla-large", "2026-12-01-forward-beside-fla-small"
PREFILL = "docs/hopper_prefill.md"
TABLES = (
    Table("README.md", "| tokens, heads |", FORWARD, forward_in_brief),
    Table(PREFILL, "| shape | floor |", FORWARD, forward),
    Table(PREFILL, "| shape | target |", FORWARD, forward_ratios),
    Table(PREFILL, "| shape | bounded |", LARGE, beside_fla, after=f"{LARGE}.json"),
    Table(PREFILL, "| shape | bounded |", SMALL, beside_fla, after=f"{SMALL}.json"),
    Table(PREFILL, "| | without | every 64 tokens |", "2026-11-30-hopper-states", states),
    Table("docs/backward.md", "| shape | gate | forward |", "2026-12-01-training", training),
    Table("docs/backward.md", "| gate | recomputed: forward |", "2026-12-01-training", training_kept),
    Table("docs/portable.md", "| tokens, heads |", "2026-11-30-portable-forward", portable),
    Table("docs/cpu.md", "| gate | recurrence, ms |", "2026-11-30-cpu-xeon", cpu),
    Table("docs/cpu.md", "| gate | recurrence, ms |", "2026-11-30-cpu", cpu, after="2026-11-30-cpu.json"),
    Table("docs/training.md", "| | context |", "2026-11-30-context-cost", context_cost),
)
PHRASES = (
    Phrases("README.md", FORWARD, forward_phrases_in_brief),
    Phrases(PREFILL, FORWARD, forward_phrases),
    Phrases(PREFILL, "2026-11-30-longtail", longtail_phrases),
    Phrases(PREFILL, "2026-12-01-sanitizer", sanitizer_phrases),
    Phrases("docs/backward.md", "2026-11-30-training-fla", training_peer_phrases),
    Phrases("README.md", "2026-12-01-training", training_phrases_in_brief),
    Phrases("README.md", "2026-11-30-training-fla", training_peer_phrases_in_brief),
    Phrases("CONTRIBUTING.md", "2026-12-01-gpu-tests", gpu_tests_phrases),
    Phrases("CONTRIBUTING.md", "2026-12-01-gpu-tests-any-device", any_device_phrases),
    Phrases("docs/portable.md", "2026-11-30-portable-forward", portable_phrases),
    Phrases("README.md", "2026-11-30-decode", decode_phrases),
    Phrases("docs/training.md", "2026-11-30-kernels-and-torch", kernels_and_torch_phrases),
)


def cells_of(line: str) -> list[str]:
    """The cells of a row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def filled(text: str, table: Table) -> tuple[str, list[str]]:
    """The document's text with the table's cells put in, and what differed."""
    lines, differences = text.split("\n"), []
    above = next(n for n, line in enumerate(lines) if table.after in line)
    start = next(n for n in range(above, len(lines)) if lines[n].startswith(table.header))
    rows = table.rows(load(table.file))
    left = dict(rows)
    for n in range(start + 2, len(lines)):
        if not lines[n].startswith("|"):
            break
        cells = cells_of(lines[n])
        key = next((k for k in rows if tuple(cells[: len(k)]) == k), None)
        if key is None:
            differences.append(f"{table.document}: no row of {table.file} is called {cells[0]}")
            continue
        del left[key]
        wanted = [*key, *(old if new is None else new for old, new in zip(cells[len(key) :], rows[key], strict=True))]
        if wanted != cells:
            differences.append(f"{table.document}: {' | '.join(cells)} is {' | '.join(wanted)} in {table.file}")
            lines[n] = "| " + " | ".join(wanted) + " |"
    differences += [f"{table.document}: no row {', '.join(key)}, which {table.file} has" for key in left]
    return "\n".join(lines), differences


def differences(write: bool = False) -> list[str]:
    """What the documents say otherwise than their files; tables are corrected with `write`."""
    found = []
    for table in TABLES:
        path = ROOT / table.document
        text, wrong = filled(path.read_text(), table)
        found += wrong
        if write and wrong:
            path.write_text(text)
    for phrases in PHRASES:
        text = " ".join((ROOT / phrases.document).read_text().split())
        texts = phrases.texts(load(phrases.file))
        found += [f"{phrases.document} does not say: {phrase} ({phrases.file})" for phrase in texts if phrase not in text]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the cells of the files into the tables")
    found = differences(parser.parse_args().write)
    print("\n".join(found) or "the documents say what the files hold")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
