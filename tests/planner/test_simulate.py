"""Schedules come from the engine's policy; replays overlap what can overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.policy import Op
from shardwright.core.strategy import STRATEGIES, Gathered, Gradients
from shardwright.planner.cluster import make_cluster
from shardwright.planner.predict import predict
from shardwright.planner.schedule import ScheduleUnit, make_schedule
from shardwright.planner.simulate import UnitCost, replay
from tests.planner.jobs import TINY, job

LINKS = {"gather": "inner", "reduce": "inner", "replicate": "outer"}


def units(gathered: Gathered, num_blocks: int = 4, slots: int = 2) -> tuple[ScheduleUnit, ...]:
    root = ScheduleUnit(name="root", slot=99, gathered=gathered)
    blocks = [
        ScheduleUnit(
            name=f"b{i}",
            slot=i % slots if gathered is Gathered.USE else i,
            gathered=gathered,
        )
        for i in range(num_blocks)
    ]
    return (root, *blocks)


def schedule(strategy: str, *, micro_batches: int = 1, replicas: int = 1, **changes):
    row = STRATEGIES[strategy]
    return make_schedule(
        changes.pop("units", units(row.gathered)),
        gradients=row.gradients,
        replicas=replicas,
        optimizer_over_replicas=row.optimizer_over_replicas,
        forward_prefetch=1,
        backward_prefetch=1,
        micro_batches=micro_batches,
        **changes,
    )


def count(actions, op: Op, axis: str = "shard") -> int:
    return sum(a.op is op and a.axis == axis and a.unit != "root" for a in actions)


def cost(**changes) -> UnitCost:
    settings = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "gather_s": 0.0,
        "reduce_s": 0.0,
        "replicate_s": 0.0,
        "refresh_s": 0.0,
        "slot": 0,
        "gradient_slot": 0,
        "kept_bytes": 10.0,
        "working_bytes": 3.0,
    }
    return UnitCost(**{**settings, **changes})


def run(strategy: str = "zero3", *, micro_batches: int = 1, step_s: float = 0.0, **changes):
    actions = schedule(strategy, micro_batches=micro_batches)
    costs = {f"b{i}": cost(slot=i % 2, gradient_slot=i % 2, **changes) for i in range(4)}
    costs["root"] = cost(forward_s=0.0, backward_s=0.0, kept_bytes=0.0, working_bytes=0.0, slot=99)
    return replay(actions, costs, links=LINKS, step_s=step_s)


@pytest.mark.parametrize(
    ("strategy", "gathers", "reductions"),
    [("zero1", 4, 4), ("zero2", 12, 12), ("zero3", 18, 12)],
)
def test_three_micro_batches_gather_and_reduce_as_the_strategy_says(strategy, gathers, reductions):
    """zero3 gathers twice, less the two blocks still in their slots when backward begins."""
    actions = schedule(strategy, micro_batches=3)
    assert count(actions, Op.UNSHARD) == gathers
    assert count(actions, Op.REDUCE) == reductions


def test_replicas_reduce_once_per_step_whatever_the_micro_batches():
    actions = schedule("hybrid", micro_batches=4, replicas=2)
    assert count(actions, Op.REPLICATE, "replicate") == 4


def test_a_step_ends_with_the_optimizer():
    assert schedule("zero3")[-1].op is Op.STEP


def test_without_communication_a_step_is_its_computation():
    timeline = run(step_s=0.5)
    assert timeline.end_s == pytest.approx(4 * 3 + 0.5)
    assert sum(timeline.exposed_s.values()) == 0


def test_gathers_shorter_than_computation_hide_behind_it_but_for_the_first():
    timeline = run(gather_s=0.4)
    assert timeline.exposed_s["gather"] == pytest.approx(0.4)
    assert timeline.busy_s["gather"] == pytest.approx(6 * 0.4)


def test_gathers_longer_than_computation_are_waited_for():
    """Four gathers one after another; only the last block's computation lies behind them."""
    timeline = run(gather_s=3.0)
    assert timeline.exposed_s["gather"] > 3.0 * 4 - 4
    assert timeline.end_s > timeline.compute_s + 3.0 * 4 - 4


def test_the_last_reduction_is_exposed():
    timeline = run(reduce_s=0.5)
    assert timeline.exposed_s["reduce"] == pytest.approx(0.5)


def test_collectives_on_one_link_take_turns():
    alone = run(gather_s=1.5)
    both = run(gather_s=1.5, reduce_s=1.5)
    assert both.end_s > alone.end_s + 1.0


def test_without_overlap_everything_is_waited_for():
    actions = schedule("zero3")
    costs = {f"b{i}": cost(gather_s=0.25, reduce_s=0.5, slot=i % 2) for i in range(4)}
    costs["root"] = cost(forward_s=0, backward_s=0)
    timeline = replay(actions, costs, links=LINKS, step_s=0.0, overlaps=False)
    assert timeline.end_s == pytest.approx(12 + 6 * 0.25 + 4 * 0.5)


def test_activations_grow_through_forward_and_are_gone_after_backward():
    timeline = run()
    held = [size for _, size in timeline.activation_bytes]
    assert max(held) == 4 * 10 + 3
    assert held[-1] == 0


def test_a_backward_without_a_reduction_takes_its_time_too():
    """Whole gradients are reduced after the last micro-batch only."""
    assert run("zero1", micro_batches=3).end_s == pytest.approx(3 * 4 * 3)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_long_accumulations_follow_from_three_micro_batches(strategy):
    """Ten micro-batches take as long as their replay would."""
    base = job(strategy=strategy, accumulation=3)
    three = predict(base).step_s
    four, ten = (
        predict(replace(base, workload=replace(base.workload, accumulation=n))).step_s
        for n in (4, 10)
    )
    assert (ten - three) == pytest.approx(7 * (four - three), rel=1e-6)


