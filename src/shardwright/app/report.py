"""The closing account of a run: bytes sent and memory, computed and counted.

Renders the rows of `sw.ledger(model).reconcile()`; knows nothing of how they came about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from shardwright.runtime.ledger import ReconciliationRow

__all__ = ["print_account", "verdict"]

MIB = 2**20
GIB = 2**30


def print_account(console: Console, rows: Iterable[ReconciliationRow], *, num_steps: int) -> None:
    """Print the tables and the verdict.

    Args:
        console: Where to.
        rows: Of one rank.
        num_steps: Optimizer steps the traffic covers.
    """
    rows = list(rows)
    traffic = [row for row in rows if row.section == "traffic"]
    memory = [row for row in rows if row.section == "memory"]
    if traffic:
        console.print(_traffic_table(traffic, max(1, num_steps)))
    if memory:
        console.print(_memory_table(memory))
    console.print(Text(verdict(rows)))


def verdict(rows: Sequence[ReconciliationRow]) -> str:
    """Say in one line whether what was counted is what was computed."""
    different = [row.name for row in rows if row.difference]
    if not rows:
        return "nothing to account for: no bytes were sent or held by the engine"
    if different:
        return f"counted differs from computed in: {', '.join(different)}"
    return "counted = computed, to the byte"


def _traffic_table(rows: Sequence[ReconciliationRow], num_steps: int) -> Table:
    table = _table(
        "sent by one rank, validation included (MiB, 2^20 bytes)",
        ("", "per step", "in total", "computed", "bytes off"),
        has_notes=any(row.reason for row in rows),
    )
    for row in rows:
        per_step, total, computed = row.counted / num_steps, row.counted, row.computed
        values = [f"{value / MIB:,.3f}" for value in (per_step, total, computed)]
        _add(table, row, values)
    return table


def _memory_table(rows: Sequence[ReconciliationRow]) -> Table:
    largest = max(max(row.counted, row.computed) for row in rows)
    unit, power = ("GiB", 30) if largest >= GIB else ("MiB", 20)
    table = _table(
        f"memory held by one rank ({unit}, 2^{power} bytes)",
        ("", "counted", "computed", "bytes off"),
        has_notes=any(row.reason for row in rows),
    )
    for row in rows:
        values = [f"{value / 2**power:,.3f}" for value in (row.counted, row.computed)]
        _add(table, row, values)
    return table


def _add(table: Table, row: ReconciliationRow, values: Sequence[str]) -> None:
    cells = [row.name, *values, f"{row.difference:,}", row.reason]
    table.add_row(*(Text(cell) for cell in cells[: len(table.columns)]))


def _table(title: str, columns: Sequence[str], *, has_notes: bool) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right")
    if has_notes:
        table.add_column("note")
    return table
