"""What a plan is asked for: model, cluster, workload and settings, from names, tables or objects.

`sw.plan` reads its arguments here. Nothing is converted or overridden: a value of another type, an
unknown key or two keys that say the same are refused with what to change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.app.presets import DecoderConfig
from shardwright.core.errors import SpecError, nearest
from shardwright.core.strategy import Gathered, resolve_strategy
from shardwright.planner.checks import require_positive, require_type, require_types
from shardwright.planner.cluster import ClusterSpec, make_cluster
from shardwright.planner.device import DeviceSpec
from shardwright.planner.files import cluster_from_table, read_cluster, read_model
from shardwright.planner.huggingface import from_config
from shardwright.planner.model import ModelSpec
from shardwright.planner.search import SearchSpace
from shardwright.planner.traced import TracedModel
from shardwright.planner.workload import (
    CompressionSpec,
    NormKernel,
    OptimizerSpec,
    PrecisionSpec,
    SoftwareSpec,
    WorkloadSpec,
)

__all__ = [
    "WorkloadRequest",
    "decoder_shape",
    "read_cluster_request",
    "read_model_request",
    "read_workload",
    "space_for",
]

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
    "compression",
)

_NOT_MODELLED = {
    "context": "context parallelism, which divides sequences over ranks, is",
    "context_parallel": "context parallelism, which divides sequences over ranks, is",
    "expert_parallel": "expert parallelism is",
}
"""What one may ask for, and how to say that it isn't there."""

_SETTINGS = (
    "forward_prefetch",
    "backward_prefetch",
    "backward_prefetch_at",
    "max_in_flight",
    "reduce_in_flight",
    "residency",
    "transport",
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

    def __post_init__(self) -> None:
        require_types("workload", self)
        require_positive("workload", global_batch=self.global_batch)
        if self.micro_batch is not None:
            require_type("workload", "micro_batch", self.micro_batch, "int")
            require_positive("workload", micro_batch=self.micro_batch)


def read_model_request(given: Any) -> ModelSpec:
    """The model: a preset's name, a path, a `ModelSpec`, or a module with a configuration."""
    if isinstance(given, ModelSpec):
        return given
    if isinstance(given, (str, Path)):
        return read_model(str(given))
    config = given if isinstance(given, DecoderConfig) else getattr(given, "config", None)
    if isinstance(config, DecoderConfig):
        return decoder_shape(config)
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


def decoder_shape(config: DecoderConfig) -> ModelSpec:
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


def read_cluster_request(given: ClusterSpec | Mapping[str, Any] | str | Path) -> ClusterSpec:
    """The cluster: an object, a table, ``"64 x h100"``, or the path of a file."""
    if isinstance(given, ClusterSpec):
        return given
    if isinstance(given, Mapping):
        return cluster_from_table(given, "cluster")
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\S+)(?:\s+over\s+(\S+))?\s*", str(given))
    if match:
        return make_cluster(match.group(2), int(match.group(1)), network=match.group(3))
    if isinstance(given, Path) or (isinstance(given, str) and Path(given).exists()):
        return read_cluster(Path(given))
    raise SpecError(
        f"cluster must read like '64 x h100' or '64 x h100 over 8x400g-ib', or be the path of a "
        f"cluster file, found {given!r}"
    )


def read_workload(
    given: WorkloadRequest | Mapping[str, Any], device: DeviceSpec
) -> WorkloadRequest:
    """The workload, from an object or a table; kernels and dtypes left open are the device's.

    Raises:
        SpecError: It can't be understood, or asks for what the device can't run.
    """
    request = given if isinstance(given, WorkloadRequest) else _read_table(given, device)
    dtype = request.workload.precision.product
    device.check_dtype(dtype)
    device.check_attention(request.workload.software.attention, dtype)
    return request


def _read_table(given: Any, device: DeviceSpec) -> WorkloadRequest:
    if not isinstance(given, Mapping):
        raise SpecError(f"workload must be a table of settings, found {type(given).__name__}")
    for key in given:
        if key in _NOT_MODELLED:
            raise SpecError(f"{_NOT_MODELLED[key]} not modelled; leave {key!r} out")
        if key not in _WORKLOAD_KEYS:
            raise SpecError(f"workload: unknown key {key!r}; {nearest(str(key), _WORKLOAD_KEYS)}")
    table = {key: value for key, value in given.items() if value is not None}
    if "seq_len" not in table:
        raise SpecError("workload lacks 'seq_len', the tokens of a sequence")
    require_type("workload", "offload_optimizer", table.get("offload_optimizer", False), "bool")
    workload = WorkloadSpec(
        seq_len=table["seq_len"],
        micro_batch=table.get("micro_batch", 1),
        precision=PrecisionSpec(
            param=table.get("param", device.best_dtype),
            **{k: table[k] for k in ("reduce", "state") if k in table},
        ),
        optimizer=OptimizerSpec(
            kind=table.get("optimizer", "adamw"),
            implementation=table.get("optimizer_implementation", "fused"),
            is_offloaded=table.get("offload_optimizer", False),
        ),
        software=_software(table, device),
        compression=_compression(table.get("compression", {})),
    )
    return WorkloadRequest(
        workload=workload,
        global_batch=_global_batch(table, workload.seq_len),
        micro_batch=table.get("micro_batch"),
        checkpointing=table.get("checkpointing"),
    )


