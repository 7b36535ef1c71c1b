"""Bytes a rank sends per step, by collective and axis.

Over data axes they are `core.volume`'s closed forms over the planner's units; over the tensor and
pipeline axes, Megatron's counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.memory import MemoryPlan
from shardwright.core.strategy import Gathered
from shardwright.core.volume import PassCounts, UnitTraffic, expected_traffic
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.units import PlannedUnit
from shardwright.planner.workload import ITEM_BYTES, WorkloadSpec

__all__ = ["model_parallel_traffic", "step_traffic"]


def step_traffic(
    units: Sequence[PlannedUnit], plan: MemoryPlan, layout: LayoutSpec, workload: WorkloadSpec
) -> dict[str, float]:
    """Bytes sent per rank and step over the data axes.

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


def model_parallel_traffic(job: Job, units: Sequence[PlannedUnit]) -> dict[str, float]:
    """Bytes sent per rank and step over the tensor and pipeline axes, as `Stage` times them.

    Per block and micro-batch two all-reduces of the residual stream forward and two backward
    (Shoeybi et al., arXiv 1909.08053), of which recomputation of whole blocks repeats two; where
    sequences are divided too, each is a gather and a reduce-scatter of the same bytes (arXiv
    2205.05198). A stage sends activations on and their gradients back, a part from each tensor rank
    (arXiv 2104.04473, section 4.1). The look-up's and the loss's small sums are left out.

    Args:
        job: The job.
        units: Of one stage.

    Returns:
        Bytes by ``"collective over axis"``; nothing for data axes alone.
    """
    model, layout, workload = job.model, job.layout, job.workload
    if not isinstance(model, ModelSpec):
        return {}
    stream = workload.tokens_per_micro_batch * model.hidden * workload.precision.item_bytes("param")
    passes = workload.accumulation * stream
    found: dict[str, float] = {}
    if layout.tensor > 1:
        num_blocks = sum(unit.kind == "block" for unit in units)
        num_sums = 6 if workload.checkpointing == "full" else 4
        half = num_blocks * num_sums * passes * (layout.tensor - 1) / layout.tensor
        if workload.software.sequence_parallel:
            found |= {"all_gather over tensor": half, "reduce_scatter over tensor": half}
        else:
            found["all_reduce over tensor"] = 2 * half
    if layout.pipeline > 1:
        is_end = layout.pipeline == 2 or any("head" in unit.ends for unit in units)
        num_sends = 2 * layout.chunks_per_stage - is_end
        divided = 1 if workload.software.engine == "deepspeed" else layout.tensor
        found["send over pipeline"] = num_sends * passes / divided
    return found
