"""The device mesh: which ranks shard, and which replicate.

`init_mesh` is the one place that reads the launcher's variables and starts the process group.
Ranks are numbered with the tensor axis innermost, then shard, replicate and pipeline, so that the
chattiest axes stay inside a node.
"""

from __future__ import annotations

import datetime as dt
import math
import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shardwright.core.errors import SpecError
from shardwright.runtime.failure import FailureMonitor
from shardwright.runtime.transport.base import Axis

__all__ = ["Mesh", "init_mesh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Axis sizes and this rank's process groups.

    Attributes:
        replicate: Size of the replicate axis (R).
        shard: Size of the shard axis (S).
        tensor: Size of the tensor axis.
        pipeline: Size of the pipeline axis.
        device: Where this rank computes.
        shard_axis: The shard axis, for parameter gathers.
        reduce_axis: The shard axis again, with a communicator of its own for reductions.
        replicate_axis: The replicate axis.
        data_axis: Both data axes in one: all ranks that see different data.
        monitor: Makes one rank's failure every rank's error.
    """

    replicate: int
    shard: int
    tensor: int
    pipeline: int
    device: torch.device
    shard_axis: Axis
    reduce_axis: Axis
    replicate_axis: Axis
    data_axis: Axis
    monitor: FailureMonitor

    @property
    def world_size(self) -> int:
        """Ranks in the mesh."""
        return self.replicate * self.shard * self.tensor * self.pipeline

    @property
    def data_rank(self) -> int:
        """This rank's place among the ranks that see different data."""
        return self.data_axis.rank

    @property
    def data_size(self) -> int:
        """Ranks that see different data: R x S."""
        return self.data_axis.size

    def __repr__(self) -> str:
        return (
            f"Mesh(pipeline={self.pipeline}, replicate={self.replicate}, shard={self.shard}, "
            f"tensor={self.tensor}, device={str(self.device)!r})"
        )


def init_mesh(
    *,
    replicate: int | None = None,
    shard: int | Literal["auto"] | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    device: torch.device | str | None = None,
    timeout_s: float = 600.0,
) -> Mesh:
    """Arrange the ranks in a mesh, starting the process group if none is started.

    Collective: every rank calls it with the same arguments.

    Args:
        replicate: Replicas; by default whatever the other sizes leave.
        shard: Ranks each replica is sharded over. By default all ranks that the other sizes
            leave; ``"auto"`` shards inside a node and replicates across nodes.
        tensor: Tensor-parallel ranks.
        pipeline: Pipeline stages.
        device: Where this rank computes; by default its own CUDA device where there is one,
            else the CPU.
        timeout_s: Bound on waits of the groups made here, in seconds.

    Returns:
        The mesh, the same shape on every rank.

    Raises:
        SpecError: Sizes don't multiply to the world size, or a launcher variable is missing.
    """
    chosen = _choose_device(device)
    timeout = dt.timedelta(seconds=timeout_s)
    world, rank = _join_world(chosen, timeout)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    sizes = _resolve_sizes(world, local_world, replicate, shard, tensor, pipeline)
    replicas, shards = sizes
    if tensor > 1 or pipeline > 1:
        raise SpecError(
            f"this version runs data axes only, found tensor={tensor}, pipeline={pipeline}; "
            "leave both at 1"
        )

    def ranks_along(axis: str) -> list[list[int]]:
        if axis == "shard":
            return [[r * shards + s for s in range(shards)] for r in range(replicas)]
        if axis == "replicate":
            return [[r * shards + s for r in range(replicas)] for s in range(shards)]
        return [list(range(world))]

    def make(axis: str, size: int) -> Axis:
        if size == 1:
            return Axis(name=axis, size=1, rank=0, group=None)
        mine = None
        for members in ranks_along(axis):
            group = dist.new_group(members, timeout=timeout)
            if rank in members:
                mine = Axis(
                    name=axis,
                    size=size,
                    rank=members.index(rank),
                    group=group,
                    members=tuple(members),
                )
        assert mine is not None, f"rank {rank} is on no {axis} group"
        return mine

    shard_axis = make("shard", shards)
    # NCCL serialises calls on one communicator, so reductions get their own; gloo does not.
    needs_own = chosen.type == "cuda" and shards > 1
    store, name = _rendezvous()
    reduce_axis = make("shard", shards) if needs_own else shard_axis
    replicate_axis = make("replicate", replicas)
    data_axis = shard_axis if replicas == 1 else make("data", world)
    return Mesh(
        replicate=replicas,
        shard=shards,
        tensor=tensor,
        pipeline=pipeline,
        device=chosen,
        shard_axis=shard_axis,
        reduce_axis=reduce_axis,
        replicate_axis=replicate_axis,
        data_axis=data_axis,
        monitor=FailureMonitor(
            store=store,
            name=name,
            rank=rank,
            world_size=world,
            axes=(shard_axis, reduce_axis, replicate_axis, data_axis),
        ),
    )


def _rendezvous() -> tuple[Store | None, str]:
    """The store ranks met at, None for one rank, and a name for one more mesh."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None, ""
    store = dist.distributed_c10d._get_default_store()
    # Every rank makes its meshes in the same order, so each counts to the same number.
    number = store.add(f"shardwright/meshes/{dist.get_rank()}", 1)
    return store, f"shardwright/mesh{number}"


def _choose_device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        chosen = torch.device(device)
    elif torch.cuda.is_available():
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    else:
        chosen = torch.device("cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    elif chosen.type != "cpu":
        raise SpecError(f"device must be a CUDA device or the CPU, found {str(chosen)!r}")
    return chosen


def _join_world(device: torch.device, timeout: dt.timedelta) -> tuple[int, int]:
    """Return ``(world_size, rank)``, starting the process group from the launcher's variables."""
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            return 1, 0
        missing = [k for k in ("RANK", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
        if missing:
            raise SpecError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, but {', '.join(missing)} is not; "
                "start the ranks with torchrun or shardwright.launch, or unset WORLD_SIZE"
            )
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    return dist.get_world_size(), dist.get_rank()


def _resolve_sizes(
    world: int,
    local_world: int,
    replicate: int | None,
    shard: int | Literal["auto"] | None,
    tensor: int,
    pipeline: int,
) -> tuple[int, int]:
    """Return ``(replicate, shard)`` for the ranks that tensor and pipeline leave."""
    given = {"replicate": replicate, "shard": shard, "tensor": tensor, "pipeline": pipeline}
    for name, size in given.items():
        if size is None or (name == "shard" and size == "auto"):
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise SpecError(f"mesh axis {name} must be a whole number from 1, found {size!r}")
    if world % (tensor * pipeline):
        raise SpecError(
            f"tensor={tensor} x pipeline={pipeline} does not divide the {world} ranks started"
        )
    data = world // (tensor * pipeline)
    if shard == "auto":
        shard = math.gcd(local_world, data)
    if shard is None:
        shard = data // replicate if replicate and data % replicate == 0 else data
        replicate = replicate or 1
    elif replicate is None:
        replicate = data // shard if data % shard == 0 else 1
    assert isinstance(shard, int), "shard was resolved above"
    assert replicate is not None, "replicate was resolved above"
    if replicate * shard != data:
        raise SpecError(
            f"mesh sizes must multiply to the ranks started: pipeline={pipeline} x "
            f"replicate={replicate} x shard={shard} x tensor={tensor} = "
            f"{pipeline * replicate * shard * tensor}, found {world} "
            f"rank{'s' if world != 1 else ''}. Change a size, or start "
            f"{pipeline * replicate * shard * tensor} ranks."
        )
    return replicate, shard
