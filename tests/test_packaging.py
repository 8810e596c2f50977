"""The package as it is installed: versions, light imports, pinned dependencies."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import openkda

ROOT = Path(__file__).parents[1]


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_one_version():
    assert importlib.metadata.version("openkda") == openkda.__version__
    assert f"## {openkda.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_import_needs_no_extra():
    blocked = "('typer', 'rich', 'safetensors', 'matplotlib', 'transformers', 'numpy.testing')"
    run = python(f"import sys\nfor name in {blocked}: sys.modules[name] = None\nimport openkda\nprint(sorted(openkda.__all__))")
    assert run.returncode == 0, run.stderr
    assert "chunk_kda" in run.stdout


@pytest.mark.parametrize(
    "package, command",
    [
        ("typer", "info"),
        ("rich", "info"),
        ("safetensors", "info"),
        ("matplotlib", "explain --T 8 --draw map.png"),
        ("numpy", "explain --T 8 --draw map.png"),
    ],
)
def test_command_without_its_extra_says_so(package, command, tmp_path):
    run = python(
        f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.modules['{package}'] = None\nsys.argv = ['openkda', *'{command}'.split()]\n"
        "from openkda.cli import main\nmain()"
    )
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == f"openkda: this needs the package {package}, which is missing: pip install 'openkda[cli]'"
    assert "Traceback" not in run.stderr and not list(tmp_path.iterdir())


def test_explain_without_triton():
    run = python(
        "import sys\nsys.modules['triton'] = None\nsys.argv = ['openkda', 'explain', '--T', '64']\nfrom openkda.cli import main\nmain()"
    )
    assert run.returncode == 0, run.stderr
    assert "needs Triton" in " ".join(run.stdout.split())


def test_every_dependency_is_pinned():
    pinned = {re.split("==", line)[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    needed = {re.split(r"[^\w-]", need)[0].lower() for need in importlib.metadata.requires("openkda")} - {"torch", "triton", "openkda"}
    assert needed <= pinned, f"not in constraints.txt: {needed - pinned}"
