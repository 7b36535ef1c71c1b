"""The comparison with peers can succeed, and it can fail."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import pytest
import torch

from benchmarks.correctness import peers
from benchmarks.correctness.cells import judge, run_cell
from benchmarks.correctness.findings import compare_tensors
from benchmarks.correctness.page import counts, table


def found(*findings):
    report = {"kind": "found", "at_s": 1.0, "findings": list(findings)}
    return json.loads(json.dumps(report))


def finding(difference, tolerance=1e-9, what="parameters", note=""):
    return {"what": what, "difference": difference, "tolerance": tolerance, "note": note}


def raised(message, at_s=1.0, kind="error"):
    return {"kind": kind, "type": "ValueError", "message": message, "at_s": at_s, "findings": []}


def test_the_worst_difference_of_all_ranks_decides() -> None:
    right = judge([found(finding(1e-12)), found(finding(5e-12))], [0, 0])
    assert (right.outcome, right.difference) == ("right", 5e-12)
    wrong = judge([found(finding(1e-12)), found(finding(0.25, note="a.weight"))], [0, 0])
    assert (wrong.outcome, wrong.difference) == ("wrong (silent)", 0.25)
    assert wrong.detail == "parameters: off by 0.25 (a.weight)"


def test_nan_is_wrong() -> None:
    assert judge([found(finding(math.nan), finding(1e-12))], [0]).outcome == "wrong (silent)"
    value = {"a": torch.tensor([math.nan]), "b": torch.ones(1)}
    (only,) = compare_tensors("x", {k: torch.ones(1) for k in value}, value, tolerance=1.0)
    assert math.isnan(only.difference)
    assert not only.is_right


def test_missing_names_are_wrong() -> None:
    a, b = torch.ones(1), torch.ones(2)
    findings = compare_tensors("x", {"a": a, "b": b}, {"a": a, "c": b}, tolerance=1.0)
    assert [f.is_right for f in findings] == [True, False]
    assert findings[1].note == "names or shapes differ: b, c"


def test_the_first_error_is_told_and_who_waits_for_it() -> None:
    cell = judge([raised("second", at_s=3.0), raised("first\nmore", at_s=2.0), None], [0, 0, None])
    assert (cell.outcome, cell.detail) == ("error", "ValueError: first (ranks 2 went on waiting)")


def test_hangs_and_deaths_are_outcomes() -> None:
    assert judge([None, None], [None, None]).outcome == "hang"
    assert judge([None, found(finding(0.0))], [None, 0]).outcome == "hang"
    assert judge([None, found()], [-11, 0]).detail == "rank 0 ended by SIGSEGV"


def test_comparing_nothing_is_not_right() -> None:
    assert judge([found(), found()], [0, 0]).outcome == "error"


def test_what_an_engine_lacks_is_not_an_error() -> None:
    lacking = raised("has no shard groups", kind="not applicable")
    assert judge([lacking, None], [0, None]).outcome == "not applicable"


@pytest.mark.parametrize("engine", ["shardwright", "ddp"])
def test_an_engine_that_is_right_is_reported_as_right(engine: str) -> None:
    cell = run_cell("R12", engine)
    assert cell.outcome == "right", cell.detail


def test_a_planted_wrong_answer_is_reported_as_wrong() -> None:
    cell = run_cell("R12", "planted-sum")
    assert cell.outcome == "wrong (silent)"
    assert cell.difference == pytest.approx(0.2)  # gradient 4 in place of 2, learning rate 0.1


def test_a_hang_ends_with_its_time() -> None:
    started_s = time.monotonic()
    cell = run_cell("R12", "planted-hang", timeout_s=5.0)
    assert cell.outcome == "hang"
    assert time.monotonic() - started_s < 60


def test_a_death_is_an_abort() -> None:
    cell = run_cell("R12", "planted-death")
    assert (cell.outcome, cell.detail) == ("abort", "rank 1 ended by exit code 9")


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    peers.main(["--scenarios", "R12,R10a", "--peers", "shardwright,ddp", "--dry"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  | scenario | ranks | Shardwright zero3 | DDP |"
    assert lines[2] == "| R12 | gloo averages | 2 | right | right |"
    assert lines[3] == "| R10a | hybrid, 4 replicas of 1 shard | 4 | right | n/a |"


def test_the_tables_of_the_docs_are_those_of_the_results_they_link() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "peers.md").read_text()
    (link,) = set(re.findall(r"\((\.\./benchmarks/results/correctness_\S+\.json)\)", text))
    content = json.loads((docs / link).read_text())
    assert "\n".join(table(content, is_summary=True)) in text
    assert "\n".join(counts(content)) in text


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--scenarios", "R999"])
    assert "found R999" in capsys.readouterr().err
