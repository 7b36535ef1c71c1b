"""Fit two factors per device family and software class, and nothing else.

The factors scale matrix products and memory-bound operations. Families of sources weigh the same
whatever their number of rows; a penalty pulls factors towards 1, so that few rows move them little.
A class that fewer than two families measured on a device keeps 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.planner.cost.efficiency import Efficiency, Factors
from shardwright.planner.job import Job
from shardwright.planner.predict import predict

__all__ = ["Fit", "Sample", "fit_efficiencies"]

_PENALTY = 0.1
"""Weight of the pull towards 1, in units of a family's mean absolute log error."""

_STEPS = (0.10, 0.05, 0.02, 0.01)
_LOWEST, _HIGHEST = 0.6, 1.5
_MIN_FAMILIES = 2
_OUTLIER = 0.5
"""Log errors beyond this say nothing of a device's efficiency and count as this."""


Key = tuple[str, str]
"""Device family and software class."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was fitted.

    Attributes:
        factors: On all families; only where enough families measured.
        without: With one family left out, by its name.
    """

    factors: Factors
    without: dict[str, Factors]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured row.

    Attributes:
        job: What ran.
        family: Sources that belong together.
        tokens_per_s_per_device: Measured.
    """

    job: Job
    family: str
    tokens_per_s_per_device: float

    @property
    def key(self) -> Key:
        """What the factors depend on."""
        return (self.job.cluster.device.family, self.job.workload.software.class_name)


def fit_efficiencies(samples: Sequence[Sample]) -> Fit:
    """Fit factors, on all families and with each left out.

    Args:
        samples: Measured rows.
    """
    by_key: dict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_key[sample.key].append(sample)
    everyone = {key: _fit_families(key, members) for key, members in by_key.items()}
    without: dict[str, Factors] = {}
    for family in {sample.family for sample in samples}:
        factors = dict(everyone)
        for key, members in by_key.items():
            rest = [sample for sample in members if sample.family != family]
            if len(rest) < len(members):
                factors[key] = _fit_families(key, rest)
        without[family] = _present(factors)
    return Fit(factors=_present(everyone), without=without)


def _present(factors: Mapping[Key, Efficiency | None]) -> Factors:
    return {key: value for key, value in factors.items() if value is not None}


def _fit_families(key: Key, samples: Sequence[Sample]) -> Efficiency | None:
    if len({sample.family for sample in samples}) < _MIN_FAMILIES:
        return None
    return _fit_one(key, _thin(samples))


def _thin(samples: Sequence[Sample], most: int = 24) -> list[Sample]:
    """At most `most` rows of each family, evenly spaced: large tables repeat themselves."""
    by_family: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_family[sample.family].append(sample)
    kept = []
    for members in by_family.values():
        stride = max(1, math.ceil(len(members) / most))
        kept.extend(members[::stride])
    return kept


def _fit_one(key: Key, samples: Sequence[Sample]) -> Efficiency:
    """Coordinate descent with shrinking steps."""
    best = Efficiency()
    memo: dict[Efficiency, float] = {}

    def loss(candidate: Efficiency) -> float:
        if candidate not in memo:
            memo[candidate] = _loss(key, samples, candidate)
        return memo[candidate]

    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for candidate in _neighbours(best, step):
                if loss(candidate) < loss(best) - 1e-9:
                    best, improved = candidate, True
    return best


def _neighbours(centre: Efficiency, step: float) -> list[Efficiency]:
    found = []
    for matmul, memory in ((step, 0.0), (-step, 0.0), (0.0, step), (0.0, -step)):
        candidate = Efficiency(
            matmul=round(centre.matmul + matmul, 4), memory=round(centre.memory + memory, 4)
        )
        if all(_LOWEST <= value <= _HIGHEST for value in (candidate.matmul, candidate.memory)):
            found.append(candidate)
    return found


def _loss(key: Key, samples: Sequence[Sample], candidate: Efficiency) -> float:
    errors: Mapping[str, list[float]] = defaultdict(list)
    for sample in samples:
        predicted = predict(sample.job, efficiencies={key: candidate}).tokens_per_s_per_device
        error = abs(math.log(predicted / sample.tokens_per_s_per_device))
        errors[sample.family].append(min(error, _OUTLIER))
    mean = sum(sum(e) / len(e) for e in errors.values()) / len(errors)
    pull = abs(math.log(candidate.matmul)) + abs(math.log(candidate.memory))
    return mean + _PENALTY * pull
