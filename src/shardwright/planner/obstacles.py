"""Why nothing fits, or nothing that the engine runs, and which change was found to help.

Every change that is named was tried: its memory was estimated as in a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.planner.divide import why_none_divides
from shardwright.planner.job import Job
from shardwright.planner.memory import GIB, estimate_memory
from shardwright.planner.space import Question
from shardwright.planner.traced import TracedModel

if TYPE_CHECKING:
    from shardwright.planner.search import Candidate

__all__ = ["why_not_today", "why_nothing_fits"]

_MOST_TIMES = 64
"""Clusters up to so many times as large are tried."""


def why_nothing_fits(question: Question, considered: Sequence[Candidate]) -> str:
    """Say what comes nearest to fitting, and what would fit.

    Args:
        question: What was asked.
        considered: All candidates, none of which fits.
    """
    nearest = min(considered, key=lambda candidate: candidate.memory.needed_gib)
    device = question.cluster.device
    return (
        f"no layout of {question.model.name} fits {question.cluster.name}: the smallest, "
        f"{_settings(nearest.job)}, needs {nearest.memory.needed_gib:.1f} GiB per device; "
        f"{question.limit_gib:.1f} of its {device.memory_gib:.1f} may be used. {_help(question)}"
    )


def why_not_today(question: Question, best: Job, considered: Sequence[Candidate]) -> str:
    """Say why what is recommended needs what the engine doesn't run yet; empty where it doesn't.

    Args:
        question: What was asked.
        best: The recommended job.
        considered: All candidates.
    """
    if not best.missing:
        return ""
    if all(candidate.job.missing_options for candidate in considered):
        is_all = best.missing == best.missing_options
        asked = "that" if is_all else " and ".join(best.missing_options)
        return f"an option asked for {asked}: plan without it to have what the engine runs"
    layouts = [layout for layout in question.layouts() if layout.is_data_only]
    if not layouts:
        return "no mesh without them was compared"
    if not any(candidate.is_data_only for candidate in considered):
        return "without them, " + why_none_divides(
            question.global_batch,
            question.space.micro_batches,
            layouts,
            question.cluster.num_devices,
        )
    return f"nothing without them fits. {_help(_data_only(question))}"


def _help(question: Question) -> str:
    """What would fit, of what leaves most of the question as it is."""
    space = question.space
    other = _with_any_strategy(question) if space.strategies else None
    if other is not None:
        return f"{_settings(other)} fits the same {question.cluster.num_devices} devices."
    grown = _grown(question)
    if grown is not None:
        return _fits(question, grown)
    text = f"More data ranks don't help: {_what_stays(question)}."
    freed = _freed(question)
    for trial in freed:
        found = trial.first_fitting() or _grown(trial)
        if found is not None:
            return f"{text} {_fits(question, found)}"
    shorter = _shortened(freed[-1])
    if shorter is None:
        return f"{text} Take a smaller model, or devices with more memory."
    length = shorter.workload.seq_len
    return f"{text} With sequences of {length} tokens, {_fits(question, shorter)}"


def _with_any_strategy(question: Question) -> Job | None:
    return replace(question, space=replace(question.space, strategies=())).first_fitting()


def _freed(question: Question) -> list[Question]:
    """Everything recomputed, whatever was fixed; any micro-batch; both."""
    space = question.space
    recomputing = replace(space, checkpointing=("full",))
    spaces = (
        recomputing,
        replace(space, micro_batches=()),
        replace(recomputing, micro_batches=()),
    )
    return [replace(question, space=freed) for freed in spaces]


def _shortened(question: Question) -> Job | None:
    """What fits the longest of a half, a quarter and so on of the sequence."""
    if isinstance(question.model, TracedModel):  # traced at one length
        return None
    seq_len = question.workload.seq_len // 2
    while seq_len:
        workload = replace(question.workload, seq_len=seq_len)
        found = replace(question, workload=workload).first_fitting()
        if found is not None:
            return found
        seq_len //= 2
    return None


def _fits(question: Question, job: Job) -> str:
    text = f"{_settings(job)} fits {job.cluster.num_devices} devices"
    sequences = job.workload.micro_batch * job.workload.accumulation * job.layout.num_data_ranks
    if sequences != question.global_batch:
        text += f", with a global batch of {sequences}"
    return f"{text}."


def _settings(job: Job) -> str:
    kind = job.workload.checkpointing.replace("none", "no")
    return (
        f"{job.layout.describe()} with micro-batch {job.workload.micro_batch} and {kind} "
        "recomputation"
    )


def _grown(question: Question) -> Job | None:
    """The job on the fewest nodes that suffice, over data axes only, with what is fixed."""
    nodes = question.cluster.num_nodes
    for strategy in dict.fromkeys((*question.space.strategies, "zero3")):
        too_few, enough = nodes, 2 * nodes
        while enough <= _MOST_TIMES * nodes and not _on(question, strategy, enough):
            too_few, enough = enough, 2 * enough
        if enough > _MOST_TIMES * nodes:
            continue
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if _on(question, strategy, middle):
                enough = middle
            else:
                too_few = middle
        return _on(question, strategy, enough)
    return None


def _on(question: Question, strategy: str, num_nodes: int) -> Job | None:
    """What fits so many nodes under a strategy, with the least recomputation that is allowed."""
    return _enlarged(question, strategy, num_nodes).first_fitting()


def _enlarged(question: Question, strategy: str, num_nodes: int) -> Question:
    """The question for other nodes, its batch rounded up to one that divides over them."""
    cluster = replace(question.cluster, num_nodes=num_nodes)
    micro_batch = min(question.space.micro_batches, default=1)
    least = cluster.num_devices * micro_batch
    space = replace(
        _data_only(question).space, strategies=(strategy,), micro_batches=(micro_batch,), layouts=()
    )
    batch = -(-question.global_batch // least) * least
    return replace(question, cluster=cluster, global_batch=batch, space=space)


def _data_only(question: Question) -> Question:
    space = question.space
    layouts = tuple(layout for layout in space.layouts if layout.is_data_only)
    return replace(question, space=replace(space, max_tensor=1, max_pipeline=1, layouts=layouts))


def _what_stays(question: Question) -> str:
    """The two largest parts of what a rank holds however many there are."""
    most = _enlarged(question, "zero3", _MOST_TIMES * question.cluster.num_nodes)
    *_, job = most.jobs()  # the one that recomputes most
    parts = estimate_memory(job.model, job.layout, job.workload).categories
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    named = [f"{name.replace('_', ' ')} of {parts[name] / GIB:.1f} GiB" for name in largest]
    return f"{' and '.join(named)} don't shrink with them"
