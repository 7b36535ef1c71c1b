"""`sw.plan`: what a run will cost on which layout, and which to take.

Takes names, tables or descriptions, and imports torch only to trace a module that comes with a
sample. The command line prints what this returns.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.app.presets import DecoderConfig
from shardwright.core.errors import SpecError, nearest
from shardwright.planner.advice import changes_of, reasons_for
from shardwright.planner.cluster import ClusterSpec, make_cluster
from shardwright.planner.cost.efficiency import Factors
from shardwright.planner.files import cluster_from_table, read_cluster, read_document, read_model
from shardwright.planner.huggingface import from_config
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.plan_file import as_document, write_plan
from shardwright.planner.predict import Prediction
from shardwright.planner.probe import factors_from_probe
from shardwright.planner.search import Candidate, SearchResult, SearchSpace, search
from shardwright.planner.traced import TracedModel
from shardwright.planner.workload import (
    NormKernel,
    OptimizerSpec,
    PrecisionSpec,
    SoftwareSpec,
    WorkloadSpec,
)

__all__ = ["Plans", "WorkloadRequest", "plan"]

_UNITS = "Memory in GiB (2^30 bytes), links in GB/s (1e9 bytes per second, one direction)."

_WORKLOAD_KEYS = (
    "seq_len",
    "global_batch",
    "global_batch_tokens",
    "micro_batch",
    "checkpointing",
    "attention",
    "norm",
    "loss",
    "software",
    "param",
    "reduce",
    "state",
    "optimizer",
    "optimizer_implementation",
    "offload_optimizer",
)

_NOT_MODELLED = {
    "context": "context parallelism, which divides sequences over ranks, is",
    "context_parallel": "context parallelism, which divides sequences over ranks, is",
    "compression": "compressed collectives are",
    "expert_parallel": "expert parallelism is",
}
"""What one may ask for, and how to say that it isn't there."""

_COLUMNS = (
    "layout",
    "micro_batch",
    "accumulation",
    "checkpointing",
    "step_s",
    "tokens_per_s_per_device",
    "mfu",
    "peak_gib",
    "sent_gb",
    "exposed_share",
    "limit",
    "needs",
)


