"""Ranks that run out of data at different times end together, with the numbers of one process."""

from __future__ import annotations

import pytest

from tests.support import uneven
from tests.support.pool import RankPool

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hybrid_full_optimizer"]
SHAPES = [(1, 2), (1, 3), (2, 2)]


@pytest.mark.parametrize("policy", ["stop", "join"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_equal_one_process_on_what_data_there_is(
    pool: RankPool, strategy: str, shape: tuple[int, int], policy: str
) -> None:
    ranks = shape[0] * shape[1]
    outcomes = pool.run(ranks, uneven.compare, strategy=strategy, shape=shape, policy=policy)
    steps = (min if policy == "stop" else max)(uneven.BATCHES[:ranks])
    for rank, (difference, weights) in enumerate(outcomes):
        assert difference <= 1e-9
        assert len(weights) == steps
        assert [w > 0 for w in weights] == [step < uneven.BATCHES[rank] for step in range(steps)]
        assert weights[0] == 1.0


def test_token_sums_join_with_no_tokens(pool: RankPool) -> None:
    assert max(pool.run(2, uneven.token_mean)) <= 1e-9


def test_stop_takes_a_rank_without_any_batch(pool: RankPool) -> None:
    assert pool.run(2, uneven.no_batch_on_rank_1, policy="stop") == [0, 0]


@pytest.mark.parametrize(
    ("policy", "words"), [("join", ["data rank 1", "'stop'"]), ("halt", ["'halt'", "'join'"])]
)
def test_join_needs_a_batch_to_repeat_and_policies_are_checked(
    pool: RankPool, policy: str, words: list[str]
) -> None:
    for outcome in pool.attempt(2, uneven.no_batch_on_rank_1, policy=policy):
        assert outcome.raised == "SpecError"
        assert all(word in outcome.message for word in words)


def test_data_that_raise_on_one_rank_end_the_others_soon(pool: RankPool) -> None:
    other, broken = pool.attempt(2, uneven.data_that_breaks_on_rank_1)
    assert broken.raised == "ValueError"
    assert other.raised == "RankFailedError"
    assert "rank 1 raised ValueError" in other.message
    assert other.seconds < 10