def test_the_policy_s_gathers_are_those_of_the_closed_form():
    """Bytes from actions equal `core.volume`'s, unit by unit."""
    predicted = predict(job(strategy="zero3", accumulation=3))
    stage = predicted.stage
    row = STRATEGIES["zero3"]
    actions = make_schedule(
        stage.schedule_units(),
        gradients=row.gradients,
        replicas=1,
        optimizer_over_replicas=False,
        forward_prefetch=1,
        backward_prefetch=1,
        micro_batches=3,
    )
    shard_bytes = {unit.name: unit.layout.shard_bytes for unit in stage.units}
    sent = sum(7 * shard_bytes[a.unit] for a in actions if a.op is Op.UNSHARD)
    assert predicted.sent_bytes["all_gather over shard"] == sent


def test_a_pipeline_s_bubble_is_p_minus_1_micro_batches_over_the_chunks():
    """Narayanan et al., arXiv 2104.04473, section 2.2: (p - 1) / (m v) of the ideal time."""
    shape = replace(TINY, layers=8)
    flat = predict(job(shape, strategy="zero1", pipeline=4, accumulation=16))
    chunks = predict(
        job(
            shape,
            strategy="zero1",
            pipeline=4,
            accumulation=16,
            layout={"chunks_per_stage": 2},
        )
    )
    assert flat.bubble_s > 0
    assert chunks.bubble_s == pytest.approx(flat.bubble_s / 2, rel=0.05)


def test_gradients_whole_reduce_once_per_step():
    assert STRATEGIES["zero1"].gradients is Gradients.WHOLE
    once = predict(job(strategy="zero1", accumulation=1)).sent_bytes
    often = predict(job(strategy="zero1", accumulation=8)).sent_bytes
    assert once == often


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3.2-1b", "gpt2-xl"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_replay_s_peak_is_the_estimate_s(model, checkpointing):
    """Where the optimizer's step isn't the peak."""
    predicted = predict(
        job(model, seq_len=1024, micro_batch=8, checkpointing=checkpointing, accumulation=2)
    )
    if predicted.memory.peak_at != "optimizer step":
        peak = max(size for _, size in predicted.memory_over_time)
        assert peak == pytest.approx(predicted.memory.peak_bytes, rel=0.005)
    held = [size for _, size in predicted.timeline.activation_bytes]
    assert held[-1] == pytest.approx(0, abs=1)


def test_tied_matrices_are_the_root_s():
    tied = predict(job("llama-3.2-1b", seq_len=1024)).stage.units
    assert [unit.name for unit in tied[:2]] == ["(root)", "layers.0"]
    assert tied[0].ends == ("embedding", "head")
    untied = predict(job("llama-3-8b", seq_len=1024)).stage.units
    assert [untied[0].ends, untied[1].ends, untied[-1].ends] == [(), ("embedding",), ("head",)]


# --- slower links -----------------------------------------------------------------------------

NETWORKS = {"v100-32": "8x100g-ib", "a100-80": "8x200g-ib", "h100": "8x400g-ib"}
MESHES = [(name, 1) for name in ("ddp", "zero1", "zero2", "zero3")]
MESHES += [("hybrid", 2), ("hybrid", 4), ("hybrid_zero2", 2), ("hybrid_full_optimizer", 4)]


def spread_step_s(device, ranks, per_node, mesh, *, factor=1.0, micro_batch=4):
    """A step of equal work per device, with a network card for each device of a node."""
    strategy, replicate = mesh
    made = job(
        "gpt2-xl",
        device=device,
        devices=ranks,
        strategy=strategy,
        replicate=replicate,
        seq_len=1024,
        micro_batch=micro_batch,
    )
    cluster = make_cluster(device, ranks, devices_per_node=per_node, network=NETWORKS[device])
    cluster = replace(cluster, num_nics=per_node).with_network(factor=factor)
    return predict(replace(made, cluster=cluster)).step_s


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("device", list(NETWORKS))
@pytest.mark.parametrize("micro_batch", [1, 4, 16])
def test_the_same_ranks_spread_over_more_nodes_are_never_faster(device, mesh, micro_batch):
    for ranks in (8, 16, 64):
        steps = [
            spread_step_s(device, ranks, per_node, mesh, micro_batch=micro_batch)
            for per_node in (8, 4, 2, 1)
        ]
        assert steps == sorted(steps), f"{ranks} ranks"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("device", list(NETWORKS))
def test_a_slower_network_is_never_faster(device, mesh):
    steps = [
        spread_step_s(device, 64, 8, mesh, factor=factor) for factor in (4.0, 2.0, 1.0, 0.5, 0.1)
    ]
    assert steps == sorted(steps)


@pytest.mark.parametrize("device", list(NETWORKS))
@pytest.mark.parametrize("micro_batch", [1, 4, 16])
def test_gathers_inside_nodes_cost_no_more_than_the_same_between_them(device, micro_batch):
    """Where the optimizer is divided as far, hybrid's shorter gathers are never a loss."""
    zero3 = spread_step_s(device, 64, 8, ("zero3", 1), micro_batch=micro_batch)
    hybrid = spread_step_s(device, 64, 8, ("hybrid_full_optimizer", 8), micro_batch=micro_batch)
    assert hybrid <= 1.005 * zero3
