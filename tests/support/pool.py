"""Rank processes that stay, so that many tests of several ranks pay for their start once.

    def add(value):                                  # at the top level of a test module
        tensor = torch.tensor(value)
        dist.all_reduce(tensor)                      # the default group: gloo, world 2
        return tensor

    def test_all_reduce_adds(pool):
        assert pool.run(2, add, value=3.0) == [6.0, 6.0]

A job at world W runs in the first W processes. Each has a store, a default group, random seed,
environment and warning filters (the test's) of its own; the group is closed when all have returned.
`pool.run` returns the results or fails the test with rank and traceback; `pool.attempt` returns
what happened on each rank, exceptions and deaths included. A job that hangs or kills a rank costs
the pool a restart, and the tests that follow nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch.distributed as dist

from shardwright.app.rank_failure import RankFailure, root_cause
from shardwright.app.rank_pickle import pack, unpack
from shardwright.app.rank_process import STACKS_SIGNAL
from tests.support.pool_rank import CLOSED, RELEASE, Job, Outcome, serve

__all__ = ["Outcome", "PoolFailure", "RankPool"]

MAX_WORLD = 4
TIMEOUT_S = 60.0
AFTER_FAILURE_S = 10.0
"""How long the other ranks may take once one has failed and closed its connections."""
CLOSE_S = 20.0
"""How long a rank may take to close its group once all have returned."""


class PoolFailure(AssertionError):
    """A job failed; fails the test that ran it."""


@dataclass(kw_only=True)
class _Member:
    """One process of the pool."""

    process: SpawnProcess
    pipe: Connection
    stacks: Connection


class RankPool:
    """Up to four spawned processes that run jobs as ranks."""

    def __init__(self) -> None:
        self._members: list[_Member] = []

    @property
    def pids(self) -> list[int | None]:
        """Processes now running, in order of rank."""
        return [member.process.pid for member in self._members]

    def run(
        self,
        world: int,
        function: str | Callable[..., Any],
        /,
        *,
        timeout_s: float = TIMEOUT_S,
        starts_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function on `world` ranks.

        Args:
            world: How many.
            function: ``module:name``, or a function at the top level of a module.
            timeout_s: When to give up on ranks that don't return.
            starts_group: Start a gloo default group first; without it the launcher's variables
                are set all the same.
            **kwargs: The function's arguments, the same on every rank.

        Returns:
            What each rank returned, in order of rank.

        Raises:
            PoolFailure: A rank raised, died or didn't return.
        """
        __tracebackhide__ = True
        outcomes = self._attempt(world, function, timeout_s, starts_group, kwargs)
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if failures:
            raise PoolFailure(_describe(world, failures))
        return [outcome.result for outcome in outcomes]

    def attempt(
        self,
        world: int,
        function: str | Callable[..., Any],
        /,
        *,
        timeout_s: float = TIMEOUT_S,
        starts_group: bool = True,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Run a function that may fail.

        Args:
            world: As in `run`.
            function: As in `run`.
            timeout_s: As in `run`.
            starts_group: As in `run`.
            **kwargs: As in `run`.

        Returns:
            For each rank its result, or its exception (`raised`, `message`, `failure.report`) or
            death (`failure.what`), and how long it took.

        Raises:
            PoolFailure: A rank didn't return.
        """
        __tracebackhide__ = True
        return self._attempt(world, function, timeout_s, starts_group, kwargs)

    def close(self) -> None:
        """End all processes."""
        for member in self._members:
            member.pipe.close()  # an idle rank leaves
        deadline = time.monotonic() + 5.0
        for member in self._members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            member.process.kill()
            member.process.join()
            member.stacks.close()
        self._members = []

    def _attempt(
        self,
        world: int,
        function: str | Callable[..., Any],
        timeout_s: float,
        starts_group: bool,
        kwargs: dict[str, Any],
    ) -> list[Outcome]:
        __tracebackhide__ = True
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"the pool runs 1 to {MAX_WORLD} ranks; found {world}")
        self._grow(world)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
        )
        is_clean = False
        try:
            for rank, member in enumerate(self._members[:world]):
                job = Job(
                    function=function,
                    kwargs=kwargs,
                    environment=_environment(rank, world, store.port),
                    starts_group=starts_group,
                    filters=list(warnings.filters),
                )
                member.pipe.send_bytes(pack(job))
            outcomes = self._collect(world, timeout_s)
            is_clean = self._finish(outcomes)
        finally:
            if not is_clean:
                self._kill()
            del store
        return outcomes

    def _grow(self, world: int) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self._members) < world:
            pipe, rank_pipe = context.Pipe()
            stacks, rank_stacks = context.Pipe(duplex=False)
            rank = len(self._members)
            process = context.Process(
                target=serve,
                args=(rank, os.getpid(), rank_pipe, rank_stacks),
                name=f"pool rank {rank}",
                daemon=True,
            )
            process.start()
            rank_pipe.close()
            rank_stacks.close()
            self._members.append(_Member(process=process, pipe=pipe, stacks=stacks))

    def _collect(self, world: int, timeout_s: float) -> list[Outcome]:
        """Wait for every rank's outcome."""
        __tracebackhide__ = True
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in range(world) if rank not in outcomes]:
            pipes = [self._members[rank].pipe for rank in missing]
            if not wait(pipes, max(0.0, deadline - time.monotonic())):
                raise PoolFailure(self._describe_hang(world, missing, outcomes, timeout_s))
            for rank in missing:
                if self._members[rank].pipe.poll():
                    outcomes[rank] = self._receive(rank)
            if any(outcome.failure for outcome in outcomes.values()):
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        return [outcomes[rank] for rank in range(world)]

    def _receive(self, rank: int) -> Outcome:
        member = self._members[rank]
        try:
            outcome: Outcome = unpack(member.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            member.process.join()
            exitcode = member.process.exitcode
            assert exitcode is not None, "a process that was joined has an exit code"
            return Outcome(
                rank=rank, failure=RankFailure.of_death(rank, exitcode, had_started=True)
            )
        return outcome

    def _finish(self, outcomes: Sequence[Outcome]) -> bool:
        """Have the ranks close their groups; whether all are ready for the next job."""
        __tracebackhide__ = True
        alive = [o for o in outcomes if o.failure is None or o.failure.type_name]
        for outcome in alive:
            if outcome.failure is None:
                self._members[outcome.rank].pipe.send_bytes(RELEASE)
        deadline = time.monotonic() + CLOSE_S
        for outcome in alive:
            member = self._members[outcome.rank]
            if not member.pipe.poll(max(0.0, deadline - time.monotonic())):
                if any(o.failure for o in outcomes):
                    return False  # it waits for a peer that failed
                raise PoolFailure(
                    f"all ranks returned, but rank {outcome.rank} hasn't closed its groups "
                    f"{CLOSE_S:g} s later: a communication that it started never ends\n"
                    f"{_stacks(member)}"
                )
            try:
                answer = member.pipe.recv_bytes()
            except (EOFError, ConnectionError):
                member.process.join()
                raise PoolFailure(
                    f"rank {outcome.rank} returned, then died closing its groups, with exit code "
                    f"{member.process.exitcode}"
                ) from None
            assert answer == CLOSED, f"rank {outcome.rank} answered {answer!r}"
        return len(alive) == len(outcomes)

    def _describe_hang(
        self, world: int, missing: list[int], outcomes: dict[int, Outcome], timeout_s: float
    ) -> str:
        failures = [outcome.failure for outcome in outcomes.values() if outcome.failure]
        lines = [
            f"{world} ranks should have returned within {timeout_s:g} s; ranks {missing} did not"
        ]
        if failures:
            lines.append(_describe(world, failures))
        lines += [f"rank {rank} waits here:\n{_stacks(self._members[rank])}" for rank in missing]
        return "\n".join(lines)

    def _kill(self) -> None:
        for member in self._members:
            member.process.kill()
        self.close()


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _stacks(member: _Member) -> str:
    if member.process.pid is None or not member.process.is_alive():
        return "  (the process has ended)"
    os.kill(member.process.pid, STACKS_SIGNAL)
    text = b""
    while wait([member.stacks], timeout=1.0 if not text else 0.1):
        chunk = os.read(member.stacks.fileno(), 65536)
        if not chunk:
            break
        text += chunk
    return text.decode(errors="replace")


def _describe(world: int, failures: Sequence[RankFailure]) -> str:
    cause = root_cause(failures)
    lines = [f"rank {cause.rank} of {world} {cause.what}"]
    lines += [f"rank {f.rank} of {world} {f.what}" for f in failures if f is not cause]
    if cause.report:
        lines.append(f"rank {cause.rank}'s traceback:\n{cause.report.rstrip()}")
    return "\n".join(lines)
