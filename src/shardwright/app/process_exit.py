"""Leaving a process that used torch.distributed, without the abort at interpreter exit.

A gloo worker thread that drops the last reference to a tensor asks for the interpreter's lock.
While the interpreter shuts down, CPython ends such a thread by unwinding its stack, and a C++
destructor on that stack turns this into "terminate called without an active exception". So a rank
closes its groups, does everything the interpreter would do for Python code, and leaves without
shutting the interpreter down. `docs/design/002-process-exit.md` has the evidence.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import threading
from typing import NoReturn

__all__ = ["destroy_groups", "end_process"]


def destroy_groups() -> None:
    """Destroy the process groups, if any were started. Call it when no rank communicates any more.

    Groups that nothing else refers to join their worker threads here.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Leave the process as `sys.exit` does, except that the interpreter isn't shut down.

    Waits for threads that aren't daemons, runs what `atexit` holds, flushes the standard streams.
    Objects still alive aren't finalised; the operating system takes back what they held.

    Args:
        code: The exit code.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter itself calls first
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # ends daemon children
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # As the interpreter does: a reader that went away isn't an error of the program.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
