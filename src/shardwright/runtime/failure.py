"""Make one rank's failure every rank's error, soon, with a name.

Five things can go wrong between ranks, and each ends here:

- *A rank raises.* It tells the store, and waits a moment for the others to say the same. If all
  ranks raised at the same point of the same schedule, the groups stay usable and training may go
  on. Otherwise it ends its groups, which fails the peers' waits at once; they find its record.
- *A rank dies.* Its connections close, which fails the peers' waits; they name the peer.
- *Ranks diverge*: they wait for different things. A thread that looks once in a while at waits
  of some seconds compares what each rank has started, and names the first difference.
- *A rank ends early* under a launcher that notes it: whoever still waits for it raises.
- *A rank never comes.* The group's own timeout bounds the wait.

The store is the rendezvous store: it works when collectives don't.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import PrefixStore

from shardwright.core.errors import RankFailedError, RankMismatchError, ShardwrightError
from shardwright.runtime.transport.base import PeerLost
from shardwright.runtime.transport.control import end_group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from shardwright.runtime.ledger import Ledger
    from shardwright.runtime.transport.base import Axis

__all__ = ["FailureMonitor", "Waiting", "finished_key"]

_PATIENCE_S = 3.0
_GRACE_S = 3.0
_LOOK_EVERY_S = 0.5
_RECENT = 64


class FailureMonitor:
    """Watches one rank's communication over one mesh.

    Args:
        store: The rendezvous store; None for a single rank.
        name: Name of the mesh, the same on all its ranks and no other mesh's.
        rank: This rank.
        world_size: Ranks.
        axes: Axes whose groups must fail together.
    """

    def __init__(
        self,
        *,
        store: Store | None,
        name: str,
        rank: int,
        world_size: int,
        axes: Sequence[Axis],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.broken: ShardwrightError | None = None
        self._base = store
        self._store = None if store is None else PrefixStore(name, store)
        self._axes = [axis for axis in axes if axis.group is not None]
        self._epoch = 0
        self._count = 0
        self._digest = 0
        self._recent: deque[tuple[str, str]] = deque(maxlen=_RECENT)
        self._wait: tuple[float, str, str] | None = None
        if store is not None:
            threading.Thread(
                target=_look_repeatedly, args=(weakref.ref(self),), daemon=True, name="watch"
            ).start()

    # What the engine tells

    def issued(self, operation: str, unit: str) -> None:
        """Note that a collective was started; all ranks start the same ones in the same order."""
        self._count += 1
        self._digest = zlib.crc32(f"{operation}:{unit}".encode(), self._digest)
        self._recent.append((operation, unit))

    def waiting_begins(self, operation: str, unit: str) -> None:
        """Note what this rank waits for."""
        if self.broken is not None:
            raise self.broken
        self._wait = (time.monotonic(), operation, unit)

    def waiting_ends(self) -> None:
        """Note that this rank waits no more."""
        self._wait = None

    def translate(self, error: BaseException, operation: str, unit: str) -> ShardwrightError:
        """Say why a wait failed, end all groups and leave a record for the others.

        Args:
            error: What the backend raised.
            operation: What was waited for.
            unit: Of which unit.
        """
        if self.broken is not None:
            return self.broken
        rank = error.global_rank if isinstance(error, PeerLost) else -1
        who = "another rank" if rank < 0 else f"rank {rank}"
        found = self._record(
            kind="failed",
            rank=rank,
            text=f"{who} was lost, or did not come, while rank {self.rank} waited for "
            f"{operation} of unit {unit!r} ({str(error).splitlines()[0][:200]})",
            wait_s=1.0,
        )
        return self._break(found)

    @contextlib.contextmanager
    def explaining(self, operation: str, unit: str) -> Iterator[None]:
        """Translate a lost peer where a rank waits outside the engine's own waits.

        Args:
            operation: What is waited for.
            unit: Of which unit.
        """
        try:
            yield
        except PeerLost as lost:
            raise self.translate(lost, operation, unit) from lost

    def failed_here(self, error: Exception, operation: str, unit: str) -> None:
        """Tell the others that this rank raised; return once it is clear what they did.

        Args:
            error: What was raised. A note is added if the other ranks can't go on.
            operation: ``forward`` or ``backward``.
            unit: Outermost unit that raised.
        """
        if self._store is None or self.broken is not None:
            return
        key = f"raised/{self._epoch}/{self._count}/{self._digest}"
        self._epoch += 1
        deadline = time.monotonic() + _GRACE_S
        with contextlib.suppress(RuntimeError):
            self._store.add(key, 1)
            while time.monotonic() < deadline:
                if self._store.add(key, 0) == self.world_size:
                    return
                time.sleep(0.02)
        found = self._record(
            kind="failed",
            rank=self.rank,
            text=f"rank {self.rank} raised {type(error).__name__} in {operation} of unit "
            f"{unit!r}: {str(error)[:500]}",
            wait_s=0.0,
        )
        self._break(found)
        error.add_note(
            f"Rank {self.rank} raised alone, so training cannot go on: the other ranks were told. "
            "Restart all ranks."
        )

    # The store

    def _record(self, *, kind: str, rank: int, text: str, wait_s: float) -> dict[str, Any]:
        """Leave the first record of a failure, or find the one another rank left before.

        Args:
            kind: ``failed`` or ``diverged``.
            rank: The rank to blame, -1 where unknown.
            text: What happened.
            wait_s: How long another rank's own record may take to appear: it knows better.
        """
        mine = {"kind": kind, "rank": rank, "text": text}
        if self._store is None:
            return mine
        try:
            deadline = time.monotonic() + wait_s
            while not self._store.check(["first"]) and time.monotonic() < deadline:
                time.sleep(0.02)
            found = self._store.compare_set("first", "", json.dumps(mine))
            return dict(json.loads(found))
        except RuntimeError:  # the store is gone too
            return mine

    def _break(self, found: dict[str, Any]) -> ShardwrightError:
        """End all groups and remember why."""
        if self.broken is None:
            kind = RankMismatchError if found["kind"] == "diverged" else RankFailedError
            remedy = (
                "Let all ranks run the same units in the same order"
                if found["kind"] == "diverged"
                else "See that rank's own output, then restart all ranks"
            )
            self.broken = kind(
                f"all ranks must take part in every step; {found['text']}. {remedy}."
            )
            self._end_groups()
        return self.broken

    def _end_groups(self) -> None:
        for axis in self._axes:
            end_group(axis)

    # The thread

    def _has_finished(self, rank: int) -> bool:
        return self._base is not None and bool(self._base.check([finished_key(rank)]))

    def look(self) -> None:
        """Compare schedules if this rank has waited for some seconds."""
        wait, store = self._wait, self._store
        if wait is None or store is None or self.broken is not None:
            return
        started, operation, unit = wait
        if time.monotonic() - started < _PATIENCE_S:
            return
        mine = {
            "started": started,
            "wait": f"{operation} of unit {unit!r}",
            "count": self._count,
            "recent": list(self._recent),
        }
        store.set(f"wait/{self.rank}", json.dumps(mine))
        for other in range(self.world_size):
            if other != self.rank and self._has_finished(other) and self._wait is wait:
                found = self._record(
                    kind="failed",
                    rank=other,
                    text=f"rank {other} has finished, while rank {self.rank} waits for "
                    f"{mine['wait']}",
                    wait_s=0.0,
                )
                self._break(found)
                return
            if other == self.rank or not store.check([f"wait/{other}"]):
                continue
            theirs = json.loads(store.get(f"wait/{other}"))
            difference = _first_difference(mine, theirs)
            if difference is None or self._wait is not wait:
                continue
            index, here, there = difference
            found = self._record(
                kind="diverged",
                rank=other,
                text=f"rank {self.rank} waits for {mine['wait']} and rank {other} for "
                f"{theirs['wait']}: collective {index} was {here} on rank {self.rank} and "
                f"{there} on rank {other}",
                wait_s=0.0,
            )
            self._break(found)
            return


def finished_key(rank: int) -> str:
    """Key of the rendezvous store under which a launcher notes that a rank's work has ended."""
    return f"shardwright/finished/{rank}"


