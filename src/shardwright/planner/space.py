"""What may vary between the layouts of a job, and every candidate that this allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shardwright.core.errors import SpecError
from shardwright.core.strategy import STRATEGIES, Gathered, resolve_strategy
from shardwright.planner.checks import require_positive, require_type, require_types
from shardwright.planner.cluster import ClusterSpec
from shardwright.planner.divide import divides
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.memory import estimate_memory
from shardwright.planner.model import ModelSpec
from shardwright.planner.traced import TracedModel
from shardwright.planner.workload import Checkpointing, WorkloadSpec

__all__ = ["Question", "SearchSpace"]


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
        tries_residency: Whether blocks that stay gathered are tried on the fastest candidates.
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
    tries_residency: bool = True

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
class Question:
    """What is to be trained where, in steps of which size, and what may vary.

    Attributes:
        model: Shape.
        cluster: Where.
        workload: Sequence length, dtypes, kernels; its batch and recomputation are replaced.
        global_batch: Sequences per step over all ranks.
        space: What may vary.
    """

    model: ModelSpec | TracedModel
    cluster: ClusterSpec
    workload: WorkloadSpec
    global_batch: int
    space: SearchSpace

    @property
    def limit_gib(self) -> float:
        """Memory of a device that may be used, GiB."""
        return self.cluster.device.memory_gib * (1 - self.space.headroom)

    def layouts(self) -> tuple[LayoutSpec, ...]:
        """All meshes that are compared."""
        return self.space.layouts or tuple(_layouts(self.model, self.cluster, self.space))

    def jobs(self) -> Iterator[Job]:
        """All candidates: simple meshes, small micro-batches and little recomputation first."""
        for layout in self.layouts():
            per_rank, rest = divmod(self.global_batch, layout.num_data_ranks)
            if rest or not per_rank:
                continue
            for micro_batch in _micro_batches(per_rank, layout, self.space):
                for kind in self.space.checkpointing:
                    sized = replace(
                        self.workload,
                        micro_batch=micro_batch,
                        accumulation=per_rank // micro_batch,
                        checkpointing=kind,
                    )
                    yield Job(model=self.model, cluster=self.cluster, workload=sized, layout=layout)

    def first_fitting(self) -> Job | None:
        """The first candidate that fits the memory."""
        for job in self.jobs():
            memory = estimate_memory(job.model, job.layout, job.workload)
            if memory.needed_gib <= self.limit_gib:
                return job
        return None


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
