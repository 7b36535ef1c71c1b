"""What the planner simulates is what the engine does: recorded actions equal planned ones."""

from __future__ import annotations

import pytest

from tests.support import planned
from tests.support.parity import STRATEGIES
from tests.support.pool import RankPool


@pytest.mark.parametrize(
    ("recomputes", "tied"),
    [(False, False), (True, False), (False, True)],
    ids=["kept", "recomputed", "tied"],
)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=["1x2", "2x2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recorded_actions_are_the_planned_ones(
    pool: RankPool,
    strategy: str,
    shape: tuple[int, int],
    micro_batches: int,
    recomputes: bool,
    tied: bool,
) -> None:
    for recorded, expected in pool.run(
        shape[0] * shape[1],
        planned.recorded_and_planned,
        strategy=strategy,
        shape=shape,
        micro_batches=micro_batches,
        recomputes=recomputes,
        tied=tied,
    ):
        assert recorded == expected


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=["1x3", "2x2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_planned_units_are_the_engine_s_to_the_element(
    pool: RankPool, strategy: str, shape: tuple[int, int], tied: bool
) -> None:
    for built, planned_sizes in pool.run(
        shape[0] * shape[1],
        planned.built_and_planned_units,
        strategy=strategy,
        shape=shape,
        tied=tied,
    ):
        assert planned_sizes == built


@pytest.mark.parametrize(
    "settings",
    [
        {"forward_prefetch": 0},
        {"forward_prefetch": 3, "backward_prefetch": 2, "max_in_flight": 1},
        {"forward_prefetch": 3, "backward_prefetch": 3, "max_in_flight": 3},
        {"backward_prefetch_at": "post"},
        {"residency": ["layers.2", "layers.3"]},
    ],
    ids=["no prefetch", "one in flight", "three in flight", "post", "resident"],
)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_settings_change_planned_actions_as_they_change_recorded_ones(
    pool: RankPool, strategy: str, settings: dict[str, object]
) -> None:
    for recorded, expected in pool.run(
        2,
        planned.recorded_and_planned,
        strategy=strategy,
        shape=(1, 2),
        micro_batches=2,
        recomputes=False,
        tied=False,
        settings=settings,
    ):
        assert recorded == expected
