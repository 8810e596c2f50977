"""The recorder of GPU test runs, on tests that need no GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "gpu_tests.py"

INNER = """
import os, pytest
def test_good(record_property):
    record_property("err_o", 0.25)
def test_bad():
    assert 1 == 2, "not equal"
@pytest.mark.skip(reason="no such device")
def test_absent():
    pass
@pytest.fixture
def broken():
    raise RuntimeError("no fixture")
def test_broken(broken):
    pass
def test_cut():
    os._exit(9)  # as a time limit does
"""

RUN = """
import importlib.util, sys
from argparse import Namespace
from pathlib import Path
spec = importlib.util.spec_from_file_location("gpu_tests", sys.argv[1])
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)
record = tool.Record(Path(sys.argv[2]), dict(device="none"))
record.every = 0.0
sys.exit(tool.run_phase(record, "all", "not slow", Namespace(workers=0, paths=sys.argv[3:])))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "test_inner.py").write_text(INNER)
    (folder / "test_missing.py").write_text("import no_such_package\n")
    command = [sys.executable, "-c", RUN, TOOL, folder / "out.json", "--rootdir", folder, folder]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(TOOL.parents[1])}, capture_output=True, text=True)
    assert done.returncode == 9, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())


def test_a_cut_run_has_what_was_done(recorded):
    assert recorded["device"] == "none" and not recorded["finished"] and recorded["phases"] == {}
    assert (recorded["passed"], recorded["failed"], recorded["skipped"]) == (1, 3, 1)
    assert recorded["skip_reasons"] == {"Skipped: no such device": 1}


def test_failures_say_why_and_properties_are_kept(recorded):
    tests = {name.split("::")[-1]: test for name, test in recorded["tests"].items()}
    assert tests["test_good"]["err_o"] == 0.25
    assert "not equal" in tests["test_bad"]["reason"] and "no fixture" in tests["test_broken"]["reason"]
    assert "no_such_package" in tests["test_missing.py"]["reason"]


def test_without_a_gpu_it_refuses(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("gpu_tests", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py"])
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    assert "no GPU here" in capsys.readouterr().err
