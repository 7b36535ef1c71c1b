"""Averages on shards are those of one process, and parameters come back after evaluations."""

from __future__ import annotations

import pytest

from tests.support import parity, whole
from tests.support.pool import RankPool

SHAPES = [(1, 1), (1, 2), (1, 3), (2, 2)]


def label(shape: object) -> str | None:
    return f"{shape[0]}x{shape[1]}" if isinstance(shape, tuple) else None


@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
@pytest.mark.parametrize("owned", [None, "matrices"])
def test_averages_evaluations_and_training_equal_one_process(
    pool: RankPool, strategy: str, shape: tuple[int, int], owned: str | None
) -> None:
    """Evaluations gather the averages, and later forwards the parameters."""
    for worst in pool.run(
        shape[0] * shape[1], whole.ema_differs, strategy=strategy, shape=shape, whole=owned
    ):
        assert all(value <= 1e-12 for value in worst.values()), worst


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "hybrid_full_optimizer"])
def test_values_cast_from_masters_are_cast_and_gathered_anew(pool: RankPool, strategy: str) -> None:
    found = pool.run(4, whole.ema_with_narrow_compute, strategy=strategy, shape=(2, 2))
    assert found == [[True, True, True]] * 4


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_an_error_inside_leaves_parameters_and_averages_as_they_were(
    pool: RankPool, strategy: str
) -> None:
    found = pool.run(2, whole.ema_is_swapped_back_after_an_error, strategy=strategy)
    assert found == [(True, True)] * 2


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=label)
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_averages_take_the_bytes_stated_and_updates_and_swaps_none(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    for added, stated, left in pool.run(
        shape[0] * shape[1], whole.ema_memory, strategy=strategy, shape=shape
    ):
        assert added == stated
        assert left == 0


def test_averages_are_saved_and_loaded_by_name(pool: RankPool) -> None:
    for is_equal, num_updates, names in pool.run(2, whole.ema_state_travels):
        assert is_equal
        assert num_updates == 1
        assert "blocks.2.down.weight" in names
        assert "head.weight" not in names  # tied to the embedding


def test_frozen_parameters_are_not_averaged(pool: RankPool) -> None:
    for names in pool.run(2, whole.ema_names_of_a_half_frozen_model):
        assert names
        assert not any(name.startswith("blocks.1.") for name in names)
