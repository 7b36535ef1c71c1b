"""Bytes of training state per rank, for the engine and for the engines it is compared with.

Ours is `core.memory.plan_memory` itself, unit by unit. The others' are closed forms over elements:
FSDP keeps fp32 shards and gathers into buffers of its own (pytorch FSDP2, see the comparison of
mechanisms in the documentation); DeepSpeed as Rajbhandari et al. (arXiv 1910.02054) plus its
documented buckets; Megatron keeps parameters and gradients whole and may shard the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.memory import MemoryPlan, plan_memory
from shardwright.core.strategy import Gathered, Gradients
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.units import PlannedUnit
from shardwright.planner.workload import WIRE_BYTES, WorkloadSpec

__all__ = ["StateBytes", "engine_plan", "paper_state_bytes", "state_bytes"]

_DEEPSPEED_BUCKET_NUMEL = 5e8
"""Default reduce and all-gather bucket, elements."""

_DEEPSPEED_LIVE_NUMEL = 1e9
"""Default bound on gathered parameters in stage 3, and size of a group it updates, elements."""


def paper_state_bytes(
    num_parameters: float,
    *,
    stage: int,
    ranks: int,
    parameter: float = 2,
    gradient: float = 2,
    optimizer: float = 12,
) -> float:
    """Model states per rank as the ZeRO paper counts them (arXiv 1910.02054, figure 1).

    Args:
        num_parameters: Elements.
        stage: 0 (nothing sharded) to 3.
        ranks: Data-parallel ranks.
        parameter: Bytes per element of parameters.
        gradient: Bytes per element of gradients.
        optimizer: Bytes per element of masters and moments.
    """
    divided = [ranks if stage >= least else 1 for least in (3, 2, 1)]
    return num_parameters * (
        parameter / divided[0] + gradient / divided[1] + optimizer / divided[2]
    )


def engine_plan(
    units: Sequence[PlannedUnit], layout: LayoutSpec, workload: WorkloadSpec
) -> MemoryPlan:
    """The engine's own memory plan for the units of one rank."""
    return plan_memory(
        [unit.needs(workload.precision) for unit in units],
        gradients=layout.resolved.gradients,
        replicas=layout.replicas,
        gather_distance=layout.gather_distance,
        reduce_distance=layout.reduce_in_flight,
        needs_staging=layout.transport == "pairwise",
    )


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of training state and buffers by category, at each instant that may be the peak.

    Attributes:
        at_loss: When the loss is computed.
        in_backward: When backward has begun.
        after_backward: When backward ends: sharded gradients are all there.
        in_step: While the optimizer updates.
        at_start: While the engine takes the model over.
    """

    at_loss: dict[str, float]
    in_backward: dict[str, float]
    after_backward: dict[str, float]
    in_step: dict[str, float]
    at_start: dict[str, float]


def state_bytes(
    units: Sequence[PlannedUnit], layout: LayoutSpec, workload: WorkloadSpec
) -> StateBytes:
    """Bytes per rank, optimizer's transients included.

    Ours are allocated once and stay; other engines allocate gradients as backward reaches them and
    drop gathered parameters before the optimizer runs.

    Args:
        units: Of the rank's stage.
        layout: Strategy and mesh.
        workload: Dtypes, optimizer, and whose engine.
    """
    engine = workload.software.engine
    moments, transient = _optimizer(units, layout, workload)
    if engine == "shardwright":
        held: dict[str, float] = dict(engine_plan(units, layout, workload).bytes_by_category)
        if workload.parameters_offloaded:
            for name in ("parameter_shards", "compute_shards", "gradient_shards"):
                held[name] = 0.0
        held["optimizer_state"] = moments
        held["wire_buffers"] = _wire_buffers(units, workload)
        return StateBytes(
            at_loss=dict(held),
            in_backward=dict(held),
            after_backward=dict(held),
            in_step=held | {"optimizer_transient": transient},
            at_start={},
        )
    if engine.startswith("fsdp"):
        parts = _fsdp(units, layout, workload)
    else:
        parts = _deepspeed_or_megatron(units, layout, workload)
    held = dict(parts.held) | {"optimizer_state": moments}
    # Gradients of earlier micro-batches are there from the second on.
    earlier = parts.gradients if workload.accumulation > 1 else {}
    return StateBytes(
        at_loss=held | parts.gathered | earlier,
        in_backward=held | parts.gathered | parts.buffers | earlier,
        after_backward=held | parts.gathered | parts.buffers | parts.gradients,
        in_step=held | parts.gradients | {"optimizer_transient": transient + parts.cast},
        at_start=parts.start,
    )


def _wire_buffers(units: Sequence[PlannedUnit], workload: WorkloadSpec) -> float:
    """Bytes of what compressed collectives send: one gather and one reduction at a time."""
    largest = max((unit.numel for unit in units), default=0)
    used = (getattr(workload.compression, use) for use in ("gather", "reduce"))
    return largest * sum(WIRE_BYTES[kind] for kind in used if kind)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Another engine's bytes.

    Attributes:
        held: Always.
        gathered: While parameters are gathered.
        buffers: In backward.
        gradients: From backward until the optimizer has run.
        start: While the engine takes the model over.
        cast: Gradients in the optimizer's dtype, while it runs.
    """

    held: dict[str, float]
    gathered: dict[str, float]
    buffers: dict[str, float]
    gradients: dict[str, float]
    start: dict[str, float]
    cast: float = 0.0


