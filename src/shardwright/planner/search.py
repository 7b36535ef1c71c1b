"""Compare layouts of a job and recommend one.

Candidates are every strategy on every mesh the cluster allows, with micro-batches and kinds of
recomputation. Memory is estimated for all; those that fit are ordered by a lower bound on their
time, and the most promising are replayed in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.core.errors import PlanInfeasible, SpecError
from shardwright.core.strategy import Gathered
from shardwright.planner.checks import require_positive
from shardwright.planner.cluster import ClusterSpec
from shardwright.planner.cost.block import block_time, ends_time
from shardwright.planner.cost.efficiency import GENERIC, Efficiency, Factors, load_efficiencies
from shardwright.planner.cost.traced import traced_time
from shardwright.planner.device import DeviceSpec
from shardwright.planner.divide import why_none_divides
from shardwright.planner.job import Job
from shardwright.planner.memory import MemoryEstimate, estimate_memory
from shardwright.planner.model import ModelSpec
from shardwright.planner.obstacles import why_not_today, why_nothing_fits
from shardwright.planner.predict import Prediction, predict
from shardwright.planner.recommend import recommended, runnable, step_s
from shardwright.planner.space import Question, SearchSpace
from shardwright.planner.traced import TracedModel
from shardwright.planner.workload import WorkloadSpec

__all__ = ["Candidate", "SearchResult", "SearchSpace", "search", "winners_with"]

_MAX_REPLAYED = 80
_PER_STRATEGY = 8
"""Candidates of each strategy that are replayed whatever the others promise."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that was considered.

    Attributes:
        job: The job.
        memory: Its memory.
        fits: Whether that leaves the headroom.
        prediction: Its cost; None where it doesn't fit or promised too little to replay.
    """

    job: Job
    memory: MemoryEstimate
    fits: bool
    prediction: Prediction | None = None

    @property
    def strategy(self) -> str:
        """Its strategy's name."""
        return self.job.layout.resolved.name

    @property
    def missing(self) -> tuple[str, ...]:
        """What the engine can't run yet, of what this layout needs."""
        return self.job.missing

    @property
    def is_data_only(self) -> bool:
        """Whether it has no axes but those that the engine divides over today."""
        return self.job.layout.is_data_only


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        candidates: Replayed ones, fastest first.
        best: The recommendation.
        why_not_today: Why the best is nothing that the engine runs yet; empty where it is.
        front: Those that no other beats in both time and memory, fastest first.
        unfit: Per strategy, the candidate that came nearest to fitting where none fits.
        faster_unfit: A candidate whose time promises more than the best but doesn't fit, if any.
        num_considered: All candidates.
        num_fitting: Those that fit.
    """

    candidates: tuple[Candidate, ...]
    best: Candidate
    why_not_today: str
    front: tuple[Candidate, ...]
    unfit: tuple[Candidate, ...]
    faster_unfit: Candidate | None
    num_considered: int
    num_fitting: int


def search(
    model: ModelSpec | TracedModel,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    global_batch: int,
    space: SearchSpace | None = None,
    *,
    efficiencies: Factors | None = None,
) -> SearchResult:
    """Find the layout with the shortest step that fits.

    Args:
        model: Shape.
        cluster: Where.
        workload: Sequence length, dtypes, kernels; its batch and recomputation are replaced.
        global_batch: Sequences per step over all ranks.
        space: What may vary.
        efficiencies: Fitted factors; None takes the committed ones.

    Raises:
        SpecError: The batch can't be divided over any mesh.
        PlanInfeasible: Nothing fits; the message says what comes nearest.
    """
    chosen = space or SearchSpace()
    require_positive("search", global_batch=global_batch)
    question = Question(
        model=model, cluster=cluster, workload=workload, global_batch=global_batch, space=chosen
    )
    limit_gib = question.limit_gib
    considered = [_weigh(job, limit_gib) for job in question.jobs()]
    if not considered:
        raise SpecError(
            why_none_divides(
                global_batch, chosen.micro_batches, question.layouts(), cluster.num_devices
            )
        )
    fitting = [candidate for candidate in considered if candidate.fits]
    if not fitting:
        raise PlanInfeasible(why_nothing_fits(question, considered))
    factors = load_efficiencies() if efficiencies is None else efficiencies
    promising = _most_promising(fitting, factors)
    replayed = [
        replace(candidate, prediction=predict(candidate.job, efficiencies=factors))
        for candidate in promising
    ]
    if chosen.tries_residency:
        replayed.extend(_with_residency(replayed, limit_gib, factors))
    replayed.sort(key=step_s)
    best = recommended(replayed)
    return SearchResult(
        candidates=tuple(replayed),
        best=best,
        why_not_today=why_not_today(question, best.job, considered),
        front=tuple(_front(replayed)),
        unfit=tuple(_nearest_per_strategy(considered)),
        faster_unfit=_faster_unfit(considered, best, factors),
        num_considered=len(considered),
        num_fitting=len(fitting),
    )


def _weigh(job: Job, limit_gib: float) -> Candidate:
    memory = estimate_memory(job.model, job.layout, job.workload)
    return Candidate(job=job, memory=memory, fits=memory.needed_gib <= limit_gib)


def _bound_s(job: Job, factors: Factors) -> float:
    """A lower bound on a step: computation of a stage and the pipeline's bubble."""
    workload, layout, device = job.workload, job.layout, job.cluster.device
    efficiency = factors.get((device.family, workload.software.class_name), GENERIC)
    model = job.model
    if isinstance(model, TracedModel):
        return _traced_s(model, workload, device, efficiency) * workload.accumulation
    block = block_time(model, workload, device, efficiency, tensor=layout.tensor)
    embedding, head = ends_time(model, workload, device, efficiency, tensor=layout.tensor)
    last = layout.stage_blocks(model.layers)[-1]
    one = last * (block.forward_s + block.backward_s) + head.forward_s + head.backward_s
    if layout.pipeline == 1:
        one += embedding.forward_s + embedding.backward_s
    return one * (workload.accumulation + (layout.pipeline - 1) / layout.chunks_per_stage)


