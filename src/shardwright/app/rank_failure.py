"""How a rank failed, and which of several failures is to blame.

When one rank fails, its peers soon fail too, because a connection closed under them. `root_cause`
looks past those echoes.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["RankFailure", "describe_exit", "root_cause"]

ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "connection was likely closed",
    "remote process exited",
    "nccl communicator was aborted",
)
"""What torch's backends say when the other side is gone; compared in lower case."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """One rank's failure.

    Attributes:
        rank: Which rank.
        time_s: When, on the machine's monotonic clock.
        what: What happened, a clause such as ``raised ValueError: no such file``.
        type_name: Class of the exception; empty if the process died instead.
        message: Text of the exception; empty if the process died instead.
        report: The traceback; empty if the process died instead.
        is_echo: Only says that a peer had gone.
    """

    rank: int
    time_s: float
    what: str
    type_name: str = ""
    message: str = ""
    report: str = ""
    is_echo: bool = False

    @classmethod
    def of_exception(cls, rank: int, error: BaseException, *, runner: str) -> RankFailure:
        """Record an exception where it was caught.

        Args:
            rank: Of this process.
            error: The exception.
            runner: File that called the failed function; the report starts below its frames.

        Returns:
            The failure, as of now.
        """
        inner = error.__traceback__
        while inner is not None and inner.tb_frame.f_code.co_filename == runner:
            inner = inner.tb_next
        report = "".join(
            traceback.format_exception(type(error), error, inner or error.__traceback__)
        )
        last_line = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        said = "".join(str(link) for link in _chain(error)).lower()
        return cls(
            rank=rank,
            time_s=time.monotonic(),
            what=f"raised {last_line}",
            type_name=type(error).__name__,
            message=str(error),
            report=report,
            is_echo=isinstance(error, EOFError | ConnectionError)
            or any(echo in said for echo in ECHOES),
        )

    @classmethod
    def of_death(cls, rank: int, exitcode: int, *, had_started: bool) -> RankFailure:
        """Record that a process ended without a word.

        Args:
            rank: Of that process.
            exitcode: As multiprocessing gives it: negative for a signal.
            had_started: It had reached the function it was to run.

        Returns:
            The failure, as of now.
        """
        when = "" if had_started else " before it reached the function"
        return cls(rank=rank, time_s=time.monotonic(), what=f"{describe_exit(exitcode)}{when}")


def _chain(error: BaseException) -> Iterable[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def describe_exit(exitcode: int) -> str:
    """Say how a process ended.

    Args:
        exitcode: As multiprocessing gives it: negative for a signal.

    Returns:
        A clause such as ``died of signal 9 (SIGKILL)``.
    """
    if exitcode >= 0:
        return f"exited with code {exitcode} without returning"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "unnamed"
    return f"died of signal {-exitcode} ({name})"


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """Choose the failure that the others followed from.

    Args:
        failures: At least one.

    Returns:
        The earliest that isn't an echo, or the earliest.
    """
    return min(failures, key=lambda failure: (failure.is_echo, failure.time_s))
