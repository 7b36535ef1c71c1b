"""Fit the planner's efficiencies on tables of published speeds and write the committed file.

    python -m benchmarks.planner.fit_efficiencies [ROWS.csv] [--write]

Two factors per device family and software class are fitted, on products and on memory-bound
operations, families of sources weighed equally; a pair that only one family measured keeps 1. The
errors printed are those of rows whose family was left out of the fit.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from shardwright.planner.accuracy import Summary, constant_utilisation, summarise
from shardwright.planner.cost.efficiency import FITTED, Factors
from shardwright.planner.fit import Fit, fit_efficiencies
from shardwright.planner.validate import RowResult, judged_rows, predict_rows, samples_of

TABLE = Path(__file__).parents[2] / "tests" / "planner" / "data" / "throughput.csv"


def as_rows(factors: Factors) -> list[dict[str, object]]:
    return [
        {
            "family": family,
            "software_class": software_class,
            "matmul": value.matmul,
            "memory": value.memory,
        }
        for (family, software_class), value in sorted(factors.items())
    ]


def as_document(fit: Fit, table: str) -> dict[str, object]:
    return {
        "command": "python -m benchmarks.planner.fit_efficiencies --write",
        "table": table,
        "factors": as_rows(fit.factors),
        "without": {family: as_rows(factors) for family, factors in sorted(fit.without.items())},
    }


def show(name: str, summary: Summary) -> None:
    pairs = "" if summary.pair_order is None else f"  pairs {summary.pair_order:6.1%}"
    print(
        f"{name:44s} n={summary.num_rows:4d}  median {summary.median:6.1%}  "
        f"p90 {summary.p90:6.1%}  equal-source {summary.equal_source:6.1%}{pairs}"
    )


def report(results: list[RowResult]) -> None:
    data = [row for r in results if r.is_data_parallel for row in judged_rows([r])]
    other = [row for r in results if not r.is_data_parallel for row in judged_rows([r])]
    baseline = constant_utilisation(data)
    show("data parallel, 16 bits", summarise(data))
    recent = [row for row in data if row.source != "megatron-sc21-t2"]
    show("the same without the 2021 ZeRO-3 rows", summarise(recent))
    show("constant utilisation", summarise(data, lambda row: baseline[row.row_id]))
    show("tensor, pipeline and narrow products", summarise(other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--write", action="store_true", help="replace the committed file")
    arguments = parser.parse_args()
    with arguments.table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    generic: dict[str, Factors] = {}
    fit = fit_efficiencies(samples_of(predict_rows(rows, generic)))
    for row in as_rows(fit.factors):
        print(row)
    print("\nGeneric efficiencies only:")
    report(predict_rows(rows, generic))
    print("\nEach family predicted with factors fitted without it:")
    report(predict_rows(rows, fit.without))
    if arguments.write:
        document = as_document(fit, arguments.table.name)
        FITTED.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"\nwrote {FITTED}")


if __name__ == "__main__":
    main()
