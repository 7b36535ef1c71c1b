"""Checks that the descriptions of a job share."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.core.errors import SpecError, nearest

__all__ = ["require_choice", "require_non_negative", "require_positive"]


def require_positive(owner: str, **values: float) -> None:
    """Raise unless every value is above zero."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise SpecError(f"{owner}: {name} must be greater than 0, found {value!r}")


def require_non_negative(owner: str, **values: float) -> None:
    """Raise unless every value is zero or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise SpecError(f"{owner}: {name} must be 0 or more, found {value!r}")


def require_choice(owner: str, name: str, value: str, valid: Iterable[str]) -> None:
    """Raise unless the value is one of the valid ones."""
    names = list(valid)
    if value not in names:
        raise SpecError(f"{owner}: unknown {name} {value!r}; {nearest(str(value), names)}")
