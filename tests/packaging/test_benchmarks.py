"""The measurements' own logic, without measuring."""

from __future__ import annotations

import pytest

from benchmarks.harness import Spread, alternate, markdown_table
from benchmarks.step.ab import require_equal_losses, summarise
from benchmarks.step.worker import RankRun
from benchmarks.step.workloads import WORKLOADS, batch


def rank_run(losses: list[float], step_ms: list[float]) -> RankRun:
    return RankRun(
        step_ms=step_ms,
        losses=losses,
        sent_bytes=2**20,
        peak_mib=3.0,
        peak_steps_mib=2.0,
        used={"faults": 4.0},
    )


def test_arms_alternate_and_every_other_round_goes_backwards() -> None:
    order: list[str] = []
    runs = alternate(["a", "b"], rounds=3, run=lambda arm: order.append(arm) or len(order))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert runs == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_spread_keeps_all_runs() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0, runs=[3, 1, 2])


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    run = [rank_run([1.0], [1.0, 5.0, 2.0]), rank_run([1.0], [4.0, 3.0, 2.0])]
    result = summarise([run])
    assert result["step_ms"]["median"] == 4.0
    assert result["sent_mib_per_step"] == 1.0
    assert result["faults_per_step"]["median"] == 4.0


def test_arms_that_compute_other_losses_are_refused() -> None:
    same = [rank_run([1.0, 2.0], []), rank_run([3.0, 2.0], [])]
    other = [rank_run([1.0, 2.0], []), rank_run([3.0, 2.0002], [])]
    require_equal_losses("a", {"torch DDP": [same], "FSDP2 zero3": [same]})
    require_equal_losses("a", {"torch DDP": [same], "one process": [other[:1]]})
    with pytest.raises(SystemExit, match=r"found 2\.000\d+ from 'FSDP2 zero3' and 2\.0 .* step 1"):
        require_equal_losses("a", {"torch DDP": [same], "FSDP2 zero3": [other]})


def test_the_published_sizes_are_those_of_the_models() -> None:
    millions = {name: w.decoder.num_parameters / 1e6 for name, w in WORKLOADS.items()}
    assert millions == pytest.approx({"a": 26.0, "b": 110.1, "c": 103.3, "tiny": 0.44}, rel=0.01)


def test_batches_differ_by_rank_and_step_and_repeat() -> None:
    tiny = WORKLOADS["tiny"]
    first, targets = batch(tiny, step=0, rank=0)
    assert first.shape == targets.shape == (1, tiny.tokens_per_rank)
    assert first[0, 1:].equal(targets[0, :-1])
    assert batch(tiny, step=0, rank=0)[0].equal(first)
    assert not batch(tiny, step=0, rank=1)[0].equal(first)
    assert not batch(tiny, step=1, rank=0)[0].equal(first)


def test_a_table_is_markdown() -> None:
    assert list(markdown_table(["a", "b"], [["1", "2"]])) == [
        "| a | b |",
        "| --- | --- |",
        "| 1 | 2 |",
    ]