def _traced_s(
    model: TracedModel, workload: WorkloadSpec, device: DeviceSpec, efficiency: Efficiency
) -> float:
    """Computation of one micro-batch of a traced model."""
    total = 0.0
    memo: dict[tuple[int, bool], float] = {}
    for unit in model.units:
        key = (id(unit.trace), unit.is_block)
        if key not in memo:
            times = traced_time(
                model, unit.trace, workload, device, efficiency, is_checkpointed=unit.is_block
            )
            memo[key] = times.forward_s + times.backward_s
        total += memo[key]
    return total


def _most_promising(candidates: Sequence[Candidate], factors: Factors) -> list[Candidate]:
    """The best bounds of all, and some of each strategy, with and without what can't run yet."""
    ordered = sorted(candidates, key=lambda candidate: _bound_s(candidate.job, factors))
    kept = []
    num_alike: Counter[tuple[str, bool]] = Counter()
    for index, candidate in enumerate(ordered):
        alike = (candidate.strategy, candidate.is_data_only)
        num_alike[alike] += 1
        if index < _MAX_REPLAYED or num_alike[alike] <= _PER_STRATEGY:
            kept.append(candidate)
    return kept


def _with_residency(
    candidates: Sequence[Candidate], limit_gib: float, factors: Factors
) -> Iterator[Candidate]:
    """The fastest candidates again, with blocks kept gathered from forward to backward."""
    for candidate in sorted(runnable(candidates), key=step_s)[:4]:
        job = candidate.job
        if job.layout.gathered is not Gathered.USE or job.layout.resident_units:
            continue
        for share in (4, 2, 1):
            layout = replace(job.layout, resident_units=job.model.layers // share)
            resident = _weigh(replace(job, layout=layout), limit_gib)
            if resident.fits and job.layout.pipeline == 1:
                yield replace(resident, prediction=predict(resident.job, efficiencies=factors))


def _front(ordered: Sequence[Candidate]) -> list[Candidate]:
    front: list[Candidate] = []
    for candidate in ordered:
        if not front or candidate.memory.peak_bytes < front[-1].memory.peak_bytes:
            front.append(candidate)
    return front


def _nearest_per_strategy(considered: Sequence[Candidate]) -> list[Candidate]:
    best: dict[str, Candidate] = {}
    fitting = {candidate.strategy for candidate in considered if candidate.fits}
    for candidate in considered:
        known = best.get(candidate.strategy)
        if known is None or candidate.memory.peak_bytes < known.memory.peak_bytes:
            best[candidate.strategy] = candidate
    return [candidate for name, candidate in best.items() if name not in fitting]


def _faster_unfit(
    considered: Sequence[Candidate], best: Candidate, factors: Factors
) -> Candidate | None:
    """The candidate that needs least beyond the memory, of those that would clearly be faster."""
    goal = 0.97 * step_s(best)
    unfit = sorted(
        (c for c in considered if not c.fits and c.is_data_only >= best.is_data_only),
        key=lambda candidate: candidate.memory.peak_bytes,
    )
    for candidate in unfit[:40]:
        if _bound_s(candidate.job, factors) < goal:
            prediction = predict(candidate.job, efficiencies=factors)
            if prediction.step_s < goal:
                return replace(candidate, prediction=prediction)
    return None


def winners_with(
    result: SearchResult, clusters: Mapping[str, ClusterSpec], factors: Factors | None = None
) -> dict[str, Candidate]:
    """What would be recommended on other clusters, by the same rule.

    Args:
        result: A search.
        clusters: What would change, by a few words.
        factors: Fitted factors; None takes the committed ones.

    Returns:
        The winner under each change.
    """
    pool = runnable(result.candidates)
    return {
        change: recommended([_judged_on(cluster, candidate, factors) for candidate in pool])
        for change, cluster in clusters.items()
    }


def _judged_on(cluster: ClusterSpec, candidate: Candidate, factors: Factors | None) -> Candidate:
    job = replace(candidate.job, cluster=cluster)
    return replace(candidate, job=job, prediction=predict(job, efficiencies=factors))
