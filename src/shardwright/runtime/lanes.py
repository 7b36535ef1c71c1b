"""Streams and events: the only file that knows whether work is ordered by CUDA or by the host.

A lane is a named stream. Every wait between lanes is one method of `Lanes`, named after who waits
for what, with its reason. On the CPU there are no streams: every method is free, and order follows
from the handles that operations wait on. Events are made once and reused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["Lanes"]


class Lanes:
    """The compute, gather, reduce and replicate lanes of one rank.

    Args:
        device: A CUDA device, or the CPU.
        num_units: Units, each with events of its own.
        num_slots: Parameter slots.

    Attributes:
        is_async: Whether lanes order work by themselves, so that the host never waits.
    """

    def __init__(self, device: torch.device, num_units: int, num_slots: int) -> None:
        self.is_async = device.type == "cuda"
        if not self.is_async:
            return
        self._device = device
        high = -1  # communication is short and others wait for it
        self._gather = torch.cuda.Stream(device, priority=high)
        self._reduce = torch.cuda.Stream(device, priority=high)
        self._replicate = torch.cuda.Stream(device, priority=high)
        self._released = [torch.cuda.Event() for _ in range(num_slots)]
        self._gathered = [torch.cuda.Event() for _ in range(num_units)]
        self._gathered_over_replicas = [torch.cuda.Event() for _ in range(num_units)]
        self._gradient_ready = [torch.cuda.Event() for _ in range(num_units)]
        self._reduced = [torch.cuda.Event() for _ in range(num_units)]
        self._replicated = [torch.cuda.Event() for _ in range(num_units)]
        self._stepped = torch.cuda.Event()

    def add_slot(self) -> None:
        """Make the event of one more slot."""
        if self.is_async:
            self._released.append(torch.cuda.Event())

    def gather(self) -> AbstractContextManager[object]:
        """Run what follows on the gather lane."""
        return torch.cuda.stream(self._gather) if self.is_async else nullcontext()

    def reduce(self) -> AbstractContextManager[object]:
        """Run what follows on the reduce lane."""
        return torch.cuda.stream(self._reduce) if self.is_async else nullcontext()

    def replicate(self) -> AbstractContextManager[object]:
        """Run what follows on the replicate lane."""
        return torch.cuda.stream(self._replicate) if self.is_async else nullcontext()

    # Signals, each recorded on the lane named

    def compute_released_slot(self, slot: int) -> None:
        """Compute has read a slot for the last time."""
        if self.is_async:
            self._released[slot].record(torch.cuda.current_stream(self._device))

    def compute_stepped(self) -> None:
        """Compute has changed the shards."""
        if self.is_async:
            self._stepped.record(torch.cuda.current_stream(self._device))

    def gather_finished(self, unit: int) -> None:
        """A unit's parameters are in its slot."""
        if self.is_async:
            self._gathered[unit].record(self._gather)

    def replicas_gathered(self, unit: int) -> None:
        """A unit's shard is whole again after a divided optimizer step."""
        if self.is_async:
            self._gathered_over_replicas[unit].record(self._replicate)

    def compute_wrote_gradient(self, unit: int) -> None:
        """Compute has filled a unit's gradient buffer."""
        if self.is_async:
            self._gradient_ready[unit].record(torch.cuda.current_stream(self._device))

    def reduce_finished(self, unit: int) -> None:
        """A unit's gradient is reduced over the shard axis."""
        if self.is_async:
            self._reduced[unit].record(self._reduce)

    def replicate_finished(self, unit: int) -> None:
        """A unit's gradient is reduced over the replicate axis."""
        if self.is_async:
            self._replicated[unit].record(self._replicate)

    # Waits

    def gather_waits_for_release(self, slot: int) -> None:
        """The gather overwrites the slot, which compute may still be reading."""
        if self.is_async:
            self._gather.wait_event(self._released[slot])

    def gather_waits_for_step(self) -> None:
        """The gather reads shards that the optimizer may still be writing."""
        if self.is_async:
            self._gather.wait_event(self._stepped)

    def gather_waits_for_replicas(self, unit: int) -> None:
        """The gather reads a shard that the replicate lane is still filling."""
        if self.is_async:
            self._gather.wait_event(self._gathered_over_replicas[unit])

    def replicate_waits_for_step(self) -> None:
        """The gather over replicas reads what the optimizer may still be writing."""
        if self.is_async:
            self._replicate.wait_event(self._stepped)

    def compute_waits_for_gather(self, unit: int) -> None:
        """Compute reads the gathered parameters."""
        if self.is_async:
            torch.cuda.current_stream(self._device).wait_event(self._gathered[unit])

    def reduce_waits_for_gradient(self, unit: int) -> None:
        """The reduction reads what compute is still writing."""
        if self.is_async:
            self._reduce.wait_event(self._gradient_ready[unit])

    def replicate_waits_for_reduce(self, unit: int) -> None:
        """The reduction over replicas reads the result of the one over shards."""
        if self.is_async:
            self._replicate.wait_event(self._reduced[unit])

    def compute_waits_for_reduce(self, unit: int) -> None:
        """Compute writes a gradient buffer that the reduction may still be reading."""
        if self.is_async:
            torch.cuda.current_stream(self._device).wait_event(self._reduced[unit])

    def compute_waits_for_replicate(self, unit: int) -> None:
        """Compute, the optimizer, reads gradients that the replicate lane writes."""
        if self.is_async:
            torch.cuda.current_stream(self._device).wait_event(self._replicated[unit])

    def step_waits_for_gathers(self) -> None:
        """The optimizer writes shards that gathers may still be reading."""
        if self.is_async:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._gather)
            current.wait_stream(self._replicate)
