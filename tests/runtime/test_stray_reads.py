"""A parameter read outside its unit is loud where a layer is computed, and harmless elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.support import stray
from tests.support.pool import RankPool


def test_legal_reads_give_what_a_plain_model_gives(pool: RankPool) -> None:
    for found in pool.run(2, stray.legal_reads):
        assert found == {
            "dtype": torch.float32,
            "repr": True,
            "is_parameter": True,
            "is_registered": True,
            "block": True,
            "linear": True,
            "layer": True,
            "rows": True,
            "after": True,
            "plain": True,
        }


@pytest.mark.parametrize("poison_released", [False, True])
def test_a_weight_kept_after_its_unit_is_nan_where_released_slots_are_poisoned(
    pool: RankPool, poison_released: bool
) -> None:
    found = pool.run(2, stray.weight_kept_after_its_unit, poison_released=poison_released)
    assert found == [poison_released] * 2


def test_gradients_can_be_read_and_changed_element_by_element(pool: RankPool) -> None:
    assert pool.run(2, stray.elementwise_uses_of_gradients) == [[], []]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_data_of_gradients_that_is_replaced_is_taken_and_given_up(
    pool: RankPool, strategy: str
) -> None:
    for found in pool.run(2, stray.plain_gradient_data, strategy=strategy):
        assert found == [2.0, 4.0, 10.0]


def test_rprop_sets_gradients_by_mask(pool: RankPool) -> None:
    assert max(pool.run(2, stray.rprop)) <= 1e-12


def test_a_root_without_parameters_runs_inside_unsharded(pool: RankPool) -> None:
    assert pool.run(2, stray.forward_inside_unsharded) == [0.0, 0.0]


def test_a_plain_model_trains_before_its_engine_is_collected(pool: RankPool) -> None:
    assert pool.run(2, stray.trained_after_unshard) == [True, True]


def test_additions_without_parameters_and_moves_that_change_nothing_are_fine(
    pool: RankPool,
) -> None:
    for names, difference in pool.run(2, stray.legal_changes):
        assert names == ["first", "blocks", "last", "extra", "same"]
        assert difference <= 1e-12
