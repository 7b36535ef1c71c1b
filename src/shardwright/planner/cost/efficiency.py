"""How much of a device's figures software reaches: two fitted factors per device family and class.

Everything else in the cost formulas is a vendor's figure, a shape, or a generic constant with its
source. The factors are fitted by ``benchmarks/planner/fit_efficiencies.py`` and committed beside
this file; a family and class without measurements from at least two sources keeps 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["FITTED", "GENERIC", "Efficiency", "Factors", "load_efficiencies", "load_left_out"]

FITTED = Path(__file__).with_name("efficiencies.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Factors on generic speeds.

    Attributes:
        matmul: On matrix products, attention included.
        memory: On operations bound by memory bandwidth.
        doubt: Why predictions with them may be wrong, in words; empty where nothing says so.
    """

    matmul: float = 1.0
    memory: float = 1.0
    doubt: str = ""


GENERIC = Efficiency()
"""Factors where nothing was fitted."""


Factors = dict[tuple[str, str], Efficiency]
"""Factors by device family and software class."""


@cache
def load_efficiencies() -> Factors:
    """The fitted factors, by ``(device family, software class)``."""
    return _factors(_read().get("factors", []))


@cache
def load_left_out() -> dict[str, Factors]:
    """Factors fitted without one family of sources, by its name: what a table is judged with."""
    return {family: _factors(rows) for family, rows in _read().get("without", {}).items()}


@cache
def _read() -> dict[str, Any]:
    if not FITTED.exists():
        return {}
    found: dict[str, Any] = json.loads(FITTED.read_text(encoding="utf-8"))
    return found


def _factors(rows: list[dict[str, Any]]) -> Factors:
    return {
        (row["family"], row["software_class"]): Efficiency(
            matmul=row["matmul"], memory=row["memory"]
        )
        for row in rows
    }
