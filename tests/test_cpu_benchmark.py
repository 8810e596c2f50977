"""benchmarks/cpu.py at toy size: the table, the record, the memory measurement."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_record_and_table(tmp_path):
    sizes = ["-T", "40", "-H", "1", "--rounds", "1", "--long", "64", "--threads", "1", "--json", str(tmp_path)]
    run = subprocess.run([sys.executable, "benchmarks/cpu.py", *sizes], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "T=64 H=1: peak memory" in run.stdout
    (file,) = tmp_path.glob("*-cpu.json")
    record = json.loads(file.read_text())
    assert {row["regime"] for row in record["rows"]} == {"random", "init", "trained", "mixed"}
    for row in record["rows"]:
        assert row["difference"] < 1e-5 and row["ratio"] > 0 and row["torch_ms"] <= row["torch_median_ms"]
    assert record["memory"]["with_call_mib"] > 50 and record["commit"] and record["versions"]["torch"]
