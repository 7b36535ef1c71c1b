"""Slots of any units: none is shared by two that may be open at once, none is far too large."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import event, given
from hypothesis import strategies as st

from shardwright.core.slot_plan import SlotPlan, share_slots

WASTE = 1.25  # a slot is at most this much larger than each unit that uses it


@dataclass(frozen=True)
class Case:
    """Units in module order."""

    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    exclusive: tuple[bool, ...]
    distance: int

    @property
    def plan(self) -> SlotPlan:
        return share_slots(
            self.sizes, self.depths, exclusive=self.exclusive, distance=self.distance
        )

    def orders(self) -> list[int]:
        """Position of each unit among those of its depth."""
        seen: Counter[int] = Counter()
        orders = []
        for depth in self.depths:
            orders.append(seen[depth])
            seen[depth] += 1
        return orders


UNITS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 8, 9, 10, 11, 12, 80, 100, 101, 126]),
        st.integers(0, 2),
        st.sampled_from([False, False, False, True]),
    ),
    max_size=20,
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    units = draw(UNITS)
    return Case(
        sizes=tuple(u[0] for u in units),
        depths=tuple(u[1] for u in units),
        exclusive=tuple(u[2] for u in units),
        distance=draw(st.integers(0, 4)),
    )


def pairs_in_one_slot(case: Case) -> list[tuple[int, int]]:
    slot_of = case.plan.slot_of
    count = range(len(slot_of))
    return [(i, j) for i in count for j in count if i < j and slot_of[i] == slot_of[j] >= 0]


@given(cases())
def test_neighbours_within_the_distance_never_share(case: Case) -> None:
    orders = case.orders()
    pairs = pairs_in_one_slot(case)
    event(f"some share: {bool(pairs)}")
    assert all(orders[j] - orders[i] > case.distance for i, j in pairs)


@given(cases())
def test_units_of_different_depth_never_share(case: Case) -> None:
    assert all(case.depths[i] == case.depths[j] for i, j in pairs_in_one_slot(case))


@given(cases())
def test_a_unit_that_keeps_its_slot_has_it_alone(case: Case) -> None:
    assert not any(case.exclusive[i] or case.exclusive[j] for i, j in pairs_in_one_slot(case))


@given(cases())
def test_a_slot_has_room_for_each_unit_and_wastes_at_most_a_quarter_of_it(case: Case) -> None:
    plan = case.plan
    for size, slot in zip(case.sizes, plan.slot_of, strict=True):
        assert (slot == -1) == (size == 0)
        if size:
            assert size <= plan.sizes[slot] <= WASTE * size


@given(cases())
def test_every_slot_is_as_large_as_the_largest_unit_in_it_and_used(case: Case) -> None:
    plan = case.plan
    users: dict[int, list[int]] = {}
    for size, slot in zip(case.sizes, plan.slot_of, strict=True):
        if slot >= 0:
            users.setdefault(slot, []).append(size)
    assert [max(users[slot]) for slot in range(len(plan.sizes))] == list(plan.sizes)
    assert len(users) == len(plan.sizes)


@given(cases())
def test_a_larger_distance_never_needs_fewer_slots(case: Case) -> None:
    further = Case(case.sizes, case.depths, case.exclusive, case.distance + 1)
    assert len(further.plan.sizes) >= len(case.plan.sizes)


@given(cases())
def test_sharing_never_holds_more_than_slots_of_their_own_would(case: Case) -> None:
    assert sum(case.plan.sizes) <= sum(case.sizes)
