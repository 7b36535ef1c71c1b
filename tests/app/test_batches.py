"""Which windows each rank reads: disjoint, covering, the same batches on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.app.batches import (
    BatchShape,
    epoch_order,
    evaluation_windows,
    gather_windows,
    global_windows,
    num_windows,
    rank_windows,
    require_windows,
)
from shardwright.app.data import DataError

PINNED = [3, 2, 1, 6, 0, 7, 4, 5]
"""The order of 8 windows for seed 0: a change of it would change every run."""

shapes = st.builds(
    BatchShape,
    micro_batch=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    num_ranks=st.integers(1, 5),
)


def step_by_rank(shape: BatchShape, windows: np.ndarray) -> list[int]:
    return [
        int(window)
        for micro_batch in range(shape.accumulation)
        for rank in range(shape.num_ranks)
        for window in rank_windows(windows, shape, micro_batch, rank)
    ]


@given(shape=shapes, count=st.integers(1, 60), seed=st.integers(0, 5), step=st.integers(0, 20))
def test_ranks_and_micro_batches_divide_the_global_batch_in_order(
    shape: BatchShape, count: int, seed: int, step: int
) -> None:
    windows = global_windows(count, shape.global_batch, seed, step)
    assert step_by_rank(shape, windows) == windows.tolist()


@given(count=st.integers(1, 60), global_batch=st.integers(1, 16), seed=st.integers(0, 5))
def test_each_epoch_visits_every_window_once(count: int, global_batch: int, seed: int) -> None:
    num_steps = -(-2 * count // global_batch)
    stream = np.concatenate(
        [global_windows(count, global_batch, seed, step) for step in range(num_steps)]
    )
    for epoch in range(2):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_the_global_batch_is_the_same_on_any_number_of_ranks() -> None:
    shapes = [
        BatchShape(micro_batch=12, accumulation=1, num_ranks=1),
        BatchShape(micro_batch=3, accumulation=2, num_ranks=2),
        BatchShape(micro_batch=1, accumulation=3, num_ranks=4),
    ]
    batches = [
        step_by_rank(shape, global_windows(100, shape.global_batch, 7, step=3)) for shape in shapes
    ]
    assert batches[0] == batches[1] == batches[2]


def test_the_order_follows_seed_and_epoch_and_is_pinned() -> None:
    assert epoch_order(8, seed=0, epoch=0).tolist() == epoch_order(8, seed=0, epoch=0).tolist()
    orders = {tuple(epoch_order(8, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert epoch_order(8, seed=0, epoch=0).tolist() == PINNED


def test_windows_do_not_overlap_and_targets_lie_one_further() -> None:
    tokens = np.arange(11, dtype=np.uint16)
    assert num_windows(len(tokens), 3) == 3
    inputs, targets = gather_windows(tokens, np.array([2, 0, 1]), 3)
    assert inputs.tolist() == [[6, 7, 8], [0, 1, 2], [3, 4, 5]]
    assert (targets == inputs + 1).all()
    assert inputs.dtype == targets.dtype == np.int64


def test_large_ids_keep_their_value() -> None:
    tokens = np.array([70_000, 128_255, 5], dtype=np.uint32)
    inputs, targets = gather_windows(tokens, np.array([0]), 2)
    assert inputs.tolist() == [[70_000, 128_255]]
    assert targets.tolist() == [[128_255, 5]]


@pytest.mark.parametrize(("num_tokens", "windows"), [(0, 0), (1, 0), (8, 0), (9, 1), (17, 2)])
def test_a_window_needs_one_token_more_than_its_length(num_tokens: int, windows: int) -> None:
    assert num_windows(num_tokens, 8) == windows


def test_too_short_data_says_what_is_needed() -> None:
    with pytest.raises(DataError, match="validation data must hold at least seq_len"):
        require_windows(np.zeros(8, dtype=np.uint16), 8, "validation")


@given(shape=shapes, count=st.integers(1, 60), wanted=st.integers(1, 80))
def test_validation_windows_are_disjoint_and_the_same_set_on_any_ranks(
    shape: BatchShape, count: int, wanted: int
) -> None:
    parts = [evaluation_windows(count, wanted, shape, rank) for rank in range(shape.num_ranks)]
    assert len({part.shape for part in parts}) == 1
    real = sorted(int(window) for part in parts for window in part.flatten() if window >= 0)
    alone = evaluation_windows(
        count, wanted, BatchShape(micro_batch=1, accumulation=1, num_ranks=1), 0
    )
    assert real == alone.flatten().tolist()
    assert len(set(real)) == min(count, wanted)
