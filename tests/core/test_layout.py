"""Layouts of known parameters: real decoder blocks, small examples worked by hand, and errors."""

from __future__ import annotations

import pytest

from shardwright.core.errors import LayoutError
from shardwright.core.layout import ParameterSpec, Placement, Segment, UnitLayout, lay_out

# hidden, feed-forward, keys and values
LLAMA_7B = (4096, 11008, 4096)
LLAMA_8B = (4096, 14336, 1024)
LLAMA_70B = (8192, 28672, 1024)
NUM_OWNERS = [2, 3, 8, 64, 512]


def spec(
    *shape: int, dtype: str = "float32", trainable: bool = True, name: str = "p"
) -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype=dtype, trainable=trainable)


def decoder_block(hidden: int, ffn: int, kv: int) -> list[ParameterSpec]:
    shapes = {
        "attention_norm": (hidden,),
        "q": (hidden, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, hidden),
        "ffn_norm": (hidden,),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    return [ParameterSpec(name=n, shape=s, dtype="bfloat16") for n, s in shapes.items()]


# --- real blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_owners", NUM_OWNERS)
@pytest.mark.parametrize("block", [LLAMA_7B, LLAMA_8B, LLAMA_70B], ids=["7B", "8B", "70B"])
def test_padding_of_a_llama_block_is_under_1_1_percent(
    block: tuple[int, int, int], num_owners: int
) -> None:
    layout = lay_out("block", decoder_block(*block), shard_size=num_owners)
    assert layout.padding_numel < 0.011 * layout.used_numel
    divided = lay_out(
        "block", decoder_block(*block), shard_size=2, owners_per_shard=num_owners // 2 or 1
    )
    assert divided.padding_numel < 0.011 * divided.used_numel


@pytest.mark.parametrize("block", [LLAMA_7B, LLAMA_8B, LLAMA_70B], ids=["7B", "8B", "70B"])
def test_a_llama_block_over_two_owners_needs_no_padding_at_all(block: tuple[int, int, int]) -> None:
    layout = lay_out("block", decoder_block(*block), shard_size=2)
    assert layout.padding_numel == 0
    assert len(layout.segments) == 1


def test_a_block_has_as_many_elements_as_its_shapes_say() -> None:
    layout = lay_out("block", decoder_block(*LLAMA_8B), shard_size=8)
    hidden, ffn, kv = LLAMA_8B
    assert (
        layout.used_numel == 2 * hidden * hidden + 2 * kv * hidden + 3 * ffn * hidden + 2 * hidden
    )
    assert layout.gathered_bytes == 2 * layout.numel
    assert layout.control_numel == 9


# --- small examples ------------------------------------------------------------------------------


def test_one_owner_has_everything_without_padding() -> None:
    layout = lay_out("u", [spec(5, 3), spec(7), spec()], shard_size=1)
    assert layout.padding_numel == 0
    assert [layout.rows(i, 0) for i in range(3)] == [(0, 5), (0, 7), (0, 1)]


def test_a_matrix_is_cut_between_rows_and_the_last_owner_has_fewer() -> None:
    layout = lay_out("u", [spec(5, 3)], shard_size=2)
    assert layout.segments[0].chunk_numel == 9
    assert [layout.rows(0, owner) for owner in (0, 1)] == [(0, 3), (3, 5)]
    assert layout.padding_numel == 3


def test_a_scalar_lies_on_one_owner_as_its_only_row() -> None:
    layout = lay_out("u", [spec()], shard_size=3)
    assert [layout.rows(0, owner) for owner in range(3)] == [(0, 1), (0, 0), (0, 0)]
    assert spec().num_rows == spec().row_numel == spec().numel == 1


def test_a_matrix_is_shifted_so_that_the_cut_in_it_falls_between_its_rows() -> None:
    layout = lay_out("u", [spec(1, 5), spec(4, 2)], shard_size=2)
    assert layout.segments[0].chunk_numel == 8
    assert [(p.start, p.stop) for p in layout.placements] == [(0, 5), (6, 14)]
    assert [layout.rows(1, owner) for owner in (0, 1)] == [(0, 1), (1, 4)]


def test_a_row_that_would_be_cut_moves_behind_the_cut_whole() -> None:
    layout = lay_out("u", [spec(4), spec(1, 5), spec(1, 5)], shard_size=3)
    assert layout.segments[0].chunk_numel == 5
    assert [p.start for p in layout.placements] == [0, 5, 10]


def test_rows_of_a_tensor_with_three_dimensions_are_its_slices_along_the_first() -> None:
    layout = lay_out("u", [spec(6, 2, 5)], shard_size=3)
    assert layout.placements[0].spec.row_numel == 10
    assert [layout.rows(0, owner) for owner in range(3)] == [(0, 2), (2, 4), (4, 6)]
    assert layout.padding_numel == 0


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_a_parameter_without_elements_belongs_to_nobody_and_costs_nothing(
    shape: tuple[int, ...],
) -> None:
    layout = lay_out("u", [spec(8), spec(*shape)], shard_size=2)
    assert layout.padding_numel == 0
    assert [layout.rows(1, owner) for owner in (0, 1)] == [(0, 0), (0, 0)]


def test_parameters_that_are_all_empty_still_have_a_layout() -> None:
    layout = lay_out("u", [spec(0, 3), spec(0)], shard_size=2, multiple=3)
    assert layout.used_numel == 0
    assert layout.segments[0].chunk_numel == 3


def test_wider_dtypes_come_first_and_frozen_parameters_after_trainable_ones() -> None:
    layout = lay_out(
        "u",
        [
            spec(4, dtype="bfloat16", trainable=False),
            spec(4, dtype="float16"),
            spec(4, dtype="float64", trainable=False),
            spec(4, dtype="bfloat16"),
            spec(4, dtype="float32"),
        ],
        shard_size=2,
    )
    assert [(s.dtype, s.trainable) for s in layout.segments] == [
        ("float64", False),
        ("float32", True),
        ("bfloat16", True),
        ("bfloat16", False),
        ("float16", True),
    ]
    assert layout.gathered_bytes == 4 * (8 + 4 + 2 + 2 + 2)
    assert layout.trainable_segments == (1, 2, 4)


def test_the_control_segment_has_an_element_per_trainable_parameter_and_owner() -> None:
    specs = [spec(8), spec(8), spec(8), spec(8, trainable=False)]
    layout = lay_out("u", specs, shard_size=2, multiple=2)
    assert layout.control_numel == 4
    assert layout.gradient_numel == 24 + 2 * 4
    frozen = lay_out("u", specs[3:], shard_size=2, multiple=2)
    assert (frozen.control_numel, frozen.gradient_numel) == (0, 0)


def test_a_small_odd_parameter_in_front_misaligns_none_of_those_behind() -> None:
    layout = lay_out("u", [spec(3), spec(256, 64), spec(64)], shard_size=2)
    assert [p.start for p in layout.placements] == [16448, 0, 16384]
    assert [p.index for p in layout.segments[0].placements] == [1, 2, 0]


def test_matrices_whose_widths_have_no_common_row_get_a_segment_each() -> None:
    layout = lay_out("u", [spec(128, 101), spec(128, 103), spec(7)], shard_size=2)
    assert [{p.index for p in s.placements} for s in layout.segments] == [{0}, {1, 2}]
    assert layout.padding_numel < 2 * 103


ROWS_OF_TEN = [spec(1, 10) for _ in range(15)]


def test_parameters_of_half_a_chunk_waste_less_than_two_rows_and_a_step_per_owner() -> None:
    layout = lay_out("u", ROWS_OF_TEN, shard_size=8)
    assert layout.padding_numel < 8 * (2 * 10 + 1)


def test_the_smallest_chunk_is_chosen_that_has_room_for_all() -> None:
    """Two rows per owner fit fifteen rows on eight owners, with one row of padding."""
    layout = lay_out("u", ROWS_OF_TEN, shard_size=8)
    assert layout.segments[0].chunk_numel == 20
    assert layout.padding_numel == 10


def test_a_chunk_divides_evenly_over_the_replicas_it_is_reduced_over() -> None:
    layout = lay_out("u", [spec(10)], shard_size=2, multiple=4)
    assert layout.segments[0].chunk_numel == 8


def test_a_shard_of_a_tensor_parallel_slice_knows_where_it_lies() -> None:
    plain = spec(4, 6)
    assert plain.global_shape == (4, 6)
    assert plain.global_offset == (0, 0)
    part = ParameterSpec(name="p", shape=(4, 3), global_shape=(4, 6), global_offset=(0, 3))
    assert (part.global_shape, part.global_offset, part.numel) == ((4, 6), (0, 3), 12)


# --- errors --------------------------------------------------------------------------------------


def test_a_dtype_that_cannot_be_sharded_is_refused_with_the_parameters_name() -> None:
    with pytest.raises(LayoutError) as caught:
        spec(3, dtype="int64", name="blocks.0.table")
    text = str(caught.value)
    assert "'blocks.0.table' has dtype int64" in text
    assert all(dtype in text for dtype in ("float64", "float32", "bfloat16", "float16"))
    assert "register it as a buffer" in text


def test_a_unit_without_parameters_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"unit 'blocks\.0' has no parameters"):
        lay_out("blocks.0", [], shard_size=2)


@pytest.mark.parametrize(
    "sizes",
    [
        {"shard_size": 0},
        {"shard_size": -1},
        {"shard_size": 2, "owners_per_shard": 0},
        {"shard_size": 2, "multiple": 0},
    ],
)
def test_sizes_below_one_are_refused_and_named(sizes: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match=r"unit 'u': sizes must be at least 1") as caught:
        lay_out("u", [spec(3)], **sizes)
    assert all(f"{name}={value}" in str(caught.value) for name, value in sizes.items())


@pytest.mark.parametrize(("starts", "chunk"), [((0, 3), 4), ((0, 5), 4)])
def test_a_layout_whose_parameters_overlap_or_overrun_cannot_be_made(
    starts: tuple[int, int], chunk: int
) -> None:
    places = tuple(
        Placement(spec=spec(4), index=i, segment=0, start=start) for i, start in enumerate(starts)
    )
    segment = Segment(
        dtype="float32", trainable=True, num_owners=2, chunk_numel=chunk, placements=places
    )
    with pytest.raises(AssertionError, match=r"overlaps|too small"):
        UnitLayout(
            name="u",
            shard_size=2,
            owners_per_shard=1,
            segments=(segment,),
            placements=places,
            control_numel=2,
        )
