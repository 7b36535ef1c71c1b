"""Compare the planner with published measurements: read tables, predict, report.

`planner/columns.py` says what a table holds. Speeds are judged with efficiencies fitted without the
family of the row's source.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwright.app.measured_table import read_table
from shardwright.core.errors import SpecError
from shardwright.planner.accuracy import (
    Judged,
    Summary,
    constant_utilisation,
    percentile,
    summarise,
)
from shardwright.planner.columns import FIT, MEMORY, SPEEDS
from shardwright.planner.text_files import write_text
from shardwright.planner.validate import (
    MemoryResult,
    RowResult,
    judged_rows,
    predict_fit_rows,
    predict_memory_rows,
    predict_rows,
)

__all__ = ["Report", "make_report", "print_report", "require_predictions", "write_rows"]

ROW_COLUMNS = (
    "id",
    "tokens_per_s_per_gpu",
    "step_time_s",
    "peak_mem_gib",
    "fits",
    "exposed_share",
    "warnings",
)

_NUM_WORST = 10


@dataclass(frozen=True, kw_only=True)
class Report:
    """Predictions of up to three tables.

    Attributes:
        speeds: Of the table of speeds.
        memory: Of the table of memory.
        fit: Of the table of what ran.
        notes: What in the tables was not read.
    """

    speeds: list[RowResult]
    memory: list[MemoryResult]
    fit: list[MemoryResult]
    notes: tuple[str, ...]


def make_report(speeds: Path | None, memory: Path | None, fit: Path | None) -> Report:
    """Read tables and predict their rows.

    Raises:
        SpecError: No table is given, or one can't be read.
    """
    if speeds is None and memory is None and fit is None:
        raise SpecError(
            "expected a table of measurements, found none; give ROWS.csv, --memory or --fit"
        )
    tables = [
        read_table(path, columns)
        for path, columns in ((speeds, SPEEDS), (memory, MEMORY), (fit, FIT))
    ]
    speed_rows, memory_rows, fit_rows = (table.rows for table in tables)
    return Report(
        speeds=predict_rows(speed_rows),
        memory=predict_memory_rows(memory_rows, speed_rows),
        fit=predict_fit_rows(fit_rows),
        notes=tuple(table.note for table in tables if table.note),
    )


def require_predictions(report: Report) -> None:
    """Refuse a table of which no row can be predicted.

    Raises:
        SpecError: There is one; the message counts the reasons.
    """
    tables: dict[str, list[RowResult] | list[MemoryResult]] = {
        "speeds": report.speeds,
        "memory": report.memory,
        "what ran": report.fit,
    }
    for name, results in tables.items():
        reasons = Counter(entry["reason"] for entry in _reasons(results))
        if results and sum(reasons.values()) == len(results):
            listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(4))
            raise SpecError(
                f"none of the {len(results)} rows of the table of {name} can be predicted: {listed}"
            )


def write_rows(report: Report, path: Path) -> None:
    """Write one line per row; a row that can't be predicted has its reason under warnings.

    Raises:
        SpecError: The file can't be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, ROW_COLUMNS)
    writer.writeheader()
    for result in report.speeds:
        writer.writerow(_speed_line(result))
    for found in (*report.memory, *report.fit):
        writer.writerow(_memory_line(found))
    write_text(path, text.getvalue(), "table of predictions")


def _speed_line(result: RowResult) -> dict[str, str]:
    line = {"id": result.row.get("id", "")}
    predicted = result.prediction
    if predicted is None:
        return {**line, "warnings": f"not predicted: {result.reason}"}
    return {
        **line,
        "tokens_per_s_per_gpu": f"{predicted.tokens_per_s_per_device:.6g}",
        "step_time_s": f"{predicted.step_s:.6g}",
        "peak_mem_gib": f"{predicted.memory.peak_gib:.4g}",
        "fits": str(predicted.fits).lower(),
        "exposed_share": f"{predicted.exposed_share:.4f}",
        "warnings": "; ".join(result.warnings),
    }


