"""Strategies as data: one row says where each kind of training state lives.

The policy and the engine read these rows; no code branches on a strategy's name. Two choices make
the family: where gradients live between micro-batches, and how long a unit's parameters stay
gathered; a third says over which mesh axes the optimizer state is divided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from shardwright.core.errors import SpecError, nearest

__all__ = ["ALIASES", "STRATEGIES", "Gathered", "Gradients", "Strategy", "resolve_strategy"]


class Gradients(StrEnum):
    """Where a unit's gradient lives between micro-batches."""

    WHOLE = "whole"  # every rank keeps the full local gradient; one reduction per step
    SHARDED = "sharded"  # reduced after every micro-batch; a rank keeps its shard


class Gathered(StrEnum):
    """How long a unit's parameters stay gathered after they were first needed."""

    STEP = "step"  # until the optimizer changes them
    BACKWARD = "backward"  # from forward until the unit's backward has run
    USE = "use"  # only while the unit computes


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Placement of parameters, gradients and optimizer state.

    Attributes:
        name: Canonical name.
        shards_parameters: Whether the shard axis divides anything; where False, all data axes are
            replicas.
        gathered: How long gathered parameters are kept.
        gradients: Where gradients live between micro-batches.
        optimizer_over_replicas: Whether the replicate axis divides the optimizer state too.
        summary: One line for people.
    """

    name: str
    shards_parameters: bool
    gathered: Gathered
    gradients: Gradients
    optimizer_over_replicas: bool = False
    summary: str = ""

    def with_gradients(self, gradients: Gradients | None) -> Strategy:
        """Return this row with another home for gradients, or itself for None."""
        return self if gradients is None else replace(self, gradients=gradients)


_WHOLE, _SHARDED = Gradients.WHOLE, Gradients.SHARDED

STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(
            name="ddp",
            shards_parameters=False,
            gathered=Gathered.STEP,
            gradients=_WHOLE,
            summary="everything replicated; gradients all-reduced",
        ),
        Strategy(
            name="zero1",
            shards_parameters=True,
            gathered=Gathered.STEP,
            gradients=_WHOLE,
            summary="optimizer state sharded",
        ),
        Strategy(
            name="zero2",
            shards_parameters=True,
            gathered=Gathered.BACKWARD,
            gradients=_SHARDED,
            summary="optimizer state and gradients sharded",
        ),
        Strategy(
            name="zero3",
            shards_parameters=True,
            gathered=Gathered.USE,
            gradients=_SHARDED,
            summary="optimizer state, gradients and parameters sharded",
        ),
        Strategy(
            name="hybrid",
            shards_parameters=True,
            gathered=Gathered.USE,
            gradients=_SHARDED,
            summary="zero3 inside a shard group, replicated across groups",
        ),
        Strategy(
            name="hybrid_zero2",
            shards_parameters=True,
            gathered=Gathered.BACKWARD,
            gradients=_SHARDED,
            summary="zero2 inside a shard group, replicated across groups",
        ),
        Strategy(
            name="hybrid_full_optimizer",
            shards_parameters=True,
            gathered=Gathered.USE,
            gradients=_SHARDED,
            optimizer_over_replicas=True,
            summary="hybrid, with the optimizer state divided over all data ranks",
        ),
    )
}

ALIASES: dict[str, str] = {
    "no_shard": "ddp",
    "shard_grad_op": "zero2",
    "full_shard": "zero3",
    "hybrid_shard": "hybrid",
    "_hybrid_shard_zero2": "hybrid_zero2",
}


def _names_shown() -> list[str]:
    return [*STRATEGIES, *(alias for alias in ALIASES if not alias.startswith("_"))]


def resolve_strategy(name: str) -> Strategy:
    """Find a strategy by its name or a known alias, in any case.

    Args:
        name: For example ``"zero3"`` or ``"FULL_SHARD"``.

    Returns:
        The strategy's row.

    Raises:
        SpecError: The name is unknown; the message gives the nearest valid one.
    """
    if not isinstance(name, str):
        raise SpecError(
            f"strategy must be a name such as 'zero3', found {type(name).__name__}; "
            f"{nearest('', STRATEGIES)}"
        )
    key = name.lower()
    key = ALIASES.get(key, key)
    if key not in STRATEGIES:
        raise SpecError(f"unknown strategy {name!r}; {nearest(key, _names_shown())}")
    return STRATEGIES[key]
