"""Run awkward scenarios under Shardwright and its peers, and compare with one process.

    python -m benchmarks.correctness.peers
    python -m benchmarks.correctness.peers --scenarios R3a,R41 --peers shardwright,fsdp2 --dry

``--cells FILE`` keeps every cell as it is done, so that an interrupted run can be taken up again.
Ranks are fresh local processes with one thread each that talk over gloo. A cell that hangs or dies
is an outcome like any other. DeepSpeed's columns need DeepSpeed: ``pip install -e '.[bench]'``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.correctness.cells import Cell, run_cell
from benchmarks.correctness.engines import ENGINES, TABLE
from benchmarks.correctness.page import page, table
from benchmarks.correctness.scenarios import SCENARIOS
from benchmarks.harness import capture_environment, write_results

__all__ = ["compare", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare what the command line asks for and write the files."""
    options = _parse(arguments)
    environment = capture_environment()
    was_interrupted = bool(_read_kept(options.cells))
    results = compare(options.scenarios, options.peers, kept=options.cells)
    content = {
        "theme": "correctness",
        "command": _command(options),
        "was_interrupted": was_interrupted,
        "environment": environment,
        "engines": {key: _describe(key) for key in options.peers},
        "scenarios": {
            key: {
                "title": SCENARIOS[key].title,
                "does": SCENARIOS[key].does,
                "ranks": SCENARIOS[key].ranks,
            }
            for key in options.scenarios
        },
        "results": {
            scenario: {engine: _plain(cell) for engine, cell in row.items()}
            for scenario, row in results.items()
        },
    }
    print("\n".join(table(content)))
    if not options.dry:
        for path in write_results("correctness", content, page(content)):
            print(path.relative_to(path.parents[2]))


def compare(
    scenarios: Sequence[str], engines: Sequence[str], *, kept: Path | None = None
) -> dict[str, dict[str, Cell]]:
    """Run cells one after another.

    Args:
        scenarios: Keys of `SCENARIOS`.
        engines: Keys of `ENGINES`.
        kept: A file of cells already run, which aren't run again; takes each new one.

    Returns:
        Cells by scenario and engine.
    """
    done = _read_kept(kept)
    for scenario, engine in itertools.product(scenarios, engines):
        if (scenario, engine) in done:
            continue
        cell = done[scenario, engine] = run_cell(scenario, engine)
        line = {"scenario": scenario, "engine": engine, **dataclasses.asdict(cell)}
        print(json.dumps(line), file=sys.stderr, flush=True)
        if kept is not None:
            with kept.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return {
        scenario: {engine: done[scenario, engine] for engine in engines} for scenario in scenarios
    }


def _read_kept(path: Path | None) -> dict[tuple[str, str], Cell]:
    """Later lines replace earlier ones."""
    done = {}
    if path is not None and path.exists():
        for line in path.read_text().splitlines():
            values = json.loads(line)
            key = values.pop("scenario"), values.pop("engine")
            done[key] = Cell(**values)
    return done


def _command(options: argparse.Namespace) -> str:
    """The command that makes this table, without where cells were kept."""
    chosen = [
        f" --{name} {','.join(found)}"
        for name, found, everything in (
            ("scenarios", options.scenarios, list(SCENARIOS)),
            ("peers", options.peers, list(TABLE)),
        )
        if found != everything
    ]
    return f"python -m benchmarks.correctness.peers{''.join(chosen)}"


def _plain(cell: Cell) -> dict[str, Any]:
    values = dataclasses.asdict(cell)
    is_number = cell.difference is None or math.isfinite(cell.difference)
    return values if is_number else values | {"difference": str(cell.difference)}


def _describe(key: str) -> dict[str, Any]:
    engine = ENGINES[key]()
    return {
        "name": engine.name,
        "version": engine.version(),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "tolerance": engine.tolerance,
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="default: all")
    parser.add_argument("--peers", default=",".join(TABLE), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--cells", type=Path, help="keep cells here, and take up what is there")
    parser.add_argument("--dry", action="store_true", help="print only, write no file")
    options = parser.parse_args(arguments)
    for name, known in (("scenarios", set(SCENARIOS)), ("peers", set(ENGINES))):
        chosen = [item.strip() for item in getattr(options, name).split(",")]
        unknown = [item for item in chosen if item not in known]
        if unknown:
            parser.error(f"--{name} takes {', '.join(known)}; found {', '.join(unknown)}")
        setattr(options, name, chosen)
    return options


if __name__ == "__main__":
    main()
