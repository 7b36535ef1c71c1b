"""Memory: our engine's own formula, other engines' closed forms, and what the peak is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.memory import plan_memory
from shardwright.core.strategy import STRATEGIES
from shardwright.planner.cost.activation import head_bytes
from shardwright.planner.memory import GIB, estimate_memory, micro_batches_in_flight
from shardwright.planner.units import find_units
from shardwright.planner.workload import OptimizerSpec, PrecisionSpec, SoftwareSpec
from tests.planner.jobs import TINY, job


def memory(**settings):
    made = job(**settings)
    return estimate_memory(made.model, made.layout, made.workload)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_engine_categories_are_the_engine_s_own_plan(strategy):
    made = job(strategy=strategy, replicate=2)
    units = find_units(made.model, made.layout, "bf16", layers=made.model.layers)
    plan = plan_memory(
        [unit.needs(made.workload.precision) for unit in units],
        gradients=made.layout.resolved.gradients,
        replicas=made.layout.replicas,
        gather_distance=1,
        reduce_distance=1,
        needs_staging=False,
    )
    categories = memory(strategy=strategy, replicate=2).categories
    for name, size in plan.bytes_by_category.items():
        assert categories.get(name, 0) == size, name


def test_categories_add_up_to_the_peak():
    estimate = memory(model="llama-2-7b", seq_len=2048)
    assert sum(estimate.categories.values()) == estimate.peak_bytes
    assert estimate.peak_gib == estimate.peak_bytes / GIB


def test_optimizer_state_is_8_bytes_per_owned_element():
    made = job()
    owned = sum(unit.numel for unit in find_units(made.model, made.layout, "bf16", layers=4)) / 8
    assert memory().categories["optimizer_state"] == 8 * owned


def test_narrow_moments_halve_the_optimizer_state():
    wide = memory(precision=PrecisionSpec()).categories["optimizer_state"]
    narrow = memory(precision=PrecisionSpec(state="bf16")).categories["optimizer_state"]
    assert narrow == wide / 2


def test_lists_of_denominators_are_counted_at_the_optimizer_step():
    def step(implementation):
        return memory(
            devices=1, strategy="ddp", optimizer=OptimizerSpec(implementation=implementation)
        )

    fused, foreach = step("fused"), step("foreach")
    assert foreach.peak_at == "optimizer step"
    assert foreach.categories["optimizer_transient"] > 0
    assert "optimizer_transient" not in fused.categories


def test_a_chunked_loss_never_holds_logits():
    made = job("llama-3-8b", seq_len=8192, micro_batch=4)
    held = {}
    for loss in ("shifted", "full", "narrow", "fused_softmax", "chunked"):
        workload = replace(made.workload, software=SoftwareSpec(loss=loss))
        held[loss] = head_bytes(made.model, workload)
    assert list(held.values()) == sorted(held.values(), reverse=True)
    assert held["chunked"] < 0.5 * held["fused_softmax"]
    stream = 2 * 2 * 4096
    per_logit = (held["shifted"] / (4 * 8192) - stream) / 128_256
    assert per_logit == pytest.approx(20)


@pytest.mark.parametrize("kind", ["selective", "half_products", "full"])
def test_recomputation_keeps_less(kind):
    def kept(checkpointing):
        estimate = memory(
            model="llama-2-7b",
            seq_len=4096,
            checkpointing=checkpointing,
            micro_batch=4,
            optimizer=OptimizerSpec(implementation="fused"),
        )
        return estimate.categories["activations"]

    assert kept(kind) < kept("none")


def test_every_second_block_keeps_about_half():
    def kept(checkpointing):
        estimate = memory(
            model="llama-2-7b",
            seq_len=4096,
            checkpointing=checkpointing,
            micro_batch=4,
            optimizer=OptimizerSpec(implementation="fused"),
        )
        return estimate.categories["activations"]

    assert kept("alternate") == pytest.approx((kept("none") + kept("full")) / 2)


def test_one_unit_gathers_the_whole_model():
    whole = memory(layout={"wraps_blocks": False}).categories["parameter_slots"]
    blocks = memory().categories["parameter_slots"]
    assert whole >= 2 * TINY.num_parameters
    assert whole > blocks


def test_resident_blocks_have_slots_of_their_own():
    block_bytes = 2 * TINY.block_numel
    none = memory().categories["parameter_slots"]
    two = memory(layout={"resident_units": 2}).categories["parameter_slots"]
    assert two - none == pytest.approx(2 * block_bytes, rel=0.05)


def test_deepspeed_s_start_holds_parameters_twice():
    estimate = memory(
        model="llama-2-7b",
        strategy="zero2",
        seq_len=16,
        micro_batch=1,
        software=SoftwareSpec(engine="deepspeed"),
        optimizer=OptimizerSpec(is_offloaded=True),
    )
    assert estimate.peak_at == "initialisation"
    assert estimate.categories["parameter_slots"] == pytest.approx(4 * 6_738_415_616, rel=0.005)


def test_offloaded_optimizers_leave_the_device():
    offloaded = memory(optimizer=OptimizerSpec(is_offloaded=True))
    assert "optimizer_state" not in offloaded.categories


def pipelined(**settings):
    """Activations of the fullest stage, the optimizer's temporaries out of the way."""
    made = {"strategy": "zero1", "pipeline": 4, "accumulation": 8, "checkpointing": "full"}
    made["optimizer"] = OptimizerSpec(implementation="fused")
    return memory(**{**made, **settings}).categories["activations"]


