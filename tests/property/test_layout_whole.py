"""Parameters owned whole: never cut, each on one owner, with padding that has a bound."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from shardwright.core.layout import ParameterSpec, UnitLayout, lay_out

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 11, 16, 31, 64, 129])
SHAPES = st.lists(SIZES, max_size=3).map(tuple)


@dataclass(frozen=True)
class Case:
    """What a layout was asked for, and the layout."""

    specs: tuple[ParameterSpec, ...]
    shard_size: int
    owners_per_shard: int
    multiple: int
    turn: int

    @property
    def layout(self) -> UnitLayout:
        return lay_out(
            "unit",
            self.specs,
            shard_size=self.shard_size,
            owners_per_shard=self.owners_per_shard,
            multiple=self.multiple,
            turn=self.turn,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    specs = st.builds(
        ParameterSpec,
        name=st.just("p"),
        shape=SHAPES,
        dtype=st.sampled_from(["float32", "float32", "bfloat16"]),
        trainable=st.sampled_from([True, True, True, False]),
        is_whole=st.booleans(),
    )
    return Case(
        tuple(draw(st.lists(specs, min_size=1, max_size=12))),
        shard_size=draw(st.integers(1, 9)),
        owners_per_shard=draw(st.integers(1, 4)),
        multiple=draw(st.integers(1, 4)),
        turn=draw(st.integers(0, 40)),
    )


@given(cases())
def test_every_row_has_exactly_one_owner_and_a_whole_parameter_has_one(case: Case) -> None:
    layout = case.layout
    for index, spec in enumerate(case.specs):
        runs = [layout.rows(index, owner) for owner in range(layout.num_owners)]
        owned = [range(start, stop) for start, stop in runs if stop > start]
        everything = range(spec.num_rows) if spec.numel else range(0)
        assert [row for run in owned for row in run] == list(everything)
        if spec.is_whole:
            assert set(runs) <= {(0, 0), (0, spec.num_rows)}
            assert len(owned) == bool(spec.numel)


@given(cases())
def test_parameters_lie_in_their_segment_never_overlap_and_are_cut_on_rows(case: Case) -> None:
    layout = case.layout
    assert tuple(p.spec for p in layout.placements) == case.specs
    for index, segment in enumerate(layout.segments):
        assert {(p.spec.dtype, p.spec.trainable) for p in segment.placements} == {
            (segment.dtype, segment.trainable)
        }
        taken = [(p.start, p.stop) for p in segment.placements if p.spec.numel]
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(taken))
        assert all(0 <= p.start <= p.stop <= segment.numel for p in segment.placements)
        assert all(p.segment == index for p in segment.placements)
        for p in segment.placements:
            cuts = range(segment.chunk_numel, segment.numel, segment.chunk_numel)
            inside = [cut - p.start for cut in cuts if p.start < cut < p.stop]
            assert all(offset % p.spec.row_numel == 0 for offset in inside)
            assert not (inside and p.spec.is_whole)


@given(cases())
def test_a_chunk_has_room_for_the_largest_whole_parameter_and_divides_as_asked(case: Case) -> None:
    for segment in case.layout.segments:
        whole = [p.spec.numel for p in segment.placements if p.spec.is_whole]
        assert segment.chunk_numel >= max(whole, default=1)
        assert segment.chunk_numel % case.multiple == 0


def per_kind(specs: tuple[ParameterSpec, ...]) -> list[list[ParameterSpec]]:
    kinds: dict[tuple[str, bool], list[ParameterSpec]] = {}
    for spec in specs:
        kinds.setdefault((spec.dtype, spec.trainable), []).append(spec)
    return list(kinds.values())


@given(cases())
def test_padding_is_at_most_the_largest_whole_one_per_other_owner_and_that_of_the_rest(
    case: Case,
) -> None:
    """The bound of filling the emptiest chunk first: its content ends within the mean before it.

    So the fullest of n chunks has at most 1/n of all whole elements, and (n - 1)/n of the largest.
    Laying whole parameters and the rest apart is always possible, and bounds what is chosen.
    """
    for specs in per_kind(case.specs):
        layout = replace(case, specs=tuple(specs)).layout
        whole = [s.numel for s in specs if s.is_whole]
        rest = tuple(s for s in specs if not s.is_whole)
        n = layout.num_owners
        bound = (n - 1) * max(whole, default=0) + n * case.multiple
        if rest:
            bound += replace(case, specs=rest).layout.padding_numel
        assert layout.padding_numel <= bound
        event(f"segments: {len(layout.segments)}")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3), st.integers(0, 5))
def test_chunks_of_whole_parameters_are_at_most_a_third_above_the_smallest_possible(
    sizes: list[int], num_owners: int, turn: int
) -> None:
    """Largest first into the emptiest stays within 4/3 - 1/(3n) of the best division."""
    specs = [ParameterSpec(name="p", shape=(n, 1), is_whole=True) for n in sizes]
    found = lay_out("u", specs, shard_size=num_owners, turn=turn).segments[0].chunk_numel
    best = min(
        max(sum(n for n, o in zip(sizes, owners, strict=True) if o == k) for k in range(num_owners))
        for owners in itertools.product(range(num_owners), repeat=len(sizes))
    )
    assert found * 3 * num_owners <= best * (4 * num_owners - 1)


@given(cases())
def test_one_owner_lays_whole_parameters_out_like_any_others(case: Case) -> None:
    alone = replace(case, shard_size=1, owners_per_shard=1)
    plain = replace(alone, specs=tuple(replace(s, is_whole=False) for s in case.specs))
    found, expected = alone.layout, plain.layout
    assert [(p.segment, p.start) for p in found.placements] == [
        (p.segment, p.start) for p in expected.placements
    ]


@given(cases())
def test_ranks_lay_whole_parameters_out_the_same_way(case: Case) -> None:
    assert case.layout == case.layout


# --- known examples ------------------------------------------------------------------------------


def whole(rows: int, columns: int) -> ParameterSpec:
    return ParameterSpec(name="w", shape=(rows, columns), is_whole=True)


def cut(rows: int, columns: int = 1) -> ParameterSpec:
    return ParameterSpec(name="c", shape=(rows, columns))


def owners_of(layout: UnitLayout, index: int) -> list[int]:
    return [
        o for o in range(layout.num_owners) if layout.rows(index, o)[1] > layout.rows(index, o)[0]
    ]


def test_equal_matrices_need_no_padding_where_their_number_divides_by_the_owners() -> None:
    layout = lay_out("u", [whole(16, 8)] * 6, shard_size=3)
    assert layout.padding_numel == 0
    assert sorted(owners_of(layout, i)[0] for i in range(6)) == [0, 0, 1, 1, 2, 2]


def test_what_may_be_cut_fills_the_room_beside_whole_ones_and_is_cut_there() -> None:
    """Whole 10 and 8, and 6 rows: chunks of 12, the rows two here and four there."""
    layout = lay_out("u", [whole(10, 1), whole(8, 1), cut(6)], shard_size=2)
    assert layout.segments[0].chunk_numel == 12
    assert layout.padding_numel == 0
    assert layout.rows(2, 0) == (0, 2)
    assert layout.rows(2, 1) == (2, 6)


def test_whole_ones_crowd_together_where_a_large_parameter_needs_the_other_chunks() -> None:
    layout = lay_out("u", [whole(3, 10), whole(3, 10), cut(18, 10)], shard_size=4)
    assert layout.padding_numel == 0
    assert owners_of(layout, 0) == owners_of(layout, 1)
    assert len(owners_of(layout, 2)) == 3


@pytest.mark.parametrize("turn", range(4))
def test_the_largest_share_falls_to_the_owner_whose_turn_it_is(turn: int) -> None:
    layout = lay_out("u", [whole(9, 1), whole(5, 1), cut(3)], shard_size=4, turn=turn)
    assert owners_of(layout, 0) == [turn]
    assert layout.segments[0].chunk_numel == 9


def test_a_matrix_alone_costs_a_chunk_of_its_size_on_every_owner() -> None:
    layout = lay_out("u", [whole(64, 32)], shard_size=8)
    assert layout.numel == 8 * 64 * 32
    assert layout.padding_numel == 7 * 64 * 32


LLAMA_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3]


@pytest.mark.parametrize(
    ("blocks", "owners", "padding"), [(1, 8, 1.16), (4, 8, 0.08), (8, 8, 0.08), (1, 2, 0.16)]
)
def test_units_of_several_decoder_blocks_need_less_padding(
    blocks: int, owners: int, padding: float
) -> None:
    specs = [whole(*shape) for shape in LLAMA_8B * blocks]
    layout = lay_out("u", [*specs, *[cut(4096)] * (2 * blocks)], shard_size=owners)
    assert layout.padding_numel <= padding * layout.used_numel
