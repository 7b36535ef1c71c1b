"""How many bytes a rank sends: closed forms over padded unit sizes.

With S shard ranks, R replicas, p and g the bytes per element of gathered parameters and reduced
gradients, a gather of a unit of U elements sends p*U*(S-1)/S per rank, a reduce-scatter
g*U*(S-1)/S, an all-reduce over replicas of a shard g*2*(U/S)*(R-1)/R. The strategy says how often
each happens. Sizes are padded as the layout pads them, so measured bytes can equal these exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.layout import UnitLayout
from shardwright.core.strategy import Gathered, Gradients

__all__ = ["PassCounts", "UnitTraffic", "expected_traffic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTraffic:
    """What decides a unit's bytes.

    Attributes:
        layout: Who owns which rows.
        gathered: How long it stays gathered.
        is_resident_at_turn: Whether its slot still holds it when backward begins.
        reduce_itemsize: Bytes per element of reduced gradients.
    """

    layout: UnitLayout
    gathered: Gathered
    is_resident_at_turn: bool
    reduce_itemsize: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCounts:
    """How often a run did what costs bytes.

    Attributes:
        training_forwards: Forward passes that a backward may follow.
        inference_forwards: Forward passes without gradients.
        refreshes: Forward passes that began after parameters had changed, the first included.
        backwards: Backward passes: micro-batches.
        synchronised: Backward passes that ended a step's accumulation.
    """

    training_forwards: int = 0
    inference_forwards: int = 0
    refreshes: int = 0
    backwards: int = 0
    synchronised: int = 0


def expected_traffic(
    units: Sequence[UnitTraffic], counts: PassCounts, *, gradients: Gradients, replicas: int
) -> dict[tuple[str, str], int]:
    """Bytes sent per rank.

    Args:
        units: All units that have parameters.
        counts: How often.
        gradients: Where gradients live between micro-batches.
        replicas: Size of the replicate axis.

    Returns:
        Bytes by ``(collective, axis)``; entries of 0 are left out.
    """
    totals: dict[tuple[str, str], int] = {}

    def add(collective: str, axis: str, num_bytes: int) -> None:
        if num_bytes:
            key = (collective, axis)
            totals[key] = totals.get(key, 0) + num_bytes

    reductions = counts.backwards if gradients is Gradients.SHARDED else counts.synchronised
    for unit in units:
        layout = unit.layout
        peers = layout.shard_size - 1
        add("all_gather", "shard", _num_gathers(unit, counts) * layout.shard_bytes * peers)
        shard_gradient_bytes = layout.gradient_numel // layout.shard_size * unit.reduce_itemsize
        add("reduce_scatter", "shard", reductions * shard_gradient_bytes * peers)
        over_replicas = shard_gradient_bytes // replicas * (replicas - 1)
        if layout.owners_per_shard > 1:
            owned_bytes = layout.gathered_bytes // layout.num_owners
            refreshes = _num_refreshes(unit, counts)
            add("all_gather", "replicate", refreshes * owned_bytes * (replicas - 1))
            add("reduce_scatter", "replicate", counts.synchronised * over_replicas)
        else:
            add("all_reduce", "replicate", counts.synchronised * 2 * over_replicas)
    return totals


def _num_refreshes(unit: UnitTraffic, counts: PassCounts) -> int:
    """Passes that began with changed values: the first, and those after a step, unless frozen."""
    is_frozen = not unit.layout.trainable_segments
    return min(counts.refreshes, 1) if is_frozen else counts.refreshes


def _num_gathers(unit: UnitTraffic, counts: PassCounts) -> int:
    if unit.gathered is Gathered.STEP:
        return _num_refreshes(unit, counts)
    forwards = counts.training_forwards + counts.inference_forwards
    if unit.gathered is Gathered.BACKWARD or unit.is_resident_at_turn:
        return forwards
    return forwards + counts.backwards
