"""Costs of one pipeline stage, unit by unit, and their replay.

`predict` asks for the slowest stage; everything a step's time is made of comes from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from shardwright.core.layout import UnitLayout
from shardwright.core.memory import MemoryPlan
from shardwright.core.policy import Action
from shardwright.planner.cost.block import PassTime, block_time, ends_time
from shardwright.planner.cost.collective import (
    Group,
    all_gather_s,
    all_reduce_s,
    make_group,
    point_to_point_s,
    taken_s,
)
from shardwright.planner.cost.compression import narrow_gather_s, narrow_reduce_s
from shardwright.planner.cost.efficiency import Efficiency
from shardwright.planner.cost.elementwise import engine_copy_bytes, stream_s
from shardwright.planner.cost.optimizer import optimizer_s, step_overhead_s
from shardwright.planner.cost.state import engine_plan
from shardwright.planner.cost.traced import output_time, traced_time
from shardwright.planner.job import Job
from shardwright.planner.memory import (
    is_block_checkpointed,
    kept_bytes,
    loss_peak_bytes,
    numbered,
    working_bytes,
)
from shardwright.planner.model import ModelSpec
from shardwright.planner.schedule import ScheduleUnit, make_schedule
from shardwright.planner.simulate import Timeline, UnitCost, replay
from shardwright.planner.traced import TracedModel
from shardwright.planner.traffic import step_traffic
from shardwright.planner.units import PlannedUnit, find_units

__all__ = ["REPLAYED", "Stage"]

REPLAYED = 3
"""Micro-batches replayed before the steady one is repeated."""

_LANE_OF = {
    "all_gather over shard": "gather",
    "reduce_scatter over shard": "reduce",
    "all_gather over replicate": "replicate",
    "reduce_scatter over replicate": "replicate",
    "all_reduce over replicate": "replicate",
}
"""Lane that each collective of `step_traffic` runs on."""

_COMPRESSED = ("all_gather over shard", "reduce_scatter over shard")
"""Collectives that compression narrows."""

_TENSOR_HIDDEN = 0.75
"""Share of tensor-parallel collectives hidden where they are overlapped with products in pieces."""


class Stage:
    """Costs of the slowest pipeline stage: the last, which has the head, or a fuller one."""

    def __init__(self, job: Job, efficiency: Efficiency) -> None:
        self.job = job
        self.efficiency = efficiency
        layout = job.layout
        self.layers, has_head = _slowest_blocks(job)
        self.units = find_units(
            job.model,
            layout,
            job.workload.precision.param,
            layers=self.layers,
            has_embedding=layout.pipeline == 1,
            has_head=has_head,
        )
        cluster = job.cluster
        stride = layout.tensor
        self.shard_group = make_group(cluster, size=layout.shard_degree, stride=stride)
        inner = layout.shard_degree * stride
        self.replicate_group = make_group(cluster, size=layout.replicas, stride=inner)
        self.tensor_group = make_group(cluster, size=layout.tensor, stride=1)
        self.pipeline_group = make_group(
            cluster, size=layout.pipeline, stride=layout.num_data_ranks * layout.tensor
        )
        self.plan: MemoryPlan = engine_plan(self.units, layout, job.workload)
        self.block_forward_tensor_s, self.block_backward_tensor_s = self._tensor_seconds()
        self.tensor_s = self.layers * (self.block_forward_tensor_s + self.block_backward_tensor_s)

    def replay(self) -> Timeline:
        """Replay a step with at most three micro-batches."""
        workload = self.job.workload
        return replay(
            self.actions(),
            self.costs(),
            links={
                "gather": _link(self.shard_group),
                "reduce": _link(self.shard_group),
                "replicate": _link(self.replicate_group),
            },
            step_s=self.optimizer_s() + step_overhead_s(workload),
            overlaps=workload.software.overlaps,
            overlaps_replicas=workload.software.overlaps_replicas,
        )

    def actions(self) -> tuple[Action, ...]:
        """What the engine does in a step, as far as it is replayed."""
        layout, strategy = self.job.layout, self.job.layout.resolved
        return make_schedule(
            self.schedule_units(),
            gradients=strategy.gradients,
            replicas=layout.replicas,
            optimizer_over_replicas=strategy.optimizer_over_replicas,
            forward_prefetch=layout.forward_prefetch,
            backward_prefetch=layout.backward_prefetch,
            micro_batches=min(self.job.workload.accumulation, REPLAYED),
            backward_prefetch_after=layout.backward_prefetch_at == "post",
            max_in_flight=layout.max_in_flight,
            has_root_head=self.has_root_head,
        )

    @property
    def has_root_head(self) -> bool:
        """Whether the root itself computes what comes out of the stage."""
        model = self.job.model
        if isinstance(model, TracedModel):
            return model.has_root_head
        return "head" in self.units[0].ends

    @cached_property
    def sent_bytes(self) -> Mapping[str, float]:
        """Bytes a rank sends per step, by collective and axis."""
        job = self.job
        found = step_traffic(self.units, self.plan, job.layout, job.workload)
        for name, share in zip(_COMPRESSED, self._wire_shares(), strict=True):
            if name in found:
                found[name] *= share
        return found

    def _wire_shares(self) -> tuple[float, float]:
        """Bytes sent over those not compressed, of gathers and of reductions over shards."""
        precision, compression = self.job.workload.precision, self.job.workload.compression
        param, reduce = precision.item_bytes("param"), precision.item_bytes("reduce")
        return (
            compression.wire_bytes("gather", param) / param,
            compression.wire_bytes("reduce", reduce) / reduce,
        )

    def contention_s(self, hidden_s: Mapping[str, float], busy_s: Mapping[str, float]) -> float:
        """Seconds that hidden collectives take from computation."""
        sent = dict.fromkeys(_LANE_OF.values(), 0.0)
        for name, num_bytes in self.sent_bytes.items():
            sent[_LANE_OF[name]] += num_bytes
        device = self.job.cluster.device
        return sum(
            taken_s(value, sent[lane] * value / busy_s[lane], device)
            for lane, value in hidden_s.items()
        )

    def optimizer_s(self) -> float:
        """Seconds of the optimizer step."""
        owned = sum(unit.trainable_numel for unit in self.units) / self.job.layout.optimizer_degree
        return optimizer_s(owned, self.job.workload, self.job.cluster.device, self.efficiency)

    def parts(self) -> dict[str, float]:
        """Computation of a step by kind, seconds."""
        totals = {"matmul": 0.0, "attention": 0.0, "elementwise": 0.0}
        for unit, block in numbered(self.units):
            times = self._time(unit, block)
            totals["matmul"] += times.matmul_s
            totals["attention"] += times.attention_s
            totals["elementwise"] += times.elementwise_s
        found = {name: value * self.job.workload.accumulation for name, value in totals.items()}
        found["optimizer"] = self.optimizer_s()
        found["overhead"] = step_overhead_s(self.job.workload)
        return found

    def costs(self) -> dict[str, UnitCost]:
        """Costs by unit name."""
        kept = kept_bytes(self.job.model, self.job.layout, self.job.workload, self.units)
        working = self._working_bytes()
        found: dict[str, UnitCost] = {}
        memo: dict[tuple[str, bool], tuple[PassTime, float, float, float, float]] = {}
        for index, (unit, block) in enumerate(numbered(self.units)):
            key = (unit.name, False)
            if unit.kind == "block" and unit.trace is None:
                key = (unit.kind, is_block_checkpointed(self.job.workload, block))
            if key not in memo:
                memo[key] = (self._time(unit, block), *self._collectives(unit))
            times, gather, reduce, replicate, refresh = memo[key]
            tensor = unit.kind == "block"  # and collectives between stages
            copy_forward, copy_backward = self._copies_s(unit)
            found[unit.name] = UnitCost(
                forward_s=times.forward_s
                + copy_forward
                + (self.block_forward_tensor_s if tensor else 0.0),
                backward_s=times.backward_s
                + copy_backward
                + (self.block_backward_tensor_s if tensor else 0.0),
                gather_s=gather,
                reduce_s=reduce,
                replicate_s=replicate,
                refresh_s=refresh,
                slot=self.plan.parameter_slots.slot_of[index],
                gradient_slot=self.plan.gradient_buffers.slot_of[index],
                kept_bytes=kept[index],
                working_bytes=working[index],
            )
        return found

    def _working_bytes(self) -> list[float]:
        """Activations alive only in backward, by unit: the loss's where what comes out is made."""
        job = self.job
        found = working_bytes(job.model, job.layout, job.workload, self.units)
        loss = loss_peak_bytes(job.model, job.layout, job.workload)
        is_traced = isinstance(job.model, TracedModel)
        for index, unit in enumerate(self.units):
            if "head" in unit.ends or (is_traced and unit.kind == "root"):
                found[index] = max(found[index], loss)
        return found

    def _copies_s(self, unit: PlannedUnit) -> tuple[float, float]:
        """Seconds of the engine's copies and casts in forward and backward."""
        forward, backward = engine_copy_bytes(
            unit.numel,
            self.job.workload.software.engine,
            self.job.workload.precision,
            is_sharded=self.job.layout.shard_degree > 1,
        )
        device = self.job.cluster.device
        return (
            stream_s(forward, device, self.efficiency),
            stream_s(backward, device, self.efficiency),
        )

    def schedule_units(self) -> tuple[ScheduleUnit, ...]:
        """Units as the policy sees them."""
        return tuple(
            ScheduleUnit(
                name=unit.name,
                slot=self.plan.parameter_slots.slot_of[index],
                gathered=unit.gathered,
                parent=unit.parent,
                trainable=unit.trainable_numel > 0,
            )
            for index, unit in enumerate(self.units)
        )

    def _time(self, unit: PlannedUnit, block: int) -> PassTime:
        job = self.job
        tensor, device, model = job.layout.tensor, job.cluster.device, job.model
        if isinstance(model, TracedModel):
            return self._traced_time(model, unit, block)
        if unit.kind == "block":
            return block_time(
                model,
                job.workload,
                device,
                self.efficiency,
                tensor=tensor,
                is_checkpointed=is_block_checkpointed(job.workload, block),
            )
        embedding, head = ends_time(model, job.workload, device, self.efficiency, tensor=tensor)
        times = [embedding if end == "embedding" else head for end in unit.ends]
        if unit.kind == "model":
            block_s = block_time(model, job.workload, device, self.efficiency, tensor=tensor)
            times.extend([block_s] * self.layers)
        return _sum(*times)

    def _traced_time(self, model: TracedModel, unit: PlannedUnit, block: int) -> PassTime:
        job = self.job
        assert unit.trace is not None, "units of a traced model carry their trace"
        is_recomputed = unit.kind == "block" and is_block_checkpointed(job.workload, block)
        device = job.cluster.device
        times = traced_time(
            model,
            unit.trace,
            job.workload,
            device,
            self.efficiency,
            is_checkpointed=is_recomputed,
        )
        if unit.kind != "root":
            return times
        return _sum(times, output_time(model, job.workload, device, self.efficiency))

    def _collectives(self, unit: PlannedUnit) -> tuple[float, float, float, float]:
        """Seconds of gather, reduction over shards, over replicas, and refresh over replicas."""
        layout, precision = self.job.layout, self.job.workload.precision
        shards = layout.shard_degree
        if unit.layout is None:
            return 0.0, 0.0, 0.0, 0.0
        gradient_bytes = unit.layout.gradient_numel * precision.item_bytes("reduce")
        gather_share, reduce_share = self._wire_shares()
        narrow_gather, narrow_reduce = self._narrowing_s(unit.layout)
        gather = all_gather_s(unit.layout.gathered_bytes * gather_share, self.shard_group)
        reduce = all_gather_s(gradient_bytes * reduce_share, self.shard_group)
        gather, reduce = gather + narrow_gather, reduce + narrow_reduce
        if layout.resolved.optimizer_over_replicas:
            return (
                gather,
                reduce,
                all_gather_s(gradient_bytes / shards, self.replicate_group),
                all_gather_s(unit.layout.gathered_bytes / shards, self.replicate_group),
            )
        return gather, reduce, all_reduce_s(gradient_bytes / shards, self.replicate_group), 0.0

    def _narrowing_s(self, layout: UnitLayout) -> tuple[float, float]:
        """Seconds of quantisation beside a unit's gather and its reduction."""
        workload, device = self.job.workload, self.job.cluster.device
        precision = workload.precision
        shared = (layout.shard_size, workload.compression, device, self.efficiency)
        return (
            narrow_gather_s(layout.numel, precision.item_bytes("param"), *shared),
            narrow_reduce_s(layout.gradient_numel, precision.item_bytes("reduce"), *shared),
        )

    def _tensor_seconds(self) -> tuple[float, float]:
        """Seconds of a block's collectives over the tensor axis and between stages.

        Two all-reduces forward and two backward (Shoeybi et al., arXiv 1909.08053), or as many
        gathers and reduce-scatters of the same bytes; recomputation repeats forward's.
        """
        layout, workload, model = self.job.layout, self.job.workload, self.job.model
        if isinstance(model, TracedModel):
            return 0.0, 0.0  # data axes only
        stream = (
            workload.tokens_per_micro_batch * model.hidden * workload.precision.item_bytes("param")
        )
        one = all_reduce_s(stream, self.tensor_group)
        if workload.software.overlaps_tensor:
            one *= 1 - _TENSOR_HIDDEN
        again = 2 * one if workload.checkpointing == "full" else 0.0
        # Megatron sends a part from each tensor rank (arXiv 2104.04473, section 4.1).
        divided = 1 if workload.software.engine == "deepspeed" else layout.tensor
        send = point_to_point_s(stream / divided, self.pipeline_group)
        between = send * layout.chunks_per_stage / max(1, self.layers)
        return 2 * one + between, 2 * one + again + between


def _slowest_blocks(job: Job) -> tuple[int, bool]:
    """Blocks of the slowest stage, and whether it has the head."""
    model = job.model
    if not isinstance(model, ModelSpec):
        return model.layers, True
    *others, last = job.layout.stage_blocks(model.layers)
    fullest = max(others, default=0)
    head = model.vocab * model.hidden / model.block_matrix_numel
    has_head = last + head >= fullest
    return (last if has_head else fullest), has_head


def _sum(*times: PassTime) -> PassTime:
    return PassTime(
        forward_s=sum(t.forward_s for t in times),
        backward_s=sum(t.backward_s for t in times),
        matmul_s=sum(t.matmul_s for t in times),
        attention_s=sum(t.attention_s for t in times),
        elementwise_s=sum(t.elementwise_s for t in times),
        recompute_s=sum(t.recompute_s for t in times),
    )


def _link(group: Group) -> str:
    return "outer" if group.spans_nodes else "inner"
