"""What the engine asks of a transport: prepared operations on the flat buffers of a unit.

Buffers never move, so an operation is prepared once, with all its views, and then started and
finished each step without slicing or allocating. Collective, pairwise, in-process and recording
transports implement this; nothing else in the package calls a collective.

Ownership: an operation holds views of buffers owned by the engine's slots and shards; it reads and
writes them only between `start` and `finish`, except that `release` may come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["Axis", "NoOperation", "Operation", "PeerLost", "Piece", "Transport", "chunk_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One mesh axis as seen from this rank.

    Attributes:
        name: ``"shard"`` or ``"replicate"``.
        size: Ranks along it.
        rank: This rank's place along it.
        group: Process group of those ranks; None where `size` is 1.
        members: Their ranks in the world, in order.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None
    members: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One contiguous part of an operation.

    Attributes:
        whole: Flat tensor of ``size * n`` elements, chunk i belonging to rank i of the axis.
        own: Flat tensor of n elements: this rank's chunk. May be a view of `whole`.
    """

    whole: torch.Tensor
    own: torch.Tensor


class PeerLost(RuntimeError):
    """A transport could not reach one peer.

    Args:
        axis: Axis the peer is on.
        peer: Its rank along it; None where it is not known.
        error: What the backend said.
    """

    def __init__(self, axis: Axis, peer: int | None, error: BaseException) -> None:
        super().__init__(str(error))
        self.global_rank = -1 if peer is None else axis.members[peer]


def chunk_of(tensor: torch.Tensor, size: int, index: int) -> torch.Tensor:
    """The `index`-th of `size` equal parts of a flat tensor, as a view."""
    numel = tensor.numel() // size
    return tensor[index * numel : (index + 1) * numel]


class Operation(Protocol):
    """A prepared collective over one axis.

    Attributes:
        sent_bytes: Bytes this rank sends each time, by the collective's definition.
    """

    sent_bytes: int

    def start(self, *, scale: float = 1.0) -> None:
        """Begin. Signals: nothing. Waits: nothing on CPU; on CUDA runs on the current lane.

        Args:
            scale: What sums are multiplied by once they are complete, what they are added to
                included (reductions over more than one rank only).
        """

    def advance(self) -> None:
        """Begin the next part of an operation of several, once the part before has arrived."""

    def finish(self, *, accumulate: bool = False) -> None:
        """Make the result available.

        Args:
            accumulate: Add the result to what `own` held instead of replacing it
                (reduce-scatter only).
        """

    def release(self) -> None:
        """Return once the source may be overwritten."""


class Transport(Protocol):
    """Prepares operations.

    Attributes:
        name: For people.
        needs_staging: Whether reductions receive into buffers of their own.
    """

    name: str
    needs_staging: bool

    def all_gather(self, pieces: Sequence[Piece], axis: Axis, tag: int) -> Operation:
        """Fill every `whole` from all ranks' `own`."""

    def reduce_scatter(
        self, pieces: Sequence[Piece], axis: Axis, tag: int, staging: torch.Tensor | None
    ) -> Operation:
        """Sum every rank's `whole` chunk by chunk into its owner's `own`."""

    def all_reduce(
        self, pieces: Sequence[torch.Tensor], axis: Axis, tag: int, staging: torch.Tensor | None
    ) -> Operation:
        """Sum every piece over the axis, in place, with bitwise equal results on all ranks."""


class NoOperation:
    """The operation over an axis of one rank: a copy where `own` and `whole` differ."""

    sent_bytes = 0

    def __init__(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """Args: copies: ``(destination, source)`` pairs of equal numel; aliases are skipped."""
        self._copies = [
            (dst, src) for dst, src in copies if dst.numel() and dst.data_ptr() != src.data_ptr()
        ]

    def start(self, *, scale: float = 1.0) -> None:
        """Nothing to start."""
        assert scale == 1.0, "an axis of one rank reduces nothing"

    def advance(self) -> None:
        """One part only."""

    def finish(self, *, accumulate: bool = False) -> None:
        """Copy or add what lies elsewhere."""
        for dst, src in self._copies:
            if accumulate:
                dst.add_(src)
            else:
                dst.copy_(src)

    def release(self) -> None:
        """Nothing is in flight."""
