"""From autograd's gradients to the shards' `.grad`: collect, reduce, replicate, scale, assign.

A unit's gradient buffer is filled by direct writes and by at most one foreach copy, reduced over
the shard axis, added to what earlier micro-batches left, reduced over replicas once per step and
divided by the number of data ranks once, last: by the last reduction itself, where that can.

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
from shardwright.runtime.failure import FailureMonitor, Waiting
from shardwright.runtime.lanes import Lanes
from shardwright.runtime.ledger import Ledger
from shardwright.runtime.transport.base import Axis
from shardwright.runtime.transport.control import sum_over
from shardwright.runtime.unit import ShardedUnit
from shardwright.runtime.unit_gradients import UnitGradients

__all__ = ["GradientReducer"]


class GradientReducer:
    """Moves gradients of all units of one engine.

    Args:
        num_data_ranks: Ranks whose losses are averaged.
        device: Where small tensors are exchanged.
        max_in_flight: Reductions left unfinished while another unit computes.
        lanes: Streams.
        ledger: Counts bytes.
        monitor: Told what is started.
        waiting: Wraps every wait for other ranks.
    """

    def __init__(
        self,
        *,
        num_data_ranks: int,
        device: torch.device,
        max_in_flight: int,
        lanes: Lanes,
        ledger: Ledger,
        monitor: FailureMonitor,
        waiting: Waiting,
    ) -> None:
        self._scale = self._mean_scale = 1.0 / num_data_ranks
        self._num_tokens = 0
        self._device = device
        self._gradients: list[UnitGradients] = []
        self._max_in_flight = max_in_flight
        self._waiting_for_last: dict[UnitGradients, None] = {}
        self._lanes = lanes
        self._ledger = ledger
        self._monitor = monitor
        self._waiting = waiting
        self._user_of_buffer: dict[int, UnitGradients] = {}
        self._user_of_staging: dict[int, UnitGradients] = {}
        self._user_of_replicate_staging: dict[int, UnitGradients] = {}
        self._reducing: deque[UnitGradients] = deque()
        self._replicating: deque[UnitGradients] = deque()
        self._touched: dict[UnitGradients, None] = {}  # of this backward, in order

    def attach(self, units: Sequence[ShardedUnit]) -> None:
        """Tell which units' gradients there are."""
        self._gradients = [u.gradient for u in units if u.gradient is not None]

    # During backward

    def acquire(self, unit: ShardedUnit) -> None:
        """Make the unit's gradient buffer writable.

        Lane: compute. Waits: for the reduction that last read the buffer.
        """
        gradient = unit.gradient
        if gradient is None:
            return
        user = self._user_of_buffer.get(gradient.slot)
        if user is not None:
            self._settle_through(user)
            if user.casts_to_reduce:
                self._finish_replicate(user)
            with self._waiting("reduce_scatter", user.unit.name):
                user.reduce.release()
            self._lanes.compute_waits_for_reduce(user.unit.index)
        self._finish_replicate(gradient)
        self._user_of_buffer[gradient.slot] = gradient
        if gradient not in self._touched:
            self._touched[gradient] = None
            gradient.begin()
            return
        if gradient.is_reduced or gradient.is_scaled:
            self._lanes.compute_waits_for_replicate(unit.index)
        if gradient.is_scaled:  # what was thought complete is to be added to
            gradient.multiply(1.0 / self._scale)
            gradient.is_scaled = False
        if gradient.is_reduced:
            gradient.reopen()

    def collect(
        self,
        gradient: UnitGradients,
        positions: tuple[int, ...],
        values: Sequence[torch.Tensor | None],
    ) -> None:
        """Bring one call's gradients into the buffer, with one foreach where not yet there.

        Args:
            gradient: The unit's gradient side.
            positions: Parameters the values belong to, as indices into the unit's.
            values: One per position, in the compute dtype; None where unused.
        """
        copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        additions: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for position, value in zip(positions, values, strict=True):
            if value is None:
                continue
            k = gradient.index_of[position]
            sink, view = gradient.sinks[k], gradient.views[k]
            gradient.used[k] = True
            # A direct write is part of what autograd hands over: replace, never add it twice.
            target = additions if sink.is_filled and not sink.is_written else copies
            sink.is_written = False
            sink.is_filled = True
            if value.data_ptr() != view.data_ptr() or value.dtype != view.dtype:
                target[0].append(view)
                target[1].append(value)
        if copies[0]:
            torch._foreach_copy_(copies[0], copies[1])
            self._ledger.count_copies(len(copies[0]))
        if additions[0]:
            torch._foreach_add_(additions[0], additions[1])

    def start_reduce(self, unit: ShardedUnit, *, is_last: bool) -> None:
        """Reduce a unit's gradient over the shard axis.

        Lane: reduce. Waits: for the staging's last user. Signals: the reduction.

        Args:
            unit: The unit.
            is_last: Whether this is the last micro-batch of the step.
        """
        gradient = unit.gradient
        if gradient is None:
            return
        self.acquire(unit)  # a unit whose backward never ran still takes part
        gradient.clear_unfilled()
        gradient.write_flags()
        user = self._user_of_staging.get(gradient.staging_slot)
        if user is not None and gradient.staging_slot >= 0:
            self._settle_through(user)
        self._user_of_staging[gradient.staging_slot] = gradient
        gradient.is_reduced = gradient.home is Gradients.WHOLE
        topology, scale = unit.topology, 1.0
        if is_last and topology.reduce.size > 1 and topology.replicate.size == 1:
            scale, gradient.is_scaled = self._scale, True
        lanes = self._lanes
        lanes.compute_wrote_gradient(unit.index)
        with lanes.reduce(), self._waiting("reduce_scatter", unit.name, is_timed=False):
            lanes.reduce_waits_for_gradient(unit.index)
            gradient.reduce.start(scale=scale)
        self._ledger.count("reduce_scatter", "shard", unit, gradient.reduce)
        self._monitor.issued("reduce_scatter", unit.name)
        self._reducing.append(gradient)
        if lanes.is_async or unit.topology.reduce.size == 1:
            self._settle_through(gradient)
        while len(self._reducing) > self._max_in_flight:
            self._settle(self._reducing.popleft())

    def request_replicate(self, unit: ShardedUnit) -> None:
        """Reduce a unit's gradient over replicas, once its reduction over shards is done."""
        gradient = unit.gradient
        if gradient is None:
            return
        gradient.wants_replicate = True
        if gradient not in self._reducing:
            self._start_replicate(gradient)

    # Settling

    def _settle_through(self, gradient: UnitGradients) -> None:
        """Finish reductions in the order they began, up to and including this one."""
        while gradient in self._reducing:
            self._settle(self._reducing.popleft())

    def _settle(self, gradient: UnitGradients) -> None:
        lanes = self._lanes
        with lanes.reduce(), self._waiting("reduce_scatter", gradient.unit.name):
            gradient.reduce.finish(accumulate=gradient.accumulates)
            lanes.reduce_finished(gradient.unit.index)
        gradient.has_sums = True
        if gradient.wants_replicate:
            self._start_replicate(gradient)

    def _start_replicate(self, gradient: UnitGradients) -> None:
        gradient.wants_replicate = False
        gradient.is_reduced = True
        user = self._user_of_replicate_staging.get(gradient.replicate_staging_slot)
        if user is not None and gradient.replicate_staging_slot >= 0:
            self._finish_replicate(user)
        self._user_of_replicate_staging[gradient.replicate_staging_slot] = gradient
        if gradient.casts_to_reduce:
            self._take_back_buffer(gradient)
        lanes, unit = self._lanes, gradient.unit
        with self._waiting("all_reduce", unit.name):
            for other in self._replicating:
                other.replicate.advance()
        with lanes.replicate(), self._waiting("all_reduce", unit.name, is_timed=False):
            lanes.replicate_waits_for_reduce(unit.index)
            _copy_all(gradient.casts_to_reduce)
            gradient.is_scaled = not gradient.casts_to_reduce
            gradient.replicate.start(scale=self._scale if gradient.is_scaled else 1.0)
        kind = "reduce_scatter" if unit.layout.owners_per_shard > 1 else "all_reduce"
        self._ledger.count(kind, "replicate", unit, gradient.replicate)
        self._monitor.issued(f"{kind} over replicas", unit.name)
        self._replicating.append(gradient)
        if lanes.is_async:
            self._finish_replicate(gradient)

    def _take_back_buffer(self, gradient: UnitGradients) -> None:
        """Let sums be sent from the buffer they were reduced from, where others used it since.

        They have, where backward could not tell that a unit's last call had come: a forward was
        abandoned, or its output dropped.
        """
        user = self._user_of_buffer.get(gradient.slot)
        if user is None or user is gradient:
            return
        self._settle_through(user)
        self._finish_replicate(user)
        with self._waiting("reduce_scatter", user.unit.name):
            user.reduce.release()
        with self._lanes.replicate():
            self._lanes.replicate_waits_for_reduce(user.unit.index)
        self._user_of_buffer[gradient.slot] = gradient

    def _finish_replicate(self, gradient: UnitGradients) -> None:
        if gradient not in self._replicating:
            return
        self._replicating.remove(gradient)
        lanes = self._lanes
        with lanes.replicate(), self._waiting("all_reduce", gradient.unit.name):
            gradient.replicate.finish()
            _copy_all(gradient.casts_back)
            gradient.replicate.release()
            lanes.replicate_finished(gradient.unit.index)

    def finish(self, *, is_last: bool) -> None:
        """Finish every reduction of this backward and assign `.grad`.

        Lane: compute. Waits: for all reductions.

        Args:
            is_last: Whether this was the last micro-batch of the step.
        """
        while self._reducing:
            self._settle(self._reducing.popleft())
        with self._waiting("all_reduce", "(all)"):
            for gradient in self._replicating:
                gradient.replicate.advance()
        while self._replicating:
            self._finish_replicate(self._replicating[0])
        for gradient in self._touched:
            self._lanes.compute_waits_for_reduce(gradient.unit.index)
            if is_last:
                self._lanes.compute_waits_for_replicate(gradient.unit.index)
                gradient.scale(self._scale)
            is_reduced = is_last or gradient.home is Gradients.SHARDED
            gradient.assign(is_agreed=is_reduced and gradient.has_sums)
        if is_last:
            self._scale = self._mean_scale
            self._waiting_for_last.clear()
        else:
            self._waiting_for_last.update(self._touched)
        self._touched.clear()

    # Between backwards

    def count_tokens(self, num_tokens: int, axis: Axis, *, is_last: bool) -> None:
        """Divide this step's gradient by a number of tokens instead of the number of ranks.

        Collective with the last micro-batch.

        Args:
            num_tokens: Tokens of this rank's micro-batch.
            axis: The data ranks.
            is_last: Whether the micro-batch is the last of its step.
        """
        if self._num_tokens == 0 and any(g.is_final and g.is_alive() for g in self._gradients):
            raise LifecycleError(
                "sw.backward() found gradients of an earlier step, which were divided by another "
                "number of tokens; call zero_grad() after each optimizer step"
            )
        self._num_tokens += num_tokens
        if is_last:
            counted = torch.tensor([float(self._num_tokens)], dtype=torch.float64)
            with self._waiting("all_gather of token counts", "(root)"):
                total = float(sum_over(counted.to(self._device), axis))
            self._scale, self._num_tokens = 1.0 / max(total, 1.0), 0

    def check_complete(self) -> None:
        """Raise where a step would use sums that still wait for their last micro-batch."""
        for gradient in self._waiting_for_last:
            unit = gradient.unit
            if not gradient.is_alive():
                continue
            raise LifecycleError(
                f"optimizer.step() found gradients of unit {unit.name!r} that are not reduced over "
                "all ranks: the last backward ran inside sw.accumulate(model). Run the last "
                "micro-batch of a step outside it, or call zero_grad() to discard the sums."
            )
        self._waiting_for_last.clear()

    def abort(self) -> None:
        """Forget this backward; what is in flight is finished when its buffer is next used."""
        for gradient in self._touched:
            gradient.wants_replicate = gradient.is_scaled = False
        self._waiting_for_last.update(self._touched)
        self._touched.clear()
        self._scale, self._num_tokens = self._mean_scale, 0


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([dst for dst, _ in pairs], [src for _, src in pairs])
