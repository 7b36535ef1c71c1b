"""How an error of ours reaches the person at the command line."""

from __future__ import annotations

import sys

from shardwright.core.errors import ShardwrightError, SpecError

__all__ = ["print_error"]


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
