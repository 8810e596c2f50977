"""The command `openkda`: run, check, explain, info, bench. Needs the extra `openkda[cli]`; app.py holds the commands."""

import sys


def main() -> None:
    """Entry point of the command `openkda`."""
    try:
        from openkda.cli.app import run_app
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] == "openkda":
            raise
        print(f"openkda: the command line needs the package {missing.name}, which is missing: pip install 'openkda[cli]'", file=sys.stderr)
        sys.exit(2)
    try:
        run_app()
    except KeyboardInterrupt:  # before or after a command, which handle it themselves
        sys.exit(130)
