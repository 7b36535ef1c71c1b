"""Strategies: names, aliases and the row of each."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.core.errors import SpecError
from shardwright.core.strategy import (
    ALIASES,
    STRATEGIES,
    Gathered,
    Gradients,
    resolve_strategy,
)

# shards parameters, gathered until, gradients between micro-batches, optimizer over replicas
ROWS = {
    "ddp": (False, "step", "whole", False),
    "zero1": (True, "step", "whole", False),
    "zero2": (True, "backward", "sharded", False),
    "zero3": (True, "use", "sharded", False),
    "hybrid": (True, "use", "sharded", False),
    "hybrid_zero2": (True, "backward", "sharded", False),
    "hybrid_full_optimizer": (True, "use", "sharded", True),
}


def test_there_are_exactly_the_seven_strategies() -> None:
    assert set(STRATEGIES) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_strategy_is_the_row_that_its_arithmetic_needs(name: str) -> None:
    row = resolve_strategy(name)
    assert (
        row.shards_parameters,
        row.gathered.value,
        row.gradients.value,
        row.optimizer_over_replicas,
    ) == ROWS[name]
    assert row.name == name
    assert row.summary


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_a_zero_strategy_on_a_mesh_with_replicas_is_the_hybrid_of_its_kind(kind: str) -> None:
    hybrid = {"zero2": "hybrid_zero2", "zero3": "hybrid"}[kind]
    ours, theirs = resolve_strategy(kind), resolve_strategy(hybrid)
    assert dataclasses.replace(ours, name=hybrid, summary=theirs.summary) == theirs


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("NO_SHARD", "ddp"),
        ("SHARD_GRAD_OP", "zero2"),
        ("FULL_SHARD", "zero3"),
        ("HYBRID_SHARD", "hybrid"),
        ("_HYBRID_SHARD_ZERO2", "hybrid_zero2"),
    ],
)
def test_names_that_people_know_are_aliases_in_any_case(alias: str, name: str) -> None:
    for spelling in (alias, alias.lower(), alias.title()):
        assert resolve_strategy(spelling) is STRATEGIES[name]


def test_no_alias_hides_a_strategy_and_each_leads_to_one() -> None:
    assert not set(ALIASES) & set(STRATEGIES)
    assert set(ALIASES.values()) <= set(STRATEGIES)


@pytest.mark.parametrize("name", ["ZeRO3", "ZERO3", "zero3"])
def test_the_case_of_a_name_does_not_matter(name: str) -> None:
    assert resolve_strategy(name) is STRATEGIES["zero3"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("zero_3", "zero3"),
        ("ZeRO-1", "zero1"),
        ("hybrid_zero_2", "hybrid_zero2"),
        ("fullshard", "full_shard"),
        ("dpp", "ddp"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(SpecError, match=f"unknown strategy '{given}'; did you mean '{meant}'?"):
        resolve_strategy(given)


def test_a_name_that_resembles_none_is_answered_with_all() -> None:
    with pytest.raises(SpecError) as caught:
        resolve_strategy("qqq")
    public = [name for name in [*STRATEGIES, *ALIASES] if not name.startswith("_")]
    assert all(name in str(caught.value) for name in public)
    assert "_hybrid_shard_zero2" not in str(caught.value)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("given", [3, None, STRATEGIES["zero3"]])
def test_what_is_no_name_is_refused_by_its_type(given: object) -> None:
    with pytest.raises(SpecError, match=f"found {type(given).__name__}"):
        resolve_strategy(given)


def test_another_home_for_gradients_changes_nothing_else() -> None:
    zero3 = STRATEGIES["zero3"]
    whole = zero3.with_gradients(Gradients.WHOLE)
    assert whole.gradients is Gradients.WHOLE
    assert dataclasses.replace(whole, gradients=Gradients.SHARDED) == zero3
    assert zero3.gradients is Gradients.SHARDED
    assert zero3.with_gradients(None) is zero3


def test_a_row_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STRATEGIES["zero3"].gathered = Gathered.STEP  # type: ignore[misc]


def test_settings_can_name_gradients_and_gathering_by_their_words() -> None:
    assert Gradients("whole") is Gradients.WHOLE
    assert Gathered("backward") is Gathered.BACKWARD