@dataclass(frozen=True, kw_only=True)
class WorkloadRequest:
    """A workload whose batch is still to be divided.

    Attributes:
        workload: Sequence length, dtypes, kernels.
        global_batch: Sequences per step over all ranks.
        micro_batch: Fixed sequences per rank and micro-batch; None leaves it open.
        checkpointing: Fixed kind of recomputation; None leaves it open.
    """

    workload: WorkloadSpec
    global_batch: int
    micro_batch: int | None = None
    checkpointing: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plans:
    """Layouts compared, fastest first.

    Attributes:
        result: The search.
        reasons: Why the best is the best, in words.
        changes: What would change that, in words.
    """

    result: SearchResult
    reasons: tuple[str, ...]
    changes: tuple[str, ...]

    @property
    def best(self) -> Prediction:
        """The recommended layout's prediction."""
        assert self.result.best.prediction is not None, "the best was replayed"
        return self.result.best.prediction

    def rows(self, most: int | None = None) -> list[dict[str, Any]]:
        """One row per replayed layout: the fastest of each strategy and mesh."""
        seen: set[str] = set()
        found = []
        for candidate in self.result.candidates:
            name = candidate.job.layout.describe()
            if name not in seen:
                seen.add(name)
                found.append(_row(candidate))
        return found[:most]

    def table(self, most: int = 12) -> str:
        """The comparison as text."""
        job = self.best.job
        width = max(len(row["layout"]) for row in self.rows(most)) + 2
        lines = [
            f"{job.model.name}, {job.model.num_parameters / 1e9:.2f} G parameters, on "
            f"{job.cluster.name}; {_links(job.cluster)}.",
            _UNITS,
            "",
            f"{'layout':{width}s} {'mb x acc':>9s} {'recompute':>10s} {'step s':>8s} "
            f"{'tok/s/dev':>10s} {'MFU':>6s} {'GiB':>6s} {'sent GB':>8s} {'exposed':>8s}  limit",
        ]
        for row in self.rows(most):
            mark = "*" if row["needs"] else " "
            size = f"{row['micro_batch']} x {row['accumulation']}"
            lines.append(
                f"{row['layout'] + mark:{width}s} {size:>9s} {row['checkpointing']:>10s} "
                f"{row['step_s']:8.2f} {row['tokens_per_s_per_device']:10.0f} {row['mfu']:6.1%} "
                f"{row['peak_gib']:6.1f} {row['sent_gb']:8.1f} {row['exposed_share']:8.1%}  "
                f"{row['limit']}"
            )
        if any(row["needs"] for row in self.rows(most)):
            lines.append("* the engine doesn't run this yet: " + _all_missing(self.rows(most)))
        lines.extend(
            f"{candidate.strategy} does not fit: at least {candidate.memory.needed_gib:.1f} GiB "
            f"({candidate.job.layout.describe()})"
            for candidate in self.result.unfit
        )
        lines.extend(["", f"Take {self.best.job.layout.describe()}:"])
        lines.extend(f"  - {reason}" for reason in self.reasons)
        lines.extend(f"  - {change}" for change in self.changes)
        lines.extend(f"  ! {warning}" for warning in self.best.warnings)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        front = [_row(candidate) for candidate in self.result.front]
        return {
            "units": _UNITS,
            "best": as_document(self.best),
            "layouts": self.rows(),
            "pareto_front": front,
            "unfit": [
                {
                    "layout": candidate.job.layout.describe(),
                    "needed_gib": candidate.memory.needed_gib,
                }
                for candidate in self.result.unfit
            ],
            "reasons": list(self.reasons),
            "what_would_change_it": list(self.changes),
            "considered": self.result.num_considered,
            "fitting": self.result.num_fitting,
        }

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def to_csv(self) -> str:
        """The comparison as CSV."""
        text = io.StringIO()
        writer = csv.DictWriter(text, _COLUMNS)
        writer.writeheader()
        writer.writerows(self.rows())
        return text.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the recommended layout as a plan file."""
        write_plan(self.best, Path(path))


def _row(candidate: Candidate) -> dict[str, Any]:
    predicted = candidate.prediction
    assert predicted is not None, "only replayed candidates are listed"
    return {
        "layout": candidate.job.layout.describe(),
        "micro_batch": candidate.job.workload.micro_batch,
        "accumulation": candidate.job.workload.accumulation,
        "checkpointing": candidate.job.workload.checkpointing,
        "step_s": predicted.step_s,
        "tokens_per_s_per_device": predicted.tokens_per_s_per_device,
        "mfu": predicted.mfu,
        "peak_gib": candidate.memory.peak_gib,
        "sent_gb": sum(predicted.sent_bytes.values()) / 1e9,
        "exposed_share": predicted.exposed_share,
        "limit": predicted.limit,
        "needs": ", ".join(candidate.missing),
    }


def _links(cluster: ClusterSpec) -> str:
    inside = f"{cluster.inner.bandwidth_gbps:g} GB/s between devices of a node"
    if cluster.num_nodes == 1:
        return inside
    return f"{inside}, {cluster.node_gbps:g} GB/s out of each of {cluster.num_nodes} nodes"


def _all_missing(rows: Sequence[Mapping[str, Any]]) -> str:
    names = {name for row in rows for name in row["needs"].split(", ") if name}
    return ", ".join(sorted(names))


def plan(
    *,
    model: Any,
    cluster: ClusterSpec | Mapping[str, Any] | str,
    workload: WorkloadRequest | Mapping[str, Any],
    sample: Any = None,
    units: Any = "auto",
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
        settings: Settings of the engine, by the names `shard` has for them.
        space: What may vary.
        probe: A measured step to scale by: a JSON file with `step_s` and its job.

    Returns:
        The plans; ``plans.best`` is the recommended one.

    Raises:
        SpecError: Something can't be understood.
        PlanInfeasible: Nothing fits.
    """
    where = _cluster(cluster)
    shape: ModelSpec | TracedModel
    if sample is None:
        shape = _model(model)
        request = workload if isinstance(workload, WorkloadRequest) else _request(workload)
    else:
        shape, request = _traced(model, sample, units, workload)
    chosen = space or SearchSpace()
    if settings:
        chosen = replace(chosen, base=_with_settings(chosen.base, settings, shape))
    if request.micro_batch is not None:
        chosen = replace(chosen, micro_batches=(request.micro_batch,))
    if request.checkpointing is not None:
        kinds = (replace(request.workload, checkpointing=request.checkpointing).checkpointing,)  # type: ignore[arg-type]
        chosen = replace(chosen, checkpointing=kinds)
    factors = _probed(Path(probe), shape, where, request) if probe is not None else None
    result = search(
        shape, where, request.workload, request.global_batch, chosen, efficiencies=factors
    )
    return Plans(result=result, reasons=reasons_for(result), changes=changes_of(result, factors))


