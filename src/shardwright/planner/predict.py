"""Join the formulas: what one step of a job takes, holds and sends.

`predict` lays the model's units out, asks the policy for the actions of a step, replays them with
each unit's costs, and adds what a pipeline adds. Long accumulations repeat their steady
micro-batch: three are replayed, the rest follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.planner.cost.efficiency import GENERIC, Efficiency, load_efficiencies
from shardwright.planner.job import Job
from shardwright.planner.memory import MemoryEstimate, estimate_memory
from shardwright.planner.simulate import Mark, Timeline
from shardwright.planner.stage import REPLAYED, Stage
from shardwright.planner.traced import TracedModel
from shardwright.planner.traffic import model_parallel_traffic

__all__ = ["Prediction", "predict"]

_RANK_SPREAD = 0.018
"""Standard deviation of equal devices' speeds, as a share: synchronous steps wait for the slowest
(Sinha et al., "Not All GPUs Are Created Equal", SC 2022, report spreads of several percent)."""

_FEW_TOKENS = 2000
_WEAK_EXPOSURE = 0.20
_MUCH_PADDING = 0.25


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one step of a job costs.

    Attributes:
        job: The job.
        step_s: Time of a step.
        compute_s: Time a rank computes, the optimizer's included.
        exposed_s: Time a rank waits, by cause.
        busy_s: Time collectives take, hidden or not, by kind.
        bubble_s: Time lost to filling and draining the pipeline.
        slowest_s: Time the average rank waits for the slowest.
        parts_s: Computation by kind: matmul, attention, elementwise, optimizer, overhead.
        efficiency: Factors used.
        warnings: Why the figures may be weak.
        timeline: The replay of up to three micro-batches.
        stage: Costs the replay used.
    """

    job: Job
    step_s: float
    compute_s: float
    exposed_s: Mapping[str, float]
    busy_s: Mapping[str, float]
    bubble_s: float
    slowest_s: float
    parts_s: Mapping[str, float]
    efficiency: Efficiency
    warnings: tuple[str, ...]
    timeline: Timeline = field(repr=False)
    stage: Stage = field(repr=False)

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The fullest rank's memory."""
        return estimate_memory(self.job.model, self.job.layout, self.job.workload)

    @property
    def memory_over_time(self) -> list[tuple[float, float]]:
        """``(seconds, bytes)`` of a rank of our engine, over the replayed micro-batches.

        Everything but activations is allocated once, before the first step.
        """
        fixed = sum(
            size
            for name, size in self.memory.categories.items()
            if name not in ("activations", "logits_and_loss", "working_activations")
        )
        return [(at, fixed + held) for at, held in self.timeline.activation_bytes]

    @cached_property
    def sent_bytes(self) -> Mapping[str, float]:
        """Bytes a rank of the slowest stage sends, by collective and axis."""
        stage = self.stage
        return {**stage.sent_bytes, **model_parallel_traffic(self.job, stage.units)}

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second and device."""
        job = self.job
        tokens = job.workload.tokens_per_rank * job.layout.num_data_ranks
        return tokens / self.step_s / job.layout.world_size

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: causal attention, no recomputation, of the dense 16-bit peak."""
        flops = self.job.model.flops_per_token(self.job.workload.seq_len)
        return flops * self.tokens_per_s_per_device / self.job.cluster.device.peak_flops("bf16")

    @property
    def exposed_share(self) -> float:
        """Share of the step spent waiting for collectives."""
        return sum(self.exposed_s.values()) / self.step_s

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits the device."""
        return self.memory.needed_gib <= self.job.cluster.device.memory_gib

    @property
    def limit(self) -> str:
        """What takes most of the step, in words."""
        causes = {**self.parts_s, **{f"waiting for {k}": v for k, v in self.exposed_s.items()}}
        causes["pipeline bubble"] = self.bubble_s
        return max(causes, key=lambda name: causes[name])


def predict(
    job: Job, *, efficiencies: Mapping[tuple[str, str], Efficiency] | None = None
) -> Prediction:
    """Predict a step.

    Args:
        job: What to predict.
        efficiencies: Factors by device family and software class; None takes the fitted ones.
    """
    known = load_efficiencies() if efficiencies is None else efficiencies
    software = job.workload.software
    key = (job.cluster.device.family, software.class_name)
    efficiency = known.get(key, GENERIC)
    stage = Stage(job, efficiency)
    timeline = stage.replay()
    steady = _steady(timeline)
    rest = max(0, job.workload.accumulation - REPLAYED)
    busy = _extended(timeline.busy_s, steady.busy_s, rest)
    exposed = _extended(timeline.exposed_s, steady.exposed_s, rest)
    hidden = {lane: max(0.0, busy[lane] - exposed.get(lane, 0.0)) for lane in busy}
    contention = stage.contention_s(hidden, busy) if software.overlaps else 0.0
    bubble = (job.layout.pipeline - 1) / job.layout.chunks_per_stage * steady.end_s
    step = timeline.end_s + rest * steady.end_s + bubble + contention
    waiting = _slowest_share(job.layout.world_size) * step
    step += waiting
    if stage.tensor_s:
        exposed["tensor"] = stage.tensor_s * job.workload.accumulation
    return Prediction(
        job=job,
        step_s=step,
        compute_s=timeline.compute_s + rest * steady.compute_s + contention,
        exposed_s=exposed,
        busy_s=busy,
        bubble_s=bubble,
        slowest_s=waiting,
        parts_s=stage.parts(),
        efficiency=efficiency,
        warnings=(
            *_warnings(job, sum(exposed.values()) / step, known.get(key)),
            *_padding_warnings(stage),
        ),
        timeline=timeline,
        stage=stage,
    )


def _slowest_share(num_ranks: int) -> float:
    """How much later than the average the slowest of many ranks is, as a share of its time.

    The expected largest of n normal deviates is about sqrt(2 ln n) standard deviations.
    """
    return _RANK_SPREAD * math.sqrt(2 * math.log(num_ranks))


def _steady(timeline: Timeline) -> Mark:
    """What one micro-batch in the middle of a step takes: the second, or the only one."""
    marks = timeline.marks
    if len(marks) < REPLAYED:
        return marks[0]
    first, second = marks[0], marks[1]
    return Mark(
        end_s=second.end_s - first.end_s,
        compute_s=second.compute_s - first.compute_s,
        busy_s={lane: second.busy_s[lane] - first.busy_s[lane] for lane in first.busy_s},
        exposed_s={lane: second.exposed_s[lane] - first.exposed_s[lane] for lane in first.busy_s},
    )


def _extended(
    replayed: Mapping[str, float], steady: Mapping[str, float], rest: int
) -> dict[str, float]:
    """Totals with the micro-batches that were not replayed; lanes that never worked left out."""
    totals = {lane: replayed[lane] + rest * steady[lane] for lane in replayed}
    return {lane: total for lane, total in totals.items() if total > 0}


def _warnings(job: Job, exposed_share: float, fitted: Efficiency | None) -> tuple[str, ...]:
    found = [fitted.doubt] if fitted is not None and fitted.doubt else []
    if exposed_share > _WEAK_EXPOSURE:
        found.append(
            f"{exposed_share:.0%} of the step waits for collectives: errors are about three times "
            "as large there"
        )
    if job.workload.tokens_per_micro_batch < _FEW_TOKENS:
        found.append(
            f"{job.workload.tokens_per_micro_batch} tokens per micro-batch: small products and "
            "kernel launches are modelled coarsely"
        )
    if job.cluster.is_network_assumed:
        found.append(
            f"the network is assumed: {job.cluster.num_nics} cards of "
            f"{job.cluster.outer.bandwidth_gbps:g} GB/s per node"
        )
    if fitted is None:
        found.append(
            f"no measurements behind {job.cluster.device.family} with "
            f"{job.workload.software.class_name} software: vendor's figures and generic "
            "efficiencies"
        )
    if isinstance(job.model, TracedModel):
        found.extend(job.model.assumptions)
    return tuple(found)


def _padding_warnings(stage: Stage) -> Iterator[str]:
    """Name padding that makes shards much larger than their parameters."""
    layouts = [unit.layout for unit in stage.units if unit.layout is not None]
    share = sum(layout.padding_numel for layout in layouts) / sum(
        layout.used_numel for layout in layouts
    )
    if share > _MUCH_PADDING:
        mesh = stage.job.layout
        yield (
            f"padding adds {share:.0%} to the parameters, in memory and in what is sent: parts of "
            f"whole rows for {mesh.shard_degree} shard ranks, each divisible over {mesh.replicas} "
            "replicas, are larger than they are; take fewer data ranks"
        )
