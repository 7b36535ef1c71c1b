"""Why a layout wins, and what would change it, in words."""

from __future__ import annotations

from shardwright.planner.cost.efficiency import Factors
from shardwright.planner.predict import Prediction
from shardwright.planner.search import Candidate, SearchResult, winners_with

__all__ = ["changes_of", "reasons_for"]

_CLEAR = 0.01


def reasons_for(result: SearchResult) -> tuple[str, ...]:
    """Say why the best candidate is recommended."""
    best = _predicted(result.best)
    device = best.job.cluster.device
    spare = device.memory_gib - best.memory.needed_gib
    found = [
        f"{best.step_s:.2f} s per step, {best.tokens_per_s_per_device:,.0f} tokens/s per device, "
        f"MFU {best.mfu:.1%}; most of it is {best.limit}",
        f"it needs {best.memory.needed_gib:.1f} of {device.memory_gib:.1f} GiB ({spare:.1f} to "
        f"spare); the peak is at {best.memory.peak_at}",
    ]
    fastest = _predicted(result.candidates[0])
    if fastest is not best and fastest.step_s < best.step_s:
        found.append(
            f"{fastest.job.layout.describe()} is {best.step_s / fastest.step_s - 1:.1%} faster "
            f"with {fastest.memory.needed_gib:.1f} GiB: not worth it"
        )
    found.extend(_against_others(result, best))
    today = result.best_today
    if result.best.missing and today is not None:
        other = _predicted(today)
        found.append(
            f"the engine doesn't run {' and '.join(result.best.missing)} yet; of what it runs, "
            f"{today.job.layout.describe()} is best, {other.step_s / best.step_s - 1:.0%} slower"
        )
    return tuple(found)


def _predicted(candidate: Candidate) -> Prediction:
    assert candidate.prediction is not None, "only replayed candidates are compared"
    return candidate.prediction


def _against_others(result: SearchResult, best: Prediction) -> list[str]:
    """The best of each other strategy, and where it loses."""
    found = []
    seen = {result.best.strategy, result.candidates[0].strategy}
    for candidate in result.candidates:
        if candidate.strategy in seen:
            continue
        seen.add(candidate.strategy)
        other = _predicted(candidate)
        slower = other.step_s / best.step_s - 1
        if slower < _CLEAR:
            found.append(
                f"{candidate.job.layout.describe()} is as fast within 1 % and needs "
                f"{candidate.memory.needed_gib:.1f} GiB"
            )
            continue
        found.append(
            f"{candidate.job.layout.describe()} is {slower:.0%} slower: {_where(other, best)}"
        )
    return found


def _where(other: Prediction, best: Prediction) -> str:
    """What the slower one spends most of the difference on."""
    exposed = sum(other.exposed_s.values()) - sum(best.exposed_s.values())
    bubble = other.bubble_s - best.bubble_s
    recomputed = (
        other.job.workload.checkpointing != "none" and best.job.workload.checkpointing == "none"
    )
    small = other.job.workload.micro_batch < best.job.workload.micro_batch
    if bubble > max(exposed, 0.3 * (other.step_s - best.step_s)):
        return f"{bubble:.2f} s more pipeline bubble"
    if exposed > 0.3 * (other.step_s - best.step_s):
        return f"{exposed:.2f} s more waiting for collectives"
    if recomputed:
        return "it needs recomputation to fit"
    if small:
        return "its memory leaves room for smaller micro-batches only"
    return "more of its collectives compete with computation"


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
            name = winner.job.layout.describe()
            seconds = _predicted(winner).step_s
            if winner.strategy != result.best.strategy:
                found.append(f"with {change}, {name} wins ({seconds:.2f} s)")
            else:
                found.append(f"with {change}, {winner.strategy} still wins ({seconds:.2f} s)")
    faster = result.faster_unfit
    if faster is not None:
        other = _predicted(faster)
        best = _predicted(result.best)
        found.append(
            f"with {faster.memory.needed_gib:.1f} GiB to use per device, "
            f"{faster.job.layout.describe()} {_recomputing(faster)} would take "
            f"{1 - other.step_s / best.step_s:.0%} less time"
        )
    return tuple(found)


def _recomputing(candidate: Candidate) -> str:
    kind = candidate.job.workload.checkpointing
    return "without recomputation" if kind == "none" else f"with {kind} recomputation"
