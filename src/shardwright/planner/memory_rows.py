"""Read rows of measured memory, and of what ran and what ran out of memory, as jobs.

As in `rows.py`, only stated facts and one set of rules for what is left open; what ran and how much
it held is never read. Where a sequence length is only a cap, the figure comes as a range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.core.errors import ShardwrightError
from shardwright.planner.cluster import make_cluster
from shardwright.planner.columns import FIT, MEMORY, Unpredictable, check_cells
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.memory import MemoryEstimate, estimate_memory
from shardwright.planner.model import ModelSpec
from shardwright.planner.rows import (
    find_row_device,
    find_row_model,
    read_count,
    read_number,
    read_row,
)
from shardwright.planner.workload import (
    Attention,
    Checkpointing,
    Loss,
    OptimizerSpec,
    PrecisionSpec,
    SoftwareSpec,
    WorkloadSpec,
)

__all__ = ["MemoryRange", "estimate_row", "is_measured", "read_fit_row", "read_memory_row"]

_CAP_SHARE = 0.6
"""Share of a length cap that padded batches of instruction data typically have."""

_KERNELS_GIB = 1573 / 1024
"""What nvidia-smi shows for an A100 before anything is allocated: bigscience-workshop/bigscience,
train/tr11-176B-ml/chronicles-prequel.md, whose figures are nvidia-smi's."""

_WORST_SHARE = 0.75
"""Share that the longest batch of a run has: it decides whether the run survives."""


@dataclass(frozen=True, kw_only=True)
class MemoryRange:
    """What a row needs.

    Attributes:
        job: The job, at its likely length.
        estimate: Its memory.
        worst: Memory of its longest batch.
        low_gib: The peak if everything assumed turns out small.
        high_gib: The peak if it turns out large.
        assumptions: What the row left open.
        beside_gib: What the row's figure holds beside the allocator's, where it is the driver's.
    """

    job: Job
    estimate: MemoryEstimate
    worst: MemoryEstimate
    low_gib: float
    high_gib: float
    assumptions: tuple[str, ...]
    beside_gib: float = 0.0

    @property
    def shown_gib(self) -> float:
        """What the row's figure should be."""
        return self.estimate.peak_gib + self.beside_gib

    @property
    def fits(self) -> bool:
        """Whether the longest batch fits the device."""
        return self.worst.needed_gib <= self.job.cluster.device.memory_gib


def is_measured(row: Mapping[str, str]) -> bool:
    """Whether a row of the memory table is a measurement, not a paper's formula."""
    unit = row.get("unit_note", "").lower()
    return not ("theoretical" in unit or "analytical" in unit or "percent" in unit)


def read_memory_row(
    row: Mapping[str, str], speeds: Mapping[str, Mapping[str, str]] | None = None
) -> MemoryRange:
    """Read one row of the memory table.

    Args:
        row: Columns by name.
        speeds: Rows of the table of speeds by id; a row that names one of them is read there, where
            more is stated.

    Raises:
        Unpredictable: With the reason.
    """
    check_cells(row, MEMORY)
    text = f"{row['what']} {row.get('precision', '')}".lower()
    if "lora" in text or "nf4" in text:
        raise Unpredictable("adapters over frozen parameters are not modelled")
    if not is_measured(row):
        raise Unpredictable("a paper's formula, not a measurement")
    mirrored = re.search(r"mirrors throughput row ([-\w]+)", row["what"])
    try:
        if mirrored and mirrored.group(1) in (speeds or {}):
            read = read_row(speeds[mirrored.group(1)])  # type: ignore[index]
            found = estimate_row(read.job, list(read.assumptions), is_cap=False)
        else:
            found = _read_memory_row(row)
        return replace(found, beside_gib=_beside_gib(row))
    except Unpredictable:
        raise
    except ShardwrightError as error:
        raise Unpredictable(str(error)) from error


def _beside_gib(row: Mapping[str, str]) -> float:
    """What a row's figure holds beside the allocator's."""
    return _KERNELS_GIB if row["source"].startswith("bigscience") else 0.0


