"""Awkward models and ways of training equal one process under every strategy."""

from __future__ import annotations

import pytest

from tests.support import awkward
from tests.support.pool import RankPool


@pytest.mark.parametrize(
    ("shape", "poison_released"),
    [((1, 2), False), ((1, 3), True), ((2, 2), False)],
    ids=["1x2", "1x3 with released slots poisoned", "2x2"],
)
@pytest.mark.parametrize("name", awkward.SCENARIOS)
def test_scenario_equals_one_process(
    pool: RankPool, name: str, shape: tuple[int, int], poison_released: bool
) -> None:
    world = shape[0] * shape[1]
    wrong = pool.run(
        world, awkward.compare, name=name, shape=shape, poison_released=poison_released
    )
    assert wrong == [[]] * world
