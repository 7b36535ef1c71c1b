"""A rank's memory at the peak instant, category by category."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.planner.cost.activation import (
    block_kept,
    block_working,
    boundary_bytes,
    ends_kept,
    head_bytes,
)
from shardwright.planner.cost.state import StateBytes, state_bytes
from shardwright.planner.cost.traced import output_bytes, traced_kept, traced_working
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.traced import TracedModel
from shardwright.planner.units import PlannedUnit, find_units
from shardwright.planner.workload import WorkloadSpec

__all__ = [
    "GIB",
    "MemoryEstimate",
    "estimate_memory",
    "is_block_checkpointed",
    "kept_bytes",
    "loss_peak_bytes",
    "numbered",
    "working_bytes",
]

_Model = ModelSpec | TracedModel

GIB = 2**30

_CONTEXT_GIB = 0.75
"""What the driver, the libraries and the collectives hold outside the framework's allocator, GiB;
counted when asking whether a job fits."""

_COMMUNICATOR_GIB = 0.25
"""Buffers of one communicator inside the process, GiB."""

_TEMPORARY = ("activations", "logits_and_loss", "working_activations", "optimizer_transient")

_FRAGMENTATION = 0.04
"""Share of what is allocated and freed each step that the caching allocator holds in vain."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank.

    Attributes:
        categories: Bytes by category at the peak instant; they add up to the peak.
        peak_at: What runs at the peak.
        context_bytes: Held outside the framework's allocator, not part of the peak.
    """

    categories: dict[str, float]
    peak_at: str
    context_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Bytes the framework's allocator holds at the peak."""
        return sum(self.categories.values())

    @property
    def peak_gib(self) -> float:
        """The peak in GiB."""
        return self.peak_bytes / GIB

    @property
    def needed_gib(self) -> float:
        """What the device must have, GiB: the peak and what lies outside the allocator."""
        return (self.peak_bytes + self.context_bytes) / GIB


def is_block_checkpointed(workload: WorkloadSpec, block: int) -> bool:
    """Whether recomputation applies to a block, counted from 0."""
    return workload.checkpointing != "alternate" or block % 2 == 0


def estimate_memory(model: _Model, layout: LayoutSpec, workload: WorkloadSpec) -> MemoryEstimate:
    """Say what the fullest rank holds: of the first or the fullest pipeline stage, or of the last.

    Args:
        model: Shape.
        layout: Strategy and mesh.
        workload: Batch, dtypes, kernels, whose engine.
    """
    stages = layout.pipeline
    blocks = layout.stage_blocks(model.layers)
    # Of stages as full, each holds fewer micro-batches than the one before.
    estimates = [
        _of_stage(
            model,
            layout,
            workload,
            layers=blocks[stage],
            has_embedding=stage == 0,
            has_head=stage == stages - 1,
            in_flight=micro_batches_in_flight(layout, workload, stage),
        )
        for stage in sorted({0, blocks.index(max(blocks)), stages - 1})
    ]
    return max(estimates, key=lambda estimate: estimate.peak_bytes)


def micro_batches_in_flight(layout: LayoutSpec, workload: WorkloadSpec, stage: int = 0) -> float:
    """Micro-batches whose activations a stage holds, in stages' worth.

    Under 1F1B as many as there are stages from this one on (Narayanan et al., arXiv 2104.04473). A
    stage of v chunks runs 2 (p - 1 - stage) + (v - 1) p chunks before its first backward, and one
    more: for the first that is p (1 + (p - 1) / (p v)) (arXiv 2205.05198, section 4.2.3).

    Args:
        layout: Its pipeline.
        workload: Its micro-batches.
        stage: Counted from 0.
    """
    stages, chunks = layout.pipeline, layout.chunks_per_stage
    behind = stages - 1 - stage
    held = (2 * behind + (chunks - 1) * stages + 1) / chunks if chunks > 1 else behind + 1
    return min(float(workload.accumulation), held)


