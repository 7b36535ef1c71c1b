"""A table of measurements from a CSV file, every row with all the columns the planner knows."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from shardwright.core.errors import SpecError, nearest
from shardwright.planner.columns import Column
from shardwright.planner.text_files import read_text

__all__ = ["MeasuredTable", "read_table"]


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """Rows of a table.

    Attributes:
        rows: Columns by name; a column that the file lacks holds what its absence means.
        note: Which columns of the file nobody reads; empty where all are known.
    """

    rows: list[dict[str, str]]
    note: str = ""


def read_table(path: Path | None, columns: Sequence[Column]) -> MeasuredTable:
    """Read a table.

    Args:
        path: A CSV file with a line of headings; None for no table.
        columns: What it may hold.

    Raises:
        SpecError: It can't be read, lacks a needed column, has two rows of one id, or a line has
            more cells than there are headings; with fewer, its last ones are empty.
    """
    if path is None:
        return MeasuredTable(rows=[])
    try:
        first, *lines = _lines(path) or [(1, [])]
    except csv.Error as error:
        raise SpecError(f"the table {str(path)!r} must be CSV; found: {error}") from error
    headings = [heading.strip() for heading in first[1]]
    repeated = [name for name, count in Counter(headings).items() if count > 1]
    if repeated:
        raise SpecError(f"the table {str(path)!r} has two columns {repeated[0]!r}; rename one")
    if not lines:
        raise SpecError(f"the table {str(path)!r} has no rows below its headings")
    missing = [c.name for c in columns if c.is_required and c.name not in headings]
    if missing:
        raise SpecError(
            f"the table {str(path)!r} lacks the columns {', '.join(missing)}; it has "
            f"{', '.join(headings)}"
        )
    absent = {c.name: c.absent for c in columns if c.name not in headings}
    rows = []
    for number, cells in lines:
        if len(cells) > len(headings):
            raise SpecError(
                f"the table {str(path)!r} has {len(headings)} columns, and {len(cells)} cells in "
                f"line {number}; quote cells that hold commas"
            )
        named = zip_longest(headings, map(str.strip, cells), fillvalue="")
        row = {**absent, **dict(named)}
        rows.append(row | {"id": row["id"] or f"line {number}"})
    _refuse_twins(path, [row["id"] for row in rows])
    return MeasuredTable(rows=rows, note=_unread(path, headings, [c.name for c in columns]))


def _refuse_twins(path: Path, ids: Sequence[str]) -> None:
    twins = [name for name, count in Counter(ids).items() if count > 1]
    if twins:
        raise SpecError(
            f"the table {str(path)!r} has several rows with the id {twins[0]!r}; ids must be unique"
        )


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Each line that isn't blank, with its number in the file."""
    reader = csv.reader(io.StringIO(read_text(path, "table"), newline=""), strict=True)
    return [(reader.line_num, cells) for cells in reader if any(cells)]


def _unread(path: Path, headings: Sequence[str], known: Sequence[str]) -> str:
    """Say which columns are not read, and what a name that is like a known one may mean."""
    unread = [name for name in headings if name not in known]
    if not unread:
        return ""
    meant = []
    for name in unread:
        hint, question, _ = nearest(name, [k for k in known if k not in headings]).partition("?")
        if question:
            meant.append(f"{name!r}: {hint}?")
    text = f"columns of {str(path)!r} that are not read: {', '.join(unread)}"
    return "; ".join([text, *meant])
