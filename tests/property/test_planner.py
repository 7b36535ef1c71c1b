"""What must hold of every plan, whatever the model, cluster and layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.strategy import STRATEGIES
from shardwright.planner.cluster import make_cluster
from shardwright.planner.cost.collective import all_gather_s, all_reduce_s, make_group
from shardwright.planner.cost.matmul import matmul_s
from shardwright.planner.cost.state import paper_state_bytes
from shardwright.planner.device import DEVICES
from shardwright.planner.explain import explain
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.memory import estimate_memory
from shardwright.planner.model import ModelSpec
from shardwright.planner.predict import predict
from shardwright.planner.workload import PrecisionSpec, SoftwareSpec, WorkloadSpec

NAMES = sorted(STRATEGIES)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    heads = draw(st.sampled_from([2, 4, 8]))
    return ModelSpec(
        name="drawn",
        layers=draw(st.integers(2, 6)),
        hidden=heads * draw(st.sampled_from([16, 32, 64])),
        heads=heads,
        kv_heads=draw(st.sampled_from([1, 2])),
        ffn_hidden=draw(st.sampled_from([128, 384, 1000])),
        vocab=draw(st.sampled_from([100, 1000, 32_000])),
        gated=draw(st.booleans()),
        tied=draw(st.booleans()),
        norms_per_block=draw(st.sampled_from([2, 4])),
    )


@st.composite
def jobs(draw: st.DrawFn, strategies: list[str] = NAMES) -> Job:
    replicate, shard = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 8]))
    workload = WorkloadSpec(
        seq_len=draw(st.sampled_from([16, 128, 1024])),
        micro_batch=draw(st.integers(1, 4)),
        accumulation=draw(st.integers(1, 5)),
        checkpointing=draw(
            st.sampled_from(["none", "selective", "half_products", "alternate", "full"])
        ),
        precision=PrecisionSpec(reduce=draw(st.sampled_from(["fp32", "bf16"]))),
        software=SoftwareSpec(
            class_name=draw(st.sampled_from(["eager", "compiled", "fused"])),
            attention=draw(st.sampled_from(["eager", "flash1", "flash2"])),
            loss=draw(st.sampled_from(["shifted", "full", "narrow", "fused_softmax", "chunked"])),
        ),
    )
    return Job(
        model=draw(models()),
        cluster=make_cluster(
            draw(st.sampled_from(["a100-80", "h100-80", "v100-32"])), replicate * shard
        ),
        workload=workload,
        layout=LayoutSpec(
            strategy=draw(st.sampled_from(strategies)), replicate=replicate, shard=shard
        ),
    )


@given(jobs())
def test_times_are_positive_and_their_parts_add_up(job: Job) -> None:
    predicted = predict(job)
    assert predicted.step_s > 0
    assert 0 < predicted.mfu < 1
    for item in explain(predicted):
        assert sum(item.parts.values()) == pytest.approx(item.total)


@given(jobs())
def test_a_step_is_never_shorter_than_its_computation_or_its_longest_lane(job: Job) -> None:
    predicted = predict(job)
    assert predicted.step_s >= predicted.compute_s * (1 - 1e-9)
    assert predicted.step_s >= max(predicted.busy_s.values(), default=0.0) * (1 - 1e-9)


@given(jobs())
def test_the_peak_is_never_below_the_shards(job: Job) -> None:
    memory = estimate_memory(job.model, job.layout, job.workload)
    owned = job.model.num_parameters / job.layout.optimizer_degree
    assert memory.peak_bytes >= 12 * owned  # a master and two moments
    assert memory.peak_bytes >= 2 * job.model.num_parameters / job.layout.shard_degree


@given(jobs(["zero1", "zero2", "zero3"]))
def test_memory_falls_with_the_shard_degree_up_to_padding(job: Job) -> None:
    one = replace(job.layout, replicate=1)
    more = replace(one, shard=4 * one.shard)
    held = [
        sum(
            size
            for name, size in estimate_memory(job.model, layout, job.workload).categories.items()
            if name not in ("communicators", "allocator")
        )
        for layout in (one, more)
    ]
    padding = 64 * 4 * 4 * one.shard * job.model.hidden * (job.model.layers + 3)
    assert held[1] <= held[0] + padding


@given(jobs(["hybrid"]))
def test_hybrid_with_one_replica_equals_zero3(job: Job) -> None:
    cluster = make_cluster(job.cluster.device, job.layout.shard)
    hybrid = replace(job, cluster=cluster, layout=replace(job.layout, replicate=1))
    zero3 = replace(hybrid, layout=replace(hybrid.layout, strategy="zero3"))
    assert predict(hybrid).step_s == predict(zero3).step_s
    assert predict(hybrid).sent_bytes == predict(zero3).sent_bytes
    assert predict(hybrid).memory.categories == predict(zero3).memory.categories


@given(jobs())
def test_a_faster_network_never_makes_a_step_longer(job: Job) -> None:
    faster = replace(job, cluster=job.cluster.with_network(factor=3.0))
    assert predict(faster).step_s <= predict(job).step_s * (1 + 1e-9)


@given(jobs())
def test_more_recomputation_keeps_no_more_and_takes_no_less(job: Job) -> None:
    none, full = (
        replace(job, workload=replace(job.workload, checkpointing=kind))
        for kind in ("none", "full")
    )
    assert predict(full).step_s >= predict(none).step_s * (1 - 1e-9)
    instants = [estimate_memory(j.model, j.layout, j.workload) for j in (none, full)]
    kept = [estimate.categories.get("activations", 0.0) for estimate in instants]
    if all("activations" in estimate.categories for estimate in instants):
        assert kept[1] <= kept[0]


@given(
    num_bytes=st.floats(1, 1e12),
    size=st.sampled_from([2, 4, 8, 16, 64]),
    factor=st.floats(1.01, 50),
)
def test_a_single_transfer_s_time_falls_with_bandwidth(
    num_bytes: float, size: int, factor: float
) -> None:
    cluster = make_cluster("a100-80", 64)
    inner = replace(
        cluster.inner, kind="other", bandwidth_gbps=cluster.inner.bandwidth_gbps * factor
    )
    fast = replace(cluster.with_network(factor=factor), inner=inner)
    for cost in (all_gather_s, all_reduce_s):
        slow_s = cost(num_bytes, make_group(cluster, size=size, stride=1))
        assert cost(num_bytes, make_group(fast, size=size, stride=1)) < slow_s


@given(
    size=st.sampled_from([2, 8, 64]),
    small=st.floats(1, 1e9),
    factor=st.floats(1.0, 100.0),
)
def test_more_bytes_never_take_less_time(size: int, small: float, factor: float) -> None:
    group = make_group(make_cluster("h100", 64), size=size, stride=1)
    assert all_gather_s(small * factor, group) >= all_gather_s(small, group) * (1 - 1e-9)


@given(
    m=st.integers(1, 5000),
    k=st.integers(1, 5000),
    n=st.integers(1, 5000),
    device=st.sampled_from(sorted(DEVICES)),
)
def test_no_product_is_faster_than_its_roofline(m: int, k: int, n: int, device: str) -> None:
    spec = DEVICES[device]
    seconds = matmul_s(m, k, n, spec)
    assert seconds >= 2 * m * k * n / spec.peak_flops("bf16")
    assert seconds >= 2 * (m * k + k * n + m * n) / (spec.memory_gbps * 1e9)


@given(elements=st.floats(1e6, 1e12), ranks=st.integers(1, 4096), stage=st.sampled_from([0, 1, 2]))
def test_each_stage_holds_no_more_than_the_one_before(
    elements: float, ranks: int, stage: int
) -> None:
    assert paper_state_bytes(elements, stage=stage + 1, ranks=ranks) <= paper_state_bytes(
        elements, stage=stage, ranks=ranks
    )
