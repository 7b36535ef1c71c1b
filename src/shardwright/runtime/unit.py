"""A sharded unit on this rank: its views of slots and shards, and its gathers.

Everything here is built once. Where a buffer would only repeat another it is a view of it:

    gathered through the step   slot [ rank 0 | rank 1 | ... ]   the shard is a part of the slot
    gathered for use only       shard ------ gather ----> slot   the shard is a buffer of its own
    computed in another dtype   master -cast-> compute shard ---> slot

The unit's state (gathered, held, open) is the policy's; what lies here are tensors. Its gradient
side is in `unit_gradients.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwright.core.errors import LifecycleError
from shardwright.core.layout import ITEMSIZE, UnitLayout
from shardwright.core.strategy import Gathered
from shardwright.runtime.buffers import Buffers
from shardwright.runtime.transport.base import (
    Axis,
    NoOperation,
    Operation,
    Piece,
    Transport,
)
from shardwright.runtime.units import UnitModules

if TYPE_CHECKING:
    from shardwright.runtime.unit_gradients import UnitGradients

__all__ = ["ShardedUnit", "Topology"]

_NUM_TAGS = 8  # tags per unit: gather, gather over replicas, reduce, replicate (two), spare


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The axes a model is sharded over, as its strategy sees them.

    Attributes:
        shard: Axis of gathers.
        reduce: The same axis, for reductions.
        replicate: Axis of replicas.
        owners_per_shard: R where the optimizer state is divided over replicas, else 1.
    """

    shard: Axis
    reduce: Axis
    replicate: Axis
    owners_per_shard: int

    @property
    def owner(self) -> int:
        """This rank's index among the owners of a layout."""
        divided = self.replicate.rank if self.owners_per_shard > 1 else 0
        return self.shard.rank * self.owners_per_shard + divided

    @property
    def owner_in_shard(self) -> int:
        """This rank's index among the owners of its shard."""
        return self.owner % self.owners_per_shard