def _compression(given: Any) -> CompressionSpec:
    """What collectives send: a table, or text such as ``"gather=int8,reduce=int4"``."""
    table = given
    if isinstance(given, str):
        table = dict(part.partition("=")[::2] for part in given.split(","))
    if not isinstance(table, Mapping) or not set(table) <= {"gather", "reduce"}:
        raise SpecError(
            f"compression must read like 'gather=int8,reduce=int4', or either, found {given!r}"
        )
    return CompressionSpec(**table)


def _software(table: Mapping[str, Any], device: DeviceSpec) -> SoftwareSpec:
    class_name = table.get("software", "eager")
    usual: NormKernel = "fused" if class_name != "eager" else "eager_fp32"
    return SoftwareSpec(
        class_name=class_name,
        norm=table.get("norm", usual),
        attention=table.get(
            "attention", device.best_attention(table.get("param", device.best_dtype))
        ),
        loss=table.get("loss", "full"),
        sequence_parallel=True,  # a tensor axis divides sequences too, as everyone's does by now
    )


def _global_batch(table: Mapping[str, Any], seq_len: int) -> int:
    given = [key for key in ("global_batch", "global_batch_tokens") if key in table]
    if len(given) != 1:
        raise SpecError(
            "workload needs either 'global_batch' or 'global_batch_tokens', in sequences or tokens "
            f"per step, found {'both' if given else 'neither'}"
        )
    (key,) = given
    value: int = table[key]
    require_type("workload", key, value, "int")
    require_positive("workload", **{key: value})
    if key == "global_batch":
        return value
    if value % seq_len:
        raise SpecError(
            f"global_batch_tokens={value} is no multiple of seq_len={seq_len}; use "
            f"{max(1, round(value / seq_len)) * seq_len}"
        )
    return value // seq_len


def space_for(
    space: SearchSpace | None,
    request: WorkloadRequest,
    settings: Mapping[str, Any] | None,
    model: ModelSpec | TracedModel,
    strategy: str | Sequence[str] | None = None,
) -> SearchSpace:
    """What may vary, less what the workload, the settings and the strategy fix.

    Args:
        space: As given.
        request: The workload.
        settings: Settings of the engine, by the names `shard` has for them.
        model: Whose blocks may stay gathered.
        strategy: One to compare, or several; None for those of the space.

    Raises:
        SpecError: A setting is unknown, or two of them say the same.
    """
    chosen = space or SearchSpace()
    if strategy:
        if chosen.strategies or chosen.layouts:
            raise SpecError("strategy and space both say which strategies to compare; drop one")
        names = (strategy,) if isinstance(strategy, str) else strategy
        chosen = replace(chosen, strategies=tuple(resolve_strategy(name).name for name in names))
    if settings:
        if chosen.layouts:
            raise SpecError(
                "settings and space.layouts both set the engine; write them into the layouts"
            )
        chosen = _with_settings(chosen, settings, model)
    if request.micro_batch is not None:
        if chosen.micro_batches:
            raise SpecError("the workload's micro_batch and space.micro_batches differ; drop one")
        chosen = replace(chosen, micro_batches=(request.micro_batch,))
    if request.checkpointing is not None:
        if chosen.checkpointing != SearchSpace().checkpointing:
            raise SpecError("the workload's checkpointing and space.checkpointing differ; drop one")
        fixed = replace(request.workload, checkpointing=request.checkpointing)  # type: ignore[arg-type]
        chosen = replace(chosen, checkpointing=(fixed.checkpointing,))
    return chosen


def _with_settings(
    space: SearchSpace, settings: Mapping[str, Any], model: ModelSpec | TracedModel
) -> SearchSpace:
    for name in settings:
        if name not in _SETTINGS:
            raise SpecError(f"settings: unknown key {name!r}; {nearest(str(name), _SETTINGS)}")
    found = {name: value for name, value in settings.items() if value is not None}
    if "residency" in found:
        found["resident_units"] = _num_resident(found.pop("residency"), model)
        drops = [resolve_strategy(name).gathered is Gathered.USE for name in space.strategies]
        if found["resident_units"] and drops and not any(drops):
            raise SpecError(
                f"residency keeps blocks gathered that {' and '.join(space.strategies)} would not "
                "drop; leave it out, or compare zero3 or hybrid"
            )
        space = replace(space, tries_residency=False)
    return replace(space, base=replace(space.base, **found))


def _num_resident(residency: Any, model: ModelSpec | TracedModel) -> int:
    """Blocks that stay gathered: the last ones are planned, whichever are named."""
    if isinstance(residency, int) and not isinstance(residency, bool):
        if not 0 <= residency <= model.layers:
            raise SpecError(
                f"settings: residency must be from 0 to the {model.layers} blocks of "
                f"{model.name}, found {residency}"
            )
        return residency
    if isinstance(residency, str) or not isinstance(residency, Sequence):
        raise SpecError(
            f"settings: residency must be a number of blocks or names of units, found {residency!r}"
        )
    names = set(residency)
    if isinstance(model, TracedModel):
        blocks = [unit.name for unit in model.units if unit.is_block]
        for name in residency:
            if name not in blocks:
                raise SpecError(f"residency names no block {name!r}; {nearest(str(name), blocks)}")
    return _num_resident(len(names), model)
