"""Gradients of the mean over tokens, whatever the lengths of micro-batches."""

from __future__ import annotations

import pytest

from tests.support import tokens
from tests.support.pool import RankPool


@pytest.mark.parametrize("shape", [(1, 2), (1, 3), (2, 2)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hybrid_full_optimizer"])
def test_backward_gives_the_gradient_of_the_mean_over_all_tokens(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    for difference, of_naive in pool.run(
        shape[0] * shape[1], tokens.compare, strategy=strategy, shape=shape
    ):
        assert difference <= 1e-9
        assert of_naive > 1e-3


def test_gradients_of_an_earlier_step_are_refused(pool: RankPool) -> None:
    for outcome in pool.attempt(2, tokens.forgets_zero_grad):
        assert outcome.raised == "LifecycleError"
        assert "zero_grad" in outcome.message


def test_a_loss_of_a_plain_model_is_refused(pool: RankPool) -> None:
    (outcome,) = pool.attempt(1, tokens.plain_model)
    assert outcome.raised == "LifecycleError"
    assert "sharded model" in outcome.message