class ShardedUnit:
    """Tensors and operations of one unit. Built by `build`, used by the engine.

    Args:
        index: Its position among the units.
        modules: Its modules and parameters; their values are moved into the shards.
        layout: Who owns which rows; None for a root without parameters.
        gathered: How long it stays gathered.
        topology: Axes.
        master: Dtype of trainable shards.
    """

    def __init__(
        self,
        *,
        index: int,
        modules: UnitModules,
        layout: UnitLayout | None,
        gathered: Gathered,
        topology: Topology,
        master: torch.dtype,
    ) -> None:
        self.index = index
        self.first_tag = index * _NUM_TAGS
        self.name = modules.name
        self.modules = modules
        self._layout = layout
        self.gathered = gathered
        self.topology = topology
        self.master_dtype = master
        self.parameters = [owned.parameter for owned in modules.owned]
        self.original_dtypes = [p.dtype for p in self.parameters]
        self.trainable = tuple(i for i, p in enumerate(self.parameters) if p.requires_grad)
        self.frozen = tuple(i for i, p in enumerate(self.parameters) if not p.requires_grad)
        self.shadows = [
            (module.__dict__, name, position)
            for position, owned in enumerate(modules.owned)
            for module, name in owned.locations
        ]
        self.is_shadowed = False
        # Parameters, set by bind_parameters.
        self.slot = -1
        self.views: list[torch.Tensor] = []
        self.slot_storage_ptr = 0
        self.shards: list[torch.Tensor] = []
        self.owned_masters: list[torch.Tensor] = []  # flat, one per segment
        self.gather: Operation = NoOperation()
        self.gather_over_replicas: Operation = NoOperation()
        self.casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_stale = True  # compute shards lag behind the masters
        self._versions = sum([p._version for p in self.parameters])
        self.is_gathering = False
        self.is_gathering_over_replicas = False
        self.gradient: UnitGradients | None = None
        self.is_unsharded_by_user = False
        self.num_outstanding_calls = 0

    @property
    def layout(self) -> UnitLayout:
        """Who owns which rows."""
        assert self._layout is not None, f"unit {self.name} has no parameters"
        return self._layout

    # Parameters

    def bind_parameters(
        self,
        slot: int,
        memory: torch.Tensor,
        buffers: Buffers,
        transport: Transport,
    ) -> None:
        """Allocate shards, still without values, and lay the views into a slot.

        Args:
            slot: Slot index.
            memory: The slot, flat uint8, at least `layout.gathered_bytes`.
            buffers: Where shards are allocated.
            transport: Prepares the gathers.
        """
        topology, layout = self.topology, self.layout
        compute_pieces: list[torch.Tensor] = []
        master_pieces: list[torch.Tensor] = []
        segments = self._segment_views(memory)
        in_slot = self.gathered is Gathered.STEP
        for i, segment in enumerate(layout.segments):
            dtype = getattr(torch, segment.dtype)
            master = self.master_dtype if segment.trainable else dtype
            chunk = segment.chunk_numel * layout.owners_per_shard
            low = topology.owner_in_shard * segment.chunk_numel
            if in_slot:
                compute = segments[i][topology.shard.rank * chunk :][:chunk]
            elif dtype != master or layout.owners_per_shard > 1:
                compute = buffers.allocate("compute_shards", chunk, dtype)
            else:
                compute = buffers.allocate("parameter_shards", chunk, dtype)
            owned = compute[low : low + segment.chunk_numel]
            if dtype != master:
                piece = buffers.allocate("parameter_shards", segment.chunk_numel, master)
                self.casts.append((owned, piece))
            else:
                piece = owned
            compute_pieces.append(compute)
            master_pieces.append(piece)
        self._compute_pieces = compute_pieces
        self._owned_in_compute = [
            c[topology.owner_in_shard * s.chunk_numel :][: s.chunk_numel]
            for c, s in zip(compute_pieces, layout.segments, strict=True)
        ]
        self.owned_masters = master_pieces
        self.shards = self.own_rows(master_pieces)
        self.gather_over_replicas = transport.all_gather(
            [
                Piece(whole=c, own=o)
                for c, o in zip(compute_pieces, self._owned_in_compute, strict=True)
            ],
            topology.replicate if layout.owners_per_shard > 1 else _alone(topology.replicate),
            self.first_tag + 1,
        )
        self.bind_slot(slot, memory, transport)

    def bind_slot(self, slot: int, memory: torch.Tensor, transport: Transport) -> None:
        """Point the views and the gather at a slot.

        Args:
            slot: Slot index.
            memory: The slot, flat uint8.
            transport: Prepares the gather.
        """
        segments = self._segment_views(memory)
        self.slot = slot
        self.slot_storage_ptr = memory.untyped_storage().data_ptr()
        self.views = [
            segments[p.segment][p.start : p.stop].view(p.spec.shape) for p in self.layout.placements
        ]
        self.gather = transport.all_gather(
            [
                Piece(whole=whole, own=own)
                for whole, own in zip(segments, self._compute_pieces, strict=True)
            ],
            self.topology.shard,
            self.first_tag,
        )

    def store(self, position: int, value: torch.Tensor) -> None:
        """Take this rank's rows of a full value into the shard.

        Args:
            position: The parameter's position in the unit.
            value: Its full value, in the parameter's shape.
        """
        start, stop = self.rows(position)
        if stop > start:
            self.store_rows(position, value[start:stop] if value.dim() else value)

    def store_rows(self, position: int, rows: torch.Tensor) -> None:
        """Take this rank's rows of a value into the shard, cast to its dtype.

        Args:
            position: The parameter's position in the unit.
            rows: The rows that `rows` names, on any device; a whole scalar.
        """
        self.shards[position].copy_(rows)

    def was_written(self) -> bool:
        """Whether parameters were written to in place since this was last asked.

        Raises:
            LifecycleError: A module's parameter was replaced by another object.
        """
        for owned in self.modules.owned:
            for module, name in owned.locations:
                if module._parameters.get(name) is not owned.parameter:
                    raise LifecycleError(
                        f"{owned.name!r} is another object since sw.shard(), one that neither "
                        "gathers nor reductions reach. Tie and exchange parameters before "
                        "sw.shard(); give them other values in place; use functional_call on a "
                        "plain model."
                    )
        versions = sum([p._version for p in self.parameters])
        is_written, self._versions = versions != self._versions, versions
        return is_written

    def refresh(self) -> None:
        """Cast the masters into the compute shards, once after each step."""
        if self.is_stale:
            self.is_stale = False
            if self.casts:
                torch._foreach_copy_([c for c, _ in self.casts], [m for _, m in self.casts])

    def shadow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the modules' attributes be the gathered parameters."""
        self.is_shadowed = True
        for attributes, name, position in self.shadows:
            attributes[name] = tensors[position]

    def unshadow(self) -> None:
        """Let the modules' attributes be the shards again."""
        if self.is_shadowed:
            self.is_shadowed = False
            for attributes, name, _ in self.shadows:
                attributes.pop(name, None)

    def trainable_now(self) -> tuple[int, ...]:
        """Positions of parameters that want gradients now: some may be frozen for a while."""
        for position in self.frozen:
            if self.parameters[position].requires_grad:
                raise LifecycleError(
                    f"parameter {self.modules.owned[position].name!r} was frozen when the model "
                    "was sharded and now requires grad, but has no gradient memory. Let every "
                    "parameter that will ever train require grad before sw.shard()."
                )
        parameters = self.parameters
        return tuple([i for i in self.trainable if parameters[i].requires_grad])

    # Views

    def rows(self, position: int) -> tuple[int, int]:
        """Rows of a parameter that this rank holds, ``(start, stop)``; equal where none."""
        return self.layout.rows(position, self.topology.owner)

    def own_rows(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each parameter, this rank's rows as a view of its segment's owned piece.

        Args:
            pieces: One flat tensor per segment, this owner's chunk of it; may be empty.
        """
        views = []
        for position, place in enumerate(self.layout.placements):
            start, stop = self.rows(position)
            segment = self.layout.segments[place.segment]
            spec = place.spec
            piece = pieces[place.segment]
            if stop == start or piece.numel() == 0:
                shape = (0, *spec.shape[1:])
                views.append(piece[:0].view(shape))
                continue
            low = place.start + start * spec.row_numel - self.topology.owner * segment.chunk_numel
            flat = piece[low : low + (stop - start) * spec.row_numel]
            views.append(flat.view((stop - start, *spec.shape[1:]) if spec.shape else ()))
        return views

    def _segment_views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The slot's segments, flat, each in its compute dtype."""
        views, offset = [], 0
        for segment in self.layout.segments:
            num_bytes = segment.numel * ITEMSIZE[segment.dtype]
            dtype = getattr(torch, segment.dtype)
            views.append(memory[offset : offset + num_bytes].view(dtype))
            offset += num_bytes
        return views


def _alone(axis: Axis) -> Axis:
    return Axis(name=axis.name, size=1, rank=0, group=None)
