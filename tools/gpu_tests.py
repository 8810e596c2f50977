"""The tests that this machine's GPU can run, recorded as dated JSON while they run, so that a run that is cut still tells.

    python tools/gpu_tests.py --json benchmarks/results --workers 8 --limit 160

First the tests that need a GPU (markers `gpu` and `hopper`: real sizes, graphs, Hopper kernels), then those that run on whatever device
there is (marker `device`, given to every test that takes the fixture: the same small cases that Triton's interpreter runs on a CPU). The
file holds counts, every skip with its reason, every failure, seconds, and what tests recorded of themselves, such as errors."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PHASES = {"needs a GPU": "gpu or hopper", "runs on any device": "device and not gpu and not hopper"}
PACKAGES = ("openkda", "torch", "triton", "pytest")


def output(*command: str) -> str:
    """First line that a program prints; '' where there is no such program."""
    try:
        return (subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.splitlines() or [""])[0].strip()
    except OSError:
        return ""


def header(commit: str | None, workers: int) -> dict[str, object]:
    """Where, when and of what the results are."""
    version = lambda name: importlib.metadata.version(name) if name != "openkda" else importlib.import_module(name).__version__
    head = "" if commit else output("git", "rev-parse", "HEAD")
    return dict(
        benchmark="gpu tests",
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name(),
        driver=output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        commit=commit or head,
        uncommitted_changes=bool(output("git", "status", "--porcelain", "--untracked-files=no")) if head else None,
        command=f"python tools/gpu_tests.py --workers {workers}",
    )


class Record:
    """A pytest plugin of the process that collects the workers' reports."""

    every = 2.0  # seconds between two writes

    def __init__(self, path: Path, report: dict[str, object]):
        self.path, self.report = path, report
        self.started, self.written = time.monotonic(), 0.0
        self.tests: dict[str, dict[str, object]] = {}
        report.update(finished=False, phases={})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = dict(outcome="failed", seconds=0.0, reason="collection: " + str(report.longrepr).splitlines()[-1])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, dict(outcome="passed", seconds=0.0))
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)  # absent where a worker died
            lines = str(crash.message if crash else report.longrepr).splitlines()
            test.update(outcome="failed", reason=lines[0][:300] if lines else "")
        elif report.skipped:
            test.update(outcome="skipped", reason=report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr))
        if report.user_properties and report.when == "call":
            test.update(report.user_properties)
        if report.when == "teardown" and time.monotonic() - self.written > self.every:
            self.write()

    def write(self) -> None:
        """The file as it is now; whole at every moment."""
        self.written = time.monotonic()
        outcomes = Counter(test["outcome"] for test in self.tests.values())
        files: dict[str, Counter] = {}
        for name, test in self.tests.items():
            files.setdefault(name.split("::")[0], Counter())[test["outcome"]] += 1
        totals = {name: outcomes[name] for name in ("passed", "failed", "skipped")}
        skips = Counter(test["reason"] for test in self.tests.values() if test["outcome"] == "skipped")
        summary = dict(seconds=round(self.written - self.started, 1), **totals, skip_reasons=dict(skips), files=files, tests=self.tests)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.report | summary, indent=1) + "\n")
        os.replace(partial, self.path)


def run_phase(record: Record, name: str, expression: str, arguments: argparse.Namespace) -> int:
    """Run the tests of one marker expression; pytest's exit code."""
    began = time.monotonic()
    options = ["-m", expression, "-q", "--tb=short", "-rsfE", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    if arguments.workers:
        options += ["-n", str(arguments.workers), "--dist", "load", "--maxschedchunk", "4"]  # roughly in the order of the paths
    code = pytest.main([*options, *arguments.paths], plugins=[record])
    record.report["phases"][name] = dict(marker=expression, seconds=round(time.monotonic() - began, 1), exit_code=int(code))
    record.write()
    return int(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("out"), help="a file, or a directory for DATE-gpu-tests.json")
    parser.add_argument("--workers", type=int, default=8, help="processes; 0 for this one alone (default 8)")
    parser.add_argument("--limit", type=float, help="start no new phase after this many seconds")
    parser.add_argument("--commit", help="commit to record, where the history beside the sources is not theirs or absent")
    parser.add_argument("--phases", default=",".join(PHASES), help="names of phases, with commas between")
    parser.add_argument("paths", nargs="*", default=["tests"], help="tests to choose from, the most important first (default: tests)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here; `make test` runs what a CPU can")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    path = arguments.json
    if path.suffix != ".json":
        path.mkdir(parents=True, exist_ok=True)
        path = path / f"{datetime.date.today()}-gpu-tests.json"
    record = Record(path, header(arguments.commit, arguments.workers))
    codes = [0]
    for name in arguments.phases.split(","):
        if codes[-1] == pytest.ExitCode.INTERRUPTED or (arguments.limit and time.monotonic() - record.started > arguments.limit):
            break
        codes.append(run_phase(record, name, PHASES[name], arguments))
    else:
        record.report["finished"] = codes[-1] != pytest.ExitCode.INTERRUPTED
    record.write()
    print(f"wrote {path}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
