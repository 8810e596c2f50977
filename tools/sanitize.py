"""Runs the Hopper kernels under compute-sanitizer (CUDA toolkit) at small shapes and writes what its tools say.

python tools/sanitize.py --json benchmarks/results

Needs a GPU of compute capability 9.0. Every tool runs every case in a process of its own, without torch's caching allocator, so that an
access one byte outside a tensor is one outside an allocation. torch's own kernels are not watched.

racecheck misreads how Triton's `warp_specialize` tells its partitions what to run (their states) and what with (captured arguments): it
reports the least kernel that does so as well (tools/hand_over.py, the first case), at lines of the functions that hold the statement, which
touch no shared memory by themselves. Reports of which every access lies in such a function are counted in `hand_over` by kind; they pass
where the least kernel shows their kind in the same run. Any other report fails. Exit code 1 when a tool fails."""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path

import hand_over
import torch

from openkda.hopper import launch
from openkda.hopper.config import Cut, config_of
from openkda.hopper.gradients import gradients, keep
from openkda.testing import make_case

TOOLS = ("memcheck", "racecheck", "synccheck")
ALONE = "hand-over alone"
LINE = re.compile(r" in (\S+?:\d+)")
ACCESS = re.compile(r"(?:Read|Write) access at \S+ in (\S+?:\d+)")
CASES = {  # arguments of make_case, and how to cut the call
    ALONE: {},
    "clusters": dict(regime="mixed", lengths=(330, 97, 33, 0, 5), H=7, cut=Cut("unsplit", "half")),
    "lanes": dict(regime="mixed", lengths=(330, 97, 33, 0, 5), H=2, cut=Cut("unsplit", "half", lanes=2)),
    "lanes, unbounded gate": dict(regime="mixed", T=700, H=2, bounded=False, cut=Cut("unsplit", "half", lanes=3)),
    "tail of a block": dict(regime="random", T=75, B=2, H=2),
    "ragged": dict(regime="mixed", lengths=(5, 0, 33, 130, 1, 64), H=2),
    "own tails, four blocks": dict(regime="random", T=260, H=2, cut=Cut("tails", "half", 1, 2)),
    "own tails, unbounded gate": dict(regime="random", T=260, H=2, bounded=False, cut=Cut("tails", "half", 1, 3)),
    "own tails, eight blocks, unbounded gate": dict(regime="init", T=250, H=2, bounded=False, cut=Cut("tails", "half", 2, 4)),
    "own tails suffice": dict(regime="random", T=520, H=2, cut=Cut("tails", "half", 3, 2)),
    "own tails do not": dict(regime="init", T=520, H=2, cut=Cut("tails", "half", 4, 4, 3)),
    "tails suffice": dict(regime="random", T=1100, H=1, cut=Cut("whole", "half", 9, 4)),
    "tails do not": dict(regime="init", T=520, H=2, cut=Cut("whole", "full", 9, 4)),
    "tails do not, lanes": dict(regime="mixed", T=900, H=2, cut=Cut("whole", "half", 9, 4, 2)),
    "summaries": dict(regime="init", T=1100, H=1, cut=Cut("summaries", "full", 12, 4)),
    "ragged summaries": dict(regime="init", lengths=(5, 0, 333, 1, 64, 700), H=1, cut=Cut("summaries", "full", 8, 4)),
    "clusters, unbounded gate": dict(regime="mixed", T=330, H=2, bounded=False, cut=Cut("unsplit", "half")),
    "clusters, fp16, ragged": dict(regime="mixed", lengths=(5, 0, 33, 330, 97), H=1, dtype=torch.float16, cut=Cut("unsplit", "half")),
    "unbounded gate": dict(regime="init", T=75, H=2, bounded=False),
    "unbounded gate, summaries": dict(regime="init", T=520, H=1, bounded=False, cut=Cut("summaries", "full", 6, 4)),
    "K-first bf16 states, grouped values": dict(regime="init", T=75, H=2, HV=4, state_v_first=False, state_dtype=torch.bfloat16),
    "fp16, half heads": dict(regime="init", T=75, H=2, K=64, V=64, dtype=torch.float16),
    "turns": dict(regime="mixed", T=40, B=70, H=2),
    "turns, ragged": dict(regime="mixed", lengths=tuple(1 + 7 * i % 90 for i in range(70)), H=2),
    "chunk-entry states": dict(regime="mixed", lengths=(5, 0, 33, 230, 1, 64), H=2, return_intermediate_states=True),
    "chunk-entry states, K-first, tails": dict(
        regime="random", T=520, H=2, state_v_first=False, chunk_size=32, return_intermediate_states=True, cut=Cut("tails", "full", 3, 2)
    ),
    "gradients": dict(regime="mixed", T=75, B=2, H=2, gradients=True),
    "gradients, ragged, grouped values": dict(regime="init", lengths=(5, 0, 33, 130, 1, 64), H=1, HV=2, gradients=True),
    "gradients of a forward that keeps": dict(regime="mixed", T=107, H=32, kept=True),
    "gradients of a forward that keeps, unbounded gate": dict(regime="init", T=75, H=16, HV=32, bounded=False, kept=True),
}


