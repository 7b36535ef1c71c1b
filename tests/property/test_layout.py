"""Layouts of any parameters over any owners: each element once, whole rows, bounded padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from shardwright.core.layout import ITEMSIZE, ParameterSpec, Segment, UnitLayout, lay_out

SIZES = st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 11, 16, 31, 64, 129])
SHAPES = st.lists(SIZES, max_size=3).map(tuple)


@dataclass(frozen=True)
class Case:
    """What a layout was asked for, and the layout."""

    specs: tuple[ParameterSpec, ...]
    shard_size: int
    owners_per_shard: int
    multiple: int

    @property
    def layout(self) -> UnitLayout:
        return lay_out(
            "unit",
            self.specs,
            shard_size=self.shard_size,
            owners_per_shard=self.owners_per_shard,
            multiple=self.multiple,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtypes = draw(st.lists(st.sampled_from(sorted(ITEMSIZE)), min_size=1, max_size=2))
    specs = draw(
        st.lists(
            st.builds(
                ParameterSpec,
                name=st.just("p"),
                shape=SHAPES,
                dtype=st.sampled_from(dtypes),
                trainable=st.sampled_from([True, True, True, False]),
            ),
            min_size=1,
            max_size=9,
        )
    )
    return Case(
        tuple(specs),
        shard_size=draw(st.integers(1, 9)),
        owners_per_shard=draw(st.integers(1, 4)),
        multiple=draw(st.integers(1, 4)),
    )


def cuts(segment: Segment) -> range:
    return range(segment.chunk_numel, segment.numel, max(1, segment.chunk_numel))


@given(cases())
def test_every_element_of_every_parameter_has_exactly_one_owner(case: Case) -> None:
    layout = case.layout
    for index, spec in enumerate(case.specs):
        runs = [layout.rows(index, owner) for owner in range(layout.num_owners)]
        owned = [range(start, stop) for start, stop in runs if stop > start]
        expected = range(spec.num_rows) if spec.numel else range(0)
        assert [row for run in owned for row in run] == list(expected)


@given(cases())
def test_an_owner_has_of_a_parameter_what_its_chunk_holds_of_it(case: Case) -> None:
    layout = case.layout
    for index, place in enumerate(layout.placements):
        chunk = layout.segments[place.segment].chunk_numel
        for owner in range(layout.num_owners):
            low = max(place.start, owner * chunk)
            high = min(place.stop, (owner + 1) * chunk)
            start, stop = layout.rows(index, owner)
            assert (stop - start) * place.spec.row_numel == max(0, high - low)
            if stop > start:
                assert place.start + start * place.spec.row_numel == low


@given(cases())
def test_cuts_inside_a_parameter_fall_between_its_rows(case: Case) -> None:
    num_inside = 0
    for segment in case.layout.segments:
        for place in segment.placements:
            inside = [cut for cut in cuts(segment) if place.start < cut < place.stop]
            num_inside += len(inside)
            assert all((cut - place.start) % place.spec.row_numel == 0 for cut in inside)
    event(f"cuts inside a parameter: {min(num_inside, 3)}{'+' if num_inside > 2 else ''}")


@given(cases())
def test_parameters_lie_in_their_segment_and_never_overlap(case: Case) -> None:
    layout = case.layout
    for index, segment in enumerate(layout.segments):
        taken = sorted((p.start, p.stop) for p in segment.placements if p.spec.numel)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(taken))
        assert all(0 <= p.start <= p.stop <= segment.numel for p in segment.placements)
        assert all(p.segment == index for p in segment.placements)


@given(cases())
def test_every_parameter_is_placed_once_and_keeps_its_position(case: Case) -> None:
    layout = case.layout
    assert [p.index for p in layout.placements] == list(range(len(case.specs)))
    assert tuple(p.spec for p in layout.placements) == case.specs
    placed = [p for segment in layout.segments for p in segment.placements]
    assert sorted(placed, key=lambda p: p.index) == list(layout.placements)


@given(cases())
def test_a_segment_holds_one_dtype_and_only_trainable_or_only_frozen_parameters(
    case: Case,
) -> None:
    for segment in case.layout.segments:
        assert {p.spec.dtype for p in segment.placements} == {segment.dtype}
        assert {p.spec.trainable for p in segment.placements} == {segment.trainable}


@given(cases())
def test_segments_begin_at_a_multiple_of_their_item_size(case: Case) -> None:
    """The gathered buffer is one run of bytes, and each segment a typed view of it."""
    layout = case.layout
    offset = 0
    for segment in layout.segments:
        assert offset % ITEMSIZE[segment.dtype] == 0
        offset += segment.numel * ITEMSIZE[segment.dtype]
    assert layout.gathered_bytes == offset


@given(cases())
def test_chunks_are_multiples_of_what_was_asked_for_and_equal(case: Case) -> None:
    layout = case.layout
    assert layout.num_owners == case.shard_size * case.owners_per_shard
    for segment in layout.segments:
        assert segment.chunk_numel % case.multiple == 0
        assert segment.chunk_numel >= 1
        assert segment.num_owners == layout.num_owners
    assert layout.control_numel % case.multiple == 0


@given(cases())
def test_sizes_add_up_and_divide_over_the_owners(case: Case) -> None:
    layout = case.layout
    assert layout.used_numel == sum(spec.numel for spec in case.specs)
    assert layout.numel == layout.used_numel + layout.padding_numel
    assert layout.shard_numel * layout.shard_size == layout.numel
    assert layout.shard_bytes * layout.shard_size == layout.gathered_bytes
    assert layout.owned_numel * layout.num_owners == layout.numel
    assert layout.gradient_numel % layout.num_owners == 0


@given(cases())
def test_frozen_parameters_take_no_gradient_space(case: Case) -> None:
    layout = case.layout
    num_trainable = sum(spec.trainable for spec in case.specs)
    trainable = [s for s in layout.segments if s.trainable]
    control = -(-num_trainable // case.multiple) * case.multiple
    assert layout.control_numel == control
    assert [layout.segments[i] for i in layout.trainable_segments] == trainable
    assert layout.gradient_numel == sum(s.numel for s in trainable) + layout.num_owners * control
    if not num_trainable:
        assert layout.gradient_numel == 0


@given(cases(), st.data())
def test_a_run_of_owners_holds_the_union_of_what_each_holds(
    case: Case, data: st.DataObject
) -> None:
    layout = case.layout
    first = data.draw(st.integers(0, layout.num_owners - 1))
    count = data.draw(st.integers(1, layout.num_owners - first))
    for index in range(len(case.specs)):
        run = layout.rows(index, first, count)
        singles = [layout.rows(index, owner) for owner in range(first, first + count)]
        assert list(range(*run)) == [row for single in singles for row in range(*single)]


@given(cases())
def test_dividing_shards_further_moves_no_row_to_another_shard(case: Case) -> None:
    """An owner of a divided optimizer lies inside the shard that is gathered."""
    layout = case.layout
    per_shard = layout.owners_per_shard
    for index, spec in enumerate(case.specs):
        held = [layout.rows(index, s * per_shard, per_shard) for s in range(layout.shard_size)]
        rows = [row for run in held for row in range(*run)]
        assert rows == list(range(spec.num_rows if spec.numel else 0))


def padding_bound(segment: Segment, multiple: int) -> int:
    """Elements that the padding of a segment stays below.

    Per owner: two of the widest rows, and one step of the chunk size, which is a multiple of
    `multiple` and of the rows of every parameter that more than one cut may cross.

    A shift to a row boundary takes less than one row, and each cut causes one at most. The first
    chunk size for which all fit is less than one step above the last one for which they did not;
    by that time fewer than 2n cuts, for n owners, were passed.
    """
    specs = [p.spec for p in segment.placements if p.spec.numel]
    least = -(-segment.used_numel // segment.num_owners)
    step = math.lcm(multiple, *(s.row_numel for s in specs if s.numel > least))
    widest = max((s.row_numel for s in specs), default=0)
    return segment.num_owners * (2 * widest + step) + 1


@given(cases())
def test_padding_stays_below_two_rows_and_a_step_per_owner_and_segment(case: Case) -> None:
    for segment in case.layout.segments:
        assert segment.numel - segment.used_numel < padding_bound(segment, case.multiple)


@given(cases())
def test_padding_does_not_grow_with_the_common_multiple_of_row_widths(case: Case) -> None:
    """One segment per row width is the way out where widths have nothing in common."""
    layout = case.layout
    kinds = {(s.dtype, s.trainable) for s in layout.segments}
    for kind in kinds:
        segments = [s for s in layout.segments if (s.dtype, s.trainable) == kind]
        specs = [p.spec for s in segments for p in s.placements]
        used = sum(s.used_numel for s in segments)
        widths = ({s.row_numel for s in specs} - {1}) or {1}
        per_owner = sum(2 * width + math.lcm(case.multiple, width) for width in widths)
        padding = sum(s.numel for s in segments) - used
        assert padding <= max(used // 128, layout.num_owners * per_owner)
        event(f"segments of one kind: {len(segments)}")


@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 90), max_size=6),
    st.integers(0, 90),
    st.integers(1, 9),
)
def test_padding_of_matrices_of_one_width_is_less_than_a_row_per_owner(
    width: int, heights: list[int], extra: int, num_owners: int
) -> None:
    """Where one of them spans several chunks; small ones alone may waste up to two rows."""
    tallest = 1 + 2 * sum(heights) + extra
    specs = [ParameterSpec(name="w", shape=(h, width)) for h in [*heights, tallest]]
    layout = lay_out("unit", specs, shard_size=num_owners)
    assert layout.padding_numel < width * num_owners


@given(cases())
def test_the_same_parameters_are_laid_out_the_same_way_everywhere(case: Case) -> None:
    """Ranks compute layouts on their own and must agree."""
    assert case.layout == case.layout


@pytest.mark.parametrize(("replicas", "shard_size"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_owners_are_the_same_however_they_are_grouped(replicas: int, shard_size: int) -> None:
    specs = [
        ParameterSpec(name="a", shape=(13, 5)),
        ParameterSpec(name="b", shape=(7,)),
        ParameterSpec(name="c", shape=()),
    ]
    layout = lay_out("unit", specs, shard_size=shard_size, owners_per_shard=replicas)
    flat = lay_out("unit", specs, shard_size=6)
    assert layout.segments == flat.segments
