"""Direct exchange by send and receive: every rank sends each peer the peer's chunk.

For gloo this moves the optimal number of bytes, needs no progress from the computing thread and
hides behind computation, where gloo's own collectives do neither. Every element is reduced on one
rank only, in a fixed order, so that replicas stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwright.runtime.transport.base import (
    Axis,
    NoOperation,
    Operation,
    PeerLost,
    Piece,
    chunk_of,
)

__all__ = ["Exchange", "PairwiseTransport"]

_SLICE_NUMEL = 1 << 16

_Route = tuple[int, torch.Tensor]  # (peer's rank on the axis, flat view)


class PairwiseTransport:
    """Send and receive between every pair of ranks on an axis. Memory: CPU; backend: gloo."""

    name = "pairwise"
    needs_staging = True

    def all_gather(self, pieces: Sequence[Piece], axis: Axis, tag: int) -> Operation:
        """See `Transport.all_gather`."""
        local = [(chunk_of(p.whole, axis.size, axis.rank), p.own) for p in pieces if p.own.numel()]
        if axis.group is None:
            return NoOperation(local)
        sends, receives = [], []
        for peer in _peers(axis):
            for p in pieces:
                if p.own.numel():
                    sends.append((peer, p.own))
                    receives.append((peer, chunk_of(p.whole, axis.size, peer)))
        return _Gather(Exchange(axis, tag, sends, receives), NoOperation(local))

    def reduce_scatter(
        self, pieces: Sequence[Piece], axis: Axis, tag: int, staging: torch.Tensor | None
    ) -> Operation:
        """See `Transport.reduce_scatter`. `staging`: flat, ``(size-1) * sum(own)`` elements."""
        sums = [(p.own, chunk_of(p.whole, axis.size, axis.rank)) for p in pieces if p.own.numel()]
        if axis.group is None:
            return NoOperation(sums)
        assert staging is not None, "pairwise reductions need staging"
        sends, receives, taken = [], [], 0
        received: list[list[torch.Tensor]] = [[] for _ in sums]
        for peer in _peers(axis):
            for i, p in enumerate(q for q in pieces if q.own.numel()):
                view = staging[taken : taken + p.own.numel()]
                taken += p.own.numel()
                sends.append((peer, chunk_of(p.whole, axis.size, peer)))
                receives.append((peer, view))
                received[i].append(view)
        exchange = Exchange(axis, tag, sends, receives)
        return _ReduceScatter(
            exchange, [(own, chunk, r) for (own, chunk), r in zip(sums, received, strict=True)]
        )

    def all_reduce(
        self, pieces: Sequence[torch.Tensor], axis: Axis, tag: int, staging: torch.Tensor | None
    ) -> Operation:
        """See `Transport.all_reduce`: a reduce-scatter in place, then a gather in place."""
        if axis.group is None:
            return NoOperation()
        parts = [Piece(whole=p, own=chunk_of(p, axis.size, axis.rank)) for p in pieces if p.numel()]
        for p in parts:
            assert p.own.numel() * axis.size == p.whole.numel(), "chunks must divide evenly"
        scatter = self.reduce_scatter(parts, axis, tag, staging)
        return _AllReduce(scatter, self.all_gather(parts, axis, tag + 1))


class Exchange:
    """A fixed set of sends and receives.

    Args:
        axis: Ranks that exchange; more than one.
        tag: Of all messages; no other exchange in flight between these ranks has it.
        sends: ``(peer's rank on the axis, flat view)``.
        receives: The same.
    """

    def __init__(
        self,
        axis: Axis,
        tag: int,
        sends: Sequence[_Route],
        receives: Sequence[_Route],
    ) -> None:
        assert axis.group is not None, "an axis of one rank exchanges nothing"
        self._axis, self._group, self._tag = axis, axis.group, tag
        self._sends = [(peer, [view]) for peer, view in sends]
        self._receives = [(peer, [view]) for peer, view in receives]
        self._sending: list[tuple[int, dist.Work]] = []
        self._receiving: list[tuple[int, dist.Work]] = []
        self.sent_bytes = sum(v.numel() * v.element_size() for _, v in sends)

    def start(self) -> None:
        """Post everything."""
        group, tag = self._group, self._tag
        try:
            self._receiving = [(p, group.recv(view, p, tag)) for p, view in self._receives]
            self._sending += [(p, group.send(view, p, tag)) for p, view in self._sends]
        except RuntimeError as error:
            raise PeerLost(self._axis, None, error) from error

    def wait_received(self) -> None:
        """Return once everything has arrived. Raises: PeerLost."""
        receiving, self._receiving = self._receiving, []
        self._wait(receiving)

    def wait_sent(self) -> None:
        """Return once what was sent may be overwritten. Raises: PeerLost."""
        sending, self._sending = self._sending, []
        self._wait(sending)

    def _wait(self, works: list[tuple[int, dist.Work]]) -> None:
        for peer, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLost(self._axis, peer, error) from error


class _OnePart:
    def advance(self) -> None:
        """One part only."""


class _Gather(_OnePart):
    def __init__(self, exchange: Exchange, local: NoOperation) -> None:
        self._exchange, self._local = exchange, local
        self.sent_bytes = exchange.sent_bytes

    def start(self, *, scale: float = 1.0) -> None:
        assert scale == 1.0, "a gather sums nothing"
        self._exchange.wait_sent()
        self._exchange.start()
        self._local.finish()

    def finish(self, *, accumulate: bool = False) -> None:
        assert not accumulate, "a gather replaces"
        self._exchange.wait_received()

    def release(self) -> None:
        self._exchange.wait_sent()


class _ReduceScatter(_OnePart):
    def __init__(
        self,
        exchange: Exchange,
        sums: Sequence[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]],
    ) -> None:
        """Args: sums: ``(own, this rank's chunk of whole, chunks received)`` per piece."""
        self._exchange, self._sums = exchange, sums
        self._scale = 1.0
        self.sent_bytes = exchange.sent_bytes

    def start(self, *, scale: float = 1.0) -> None:
        self._scale = scale
        self._exchange.start()

    def finish(self, *, accumulate: bool = False) -> None:
        self._exchange.wait_received()
        for own, chunk, received in self._sums:
            if self._scale == 1.0:
                _add_up(own, chunk, received, accumulate=accumulate)
                continue
            # Slice by slice, so that what is scaled is still in the cache.
            for low in range(0, own.numel(), _SLICE_NUMEL):
                part = slice(low, low + _SLICE_NUMEL)
                _add_up(own[part], chunk[part], [r[part] for r in received], accumulate=accumulate)
                own[part].mul_(self._scale)

    def release(self) -> None:
        self._exchange.wait_sent()


class _AllReduce:
    def __init__(self, scatter: Operation, gather: Operation) -> None:
        self._scatter, self._gather = scatter, gather
        self.sent_bytes = scatter.sent_bytes + gather.sent_bytes
        self._is_gathering = False

    def start(self, *, scale: float = 1.0) -> None:
        self._gather.release()
        self._scatter.start(scale=scale)
        self._is_gathering = False

    def advance(self) -> None:
        if not self._is_gathering:
            self._scatter.finish()
            self._scatter.release()  # the gather overwrites what was sent
            self._gather.start()
            self._is_gathering = True

    def finish(self, *, accumulate: bool = False) -> None:
        assert not accumulate, "an all-reduce replaces"
        self.advance()
        self._gather.finish()

    def release(self) -> None:
        self._gather.release()


def _add_up(
    own: torch.Tensor, chunk: torch.Tensor, received: Sequence[torch.Tensor], *, accumulate: bool
) -> None:
    """Let `own` be, or be added, the sum of this rank's chunk and those received, in that order."""
    is_alias = own.data_ptr() == chunk.data_ptr()
    rest = received
    if accumulate:
        if not is_alias:
            own.add_(chunk)
    elif own.dtype == chunk.dtype:
        torch.add(chunk, received[0], out=own)
        rest = received[1:]
    elif not is_alias:
        own.copy_(chunk)
    for part in rest:
        own.add_(part)


def _peers(axis: Axis) -> list[int]:
    """Peers in an order that spreads load: each rank begins with its successor."""
    return [(axis.rank + i) % axis.size for i in range(1, axis.size)]
