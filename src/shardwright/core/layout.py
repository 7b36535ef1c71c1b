"""Who owns which rows: a unit's parameters laid into one flat space, in pure integers.

The gathered buffer of a unit *is* its parameters: each lies contiguous, so nothing is copied into
or out of a gather. The space is cut into equal chunks, one per owner, and every cut falls between
rows of a parameter (dimension 0), so that a shard keeps its parameter's number of dimensions:

    segment   |<---- chunk ---->|<---- chunk ---->|<---- chunk ---->|
    owner     |        0        |        1        |        2        |
    content   [ q q q q k k k|k v v v v . up up up up|up down down ..]
                              ^ cuts fall on rows      . padding before `up`, less than one row

One segment serves where a chunk can hold a whole number of rows of every parameter that more than
one cut crosses; otherwise parameters are grouped into one segment per row width. Parameters of
different dtypes, and frozen ones, never share a segment. Parameters that their optimizer must see
whole are not cut at all; `packing` finds room for them.

The *gradient space* is the trainable segments followed by a small control segment, `control_numel`
elements per owner, in which each rank says which parameters it used. It travels with the gradient,
so that agreeing on unused parameters costs no collective of its own.

Shapes and offsets are in elements. Used by the engine, the planner and checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.errors import LayoutError
from shardwright.core.packing import pack_group, round_up

__all__ = ["ITEMSIZE", "ParameterSpec", "Placement", "Segment", "UnitLayout", "lay_out"]

ITEMSIZE: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of every dtype a parameter may be computed in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """What the layout needs to know of one parameter.

    Attributes:
        name: Fully qualified name in the model.
        shape: Shape on this tensor-parallel rank.
        dtype: Dtype it is computed in, a key of `ITEMSIZE`.
        trainable: Whether it receives gradients.
        is_whole: Whether one owner has all of it, so that no cut may fall inside.
        global_shape: Shape over all tensor-parallel ranks; `shape` where that axis has size 1.
        global_offset: Where `shape` starts within `global_shape`, per dimension.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    is_whole: bool = False
    global_shape: tuple[int, ...] = ()
    global_offset: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise LayoutError(
                f"parameter {self.name!r} has dtype {self.dtype}; sharding supports "
                f"{', '.join(ITEMSIZE)}. Convert it, or register it as a buffer."
            )
        if not self.global_shape:
            object.__setattr__(self, "global_shape", self.shape)
        if not self.global_offset:
            object.__setattr__(self, "global_offset", (0,) * len(self.shape))

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Rows that cuts may fall between: the size of dimension 0, or 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Elements per row, at least 1."""
        return max(1, math.prod(self.shape[1:]))

    @property
    def can_be_cut(self) -> bool:
        """Whether its rows may lie on several owners."""
        return self.num_rows > 1 and not self.is_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where one parameter lies.

    Attributes:
        spec: The parameter.
        index: Its position in the unit's list of parameters.
        segment: Index of its segment.
        start: Offset of its first element in the segment.
    """

    spec: ParameterSpec
    index: int
    segment: int
    start: int

    @property
    def stop(self) -> int:
        """Offset just past its last element in the segment."""
        return self.start + self.spec.numel


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A run of parameters of one dtype, cut into equal chunks.

    Attributes:
        dtype: Compute dtype of all its parameters.
        trainable: Whether its parameters receive gradients.
        num_owners: Chunks.
        chunk_numel: Elements per chunk.
        placements: Its parameters in order of offset.
    """

    dtype: str
    trainable: bool
    num_owners: int
    chunk_numel: int
    placements: tuple[Placement, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole segment, padding included."""
        return self.num_owners * self.chunk_numel

    @property
    def used_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(p.spec.numel for p in self.placements)


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """The flat space of one unit and who owns which part of it.

    Attributes:
        name: Unit name.
        shard_size: Ranks on the shard axis (S).
        owners_per_shard: Further division of each shard's chunk, over the replicate axis (R where
            the optimizer state is divided over replicas, else 1).
        segments: Segments, in order of their bytes in the gathered buffer.
        placements: One per parameter, in the unit's order.
        control_numel: Elements per owner of the control segment; 0 where nothing is trainable.
    """

    name: str
    shard_size: int
    owners_per_shard: int
    segments: tuple[Segment, ...]
    placements: tuple[Placement, ...]
    control_numel: int

    def __post_init__(self) -> None:
        for segment in self.segments:
            end = 0
            for p in segment.placements:
                assert p.start >= end, f"{p.spec.name} overlaps its predecessor"
                end = p.stop
            assert end <= segment.numel, f"segment of {self.name} is too small"

    @property
    def num_owners(self) -> int:
        """Chunks per segment: `shard_size * owners_per_shard`."""
        return self.shard_size * self.owners_per_shard

    @cached_property
    def numel(self) -> int:
        """Elements of the gathered space, padding included."""
        return sum(s.numel for s in self.segments)

    @cached_property
    def used_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(s.used_numel for s in self.segments)

    @property
    def padding_numel(self) -> int:
        """Elements of the gathered space that belong to no parameter."""
        return self.numel - self.used_numel

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffer, in compute dtypes."""
        return sum(s.numel * ITEMSIZE[s.dtype] for s in self.segments)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one shard rank's part of the gathered buffer, in compute dtypes."""
        return self.gathered_bytes // self.shard_size

    @property
    def shard_numel(self) -> int:
        """Elements of one shard rank's part."""
        return self.numel // self.shard_size

    @property
    def owned_numel(self) -> int:
        """Elements of one owner's part: what the optimizer holds."""
        return self.numel // self.num_owners

    @cached_property
    def trainable_segments(self) -> tuple[int, ...]:
        """Indices of the segments in the gradient space."""
        return tuple(i for i, s in enumerate(self.segments) if s.trainable)

    @cached_property
    def gradient_numel(self) -> int:
        """Elements of the gradient space: trainable segments and the control segment."""
        numel = sum(self.segments[i].numel for i in self.trainable_segments)
        return numel + self.num_owners * self.control_numel

    def rows(self, index: int, first_owner: int, num_owners: int = 1) -> tuple[int, int]:
        """Rows of a parameter that a run of owners holds.

        Args:
            index: The parameter's position in the unit.
            first_owner: First owner of the run.
            num_owners: Owners in the run.

        Returns:
            ``(start, stop)`` rows of dimension 0; equal where the run holds none. Of a parameter
            owned whole, all of them or none.
        """
        place = self.placements[index]
        segment = self.segments[place.segment]
        low = first_owner * segment.chunk_numel
        high = low + num_owners * segment.chunk_numel
        start = max(place.start, low)
        stop = min(place.stop, high)
        if stop <= start:
            return (0, 0)
        width = place.spec.row_numel
        return ((start - place.start) // width, (stop - place.start) // width)

    def owns_whole(self, index: int, owner: int) -> bool:
        """Whether a parameter is to lie whole with one owner, and this is it."""
        spec = self.placements[index].spec
        return spec.is_whole and self.rows(index, owner) == (0, spec.num_rows)


def lay_out(
    name: str,
    parameters: Sequence[ParameterSpec],
    *,
    shard_size: int,
    owners_per_shard: int = 1,
    multiple: int = 1,
    turn: int = 0,
) -> UnitLayout:
    """Lay a unit's parameters over its owners.

    Args:
        name: Unit name, for messages.
        parameters: In the unit's order.
        shard_size: Ranks on the shard axis, at least 1.
        owners_per_shard: Further division of each chunk over the replicate axis.
        multiple: Chunk sizes are multiples of this, so that an all-reduce of a chunk over that
            many replicas divides evenly.
        turn: Owner that is given most of the parameters owned whole, modulo the owners. Units
            that take turns balance optimizer state and work over the owners.

    Returns:
        The layout. A segment's padding is less than two of its widest rows per owner, plus what
        makes its chunks a whole number of rows of every parameter larger than a chunk; with one
        row width, less than one row per owner. Parameters owned whole may add up to the largest of
        them per owner but one: chunks are equal, and one must hold it.

    Raises:
        LayoutError: There are no parameters, or a size is below 1.
    """
    if shard_size < 1 or owners_per_shard < 1 or multiple < 1:
        raise LayoutError(
            f"unit {name!r}: sizes must be at least 1, found shard_size={shard_size}, "
            f"owners_per_shard={owners_per_shard}, multiple={multiple}"
        )
    if not parameters:
        raise LayoutError(f"unit {name!r} has no parameters to lay out")
    num_owners = shard_size * owners_per_shard
    groups: dict[tuple[int, str, bool], list[int]] = {}
    for index, spec in enumerate(parameters):
        key = (-ITEMSIZE[spec.dtype], spec.dtype, not spec.trainable)
        groups.setdefault(key, []).append(index)

    segments: list[Segment] = []
    for (_, dtype, frozen), indices in sorted(groups.items()):
        for chunk_numel, starts in pack_group(parameters, indices, num_owners, multiple, turn):
            places = tuple(
                Placement(spec=parameters[i], index=i, segment=len(segments), start=start)
                for i, start in starts
            )
            segments.append(
                Segment(
                    dtype=dtype,
                    trainable=not frozen,
                    num_owners=num_owners,
                    chunk_numel=chunk_numel,
                    placements=places,
                )
            )
    num_trainable = sum(spec.trainable for spec in parameters)
    return UnitLayout(
        name=name,
        shard_size=shard_size,
        owners_per_shard=owners_per_shard,
        segments=tuple(segments),
        placements=tuple(sorted((p for s in segments for p in s.placements), key=_by_index)),
        control_numel=round_up(num_trainable, multiple) if num_trainable else 0,
    )


def _by_index(place: Placement) -> int:
    return place.index
