"""`sw.plan`: what a run will cost on which layout, and which to take.

Takes names, tables or descriptions (`plan_request.py`), and imports torch only to trace a module
that comes with a sample. The command line prints what this returns (`plans.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.app.plan_probe import read_probe
from shardwright.app.plan_request import (
    WorkloadRequest,
    read_cluster_request,
    read_model_request,
    read_workload,
    space_for,
)
from shardwright.app.plans import Plans
from shardwright.core.errors import SpecError
from shardwright.planner.advice import changes_of, reasons_for
from shardwright.planner.cluster import ClusterSpec
from shardwright.planner.device import DeviceSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.search import SearchSpace, search
from shardwright.planner.traced import TracedModel

__all__ = ["Plans", "WorkloadRequest", "plan"]


def plan(
    *,
    model: Any,
    cluster: ClusterSpec | Mapping[str, Any] | str | Path,
    workload: WorkloadRequest | Mapping[str, Any],
    sample: Any = None,
    units: Any = "auto",
    strategy: str | Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    space: SearchSpace | None = None,
    probe: str | Path | None = None,
) -> Plans:
    """Compare layouts of a training run.

    Args:
        model: A preset's name, the path of a `config.json` or of sizes in TOML, a `ModelSpec`; any
            module together with `sample`; or a module whose `config` is a Hugging Face one or the
            training application's.
        cluster: ``"64 x h100"``, with ``"over 8x400g-ib"`` where the network is known; the path of
            a cluster file; its content; or a `ClusterSpec`.
        workload: `seq_len`, `global_batch` in sequences (or `global_batch_tokens`), and what else
            is to be fixed.
        sample: ``(args, kwargs)`` of one micro-batch's forward, or a function making them: the
            module is traced with it, on the meta device. `seq_len` is then that of the sample.
        units: How to divide a traced module; as `shard` takes it.
        strategy: Compare this one only, or these; None compares all.
        settings: Settings of the engine, by the names `shard` has for them.
        space: What may vary.
        probe: A measured step to scale by: a JSON file with `step_s` and its job.

    Returns:
        The plans; ``plans.best`` is the recommended one.

    Raises:
        SpecError: Something can't be understood.
        PlanInfeasible: Nothing fits.
    """
    where = read_cluster_request(cluster)
    shape: ModelSpec | TracedModel
    if sample is None:
        if units != "auto":
            raise SpecError("units divides a traced module; pass sample too, or leave units out")
        shape, request = read_model_request(model), read_workload(workload, where.device)
        _check_positions(shape, request.workload.seq_len)
    else:
        shape, request = _traced(model, sample, units, workload, where.device)
    chosen = space_for(space, request, settings, shape, strategy)
    factors = read_probe(Path(probe), shape, where, request) if probe is not None else None
    result = search(
        shape, where, request.workload, request.global_batch, chosen, efficiencies=factors
    )
    return Plans(result=result, reasons=reasons_for(result), changes=changes_of(result, factors))


def _check_positions(model: ModelSpec, seq_len: int) -> None:
    """Refuse sequences for which a model has no positions."""
    longest = model.max_seq_len or model.num_positions
    if model.positions == "learned" and seq_len > longest:
        raise SpecError(
            f"seq_len must be at most the {longest} positions that {model.name} has learned, found "
            f"{seq_len}; shorten it, or give the sizes of a model with more"
        )


def _check_module(model: Any) -> None:
    """Refuse what can't be traced, or has nothing to train."""
    if not hasattr(model, "named_parameters"):
        raise SpecError(
            f"sample belongs to a module that is traced, found model={model!r}; leave sample out, "
            "or pass the module"
        )
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise SpecError(
            f"nothing to train: every parameter of {type(model).__name__} is frozen; set "
            "requires_grad on those to train"
        )


def _traced(
    model: Any,
    sample: Any,
    units: Any,
    workload: WorkloadRequest | Mapping[str, Any],
    device: DeviceSpec,
) -> tuple[TracedModel, WorkloadRequest]:
    """Trace a module under the workload's precision, and take the sequence length from there."""
    from shardwright.app.tracing import trace_model

    _check_module(model)
    has_length = not isinstance(workload, Mapping) or "seq_len" in workload
    if isinstance(workload, Mapping) and not has_length:
        if "global_batch_tokens" in workload:
            raise SpecError("workload: global_batch_tokens needs seq_len too; or give global_batch")
        workload = {"seq_len": 1, **workload}
    request = read_workload(workload, device)
    traced = trace_model(
        model,
        sample,
        param=request.workload.precision.param,
        attention=request.workload.software.attention,
        units=units,
    )
    if not has_length:
        sized = replace(request.workload, seq_len=traced.tokens_per_sample)
        request = replace(request, workload=sized)
    return traced, request
