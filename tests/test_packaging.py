"""The package as it is installed: versions, light imports, pinned dependencies."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

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


def test_command_without_its_extra_says_so():
    run = python("import sys\nsys.modules['typer'] = None\nsys.argv = ['openkda', 'info']\nfrom openkda.cli import main\nmain()")
    assert run.returncode == 2
    assert run.stderr.strip() == "openkda: the command line needs the package typer, which is missing: pip install 'openkda[cli]'"


def test_every_dependency_is_pinned():
    pinned = {re.split("==", line)[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    needed = {re.split(r"[^\w-]", need)[0].lower() for need in importlib.metadata.requires("openkda")} - {"torch", "triton", "openkda"}
    assert needed <= pinned, f"not in constraints.txt: {needed - pinned}"
