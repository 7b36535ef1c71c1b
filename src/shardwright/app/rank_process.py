"""What one launched rank does, from its first line to its exit.

`launch` starts `run_rank` in a new process. Over one pipe the rank says that it has started, then
how the function ended; where it returned, the rank waits for the word that all ranks have, so that
none closes its connections under a peer that still talks.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from shardwright.app.process_exit import destroy_groups, end_process
from shardwright.app.rank_failure import RankFailure
from shardwright.app.rank_pickle import pack, unpack

__all__ = [
    "FAILED",
    "RELEASE",
    "RETURNED",
    "STACKS_SIGNAL",
    "STARTED",
    "RankSetup",
    "die_with",
    "run_rank",
]

STARTED, RETURNED, FAILED = b"S", b"R", b"F"
"""First byte of a message from a rank; the rest is the packed result or failure."""

RELEASE = b"."
"""The message to a rank that all have returned."""

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write where each of its threads is."""

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a rank needs to know.

    Attributes:
        rank: Its number.
        environment: Variables to set before anything of the user's is imported.
        num_threads: Threads of torch's operators.
        parent_pid: Process whose end ends this one.
        is_forked: Started as a copy of its parent.
        work: The packed function, arguments and keyword arguments; or a function without
            arguments where the process is a copy.
    """

    rank: int
    environment: dict[str, str]
    num_threads: int
    parent_pid: int
    is_forked: bool
    work: bytes | Callable[[], Any]


def run_rank(setup: RankSetup, pipe: Connection, stacks: Connection) -> NoReturn:
    """Run the function as one rank and leave the process.

    Args:
        setup: What to do.
        pipe: To the parent, both ways.
        stacks: To the parent; where Python stacks are written on request.
    """
    die_with(setup.parent_pid)
    if setup.is_forked:
        atexit._clear()  # what the parent wants done at its own exit
    # A group of its own: Ctrl-C in a terminal reaches the parent only, which passes it on once.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(STACKS_SIGNAL, file=stacks.fileno())
    os.environ.update(setup.environment)
    pipe.send_bytes(STARTED)
    try:
        message = RETURNED + _call(setup)
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a rank, too
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        failure = RankFailure.of_exception(setup.rank, error, runner=__file__)
        pipe.send_bytes(FAILED + pack(failure))
        end_process(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _note_end(setup.rank)
    pipe.send_bytes(message)
    pipe.recv_bytes()
    try:
        destroy_groups()
    except Exception:
        traceback.print_exc()
        end_process(1)
    end_process(0)


def _note_end(rank: int) -> None:
    """Tell ranks that still wait for this one that it takes part in nothing any more."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    from shardwright.runtime.failure import finished_key

    if dist.is_available() and dist.is_initialized():
        _get_default_store().set(finished_key(rank), "1")


def _call(setup: RankSetup) -> bytes:
    import torch  # after OMP_NUM_THREADS is set

    torch.set_num_threads(setup.num_threads)
    if callable(setup.work):
        return _pack_result(setup.work())
    function, args, kwargs = unpack(setup.work)
    return _pack_result(function(*args, **kwargs))


def _pack_result(result: Any) -> bytes:
    try:
        return pack(result)
    except Exception as error:
        raise TypeError(
            f"a rank must return what pickle takes (numbers, strings, arrays, tensors and "
            f"containers of them); found a {type(result).__name__} that doesn't travel: {error}; "
            f"return the part you need"
        ) from None


def die_with(parent_pid: int) -> None:
    """Have this process killed when its parent ends, however that ends.

    Args:
        parent_pid: The parent, as it named itself.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent_pid:  # it ended before the call above
            os._exit(1)
        return
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by multiprocessing"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
