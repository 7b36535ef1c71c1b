"""Every exception Shardwright raises on purpose.

    ShardwrightError
    ├── SpecError (ValueError)            a setting, mesh, strategy or model description is wrong
    ├── LayoutError (ValueError)          parameters cannot be laid out as asked
    ├── LifecycleError (RuntimeError)     something was called in the wrong state or order
    ├── RankMismatchError (RuntimeError)  ranks disagree about model, settings or schedule
    ├── RankFailedError (RuntimeError)    another rank raised, died or never came
    ├── CheckpointError (RuntimeError)    a checkpoint is torn, foreign or does not match
    ├── PlanInfeasible (ValueError)       nothing fits the request; says the nearest that does
    └── LaunchError (RuntimeError)        a launched rank failed; carries its report

A message says what was expected, what was found (names, ranks, sizes) and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "LaunchError",
    "LayoutError",
    "LifecycleError",
    "PlanInfeasible",
    "RankFailedError",
    "RankMismatchError",
    "ShardwrightError",
    "SpecError",
    "nearest",
]


class ShardwrightError(Exception):
    """Root of all errors raised by Shardwright."""


class SpecError(ShardwrightError, ValueError):
    """A setting, mesh, strategy or model description is wrong."""


class LayoutError(ShardwrightError, ValueError):
    """Parameters cannot be laid out over the ranks as asked."""


class LifecycleError(ShardwrightError, RuntimeError):
    """An operation came in the wrong state or order."""


class RankMismatchError(ShardwrightError, RuntimeError):
    """Ranks disagree about the model, the settings or the schedule."""


class RankFailedError(ShardwrightError, RuntimeError):
    """Another rank raised alone, died or never came; the message names it."""


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint is torn, foreign or does not match the model."""


class PlanInfeasible(ShardwrightError, ValueError):
    """No layout satisfies the request; the message names the nearest that does."""


class LaunchError(ShardwrightError, RuntimeError):
    """A launched rank failed; the message carries its rank and its report."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Say which valid name a wrong one most likely meant.

    Args:
        name: What was given.
        valid: The accepted names.

    Returns:
        A sentence fragment such as ``did you mean 'zero3'? Valid: ddp, zero1``.
    """
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listing = "valid: " + ", ".join(names)
    return f"did you mean {close[0]!r}? ({listing})" if close else listing
