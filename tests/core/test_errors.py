"""The tree of exceptions, and the hint that names the nearest valid choice."""

from __future__ import annotations

import re

import pytest

from shardwright.core import errors
from shardwright.core.errors import LaunchError, ShardwrightError, nearest

BUILT_IN_BASE = {
    "SpecError": ValueError,
    "LayoutError": ValueError,
    "LifecycleError": RuntimeError,
    "RankMismatchError": RuntimeError,
    "CheckpointError": RuntimeError,
    "PlanInfeasible": ValueError,
    "LaunchError": RuntimeError,
}


@pytest.mark.parametrize("name", BUILT_IN_BASE)
def test_every_error_can_be_caught_as_ours_and_as_pythons(name: str) -> None:
    error = getattr(errors, name)
    for base in (ShardwrightError, BUILT_IN_BASE[name]):
        with pytest.raises(base, match="what happened"):
            raise error("what happened")


def test_the_tree_drawn_on_top_of_the_module_is_the_tree_there_is() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+) \((\w+)\)", errors.__doc__ or ""))
    ours = [c for c in ShardwrightError.__subclasses__() if c.__module__ == errors.__name__]
    found = {cls.__name__: cls.__mro__[2].__name__ for cls in ours}
    assert drawn == found
    assert set(BUILT_IN_BASE) <= set(found)
    assert set(errors.__all__) == {*found, "ShardwrightError", "nearest"}
    assert all(not cls.__subclasses__() for cls in ours)


def test_the_root_is_no_built_in_error_of_python() -> None:
    assert ShardwrightError.__mro__[1] is Exception
    assert not issubclass(LaunchError, ValueError)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("zero_3", "zero3"), ("zro2", "zero2"), ("hybird", "hybrid"), ("dpp", "ddp")],
)
def test_the_nearest_name_comes_first_and_all_valid_ones_follow(given: str, meant: str) -> None:
    valid = ["ddp", "zero2", "zero3", "hybrid"]
    assert nearest(given, valid) == f"did you mean '{meant}'? (valid: ddp, zero2, zero3, hybrid)"


def test_a_name_that_resembles_none_gets_the_valid_ones_only() -> None:
    assert nearest("qqqq", ["ddp", "zero2"]) == "valid: ddp, zero2"


def test_names_may_come_from_an_iterator_that_can_be_read_once() -> None:
    assert nearest("ddp", iter(["ddp", "zero2"])) == "did you mean 'ddp'? (valid: ddp, zero2)"
