"""How a job is divided over a cluster: the strategy and the size of each mesh axis.

Ranks are laid out as the engine's mesh lays them: tensor ranks next to each other, then shard
ranks, then replicas, then pipeline stages. So tensor and shard groups sit inside a node as far as
they fit, and whatever spans nodes pays for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.core.errors import SpecError
from shardwright.core.strategy import Gathered, Strategy, resolve_strategy
from shardwright.planner.checks import (
    require_choice,
    require_non_negative,
    require_positive,
    require_types,
)

__all__ = ["LayoutSpec"]


@dataclass(frozen=True, kw_only=True)
class LayoutSpec:
    """Strategy and mesh.

    Attributes:
        strategy: Name or alias of a strategy.
        replicate: Size of the replicate axis.
        shard: Size of the shard axis.
        tensor: Size of the tensor axis.
        pipeline: Stages.
        chunks_per_stage: Pieces of the model each stage holds (interleaving).
        forward_prefetch: Units gathered ahead in forward.
        backward_prefetch: Units gathered ahead in backward.
        backward_prefetch_at: ``"pre"``: that gather starts before a unit's backward and hides
            behind it; ``"post"``: after it, which needs no slot for it.
        max_in_flight: Bound on gathers started and not yet used.
        reduce_in_flight: Reductions left unfinished while another unit computes.
        transport: ``"pairwise"`` receives reductions into buffers of its own (CPU);
            ``"collective"`` needs none.
        resident_units: Blocks kept gathered from forward to backward (the last ones).
        wraps_blocks: Whether each block is a unit; where False the whole model is one.
    """

    strategy: str
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    chunks_per_stage: int = 1
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    backward_prefetch_at: Literal["pre", "post"] = "pre"
    max_in_flight: int = 2
    reduce_in_flight: int = 1
    transport: Literal["collective", "pairwise"] = "collective"
    resident_units: int = 0
    wraps_blocks: bool = True

    def __post_init__(self) -> None:
        require_types("layout", self)
        resolve_strategy(self.strategy)
        require_positive(
            "layout",
            replicate=self.replicate,
            shard=self.shard,
            tensor=self.tensor,
            pipeline=self.pipeline,
            chunks_per_stage=self.chunks_per_stage,
            max_in_flight=self.max_in_flight,
        )
        require_non_negative(
            "layout",
            forward_prefetch=self.forward_prefetch,
            backward_prefetch=self.backward_prefetch,
            reduce_in_flight=self.reduce_in_flight,
            resident_units=self.resident_units,
        )
        require_choice("layout", "backward_prefetch_at", self.backward_prefetch_at, ("pre", "post"))
        require_choice("layout", "transport", self.transport, ("collective", "pairwise"))
        if self.chunks_per_stage > 1 and self.pipeline == 1:
            raise SpecError(
                f"layout: chunks_per_stage={self.chunks_per_stage} needs pipeline stages, found "
                "pipeline=1; set pipeline above 1 or drop it"
            )

    @property
    def resolved(self) -> Strategy:
        """The strategy's row."""
        return resolve_strategy(self.strategy)

    @property
    def gathered(self) -> Gathered:
        """How long units stay gathered: through the step where nothing is sharded."""
        return self.resolved.gathered if self.shard_degree > 1 else Gathered.STEP

    @property
    def gather_distance(self) -> int:
        """Units whose gathers may be in flight beside the one that computes, as in the engine."""
        backward = self.backward_prefetch if self.backward_prefetch_at == "pre" else 0
        return min(max(self.forward_prefetch, backward), self.max_in_flight)

    @property
    def shard_degree(self) -> int:
        """Ranks that divide what the strategy shards: 1 for `ddp`."""
        return self.shard if self.resolved.shards_parameters else 1

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard: all data ranks for `ddp`."""
        return self.replicate if self.resolved.shards_parameters else self.num_data_ranks

    @property
    def optimizer_degree(self) -> int:
        """Ranks that divide the optimizer state."""
        if not self.resolved.shards_parameters:
            return 1
        return self.shard * (self.replicate if self.resolved.optimizer_over_replicas else 1)

    @property
    def num_data_ranks(self) -> int:
        """Ranks with different data."""
        return self.replicate * self.shard

    @property
    def is_data_only(self) -> bool:
        """Whether it has no axes but those that the engine divides over today."""
        return self.tensor == self.pipeline == 1

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_data_ranks * self.tensor * self.pipeline

    def stage_blocks(self, layers: int) -> tuple[int, ...]:
        """Blocks of each stage.

        Stages are filled as pipelines commonly are: the look-up and the head count as a block each
        where only that divides evenly, else the first stages have one block more.

        Args:
            layers: Blocks of the model.
        """
        stages = self.pipeline
        each, rest = divmod(layers, stages)
        if rest and (layers + 2) % stages == 0:
            return (each, *[each + 1] * (stages - 2), each)
        return tuple(each + (stage < rest) for stage in range(stages))

    def describe(self) -> str:
        """The layout in one line, such as ``zero3 shard=64 tensor=8``."""
        axes = ("replicate", "shard", "tensor", "pipeline")
        sizes = [f"{axis}={getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        if self.chunks_per_stage > 1:
            sizes.append(f"chunks={self.chunks_per_stage}")
        if self.resident_units:
            sizes.append(f"resident={self.resident_units}")
        return " ".join([self.resolved.name, *sizes])
