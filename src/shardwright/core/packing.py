"""Where the parameters of a segment start, so that every cut between chunks falls where it may.

Most parameters may be cut between rows; those owned whole may not be cut at all. Where there are
none of the latter, parameters follow one another, each shifted by less than a row. Otherwise chunks
are filled like bins, and what may be cut flows through the room that is left:

    owner     |        0        |        1        |        2        |
    content   [ A A A A A A . c c c c . B B B B B D D D D . C C C C C ]
    may be cut    no          yes, c        no                no

Every second chunk has its whole parameters at its end, so that the room of two neighbours is one
run. Chunks are equal, since one call gathers them all; the smallest found is taken. Units take
turns in which owner has most, so that state and work of the whole model balance. Called by `layout`
alone; sizes and offsets are in elements.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.core.layout import ParameterSpec

__all__ = ["Packing", "pack_group", "round_up"]

Packing = tuple[int, list[tuple[int, int]]]
"""``(chunk_numel, [(parameter index, start), ...])``, by start."""

_SINGLE_SEGMENT_PADDING = 1 / 128
"""Share of padding below which one segment is taken without trying one per row width."""

_ALIGNMENT_PADDING = 1 / 1024
"""Share of padding that aligned chunks may cost."""

_ALIGNMENT_NUMEL = 64
"""Parameters whose size is a multiple of this come first, so that odd ones misalign nobody."""

_SMALL_STEPS = 64
"""Chunk sizes tried one by one before larger jumps."""


def pack_group(
    parameters: Sequence[ParameterSpec],
    indices: Sequence[int],
    num_owners: int,
    multiple: int,
    turn: int = 0,
) -> list[Packing]:
    """Pack parameters of one dtype into as few segments as padding allows.

    Args:
        parameters: All parameters of the unit.
        indices: Those to pack.
        num_owners: Chunks per segment.
        multiple: Chunk sizes are multiples of this.
        turn: Which owner is given the largest share of the parameters owned whole, if that
            costs nothing; modulo `num_owners`.

    Returns:
        One packing per segment.
    """
    whole = [i for i in indices if parameters[i].is_whole] if num_owners > 1 else []
    if not whole:
        return _pack_on_rows(parameters, indices, num_owners, multiple)
    rest = [i for i in indices if not parameters[i].is_whole]
    turn %= num_owners
    apart = [_pack_whole(parameters, whole, num_owners, multiple, turn)]
    if not rest:
        return apart
    apart += _pack_on_rows(parameters, rest, num_owners, multiple)
    most = sum(chunk for chunk, _ in apart)
    together = _pack_together(parameters, whole, rest, num_owners, multiple, most, turn)
    return apart if together is None else [together]


# --- on rows -------------------------------------------------------------------------------------


def _pack_on_rows(
    parameters: Sequence[ParameterSpec], indices: Sequence[int], num_owners: int, multiple: int
) -> list[Packing]:
    total = _load(parameters, indices)
    single = _pack(parameters, indices, num_owners, multiple)
    single_padding = single[0] * num_owners - total
    if single_padding <= total * _SINGLE_SEGMENT_PADDING:
        return [single]
    split = [
        _pack(parameters, group, num_owners, multiple)
        for group in _by_row_width(parameters, indices)
    ]
    split_padding = sum(chunk for chunk, _ in split) * num_owners - total
    return split if split_padding < single_padding else [single]


def _by_row_width(parameters: Sequence[ParameterSpec], indices: Iterable[int]) -> list[list[int]]:
    """Group parameters by row width; those of width 1 join the largest group."""
    groups: dict[int, list[int]] = {}
    for i in indices:
        groups.setdefault(parameters[i].row_numel, []).append(i)
    narrow = groups.pop(1, [])
    if not groups:
        return [narrow]
    largest = max(groups.values(), key=lambda g: sum(parameters[i].numel for i in g))
    largest.extend(narrow)
    return list(groups.values())


def _pack(
    parameters: Sequence[ParameterSpec], indices: Sequence[int], num_owners: int, multiple: int
) -> Packing:
    """Find the smallest chunk, and each parameter's start, for which every cut falls on a row."""
    order = sorted(indices, key=lambda i: parameters[i].numel % _ALIGNMENT_NUMEL != 0)
    total = _load(parameters, order)
    least = -(-total // num_owners)
    step = _step(parameters, order, least, multiple)
    chunk = max(round_up(least, step), step)
    starts: list[tuple[int, int]] = []
    for attempt in itertools.count():
        starts, end = _place(parameters, order, chunk)
        missing = end - chunk * num_owners
        if missing <= 0:
            break
        # Small steps find the smallest chunk; tiny rows with many owners would take too many.
        is_near = attempt < _SMALL_STEPS
        chunk += step if is_near else round_up(-(-missing // num_owners), step)
    return chunk, starts


def _step(
    parameters: Sequence[ParameterSpec], on_rows: Sequence[int], least: int, multiple: int
) -> int:
    """What chunks must be multiples of, given that they have `least` elements or more."""
    # A parameter no larger than a chunk is crossed by one cut at most and can be shifted to it.
    step = math.lcm(
        multiple, *(parameters[i].row_numel for i in on_rows if parameters[i].numel > least)
    )
    aligned = math.lcm(step, _ALIGNMENT_NUMEL)
    return aligned if _is_cheap(least, aligned) else step


def _is_cheap(chunk: int, step: int = _ALIGNMENT_NUMEL) -> bool:
    """Whether rounding a chunk to `step` costs next to nothing."""
    return step <= chunk * _ALIGNMENT_PADDING


def _place(
    parameters: Sequence[ParameterSpec], order: Sequence[int], chunk: int
) -> tuple[list[tuple[int, int]], int]:
    """Place parameters one after another, shifting each so that the first cut in it is a row."""
    starts: list[tuple[int, int]] = []
    end = 0
    for i in order:
        start = _shifted(parameters[i], end, chunk)
        starts.append((i, start))
        end = start + parameters[i].numel
    return starts, end


def _shifted(spec: ParameterSpec, at: int, chunk: int) -> int:
    """Where a parameter starts, at `at` or less than a row later, so that its cut is a row."""
    cut = (at // chunk + 1) * chunk
    return at if at + spec.numel <= cut else at + (cut - at) % spec.row_numel


# --- owned whole ---------------------------------------------------------------------------------


def _pack_whole(
    parameters: Sequence[ParameterSpec],
    whole: Sequence[int],
    num_owners: int,
    multiple: int,
    turn: int,
) -> Packing:
    """Spread parameters owned whole over chunks of their own."""
    chunks = _turned(_spread(parameters, whole, num_owners), turn)
    fullest = max(_load(parameters, content) for content in chunks)
    step = _step(parameters, [], fullest, multiple)
    chunk = max(round_up(fullest, step), step)
    return chunk, _ordered(parameters, _place_whole(parameters, chunks, chunk))


def _pack_together(
    parameters: Sequence[ParameterSpec],
    whole: Sequence[int],
    rest: Sequence[int],
    num_owners: int,
    multiple: int,
    most: int,
    turn: int,
) -> Packing | None:
    """Find the smallest chunk, `most` or less, that holds its part of the whole ones and the rest.

    Chunk sizes are bisected: one that does is rarely followed by one that doesn't.
    """
    total = _load(parameters, (*whole, *rest))
    least = max(-(-total // num_owners), *(parameters[i].numel for i in whole))
    step = _step(parameters, rest, least, multiple)
    low, high = max(1, -(-least // step)), most // step
    best: Packing | None = None
    middle = low  # the smallest of all is tried first: it often does
    while low <= high:
        starts = _fill(parameters, whole, rest, num_owners, middle * step, turn)
        if starts is None:
            low = middle + 1
        else:
            best, high = (middle * step, starts), middle - 1
        middle = (low + high) // 2
    return best


def _fill(
    parameters: Sequence[ParameterSpec],
    whole: Sequence[int],
    rest: Sequence[int],
    num_owners: int,
    chunk: int,
    turn: int,
) -> list[tuple[int, int]] | None:
    """Place whole parameters, spread if that leaves room for the rest and else close together."""
    spread = _spread(parameters, whole, num_owners)
    for chunks in (_turned(spread, turn), spread, _crowd(parameters, whole, chunk)):
        if len(chunks) > num_owners or any(_load(parameters, c) > chunk for c in chunks):
            continue
        placed = _place_whole(parameters, chunks, chunk)
        filled = _flow(parameters, rest, _gaps(parameters, placed, num_owners * chunk), chunk)
        if filled is not None:
            return _ordered(parameters, [*placed, *filled])
    return None


def _load(parameters: Sequence[ParameterSpec], indices: Iterable[int]) -> int:
    return sum(parameters[i].numel for i in indices)


def _largest_first(parameters: Sequence[ParameterSpec], indices: Iterable[int]) -> list[int]:
    return sorted(indices, key=lambda i: (-parameters[i].numel, i))


def _spread(
    parameters: Sequence[ParameterSpec], whole: Sequence[int], num_owners: int
) -> list[list[int]]:
    """Put each parameter, largest first, into the emptiest chunk; fullest chunks come first."""
    heap: list[tuple[int, int]] = [(0, owner) for owner in range(num_owners)]
    contents: list[list[int]] = [[] for _ in range(num_owners)]
    for i in _largest_first(parameters, whole):
        load, owner = heapq.heappop(heap)
        contents[owner].append(i)
        heapq.heappush(heap, (load + parameters[i].numel, owner))
    return [contents[owner] for _, owner in sorted((-load, owner) for load, owner in heap)]


def _turned(chunks: list[list[int]], turn: int) -> list[list[int]]:
    """Let the first chunk's content be that of chunk `turn`."""
    return chunks[len(chunks) - turn :] + chunks[: len(chunks) - turn]


def _crowd(
    parameters: Sequence[ParameterSpec], whole: Sequence[int], chunk: int
) -> list[list[int]]:
    """Put each parameter, largest first, into the first chunk with room for it."""
    room: list[int] = []
    contents: list[list[int]] = []
    for i in _largest_first(parameters, whole):
        numel = parameters[i].numel
        owner = next((o for o, free in enumerate(room) if numel <= free), len(room))
        if owner == len(room):
            room.append(chunk)
            contents.append([])
        room[owner] -= numel
        contents[owner].append(i)
    return contents


def _place_whole(
    parameters: Sequence[ParameterSpec], chunks: Sequence[Sequence[int]], chunk: int
) -> list[tuple[int, int]]:
    """Starts of whole parameters: at their chunk's beginning, in every second chunk at its end."""
    placed = []
    # Those at an end are aligned too, if the room behind them that this leaves is small.
    aligned = _ALIGNMENT_NUMEL if chunk % _ALIGNMENT_NUMEL == 0 and _is_cheap(chunk) else 1
    for owner, content in enumerate(chunks):
        free = chunk - _load(parameters, content)
        at = owner * chunk + (free // aligned * aligned if owner % 2 else 0)
        for i in sorted(content, key=lambda i: parameters[i].numel % _ALIGNMENT_NUMEL != 0):
            placed.append((i, at))
            at += parameters[i].numel
    return placed


def _gaps(
    parameters: Sequence[ParameterSpec], placed: Sequence[tuple[int, int]], stop: int
) -> list[tuple[int, int]]:
    """What of ``[0, stop)`` the placed parameters leave free, as ``(start, stop)``."""
    gaps, end = [], 0
    for i, start in _ordered(parameters, placed):
        if start > end:
            gaps.append((end, start))
        end = max(end, start + parameters[i].numel)
    return [*gaps, (end, stop)] if stop > end else gaps


def _flow(
    parameters: Sequence[ParameterSpec],
    rest: Sequence[int],
    gaps: list[tuple[int, int]],
    chunk: int,
) -> list[tuple[int, int]] | None:
    """Place parameters that may be cut, largest first, each into the smallest gap it fits."""
    placed = []
    for i in _largest_first(parameters, rest):
        spec = parameters[i]
        if not spec.numel:
            placed.append((i, 0))
            continue
        fits = [
            (stop - start, g)
            for g, (start, stop) in enumerate(gaps)
            if _shifted(spec, start, chunk) + spec.numel <= stop
        ]
        if not fits:
            return None
        _, g = min(fits)
        start, stop = gaps.pop(g)
        at = _shifted(spec, start, chunk)
        placed.append((i, at))
        left = [(start, at), (at + spec.numel, stop)]
        gaps += [(low, high) for low, high in left if high > low]
    return placed


def _ordered(
    parameters: Sequence[ParameterSpec], placed: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Sort starts; those without elements come before what starts at the same place."""
    return sorted(placed, key=lambda p: (p[1], p[1] + parameters[p[0]].numel, p[0]))


def round_up(value: int, step: int) -> int:
    """The least multiple of `step` that is `value` or more."""
    return -(-value // step) * step