def _traced(
    model: Any, sample: Any, units: Any, workload: WorkloadRequest | Mapping[str, Any]
) -> tuple[TracedModel, WorkloadRequest]:
    """Trace a module under the workload's precision, and take the sequence length from there."""
    from shardwright.app.tracing import trace_model

    has_length = isinstance(workload, WorkloadRequest) or "seq_len" in workload
    if isinstance(workload, WorkloadRequest):
        request = workload
    elif not has_length and "global_batch_tokens" in workload:
        raise SpecError("workload: global_batch_tokens needs seq_len too; or give global_batch")
    else:
        request = _request({"seq_len": 1, **workload})
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


_SETTINGS = (
    "forward_prefetch",
    "backward_prefetch",
    "backward_prefetch_at",
    "max_in_flight",
    "reduce_in_flight",
    "residency",
    "transport",
)


def _with_settings(
    base: LayoutSpec, settings: Mapping[str, Any], model: ModelSpec | TracedModel
) -> LayoutSpec:
    for name in settings:
        if name not in _SETTINGS:
            raise SpecError(f"settings: unknown key {name!r}; {nearest(str(name), _SETTINGS)}")
    found = dict(settings)
    if "residency" in found:
        found["resident_units"] = _num_resident(found.pop("residency"), model)
    return replace(base, **found)


def _num_resident(residency: Any, model: ModelSpec | TracedModel) -> int:
    """Blocks that stay gathered: the last ones are planned, whichever are named."""
    if isinstance(residency, int) and not isinstance(residency, bool):
        return residency
    if isinstance(residency, str) or not isinstance(residency, Sequence):
        raise SpecError(
            f"settings: residency must be a number of blocks or names of units, found {residency!r}"
        )
    if isinstance(model, TracedModel):
        blocks = [unit.name for unit in model.units if unit.is_block]
        for name in residency:
            if name not in blocks:
                raise SpecError(f"residency names no block {name!r}; {nearest(str(name), blocks)}")
    return len(residency)


def _model(given: Any) -> ModelSpec:
    if isinstance(given, ModelSpec):
        return given
    if isinstance(given, (str, Path)):
        return read_model(str(given))
    config = given if isinstance(given, DecoderConfig) else getattr(given, "config", None)
    if isinstance(config, DecoderConfig):
        return _decoder(config)
    if config is not None and hasattr(config, "to_dict"):
        return from_config(config.to_dict(), name=type(given).__name__)
    if hasattr(given, "named_parameters"):
        raise SpecError(
            f"{type(given).__name__} has no configuration that the planner knows; pass sample="
            "(args, kwargs) of one micro-batch's forward too, and it is traced"
        )
    raise SpecError(
        "model must be a preset's name, a path, a ModelSpec, or a module with sample=..., found "
        f"{type(given).__name__}"
    )


def _decoder(config: DecoderConfig) -> ModelSpec:
    """The training application's own decoder."""
    return ModelSpec(
        name="decoder",
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        ffn_hidden=config.ffn_hidden,
        vocab=config.vocab_size,
        tied=config.tie_embeddings,
        max_seq_len=config.max_seq_len,
    )


