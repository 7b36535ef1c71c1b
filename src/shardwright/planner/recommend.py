"""Which of several layouts to take: one rule, wherever one is recommended.

Only what the engine runs today counts where any of it fits. Predictions are no more exact than two
percent, so of those that are as fast within that the simplest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from shardwright.core.strategy import STRATEGIES
from shardwright.planner.workload import Checkpointing

if TYPE_CHECKING:
    from shardwright.planner.search import Candidate

__all__ = ["RECOMPUTATIONS", "TOLERANCE", "recommended", "runnable", "step_s", "ties"]

TOLERANCE = 0.02
"""Share of a step by which layouts may differ and still count as equally fast."""

_STRATEGIES = tuple(STRATEGIES)  # the simplest first
RECOMPUTATIONS = get_args(Checkpointing)  # the least first


def step_s(candidate: Candidate) -> float:
    """A replayed candidate's step."""
    assert candidate.prediction is not None, "only replayed candidates are compared by time"
    return candidate.prediction.step_s


def runnable(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that the engine runs today, settings asked for aside; all where there are none."""
    today = [candidate for candidate in candidates if not candidate.missing]
    data_only = [candidate for candidate in candidates if candidate.is_data_only]
    return today or data_only or list(candidates)


def ties(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those to choose from: runnable, and as fast as the fastest within the tolerance."""
    pool = runnable(candidates)
    fastest = min(step_s(candidate) for candidate in pool)
    return [candidate for candidate in pool if step_s(candidate) <= fastest * (1 + TOLERANCE)]


def recommended(candidates: Sequence[Candidate]) -> Candidate:
    """The simplest of those: strategy first, then least recomputation, then fewest axes.

    Args:
        candidates: Replayed ones that fit.
    """
    return min(ties(candidates), key=_complexity)


def _complexity(candidate: Candidate) -> tuple[float, ...]:
    layout = candidate.job.layout
    axes = (layout.replicate, layout.tensor, layout.pipeline, layout.chunks_per_stage)
    return (
        _STRATEGIES.index(candidate.strategy),
        RECOMPUTATIONS.index(candidate.job.workload.checkpointing),
        sum(size > 1 for size in axes),
        layout.resident_units,
        step_s(candidate),
    )
