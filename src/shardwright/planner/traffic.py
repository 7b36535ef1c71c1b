"""Bytes a rank sends per step: `core.volume`'s closed forms over the planner's units."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.memory import MemoryPlan
from shardwright.core.strategy import Gathered
from shardwright.core.volume import PassCounts, UnitTraffic, expected_traffic
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.units import PlannedUnit
from shardwright.planner.workload import ITEM_BYTES, WorkloadSpec

__all__ = ["step_traffic"]


def step_traffic(
    units: Sequence[PlannedUnit], plan: MemoryPlan, layout: LayoutSpec, workload: WorkloadSpec
) -> dict[str, float]:
    """Bytes sent per rank and step.

    Args:
        units: Of one stage.
        plan: The engine's memory plan for them: it says which units are still in their slots when
            backward begins.
        layout: Strategy and mesh.
        workload: Micro-batches and dtypes.

    Returns:
        Bytes by ``"collective over axis"``.
    """
    micro_batches = workload.accumulation
    counts = PassCounts(
        training_forwards=micro_batches, refreshes=1, backwards=micro_batches, synchronised=1
    )
    slots = plan.parameter_slots.slot_of
    last_in_slot = {slot: index for index, slot in enumerate(slots)}
    traffic = expected_traffic(
        [
            UnitTraffic(
                layout=unit.layout,
                gathered=unit.gathered,
                is_resident_at_turn=unit.gathered is Gathered.USE
                and (index == 0 or last_in_slot[slots[index]] == index),
                reduce_itemsize=int(ITEM_BYTES[workload.precision.reduce]),
            )
            for index, unit in enumerate(units)
            if unit.layout is not None
        ],
        counts,
        gradients=layout.resolved.gradients,
        replicas=layout.replicas,
    )
    return {f"{collective} over {axis}": float(b) for (collective, axis), b in traffic.items()}
