"""What a plan is asked for is taken as it is, or refused: nothing is converted or overridden."""

from __future__ import annotations

import json

import pytest

import shardwright as sw
from shardwright.core.errors import SpecError
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.search import SearchSpace
from tests.planner.jobs import TINY, job

WORKLOAD = {"seq_len": 128, "global_batch": 16}


def plan(settings_of_workload=(), **changes):
    workload = {**WORKLOAD, **dict(settings_of_workload)}
    return sw.plan(
        **{"model": TINY, "cluster": "8 x a100-80", "workload": workload, **changes},
    )


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"seq_len": 128.5}, "seq_len must be a whole number, found 128.5"),
        ({"seq_len": "128"}, "seq_len must be a whole number, found '128'"),
        ({"global_batch": 16.0}, "global_batch must be a whole number, found 16.0"),
        ({"global_batch": True}, "global_batch must be a whole number, found True"),
        ({"global_batch": 0}, "global_batch must be greater than 0, found 0"),
        ({"micro_batch": 0}, "micro_batch must be greater than 0, found 0"),
        ({"micro_batch": "2"}, "micro_batch must be a whole number, found '2'"),
        ({"offload_optimizer": "no"}, "offload_optimizer must be true or false, found 'no'"),
        ({"param": 16}, "param must be a text, found 16"),
        ({"checkpointing": ["full"]}, "unknown checkpointing"),
        ({"global_batch_tokens": 2048}, "found both"),
    ],
)
def test_values_of_a_workload_are_of_their_types(workload, message):
    with pytest.raises(SpecError, match=message):
        plan(workload)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "fast"}, "workload must be a table of settings, found str"),
        ({"settings": {"forward_prefetch": 1.5}}, "forward_prefetch must be a whole number"),
        ({"settings": {"residency": True}}, "residency must be a number of blocks or names"),
        ({"settings": {"residency": 5}}, "residency must be from 0 to the 4 blocks of tiny"),
        ({"settings": {"residency": list("abcde")}}, "residency must be from 0 to the 4 blocks"),
        (
            {
                "settings": {"residency": 1},
                "space": SearchSpace(layouts=(LayoutSpec(strategy="zero3", shard=8),)),
            },
            "settings and space.layouts both set the engine",
        ),
        ({"units": None}, "units divides a traced module; pass sample too"),
    ],
)
def test_arguments_that_have_no_effect_or_make_no_sense_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        plan(**changes)


def test_a_workload_and_a_space_may_not_both_fix_the_same():
    with pytest.raises(SpecError, match="micro_batches differ; drop one"):
        plan({"micro_batch": 2}, space=SearchSpace(micro_batches=(1, 2)))
    with pytest.raises(SpecError, match=r"space\.checkpointing differ; drop one"):
        plan({"checkpointing": "full"}, space=SearchSpace(checkpointing=("none",)))


def test_a_strategy_is_fixed_by_name_or_alias():
    assert {c.strategy for c in plan(strategy="full_shard").result.candidates} == {"zero3"}
    both = {c.strategy for c in plan(strategy=("zero1", "ddp")).result.candidates}
    assert both == {"zero1", "ddp"}
    with pytest.raises(SpecError, match="unknown strategy 'zero4'"):
        plan(strategy="zero4")
    with pytest.raises(SpecError, match="both say which strategies to compare; drop one"):
        plan(strategy="zero3", space=SearchSpace(strategies=("ddp",)))


@pytest.mark.parametrize("residency", [None, 0])
def test_blocks_stay_gathered_unless_none_are_asked_for(residency):
    plans = plan(strategy="zero3", settings={"residency": residency})
    resident = {c.job.layout.resident_units for c in plans.result.candidates}
    assert resident == ({0} if residency == 0 else {0, 1, 2, 4})


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"micro_batches": (0,)}, "micro_batch must be greater than 0"),
        ({"micro_batches": (1.5,)}, "must be a whole number, found 1.5"),
        ({"max_tensor": 2.5}, "max_tensor must be a whole number"),
        ({"headroom": "5%"}, "headroom must be a number, found '5%'"),
        ({"strategies": ("zero4",)}, "unknown strategy 'zero4'"),
    ],
)
def test_what_may_vary_is_checked_before_anything_is_compared(space, message):
    with pytest.raises(SpecError, match=message):
        SearchSpace(**space)


def test_no_more_blocks_stay_gathered_than_there_are():
    with pytest.raises(SpecError, match="residency must be at most the 4 blocks of tiny, found 5"):
        job(layout={"resident_units": 5})


def test_a_table_of_no_layouts_is_refused():
    plans = plan()
    for most in (0, -1, 1.5):
        with pytest.raises(SpecError, match="the number of layouts to show must be"):
            plans.table(most)


def test_a_plan_of_what_the_engine_runs_names_its_precision_and_transport(tmp_path):
    plans = plan({"param": "bf16", "reduce": "bf16"}, settings={"transport": "pairwise"})
    plans.save(tmp_path / "plan.json")
    run = sw.read_plan(tmp_path / "plan.json")
    precision = run.shard_arguments["precision"]
    dtypes = [str(getattr(precision, use)) for use in ("param", "reduce", "master")]
    assert dtypes == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]
    assert run.shard_arguments["transport"] == "pairwise"
    document = json.loads((tmp_path / "plan.json").read_text())
    arguments = document["engine"]["shard_arguments"]
    arguments["precision"]["param"] = "int8"
    with pytest.raises(SpecError, match="must be float32, bfloat16 or float16, found 'int8'"):
        sw.read_plan(document)
    del arguments["precision"]
    with pytest.raises(SpecError, match="lack 'precision'; plan again"):
        sw.read_plan(document)
    layout = plans.best.job.layout
    assert run.mesh_arguments == {"replicate": layout.replicate, "shard": layout.shard}
    assert run.micro_batch * run.micro_batches * layout.num_data_ranks == 16


# --- what devices run --------------------------------------------------------------------------


def planned_on(device, **workload):
    plans = plan(workload, cluster=f"8 x {device} over 8x100g-ib")
    chosen = plans.best.job.workload
    return chosen.precision.param, chosen.software.attention


def test_a_device_without_bf16_is_planned_for_in_fp16_with_the_kernel_that_it_runs():
    assert planned_on("v100") == ("fp16", "flash1")
    assert planned_on("v100", param="fp32", attention="eager") == ("fp32", "eager")
    assert planned_on("a100") == planned_on("b200") == ("bf16", "flash2")
    assert planned_on("a100", param="fp32") == ("fp32", "flash1")
    assert planned_on("h200", attention="flash3") == ("bf16", "flash3")


@pytest.mark.parametrize(
    ("device", "workload", "message"),
    [
        ("v100", {"param": "bf16"}, "v100-32 has no bf16 units.*compute in fp16 or fp32"),
        ("v100", {"attention": "flash2"}, "flash2 needs Ampere or later.*v100-32.*; use flash1"),
        ("titan-rtx", {"attention": "flash3"}, "flash3 needs Hopper.*titan-rtx.*; use flash1"),
        ("a100", {"attention": "flash3"}, "flash3 needs Hopper.*a100-80.*; use flash2"),
        ("b200", {"attention": "flash3"}, "flash3 needs Hopper.*b200.*; use flash2"),
        ("h100", {"attention": "flash2", "param": "fp32"}, "flash2 needs 16 bits.*; use flash1"),
    ],
)
def test_what_a_device_can_t_run_is_refused(device, workload, message):
    with pytest.raises(SpecError, match=message):
        planned_on(device, **workload)
