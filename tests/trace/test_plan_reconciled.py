"""A plan of the same job reconciles with what the engine holds and sends, to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.core.errors import SpecError
from shardwright.runtime.planned import read_engine_section
from tests.support import planned
from tests.support.parity import STRATEGIES
from tests.support.pool import RankPool

OPTIMIZER = "memory: optimizer state"


def differences(rows: list[tuple[str, int, int, int, str]]) -> list[tuple[str, int, int, int, str]]:
    return [row for row in rows if row[1] != row[3] and row[0] != OPTIMIZER]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_of_the_same_job_is_what_is_counted(
    pool: RankPool, strategy: str, micro_batches: int
) -> None:
    shape = (2, 1) if strategy.startswith("hybrid") else (1, 2)
    for rows in pool.run(
        2, planned.reconciled, strategy=strategy, shape=shape, micro_batches=micro_batches
    ):
        assert differences(rows) == []
        assert len(rows) >= 4
        # Planned without step counts and for whole chunks: within padding of what is there.
        (state,) = [row for row in rows if row[0] == OPTIMIZER]
        assert state[1] == pytest.approx(state[3], rel=0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {"param": "bf16"},
        {"traced": False},
        {"forward_prefetch": 2, "backward_prefetch": 2},
        {"forward_prefetch": 0, "backward_prefetch_at": "post"},
        {"forward_prefetch": 3, "max_in_flight": 1},
        {"reduce_in_flight": 2},
        {"resident_units": 2},
    ],
    ids=str,
)
def test_settings_of_a_plan_are_what_is_counted(pool: RankPool, settings: dict[str, Any]) -> None:
    for rows in pool.run(2, planned.reconciled, strategy="zero3", shape=(1, 2), **settings):
        assert differences(rows) == []


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_a_traced_module_that_is_no_decoder_is_planned_as_it_runs(
    pool: RankPool, strategy: str
) -> None:
    for recorded, expected, rows in pool.run(2, planned.traced_stack_and_run, strategy=strategy):
        assert recorded == expected
        assert differences(rows) == []


def test_what_was_not_planned_has_a_reason(pool: RankPool) -> None:
    for rows in pool.run(2, planned.reconciled, strategy="zero3", shape=(1, 2), evaluations=2):
        ((name, planned_bytes, _, counted, reason),) = differences(rows)
        assert name == "traffic: all_gather over shard"
        assert counted > planned_bytes
        assert "evaluations" in reason


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"strategy": "zero2"}, "time gathered (zero2) of unit 0"),
        ({"strategy": "zero1"}, "gradients between micro-batches (zero1) is whole"),
        ({"shape": (1, 4)}, "the shard axis is 4 in the plan, 2 in this run"),
        ({"shape": (2, 2)}, "replicas is 2 in the plan, 1 in this run"),
        ({"config": replace(planned.CONFIG, vocab_size=96)}, "elements of unit 1"),
        ({"config": replace(planned.CONFIG, layers=3)}, "elements of unit 5"),
        ({"param": "bf16"}, "gathered bytes of unit 0"),
    ],
    ids=str,
)
def test_a_plan_of_another_job_names_the_first_difference(
    pool: RankPool, plan: dict[str, Any], message: str
) -> None:
    document = planned.plan_of(**{"strategy": "zero3", "shape": (1, 2), **plan})
    for error in pool.run(2, planned.error_of, plan=document, strategy="zero3", shape=(1, 2)):
        assert message in error


def test_what_is_no_plan_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(SpecError, match="can't read the plan"):
        read_engine_section(path)
    path.write_text("{}")
    with pytest.raises(SpecError, match=r"is none: expected format .* plans\.save"):
        read_engine_section(str(path))
    with pytest.raises(SpecError, match="has version 99"):
        read_engine_section({"format": "shardwright-plan", "version": 99})
    with pytest.raises(SpecError, match="lacks shard_arguments, shard"):
        read_engine_section({"format": "shardwright-plan", "version": 1})


def test_a_saved_plan_is_read(tmp_path: Path) -> None:
    plans = sw.plan(
        model="gpt2", cluster="8 x a100-80", workload={"seq_len": 64, "global_batch": 8}
    )
    plans.save(tmp_path / "plan.json")
    section = read_engine_section(tmp_path / "plan.json")
    assert section["shard_arguments"]["strategy"] == plans.best.job.layout.resolved.name
