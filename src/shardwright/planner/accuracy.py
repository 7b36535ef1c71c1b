"""How far predictions are from measurements: errors by source and overall, and a baseline.

Sources are unequal in size and some share authors, so three views are given: over all rows, the
mean of sources' medians, and the order of pairs. Everything that is fitted is fitted without the
family of the row it is judged on.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "Judged",
    "Summary",
    "constant_utilisation",
    "percentile",
    "summarise",
]

_PAIR_DIFFERENCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One row with its prediction.

    Attributes:
        row_id: Its id.
        source: Where it was published.
        family: Sources that belong together.
        device: Device, as the row names it.
        group: What must agree for two rows to be compared as a pair.
        predicted: Tokens per second and device.
        measured: The same, measured.
        hardware_flops: Operations per token with recomputation, for the baseline.
        peak_flops: Of the device.
    """

    row_id: str
    source: str
    family: str
    device: str
    group: tuple[str, ...]
    predicted: float
    measured: float
    hardware_flops: float
    peak_flops: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Errors of some rows, as shares.

    Attributes:
        num_rows: Rows.
        median: Median of absolute errors.
        p90: 90th percentile of absolute errors.
        equal_source: Mean over sources of their medians.
        bias: Median of signed errors.
        pair_order: Share of pairs that differ by over 5 % whose order is right; None without pairs.
        num_pairs: Pairs.
    """

    num_rows: int
    median: float
    p90: float
    equal_source: float
    bias: float
    pair_order: float | None
    num_pairs: int


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values don't exceed, interpolated."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def summarise(
    rows: Sequence[Judged], predicted: Callable[[Judged], float] | None = None
) -> Summary:
    """Errors of some rows.

    Args:
        rows: At least one.
        predicted: Another prediction than the rows' own, such as the baseline's.
    """
    value = predicted or (lambda row: row.predicted)
    signed = [value(row) / row.measured - 1 for row in rows]
    absolute = [abs(error) for error in signed]
    by_source: dict[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, absolute, strict=True):
        by_source[row.source].append(error)
    right, pairs = _count_pairs(rows, value)
    return Summary(
        num_rows=len(rows),
        median=statistics.median(absolute),
        p90=percentile(absolute, 0.9),
        equal_source=statistics.mean(statistics.median(e) for e in by_source.values()),
        bias=statistics.median(signed),
        pair_order=right / pairs if pairs else None,
        num_pairs=pairs,
    )


def _count_pairs(rows: Sequence[Judged], value: Callable[[Judged], float]) -> tuple[int, int]:
    """Pairs of one group that truly differ, and those whose order is predicted."""
    groups: dict[tuple[str, ...], list[Judged]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    right = pairs = 0
    for members in groups.values():
        for index, first in enumerate(members):
            for second in members[index + 1 :]:
                low, high = sorted((first, second), key=lambda row: row.measured)
                if high.measured <= low.measured * (1 + _PAIR_DIFFERENCE):
                    continue
                pairs += 1
                right += value(high) > value(low)
    return right, pairs


def constant_utilisation(rows: Sequence[Judged]) -> Mapping[str, float]:
    """The baseline: one share of the peak per device, from other families' rows of that device.

    Args:
        rows: All rows.

    Returns:
        Tokens per second and device by row id. A device that only one family measured takes the
        median over all devices. Empty where all rows are of one family.
    """

    def share(row: Judged) -> float:
        return row.measured * row.hardware_flops / row.peak_flops

    found = {}
    for row in rows:
        others = [other for other in rows if other.family != row.family]
        same = [other for other in others if other.device == row.device]
        if others:
            chosen = statistics.median(share(other) for other in same or others)
            found[row.row_id] = chosen * row.peak_flops / row.hardware_flops
    return found
