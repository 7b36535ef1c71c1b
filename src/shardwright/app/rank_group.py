"""The parent's side of a launch: the rank processes, what they said, and how they end.

`launch` owns one `RankGroup` per call. All waiting happens in `_receive`, which sleeps until a rank
says something or ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from shardwright.app import rank_process
from shardwright.app.rank_failure import RankFailure, describe_exit, root_cause
from shardwright.app.rank_pickle import unpack
from shardwright.app.rank_process import (
    FAILED,
    RELEASE,
    RETURNED,
    STACKS_SIGNAL,
    STARTED,
    RankSetup,
    run_rank,
)
from shardwright.core.errors import LaunchError

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

__all__ = ["RankGroup"]

END_S = 3.0
"""How long a rank may take to end after SIGTERM, before SIGKILL."""

SETTLE_S = 0.3
"""After a failure, how long to listen for an earlier one of another rank."""

SETTLE_ECHO_S = 3.0
"""The same where all failures known only say that a peer had gone."""


@dataclass(kw_only=True)
class _Rank:
    """One process and what is known of it."""

    rank: int
    process: BaseProcess
    pipe: Connection
    stacks: Connection
    is_pipe_open: bool = True
    has_started: bool = False
    has_returned: bool = False
    result: Any = None
    failure: RankFailure | None = None

    @property
    def is_running(self) -> bool:
        """It has neither returned nor failed."""
        return not self.has_returned and self.failure is None


class RankGroup:
    """Starts rank processes, collects their results, and leaves none behind."""

    def __init__(
        self, context: BaseContext, *, grace_s: float, timeout_s: float | None = None
    ) -> None:
        """Prepare a group without processes.

        Args:
            context: How processes start.
            grace_s: Seconds a rank may take to end in order, after an interrupt or its return.
            timeout_s: Bound on start and work together, in seconds; None for no bound.
        """
        self._context = context
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._ranks: list[_Rank] = []

    def start(self, setups: Sequence[RankSetup]) -> None:
        """Start one process per setup.

        Args:
            setups: In order of rank.
        """
        for setup in setups:
            pipe, rank_pipe = self._context.Pipe()
            stacks, rank_stacks = self._context.Pipe(duplex=False)
            process = self._context.Process(  # type: ignore[attr-defined]  # each context has one
                target=run_rank,
                args=(setup, rank_pipe, rank_stacks),
                name=f"rank {setup.rank}",
            )
            self._ranks.append(_Rank(rank=setup.rank, process=process, pipe=pipe, stacks=stacks))
            with _surroundings_of_start(setup):
                process.start()
            rank_pipe.close()
            rank_stacks.close()

    def results(self) -> list[Any]:
        """Wait for all ranks to return, then let them end.

        Returns:
            What each returned, in order of rank.

        Raises:
            LaunchError: A rank raised, died, or took too long.
        """
        settled = None
        while running := [rank for rank in self._ranks if rank.is_running]:
            now = time.monotonic()
            if settled is not None and now >= settled:
                break
            if self._deadline is not None and now >= self._deadline:
                raise LaunchError(self._describe_timeout(running))
            self._receive(until=_earliest(settled, self._deadline))
            settled = self._settle_time()
        if self._failures():
            raise LaunchError(self._describe_failure())
        self._release()
        return [rank.result for rank in self._ranks]

    def interrupt(self) -> None:
        """Pass an interrupt on, and give the ranks time to end in order."""
        for rank in self._alive():
            if rank.is_running:
                _send_signal(rank, signal.SIGINT)
        deadline = time.monotonic() + self._grace_s
        while any(rank.is_running for rank in self._alive()) and time.monotonic() < deadline:
            self._receive(until=deadline)
        self._send_release()
        self._wait_for_exit(deadline)

    def end(self) -> None:
        """End what still runs: politely, then by force. Frees all the group holds."""
        try:
            for rank in self._alive():
                rank.process.terminate()
            self._wait_for_exit(time.monotonic() + END_S)
        finally:  # a second Ctrl-C leads here
            for rank in self._ranks:
                if rank.process.pid is not None:
                    rank.process.kill()
                    rank.process.join()
                rank.process.close()
                rank.pipe.close()
                rank.stacks.close()
            self._ranks = []

    def _alive(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.process.is_alive()]

    def _failures(self) -> list[RankFailure]:
        return [rank.failure for rank in self._ranks if rank.failure is not None]

    def _settle_time(self) -> float | None:
        """When to stop listening for further failures; None while there is none."""
        failures = self._failures()
        if not failures:
            return None
        first = min(failure.time_s for failure in failures)
        is_clear = any(not failure.is_echo for failure in failures)
        return first + (SETTLE_S if is_clear else SETTLE_ECHO_S)

    def _receive(self, *, until: float | None) -> None:
        """Sleep until a running rank says something or ends, or the time comes; take it in."""
        running = [rank for rank in self._ranks if rank.is_running and rank.process.pid is not None]
        sources: list[Any] = [rank.process.sentinel for rank in running]
        sources += [rank.pipe for rank in running if rank.is_pipe_open]
        timeout = None if until is None else max(0.0, until - time.monotonic())
        ready = wait(sources, timeout)
        for rank in running:
            if rank.pipe in ready or rank.process.sentinel in ready:
                _take_in(rank)

    def _release(self) -> None:
        """Let the ranks, which have all returned, close their groups and end."""
        self._send_release()
        self._wait_for_exit(time.monotonic() + self._grace_s)
        for rank in self._ranks:
            exitcode = rank.process.exitcode
            if exitcode is None:
                warnings.warn(
                    f"rank {rank.rank} returned but hadn't ended {self._grace_s:g} s later, and "
                    f"was ended; look for a thread that isn't a daemon, or a function registered "
                    f"with atexit that waits",
                    RuntimeWarning,
                    stacklevel=4,
                )
            elif exitcode != 0:
                raise LaunchError(
                    f"launch expected {len(self._ranks)} ranks to end in order; rank {rank.rank} "
                    f"returned, then {describe_exit(exitcode)} while it closed its process groups; "
                    f"its own output says more"
                )

    def _send_release(self) -> None:
        for rank in self._alive():
            if rank.has_returned:
                try:
                    rank.pipe.send_bytes(RELEASE)
                except ConnectionError:
                    continue  # it ended since; its exit code tells

    def _wait_for_exit(self, deadline: float) -> None:
        while alive := self._alive():
            timeout = deadline - time.monotonic()
            if timeout <= 0:
                return
            wait([rank.process.sentinel for rank in alive], timeout)

    def _describe_failure(self) -> str:
        failures = self._failures()
        cause = root_cause(failures)
        headline = (
            f"launch expected {len(self._ranks)} ranks to return; rank {cause.rank} {cause.what}; "
            f"the others were ended"
        )
        lines = [headline]
        also = [failure.rank for failure in failures if failure is not cause]
        if also:
            lines.append(f"failed after it: {_ranks_in_words(also)}")
        if cause.report:
            lines.append(f"rank {cause.rank}'s traceback:\n{cause.report.rstrip()}")
        else:
            lines.append(_advise_on_death(cause))
        return "\n".join(lines)

    def _describe_timeout(self, running: Sequence[_Rank]) -> str:
        names = _ranks_in_words(rank.rank for rank in running)
        headline = (
            f"launch expected {len(self._ranks)} ranks to return within {self._timeout_s:g} s; "
            f"found {names} still running; raise timeout_s, or see below where each waits"
        )
        waits = [f"rank {rank.rank}:\n{_stacks(rank)}" for rank in running]
        return "\n".join([headline, *waits])


@contextlib.contextmanager
def _surroundings_of_start(setup: RankSetup) -> Iterator[None]:
    """Have a new process start with the number of threads that libraries read when loaded."""
    name = "OMP_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = setup.environment[name]
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn of a copy of a process with threads. Of those here, the
            # store's serves this process only, and torch's are left alone by a rank's one thread.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded")
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _take_in(rank: _Rank) -> None:
    """Read what a rank has said, and note if it has ended."""
    try:
        while rank.is_running and rank.is_pipe_open and rank.pipe.poll():
            message = rank.pipe.recv_bytes()
            kind, body = message[:1], message[1:]
            if kind == STARTED:
                rank.has_started = True
            elif kind == RETURNED:
                rank.result, rank.has_returned = unpack(body), True
            else:
                assert kind == FAILED, f"rank {rank.rank} sent a message of kind {kind!r}"
                rank.failure = unpack(body)
    except (EOFError, ConnectionError):
        rank.is_pipe_open = False
    if rank.is_running and not rank.process.is_alive():
        exitcode = rank.process.exitcode
        assert exitcode is not None, "a process that isn't alive has an exit code"
        rank.failure = RankFailure.of_death(rank.rank, exitcode, had_started=rank.has_started)


def _earliest(*times: float | None) -> float | None:
    return min((moment for moment in times if moment is not None), default=None)


def _send_signal(rank: _Rank, number: signal.Signals) -> None:
    pid = rank.process.pid
    if pid is not None and rank.process.is_alive():
        os.kill(pid, number)


def _stacks(rank: _Rank) -> str:
    """Ask a rank where its threads are."""
    if not rank.has_started:
        return "  had not reached the function"
    _send_signal(rank, STACKS_SIGNAL)
    text = b""
    while wait([rank.stacks], timeout=1.0 if not text else 0.1):
        chunk = os.read(rank.stacks.fileno(), 65536)
        if not chunk:
            break
        text += chunk
    lines = text.decode(errors="replace").splitlines()
    shown = itertools.takewhile(lambda line: f'"{rank_process.__file__}"' not in line, lines)
    return "\n".join(shown) or "  did not answer"


def _ranks_in_words(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _advise_on_death(failure: RankFailure) -> str:
    if "before it reached" in failure.what:
        return (
            "its own output says why; a script must call launch under "
            "'if __name__ == \"__main__\":'"
        )
    if "SIGKILL" in failure.what:
        return "the kernel ends the largest process this way when memory runs out"
    return "it left no traceback; its own output may say more"
