"""Why a layout wins, and what would change it, in words."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.planner.cost.efficiency import Factors
from shardwright.planner.predict import Prediction
from shardwright.planner.recommend import RECOMPUTATIONS, TOLERANCE, runnable, step_s, ties
from shardwright.planner.search import Candidate, SearchResult, winners_with

__all__ = ["changes_of", "reasons_for", "seconds"]


def seconds(value: float) -> str:
    """A time to four digits or so."""
    return f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def reasons_for(result: SearchResult) -> tuple[str, ...]:
    """Say why the best candidate is recommended."""
    best = _predicted(result.best)
    device = best.job.cluster.device
    spare = device.memory_gib - best.memory.needed_gib
    found = [
        f"{seconds(best.step_s)} s per step, {best.tokens_per_s_per_device:,.0f} tokens/s per "
        f"device, MFU {best.mfu:.1%}; the largest part is {best.limit}",
        f"it needs {best.memory.needed_gib:.1f} of {device.memory_gib:.1f} GiB ({spare:.1f} to "
        f"spare); the peak is at {best.memory.peak_at}",
    ]
    found.extend(_why_this_one(result))
    found.extend(_against_others(result, best))
    return tuple(found)


def _why_this_one(result: SearchResult) -> list[str]:
    """What else is as fast, and what is faster but can't run yet."""
    best, found = result.best, []
    equal = ties(result.candidates)
    if len(equal) > 1:
        fastest = min(equal, key=step_s)
        gain = step_s(best) / step_s(fastest) - 1
        behind = "" if fastest is best else f", {gain:.1%} behind {_settings(fastest)}"
        found.append(
            f"of {len(equal)} settings as fast within {TOLERANCE:.0%} it is the simplest{behind}: "
            "it shards least, then recomputes least, then uses fewest axes"
        )
    if best.missing:
        found.append(
            f"it needs {_all_of(best.missing)}, which the engine doesn't run yet; "
            f"{result.why_not_today.rstrip('.')}"
        )
    beyond = result.candidates[0]
    gain = 1 - step_s(beyond) / step_s(best)
    if best.is_data_only > beyond.is_data_only and gain > TOLERANCE:
        found.append(
            f"{_settings(beyond)} would take {gain:.0%} less time, but needs "
            f"{_all_of(beyond.missing)}, which the engine doesn't run yet"
        )
    return found


def _all_of(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _settings(candidate: Candidate) -> str:
    """A layout with what tells it from others of the same mesh."""
    workload = candidate.job.workload
    text = f"{candidate.job.layout.describe()} with micro-batches of {workload.micro_batch}"
    kind = workload.checkpointing
    return text if kind == "none" else f"{text} and {kind} recomputation"


def _predicted(candidate: Candidate) -> Prediction:
    assert candidate.prediction is not None, "only replayed candidates are compared"
    return candidate.prediction


def _against_others(result: SearchResult, best: Prediction) -> list[str]:
    """The best of each other strategy, and where it loses."""
    found = []
    seen = {result.best.strategy}
    for candidate in runnable(result.candidates):
        if candidate.strategy in seen:
            continue
        seen.add(candidate.strategy)
        other = _predicted(candidate)
        slower = other.step_s / best.step_s - 1
        if slower < TOLERANCE:
            found.append(
                f"{candidate.job.layout.describe()} is as fast within {TOLERANCE:.0%} and needs "
                f"{candidate.memory.needed_gib:.1f} GiB"
            )
            continue
        found.append(
            f"{candidate.job.layout.describe()} is {slower:.0%} slower: {_where(other, best)}"
        )
    return found


def _where(other: Prediction, best: Prediction) -> str:
    """What the slower one spends most of the difference on."""
    theirs, ours = _parts(other), _parts(best)
    more = {name: theirs[name] - ours[name] for name in theirs}
    largest = max(more, key=lambda name: more[name])
    slower, wins = other.job.workload, best.job.workload
    if largest == "computation":
        if RECOMPUTATIONS.index(slower.checkpointing) > RECOMPUTATIONS.index(wins.checkpointing):
            return f"it fits only with {slower.checkpointing} recomputation"
        if slower.micro_batch < wins.micro_batch:
            return f"it fits only with micro-batches of {slower.micro_batch}"
    is_offset = more[largest] > 1.1 * (other.step_s - best.step_s)
    text = f"{seconds(more[largest])} s more {_PART_WORDS[largest]}"
    return f"{text}, less of the rest" if is_offset else text


_PART_WORDS = {
    "computation": "of computation",
    "optimizer": "in the optimizer step, where each rank updates more",
    "collectives": "waiting for collectives",
    "bubble": "of pipeline bubble",
    "rest": "of copies, launches and collectives that compete with computation",
}


def _parts(prediction: Prediction) -> dict[str, float]:
    """What a step consists of, in seconds."""
    parts = prediction.parts_s
    found = {
        "computation": sum(parts[name] for name in ("matmul", "attention", "elementwise")),
        "optimizer": parts["optimizer"],
        "collectives": sum(prediction.exposed_s.values()),
        "bubble": prediction.bubble_s,
    }
    return found | {"rest": prediction.step_s - sum(found.values())}


def changes_of(result: SearchResult, factors: Factors | None = None) -> tuple[str, ...]:
    """Say what would change the recommendation: another network, or more memory."""
    cluster = result.best.job.cluster
    found = []
    if cluster.num_nodes > 1:
        clusters = {
            "twice the bandwidth between nodes": cluster.with_network(factor=2.0),
            "half the bandwidth between nodes": cluster.with_network(factor=0.5),
        }
        for change, winner in winners_with(result, clusters, factors).items():
            is_same = winner.job.layout == result.best.job.layout
            still = "it is still" if is_same else f"{_settings(winner)} would be"
            found.append(f"with {change}, {still} the one to take ({seconds(step_s(winner))} s)")
    faster = result.faster_unfit
    if faster is not None:
        other = _predicted(faster)
        best = _predicted(result.best)
        found.append(
            f"with {faster.memory.needed_gib:.1f} GiB of memory to use per device, "
            f"{faster.job.layout.describe()} {_recomputing(faster)} would take "
            f"{1 - other.step_s / best.step_s:.0%} less time"
        )
    return tuple(found)


def _recomputing(candidate: Candidate) -> str:
    kind = candidate.job.workload.checkpointing
    return "without recomputation" if kind == "none" else f"with {kind} recomputation"
