"""The process group's own collectives: NCCL on CUDA, and any backend that offers them.

A unit of several segments, as mixed dtypes or frozen parameters make them, is one call.

On CUDA every call runs on the current stream, which `lanes` chose; `finish` and `release` have
nothing to wait for on the host, since lanes order the streams by events.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwright.runtime.transport.base import Axis, NoOperation, Operation, Piece, chunk_of
from shardwright.runtime.transport.names import (
    all_gather_coalesced,
    reduce_scatter_coalesced,
)

__all__ = ["CollectiveTransport"]


class CollectiveTransport:
    """``all_gather_into_tensor``, ``reduce_scatter_tensor`` and ``all_reduce``, in place."""

    name = "collective"
    needs_staging = False

    def all_gather(self, pieces: Sequence[Piece], axis: Axis, tag: int) -> Operation:
        """See `Transport.all_gather`. `tag` is unused: calls match by order."""
        if axis.group is None:
            return NoOperation([(p.whole, p.own) for p in pieces])
        return _Gather([p for p in pieces if p.own.numel()], axis.group, axis.size)

    def reduce_scatter(
        self, pieces: Sequence[Piece], axis: Axis, tag: int, staging: torch.Tensor | None
    ) -> Operation:
        """See `Transport.reduce_scatter`. Reduces into this rank's chunk of `whole`."""
        if axis.group is None:
            return NoOperation([(p.own, p.whole) for p in pieces])
        return _ReduceScatter([p for p in pieces if p.own.numel()], axis)

    def all_reduce(
        self, pieces: Sequence[torch.Tensor], axis: Axis, tag: int, staging: torch.Tensor | None
    ) -> Operation:
        """See `Transport.all_reduce`."""
        if axis.group is None:
            return NoOperation()
        return _AllReduce([p for p in pieces if p.numel()], axis.group, axis.size)


class _Calls:
    """Handles of the calls in flight; none on CUDA, where streams order everything."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    def _add(self, work: dist.Work, *, is_cuda: bool) -> None:
        if is_cuda:
            work.wait()  # for the stream, not for the host
        else:
            self._works.append(work)

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def advance(self) -> None:
        """One part only."""

    def release(self) -> None:
        self._wait()


class _Gather(_Calls):
    def __init__(self, pieces: Sequence[Piece], group: dist.ProcessGroup, size: int) -> None:
        super().__init__()
        if len({p.own.dtype for p in pieces}) > 1:
            # Gloo joins tensors of several dtypes as the first one's, and scrambles wider ones.
            pieces = [
                Piece(whole=p.whole.view(torch.uint8), own=p.own.view(torch.uint8)) for p in pieces
            ]
        self._pieces, self._group = pieces, group
        self.sent_bytes = sum(p.own.numel() * p.own.element_size() for p in pieces) * (size - 1)

    def start(self, *, scale: float = 1.0) -> None:
        assert scale == 1.0, "a gather sums nothing"
        wholes, owns = [p.whole for p in self._pieces], [p.own for p in self._pieces]
        if owns:
            work = all_gather_coalesced(wholes, owns, self._group)
            self._add(work, is_cuda=owns[0].is_cuda)

    def finish(self, *, accumulate: bool = False) -> None:
        assert not accumulate, "a gather replaces"
        self._wait()


class _ReduceScatter(_Calls):
    def __init__(self, pieces: Sequence[Piece], axis: Axis) -> None:
        super().__init__()
        assert axis.group is not None, "an axis of one rank reduces nothing"
        self._pieces, self._group = pieces, axis.group
        self._chunks = [chunk_of(p.whole, axis.size, axis.rank) for p in pieces]
        self.sent_bytes = sum(c.numel() * c.element_size() for c in self._chunks) * (axis.size - 1)

    def start(self, *, scale: float = 1.0) -> None:
        self._scale = scale
        wholes = [p.whole for p in self._pieces]
        if wholes:
            work = reduce_scatter_coalesced(self._chunks, wholes, self._group)
            self._add(work, is_cuda=wholes[0].is_cuda)

    def finish(self, *, accumulate: bool = False) -> None:
        self._wait()
        for p, chunk in zip(self._pieces, self._chunks, strict=True):
            is_alias = p.own.data_ptr() == chunk.data_ptr()
            if accumulate and not is_alias:
                p.own.add_(chunk)
            elif not is_alias:
                p.own.copy_(chunk)
            if self._scale != 1.0:
                p.own.mul_(self._scale)


class _AllReduce(_Calls):
    def __init__(self, pieces: Sequence[torch.Tensor], group: dist.ProcessGroup, size: int) -> None:
        super().__init__()
        self._pieces, self._group = pieces, group
        total_bytes = sum(p.numel() * p.element_size() for p in pieces)
        self.sent_bytes = 2 * total_bytes * (size - 1) // size

    def start(self, *, scale: float = 1.0) -> None:
        self._scale = scale
        for p in self._pieces:
            work = dist.all_reduce(p, dist.ReduceOp.SUM, self._group, async_op=True)
            self._add(work, is_cuda=p.is_cuda)

    def finish(self, *, accumulate: bool = False) -> None:
        assert not accumulate, "an all-reduce replaces"
        self._wait()
        if self._scale != 1.0:
            for piece in self._pieces:
                piece.mul_(self._scale)  # a foreach would round the scale to the piece's dtype