def _optimizer(
    units: Sequence[PlannedUnit], layout: LayoutSpec, workload: WorkloadSpec
) -> tuple[float, float]:
    """Bytes of moments, and of what the update holds for a moment.

    Adam over lists keeps a list of denominators as large as its parameters (torch's
    `_multi_tensor_adamw`), DeepSpeed's stage 3 for one of its groups at a time; a loop keeps one
    parameter's.
    """
    if workload.optimizer.is_offloaded:
        return 0.0, 0.0
    owned = sum(unit.trainable_numel for unit in units) / layout.optimizer_degree
    moments = workload.optimizer.num_moments
    one = owned * workload.precision.item_bytes("state")
    updated = one
    if workload.software.engine == "deepspeed" and layout.resolved.gathered is Gathered.USE:
        updated = min(owned, _DEEPSPEED_LIVE_NUMEL) * workload.precision.item_bytes("state")
    is_foreach = moments == 2 and workload.optimizer.implementation == "foreach"
    return moments * one, updated if is_foreach else 0.0


def _fsdp(units: Sequence[PlannedUnit], layout: LayoutSpec, workload: WorkloadSpec) -> _Parts:
    """FSDP, or plain replicas: masters in shards, gathered parameters in buffers of their own.

    Two units are gathered at once, and the root, whose embedding and head are not units of their
    own. FSDP2 copies gathered parameters out of the gather's buffer, so that one more unit exists
    while that happens; gradients of the root, of one unit and of the one before, whose reduction
    is in flight, exist whole, and one unit's once more in the reduction's dtype. Autocast
    keeps a narrow copy of parameters.
    """
    precision = workload.precision
    p, m = precision.item_bytes("param"), precision.item_bytes("master")
    total = float(sum(unit.numel for unit in units))
    degree = layout.shard_degree
    blocks = [unit.numel for unit in units if unit.kind == "block"]
    block = max(blocks, default=int(total))
    rest = total - sum(blocks)
    is_offloaded = workload.parameters_offloaded
    masters = 0.0 if is_offloaded else total * m / degree
    gradients = 0.0 if is_offloaded else total * precision.item_bytes("grad") / degree
    if degree == 1:
        copies = total * p if p != m else (total * 2.0 if precision.autocasts else 0.0)
        return _Parts(
            held={"parameter_shards": masters},
            gathered={"parameter_slots": copies},
            buffers={},
            gradients={"gradient_shards": gradients},
            start={},
        )
    if layout.resolved.gathered is not Gathered.USE:
        slots = total * p
    else:
        slots = (2 * block + rest) * p
        if workload.software.engine == "fsdp2":
            slots += block * p
    return _Parts(
        held={"parameter_shards": masters},
        gathered={"parameter_slots": slots},
        buffers={
            "gradient_buffers": (2 * block + rest) * p + block * precision.item_bytes("reduce")
        },
        gradients={"gradient_shards": gradients},
        start={},
    )


def _deepspeed_or_megatron(
    units: Sequence[PlannedUnit], layout: LayoutSpec, workload: WorkloadSpec
) -> _Parts:
    """DeepSpeed's stages, or Megatron with whole parameters and gradients.

    While stages 1 and 2 start, parameters exist twice: as the model's and flattened. DeepSpeed's
    bf16 optimizer keeps whole fp32 gradients beside those of backward.
    """
    precision = workload.precision
    p, m, g = (precision.item_bytes(use) for use in ("param", "master", "grad"))
    total = float(sum(unit.numel for unit in units))
    shards = layout.shard_degree
    owned = total / layout.optimizer_degree
    is_offloaded = workload.optimizer.is_offloaded
    masters = owned * m if p != m and not is_offloaded else 0.0
    if workload.software.engine == "megatron":
        return _Parts(
            held={
                "parameter_shards": masters,
                "parameter_slots": total * p,
                "gradient_buffers": total * g,
            },
            gathered={},
            buffers={},
            gradients={},
            start={},
        )
    buckets = min(_DEEPSPEED_BUCKET_NUMEL, total) * p * 2
    if layout.resolved.gathered is Gathered.USE:
        live = min(_DEEPSPEED_LIVE_NUMEL, total)
        kept = 0.0 if workload.parameters_offloaded else total * p / shards
        return _Parts(
            held={
                "parameter_shards": masters,
                "compute_shards": kept,
                "gradient_shards": 0.0 if is_offloaded else total * p / shards,
            },
            gathered={"parameter_slots": live * p},
            buffers={"gradient_buffers": buckets},
            gradients={"gradient_shards": 0.0 if is_offloaded else total * p / shards},
            start={},
            cast=0.0 if is_offloaded else owned * g,
        )
    is_whole = layout.resolved.gradients is Gradients.WHOLE
    if is_whole and p != g:
        gradients = total * (p + g)
    else:
        gradients = total * p if is_whole else total * p / shards
    return _Parts(
        held={"parameter_shards": masters, "parameter_slots": total * p},
        gathered={},
        buffers={"gradient_buffers": buckets},
        gradients={"gradient_shards": 0.0 if is_offloaded else gradients},
        cast=0.0 if is_offloaded else owned * g,
        start={"parameter_slots": 2 * total * p, "parameter_shards": masters},
    )
