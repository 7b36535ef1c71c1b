"""What the README shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from typer.testing import CliRunner

from tests.support.models import TiedDecoder, tokens_for
from tests.support.pool import RankPool

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class _Model(nn.Module):
    """Takes a batch and returns a loss, as the README's model does."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = TiedDecoder()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.decoder(batch[:, :-1], batch[:, 1:])


def run_snippet(code: str) -> str:
    """Run a snippet with `model` and `batches` defined; returns what the ledger would print."""
    torch.manual_seed(0)
    names = {"model": _Model(), "batches": [tokens_for(step, 0, 1) for step in range(3)]}
    exec(compile(code, "README.md", "exec"), names)
    return str(names["sw"].ledger(names["model"]).reconcile())


def test_the_python_of_the_readme_runs_on_two_ranks_and_reconciles(pool: RankPool) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for text in pool.run(2, run_snippet, code=code):
        assert "all_gather over shard" in text
        figures = re.findall(r"([\d,]+) +([\d,]+) +(-?[\d,]+)", text)
        assert figures
        assert all(difference == "0" for _, _, difference in figures)


def test_make_targets_named_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^    make (\w+)", README, re.MULTILINE))
    assert {"demo", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_flags_of_the_commands_in_the_readme_exist() -> None:
    from shardwright.app.cli import app

    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    commands = re.findall(r"^    .*shardwright.* train (.*)$", README, re.MULTILINE)
    assert commands
    for command in commands:
        for flag in re.findall(r"--[a-z-]+", command):
            assert flag in shown, flag


def test_files_and_pages_linked_from_the_documents_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for layer in ("core", "planner", "runtime", "app"):
        section = text.split(f"### {layer}\n")[1].split("##")[0]
        named = set(re.findall(r"`([\w*]+\.py)`", section))
        folder = ROOT / "src" / "shardwright" / layer
        for name in named:
            assert list(folder.rglob(name)), f"{layer}/{name}"
        there = {f.name for f in folder.glob("*.py")} - {"__init__.py"}
        unnamed = {f for f in there if not any(Path(f).match(n) for n in named)}
        assert not unnamed, f"{layer}: {sorted(unnamed)} are not described"
