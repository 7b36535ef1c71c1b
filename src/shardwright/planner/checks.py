"""Checks that the descriptions of a job share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from shardwright.core.errors import SpecError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "require_choice",
    "require_non_negative",
    "require_positive",
    "require_type",
    "require_types",
]

_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "str": ("a text", (str,)),
}
"""What a field of a type holds, in words and in types; fields of other types check themselves."""


@cache
def _checked_fields(kind: type[DataclassInstance]) -> tuple[tuple[str, str], ...]:
    return tuple((f.name, str(f.type)) for f in fields(kind) if str(f.type) in _KINDS)


def require_types(owner: str, spec: DataclassInstance) -> None:
    """Raise unless every whole number, number, flag and text of a dataclass is one.

    Nothing is converted: 4096.5, "4096" and true are no whole numbers, and a number is finite.
    """
    for name, kind in _checked_fields(type(spec)):
        require_type(owner, name, getattr(spec, name), kind)


def require_type(owner: str, name: str, value: Any, kind: str) -> None:
    """Raise unless a value is of a kind: ``int``, ``float``, ``bool`` or ``str``."""
    words, types = _KINDS[kind]
    is_flag = isinstance(value, bool)
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, types) or is_flag != (kind == "bool") or not is_finite:
        raise SpecError(f"{owner}: {name} must be {words}, found {value!r}")


def require_positive(owner: str, **values: float) -> None:
    """Raise unless every value is a number above zero."""
    for name, value in values.items():
        require_type(owner, name, value, "float")
        if not value > 0:
            raise SpecError(f"{owner}: {name} must be greater than 0, found {value!r}")


def require_non_negative(owner: str, **values: float) -> None:
    """Raise unless every value is a number of zero or more."""
    for name, value in values.items():
        require_type(owner, name, value, "float")
        if not value >= 0:
            raise SpecError(f"{owner}: {name} must be 0 or more, found {value!r}")


def require_choice(owner: str, name: str, value: str, valid: Iterable[str]) -> None:
    """Raise unless the value is one of the valid ones."""
    names = list(valid)
    if value not in names:
        raise SpecError(f"{owner}: unknown {name} {value!r}; {nearest(str(value), names)}")
