"""A measured step, read from a file, as factors to scale the planner by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardwright.app.plan_request import WorkloadRequest
from shardwright.core.errors import SpecError, nearest
from shardwright.planner.checks import require_positive, require_type
from shardwright.planner.cluster import ClusterSpec
from shardwright.planner.cost.efficiency import Factors
from shardwright.planner.files import read_model
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.probe import factors_from_probe
from shardwright.planner.text_files import read_document
from shardwright.planner.traced import TracedModel

__all__ = ["read_probe"]

_KINDS = {
    "step_s": "float",
    "devices": "int",
    "strategy": "str",
    "replicate": "int",
    "shard": "int",
    "tensor": "int",
    "pipeline": "int",
    "micro_batch": "int",
    "accumulation": "int",
    "checkpointing": "str",
    "seq_len": "int",
    "model": "str",
}
"""Keys of the file, with the type of each."""


def read_probe(
    path: Path, model: ModelSpec | TracedModel, cluster: ClusterSpec, request: WorkloadRequest
) -> Factors:
    """Factors from a measured step.

    Args:
        path: JSON or TOML; what it leaves out is as in the request.
        model: The request's.
        cluster: The request's.
        request: The request's workload.

    Raises:
        SpecError: The file can't be understood, or no speed of computation explains the step.
    """
    found = read_document(path, "probe")
    where = f"probe {str(path)!r}"
    for key, value in found.items():
        if key not in _KINDS:
            raise SpecError(f"{where}: unknown key {key!r}; {nearest(key, _KINDS)}")
        require_type(where, key, value, _KINDS[key])
        if _KINDS[key] != "str":
            require_positive(where, **{key: value})
    for key in ("step_s", "strategy", "micro_batch"):
        if key not in found:
            raise SpecError(f"{where} lacks {key!r}")
    devices = found.get("devices", cluster.num_devices)
    per_node = min(cluster.devices_per_node, devices)
    if devices % per_node:
        raise SpecError(f"{where}: {devices} devices don't fill nodes of {per_node}")
    axes = {axis: found.get(axis, 1) for axis in ("replicate", "shard", "tensor", "pipeline")}
    if "shard" not in found and "replicate" not in found:
        axes["shard"] = max(1, devices // (axes["tensor"] * axes["pipeline"]))
    measured_on = replace(cluster, num_nodes=devices // per_node, devices_per_node=per_node)
    workload = replace(
        request.workload,
        micro_batch=found["micro_batch"],
        accumulation=found.get("accumulation", 1),
        checkpointing=found.get("checkpointing", "none"),
        seq_len=found.get("seq_len", request.workload.seq_len),
    )
    job = Job(
        model=read_model(found["model"]) if "model" in found else model,
        cluster=measured_on,
        workload=workload,
        layout=LayoutSpec(strategy=found["strategy"], **axes),
    )
    return factors_from_probe(job, found["step_s"])
