"""How much memory the engine holds, and in which buffers: a formula over layouts.

The engine allocates exactly what `plan_memory` says, so a run's engine memory is known before it.
Per unit with gathered space U (bytes in compute dtypes), N owners, S shard ranks, master dtype of m
bytes and reduce dtype of g bytes per element:

    gathered through the step    slot U, holding the shard; masters m*U/N where dtypes differ
    gathered for use only        a shared slot; shard m*U/N, and U/S in the compute dtype if other
    gradients whole              a buffer of g*U; shards of m*U/S where dtypes differ
    gradients sharded            a shared buffer of g*U; shards of m*U/S
    pairwise reductions          shared staging of g*U*(S-1)/S and, over R replicas, g*U/S*(R-1)/R
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.layout import ITEMSIZE, UnitLayout
from shardwright.core.slot_plan import SlotPlan, share_slots
from shardwright.core.strategy import Gathered, Gradients

__all__ = ["MemoryPlan", "UnitNeeds", "plan_memory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitNeeds:
    """What decides a unit's memory.

    Attributes:
        layout: Who owns which rows; None for a root without parameters.
        depth: Enclosing units.
        gathered: How long it stays gathered.
        master_dtype: Dtype of trainable masters.
        reduce_dtype: Dtype of the gradient buffer.
    """

    layout: UnitLayout | None
    depth: int
    gathered: Gathered
    master_dtype: str
    reduce_dtype: str

    @property
    def master_itemsize(self) -> int:
        """Bytes per element of trainable masters."""
        return ITEMSIZE[self.master_dtype]

    @property
    def reduce_itemsize(self) -> int:
        """Bytes per element of the gradient buffer."""
        return ITEMSIZE[self.reduce_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the whole gradient space in the reduce dtype."""
        return self.layout.gradient_numel * self.reduce_itemsize if self.layout else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Buffers of one engine, in bytes per rank.

    Attributes:
        parameter_slots: Slots of gathered parameters, and each unit's slot.
        gradient_buffers: Buffers gradients are reduced from.
        staging: Buffers reductions over shards receive into.
        replicate_staging: Buffers reductions over replicas receive into.
        parameter_shards: Total of the masters and frozen shards that lie outside slots.
        compute_shards: Total of the shards in compute dtypes kept beside masters.
        gradient_shards: Total of the gradient shards kept beside buffers.
    """

    parameter_slots: SlotPlan
    gradient_buffers: SlotPlan
    staging: SlotPlan
    replicate_staging: SlotPlan
    parameter_shards: int
    compute_shards: int
    gradient_shards: int

    @property
    def bytes_by_category(self) -> dict[str, int]:
        """Bytes per category of engine memory."""
        return {
            "parameter_shards": self.parameter_shards,
            "compute_shards": self.compute_shards,
            "parameter_slots": sum(self.parameter_slots.sizes),
            "gradient_buffers": sum(self.gradient_buffers.sizes),
            "gradient_shards": self.gradient_shards,
            "staging": sum(self.staging.sizes) + sum(self.replicate_staging.sizes),
        }


def plan_memory(
    units: Sequence[UnitNeeds],
    *,
    gradients: Gradients,
    replicas: int,
    gather_distance: int,
    reduce_distance: int,
    needs_staging: bool,
) -> MemoryPlan:
    """Say which buffers an engine holds.

    Args:
        units: In module order, the root first.
        gradients: Where gradients live between micro-batches.
        replicas: Size of the replicate axis.
        gather_distance: Units gathered ahead, forward or backward.
        reduce_distance: Reductions in flight beside the unit that computes.
        needs_staging: Whether the transport receives reductions into buffers of their own.

    Returns:
        The plan, in bytes per rank.
    """
    depths = [u.depth for u in units]
    shared = [False] * len(units)
    whole = gradients is Gradients.WHOLE
    gradient_bytes = [u.gradient_bytes for u in units]
    staging = [_staging_bytes(u) if needs_staging else 0 for u in units]
    replicate_staging = [
        _replicate_staging_bytes(u, replicas) if needs_staging else 0 for u in units
    ]
    return MemoryPlan(
        parameter_slots=share_slots(
            [u.layout.gathered_bytes if u.layout else 0 for u in units],
            depths,
            exclusive=[u.gathered is not Gathered.USE for u in units],
            distance=gather_distance,
        ),
        gradient_buffers=share_slots(
            gradient_bytes, depths, exclusive=[whole] * len(units), distance=reduce_distance
        ),
        staging=share_slots(staging, depths, exclusive=shared, distance=reduce_distance),
        replicate_staging=share_slots(
            replicate_staging, depths, exclusive=shared, distance=reduce_distance
        ),
        parameter_shards=sum(_shard_bytes(u)[0] for u in units),
        compute_shards=sum(_shard_bytes(u)[1] for u in units),
        gradient_shards=sum(_gradient_shard_bytes(u, whole) for u in units),
    )


def _shard_bytes(unit: UnitNeeds) -> tuple[int, int]:
    """Bytes of ``(parameter_shards, compute_shards)`` outside slots."""
    layout = unit.layout
    if layout is None:
        return 0, 0
    masters = compute = 0
    for segment in layout.segments:
        master = unit.master_dtype if segment.trainable else segment.dtype
        chunk_bytes = segment.chunk_numel * layout.owners_per_shard * ITEMSIZE[segment.dtype]
        if unit.gathered is not Gathered.STEP:
            if segment.dtype != master or layout.owners_per_shard > 1:
                compute += chunk_bytes
            else:
                masters += chunk_bytes
        if segment.dtype != master:
            masters += segment.chunk_numel * ITEMSIZE[master]
    return masters, compute


def _gradient_shard_bytes(unit: UnitNeeds, whole: bool) -> int:
    layout = unit.layout
    if layout is None:
        return 0
    if whole and unit.reduce_dtype == unit.master_dtype:
        return 0
    return layout.gradient_numel // layout.shard_size * unit.master_itemsize


def _staging_bytes(unit: UnitNeeds) -> int:
    if unit.layout is None:
        return 0
    return unit.gradient_bytes // unit.layout.shard_size * (unit.layout.shard_size - 1)


def _replicate_staging_bytes(unit: UnitNeeds, replicas: int) -> int:
    if unit.layout is None:
        return 0
    return unit.gradient_bytes // unit.layout.shard_size // replicas * (replicas - 1)