def _of_stage(
    model: _Model,
    layout: LayoutSpec,
    workload: WorkloadSpec,
    *,
    layers: int,
    has_embedding: bool,
    has_head: bool,
    in_flight: float,
) -> MemoryEstimate:
    units = _units(model, layout, workload.precision.param, layers, has_embedding, has_head)
    kept = sum(kept_bytes(model, layout, workload, units))
    if not has_head and isinstance(model, ModelSpec):
        kept += _sent_kept(model, layout, workload)
    kept *= in_flight
    working = max(working_bytes(model, layout, workload, units))
    head = loss_peak_bytes(model, layout, workload) if has_head else 0.0
    state = _state(
        model,
        layout,
        # What only scales activations is left out, so that layouts are counted once.
        replace(
            workload,
            seq_len=1,
            micro_batch=1,
            accumulation=min(workload.accumulation, 2),
            checkpointing="none",
        ),
        layers,
        has_embedding,
        has_head,
    )
    instants: dict[str, dict[str, float]] = {
        "loss": state.at_loss | {"activations": kept, "logits_and_loss": head},
        "first backward": state.in_backward | {"activations": kept, "working_activations": working},
        "last backward": state.after_backward
        | {"activations": kept / max(1, layers), "working_activations": working},
        "optimizer step": state.in_step,
        "initialisation": state.at_start,
    }
    names: tuple[str, ...] = _TEMPORARY
    if workload.software.engine != "shardwright":  # others allocate buffers in every step, too
        names = (*names, "parameter_slots", "gradient_buffers")
    for categories in instants.values():
        temporary = sum(categories.get(name, 0.0) for name in names)
        categories["allocator"] = _FRAGMENTATION * temporary
    peak_at = max(instants, key=lambda name: sum(instants[name].values()))
    categories = {name: size for name, size in instants[peak_at].items() if size}
    axes = (layout.shard_degree, layout.replicas, layout.tensor, layout.pipeline)
    num_groups = sum(size > 1 for size in axes)
    num_groups += num_groups > 1  # that of all ranks beside those of the axes
    categories["communicators"] = num_groups * _COMMUNICATOR_GIB * GIB
    return MemoryEstimate(categories=categories, peak_at=peak_at, context_bytes=_CONTEXT_GIB * GIB)


def _sent_kept(model: ModelSpec, layout: LayoutSpec, workload: WorkloadSpec) -> float:
    """Bytes of what a stage sent on and keeps until its backward.

    torch's stages keep it whole, DeepSpeed's the part that each tensor rank sends, Megatron's
    nothing (`_exec_forward_pass` and `deallocate_output_tensor` in their sources).
    """
    whole = boundary_bytes(model, workload, tensor=layout.tensor)
    kept = {"deepspeed": whole / layout.tensor, "megatron": 0.0}
    return kept.get(workload.software.engine, whole)


def _units(
    model: _Model,
    layout: LayoutSpec,
    param_dtype: str,
    layers: int,
    has_embedding: bool,
    has_head: bool,
) -> tuple[PlannedUnit, ...]:
    return find_units(
        model,
        layout,
        param_dtype,
        layers=layers,
        has_embedding=has_embedding,
        has_head=has_head,
    )


@lru_cache(maxsize=4096)
def _state(
    model: _Model,
    layout: LayoutSpec,
    workload: WorkloadSpec,
    layers: int,
    has_embedding: bool,
    has_head: bool,
) -> StateBytes:
    units = _units(model, layout, workload.precision.param, layers, has_embedding, has_head)
    return state_bytes(units, layout, workload)


def numbered(units: Sequence[PlannedUnit]) -> list[tuple[PlannedUnit, int]]:
    """Units, with the number of blocks before each."""
    found, block = [], 0
    for unit in units:
        found.append((unit, block))
        block += unit.kind == "block"
    return found


def _is_recomputed(workload: WorkloadSpec, unit: PlannedUnit, block: int) -> bool:
    return unit.kind == "block" and is_block_checkpointed(workload, block)


def _of_traced(
    cost: Callable[..., float],
    model: TracedModel,
    workload: WorkloadSpec,
    units: Sequence[PlannedUnit],
) -> list[float]:
    return [
        cost(model, unit.trace, workload, is_checkpointed=_is_recomputed(workload, unit, block))
        for unit, block in numbered(units)
        if unit.trace is not None
    ]


def working_bytes(
    model: _Model, layout: LayoutSpec, workload: WorkloadSpec, units: Sequence[PlannedUnit]
) -> list[float]:
    """Activations alive only in each unit's backward, in bytes, in the order of the units."""
    if isinstance(model, TracedModel):
        return _of_traced(traced_working, model, workload, units)
    block = block_working(model, workload, tensor=layout.tensor)
    return [block if unit.kind in ("block", "model") else 0.0 for unit in units]


def loss_peak_bytes(model: _Model, layout: LayoutSpec, workload: WorkloadSpec) -> float:
    """Bytes of what comes out of the model and of the loss on it, at their peak."""
    if isinstance(model, TracedModel):
        return output_bytes(model, workload)
    return head_bytes(model, workload, tensor=layout.tensor)


def kept_bytes(
    model: _Model, layout: LayoutSpec, workload: WorkloadSpec, units: Sequence[PlannedUnit]
) -> list[float]:
    """Activations each unit keeps for one micro-batch, in bytes, in the order of the units."""
    if isinstance(model, TracedModel):
        return _of_traced(traced_kept, model, workload, units)
    looked_up, head = ends_kept(model, workload, tensor=layout.tensor)
    ends = {"embedding": looked_up, "head": head}
    per_block = {
        checkpointed: block_kept(
            model, workload, tensor=layout.tensor, is_checkpointed=checkpointed
        )
        for checkpointed in (True, False)
    }
    found = []
    block = 0
    for unit in units:
        if unit.kind == "block":
            found.append(per_block[is_block_checkpointed(workload, block)])
            block += 1
        elif unit.kind == "model":
            found.append(model.layers * per_block[True] + looked_up + head)
        else:
            found.append(sum(ends[end] for end in unit.ends))
    return found
