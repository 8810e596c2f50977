"""The package as it is installed: versions, light imports, pinned dependencies, and the commands that the documents name."""

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


def test_documents_name_real_targets():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        used = set(re.findall(r"\bmake ([a-z][\w-]+)", (ROOT / name).read_text()))
        assert used and used <= targets, f"{name} names {used - targets}"


def test_documents_link_to_files():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_every_fault_names_tests_that_exist():
    text = (ROOT / "docs/faults.md").read_text()
    rows = [int(n) for cell in re.findall(r"^\| ([\d, ]+) \|", text, re.M) for n in cell.split(",")]
    assert rows == list(range(1, 43))
    for file, name in re.findall(r"`(test_\w+\.py)::(\w+)`", text):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"docs/faults.md names {file}::{name}"