def _memory_line(result: MemoryResult) -> dict[str, str]:
    line = {"id": result.row.get("id", "")}
    if result.found is None:
        return {**line, "warnings": f"not predicted: {result.reason}"}
    found = result.found
    span = f"between {found.low_gib:.1f} and {found.high_gib:.1f} GiB"
    return {
        **line,
        "peak_mem_gib": f"{found.shown_gib:.4g}",
        "fits": str(found.fits).lower(),
        "warnings": "; ".join((span, *found.assumptions)),
    }


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    document: dict[str, Any] = {"notes": list(report.notes)}
    if report.speeds:
        document["speed"] = _speed_json(report.speeds)
    if report.memory:
        document["memory"] = _peaks_json(report.memory)
    if report.fit:
        document["fit"] = _fit_json(report.fit)
    return document


def _speed_json(results: Sequence[RowResult]) -> dict[str, Any]:
    data, other = _judged(results)
    document: dict[str, Any] = {
        "unpredicted": _reasons(results),
        "data_parallel_rows": sum(r.is_data_parallel for r in results),
        "data_parallel_predicted": len(data),
    }
    for name, rows in (("data_parallel", data), ("other", other)):
        if not rows:
            continue
        baseline = constant_utilisation(rows)
        constant = _constant(rows, baseline)
        document[name] = {
            "overall": asdict(summarise(rows)),
            "constant_utilisation": None if constant is None else asdict(constant),
            "by_source": {
                source: asdict(summarise(members)) for source, members in _by_source(rows)
            },
            "worst": [{"id": row.row_id, "error": round(row.error, 4)} for row in _worst(rows)],
        }
    return document


def _judged(results: Sequence[RowResult]) -> tuple[list[Judged], list[Judged]]:
    data = judged_rows([r for r in results if r.is_data_parallel])
    other = judged_rows([r for r in results if not r.is_data_parallel])
    return data, other


def _by_source(rows: Sequence[Judged]) -> list[tuple[str, list[Judged]]]:
    groups: dict[str, list[Judged]] = defaultdict(list)
    for row in rows:
        groups[row.source].append(row)
    return sorted(groups.items())


def _worst(rows: Sequence[Judged]) -> list[Judged]:
    return sorted(rows, key=lambda row: -abs(row.error))[:_NUM_WORST]


def _reasons(results: Sequence[RowResult] | Sequence[MemoryResult]) -> list[dict[str, str]]:
    return [{"id": r.row.get("id", ""), "reason": r.reason} for r in results if r.reason]


def _peak_errors(results: Sequence[MemoryResult]) -> list[float]:
    return [
        abs(r.found.shown_gib / r.measured_gib - 1)
        for r in results
        if r.found is not None and r.measured_gib
    ]


def _peaks_json(results: Sequence[MemoryResult]) -> dict[str, Any]:
    errors = _peak_errors(results)
    predicted = [r for r in results if r.found is not None]
    refused = [r.row["id"] for r in predicted if r.found is not None and not r.found.fits]
    return {
        "unpredicted": _reasons(results),
        "num_rows": len(errors),
        "median": statistics.median(errors) if errors else None,
        "p90": percentile(errors, 0.9) if errors else None,
        "called_unfit_though_measured": refused,
    }


def _fit_json(results: Sequence[MemoryResult]) -> dict[str, Any]:
    scored = [r for r in results if r.is_scorable and r.is_right is not None]
    easy = [r for r in scored if r.row.get("states_vs_gpu") == "exceed"]
    hard = [r for r in scored if r not in easy]
    errors = _peak_errors([r for r in results if r.is_scorable])
    return {
        "unpredicted": _reasons(results),
        "scorable": len(scored),
        "right": _share(scored, lambda r: bool(r.is_right)),
        "right_without_states_above_memory": _share(hard, lambda r: bool(r.is_right)),
        "falsely_fits": _share(scored, lambda r: not r.is_right and r.row["outcome"] == "oom"),
        "falsely_refused": _share(scored, lambda r: not r.is_right and r.row["outcome"] == "ran"),
        "always_ran": _share(scored, lambda r: r.row["outcome"] == "ran"),
        "wrong": [r.row["id"] for r in scored if not r.is_right],
        "peaks": len(errors),
        "peak_median": statistics.median(errors) if errors else None,
    }


def _share(results: Sequence[MemoryResult], holds: Any) -> float | None:
    return sum(map(holds, results)) / len(results) if results else None


