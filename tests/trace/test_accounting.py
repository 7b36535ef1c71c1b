"""What the engine sends and holds equals the arithmetic, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import accounting
from tests.support.parity import STRATEGIES
from tests.support.pool import RankPool

FP32: dict[str, Any] = {}
BF16 = {"param": torch.bfloat16}
BF16_ON_THE_WIRE = {"param": torch.bfloat16, "reduce": torch.bfloat16}
MIXED = {"param": torch.bfloat16, "keep": ("norm",)}
SHAPES = [(1, 1), (1, 2), (1, 3), (2, 2)]


def label(value: object) -> str | None:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in value.items()) or "fp32"
    return None


@pytest.mark.parametrize("precision", [FP32, BF16, BF16_ON_THE_WIRE, MIXED], ids=label)
@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_live_storages_equal_the_memory_formula(
    pool: RankPool, strategy: str, shape: tuple[int, int], precision: dict[str, Any]
) -> None:
    for added, computed, by_category in pool.run(
        shape[0] * shape[1],
        accounting.storages_against_formula,
        strategy=strategy,
        shape=shape,
        precision=precision,
    ):
        assert added == computed, by_category


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("precision", [FP32, BF16_ON_THE_WIRE, MIXED], ids=label)
@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_row_of_the_ledger_is_counted_as_computed(
    pool: RankPool,
    strategy: str,
    shape: tuple[int, int],
    precision: dict[str, Any],
    micro_batches: int,
) -> None:
    for rows in pool.run(
        shape[0] * shape[1],
        accounting.reconciliation,
        strategy=strategy,
        shape=shape,
        micro_batches=micro_batches,
        precision=precision,
        settings={},
    ):
        assert [row for row in rows if row[1] != row[2]] == []
        assert len(rows) >= 3


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("zero3", {"residency": ["blocks.0", "blocks.2"]}),
        ("zero3", {"accumulation": "whole"}),
        ("zero3", {"poison_released": True}),
        ("zero2", {"poison_released": True}),
        ("zero3", {"forward_prefetch": 2, "backward_prefetch": 2}),
        ("zero3", {"forward_prefetch": 0, "backward_prefetch_at": "post"}),
        ("zero2", {"reshard_after_backward": False}),
        ("zero1", {"reshard_after_backward": True}),
        ("hybrid", {"transport": "collective"}),
    ],
    ids=label,
)
def test_settings_are_counted_as_computed(
    pool: RankPool, strategy: str, settings: dict[str, Any]
) -> None:
    for rows in pool.run(
        4,
        accounting.reconciliation,
        strategy=strategy,
        shape=(2, 2),
        micro_batches=3,
        precision=FP32,
        settings=settings,
    ):
        assert [row for row in rows if row[1] != row[2]] == []


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (4, 1), (1, 4)], ids=label)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_per_step_follow_the_table_of_strategies(
    pool: RankPool, strategy: str, shape: tuple[int, int], micro_batches: int
) -> None:
    """The table written out again, from padded sizes: p bytes gathered, g = 4 bytes reduced."""
    replicas, shards = shape
    if strategy == "ddp":
        replicas, shards = replicas * shards, 1
    for sent, units in pool.run(
        shape[0] * shape[1],
        accounting.sent_per_step,
        strategy=strategy,
        shape=shape,
        micro_batches=micro_batches,
    ):
        psi = sum(u["gathered_bytes"] for u in units)
        gradients = sum(4 * u["gradient_numel"] for u in units)
        kept = sum({u["slot"]: u["gathered_bytes"] for u in units}.values())
        whole = strategy in ("ddp", "zero1")
        gathers = {
            "ddp": 0,
            "zero1": psi,
            "zero2": psi * micro_batches,
            "hybrid_zero2": psi * micro_batches,
        }.get(strategy, (2 * psi - kept) * micro_batches)
        reductions = gradients if whole else gradients * micro_batches
        divided = strategy == "hybrid_full_optimizer"
        over_replicas = (gradients // shards) * (replicas - 1) // replicas
        expected = {
            ("all_gather", "shard"): gathers * (shards - 1) // shards,
            ("reduce_scatter", "shard"): reductions * (shards - 1) // shards,
            ("all_reduce", "replicate"): 0 if divided else 2 * over_replicas,
            ("reduce_scatter", "replicate"): over_replicas if divided else 0,
            ("all_gather", "replicate"): (psi // shards) * (replicas - 1) // replicas
            if divided
            else 0,
        }
        assert sent == {k: v for k, v in expected.items() if v}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_allocated_after_the_second_step(pool: RankPool, strategy: str) -> None:
    assert (
        pool.run(4, accounting.allocations_after_warm_up, strategy=strategy, shape=(2, 2))
        == [(0, 0)] * 4
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_a_step_makes_no_tensor_that_plain_training_does_not(pool: RankPool, strategy: str) -> None:
    for ours, plain in pool.run(
        2, accounting.factory_calls_beside_plain, strategy=strategy, shape=(1, 2)
    ):
        assert len(ours) <= len(plain)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_linear_weights_are_never_copied_and_the_rest_is_copied_once(
    pool: RankPool, strategy: str
) -> None:
    """Three blocks of six parameters, two of them weights; tied table, norm and scalar."""
    direct = pool.run(2, accounting.copies_per_step, strategy=strategy, shape=(1, 2), direct=True)
    plain = pool.run(2, accounting.copies_per_step, strategy=strategy, shape=(1, 2), direct=False)
    assert plain == [3 * 6 + 4] * 2
    assert direct == [3 * 4 + 4] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_leave_no_tensor_behind(pool: RankPool, strategy: str) -> None:
    assert pool.run(2, accounting.leaks, strategy=strategy, shape=(1, 2)) == [0, 0]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_memory_budget_chooses_whole_gradients_where_they_fit(
    pool: RankPool, strategy: str
) -> None:
    def choose(budget_gib: float | None) -> tuple[str, int, int]:
        first, second = pool.run(
            2, accounting.chosen_by_budget, strategy=strategy, budget_gib=budget_gib
        )
        assert first == second
        return first

    kind, whole_bytes, calls = choose(1.0)
    assert (kind, calls) == ("whole", 1)
    kind, sharded_bytes, calls = choose((whole_bytes - 1) / 2**30)
    assert (kind, calls) == ("sharded", 3)
    assert sharded_bytes < whole_bytes
    assert choose(whole_bytes / 2**30)[0] == "whole"
    assert choose(None)[0] == ("whole" if strategy == "zero1" else "sharded")
