"""`shardwright validate`: compare the planner with tables of published measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwright.app.cli.errors import writing_output

__all__ = ["validate"]


def validate(
    rows: Annotated[
        Path | None, typer.Argument(metavar="ROWS.csv", help="Table of measured speeds.")
    ] = None,
    memory: Annotated[Path | None, typer.Option(help="Table of measured memory.")] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Table of what ran and what ran out of memory.")
    ] = None,
    rows_out: Annotated[
        Path | None, typer.Option(help="Write each row's prediction to this CSV file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Predict each row of published tables and print the errors.

    Measured columns are compared with, never used. Each source is judged with efficiencies fitted
    without its family, beside one constant utilisation per device on the same rows. Memory in GiB.
    docs/planner.md lists the columns of each table.
    """
    from rich.console import Console

    from shardwright.app import validate as report_module
    from shardwright.planner.text_files import require_writable

    if rows_out is not None:
        require_writable(rows_out, "table of predictions")
    report = report_module.make_report(rows, memory, fit)
    if rows_out is not None:
        report_module.write_rows(report, rows_out)
    with writing_output():
        if as_json:
            print(json.dumps(report_module.as_json(report), indent=1))
        else:
            report_module.print_report(Console(), report)
    report_module.require_predictions(report)
