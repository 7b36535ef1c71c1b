"""Which buffers a run needs and which units share them: sizes and sharing, in pure integers.

Buffers are allocated once and reused, so the peak is a sum that can be written down before a run.
Two units may share a slot if they never need it at once: units of like size at the same depth,
further apart in module order than anything is gathered ahead or still being sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SlotPlan", "share_slots"]

_CLASS_RATIO = 1.25
"""Units within this ratio of each other's size may share a slot, which takes the larger size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """An assignment of units to slots.

    Attributes:
        sizes: Size of each slot, in the unit of measure that was given.
        slot_of: Slot index per unit; -1 for a unit that needs none.
    """

    sizes: tuple[int, ...]
    slot_of: tuple[int, ...]


def share_slots(
    sizes: Sequence[int],
    depths: Sequence[int],
    *,
    exclusive: Sequence[bool],
    distance: int,
) -> SlotPlan:
    """Assign slots so that a unit never shares with the `distance` units before or after it.

    Args:
        sizes: What each unit needs (bytes or elements); 0 for none.
        depths: Nesting depth of each unit, in module order; units of different depth are open at
            the same time and never share.
        exclusive: Units that must have a slot of their own.
        distance: How many neighbours in module order may hold their slots at the same time.

    Returns:
        The plan. Slots are reused least recently used first, as a ring.
    """
    slot_sizes: list[int] = []
    slot_of: list[int] = []
    classes: list[tuple[int, int, int, list[int]]] = []  # depth, smallest, largest, slots
    last_used: dict[int, int] = {}
    order_at_depth: dict[int, int] = {}
    for size, depth, alone in zip(sizes, depths, exclusive, strict=True):
        order = order_at_depth.get(depth, 0)
        order_at_depth[depth] = order + 1
        if size == 0:
            slot_of.append(-1)
            continue
        if alone:
            slot_of.append(len(slot_sizes))
            slot_sizes.append(size)
            continue
        position = _find_class(classes, depth, size)
        _, smallest, largest, slots = classes[position]
        classes[position] = (depth, min(smallest, size), max(largest, size), slots)
        free = [s for s in slots if order - last_used[s] > distance]
        if free:
            slot = min(free, key=last_used.__getitem__)
            slot_sizes[slot] = max(slot_sizes[slot], size)
        else:
            slot = len(slot_sizes)
            slot_sizes.append(size)
            slots.append(slot)
        last_used[slot] = order
        slot_of.append(slot)
    return SlotPlan(sizes=tuple(slot_sizes), slot_of=tuple(slot_of))


def _find_class(classes: list[tuple[int, int, int, list[int]]], depth: int, size: int) -> int:
    for position, (class_depth, smallest, largest, _) in enumerate(classes):
        if class_depth == depth and max(largest, size) <= _CLASS_RATIO * min(smallest, size):
            return position
    classes.append((depth, size, size, []))
    return len(classes) - 1
