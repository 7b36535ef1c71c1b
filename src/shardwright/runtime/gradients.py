"""From autograd's gradients to the shards' `.grad`: collect, reduce, replicate, scale, assign.

A unit's gradient buffer is filled by direct writes and by at most one foreach copy, reduced over
the shard axis, added to what earlier micro-batches left, reduced over replicas once per step and
divided by the number of data ranks once, last.

[Note: a gradient is alive while `.grad` is] Sums that wait for further micro-batches are assigned
to the shards' `.grad` too. Setting `.grad` to None, as `zero_grad` does, therefore discards them,
at any time; a later backward adds to what it finds alive and overwrites the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from shardwright.core.errors import LifecycleError
from shardwright.core.strategy import Gradients
from shardwright.runtime.lanes import Lanes
from shardwright.runtime.ledger import Ledger
from shardwright.runtime.unit import ShardedUnit

__all__ = ["GradientReducer"]


class GradientReducer:
    """Moves gradients of all units of one engine.

    Args:
        num_data_ranks: Ranks whose losses are averaged.
        max_in_flight: Reductions left unfinished while another unit computes.
        lanes: Streams.
        ledger: Counts bytes and waits.
    """

    def __init__(
        self, *, num_data_ranks: int, max_in_flight: int, lanes: Lanes, ledger: Ledger
    ) -> None:
        self._scale = 1.0 / num_data_ranks
        self._max_in_flight = max_in_flight
        self._waiting_for_last: dict[int, ShardedUnit] = {}
        self._lanes = lanes
        self._ledger = ledger
        self._user_of_buffer: dict[int, ShardedUnit] = {}
        self._user_of_staging: dict[int, ShardedUnit] = {}
        self._user_of_replicate_staging: dict[int, ShardedUnit] = {}
        self._reducing: deque[ShardedUnit] = deque()
        self._replicating: deque[ShardedUnit] = deque()
        self._touched: dict[int, ShardedUnit] = {}

    # During backward

    def acquire(self, unit: ShardedUnit) -> None:
        """Make the unit's gradient buffer writable.

        Lane: compute. Waits: for the reduction that last read the buffer.
        """
        if not unit.trainable:
            return
        user = self._user_of_buffer.get(unit.gradient_slot)
        if user is not None:
            self._settle_through(user)
            if user.casts_to_reduce:
                self._finish_replicate(user)
            user.reduce.release()
            self._lanes.compute_waits_for_reduce(user.index)
        self._user_of_buffer[unit.gradient_slot] = unit
        if unit.index not in self._touched:
            self._touched[unit.index] = unit
            self._begin(unit)

    def collect(
        self,
        unit: ShardedUnit,
        positions: tuple[int, ...],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Bring one call's gradients into the buffer, with one foreach where not yet there.

        Args:
            unit: The unit.
            positions: Parameters the gradients belong to, as indices into the unit's.
            gradients: One per position, in the compute dtype; None where unused.
        """
        copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        additions: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for position, gradient in zip(positions, gradients, strict=True):
            if gradient is None:
                continue
            k = unit.trainable_index[position]
            sink = unit.sinks[k]
            view = unit.gradient_views[k]
            unit.used[k] = True
            # A direct write is part of what autograd hands over: replace, never add it twice.
            target = additions if sink.is_filled and not sink.is_written else copies
            sink.is_written = False
            sink.is_filled = True
            if gradient.data_ptr() != view.data_ptr() or gradient.dtype != view.dtype:
                target[0].append(view)
                target[1].append(gradient)
        if copies[0]:
            torch._foreach_copy_(copies[0], copies[1])
            self._ledger.count_copies(len(copies[0]))
        if additions[0]:
            torch._foreach_add_(additions[0], additions[1])

    def start_reduce(self, unit: ShardedUnit) -> None:
        """Reduce a unit's gradient over the shard axis.

        Lane: reduce. Waits: for the staging's last user. Signals: the reduction.
        """
        if not unit.trainable:
            return
        self.acquire(unit)  # a unit whose backward never ran still takes part
        for sink in unit.sinks:
            if not sink.is_filled and sink.view is not None:
                sink.view.zero_()
            sink.is_filled = unit.gradients is Gradients.WHOLE
            sink.is_written = False
        assert unit.control is not None
        if all(unit.used):
            unit.control.fill_(1)
        else:
            flags = unit.control.new_tensor(unit.used)
            unit.control[:, : len(unit.used)] = flags
        user = self._user_of_staging.get(unit.staging_slot)
        if user is not None and unit.staging_slot >= 0:
            self._settle_through(user)
        self._user_of_staging[unit.staging_slot] = unit
        lanes = self._lanes
        lanes.compute_wrote_gradient(unit.index)
        with lanes.reduce():
            lanes.reduce_waits_for_gradient(unit.index)
            unit.reduce.start()
        self._ledger.count("reduce_scatter", "shard", unit, unit.reduce)
        self._reducing.append(unit)
        if lanes.is_async or unit.topology.reduce.size == 1:
            self._settle_through(unit)
        while len(self._reducing) > self._max_in_flight:
            self._settle(self._reducing.popleft())

    def request_replicate(self, unit: ShardedUnit) -> None:
        """Reduce a unit's gradient over replicas, once its reduction over shards is done."""
        if not unit.trainable:
            return
        unit.wants_replicate = True
        if unit not in self._reducing:
            self._start_replicate(unit)

    def _begin(self, unit: ShardedUnit) -> None:
        """Find what is alive from earlier backwards; see the note on top of this file."""
        alive = [unit.keep_gradient(k) for k in range(len(unit.trainable))]
        any_alive = any(alive)
        finals_apart = bool(unit.casts_from_reduce)
        restart = finals_apart and unit.is_final
        for k, sink in enumerate(unit.sinks):
            sink.is_written = False
            sink.is_filled = (
                alive[k] and not restart and unit.gradients is Gradients.WHOLE
            )
            if not alive[k]:
                unit.used[k] = False
                if any_alive:
                    unit.shard_gradients[k].zero_()
        if any_alive and unit.is_final and not finals_apart:
            unit.unscale()
        unit.adds_to_final = any_alive and finals_apart
        unit.has_sums = any_alive
        unit.is_final = False

    # Settling

    def _settle_through(self, unit: ShardedUnit) -> None:
        """Finish reductions in the order they began, up to and including the unit's."""
        while unit in self._reducing:
            self._settle(self._reducing.popleft())

    def _settle(self, unit: ShardedUnit) -> None:
        lanes = self._lanes
        with lanes.reduce(), self._ledger.waiting():
            accumulate = unit.gradients is Gradients.SHARDED and unit.has_sums
            unit.reduce.finish(accumulate=accumulate)
            lanes.reduce_finished(unit.index)
        unit.has_sums = True
        if unit.wants_replicate:
            self._start_replicate(unit)

    def _start_replicate(self, unit: ShardedUnit) -> None:
        unit.wants_replicate = False
        user = self._user_of_replicate_staging.get(unit.replicate_staging_slot)
        if user is not None and unit.replicate_staging_slot >= 0:
            self._finish_replicate(user)
        self._user_of_replicate_staging[unit.replicate_staging_slot] = unit
        for other in self._replicating:
            if not self._lanes.is_async:
                with self._ledger.waiting():
                    other.replicate.advance()
        lanes = self._lanes
        with lanes.replicate():
            lanes.replicate_waits_for_reduce(unit.index)
            _copy_all(unit.casts_to_reduce)
            unit.replicate.start()
        kind = "reduce_scatter" if unit.layout.owners_per_shard > 1 else "all_reduce"
        self._ledger.count(kind, "replicate", unit, unit.replicate)
        self._replicating.append(unit)
        if lanes.is_async:
            self._finish_replicate(unit)

    def _finish_replicate(self, unit: ShardedUnit) -> None:
        if unit not in self._replicating:
            return
        self._replicating.remove(unit)
        lanes = self._lanes
        with lanes.replicate(), self._ledger.waiting():
            unit.replicate.finish()
            _copy_all(unit.casts_back)
            unit.replicate.release()
            lanes.replicate_finished(unit.index)

    def finish(self, *, is_last: bool) -> None:
        """Finish every reduction of this backward and assign `.grad`.

        Lane: compute. Waits: for all reductions.

        Args:
            is_last: Whether this was the last micro-batch of the step.
        """
        while self._reducing:
            self._settle(self._reducing.popleft())
        for unit in self._replicating:
            with self._ledger.waiting():
                unit.replicate.advance()
        while self._replicating:
            self._finish_replicate(self._replicating[0])
        for unit in self._touched.values():
            self._lanes.compute_waits_for_reduce(unit.index)
            if is_last:
                self._lanes.compute_waits_for_replicate(unit.index)
                unit.scale(self._scale)
            is_agreed = is_last or unit.gradients is Gradients.SHARDED
            unit.assign_gradients(is_agreed=is_agreed)
        if is_last:
            self._waiting_for_last.clear()
        else:
            self._waiting_for_last.update(self._touched)
        self._touched.clear()

    # Between backwards

    def check_complete(self) -> None:
        """Raise where a step would use sums that still wait for their last micro-batch."""
        for unit in self._waiting_for_last.values():
            if not any(unit.parameters[i].grad is not None for i in unit.trainable):
                continue
            raise LifecycleError(
                f"optimizer.step() found gradients of unit {unit.name!r} that are not reduced over "
                "all ranks: the last backward ran inside sw.accumulate(model). Run the last "
                "micro-batch of a step outside it, or call zero_grad() to discard the sums."
            )
        self._waiting_for_last.clear()

    def abort(self) -> None:
        """Forget this backward; operations in flight are finished when their buffers are next used."""
        for unit in self._touched.values():
            unit.wants_replicate = False
        self._waiting_for_last.update(self._touched)
        self._touched.clear()


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([dst for dst, _ in pairs], [src for _, src in pairs])
