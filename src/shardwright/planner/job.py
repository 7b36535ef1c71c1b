"""A job: a model, where it is trained, what a step is, and how it is divided."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.errors import SpecError
from shardwright.planner.cluster import ClusterSpec
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.workload import WorkloadSpec

__all__ = ["Job"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, where it is trained, what a step is, and how it is divided."""

    model: ModelSpec
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
