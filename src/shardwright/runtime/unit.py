"""A sharded unit on this rank: its views of slots, shards and gradients, and its operations.

Everything here is built once. Where a buffer would only repeat another it is a view of it:

    gathered through the step   slot [ rank 0 | rank 1 | ... ]   the shard is a part of the slot
    gathered for use only       shard ------ gather ----> slot   the shard is a buffer of its own
    computed in another dtype   master -cast-> compute shard ---> slot

The unit's state (gathered, held, open) is the policy's; what lies here are tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright.core.errors import LifecycleError
from shardwright.core.layout import ITEMSIZE, UnitLayout
from shardwright.core.strategy import Gathered, Gradients
from shardwright.runtime.buffers import Buffers
from shardwright.runtime.direct_linear import GradientSink
from shardwright.runtime.transport.base import (
    Axis,
    NoOperation,
    Operation,
    Piece,
    Transport,
    chunk_of,
)
from shardwright.runtime.units import UnitModules

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
        gradients: Where its gradient lives between micro-batches.
        topology: Axes.
        master: Dtype of trainable shards.
        reduce: Dtype of the gradient buffer.
    """

    def __init__(
        self,
        *,
        index: int,
        modules: UnitModules,
        layout: UnitLayout | None,
        gathered: Gathered,
        gradients: Gradients,
        topology: Topology,
        master: torch.dtype,
        reduce: torch.dtype,
    ) -> None:
        self.index = index
        self.name = modules.name
        self.modules = modules
        self._layout = layout
        self.gathered = gathered
        self.gradients = gradients
        self.topology = topology
        self.master_dtype = master
        self.reduce_dtype = reduce
        self.parameters = [owned.parameter for owned in modules.owned]
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
        self.is_gathering = False
        self.is_gathering_over_replicas = False
        # Gradients, set by bind_gradients.
        self.gradient_slot = -1
        self.staging_slot = -1
        self.sinks = [GradientSink() for _ in self.trainable]
        self.gradient_views: list[torch.Tensor] = []
        self.control: torch.Tensor | None = None
        self.shard_gradients: list[torch.Tensor] = []
        self.own_control: torch.Tensor | None = None
        self.reduce: Operation = NoOperation()
        self.replicate: Operation = NoOperation()
        self.accumulated: list[torch.Tensor] = []  # flat pieces that add up over micro-batches
        self.owned_gradients: list[torch.Tensor] = []  # flat pieces this rank's optimizer sees
        self.not_owned: list[torch.Tensor] = []  # the rest of `accumulated`
        self.casts_to_reduce: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.casts_from_reduce: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.casts_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.used = [False] * len(self.trainable)
        self.trainable_index = {position: k for k, position in enumerate(self.trainable)}
        self.replicate_staging_slot = -1
        self.wants_replicate = False
        self.has_sums = False  # `accumulated` holds gradients to add to
        self.is_final = False  # `.grad` holds the mean over all ranks, ready for the optimizer
        self.adds_to_final = False
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
        values: Sequence[torch.Tensor],
        buffers: Buffers,
        transport: Transport,
    ) -> None:
        """Lay the parameters' values into shards and the views into a slot.

        Args:
            slot: Slot index.
            memory: The slot, flat uint8, at least `layout.gathered_bytes`.
            values: Full value of each parameter, in the unit's order.
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
        self.shards = self._own_rows(master_pieces)
        for position, value in enumerate(values):
            self.store(position, value)
        self.gather_over_replicas = transport.all_gather(
            [
                Piece(whole=c, own=o)
                for c, o in zip(compute_pieces, self._owned_in_compute, strict=True)
            ],
            topology.replicate if layout.owners_per_shard > 1 else _alone(topology.replicate),
            self.index * _NUM_TAGS + 1,
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
            segments[p.segment][p.start : p.stop].view(p.spec.shape)
            for p in self.layout.placements
        ]
        self.gather = transport.all_gather(
            [
                Piece(whole=whole, own=own)
                for whole, own in zip(segments, self._compute_pieces, strict=True)
            ],
            self.topology.shard,
            self.index * _NUM_TAGS,
        )

    def store(self, position: int, value: torch.Tensor) -> None:
        """Take this rank's rows of a full value into the shard.

        Args:
            position: The parameter's position in the unit.
            value: Its full value, in the parameter's shape.
        """
        start, stop = self._rows(position)
        if stop > start:
            shard = self.shards[position]
            shard.copy_(value[start:stop] if value.dim() else value)

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

    # Gradients

    def bind_gradients(
        self,
        memory: torch.Tensor,
        staging: torch.Tensor | None,
        replicate_staging: torch.Tensor | None,
        buffers: Buffers,
        transport: Transport,
    ) -> None:
        """Lay out the gradient buffer, the gradient shards and the reductions.

        Args:
            memory: The gradient buffer: flat, reduce dtype, at least `layout.gradient_numel`.
            staging: Where the reduction over shards may receive, flat, or None.
            replicate_staging: The same for the reduction over replicas.
            buffers: Where gradient shards are allocated.
            transport: Prepares the reductions.
        """
        topology, layout = self.topology, self.layout
        wholes = self._gradient_pieces(memory)
        chunks = [chunk_of(w, layout.shard_size, topology.shard.rank) for w in wholes]
        if self.gradients is Gradients.WHOLE:
            sums = chunks
            self.accumulated = wholes
        else:
            sums = [
                buffers.allocate("gradient_shards", c.numel(), self.master_dtype) for c in chunks
            ]
            self.accumulated = sums
        self._bind_replicate(chunks, sums, replicate_staging, transport)
        owned = [self._owned_part(s) for s in sums]
        if self.reduce_dtype != self.master_dtype and self.gradients is Gradients.WHOLE:
            finals = [
                buffers.allocate("gradient_shards", o.numel(), self.master_dtype) for o in owned
            ]
            self.casts_from_reduce = list(zip(finals, owned, strict=True))
        else:
            finals = owned
        self.owned_gradients = finals
        self.not_owned = _outside(self.accumulated, owned)
        self.reduce = transport.reduce_scatter(
            [Piece(whole=w, own=s) for w, s in zip(wholes, sums, strict=True)],
            topology.reduce,
            self.index * _NUM_TAGS + 2,
            staging,
        )
        self.control = wholes[-1].view(layout.num_owners, layout.control_numel)
        self.own_control = finals[-1]
        pieces: list[torch.Tensor] = [torch.empty(0)] * len(layout.segments)
        for segment, final in zip(layout.trainable_segments, finals, strict=False):
            pieces[segment] = final
        rows = self._own_rows(pieces)
        self.shard_gradients = [rows[i] for i in self.trainable]
        segment_position = {s: k for k, s in enumerate(layout.trainable_segments)}
        for sink, i in zip(self.sinks, self.trainable, strict=True):
            place = layout.placements[i]
            whole = wholes[segment_position[place.segment]]
            sink.view = whole[place.start : place.stop].view(place.spec.shape)
        self.gradient_views = [s.view for s in self.sinks if s.view is not None]

    def _bind_replicate(
        self,
        chunks: list[torch.Tensor],
        sums: list[torch.Tensor],
        staging: torch.Tensor | None,
        transport: Transport,
    ) -> None:
        topology, layout = self.topology, self.layout
        in_reduce_dtype = sums
        is_sharded = self.gradients is Gradients.SHARDED
        if is_sharded and self.reduce_dtype != self.master_dtype and topology.replicate.size > 1:
            # Sent in the reduce dtype: by way of this rank's chunk of the gradient buffer.
            in_reduce_dtype = chunks
            self.casts_to_reduce = list(zip(chunks, sums, strict=True))
            self.casts_back = list(zip(sums, chunks, strict=True))
        tag = self.index * _NUM_TAGS + 3
        if layout.owners_per_shard > 1:
            self.replicate = transport.reduce_scatter(
                [Piece(whole=p, own=self._owned_part(p)) for p in in_reduce_dtype],
                topology.replicate,
                tag,
                staging,
            )
        else:
            self.replicate = transport.all_reduce(
                in_reduce_dtype, topology.replicate, tag, staging
            )

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

    def keep_gradient(self, k: int) -> bool:
        """Whether a parameter's `.grad` is alive; one the user assigned is taken over.

        Args:
            k: Index into `trainable`.
        """
        parameter, own = self.parameters[self.trainable[k]], self.shard_gradients[k]
        gradient = parameter.grad
        if gradient is None:
            return False
        if gradient is not own:
            own.copy_(gradient)
            parameter.grad = own
        return True

    def unscale(self) -> None:
        """Turn means back into sums that reductions over both axes will add up once again."""
        factor = self.layout.num_owners
        if factor != 1:
            torch._foreach_mul_(self.owned_gradients, float(factor))
        for rest in self.not_owned:
            rest.zero_()

    def scale(self, factor: float) -> None:
        """Turn sums over all ranks into means, in the masters' dtype."""
        for final, reduced in self.casts_from_reduce:
            if self.adds_to_final:
                final.add_(reduced, alpha=factor)
            else:
                final.copy_(reduced)
        is_scaled = bool(self.casts_from_reduce) and self.adds_to_final
        if factor != 1.0 and not is_scaled:
            torch._foreach_mul_(self.owned_gradients, factor)
        self.is_final = True

    def assign_gradients(self, *, is_agreed: bool) -> None:
        """Let `.grad` of every used parameter be its shard's gradient.

        A parameter counts as used if any rank used it, which only a rank that did not needs to
        look up: reading the flags waits for the device.

        Args:
            is_agreed: Whether the control segment holds every rank's flags.
        """
        flags: list[float] | None = None
        for k, position in enumerate(self.trainable):
            parameter = self.parameters[position]
            is_used = self.used[k]
            if not is_used and is_agreed and parameter.grad is None:
                if flags is None:
                    assert self.own_control is not None
                    flags = self.own_control.tolist()
                is_used = flags[k] > 0
            if is_used:
                parameter.grad = self.shard_gradients[k]

    # Views

    def _rows(self, position: int) -> tuple[int, int]:
        return self.layout.rows(position, self.topology.owner)

    def _own_rows(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each parameter, this rank's rows as a view of its segment's owned piece."""
        views = []
        for position, place in enumerate(self.layout.placements):
            start, stop = self._rows(position)
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

    def _gradient_pieces(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The gradient space: one flat view per trainable segment, then the control segment."""
        layout = self.layout
        sizes = [layout.segments[i].numel for i in layout.trainable_segments]
        sizes.append(layout.num_owners * layout.control_numel)
        return list(memory[: sum(sizes)].split(sizes))

    def _owned_part(self, chunk: torch.Tensor) -> torch.Tensor:
        """This owner's part of a shard rank's chunk."""
        return chunk_of(chunk, self.layout.owners_per_shard, self.topology.owner_in_shard)


def _alone(axis: Axis) -> Axis:
    return Axis(name=axis.name, size=1, rank=0, group=None)


def _outside(
    wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What of each flat tensor lies before and after a part of it."""
    outside = []
    for whole, part in zip(wholes, parts, strict=True):
        start = part.storage_offset() - whole.storage_offset()
        outside += [whole[:start], whole[start + part.numel() :]]
    return [t for t in outside if t.numel()]
