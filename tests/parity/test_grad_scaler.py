"""One finite check for all ranks: what overflows on one is skipped on all, as in one process."""

from __future__ import annotations

import math

import pytest

from tests.support import scaling
from tests.support.pool import RankPool


@pytest.mark.parametrize("kind", ["sgd", "clipped sgd", "adamw", "fused adamw"])
@pytest.mark.parametrize("shape", [(1, 2), (1, 3), (2, 2)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hybrid_full_optimizer"])
def test_overflow_on_one_rank_skips_the_step_on_all(
    pool: RankPool, strategy: str, shape: tuple[int, int], kind: str
) -> None:
    for actual, expected, difference in pool.run(
        shape[0] * shape[1], scaling.compare, strategy=strategy, shape=shape, kind=kind
    ):
        assert actual.scales == expected.scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
        assert actual.moved == expected.moved == [True, True, False, True, True]
        assert difference <= (1e-6 if "sgd" in kind else 2e-3)  # Adam divides noise by noise
        for mine, theirs in zip(actual.norms, expected.norms, strict=True):
            assert math.isnan(mine) if math.isnan(theirs) else mine == pytest.approx(theirs, 1e-6)


def test_float16_scales_alike_on_ranks_that_hold_nothing(pool: RankPool) -> None:
    outcomes = pool.run(4, scaling.half_precision_on_ranks_without_rows)
    assert {tuple(scales) for scales, _ in outcomes} == {(4.0, 2.0, 2.0)}
    assert sorted(rows for _, rows in outcomes) == [0, 0, 0, 2]


def test_a_plain_model_is_refused(pool: RankPool) -> None:
    (outcome,) = pool.attempt(1, scaling.plain_model)
    assert outcome.raised == "LifecycleError"
    assert "sw.shard" in outcome.message
