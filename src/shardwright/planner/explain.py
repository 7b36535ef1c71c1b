"""Derive each figure of a plan in five steps: why, picture, small numbers, formula, sanity check.

The parts of an explained figure add up to the figure itself; a test holds that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.planner.job import Job
from shardwright.planner.memory import GIB
from shardwright.planner.predict import Prediction

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One figure.

    Attributes:
        title: What it is.
        total: The figure.
        unit: Its unit.
        parts: What it is made of, in the same unit; they add up to it.
        why: Why one wants to know it.
        picture: How to imagine it.
        small_numbers: The same with numbers one can check by head.
        formula: The formula, and what it tends to.
        sanity: A check against something known.
    """

    title: str
    total: float
    unit: str
    parts: Mapping[str, float]
    why: str
    picture: str
    small_numbers: str
    formula: str
    sanity: str


def explain(prediction: Prediction) -> tuple[Explanation, ...]:
    """Explain memory, traffic and time of a prediction."""
    return (_memory(prediction), _traffic(prediction), _time(prediction))


def _memory(prediction: Prediction) -> Explanation:
    job, memory = prediction.job, prediction.memory
    device = job.cluster.device
    parts = {name: size / GIB for name, size in memory.categories.items()}
    return Explanation(
        title=f"Memory that the fullest rank needs, at its peak ({memory.peak_at})",
        total=memory.needed_gib,
        unit="GiB",
        parts=parts | {"driver and libraries": memory.context_bytes / GIB},
        why="A job that needs one byte more than the device has does not run at all.",
        picture=(
            "A shelf of fixed boxes (masters, moments, shards, slots) that every step reuses, and "
            "a pile of activations that grows through forward and shrinks through backward."
        ),
        small_numbers=(
            "1 parameter trained with Adam: 4 bytes of master, 8 of moments and 4 of gradient; on "
            "4 ranks that share them, 4 bytes each."
        ),
        formula=_optimizer_state(job),
        sanity=(
            f"The device shows {device.memory_gib:.1f} GiB: "
            f"{'it fits' if prediction.fits else 'it does not fit'} with "
            f"{device.memory_gib - memory.needed_gib:+.1f} GiB to spare. The framework's own "
            f"counter shows {memory.peak_gib:.1f} GiB, without the driver and libraries."
        ),
    )


def _optimizer_state(job: Job) -> str:
    """The formula of the moments' bytes."""
    optimizer, numel = job.workload.optimizer, job.model.num_parameters
    if optimizer.is_offloaded:
        return "optimizer state = 0: it lives in host memory."
    each = optimizer.num_moments * job.workload.precision.item_bytes("state")
    ranks = job.layout.optimizer_degree
    return (
        f"optimizer state = {each:g} bytes x {numel:,} / {ranks} ranks = "
        f"{each * numel / ranks / GIB:.2f} GiB before padding and the tensor axis; it tends to 0 "
        "as ranks grow, and then slots and activations remain."
    )


def _traffic(prediction: Prediction) -> Explanation:
    job = prediction.job
    layout = job.layout
    shards = layout.shard_degree
    sent_gb = {name: value / 1e9 for name, value in prediction.sent_bytes.items()}
    over_shard = sum(value for name, value in sent_gb.items() if name.endswith(" over shard"))
    group = prediction.stage.shard_group
    floor_s = over_shard / group.gbps if shards > 1 else 0.0
    share = (shards - 1) / shards
    return Explanation(
        title="Bytes a rank sends per step",
        total=sum(sent_gb.values()),
        unit="GB",
        parts=sent_gb,
        why="Links are shared and slow beside memory; what can't hide behind computation is waited "
        "for.",
        picture=(
            "Ranks in a ring pass pieces on: to gather a whole, each sends all pieces but the one "
            "its neighbour began with."
        ),
        small_numbers=(
            "4 MB over 4 ranks: each holds 1 MB and sends 3 MB to gather it, 3 MB more to reduce "
            "it again."
        ),
        formula=(
            f"one gather = p x elements x (S - 1) / S, here (S - 1) / S = {share:.3f}; it tends to "
            f"p x elements, whatever the number of ranks. {layout.resolved.summary}."
        ),
        sanity=(
            f"The {over_shard:.1f} GB over the shard axis take at least {floor_s:.2f} s at "
            f"{group.gbps:.0f} GB/s, of a step of {prediction.step_s:.2f} s."
        ),
    )


def _time(prediction: Prediction) -> Explanation:
    job = prediction.job
    parts = dict(prediction.parts_s)
    for cause, value in prediction.exposed_s.items():
        parts[f"waiting for {cause}"] = value
    parts["pipeline bubble"] = prediction.bubble_s
    parts["waiting for the slowest rank"] = prediction.slowest_s
    # Launches, copies and contention are what computation takes beyond its kinds.
    parts["copies, launches and contention"] = prediction.step_s - sum(parts.values())
    tokens = job.workload.tokens_per_rank * job.layout.num_data_ranks / job.layout.world_size
    flops = job.model.flops_per_token(job.workload.seq_len)
    peak = job.cluster.device.peak_flops("bf16")
    return Explanation(
        title="Time of a step",
        total=prediction.step_s,
        unit="s",
        parts=parts,
        why="It says what a run costs; the largest part says what to change.",
        picture=(
            "Lanes side by side: computation on one, gathers and reductions on others. A step is "
            "as long as the compute lane, its waits included."
        ),
        small_numbers=(
            "A product of 4096 x 4096 x 4096 is 137 GFLOP: 0.5 ms at 275 TFLOP/s. Reading its "
            "three matrices takes 0.05 ms at 2 TB/s, so products decide, not memory."
        ),
        formula=(
            f"{tokens:,.0f} tokens per device x {flops / 1e9:.1f} GFLOP per token / "
            f"{peak / 1e12:.0f} TFLOP/s = {tokens * flops / peak:.2f} s at the peak: no layout can "
            "be faster."
        ),
        sanity=f"So the model FLOP utilisation is {prediction.mfu:.1%}; "
        "30 to 55 % is usual for dense decoders in 16 bits.",
    )
