"""What the planner's page shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from typer.testing import CliRunner

import shardwright as sw
from shardwright.app.cli import app
from tests.support.pool import RankPool

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
PRESET, MODULE, RUN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def execute(code: str, names: dict[str, object]) -> None:
    exec(compile(code, "planner.md", "exec"), names)


def run_planned(code: str, path: str) -> list[tuple[str, int, int]]:
    """Follow the plan of the page's module; name, planned and counted bytes of every row."""
    block = (torch.nn.Linear(64, 64) for _ in range(8))
    names: dict[str, object] = {"model": torch.nn.Sequential(*block)}
    execute(code.replace("plan.json", path).replace("1024", "64"), names)
    found = sw.ledger(names["model"]).reconcile(path)
    return [(row.name, row.planned or 0, row.counted) for row in found.rows]


def test_the_command_prints_what_the_page_shows() -> None:
    (found,) = re.findall(r"```\nshardwright (plan .*?)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    command, shown = found
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.output.splitlines()] == shown.splitlines()


def test_a_preset_is_planned_and_saved(tmp_path: Path) -> None:
    code = PRESET.replace("256 x h100", "64 x h100").replace("llama-3-70b", "llama-3-8b")
    names: dict[str, object] = {}
    execute(code.replace("plan.json", str(tmp_path / "plan.json")), names)
    assert sw.read_plan(tmp_path / "plan.json").micro_batches > 0


def test_a_module_is_planned_and_a_run_that_follows_the_plan_reconciles(
    pool: RankPool, tmp_path: Path
) -> None:
    names: dict[str, object] = {}
    code = MODULE.replace("1024", "64").replace("8 x a100-80", "2 x a100-80")
    execute(code, names)
    path = tmp_path / "plan.json"
    names["plans"].save(path)  # type: ignore[attr-defined]
    for rows in pool.run(2, run_planned, code=RUN, path=str(path)):
        assert len(rows) > 3
        wrong = [row for row in rows if row[1] != row[2] and row[0] != "optimizer state"]
        assert not wrong
