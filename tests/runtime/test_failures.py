"""One rank's failure is every rank's error, within ten seconds, with a name."""

from __future__ import annotations

import pytest

import shardwright as sw
from tests.support import faults
from tests.support.pool import RankPool

LIMIT_S = 10.0


@pytest.mark.parametrize("faulty", [0, 2])
@pytest.mark.parametrize("phase", faults.PHASES)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_an_exception_on_one_rank_raises_on_all_and_names_it(
    pool: RankPool, strategy: str, phase: str, faulty: int
) -> None:
    outcomes = pool.attempt(
        3, faults.train, strategy=strategy, kind="raise", phase=phase, faulty=(faulty,)
    )
    for rank, outcome in enumerate(outcomes):
        assert outcome.seconds < LIMIT_S
        if rank == faulty:
            assert outcome.raised == "Fault"
        else:
            assert outcome.raised == "RankFailedError"
            assert f"rank {faulty}" in outcome.message
            assert "unit" in outcome.message


@pytest.mark.parametrize("phase", faults.PHASES)
def test_a_rank_that_dies_raises_on_all_others_and_is_named(pool: RankPool, phase: str) -> None:
    outcomes = pool.attempt(
        3, faults.train, strategy="zero3", kind="kill", phase=phase, faulty=(1,)
    )
    for rank in (0, 2):
        assert outcomes[rank].seconds < LIMIT_S
        assert outcomes[rank].raised == "RankFailedError"
        assert "rank 1" in outcomes[rank].message


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_slow_rank_is_waited_for(pool: RankPool, phase: str) -> None:
    """Longer than it takes to suspect that ranks diverged."""
    differences = pool.run(
        3, faults.delayed_equals_undisturbed, strategy="zero3", phases=(phase,), faulty=(1,)
    )
    assert differences == [[0.0]] * 3


@pytest.mark.parametrize("phase", ["forward", "backward", "hook"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_if_all_ranks_raise_training_goes_on_and_nothing_stays_gathered(
    pool: RankPool, strategy: str, phase: str
) -> None:
    for difference, held in pool.run(3, faults.all_raise_and_go_on, strategy=strategy, phase=phase):
        assert difference <= 1e-12
        if strategy in ("zero2", "zero3"):
            assert held == 0


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_divergent_control_flow_is_an_error_that_names_the_difference(
    pool: RankPool, strategy: str
) -> None:
    for outcome in pool.attempt(3, faults.skips_a_block_on, faulty=1, strategy=strategy):
        assert outcome.raised == "RankMismatchError", outcome
        assert outcome.seconds < LIMIT_S
        assert "rank 1" in outcome.message
        assert "blocks.1" in outcome.message


def test_a_launched_rank_that_returns_early_is_named() -> None:
    with pytest.raises(sw.LaunchError, match="rank 1 has finished"):
        sw.launch(faults.runs_fewer_steps, ranks=2, timeout_s=60)


def test_a_rank_that_leaves_early_is_named(pool: RankPool) -> None:
    outcomes = pool.attempt(3, faults.leaves_early, strategy="zero3")
    for rank in (0, 2):
        assert outcomes[rank].raised == "RankFailedError"
        assert "rank 1" in outcomes[rank].message
