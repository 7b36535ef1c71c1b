"""What a scenario finds out, and what stops it from finding anything out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

__all__ = ["Finding", "NotApplicable", "Planted", "compare_tensors", "first_line"]


class NotApplicable(Exception):
    """The engine has no such thing; the message says why."""


class Planted(Exception):
    """The error that a scenario itself raises."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison with the truth.

    Attributes:
        what: What was compared.
        difference: Largest difference, or another size that should be small.
        tolerance: Up to which it counts as right.
        note: What the figure doesn't say.
    """

    what: str
    difference: float
    tolerance: float
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it is within its tolerance; NaN isn't."""
        return self.difference <= self.tolerance


def compare_tensors(
    what: str,
    expected: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
    *,
    tolerance: float,
) -> list[Finding]:
    """Compare tensors by name.

    Args:
        what: For the findings.
        expected: The truth.
        found: The engine's, whole.
        tolerance: For the differences.

    Returns:
        The worst difference, absolute for tensors up to 1 and relative to the largest element for
        others, and how many names or shapes differ if any does.
    """
    odd = sorted(expected.keys() ^ found.keys())
    odd += [k for k in expected.keys() & found.keys() if expected[k].shape != found[k].shape]
    worst, where = 0.0, ""
    for name in [k for k in expected if k in found and k not in odd and expected[k].numel()]:
        truth = expected[name].double()
        gap = (truth - found[name].double()).abs().max().item() / max(1.0, truth.abs().max().item())
        if not gap <= worst and not math.isnan(worst):
            worst, where = gap, name
    findings = [Finding(what=what, difference=worst, tolerance=tolerance, note=where)]
    if odd:
        note = f"names or shapes differ: {', '.join(odd[:4])}"
        findings.append(Finding(what=f"{what}: names", difference=len(odd), tolerance=0, note=note))
    return findings


def first_line(message: str) -> str:
    """The first line of a message, without places in sources, in ASCII, at most 300 characters."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = re.sub(r"\[/\S+\] ", "", lines[0]) if lines else "no message"
    return line.encode("ascii", "ignore").decode().strip()[:300]
