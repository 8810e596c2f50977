"""The command `openkda`: run, check, explain, info, bench. Needs the extra `openkda[cli]`; app.py holds the commands."""

import sys

EXTRAS = dict.fromkeys(("typer", "rich", "safetensors", "numpy", "matplotlib"), "cli") | {"transformers": "model"}


def main() -> None:
    """What the command `openkda` does once torch is imported (openkda_command.py)."""
    try:
        from openkda.cli.app import run_app

        run_app()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        print(f"openkda: this needs the package {package}, which is missing: pip install 'openkda[{EXTRAS[package]}]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before or after a command, which handle it themselves
        print("openkda: interrupted", file=sys.stderr)
        sys.exit(130)