BOUNDARY = 2 * 128 * 256 * 2
"""Bytes between blocks of the tiny model, for its micro-batch."""


def test_the_first_stage_holds_its_pipeline_s_activations():
    shape = replace(TINY, layers=8)
    one = memory(model=shape, strategy="zero1", checkpointing="full", accumulation=8)
    # Inputs of 8 blocks, of the last norm and of the projection.
    assert one.categories["activations"] == (8 + 2) * BOUNDARY
    # Two blocks' inputs, the first of which is what was looked up, and what was sent on.
    assert pipelined(model=shape) == 4 * (2 + 1) * BOUNDARY
    # Megatron lets go of what was sent on, DeepSpeed keeps the part that a tensor rank sends.
    for engine, sent in (("megatron", 0), ("deepspeed", 0.5)):
        made = pipelined(model=shape, tensor=2, software=SoftwareSpec(engine=engine))
        assert made == 4 * (2 + sent) * BOUNDARY


def test_where_both_ends_count_as_a_block_the_second_stage_is_the_fullest():
    shape = replace(TINY, layers=22)  # 5, 6, 6, 5
    assert job(shape, pipeline=4).layout.stage_blocks(22) == (5, 6, 6, 5)
    assert pipelined(model=shape) == 3 * (6 + 1) * BOUNDARY


def test_stages_share_what_doesn_t_divide():
    assert job(replace(TINY, layers=7), pipeline=4).layout.stage_blocks(7) == (2, 2, 2, 1)
    assert job(TINY).layout.stage_blocks(4) == (4,)


def test_interleaved_stages_hold_more_micro_batches_the_last_one_too():
    shape = replace(TINY, layers=32)
    made = job(shape, pipeline=4, accumulation=64, layout={"chunks_per_stage": 8})
    held = [micro_batches_in_flight(made.layout, made.workload, stage) for stage in range(4)]
    assert held == [(2 * (3 - stage) + 7 * 4 + 1) / 8 for stage in range(4)]
    flat = replace(made.layout, chunks_per_stage=1)
    assert [micro_batches_in_flight(flat, made.workload, s) for s in range(4)] == [4, 3, 2, 1]


def test_dividing_sequences_divides_what_lies_between_blocks():
    shape = replace(TINY, layers=8)
    whole = pipelined(model=shape, tensor=2)
    divided = pipelined(model=shape, tensor=2, software=SoftwareSpec(sequence_parallel=True))
    assert divided == whole / 2


def test_a_looked_up_norm_and_dropout_keep_something_too():
    normed = replace(TINY, layers=8, embedding_norm=True)
    plain, kept = pipelined(model=replace(TINY, layers=8)), pipelined(model=normed)
    assert kept - plain == 4 * BOUNDARY
    masks = pipelined(model=normed, software=SoftwareSpec(dropout=True)) - kept
    assert masks == 4 * BOUNDARY / 2
