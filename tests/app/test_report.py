"""The closing account: tables and verdict."""

from __future__ import annotations

import io

from rich.console import Console

from shardwright.app.report import print_account, verdict
from shardwright.runtime.ledger import ReconciliationRow

MIB, GIB = 2**20, 2**30


def row(
    section: str, name: str, computed: int, counted: int, reason: str = ""
) -> ReconciliationRow:
    return ReconciliationRow(
        section=section,
        name=name,
        computed=computed,
        counted=counted,
        reason=reason,
    )


def printed(*rows: ReconciliationRow, num_steps: int = 4, width: int = 120) -> str:
    stream = io.StringIO()
    print_account(Console(file=stream, width=width), rows, num_steps=num_steps)
    return stream.getvalue()


def test_traffic_is_shown_per_step_and_in_total() -> None:
    text = printed(row("traffic", "all_gather", 8 * MIB, 8 * MIB))
    assert "sent by one rank, validation included (MiB, 2^20 bytes)" in text
    assert "per step" in text
    line = next(line for line in text.splitlines() if "all_gather" in line)
    assert line.split() == ["all_gather", "2.000", "8.000", "8.000", "0"]


def test_memory_is_shown_in_the_unit_that_suits_it() -> None:
    assert "MiB, 2^20 bytes" in printed(row("memory", "masters", 3 * MIB, 3 * MIB))
    text = printed(row("memory", "masters", 3 * GIB, 3 * GIB), row("memory", "slots", 1, 1))
    assert "GiB, 2^30 bytes" in text
    assert next(line for line in text.splitlines() if "masters" in line).split()[1] == "3.000"


def test_equal_to_the_byte_is_said_only_where_it_is_so() -> None:
    equal, different = row("memory", "slots", 8, 8), row("memory", "masters", 8, 9, "padding")
    assert "counted = computed, to the byte" in printed(equal)
    assert verdict([equal, different]) == "counted differs from computed in: masters"
    assert "counted = computed" not in printed(equal, different)


def test_reasons_are_shown_where_there_are_any() -> None:
    assert "padding" in printed(row("memory", "masters", 8, 9, "padding"))
    assert "note" not in printed(row("memory", "masters", 8, 8))


def test_names_with_brackets_are_printed_as_they_are() -> None:
    assert "slots [2]" in printed(row("memory", "slots [2]", 8, 8))


def test_the_tables_fit_a_narrow_terminal() -> None:
    text = printed(row("traffic", "reduce_scatter over shard", 8 * MIB, 8 * MIB), width=80)
    assert any("reduce_scatter over shard" in line for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= 80


def test_no_rows_are_no_agreement() -> None:
    assert "nothing to account for" in printed()
