"""The gradient side of a sharded unit: buffer, shards, reductions and what they hold.

    autograd ─ direct write or one foreach ─> buffer [ rank 0 | rank 1 | ... | control ]
    buffer ─ reduce-scatter ─> shard sums ─ all-reduce over replicas ─> scaled: `.grad`

Where gradients are whole between micro-batches and reduced in the masters' dtype, the sums lie in
this rank's chunk of the buffer. Otherwise they have memory of their own in the masters' dtype;
where gradients are sharded, the big buffer is then shared with other units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.core.errors import LifecycleError
from shardwright.core.strategy import Gradients
from shardwright.runtime.buffers import Buffers
from shardwright.runtime.direct_linear import GradientSink
from shardwright.runtime.stray import ShardedGradient
from shardwright.runtime.transport.base import NoOperation, Operation, Piece, Transport, chunk_of
from shardwright.runtime.unit import ShardedUnit

__all__ = ["StrayUseGuard", "UnitGradients"]


class UnitGradients:
    """Gradients of one unit that has trainable parameters. Lists follow `unit.trainable`.

    Args:
        unit: The unit.
        home: Where its gradient lives between micro-batches.
        reduce_dtype: Dtype of the buffer.

    Attributes:
        slot: Buffer it is reduced from; units with the same buffer take turns.
        staging_slot: Staging of the reduction over shards; -1 for none.
        replicate_staging_slot: Staging of the reduction over replicas; -1 for none.
        sinks: Where each gradient may be written directly.
        views: Each gradient's place in the buffer, in its parameter's shape.
        shards: Each gradient's rows on this rank: what `.grad` is set to.
        used: Whether each parameter was used on this rank since its gradient was last discarded.
        has_sums: Whether the sums hold gradients to add to.
        is_reduced: Whether this backward has reduced the sums as far as they will be.
        is_final: Whether `.grad` holds the mean over all ranks, ready for the optimizer.
        is_scaled: Whether this backward's last reduction has turned the sums into means already.
        wants_replicate: Whether a reduction over replicas is to follow the one over shards.
    """

    def __init__(self, unit: ShardedUnit, home: Gradients, reduce_dtype: torch.dtype) -> None:
        self.unit = unit
        self.home = home
        self.reduce_dtype = reduce_dtype
        self.slot = self.staging_slot = self.replicate_staging_slot = -1
        self.sinks = [GradientSink() for _ in unit.trainable]
        self.views: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []  # what `shards` show, out of the user's reach
        self.shards: list[torch.Tensor] = []
        self.used = [False] * len(unit.trainable)
        self.index_of = {position: k for k, position in enumerate(unit.trainable)}
        self.reduce: Operation = NoOperation()
        self.replicate: Operation = NoOperation()
        self.casts_to_reduce: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.casts_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._control = self._own_control = torch.empty(0)
        self._owned: list[torch.Tensor] = []  # flat pieces this rank's optimizer sees
        self._not_owned: list[torch.Tensor] = []  # the rest of what adds up over micro-batches
        self._assigned_versions = 0  # of the sums, when `.grad` was last assigned
        self._has_sums_apart = True  # sums have memory of their own, outside the buffer
        self.has_sums = self.is_reduced = self.is_final = self.wants_replicate = False
        self.is_scaled = False

    def bind(
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
        topology, layout = self.unit.topology, self.unit.layout
        wholes = self._gradient_pieces(memory)
        chunks = [chunk_of(w, layout.shard_size, topology.shard.rank) for w in wholes]
        is_narrow = self.reduce_dtype != self.unit.master_dtype
        self._has_sums_apart = self.home is Gradients.SHARDED or is_narrow
        if self._has_sums_apart:
            sums = [
                buffers.allocate("gradient_shards", c.numel(), self.unit.master_dtype)
                for c in chunks
            ]
        else:
            sums = chunks
        self._bind_replicate(chunks, sums, replicate_staging, transport)
        self._owned = [self._owned_part(s) for s in sums]
        self._not_owned = _outside(sums if self._has_sums_apart else wholes, self._owned)
        self.reduce = transport.reduce_scatter(
            [Piece(whole=w, own=s) for w, s in zip(wholes, sums, strict=True)],
            topology.reduce,
            self.unit.first_tag + 2,
            staging,
        )
        self._control = wholes[-1].view(layout.num_owners, layout.control_numel)
        self._own_control = self._owned[-1]
        pieces: list[torch.Tensor] = [torch.empty(0)] * len(layout.segments)
        for segment, piece in zip(layout.trainable_segments, self._owned, strict=False):
            pieces[segment] = piece
        rows = self.unit.own_rows(pieces)
        self._rows = [rows[i] for i in self.unit.trainable]
        self.shards = [self._show(k) for k in range(len(self._rows))]
        segment_position = {s: k for k, s in enumerate(layout.trainable_segments)}
        for sink, i in zip(self.sinks, self.unit.trainable, strict=True):
            place = layout.placements[i]
            whole = wholes[segment_position[place.segment]]
            sink.view = whole[place.start : place.stop].view(place.spec.shape)
        self.views = [s.view for s in self.sinks if s.view is not None]

    def _show(self, k: int) -> torch.Tensor:
        """An alias of a gradient's rows here, for `.grad`."""
        layout, position, owner = self.unit.layout, self.unit.trainable[k], self.unit.topology.owner
        if layout.num_owners == 1 or layout.owns_whole(position, owner):
            return self._rows[k].detach()
        spec = layout.placements[position].spec
        return ShardedGradient.of(spec, layout.rows(position, owner), self._rows[k])

    def _show_again_where_moved(self) -> None:
        """Give up aliases whose ``data`` the user has set to other memory."""
        with torch._C.DisableTorchFunctionSubclass():
            for k, (rows, shown) in enumerate(zip(self._rows, self.shards, strict=True)):
                if shown.data_ptr() != rows.data_ptr():
                    self.shards[k] = self._show(k)

    def _bind_replicate(
        self,
        chunks: list[torch.Tensor],
        sums: list[torch.Tensor],
        staging: torch.Tensor | None,
        transport: Transport,
    ) -> None:
        topology, layout = self.unit.topology, self.unit.layout
        in_reduce_dtype = sums
        if self.reduce_dtype != self.unit.master_dtype and topology.replicate.size > 1:
            # Sent in the reduce dtype: by way of this rank's chunk of the gradient buffer.
            in_reduce_dtype = chunks
            self.casts_to_reduce = list(zip(chunks, sums, strict=True))
            self.casts_back = list(zip(sums, chunks, strict=True))
        tag = self.unit.first_tag + 3
        if layout.owners_per_shard > 1:
            self.replicate = transport.reduce_scatter(
                [Piece(whole=p, own=self._owned_part(p)) for p in in_reduce_dtype],
                topology.replicate,
                tag,
                staging,
            )
        else:
            self.replicate = transport.all_reduce(in_reduce_dtype, topology.replicate, tag, staging)

    def clear_unfilled(self) -> None:
        """Zero the places no gradient was written to, and forget direct writes."""
        for sink in self.sinks:
            if not sink.is_filled and sink.view is not None:
                sink.view.zero_()
            sink.is_filled = self.home is Gradients.WHOLE
            sink.is_written = False

    def write_flags(self) -> None:
        """Tell every owner which parameters this rank used."""
        if all(self.used):
            self._control.fill_(1)
        else:
            self._control[:, : len(self.used)] = self._control.new_tensor(self.used)

    def begin(self) -> None:
        """Find what is alive from earlier backwards, and make ready to add to it."""
        self._show_again_where_moved()
        alive = [self.keep(k) for k in range(len(self.sinks))]
        any_alive = any(alive)
        if any_alive and not self.is_final and self._versions() != self._assigned_versions:
            self._take_over_zeros()
        # What was reduced into sums of their own is no longer wanted in the buffer.
        keeps_buffer = self.home is Gradients.WHOLE and not (self._has_sums_apart and self.is_final)
        for k, sink in enumerate(self.sinks):
            sink.is_written = False
            # Beside sums of their own, a place still holds an earlier step's gradient until this
            # step's first; without, what is alive lies there.
            holds_it = sink.is_filled or not self._has_sums_apart
            sink.is_filled = alive[k] and keeps_buffer and holds_it
            if not alive[k]:
                self.used[k] = False
                if any_alive:
                    self._rows[k].zero_()
        if not any_alive:
            self.has_sums = False
        elif self.is_final:
            self.unscale()
            self.has_sums = True
        self.is_reduced = self.is_final = self.is_scaled = False

    def reopen(self) -> None:
        """Let more be added to sums that this backward has reduced already.

        Reducing them again must count them once: only their owner keeps them, and where an
        all-reduce gave them to every replica, each keeps its part.
        """
        topology = self.unit.topology
        if topology.owners_per_shard == 1 and topology.replicate.size > 1:
            self.multiply(1.0 / topology.replicate.size)
        self._empty_buffer()
        self.is_reduced = False

    def keep(self, k: int) -> bool:
        """Whether a parameter's `.grad` is alive; one the user assigned is taken over.

        Args:
            k: Index into `trainable`.
        """
        parameter, own = self.unit.parameters[self.unit.trainable[k]], self.shards[k]
        gradient = parameter.grad
        if gradient is None:
            return False
        if gradient is not own:
            self._rows[k].copy_(gradient)
            parameter.grad = own
            self.is_final = True  # a user's gradient is a mean already
        return True

    def is_alive(self) -> bool:
        """Whether any parameter's `.grad` is set."""
        return any(self.unit.parameters[i].grad is not None for i in self.unit.trainable)

    def _versions(self) -> int:
        return sum([piece._version for piece in self._owned])

    def _take_over_zeros(self) -> None:
        """Discard what `.grad` doesn't show, where the user zeroed it between micro-batches.

        Raises:
            LifecycleError: It was changed to something else, which only this rank's rows would see.
        """
        if any(bool(rows.any()) for rows in self._rows):
            raise LifecycleError(
                f"gradients of unit {self.unit.name!r} were changed in place between "
                "micro-batches, where they are not reduced yet and `.grad` shows this rank's rows "
                "only. Change them after the step's last backward, or scale the loss."
            )
        self._empty_buffer()

    def _empty_buffer(self) -> None:
        """Keep of what adds up only what this rank's optimizer sees."""
        self._drop_not_owned()
        if self._has_sums_apart:
            for sink in self.sinks:
                sink.is_filled = False

    def _drop_not_owned(self) -> None:
        for rest in self._not_owned:
            rest.zero_()

    def unscale(self) -> None:
        """Turn means back into sums that reductions over both axes will add up once again."""
        self.multiply(float(self.unit.layout.num_owners))
        self._drop_not_owned()

    def scale(self, factor: float) -> None:
        """Turn sums over all ranks into means, where the last reduction has not done so."""
        if not self.is_scaled:
            self.multiply(factor)
        self.is_final = True

    def multiply(self, factor: float) -> None:
        """Multiply what this rank's optimizer sees."""
        if factor != 1.0:
            for piece in self._owned:
                piece.mul_(factor)  # a foreach would round the factor to the pieces' dtype first

    @property
    def accumulates(self) -> bool:
        """Whether the next reduction adds to the sums instead of replacing them."""
        return self._has_sums_apart and self.has_sums

    def assign(self, *, is_agreed: bool) -> None:
        """Let `.grad` of every used parameter be its shard's gradient.

        A parameter counts as used if any rank used it, which only a rank that did not needs to
        look up: reading the flags waits for the device.

        Args:
            is_agreed: Whether the control segment holds every rank's flags.
        """
        if not is_agreed and self._has_sums_apart and not self.has_sums:
            for piece in self._owned:
                piece.zero_()  # nothing is reduced yet: `.grad` only marks what is alive
        flags: list[float] | None = None
        for k, position in enumerate(self.unit.trainable):
            parameter = self.unit.parameters[position]
            is_used = self.used[k]
            if not is_used and is_agreed and parameter.grad is None:
                if flags is None:
                    flags = self._own_control.tolist()
                is_used = flags[k] > 0
            if is_used:
                parameter.grad = self.shards[k]
                if self.is_final:
                    _call_hooks(parameter)
        self._assigned_versions = self._versions()

    def _gradient_pieces(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The gradient space: one flat view per trainable segment, then the control segment."""
        layout = self.unit.layout
        sizes = [layout.segments[i].numel for i in layout.trainable_segments]
        sizes.append(layout.num_owners * layout.control_numel)
        return list(memory[: sum(sizes)].split(sizes))

    def _owned_part(self, chunk: torch.Tensor) -> torch.Tensor:
        """This owner's part of a shard rank's chunk."""
        return chunk_of(chunk, self.unit.layout.owners_per_shard, self.unit.topology.owner_in_shard)


def _call_hooks(parameter: torch.nn.Parameter) -> None:
    """Call the user's gradient hooks, once per step, on this rank's rows of the mean gradient."""
    gradient = parameter.grad
    assert gradient is not None, "hooks run on assigned gradients"
    for hook in list((parameter._backward_hooks or {}).values()):
        replaced = hook(gradient)
        if replaced is not None:
            gradient.copy_(replaced)
    for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
        if not isinstance(hook, StrayUseGuard):
            hook(parameter)


class StrayUseGuard:
    """A hook that autograd calls where a parameter's shard was used like a whole parameter."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, _: torch.Tensor) -> None:
        """Refuse: the shard holds only this rank's rows."""
        raise LifecycleError(
            f"a gradient reached the shard of {self.name!r} directly: the parameter was used "
            "outside the forward of its unit, where no rank averages gradients and a shard holds "
            "this rank's rows. Use it inside that forward, return it from there, or make the "
            "modules that share it one unit with units=...; penalties on all weights are the "
            "optimizer's weight_decay."
        )


def _outside(wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What of each flat tensor lies before and after a part of it."""
    outside = []
    for whole, part in zip(wholes, parts, strict=True):
        start = part.storage_offset() - whole.storage_offset()
        outside += [whole[:start], whole[start + part.numel() :]]
    return [t for t in outside if t.numel()]
