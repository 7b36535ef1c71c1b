"""Awkward models and ways of training equal one process under every strategy."""

from __future__ import annotations

import pytest

from tests.support import awkward
from tests.support.pool import RankPool


@pytest.mark.parametrize("shape", [(1, 2), (1, 3), (2, 2)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", awkward.SCENARIOS)
def test_scenario_equals_one_process(pool: RankPool, name: str, shape: tuple[int, int]) -> None:
    world = shape[0] * shape[1]
    assert pool.run(world, awkward.compare, name=name, shape=shape) == [[]] * world
