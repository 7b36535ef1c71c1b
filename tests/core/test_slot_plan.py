"""Slots of small models, worked by hand."""

from __future__ import annotations

import pytest

from shardwright.core.slot_plan import share_slots


def shared(sizes: list[int], *, distance: int, depths: list[int] | None = None) -> tuple[int, ...]:
    return share_slots(
        sizes, depths or [1] * len(sizes), exclusive=[False] * len(sizes), distance=distance
    ).slot_of


@pytest.mark.parametrize("num_units", range(1, 7))
@pytest.mark.parametrize("distance", range(6))
def test_equal_units_take_one_slot_more_than_the_distance_in_a_ring(
    num_units: int, distance: int
) -> None:
    plan = share_slots(
        [7] * num_units, [1] * num_units, exclusive=[False] * num_units, distance=distance
    )
    num_slots = min(num_units, distance + 1)
    assert plan.sizes == (7,) * num_slots
    assert plan.slot_of == tuple(i % num_slots for i in range(num_units))


def test_the_root_has_a_slot_of_its_own_beside_the_ring_of_its_blocks() -> None:
    plan = share_slots([9, 7, 7, 7, 7], [0, 1, 1, 1, 1], exclusive=[False] * 5, distance=1)
    assert plan.slot_of == (0, 1, 2, 1, 2)
    assert plan.sizes == (9, 7, 7)


def test_a_slot_grows_to_the_largest_of_the_units_of_like_size_that_share_it() -> None:
    plan = share_slots([80, 100, 90], [1, 1, 1], exclusive=[False] * 3, distance=0)
    assert plan.sizes == (100,)


def test_a_unit_larger_by_more_than_a_quarter_gets_a_slot_of_its_own() -> None:
    assert shared([80, 100], distance=0) == (0, 0)
    assert shared([80, 101], distance=0) == (0, 1)
    assert shared([101, 80], distance=0) == (0, 1)


def test_likeness_is_measured_against_all_units_of_a_class_not_only_the_last() -> None:
    assert shared([80, 100, 120], distance=0) == (0, 0, 1)
    assert shared([100, 80, 120], distance=0) == (0, 0, 1)


def test_the_slot_that_was_used_longest_ago_is_taken_first() -> None:
    # The unlike unit in the middle lets both slots of the ring become free at once.
    assert shared([8, 8, 99, 8, 8], distance=1) == (0, 1, 2, 0, 1)


def test_a_unit_without_parameters_needs_no_slot_but_counts_as_a_neighbour() -> None:
    plan = share_slots([8, 0, 8], [1, 1, 1], exclusive=[False] * 3, distance=1)
    assert plan.slot_of == (0, -1, 0)
    assert plan.sizes == (8,)


def test_units_that_keep_their_slot_share_it_with_none() -> None:
    plan = share_slots([8, 8, 8, 8], [1] * 4, exclusive=[False, True, False, True], distance=0)
    assert plan.slot_of == (0, 1, 0, 2)
    assert plan.sizes == (8, 8, 8)


def test_nested_units_never_take_the_slot_of_those_around_them() -> None:
    depths = [0, 1, 2, 2, 1, 2, 2]
    assert shared([8] * 7, distance=0, depths=depths) == (0, 1, 2, 2, 1, 2, 2)
    assert shared([8] * 7, distance=1, depths=depths) == (0, 1, 2, 3, 4, 2, 3)


def test_no_units_need_no_slots() -> None:
    plan = share_slots([], [], exclusive=[], distance=2)
    assert (plan.sizes, plan.slot_of) == ((), ())


def test_descriptions_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        share_slots([8, 8], [1], exclusive=[False, False], distance=0)
