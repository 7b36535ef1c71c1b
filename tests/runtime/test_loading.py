"""Safetensors are read by rows into shards, or refused with the model as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import loading
from tests.support.pool import RankPool

SHAPES = [(1, 1), (1, 2), (1, 3), (2, 2)]


@pytest.mark.parametrize("how", ["meta_init", "meta device", "real"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_loaded_model_equals_the_saved_one_under_every_strategy(
    pool: RankPool, tmp_path: Path, shape: tuple[int, int], how: str
) -> None:
    path = str(loading.save_one_file(tmp_path))
    for wrong in pool.run(
        shape[0] * shape[1], loading.difference_after_loading, path=path, shape=shape, how=how
    ):
        assert wrong == []


@pytest.mark.parametrize("save", [loading.save_folder, loading.save_in_parts])
def test_folders_are_read_with_and_without_an_index(
    pool: RankPool, tmp_path: Path, save: Callable[[Path], Path]
) -> None:
    path = str(save(tmp_path))
    for wrong in pool.run(
        2, loading.difference_after_loading, path=path, shape=(1, 2), how="meta_init"
    ):
        assert wrong == []


def test_what_was_gathered_before_is_stale_after_loading(pool: RankPool, tmp_path: Path) -> None:
    path = str(loading.save_one_file(tmp_path))
    for trained, fresh in pool.run(
        2, loading.loss_after_loading_between_steps, path=path, shape=(1, 2)
    ):
        assert trained == fresh


def test_ranks_read_their_own_rows_and_no_more(pool: RankPool, tmp_path: Path) -> None:
    path = str(loading.save_one_file(tmp_path))
    ranks = pool.run(3, loading.reads, path=path, shape=(1, 3))
    for read, held in ranks:
        assert read == held
    assert len({tuple(read) for read, _ in ranks}) == 3


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            loading.renamed,
            [
                "missing in the file: 'blocks.0.up.weight' (the file has 'block.0.up.weight')",
                "unknown to the model: 'block.0.up.weight', 'extra'",
                "strict=False",
            ],
        ),
        (loading.reshaped, ["'norm.bias' has shape (8,), the model's is (7,)"]),
        (loading.integers, ["'norm.bias' has dtype I32"]),
        (loading.torn, ["must be a .safetensors file"]),
        (loading.not_there, ["nowhere", "FileNotFoundError"]),
        (loading.empty_folder, ["model.safetensors.index.json"]),
        (loading.file_missing_of_parts, ["model-1.safetensors"]),
        (loading.index_that_leaves_the_folder, ["'../other.safetensors'", "beside it"]),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_file_that_does_not_fit_is_an_error_on_all_ranks_and_changes_nothing(
    pool: RankPool, tmp_path: Path, spoil: Callable[[Path], Path], words: list[str]
) -> None:
    path = spoil(tmp_path)
    for outcome in pool.attempt(2, loading.load_into_a_trained_model, path=str(path)):
        assert outcome.raised == "CheckpointError", outcome
        for word in words:
            assert word in outcome.message
        assert outcome.seconds < 10


@pytest.mark.parametrize("spoil", [loading.reshaped, loading.not_there])
def test_a_file_that_is_wrong_on_one_rank_is_an_error_on_all(
    pool: RankPool, tmp_path: Path, spoil: Callable[[Path], Path]
) -> None:
    path = spoil(tmp_path)
    shutil.move(loading.save_one_file(tmp_path), tmp_path / "good.safetensors")
    first, second = pool.attempt(2, loading.load_into_a_trained_model, path=str(path), on_rank=1)
    assert second.raised == "CheckpointError"
    assert first.raised == "RankMismatchError"
    assert "rank 1" in first.message
    assert second.message in first.message


def test_without_strictness_what_both_have_is_loaded(pool: RankPool, tmp_path: Path) -> None:
    path = str(loading.renamed(tmp_path))
    assert pool.run(2, loading.values_after_loose_loading, path=path) == [(True, True, True)] * 2


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (loading.load_into_a_part, ["part of a sharded Decoder"]),
        (loading.load_while_unsharded, ["outside"]),
        (loading.load_into_a_plain_model, ["plain Decoder", "sw.shard"]),
    ],
)
def test_loading_at_the_wrong_time_is_an_error(
    pool: RankPool, tmp_path: Path, function: Callable[[str], None], words: list[str]
) -> None:
    path = str(loading.save_one_file(tmp_path))
    for outcome in pool.attempt(2, function, path=path):
        assert outcome.raised == "LifecycleError"
        assert all(word in outcome.message for word in words)


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_model_loads_and_gives_the_same_logits(
    pool: RankPool, tmp_path: Path, tied: bool
) -> None:
    pytest.importorskip("transformers")
    loading.plain_llama(tied).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    for same, is_loud in pool.run(
        2, loading.llama_logits, path=str(tmp_path), shape=(1, 2), tied=tied, timeout_s=120
    ):
        assert same
        assert is_loud


def test_a_hugging_face_model_is_initialised_by_its_own_rules(pool: RankPool) -> None:
    pytest.importorskip("transformers")
    for same, spread in pool.run(2, loading.llama_initial_values, shape=(1, 2), timeout_s=120):
        assert same
        assert 0.018 < spread < 0.022


def test_a_rank_lost_while_loading_is_named_on_the_others(pool: RankPool, tmp_path: Path) -> None:
    path = str(loading.save_one_file(tmp_path))
    for outcome in pool.attempt(3, loading.a_rank_dies_before_loading, path=path):
        if outcome.rank != 1:
            assert outcome.raised == "RankFailedError", outcome
            assert "rank 1" in outcome.message
            assert outcome.seconds < 10
