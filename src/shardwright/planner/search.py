"""Compare layouts of a job and recommend one.

Candidates are every strategy on every mesh the cluster allows, with micro-batches and kinds of
recomputation. Memory is estimated for all; those that fit are ordered by a lower bound on their
time, and the most promising are replayed in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.core.errors import PlanInfeasible, SpecError
from shardwright.core.strategy import STRATEGIES, Gathered, resolve_strategy
from shardwright.planner.checks import require_positive, require_type, require_types
from shardwright.planner.cluster import ClusterSpec
from shardwright.planner.cost.block import block_time, ends_time
from shardwright.planner.cost.efficiency import GENERIC, Efficiency, Factors, load_efficiencies
from shardwright.planner.cost.traced import traced_time
from shardwright.planner.device import DeviceSpec
from shardwright.planner.divide import divides, why_none_divides
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.memory import MemoryEstimate, estimate_memory
from shardwright.planner.model import ModelSpec
from shardwright.planner.predict import Prediction, predict
from shardwright.planner.recommend import recommended, runnable, step_s
from shardwright.planner.traced import TracedModel
from shardwright.planner.workload import Checkpointing, WorkloadSpec

__all__ = ["Candidate", "SearchResult", "SearchSpace", "search", "winners_with"]

_MAX_REPLAYED = 80
_PER_STRATEGY = 8
"""Candidates of each strategy that are replayed whatever the others promise."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may vary.

    Attributes:
        strategies: Names to compare; empty for all.
        micro_batches: Sequences per rank and micro-batch; empty for powers of two.
        checkpointing: Kinds of recomputation.
        max_tensor: Largest tensor axis; at most the devices of a node.
        max_pipeline: Most pipeline stages.
        headroom: Share of a device's memory to leave free.
        max_chunks: Most pieces of the model that a pipeline stage interleaves.
        layouts: Meshes to compare; empty for all.
        base: Settings that all meshes share: prefetch distances, bounds, transport, residency.
    """

    strategies: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    checkpointing: tuple[Checkpointing, ...] = ("none", "selective", "full")
    max_tensor: int = 8
    max_pipeline: int = 16
    headroom: float = 0.05
    max_chunks: int = 8
    layouts: tuple[LayoutSpec, ...] = ()
    base: LayoutSpec = field(default_factory=lambda: LayoutSpec(strategy="zero3"))

    def __post_init__(self) -> None:
        require_types("search", self)
        require_positive(
            "search",
            max_tensor=self.max_tensor,
            max_pipeline=self.max_pipeline,
            max_chunks=self.max_chunks,
        )
        for micro_batch in self.micro_batches:
            require_type("search", "each of micro_batches", micro_batch, "int")
            require_positive("search", micro_batch=micro_batch)
        for name in self.strategies:
            resolve_strategy(name)
        if not 0 <= self.headroom < 1:
            raise SpecError(f"headroom must be at least 0 and below 1, found {self.headroom}")


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
        return self.job.layout.tensor == self.job.layout.pipeline == 1


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        candidates: Replayed ones, fastest first.
        best: The recommendation.
        best_today: The same where the engine runs it today; None where nothing that it runs fits.
        front: Those that no other beats in both time and memory, fastest first.
        unfit: Per strategy, the candidate that came nearest to fitting where none fits.
        faster_unfit: A candidate whose time promises more than the best but doesn't fit, if any.
        num_considered: All candidates.
        num_fitting: Those that fit.
    """

    candidates: tuple[Candidate, ...]
    best: Candidate
    best_today: Candidate | None
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
    jobs = list(_jobs(model, cluster, workload, global_batch, chosen))
    if not jobs:
        layouts = chosen.layouts or tuple(_layouts(model, cluster, chosen))
        raise SpecError(
            why_none_divides(global_batch, chosen.micro_batches, layouts, cluster.num_devices)
        )
    limit_gib = cluster.device.memory_gib * (1 - chosen.headroom)
    considered = [_weigh(job, limit_gib) for job in jobs]
    fitting = [candidate for candidate in considered if candidate.fits]
    if not fitting:
        raise PlanInfeasible(_nearest(considered, limit_gib))
    factors = load_efficiencies() if efficiencies is None else efficiencies
    promising = _most_promising(fitting, factors)
    replayed = [
        replace(candidate, prediction=predict(candidate.job, efficiencies=factors))
        for candidate in promising
    ]
    replayed.extend(_with_residency(replayed, limit_gib, factors))
    replayed.sort(key=step_s)
    best = recommended(replayed)
    return SearchResult(
        candidates=tuple(replayed),
        best=best,
        best_today=None if best.missing else best,
        front=tuple(_front(replayed)),
        unfit=tuple(_nearest_per_strategy(considered)),
        faster_unfit=_faster_unfit(considered, best, factors),
        num_considered=len(considered),
        num_fitting=len(fitting),
    )


def _jobs(
    model: ModelSpec | TracedModel,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    global_batch: int,
    space: SearchSpace,
) -> Iterator[Job]:
    layouts = space.layouts or tuple(_layouts(model, cluster, space))
    for layout in layouts:
        per_rank, rest = divmod(global_batch, layout.num_data_ranks)
        if rest or not per_rank:
            continue
        for micro_batch in _micro_batches(per_rank, layout, space):
            accumulation = per_rank // micro_batch
            for kind in space.checkpointing:
                sized = replace(
                    workload,
                    micro_batch=micro_batch,
                    accumulation=accumulation,
                    checkpointing=kind,
                )
                yield Job(model=model, cluster=cluster, workload=sized, layout=layout)


