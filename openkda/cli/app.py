"""The commands of `openkda` and their options. Each command's work is in the module of its name."""

from __future__ import annotations

import typer

app = typer.Typer(name="openkda", help="Kimi Delta Attention: run it on recorded tensors, check it, explain it.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Kimi Delta Attention: run it on recorded tensors, check it, explain it."""


def run_app() -> None:
    """Run the command line of this process."""
    app()
