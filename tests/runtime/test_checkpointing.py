"""Activation checkpointing changes memory, not numbers, names or bytes; unshard_ undoes shard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardwright.core.errors import LifecycleError
from tests.support import checkpointing
from tests.support.pool import RankPool


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_checkpointing_before_or_after_shard_changes_no_number_and_no_name(
    pool: RankPool, strategy: str, policy: str
) -> None:
    results = pool.run(2, checkpointing.compare, strategy=strategy, policy=policy, shape=(1, 2))
    assert results == [[], []]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_recomputation_costs_no_communication(pool: RankPool, strategy: str) -> None:
    assert pool.run(2, checkpointing.gathers_do_not_grow, strategy=strategy, shape=(1, 2)) == [
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (checkpointing.checkpoints_twice, "LifecycleError", ["already", "once"]),
        (checkpointing.unknown_policy, "SpecError", ["'selectiv'", "'selective'"]),
        (checkpointing.nothing_to_checkpoint, "SpecError", ["Linear", "units="]),
    ],
)
def test_mistakes_say_what_to_do(
    pool: RankPool, function: Callable[[], None], error: str, words: list[str]
) -> None:
    (outcome,) = pool.attempt(1, function)
    assert outcome.raised == error
    for word in words:
        assert word in outcome.message


@pytest.mark.parametrize(("policy", "use_cache"), [("full", True), ("selective", False)])
def test_a_hugging_face_model_keeps_its_gradients(policy: str, use_cache: bool) -> None:
    pytest.importorskip("transformers")
    expected = checkpointing.llama_gradients(use_cache=True, policy=None)
    found = checkpointing.llama_gradients(use_cache=use_cache, policy=policy)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a)


def test_results_kept_by_their_order_and_a_cache_do_not_go_together() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(LifecycleError, match="use_cache = False"):
        checkpointing.llama_gradients(use_cache=True, policy="selective")


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "hybrid_full_optimizer"])
def test_unshard_leaves_a_plain_model_that_can_be_sharded_again(
    pool: RankPool, strategy: str, shape: tuple[int, int], checkpointed: bool
) -> None:
    world = shape[0] * shape[1]
    assert (
        pool.run(
            world,
            checkpointing.plain_again,
            strategy=strategy,
            shape=shape,
            checkpointed=checkpointed,
        )
        == [[]] * world
    )