def _micro_batches(per_rank: int, layout: LayoutSpec, space: SearchSpace) -> list[int]:
    """Micro-batches that divide a rank's sequences; small ones in pipelines, which need many."""
    wanted = space.micro_batches or tuple(2**i for i in range(8))
    return [size for size in wanted if divides(per_rank, size, layout)]


def _layouts(
    model: ModelSpec | TracedModel, cluster: ClusterSpec, space: SearchSpace
) -> Iterator[LayoutSpec]:
    names = space.strategies or tuple(STRATEGIES)
    for tensor in _tensor_sizes(model, cluster, space.max_tensor):
        for pipeline in _pipeline_sizes(model, cluster, tensor, space.max_pipeline):
            data = cluster.num_devices // (tensor * pipeline)
            for name in names:
                for shard in _shard_sizes(name, data, cluster, tensor):
                    for chunks in _chunk_counts(model.layers, pipeline, space.max_chunks):
                        yield replace(
                            space.base,
                            strategy=name,
                            replicate=data // shard,
                            shard=shard,
                            tensor=tensor,
                            pipeline=pipeline,
                            chunks_per_stage=chunks,
                            resident_units=_num_resident(space, name),
                        )


def _num_resident(space: SearchSpace, strategy: str) -> int:
    """Blocks asked to stay gathered, where the strategy would drop them."""
    drops = resolve_strategy(strategy).gathered is Gathered.USE
    return space.base.resident_units if drops else 0


def _chunk_counts(layers: int, pipeline: int, most: int) -> list[int]:
    """Pieces per stage: one, and the fewest and most into which a stage's blocks divide evenly.

    As in `LayoutSpec.stage_blocks`, both ends may count as a block each.
    """
    if pipeline == 1:
        return [1]
    even = [
        n
        for n in range(2, most + 1)
        if layers % (pipeline * n) == 0 or (layers + 2) % (pipeline * n) == 0
    ]
    return sorted({1, *even[:1], *even[-1:]})


def _tensor_sizes(model: ModelSpec | TracedModel, cluster: ClusterSpec, largest: int) -> list[int]:
    if isinstance(model, TracedModel):  # a trace doesn't say how to divide it
        return [1]
    limit = min(largest, cluster.devices_per_node)
    return [
        size
        for size in (1, 2, 4, 8, 16)
        if size <= limit
        and model.heads % size == 0
        and model.kv_heads % size == 0
        and model.ffn_hidden % size == 0
        and cluster.devices_per_node % size == 0
    ]


def _pipeline_sizes(
    model: ModelSpec | TracedModel, cluster: ClusterSpec, tensor: int, largest: int
) -> list[int]:
    if isinstance(model, TracedModel):
        return [1]
    return [
        size
        for size in (1, 2, 4, 8, 16, 32)
        if size <= min(largest, model.layers)
        and cluster.num_devices % (tensor * size) == 0
        and (size == 1 or cluster.num_devices > cluster.devices_per_node)
    ]


def _shard_sizes(name: str, data: int, cluster: ClusterSpec, tensor: int) -> list[int]:
    """Shard sizes worth comparing: everything for the plain kinds; nodes for the hybrid ones."""
    strategy = STRATEGIES.get(name)
    if strategy is None or not name.startswith("hybrid"):
        return [data if strategy is None or strategy.shards_parameters else 1]
    per_node = max(1, cluster.devices_per_node // tensor)
    sizes = [per_node * nodes for nodes in (1, 2, 4, 8)]
    return [size for size in sizes if 1 < size < data and data % size == 0]


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


def _nearest(considered: Sequence[Candidate], limit_gib: float) -> str:
    """Say what comes nearest to fitting, and how many devices would do."""
    nearest = min(considered, key=lambda candidate: candidate.memory.needed_gib)
    job = nearest.job
    kind = job.workload.checkpointing.replace("none", "no")
    text = (
        f"no layout of {job.model.name} fits {job.cluster.name}: the smallest, "
        f"{job.layout.describe()} with micro-batch {job.workload.micro_batch} and "
        f"{kind} recomputation, needs {nearest.memory.needed_gib:.1f} GiB "
        f"per device; {limit_gib:.1f} of its {job.cluster.device.memory_gib:.1f} may be used."
    )
    more = _devices_that_fit(job, limit_gib)
    if more is not None:
        return f"{text} With that micro-batch, zero3 fits {more} devices."
    return f"{text} Shorten the sequence, or divide the model over a tensor axis."


def _devices_that_fit(job: Job, limit_gib: float) -> int | None:
    """The smallest power-of-two multiple of the cluster on which zero3 over all of it fits."""
    for factor in (2, 4, 8, 16, 32, 64):
        shard = job.layout.num_data_ranks * factor
        layout = replace(job.layout, strategy="zero3", replicate=1, shard=shard)
        workload = replace(job.workload, micro_batch=1, checkpointing="full")
        if estimate_memory(job.model, layout, workload).needed_gib <= limit_gib:
            return job.cluster.num_devices * factor
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
