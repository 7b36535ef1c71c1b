"""Parameters owned whole: every optimizer trains as in one process, those that need it too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import accounting, awkward, parity, whole
from tests.support.pool import RankPool

SHAPES = [(1, 2), (1, 3), (1, 4), (2, 2)]


def world_of(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def label(shape: object) -> str | None:
    return f"{shape[0]}x{shape[1]}" if isinstance(shape, tuple) else None


@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_elementwise_optimizers_equal_one_process_where_matrices_are_owned_whole(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    results = pool.run(
        world_of(shape), parity.compare_float64, strategy=strategy, shape=shape, whole="matrices"
    )
    assert results == [[]] * world_of(shape)


@pytest.mark.parametrize("settings", [{}, {"transport": "collective"}, {"units": None}], ids=str)
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hybrid_full_optimizer"])
def test_elementwise_optimizers_equal_one_process_where_everything_is_owned_whole(
    pool: RankPool, strategy: str, settings: dict[str, Any]
) -> None:
    results = pool.run(
        4, parity.compare_float64, strategy=strategy, shape=(2, 2), whole="all", **settings
    )
    assert results == [[]] * 4


@pytest.mark.parametrize(
    "name",
    [
        "accumulate, then several",
        "block shared",
        "frozen for a while",
        "frozen parts",
        "gradients replaced",
        "hooks on gradients",
        "LSTM",
        "nested units",
        "parameter unused on some ranks",
        "parameters unused everywhere",
        "parameters written by hand",
        "several backwards",
        "sizes of all kinds",
        "zero_grad to zeros",
        "zero_grad while accumulating",
    ],
)
@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=label)
def test_awkward_models_equal_one_process_where_everything_is_owned_whole(
    pool: RankPool, name: str, shape: tuple[int, int]
) -> None:
    results = pool.run(world_of(shape), awkward.compare, name=name, shape=shape, whole="all")
    assert results == [[]] * world_of(shape)


# --- matrix optimizers -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_optimizers_that_need_whole_parameters_equal_one_process(
    pool: RankPool, kind: str, strategy: str, shape: tuple[int, int]
) -> None:
    """In float64 gradients differ by 1e-16 or so, which Muon's bfloat16 iteration rounds away.

    It would show only where such a difference moved an element across a rounding boundary of
    bfloat16, 2e-3 apart: once in 1e13 elements.
    """
    worst = pool.run(
        world_of(shape), whole.worst_of_training, kind=kind, strategy=strategy, shape=shape
    )
    assert max(worst) <= 1e-9


@pytest.mark.parametrize("kind", ["adafactor foreach", "adafactor of attributes"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=label)
def test_adafactor_for_many_tensors_and_for_attributes_equals_one_process(
    pool: RankPool, kind: str, shape: tuple[int, int]
) -> None:
    worst = pool.run(
        world_of(shape),
        whole.worst_of_training,
        kind=kind,
        strategy="zero3",
        shape=shape,
    )
    assert max(worst) <= 1e-9


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=label)
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_the_same_gradients_give_bitwise_the_same_parameters_in_float32(
    pool: RankPool, kind: str, strategy: str, shape: tuple[int, int]
) -> None:
    results = pool.run(2, whole.differs_bitwise, kind=kind, strategy=strategy, shape=shape)
    assert results == [[], []]


@pytest.mark.parametrize("shape", [(1, 2), (1, 4), (2, 2)], ids=label)
def test_only_the_owner_keeps_state_and_gradients_stay_set(
    pool: RankPool, shape: tuple[int, int]
) -> None:
    found = pool.run(world_of(shape), whole.state_of_muon, shape=shape)
    replicas = shape[0]
    assert sum(num_states for num_states, *_ in found) == 7 * replicas
    for num_states, num_owned, all_set, _ in found:
        assert num_states == num_owned
        assert all_set


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_each_matrix_is_full_on_its_owner_and_empty_elsewhere(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    found = pool.run(
        world_of(shape),
        whole.shapes_of_shards,
        strategy=strategy,
        shape=shape,
        whole="matrices",
    )
    divided = 1 if strategy == "ddp" else shape[1]
    copies = world_of(shape) // divided
    if strategy == "hybrid_full_optimizer":
        copies = 1
    for parameter in zip(*found, strict=True):
        _, _, full, numel = parameter[0]
        if len(full) == 2:
            local = [shape_ for _, shape_, _, _ in parameter]
            assert set(local) <= {full, (0, full[1])}
            assert local.count(full) == copies
            assert numel == full[0] * full[1]


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=label)
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_bytes_are_counted_as_computed(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    for rows in pool.run(
        world_of(shape),
        accounting.reconciliation,
        strategy=strategy,
        shape=shape,
        micro_batches=3,
        precision={},
        settings={"whole": "matrices"},
    ):
        assert [row for row in rows if row[1] != row[2]] == []


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=label)
@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_live_storages_equal_the_formula_with_muon(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    for added, computed in pool.run(
        world_of(shape), whole.storages_against_formula, strategy=strategy, shape=shape
    ):
        assert added == computed


def test_a_description_names_what_is_owned_whole(pool: RankPool) -> None:
    names = {"blocks.0.up.weight", "blocks.2.down.weight"}
    for text, found in pool.run(2, whole.described, whole=sorted(names)):
        assert "2 parameters owned whole" in text
        assert found == names
    for _, found in pool.run(2, whole.described, whole=["head.weight"]):
        assert found == {"embedding.weight"}  # tied: one parameter, known by its first name


# --- decisions by size -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "hybrid_full_optimizer"])
@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_block_quantised_state_equals_one_process_where_large_parameters_are_owned_whole(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    worst = pool.run(
        world_of(shape), whole.block_quantised, strategy=strategy, shape=shape, whole=True
    )
    assert max(worst) <= 1e-9


@pytest.mark.parametrize("shape", [(1, 2), (1, 3)], ids=label)
def test_block_quantised_state_differs_from_one_process_on_rows(
    pool: RankPool, shape: tuple[int, int]
) -> None:
    """What the test above would find, were parameters divided."""
    worst = pool.run(
        world_of(shape), whole.block_quantised, strategy="zero3", shape=shape, whole=False
    )
    assert max(worst) > 1e-4


# --- several optimizers, several models ------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [("ddp", (1, 2)), ("zero2", (1, 2)), ("zero3", (1, 2)), ("hybrid", (2, 2))],
    ids=lambda v: label(v) or str(v),
)
@pytest.mark.parametrize("name", whole.SCRIPTS)
def test_scripts_with_several_groups_or_models_equal_one_process(
    pool: RankPool, name: str, strategy: str, shape: tuple[int, int]
) -> None:
    worst = pool.run(
        world_of(shape), whole.compare_script, name=name, strategy=strategy, shape=shape
    )
    assert max(worst) <= 1e-9