def _cluster(given: ClusterSpec | Mapping[str, Any] | str) -> ClusterSpec:
    if isinstance(given, ClusterSpec):
        return given
    if isinstance(given, Mapping):
        return cluster_from_table(given, "cluster")
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\S+)(?:\s+over\s+(\S+))?\s*", given)
    if match:
        return make_cluster(match.group(2), int(match.group(1)), network=match.group(3))
    if Path(given).exists():
        return read_cluster(Path(given))
    raise SpecError(
        f"cluster must read like '64 x h100' or '64 x h100 over 8x400g-ib', or be the path of a "
        f"cluster file, found {given!r}"
    )


def _request(table: Mapping[str, Any]) -> WorkloadRequest:
    for key in table:
        if key in _NOT_MODELLED:
            raise SpecError(f"{_NOT_MODELLED[key]} not modelled; leave {key!r} out")
        if key not in _WORKLOAD_KEYS:
            raise SpecError(f"workload: unknown key {key!r}; {nearest(str(key), _WORKLOAD_KEYS)}")
    if "seq_len" not in table:
        raise SpecError("workload lacks 'seq_len', the tokens of a sequence")
    seq_len = table["seq_len"]
    workload = WorkloadSpec(
        seq_len=seq_len,
        micro_batch=table.get("micro_batch") or 1,
        precision=PrecisionSpec(
            **{k: table[k] for k in ("param", "reduce", "state") if k in table}
        ),
        optimizer=OptimizerSpec(
            kind=table.get("optimizer", "adamw"),
            implementation=table.get("optimizer_implementation", "fused"),
            is_offloaded=table.get("offload_optimizer", False),
        ),
        software=_software(table),
    )
    return WorkloadRequest(
        workload=workload,
        global_batch=_global_batch(table, seq_len),
        micro_batch=table.get("micro_batch"),
        checkpointing=table.get("checkpointing"),
    )


def _software(table: Mapping[str, Any]) -> SoftwareSpec:
    class_name = table.get("software", "eager")
    usual: NormKernel = "fused" if class_name != "eager" else "eager_fp32"
    return SoftwareSpec(
        class_name=class_name,
        norm=table.get("norm", usual),
        attention=table.get("attention", "flash2"),
        loss=table.get("loss", "full"),
    )


def _global_batch(table: Mapping[str, Any], seq_len: int) -> int:
    if ("global_batch_tokens" in table) == ("global_batch" in table):
        raise SpecError("workload needs either 'global_batch' or 'global_batch_tokens'")
    if "global_batch" in table:
        return int(table["global_batch"])
    tokens = int(table["global_batch_tokens"])
    if tokens % seq_len:
        raise SpecError(
            f"global_batch_tokens={tokens} is no multiple of seq_len={seq_len}; use "
            f"{max(1, round(tokens / seq_len)) * seq_len}"
        )
    return tokens // seq_len


_PROBE_KEYS = (
    "step_s",
    "devices",
    "strategy",
    "replicate",
    "shard",
    "tensor",
    "pipeline",
    "micro_batch",
    "accumulation",
    "checkpointing",
    "seq_len",
    "model",
)


def _probed(
    path: Path, model: ModelSpec | TracedModel, cluster: ClusterSpec, request: WorkloadRequest
) -> Factors:
    """Factors from a measured step; what the probe leaves out is as in the request."""
    found = read_document(path)
    for key in found:
        if key not in _PROBE_KEYS:
            raise SpecError(f"probe {path}: unknown key {key!r}; {nearest(key, _PROBE_KEYS)}")
    for key in ("step_s", "strategy", "micro_batch"):
        if key not in found:
            raise SpecError(f"probe {path} lacks {key!r}")
    devices = found.get("devices", cluster.num_devices)
    per_node = min(cluster.devices_per_node, devices)
    if devices % per_node:
        raise SpecError(f"probe {path}: {devices} devices don't fill nodes of {per_node}")
    axes = {axis: found.get(axis, 1) for axis in ("replicate", "shard", "tensor", "pipeline")}
    if "shard" not in found and "replicate" not in found:
        axes["shard"] = devices // (axes["tensor"] * axes["pipeline"])
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