class Waiting:
    """A ``with`` block in which this rank waits: timed, watched, and its errors explained."""

    __slots__ = ("_is_timed", "_ledger", "_monitor", "_operation", "_started", "_unit")

    def __init__(self, ledger: Ledger, monitor: FailureMonitor) -> None:
        self._ledger = ledger
        self._monitor = monitor
        self._operation = self._unit = ""
        self._is_timed = True
        self._started = 0.0

    def __call__(self, operation: str, unit: str, *, is_timed: bool = True) -> Waiting:
        """Name what is waited for. One block at a time.

        Args:
            operation: For example ``all_gather``.
            unit: Of which unit.
            is_timed: Whether the block is waiting, rather than work that may have to wait.
        """
        self._operation, self._unit, self._is_timed = operation, unit, is_timed
        return self

    def __enter__(self) -> None:
        self._monitor.waiting_begins(self._operation, self._unit)
        self._started = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._monitor.waiting_ends()
        if self._is_timed:
            self._ledger.wait_s += time.perf_counter() - self._started
        if isinstance(error, RuntimeError) and not isinstance(error, ShardwrightError):
            raise self._monitor.translate(error, self._operation, self._unit) from error


def _look_repeatedly(reference: weakref.ref[FailureMonitor]) -> None:
    """Body of the watching thread; ends with the monitor."""
    while True:
        time.sleep(_LOOK_EVERY_S)
        monitor = reference()
        if monitor is None or monitor.broken is not None:
            return
        with contextlib.suppress(RuntimeError):  # the store ends before the process does
            monitor.look()
        del monitor


def _first_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[int, str, str] | None:
    """First index both histories cover and disagree on, with what each did there."""
    first_mine = mine["count"] - len(mine["recent"])
    first_theirs = theirs["count"] - len(theirs["recent"])
    for index in range(max(first_mine, first_theirs), min(mine["count"], theirs["count"])):
        here = tuple(mine["recent"][index - first_mine])
        there = tuple(theirs["recent"][index - first_theirs])
        if here != there:
            return (
                index,
                f"{here[0]} of {here[1]!r}",
                f"{there[0]} of {there[1]!r}",
            )
    return None