def print_report(console: Console, report: Report) -> None:
    """Print the report for people."""
    for note in report.notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
    if report.speeds:
        _print_speeds(console, report.speeds)
    if report.memory:
        found = _peaks_json(report.memory)
        console.print(
            f"\n[bold]Peak memory[/bold] on {found['num_rows']} measured rows: median error "
            f"{_percent(found['median'])}, 90th percentile {_percent(found['p90'])}; called too "
            f"large though measured: {len(found['called_unfit_though_measured'])}"
        )
        _print_reasons(console, report.memory)
    if report.fit:
        _print_fit(console, report.fit)


def _print_speeds(console: Console, results: Sequence[RowResult]) -> None:
    data, other = _judged(results)
    num_data = sum(r.is_data_parallel for r in results)
    console.print(
        "Errors of tokens per second and device. Each source is judged with efficiencies fitted "
        "without its family."
    )
    names = ("Dense, 16 bits, data axes only", "Tensor, pipeline or narrower products")
    for title, rows in zip(names, (data, other), strict=True):
        if not rows:
            continue
        baseline = constant_utilisation(rows)
        table = Table(title=title, title_justify="left")
        for column in ("source", "rows", "median", "p90", "bias", "baseline median"):
            table.add_column(column, justify="left" if column == "source" else "right")
        for source, members in _by_source(rows):
            table.add_row(source, *_cells(members, baseline))
        table.add_section()
        table.add_row("all", *_cells(rows, baseline))
        console.print(table)
        _print_overall(console, "planner", summarise(rows))
        constant = _constant(rows, baseline)
        if constant is None:
            console.print("  constant utilisation: - (no other source to take it from)")
        else:
            _print_overall(console, "constant utilisation", constant)
        console.print(
            "  worst: " + ", ".join(f"{row.row_id} {row.error:+.0%}" for row in _worst(rows)),
            soft_wrap=True,
        )
    console.print(f"\n  Predicted {len(data)} of {num_data} dense 16-bit data-parallel rows.")
    _print_reasons(console, results)


def _constant(rows: Sequence[Judged], baseline: Mapping[str, float]) -> Summary | None:
    """Errors of the baseline; None where no other source says what it is."""
    return summarise(rows, lambda row: baseline[row.row_id]) if baseline else None


def _cells(rows: Sequence[Judged], baseline: Mapping[str, float]) -> list[str]:
    summary = summarise(rows)
    constant = _constant(rows, baseline)
    shares = (summary.median, summary.p90, summary.bias, constant.median if constant else None)
    return [str(summary.num_rows), *(_percent(share) for share in shares)]


def _print_overall(console: Console, name: str, summary: Summary) -> None:
    pairs = "no pairs"
    if summary.pair_order is not None:
        pairs = f"{summary.pair_order:.1%} of {summary.num_pairs} pairs in order"
    console.print(
        f"  {name}: median {_percent(summary.median)}, 90th percentile {_percent(summary.p90)}, "
        f"equal-source {_percent(summary.equal_source)}, {pairs}"
    )


def _print_fit(console: Console, results: Sequence[MemoryResult]) -> None:
    found = _fit_json(results)
    console.print(
        f"\n[bold]What fits[/bold] on {found['scorable']} scorable rows: right "
        f"{_percent(found['right'])} (without those whose states alone exceed the memory "
        f"{_percent(found['right_without_states_above_memory'])}; calling all 'ran' "
        f"{_percent(found['always_ran'])}), falsely fits {_percent(found['falsely_fits'])}, "
        f"falsely refused {_percent(found['falsely_refused'])}; {found['peaks']} stated peaks, "
        f"median error {_percent(found['peak_median'])}",
        soft_wrap=True,
    )
    console.print(f"  wrong: {', '.join(found['wrong']) or 'none'}")
    _print_reasons(console, results)


def _print_reasons(console: Console, results: Sequence[RowResult] | Sequence[MemoryResult]) -> None:
    counts: Counter[str] = Counter()
    ids: dict[str, list[str]] = defaultdict(list)
    for entry in _reasons(results):
        counts[entry["reason"]] += 1
        ids[entry["reason"]].append(entry["id"])
    num_missing = sum(counts.values())
    others = "; the others, with --json or --rows-out one by one:" if counts else "."
    console.print(f"  Predicted {len(results) - num_missing} of {len(results)} rows{others}")
    for reason, count in counts.most_common():
        shown = ", ".join(ids[reason][:4]) + (", ..." if count > 4 else "")
        console.print(
            f"    {count:3d}  {reason} ({shown})", soft_wrap=True, highlight=False, markup=False
        )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
