"""What a process of the pool does: one job after another until the pipe closes."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwright.app.process_exit import destroy_groups, end_process
from shardwright.app.rank_failure import RankFailure
from shardwright.app.rank_pickle import pack, unpack
from shardwright.app.rank_process import STACKS_SIGNAL, die_with

__all__ = ["CLOSED", "RELEASE", "Job", "Outcome", "serve"]

RELEASE = b"release"
"""To a rank that returned: all have, close the group."""

CLOSED = b"closed"
"""From a rank: the group is closed, ready for the next job."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank is to do.

    Attributes:
        function: ``module:name``, or a function at the top level of a module.
        kwargs: Its arguments.
        environment: Variables set while it runs.
        starts_group: A gloo default group is there when it is called.
        filters: The caller's warning filters.
    """

    function: str | Callable[..., Any]
    kwargs: dict[str, Any]
    environment: dict[str, str]
    starts_group: bool
    filters: list[Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended on one rank.

    Attributes:
        rank: Which.
        result: What the function returned; None if it failed.
        failure: How it failed, or None.
        seconds: How long the function ran, the start of the group left out.
    """

    rank: int
    result: Any = None
    failure: RankFailure | None = None
    seconds: float = 0.0

    @property
    def raised(self) -> str:
        """Class of the exception; empty if there was none."""
        return self.failure.type_name if self.failure else ""

    @property
    def message(self) -> str:
        """Text of the exception; empty if there was none."""
        return self.failure.message if self.failure else ""


def serve(rank: int, parent_pid: int, pipe: Connection, stacks: Connection) -> NoReturn:
    """Do the jobs that come through the pipe.

    Args:
        rank: This process's rank in every job.
        parent_pid: The pool's process.
        pipe: To the pool, both ways.
        stacks: To the pool; where Python stacks are written on request.
    """
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its ranks
    faulthandler.register(STACKS_SIGNAL, file=stacks.fileno())
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that the collections below look at a job's own objects only
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            end_process(0)
        outcome, packed = _packed(_attempt(rank, message))
        pipe.send_bytes(packed)
        if outcome.failure is None:
            pipe.recv_bytes()
        del outcome
        gc.collect()
        destroy_groups()
        pipe.send_bytes(CLOSED)


def _attempt(rank: int, message: bytes) -> Outcome:
    started_s = time.monotonic()
    try:
        job: Job = unpack(message)
        with _surroundings(job):
            if job.starts_group:
                dist.init_process_group("gloo")
            function = _find(job.function)
            started_s = time.monotonic()
            result = function(**job.kwargs)
            return Outcome(rank=rank, result=result, seconds=time.monotonic() - started_s)
    except BaseException as error:
        failure = RankFailure.of_exception(rank, error, runner=__file__)
        # Frames in the traceback may hold groups, whose connections peers wait for to close.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return Outcome(rank=rank, failure=failure, seconds=failure.time_s - started_s)


@contextlib.contextmanager
def _surroundings(job: Job) -> Iterator[None]:
    """Give every job the same start, and undo what it changed of the process."""
    before = dict(os.environ)
    os.environ.update(job.environment)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.filters[:] = job.filters  # type: ignore[index]  # a list, whatever its stub says
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)


def _find(function: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(function):
        return function
    module, name = function.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _packed(outcome: Outcome) -> tuple[Outcome, bytes]:
    """Pack an outcome, or the failure to pack it."""
    try:
        return outcome, pack(outcome)
    except Exception as error:
        failure = RankFailure.of_exception(outcome.rank, error, runner="")
        failed = Outcome(rank=outcome.rank, failure=failure, seconds=outcome.seconds)
        return failed, pack(failed)
