"""`openkda check`: every backend of this machine against the token recurrence, over gates, gate regimes, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from openkda import backends
from openkda.cli.errors import BadInput, refusals
from openkda.cli.pipeline import SHORT
from openkda.cli.run import progress
from openkda.ops import chunk_kda, fused_recurrent_kda
from openkda.problem import Problem
from openkda.testing import REGIMES, Case, allowed_error, gradient_triples, make_case, relative_error
from openkda.testing import gradients as gradients_of

GATES = ("bounded", "softplus")
SHAPES = {
    "tail": dict(B=2, T=75, H=1, HV=2, K=32, V=16, state_v_first=True),
    "ragged": dict(lengths=(0, 1, 100, 17), H=1, HV=2, K=16, V=32),
    "odd sizes": dict(T=40, H=2, K=20, V=36, neg_eigval=True),
}
GPU_SHAPES = {"long": dict(T=2048, H=4, K=128), "long ragged": dict(lengths=(1500, 3, 545), H=2, HV=4, K=128)}
DTYPES = (torch.float32, torch.bfloat16)
FORMS = {"chunk": chunk_kda, "recurrent": fused_recurrent_kda}


@dataclass
class Row:
    """The worst of all shapes and dtypes of one backend, form, gate and regime; a share is error / allowed error."""

    backend: str
    form: str
    gate: str
    regime: str
    cases: int = 0
    share: float = -1.0
    output: str = ""
    error: float = 0.0
    allowed: float = 0.0
    where: str = ""

    @property
    def passed(self) -> bool:
        """Whether every output stays within its tolerance."""
        return self.share <= 1.0

    def add(self, output: str, error: float, allowed: float, where: str) -> None:
        """Keep the result if it is the worst so far."""
        share = error / allowed
        if not share <= self.share:  # also when share is NaN
            self.share, self.output, self.error, self.allowed, self.where = share, output, error, allowed, where


def served(
    case: Case, wanted: tuple[str, ...], gradients: bool, refused: dict[tuple[str, str], str]
) -> list[tuple[str, str]]:  # fmt: skip
    """The (backend, form) pairs that serve the case; the first reason of each that does not goes to `refused`."""
    problem, _ = case.described()
    pairs = []
    forms = {"chunk": backends.why_not, "recurrent": backends.why_not_recurrent} | ({"gradient": why_no_gradient} if gradients else {})
    for form, why_not in forms.items():
        for name in wanted:
            reason = why_not(name, problem)
            if reason is None:
                pairs.append((name, form))
            else:
                refused.setdefault((name, form), reason)
    return pairs


def why_no_gradient(name: str, problem: Problem) -> str | None:
    """None where the backend has a forward and gradients of its own, else one sentence."""
    return backends.why_not(name, problem) or backends.why_not_backward(name, problem)


@contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread for torch: handing out work costs more than it saves at these sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check(*, wanted: tuple[str, ...], regimes: tuple[str, ...], device: torch.device, gradients: bool) -> bool:
    """Run every case on every wanted backend that serves it and print a table. Returns False when a result is too far off, or when none
    of the wanted backends serves anything on `device`.

    gradients: also compare the gradients of every input with fp64 autograd of the recurrence."""
    for regime in regimes:
        if regime not in REGIMES:
            raise BadInput(f"--regime is {regime!r}; it must be one of {', '.join(REGIMES)}")
    for name in wanted:
        if name not in backends.NAMES:
            raise BadInput(f"--backend is {name!r}; it must be one of {', '.join(backends.NAMES)}")
    shapes = SHAPES | GPU_SHAPES if device.type == "cuda" else SHAPES
    rows: dict[tuple[str, str, str, str], Row] = {}
    refused: dict[tuple[str, str], str] = {}
    with progress() as bar, one_thread():
        task = bar.add_task("cases", total=len(regimes) * len(GATES) * len(shapes) * len(DTYPES))
        for regime in regimes:
            for gate in GATES:
                for shape, sizes in shapes.items():
                    for dtype in DTYPES:
                        with refusals():
                            case = make_case(regime, bounded=gate == "bounded", dtype=dtype, device=device, **sizes)
                        for name, form in served(case, wanted, gradients, refused):
                            row = rows.setdefault((name, form, gate, regime), Row(name, form, gate, regime))
                            run_case(row, case, f"{shape} {SHORT[dtype]}")
                        bar.advance(task)
    report(Console(), list(rows.values()), refused)
    return bool(rows) and all(row.passed for row in rows.values())


def run_case(row: Row, case: Case, where: str) -> None:
    """Run the case as `row` says and keep its errors there."""
    row.cases += 1
    if row.form == "gradient":
        triples = gradient_triples(case, gradients_of(case, backend=row.backend))
        vanishing = case.regime == "extreme"  # the gate's gradients are as small as exp(-20) there, below the rounding of any sum
        results = [triple for triple in triples if not (vanishing and triple[0] not in ("dq", "dk", "dv", "dbeta", "dinitial_state"))]
    else:
        with torch.no_grad():
            results = zip(("o", "final_state"), FORMS[row.form](**case.args, backend=row.backend), case.oracle, case.twin)
    for output, actual, exact, twin in results:
        row.add(output, relative_error(actual, exact), allowed_error(twin, exact), where)


def report(console: Console, rows: list[Row], refused: dict[tuple[str, str], str]) -> None:
    """One line per backend, form, gate and regime, the worst case in each; then who was not checked and why."""
    table = Table(title="Worst error against the token recurrence in fp64", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("backend", "form", "gate", "regime"):
        table.add_column(column)
    for column in ("error", "allowed"):
        table.add_column(column, justify="right")
    table.add_column("worst case")
    table.add_column("")
    for r in sorted(rows, key=lambda r: (backends.NAMES.index(r.backend), r.form)):
        verdict = "[green]ok[/]" if r.passed else "[red]far[/]"
        table.add_row(r.backend, r.form, r.gate, r.regime, f"{r.error:.1e}", f"{r.allowed:.1e}", f"{r.output}, {r.where}", verdict)
    if rows:
        console.print(table)
    checked = {(r.backend, r.form) for r in rows}
    for (name, form), reason in refused.items():
        extent = "in part" if (name, form) in checked else "not"
        console.print(f"{name}, {form} form: {extent} checked: {reason}", highlight=False)
    if not rows:
        console.print("[red]nothing was checked[/]")
        return
    failed, cases = sum(not r.passed for r in rows), sum(r.cases for r in rows)
    verdict = (
        f"[red]{failed} of {len(rows)} lines are too far off[/]" if failed else f"[green]all {len(rows)} lines are within tolerance[/]"
    )
    console.print(f"{verdict} ({cases} calls); allowed: twice the error of the same chunk algorithm in torch at the same dtype")
