"""How what went wrong reaches the person at the command line: an error of ours, a closed output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from shardwright.core.errors import ShardwrightError, SpecError

__all__ = ["print_error", "writing_output"]


def print_error(error: ShardwrightError) -> int:
    """Print an error to stderr, without a traceback.

    Args:
        error: Any of ours; a `SpecError` may hold a line per mistake.

    Returns:
        The exit code: 2 for wrong settings, else 1.
    """
    is_list = isinstance(error, SpecError)
    for index, line in enumerate(str(error).splitlines()):
        print(f"error: {line}" if is_list or index == 0 else line, file=sys.stderr)
    return 2 if is_list else 1


@contextmanager
def writing_output() -> Iterator[None]:
    """Print inside, all of it: an output that takes no more ends the command without a traceback.

    Raises:
        typer.Exit: The reader has gone, which is told by the exit code alone, or there is no space.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"error: can't write the output: {error.strerror}", file=sys.stderr)
        # Python flushes once more as it ends; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from error
