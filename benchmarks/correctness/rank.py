"""One rank of one cell: runs the scenario and writes down what it found."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.correctness.engines import ENGINES
from benchmarks.correctness.findings import NotApplicable, Planted
from benchmarks.correctness.scenarios import SCENARIOS
from benchmarks.correctness.training import World

__all__ = ["report_path", "serve"]

_KINDS: dict[type[BaseException], str] = {
    NotApplicable: "not applicable",
    Planted: "planted",
}


def report_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its report."""
    return folder / f"rank{rank}.json"


def serve(scenario: str, engine: str, rank: int, folder: Path, variables: dict[str, str]) -> None:
    """Run a scenario as one rank of a fresh group.

    Args:
        scenario: Key of `SCENARIOS`.
        engine: Key of `ENGINES`.
        rank: Of this process.
        folder: Takes the report, and what is printed.
        variables: The launcher's.
    """
    log = os.open(folder / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report: dict[str, Any] = {"kind": "found", "findings": []}
    try:
        made = ENGINES[engine]()
        made.start()
        world = World(rank=rank, ranks=int(variables["WORLD_SIZE"]))
        findings = SCENARIOS[scenario].check(made, world)
        report["findings"] = [dataclasses.asdict(finding) for finding in findings]
    except BaseException as error:  # noqa: BLE001 - it is the result
        kind = _KINDS.get(type(error), "error")
        where = traceback.extract_tb(error.__traceback__)[-1].line
        message = str(error).strip() or f"no message; raised by: {where}"
        report |= {"kind": kind, "type": type(error).__name__, "message": message}
        traceback.print_exc()
    report["at_s"] = time.monotonic()
    partial = report_path(folder, rank).with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.rename(report_path(folder, rank))
