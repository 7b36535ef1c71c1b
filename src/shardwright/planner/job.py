"""A job: a model, where it is trained, what a step is, and how it is divided."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.errors import SpecError
from shardwright.planner.cluster import ClusterSpec
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.traced import TracedModel
from shardwright.planner.workload import CompressionSpec, WorkloadSpec

__all__ = ["Job"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, where it is trained, what a step is, and how it is divided."""

    model: ModelSpec | TracedModel
    cluster: ClusterSpec
    workload: WorkloadSpec
    layout: LayoutSpec

    def __post_init__(self) -> None:
        world, devices = self.layout.world_size, self.cluster.num_devices
        if world != devices:
            raise SpecError(
                f"the mesh must use every device: {self.layout.describe()!r} has {world} ranks, "
                f"the cluster {devices} devices; change an axis or the number of nodes"
            )
        if self.layout.resident_units > self.model.layers:
            raise SpecError(
                f"residency must be at most the {self.model.layers} blocks of {self.model.name}, "
                f"found {self.layout.resident_units}"
            )
        if isinstance(self.model, TracedModel):
            self._check_traced(self.model)
            return
        # The look-up and the head may fill a place of their own.
        if self.layout.pipeline * self.layout.chunks_per_stage > self.model.layers + 2:
            raise SpecError(
                f"pipeline={self.layout.pipeline} x chunks_per_stage="
                f"{self.layout.chunks_per_stage} needs that many blocks; {self.model.name} has "
                f"{self.model.layers}"
            )
        if self.model.heads % self.layout.tensor:
            raise SpecError(
                f"tensor={self.layout.tensor} must divide the heads; {self.model.name} has "
                f"{self.model.heads}"
            )

    @property
    def missing(self) -> tuple[str, ...]:
        """What the engine can't run yet, of what this job needs."""
        layout = self.layout
        needs = (
            (layout.tensor > 1, "tensor parallelism"),
            (layout.pipeline > 1, "pipeline stages"),
            (layout.chunks_per_stage > 1, "interleaved stages"),
        )
        return (*(name for is_needed, name in needs if is_needed), *self.missing_options)

    @property
    def missing_options(self) -> tuple[str, ...]:
        """The same on whatever mesh: what the workload asks for."""
        workload = self.workload
        kind = workload.checkpointing
        needs = (
            (workload.optimizer.is_offloaded, "offloading of the optimizer"),
            (workload.parameters_offloaded, "offloading of parameters"),
            (workload.compression != CompressionSpec(), "compressed collectives"),
            (kind not in ("none", "selective", "full"), f"recomputation of kind {kind!r}"),
        )
        return tuple(name for is_needed, name in needs if is_needed)

    def _check_traced(self, model: TracedModel) -> None:
        layout = self.layout
        if layout.tensor > 1 or layout.pipeline > 1:
            raise SpecError(
                f"{model.name} was traced, and nothing says how to divide it over tensor="
                f"{layout.tensor}, pipeline={layout.pipeline}; plan data axes only, or give the "
                "model by name, configuration or sizes"
            )
        model.check_seq_len(self.workload.seq_len)
        if model.param != self.workload.precision.param:
            raise SpecError(
                f"{model.name} was traced in {model.param}, the workload computes in "
                f"{self.workload.precision.param}; trace it again"
            )
        if self.workload.software.engine != "shardwright":
            raise SpecError("traced models are planned for this engine only")