def run_case(name: str) -> None:
    """One call, waited for."""
    if name == ALONE:
        hand_over.run()
        return
    args = {**dict(K=128, dtype=torch.bfloat16, state_v_first=True, device="cuda"), **CASES[name]}
    cut, backward, kept = args.pop("cut", None), args.pop("gradients", False), args.pop("kept", False)
    problem, inputs = make_case(args.pop("regime"), **args).described()
    if kept:
        o, final_state, saved = keep(problem, inputs)
    else:
        (o, final_state, _), saved = launch.forward(problem, inputs, cut and config_of(problem, cut, (0.0, 0.0))), ()
    if backward or kept:
        gradients(problem, inputs, (True,) * 8, o, torch.randn_like(o), torch.randn_like(final_state), saved)
    torch.cuda.synchronize()


def verdict(tool: str, name: str, seconds: int) -> dict[str, object]:
    """What one tool says of one case: its summary line, and the first lines of what it found."""
    skip = ["--kernel-name-exclude", "kns=at6native"]
    command = ["compute-sanitizer", "--tool", tool, *skip, sys.executable, __file__, "--case", name]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    row = dict(tool=tool, case=name, summary=None, clean=False, hand_over={}, found=[])
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return row | dict(found=[f"no end within {seconds} seconds"])
    row["seconds"] = round(time.monotonic() - begin, 1)
    lines = [line.removeprefix("=========").strip() for line in done.stdout.splitlines() if line.startswith("=========")]
    row["summary"] = next((line for line in reversed(lines) if "SUMMARY" in line), None)
    if done.returncode != 0 or row["summary"] is None:
        return row | dict(found=[line for line in lines if line][:12] + done.stderr.strip().splitlines()[-3:])
    others, known = judged(lines)
    row["hand_over"] = dict(Counter(map(kind, known)))
    clean = not others and (len(known) > 0 or not re.search(r"[1-9]\d* (error|hazard)", row["summary"]))
    return row | dict(clean=clean, found=[line for report in others or known for line in report][:12])


@cache
def holding() -> frozenset[str]:
    """The lines, as FILE:LINE, of all kernels with a `warp_specialize` statement, in them or in a function of the same file that they call.
    None of the package accesses shared memory by itself."""
    root = Path(__file__).parent.parent
    return frozenset(
        f"{path.name}:{line}"
        for path in (*(root / "openkda" / "hopper").glob("*.py"), root / "tools" / "hand_over.py")
        for function in holders(path.read_text())
        for line in range(function.lineno - len(function.decorator_list), function.end_lineno + 1)
    )


def holders(source: str) -> list[ast.FunctionDef]:
    """The functions of a file that hold the statement, and those that call them."""
    functions = [x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef)]
    called = lambda function: {getattr(x.func, "attr", getattr(x.func, "id", None)) for x in ast.walk(function) if isinstance(x, ast.Call)}
    found = {x.name for x in functions if "warp_specialize" in called(x)}
    return [x for x in functions if x.name in found or found & called(x)]


def judged(lines: list[str]) -> tuple[list[list[str]], list[list[str]]]:
    """racecheck's reports, each its lines: those of accesses that are not the hand-over's, and the others."""
    reports: list[list[str]] = []
    for line in lines:
        if "Race reported" in line:
            reports.append([line])
        elif ACCESS.search(line) and reports:
            reports[-1].append(line)
    lines_of_holders = holding()
    known = [report for report in reports if all(found in lines_of_holders for line in report for found in ACCESS.findall(line))]
    return [report for report in reports if report not in known], known


def kind(report: list[str]) -> str:
    """What the hand-over hands over: arguments are written and read at one line, states are also read where the kernel begins."""
    return "arguments" if len({found for line in report for found in LINE.findall(line)}) == 1 else "states"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="directory or file for the results")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=int, default=300, help="limit of one tool on one case")
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time")
    parser.add_argument("--commit", help="commit to record where the sources have no git history beside them")
    parser.add_argument("--case", choices=CASES, help="run this case, without a tool, and end")
    arguments = parser.parse_args()
    if arguments.case:
        run_case(arguments.case)
        return
    for name in arguments.cases:  # compiles what the tools are to watch
        run_case(name)
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    now = datetime.now(timezone.utc)
    report = dict(
        date=now.isoformat(timespec="seconds"), device=torch.cuda.get_device_name(), commit=arguments.commit or git.stdout.strip(),
        versions=dict(torch=torch.__version__, triton=version("triton"), python=platform.python_version()),
        command="python tools/sanitize.py " + " ".join(sys.argv[1:]), rows=[],
    )  # fmt: skip
    path = arguments.json
    if path is not None and path.suffix != ".json":
        path /= f"{now:%Y-%m-%d}-sanitizer.json"
    rows = report["rows"]
    wanted = [(tool, name) for tool in arguments.tools for name in arguments.cases]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        shown: dict[str, int] = {}  # by the least kernel, the first case of each tool
        for row in pool.map(lambda pair: verdict(*pair, arguments.seconds), wanted):
            shown = row["hand_over"] if row["case"] == ALONE else shown
            row["clean"] = row["clean"] and set(row["hand_over"]) <= set(shown)
            rows.append(row)
            verdict_line = "clean" if row["clean"] else "NOT CLEAN"
            print(f"{row['tool']}, {row['case']}: {verdict_line}, {row['summary']}", *row["found"], sep="\n    ", flush=True)
            if path is not None:
                path.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(not all(row["clean"] for row in rows))


if __name__ == "__main__":
    main()
