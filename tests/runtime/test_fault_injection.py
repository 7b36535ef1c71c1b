"""One rank raises, dies or dawdles at every other point of a step, and in `shard`.

`test_failures.py` has units' forwards and backwards, and what follows when all ranks raise.
"""

from __future__ import annotations

import pytest

from tests.support import faults
from tests.support.pool import Outcome, RankPool

LIMIT_S = 10.0
RAISED_HERE = "Fault"


def check_peers(outcomes: list[Outcome], faulty: int, *, agreeing: bool) -> None:
    """Every other rank raises soon and names the faulty one."""
    errors = {"RankFailedError", "RankMismatchError"} if agreeing else {"RankFailedError"}
    for outcome in outcomes:
        if outcome.rank != faulty:
            assert outcome.seconds < LIMIT_S
            assert outcome.raised in errors, outcome
            assert f"rank {faulty}" in outcome.message


@pytest.mark.parametrize("faulty", [0, 2])
@pytest.mark.parametrize("phase", faults.OTHER_PHASES)
def test_an_exception_at_any_point_raises_on_all_ranks_and_names_the_rank(
    pool: RankPool, phase: str, faulty: int
) -> None:
    outcomes = pool.attempt(
        3, faults.train, strategy="zero3", kind="raise", phase=phase, faulty=(faulty,)
    )
    assert outcomes[faulty].raised == RAISED_HERE
    assert outcomes[faulty].seconds < LIMIT_S
    check_peers(outcomes, faulty, agreeing=phase == "shard")


@pytest.mark.parametrize(
    ("phase", "faulty", "kind"),
    [
        (phase, rank % 3, ("kill", "exit")[rank % 2])
        for rank, phase in enumerate(faults.OTHER_PHASES)
    ],
)
def test_a_rank_that_dies_at_any_point_raises_on_the_others_and_is_named(
    pool: RankPool, phase: str, faulty: int, kind: str
) -> None:
    outcomes = pool.attempt(
        3, faults.train, strategy="zero3", kind=kind, phase=phase, faulty=(faulty,)
    )
    check_peers(outcomes, faulty, agreeing=phase == "shard")


@pytest.mark.parametrize(("strategy", "faulty"), [("ddp", 0), ("zero2", 1), ("zero3", 0)])
def test_a_delay_at_any_point_changes_no_number(pool: RankPool, strategy: str, faulty: int) -> None:
    phases = (*faults.PHASES, *faults.OTHER_PHASES)
    differences = pool.run(
        2,
        faults.delayed_equals_undisturbed,
        strategy=strategy,
        phases=phases,
        faulty=(faulty,),
        delay_s=0.3,
    )
    assert differences == [[0.0] * len(phases)] * 2
