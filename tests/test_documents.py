"""What the documents say: links and headings they point to, files, commands and options they name, and figures, which are those of
benchmarks/results."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

from openkda.cli.app import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
RESULTS = {path.name for path in ROOT.glob("benchmarks/results/*.json")}
documents = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[path.name if path.parent.name != "benchmarks" else "benchmarks" for path in DOCUMENTS]
)


def headings(document: Path) -> set[str]:
    """The names by which a page shows the headings of a document."""
    lines = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S).splitlines()
    titles = [line.lstrip("#").strip() for line in lines if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@documents
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name} links to {link}"
        assert not anchor or anchor in headings(target), f"{document.name} links to {link}, which {target.name} has no heading for"


@documents
def test_result_files_exist(document):
    named = set(re.findall(r"\b20\d\d-\d\d-\d\d-[\w-]+\.json\b", document.read_text()))
    assert named <= RESULTS, f"{document.name} names {named - RESULTS}"


def test_every_result_file_has_a_document():
    text = " ".join(path.read_text() for path in DOCUMENTS)
    assert not [name for name in sorted(RESULTS) if name not in text]


def options_of(script: Path) -> set[str]:
    """Every option of a script, or of the scripts of examples, which share some."""
    sources = script.parent.glob("*.py") if script.parent.name == "examples" else [script]
    return {option for path in sources for option in re.findall(r"\"(--[a-z][\w-]*)\"", path.read_text())}


def commands(document: Path) -> list[list[str]]:
    """The words of every command in code, lines that end in a backslash joined; what stands behind three spaces is a remark."""
    text = re.sub(r"\\\n\s*", "", document.read_text())
    lines = [line.strip() for line in re.findall(r"^(?: {4,}|\t)(\S.*)$", text, re.M)] + re.findall(r"`([^`\n]+)`", text)
    first_word = re.compile(r"(?:openkda [a-z]|python \S+\.py|pip install|make [a-z])")
    return [shlex.split(re.split(r" {3,}| #", line)[0]) for line in lines if first_word.match(line)]


@documents
def test_commands_exist(document):
    ours = typer.main.get_command(app).commands
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(document):
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        if words[0] == "openkda":
            assert words[1] in ours, " ".join(words)
            known = {option for param in ours[words[1]].params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), " ".join(words)
            known = options_of(ROOT / words[1])
        elif words[0] == "make":
            known = used
            assert words[1] in targets, " ".join(words)
        else:
            extras = set(re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
            known = used
            assert set(re.findall(r"\[(\w+)\]", words[-1])) <= extras, " ".join(words)
        assert used <= known, f"{' '.join(words)}: {used - known}"


def test_there_are_commands_to_look_at():
    found = [words[:2] for words in commands(ROOT / "README.md")]
    assert ["openkda", "explain"] in found and ["make", "demo"] in found and ["python", "examples/lm.py"] in found and len(found) > 12


def test_the_readmes_code_runs():
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        names = {}
        exec(block, names)
        assert names["o"].isfinite().all() and names["state"].shape == (1, 4, 128, 128)


def test_figures_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    tables = importlib.import_module("tables")
    assert tables.differences() == []
    table = tables.TABLES[0]
    text = (ROOT / table.document).read_text()
    row = next(line for line in text.splitlines() if line.startswith("| 1024, 4 |"))
    changed = text.replace(row, row.replace("0.0", "9.0", 1))
    mended, wrong = tables.filled(changed, table)
    assert mended == text and len(wrong) == 1 and wrong[0].startswith("README.md: 1024, 4 | 9.0")


def test_every_fault_names_tests_that_exist():
    text = (ROOT / "docs/faults.md").read_text()
    rows = [int(n) for cell in re.findall(r"^\| ([\d, ]+) \|", text, re.M) for n in cell.split(",")]
    assert rows == list(range(1, 43))
    for file, name in re.findall(r"`(test_\w+\.py)::(\w+)`", text):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"docs/faults.md names {file}::{name}"


def test_ci_runs_targets_that_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = set(re.findall(r"\bmake ([a-z][\w-]+)", (ROOT / ".ci/run").read_text()))
    assert used and used <= targets
