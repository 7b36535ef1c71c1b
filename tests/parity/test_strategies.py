"""Every strategy on every world trains as one process does on the concatenated batch."""

from __future__ import annotations

import pytest
import torch

from tests.support import parity
from tests.support.pool import RankPool

SHAPES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (4, 1)]


def world_of(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_float64_parameters_losses_and_norms_equal_one_process(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    results = pool.run(world_of(shape), parity.compare_float64, strategy=strategy, shape=shape)
    assert results == [[]] * world_of(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_float32_losses_equal_one_process(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    errors = pool.run(
        world_of(shape), parity.relative_loss_error_float32, strategy=strategy, shape=shape
    )
    assert max(errors) <= 5e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulation": "whole"},
        {"backward_prefetch_at": "post"},
        {"forward_prefetch": 0, "backward_prefetch": 0, "reduce_in_flight": 0},
        {"forward_prefetch": 2, "backward_prefetch": 2, "max_in_flight": 3},
        {"direct_gradients": False},
        {"residency": ["blocks.1"]},
        {"transport": "collective"},
        {"units": None},
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_settings_change_no_number(
    pool: RankPool, settings: dict[str, object], shape: tuple[int, int]
) -> None:
    results = pool.run(
        world_of(shape), parity.compare_float64, strategy="zero3", shape=shape, **settings
    )
    assert results == [[]] * world_of(shape)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("zero1", {"accumulation": "sharded"}),
        ("zero1", {"reshard_after_backward": True}),
        ("zero2", {"reshard_after_backward": False}),
        ("ddp", {"transport": "collective"}),
        ("hybrid_full_optimizer", {"transport": "collective"}),
        ("hybrid_full_optimizer", {"accumulation": "whole"}),
    ],
)
def test_strategies_with_other_settings_change_no_number(
    pool: RankPool, strategy: str, settings: dict[str, object]
) -> None:
    results = pool.run(4, parity.compare_float64, strategy=strategy, shape=(2, 2), **settings)
    assert results == [[]] * 4


def test_first_parameters_are_bitwise_equal_for_every_world_and_strategy(
    pool: RankPool,
) -> None:
    expected = {k: v.numpy().tobytes() for k, v in parity.build(torch.float32).state_dict().items()}
    for shape in SHAPES:
        for strategy in parity.STRATEGIES:
            for state in pool.run(
                world_of(shape), parity.initial_state, strategy=strategy, shape=shape
            ):
                assert state == expected, f"{strategy} on {shape}"


@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_replicas_stay_bitwise_equal_over_fifty_steps(pool: RankPool, strategy: str) -> None:
    assert (
        pool.run(4, parity.replicas_stay_equal, strategy=strategy, shape=(2, 2), steps=50)
        == [True] * 4
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_shards_are_disjoint_and_cover_and_keep_dimensions(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    assert pool.run(world_of(shape), parity.shards_cover, strategy=strategy, shape=shape) == [
        []
    ] * world_of(shape)
