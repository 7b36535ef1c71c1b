"""What the README shows runs."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch
from torch import nn
from typer.testing import CliRunner

import shardwright as sw
from shardwright.planner.search import SearchSpace
from tests.support.models import TiedDecoder, tokens_for
from tests.support.pool import RankPool

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


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
    code, _ = PYTHON
    for text in pool.run(2, run_snippet, code=code):
        assert "all_gather over shard" in text
        figures = re.findall(r"([\d,]+) +([\d,]+) +(-?[\d,]+)", text)
        assert figures
        assert all(difference == "0" for _, _, difference in figures)


def run_planned(code: str, path: str) -> str:
    """Follow a plan, training where the snippet has dots; returns what the ledger would print."""
    names = {"model": _Model(), "sw": sw, "torch": torch}
    training = (
        "for step in range(plan.micro_batches * 2):\n"
        "    is_last = step % plan.micro_batches == plan.micro_batches - 1\n"
        "    with contextlib.nullcontext() if is_last else sw.accumulate(model):\n"
        "        model(tokens_for(step, 0, plan.micro_batch)).backward()\n"
        "    if is_last:\n"
        "        opt.step()\n"
        "        opt.zero_grad()\n"
    )
    names |= {"contextlib": contextlib, "tokens_for": tokens_for}
    before, after = code.replace("plan.json", path).split("...\n")
    optimizer = "opt = torch.optim.AdamW(model.parameters())\n"
    exec(compile(before + optimizer + training + after, "README.md", "exec"), names)
    return str(sw.ledger(names["model"]).reconcile(path))


def test_a_run_that_follows_its_plan_as_the_readme_shows_holds_and_sends_what_was_planned(
    pool: RankPool, tmp_path: Path
) -> None:
    _, code = PYTHON
    path = tmp_path / "plan.json"
    plans = sw.plan(
        model=_Model(),
        sample=((tokens_for(0, 0, 1),), {}),
        cluster="2 x a100-80",
        workload={"global_batch": 2 * len(tokens_for(0, 0, 1)), "param": "bf16"},
        space=SearchSpace(strategies=("zero3",)),
    )
    plans.save(path)
    for text in pool.run(2, run_planned, code=code, path=str(path)):
        figures = re.findall(r"(.*?)  +([\d,]+) +([\d,]+) +([\d,]+) +(-?[\d,]+)", text)
        assert "traffic: all_gather over shard" in {name for name, *_ in figures}
        wrong = [row for row in figures if row[-1] != "0" and "optimizer state" not in row[0]]
        assert not wrong


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
