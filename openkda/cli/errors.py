"""How a command ends: bad input is one sentence and exit code 2, an interrupt exit code 130, anything else a bug with its traceback."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

BAD_INPUT, CHECK_FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143


class BadInput(Exception):
    """Something the user gave cannot be used; the message is one sentence that says what and why."""


@contextmanager
def refusals() -> Iterator[None]:
    """The library's refusals of an argument (ValueError, TypeError) become BadInput. Wraps checks alone, never a computation."""
    try:
        yield
    except (ValueError, TypeError) as refusal:
        raise BadInput(str(refusal)) from refusal


def guarded(command: Callable) -> Callable:
    """A command whose BadInput, Ctrl-C and SIGTERM end the process in one line with the right exit code."""

    @functools.wraps(command)
    def wrapped(*args: object, **kwargs: object) -> object:
        previous = None
        try:
            previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # unwinds, so that partial files are removed
            return command(*args, **kwargs)
        except BadInput as error:
            typer.echo(f"openkda: {error}", err=True)
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt:
            typer.echo("openkda: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        finally:
            if previous is not None:
                signal.signal(signal.SIGTERM, previous)

    return wrapped
