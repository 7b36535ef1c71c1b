"""Where nothing fits, or nothing that the engine runs, the cause and the remedy are true."""

from __future__ import annotations

import re

import pytest

from shardwright.core.errors import PlanInfeasible
from shardwright.planner.advice import reasons_for
from shardwright.planner.cluster import make_cluster
from shardwright.planner.model_presets import find_model
from shardwright.planner.search import SearchResult, search
from shardwright.planner.space import SearchSpace
from shardwright.planner.workload import WorkloadSpec


def find(
    model: str = "llama-3-8b", devices: int = 8, batch: int = 32, *, seq_len: int = 4096, **space
) -> SearchResult:
    return search(
        find_model(model),
        make_cluster("h100", devices, network="8x400g-ib"),
        WorkloadSpec(seq_len=seq_len, micro_batch=1),
        batch,
        SearchSpace(**{"max_tensor": 1, "max_pipeline": 1, **space}),
    )


def refused(*arguments, **space) -> str:
    with pytest.raises(PlanInfeasible) as caught:
        find(*arguments, **space)
    return str(caught.value)


@pytest.mark.parametrize("devices", [8, 16])
def test_devices_that_would_do_are_counted_in_whole_nodes_and_do(devices):
    text = refused("llama-3-70b", devices, 64)
    assert text.endswith(
        "zero3 shard=24 with micro-batch 1 and full recomputation fits 24 devices, with a global "
        "batch of 72."
    )
    assert find("llama-3-70b", 24, 72).best.strategy == "zero3"


def test_the_devices_at_hand_with_another_strategy_come_first():
    text = refused(strategies=("zero1",), checkpointing=("none",))
    assert text.endswith(
        "zero2 shard=8 with micro-batch 1 and no recomputation fits the same 8 devices."
    )
    assert find(strategies=("zero2",), checkpointing=("none",)).best.strategy == "zero2"


def test_devices_don_t_help_where_activations_alone_are_too_large():
    fixed = {"strategies": ("zero3",), "micro_batches": (2,), "seq_len": 8192}
    text = refused(batch=16, checkpointing=("none",), **fixed)
    assert re.search(
        r"More data ranks don't help: activations of \d+\.\d GiB and logits and loss of \d+\.\d "
        r"GiB don't shrink with them\. zero3 shard=8 with micro-batch 2 and full recomputation "
        r"fits 8 devices\.$",
        text,
    )
    assert find(batch=16, checkpointing=("full",), **fixed).best.strategy == "zero3"


def test_a_micro_batch_that_is_too_large_is_left_open_where_that_helps():
    text = refused(batch=512, micro_batches=(64,), checkpointing=("full",))
    assert text.endswith("zero1 shard=8 with micro-batch 1 and full recomputation fits 8 devices.")


def test_where_no_other_change_helps_the_sequence_that_fits_is_named():
    text = refused(batch=8, seq_len=2**20)
    (length,) = re.findall(
        r"With sequences of (\d+) tokens, zero\d shard=8 .* fits 8 devices", text
    )
    assert find(batch=8, seq_len=int(length)).best.prediction.fits
    refused(batch=8, seq_len=2 * int(length))


def test_a_batch_that_only_other_axes_divide_is_no_lack_of_memory():
    found = find(devices=64, batch=100, max_tensor=8, max_pipeline=16)
    text = " / ".join(reasons_for(found))
    assert (
        "tensor parallelism and pipeline stages, which the engine doesn't run yet; without" in text
    )
    assert "divides over no mesh of 64 devices" in text
    assert "the nearest that do: 64 and 128" in text
    assert "nothing without them fits" not in text


def test_memory_that_only_other_axes_save_names_what_would_do_without_them():
    found = find(strategies=("ddp",), max_tensor=8)
    assert found.why_not_today == (
        "nothing without them fits. zero1 shard=8 with micro-batch 1 and full recomputation fits "
        "the same 8 devices."
    )


def test_an_option_that_the_engine_lacks_is_named_as_the_cause():
    found = find(batch=128, checkpointing=("half_products",))
    assert found.why_not_today == (
        "an option asked for that: plan without it to have what the engine runs"
    )


def test_padding_that_makes_shards_much_larger_is_warned_of():
    hybrid = {"strategies": ("hybrid",), "checkpointing": ("full",)}
    (said,) = (
        warning
        for warning in find(devices=100_000, batch=100_000, **hybrid).best.prediction.warnings
        if "padding" in warning
    )
    assert re.match(r"padding adds \d+% to the parameters.* 8 shard ranks.* over 12500 ", said)
    few = find(devices=64, batch=128, **hybrid).best.prediction.warnings
    assert not any("padding" in warning for warning in few)
