"""The command `openkda` from its first moment on: torch takes seconds to import, and an interrupt ends them in one line as it does later.

A module of its own, for whatever lies in the package imports all of it first."""

from __future__ import annotations

import os
import signal


def interrupted(*_: object) -> None:
    """End at once: nothing has been written yet, and what is being imported may lose an exception."""
    os.write(2, b"openkda: interrupted\n")
    os._exit(130)


def watch() -> None:
    """Until `main` has its imports an interrupt ends the process, unless somebody has decided: a shell's background jobs ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)


def main() -> None:
    """Entry point of the command `openkda`."""
    watch()
    from openkda.cli import main as command

    if signal.getsignal(signal.SIGINT) is interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()
