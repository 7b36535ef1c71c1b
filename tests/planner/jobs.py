"""Jobs that several tests use."""

from __future__ import annotations

from typing import Any

from shardwright.planner.cluster import make_cluster
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.model_presets import find_model
from shardwright.planner.workload import WorkloadSpec

TINY = ModelSpec(
    name="tiny",
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=4,
    ffn_hidden=512,
    vocab=1024,
)


def job(
    model: str | ModelSpec = TINY,
    *,
    device: str = "a100-80",
    devices: int = 8,
    network: str | None = "8x200g-ib",
    strategy: str = "zero3",
    replicate: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    layout: dict[str, Any] | None = None,
    **workload: Any,
) -> Job:
    """A job on a mesh that uses every device."""
    settings = {"seq_len": 128, "micro_batch": 2, **workload}
    return Job(
        model=find_model(model) if isinstance(model, str) else model,
        cluster=make_cluster(device, devices, network=network),
        workload=WorkloadSpec(**settings),
        layout=LayoutSpec(
            strategy=strategy,
            replicate=replicate,
            shard=devices // (replicate * tensor * pipeline),
            tensor=tensor,
            pipeline=pipeline,
            **(layout or {}),
        ),
    )