def _read_memory_row(row: Mapping[str, str]) -> MemoryRange:
    assumptions: list[str] = []
    model = _model_of(row, assumptions)
    axes = dict.fromkeys(("dp", "tp", "pp"), 1)
    for axis, size in re.findall(r"\b(dp|tp|pp|cp)(\d+)", row["strategy"]):
        axes[axis] = int(size)
    num_devices = _needed(row, "n_gpus")
    if axes.get("cp", 1) > 1:
        raise Unpredictable("context parallelism is not modelled")
    axes["dp"] = max(1, num_devices // (axes["tp"] * axes["pp"]))
    device = find_row_device(_device_text(row))
    seq_len = read_count(row, "seq_len") or min(model.max_seq_len or 2048, 4096)
    if not read_count(row, "seq_len"):
        assumptions.append(f"sequence length of {seq_len} assumed")
    strategy = row["strategy"].split(";")[0].split(" ")[0]
    is_compiled = any(
        key in row["locator"] + row["what"] + row["unit_note"]
        for key in ("nvfuser", "torchcompile", "torch.compile", "compile")
    )
    software = _software_of(row, strategy, axes["tp"] * axes["pp"] > 1)
    if is_compiled:
        software = replace(software, class_name="compiled", norm="fused")
    workload = WorkloadSpec(
        seq_len=seq_len,
        micro_batch=_needed(row, "micro_batch"),
        accumulation=max(8, axes["pp"]),
        checkpointing=_checkpointing(row),
        precision=_precision_of(row["precision"], strategy, software),
        optimizer=OptimizerSpec(
            implementation="fused", is_offloaded="offload" in row["what"].lower()
        ),
        software=software,
        parameters_offloaded="offload" in row["what"].lower(),
    )
    layout = _layout_of(strategy, axes["dp"], axes["tp"], axes["pp"])
    cluster = make_cluster(device, num_devices, devices_per_node=math.gcd(8, num_devices))
    job = Job(model=model, cluster=cluster, workload=workload, layout=layout)
    if not row["act_ckpt"]:
        needed = estimate_memory(model, layout, workload).needed_gib
        if needed > cluster.device.memory_gib:
            job = replace(job, workload=replace(workload, checkpointing="full"))
            assumptions.append("recomputation of every block assumed: it doesn't fit without")
    return estimate_row(job, assumptions, is_cap=False)


def _model_of(row: Mapping[str, str], assumptions: list[str]) -> ModelSpec:
    try:
        return find_row_model(row, assumptions)
    except Unpredictable:
        if not 0 < (read_number(row, "params_b") or 0) < _MOST_PARAMS_B:
            raise
    # Published decoders are about 128 times as wide as deep.
    params = float(row["params_b"]) * 1e9
    vocab = 250_880 if "bloom" in row["model"].lower() else 50_304
    hidden = max(1, round((params / 12 * 128) ** (1 / 3) / 1024)) * 1024
    layers = max(1, round((params - vocab * hidden) / (12 * hidden * hidden)))
    assumptions.append("shape assumed from the number of parameters")
    return ModelSpec(
        name=row["model"],
        layers=layers,
        hidden=hidden,
        heads=hidden // 128,
        kv_heads=hidden // 128,
        ffn_hidden=4 * hidden,
        vocab=vocab,
        gated=False,
        activation="gelu",
        norm="layer",
        norm_bias=True,
        tied=True,
    )


_MOST_PARAMS_B = 1e6

_NAMES = {"n_gpus": "number of GPUs", "micro_batch": "micro-batch"}


def _needed(row: Mapping[str, str], column: str) -> int:
    found = read_count(row, column)
    if found is None:
        raise Unpredictable(f"the {_NAMES[column]} is unstated")
    return found


def _device_text(row: Mapping[str, str]) -> str:
    if row.get("gpu"):
        return row["gpu"]
    found = re.search(r"(RTX ?\d+|H100[-\w]*|H200|A100[-\w]*|V100[-\w]*|A10G?)", row["unit_note"])
    if not found:
        raise Unpredictable("the device is unstated")
    return found.group(1)


def _software_of(row: Mapping[str, str], strategy: str, is_model_parallel: bool) -> SoftwareSpec:
    where = f"{row['source']} {row['locator']}".lower()
    if is_model_parallel and "torchtitan" not in where:
        engine = "deepspeed" if "bigscience" in where else "megatron"
        return SoftwareSpec(
            class_name="fused",
            attention="fused_softmax" if "bigscience" in where else "flash2",
            dropout="bigscience" in where,
            engine=engine,  # type: ignore[arg-type]
        )
    if strategy.startswith("zero"):
        return SoftwareSpec(engine="deepspeed", norm="eager_fp32", loss="shifted")
    return SoftwareSpec(
        engine="fsdp2", norm="eager_fp32", loss="full", sequence_parallel=is_model_parallel
    )


def _precision_of(stated: str, strategy: str, software: SoftwareSpec) -> PrecisionSpec:
    lowered = stated.lower()
    param = "fp16" if lowered.startswith("fp16") else "bf16"
    if "bf16-true" in lowered:
        return PrecisionSpec(param="bf16", reduce="bf16", grad="bf16", master="bf16", state="bf16")
    if strategy in ("none", "ddp") and software.class_name != "fused":
        return PrecisionSpec(param="fp32", matmul="bf16")
    grad = "fp32" if "fp32 grad" in lowered or not strategy.startswith("zero") else param
    return PrecisionSpec(param=param, reduce=grad, grad=grad)


def _layout_of(strategy: str, data: int, tensor: int, pipeline: int) -> LayoutSpec:
    name = "ddp" if strategy in ("none", "tp_only") else strategy
    if name == "ddp":
        return LayoutSpec(strategy="ddp", replicate=data, tensor=tensor, pipeline=pipeline)
    return LayoutSpec(strategy=name, shard=data, tensor=tensor, pipeline=pipeline)


def read_fit_row(row: Mapping[str, str]) -> MemoryRange:
    """Read one row of what ran and what ran out of memory.

    Raises:
        Unpredictable: With the reason.
    """
    assumptions: list[str] = []
    check_cells(row, FIT)
    try:
        model = find_row_model({**row, "params_b": ""}, assumptions)
        memory = f"-{row['gpu_mem_gb'].removesuffix('.0')}GB" if row["gpu_mem_gb"] else ""
        device = find_row_device(row["gpu"] + memory)
        job = _fit_job(row, model, device.name, assumptions)
    except Unpredictable:
        raise
    except ShardwrightError as error:
        raise Unpredictable(str(error)) from error
    return estimate_row(job, assumptions, is_cap=row["seq_len_kind"] == "cap")


def _fit_job(row: Mapping[str, str], model: ModelSpec, device: str, assumptions: list[str]) -> Job:
    seq_len = read_count(row, "seq_len") or min(model.max_seq_len or 2048, 2048)
    if not read_count(row, "seq_len"):
        assumptions.append(f"sequence length of {seq_len} assumed")
    micro_batch = read_count(row, "micro_batch") or 1
    if not read_count(row, "micro_batch"):
        assumptions.append("micro-batch of 1 assumed")
    num_devices = _needed(row, "n_gpus")
    strategy = row["strategy"]
    workload = WorkloadSpec(
        seq_len=seq_len,
        micro_batch=micro_batch,
        checkpointing=_checkpointing(row),
        precision=_fit_precision(row),
        optimizer=OptimizerSpec(
            implementation="foreach",
            is_offloaded="optimizer" in row["offload"],
        ),
        software=_fit_software(row, strategy),
        parameters_offloaded="param" in row["offload"],
    )
    per_node = math.gcd(num_devices, read_count(row, "gpus_per_node") or 8)
    return Job(
        model=model,
        cluster=make_cluster(device, num_devices, devices_per_node=per_node),
        workload=workload,
        layout=_layout_of(strategy, num_devices, 1, 1),
    )


def _checkpointing(row: Mapping[str, str]) -> Checkpointing:
    stated = row["act_ckpt"]
    if stated not in ("", "none", "unstated", "full"):
        raise Unpredictable(f"act_ckpt {stated!r} is not modelled here: none and full are")
    return "full" if stated == "full" else "none"


def _fit_precision(row: Mapping[str, str]) -> PrecisionSpec:
    stated, master = row["param_dtype"], row["master_dtype"]
    if stated == "fp32":
        return PrecisionSpec(param="fp32")
    if stated.startswith("fp32"):
        compute = "fp16" if "fp16" in stated else "bf16"
        if row["strategy"] in ("none", "ddp"):
            return PrecisionSpec(param="fp32", matmul=compute)
        return PrecisionSpec(param=compute, reduce="fp32")
    param = "fp16" if stated.startswith("fp16") else "bf16"
    if master == "fp32":
        return PrecisionSpec(param=param, reduce=param)
    return PrecisionSpec(param=param, reduce=param, grad=param, master=param, state=param)


def _fit_software(row: Mapping[str, str], strategy: str) -> SoftwareSpec:
    where = row["locator"].lower()
    is_plain = any(key in where for key in ("litgpt", "lit-llama", "nanogpt", "torchtune"))
    loss: Loss = "full" if is_plain else "shifted"
    if "fused" in row["loss_kernel"]:
        loss = "chunked"
    attention: Attention = "eager" if row["attention"] == "eager" else "flash2"
    is_liger = "liger" in row["loss_kernel"]  # its norms and gated products are fused too
    return SoftwareSpec(
        class_name="fused" if is_liger else "eager",
        norm="fused" if is_liger else "eager_fp32",
        attention=attention,
        loss=loss,
        engine="deepspeed" if strategy.startswith("zero") else "fsdp1",
    )


def estimate_row(job: Job, assumptions: list[str], *, is_cap: bool) -> MemoryRange:
    """Estimate a job; where its length is a cap, at a likely length, with both ends."""

    def at(share: float) -> tuple[Job, MemoryEstimate]:
        seq_len = max(1, int(job.workload.seq_len * share))
        sized = replace(job, workload=replace(job.workload, seq_len=seq_len))
        return sized, estimate_memory(sized.model, sized.layout, sized.workload)

    full_job, full = at(1.0)
    if not is_cap:
        return MemoryRange(
            job=full_job,
            estimate=full,
            worst=full,
            low_gib=0.9 * full.peak_gib,
            high_gib=1.1 * full.peak_gib,
            assumptions=tuple(assumptions),
        )
    likely_job, likely = at(_CAP_SHARE)
    _, low = at(_CAP_SHARE / 2)
    return MemoryRange(
        job=likely_job,
        estimate=likely,
        worst=at(_WORST_SHARE)[1],
        low_gib=low.peak_gib,
        high_gib=full.peak_gib,
        assumptions=(*assumptions, f"batches padded to {_CAP_SHARE:.0%} of the length cap assumed"),
    )
