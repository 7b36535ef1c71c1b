"""Read rows of published measurements as jobs.

Only stated facts are read: shapes, devices, networks, axes, batch, precision, recomputation and, by
the framework a row ran on, its kernels (`stacks.py`). Measured columns are never read here. What a
row leaves open is assumed by one rule for all rows, and noted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardwright.core.errors import ShardwrightError
from shardwright.planner.cluster import ClusterSpec, LinkSpec, make_cluster
from shardwright.planner.columns import SPEEDS, Unpredictable, check_cells
from shardwright.planner.device import DeviceSpec, find_device
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.memory import estimate_memory
from shardwright.planner.model import ModelSpec
from shardwright.planner.model_presets import MODELS
from shardwright.planner.stacks import STACKS, Stack
from shardwright.planner.workload import (
    Checkpointing,
    PrecisionSpec,
    SoftwareSpec,
    WorkloadSpec,
)

__all__ = [
    "RowJob",
    "family_of",
    "find_row_device",
    "find_row_model",
    "find_stack",
    "is_dense_data_parallel",
    "read_count",
    "read_number",
    "read_row",
]


@dataclass(frozen=True, kw_only=True)
class RowJob:
    """A row as a job.

    Attributes:
        job: What to predict.
        stack: Name of the stack whose kernels were taken.
        assumptions: What the row left open.
    """

    job: Job
    stack: str
    assumptions: tuple[str, ...]


_DEVICES = (
    ("A100-80GB", "a100-80"),
    ("A100-40GB", "a100-40"),
    ("A100", "a100-80"),
    ("A800", "a800-80"),
    ("H100-96GB", "h100-96-500w"),
    ("H100", "h100-80"),
    ("H800", "h800"),
    ("H200", "h200"),
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("V100-16GB", "v100-16"),
    ("V100", "v100-32"),
    ("L40S", "l40s"),
    ("4090", "rtx-4090"),
    ("3090", "rtx-3090"),
    ("TitanRTX", "titan-rtx"),
    ("A10G", "a10g"),
    ("A10", "a10"),
)
"""First match counts."""

_FAMILIES = (("mosaic", "mosaicml"), ("llm-foundry", "mosaicml"), ("bigscience", "bigscience"))
"""Sources that share authors and code are one family."""

_GATED = ("llama", "granite", "mistral", "qwen", "smol", "baichuan", "deepseek", "llada")
"""Names of models with a gated feed-forward, RMSNorm and rotary positions."""

_DEFAULT_VOCAB = {"bloom": 250_880, "gpt2": 50_257}


def family_of(source: str) -> str:
    """The family of a source: tables by the same authors on the same code are left out together."""
    for prefix, family in _FAMILIES:
        if source.startswith(prefix):
            return family
    return source.split("-", maxsplit=1)[0] if source.startswith("megatron") else source


def is_dense_data_parallel(row: Mapping[str, str]) -> bool:
    """Whether a row is a 16-bit run over data axes only, on GPUs, with a measured speed."""
    precision = row.get("precision", "").lower()
    is_16_bit = ("bf16" in precision or "fp16" in precision) and "float8" not in precision
    axes = [row.get(axis, "") for axis in ("tp", "pp", "cp")]
    is_measured = bool(row.get("tokens_per_s_per_gpu") or row.get("step_time_s"))
    return (
        is_16_bit
        and is_measured
        and "TPU" not in row.get("gpu", "")
        and row.get("strategy") not in ("tp_only", "none (dp=1)")
        and all(axis in ("", "1") for axis in axes)
        and (bool(row.get("tp")) or row.get("strategy") == "full_shard")
    )


_STACK_WORDS: tuple[tuple[str, str], ...] = (
    ("mosaicml/examples", "mosaicgpt-0.0.4"),
    ("llm-foundry", "llm-foundry"),
    ("torchtitan", "torchtitan"),
    ("fms-fsdp", "fms-fsdp"),
    ("litgpt", "litgpt"),
    ("lit-gpt", "litgpt"),
    ("maxtext", "maxtext"),
    ("huggingface", "transformers"),
    ("transformers", "transformers"),
    ("accelerate", "transformers"),
    ("hf-blog", "transformers"),
    ("blog-fsdp2", "transformers"),
    ("bigscience", "megatron-deepspeed"),
    ("actrecomp", "megatron-2021"),
    ("2205.05198", "megatron-2021"),
    ("sc21", "megatron-2021"),
    ("2104.04473", "megatron-2021"),
    ("megatron-2020", "megatron-2021"),
    ("jan2021", "megatron-2021"),
    ("megatron-lm:images", "megatron-lm-2024"),
    ("megatron", "megatron-core"),
    ("nemo", "megatron-core"),
)
"""Repositories and papers by words of a row's source and locator; the first match counts."""


def find_stack(row: Mapping[str, str]) -> str:
    """Name of the stack a row ran on, by the repository its locator names and its own columns."""
    where = f"{row.get('source', '')} {row.get('locator', '')} {row.get('notes', '')}".lower()
    named = next((stack for word, stack in _STACK_WORDS if word in where), "")
    found = named or _stack_by_columns(row)
    if found == "mosaicgpt-0.0.4" and "v0.0.3" in where:
        return "mosaicgpt-0.0.3"
    if found == "maxtext" and "B200" in row.get("gpu", ""):
        return "maxtext-blackwell"
    if found.startswith("megatron") and row.get("strategy") in ("zero2", "zero3"):
        return "deepspeed-zero3"
    if found == "megatron-2021" and row.get("act_ckpt") == "selective":
        return "megatron-2022"
    if found == "pytorch" and "deepspeed" in where:
        return "deepspeed-zero3"
    return found


_UNCOMPILED = ("", "n", "no", "false", "eager")
"""What the column `compile` says of runs without a compiler."""


def _stack_by_columns(row: Mapping[str, str]) -> str:
    """The likeliest stack of a row of unknown origin.

    MPT and BLOOM are trained by their authors' code; products in 8 bits, and tensor or pipeline
    axes without a compiler, by Megatron's, which runs Transformer Engine on devices since Hopper.
    """
    model, precision = row.get("model", "").lower(), row.get("precision", "").lower()
    if model.startswith("mpt"):
        return "llm-foundry"
    if model.startswith(("bloom", "gpt2-meg")):
        return "megatron-deepspeed"
    if row.get("compile", "").lower() not in _UNCOMPILED:
        return "pytorch"
    if "fp8" in precision or "fp4" in precision:
        return "megatron-core"
    is_model_parallel = any((read_count(row, axis) or 1) > 1 for axis in ("tp", "pp"))
    if is_model_parallel or "GPT-" in row.get("model", ""):
        is_recent = any(name in row.get("gpu", "") for name in ("H100", "H200", "B200", "B300"))
        return "megatron-core" if is_recent else "megatron-2021"
    return "pytorch"


def read_row(row: Mapping[str, str], stacks: Mapping[str, Stack] = STACKS) -> RowJob:
    """Read one row.

    Args:
        row: Columns by name, as in the published tables.
        stacks: What each training stack runs.

    Raises:
        Unpredictable: With the reason.
    """
    assumptions: list[str] = []
    try:
        check_cells(row, SPEEDS)
        device = _device(row)
        stack_name = find_stack(row)
        stack = stacks[stack_name]
        model = find_row_model(row, assumptions)
        if "full offload" in row.get("notes", "").lower():
            raise Unpredictable("speed with parameters in host memory is not modelled")
        layout, num_devices = _layout(row)
        cluster = _cluster(row, device, num_devices, stack)
        workload = _workload(row, model, layout, stack, assumptions)
        job = Job(model=model, cluster=cluster, workload=workload, layout=layout)
        job = _settle_checkpointing(row, job, stack, assumptions)
    except Unpredictable:
        raise
    except ShardwrightError as error:
        raise Unpredictable(str(error)) from error
    return RowJob(job=job, stack=stack_name, assumptions=tuple(assumptions))


def read_number(row: Mapping[str, str], column: str) -> float | None:
    """A number; None where the cell is empty. `check_cells` has refused what is none."""
    text = row.get(column, "").strip()
    return float(text) if text else None


_LARGEST: Mapping[str, float] = MappingProxyType(
    {"n_layers": 2000, "n_heads": 4096, "vpp": 64, "n_gpus": 1e6, "hidden": 1e6, "params_b": 1e6}
)
"""What a count can plausibly be, where a wrong column would make the planner work for hours."""


def read_count(row: Mapping[str, str], column: str) -> int | None:
    """A whole number above zero; None where the cell is empty."""
    value = read_number(row, column)
    if value is None:
        return None
    if not 1 <= value <= _LARGEST.get(column, 1e8):
        raise Unpredictable(f"{column} can't be {value:g}")
    return int(value)


def _device(row: Mapping[str, str]) -> DeviceSpec:
    name, memory = row.get("gpu", ""), row.get("gpu_mem_gb", "")
    if name in ("A100", "V100") and memory:
        name = f"{name}-{memory.removesuffix('.0')}GB"
    return find_row_device(name)


def find_row_device(name: str) -> DeviceSpec:
    """The device a table means.

    Args:
        name: Such as ``A100-80GB``.

    Raises:
        Unpredictable: No known device goes by this name.
    """
    if "TPU" in name:
        raise Unpredictable("not a GPU")
    for key, preset in _DEVICES:
        if name.startswith(key) or key in name.split():
            return find_device(preset)
    for key, preset in _DEVICES:
        if key in name:
            return find_device(preset)
    raise Unpredictable(f"device {name or 'unstated'!r} is not known")


def find_row_model(row: Mapping[str, str], assumptions: list[str]) -> ModelSpec:
    """The model a row means, by its shape or its name.

    Args:
        row: Columns by name.
        assumptions: What is assumed is added here.

    Raises:
        Unpredictable: Neither says enough.
    """
    name = row.get("model", "")
    preset = _preset(name)
    layers, hidden = read_count(row, "n_layers"), read_count(row, "hidden")
    params = read_number(row, "params_b")
    if preset is not None and hidden in (None, preset.hidden) and layers in (None, preset.layers):
        return preset
    if hidden is None or (layers is None and params is None):
        if preset is not None:
            return preset
        raise Unpredictable("the model's shape is unstated")
    return _explicit_model(row, name, hidden, assumptions)


def _preset(name: str) -> ModelSpec | None:
    """A preset by its name; what follows the first space or underscore is a remark."""
    key = re.sub(r"[ _].*", "", name.strip().lower())
    if "granite-7b" in key:
        key = "llama-2-7b"
    return MODELS.get(key)


def _explicit_model(
    row: Mapping[str, str], name: str, hidden: int, assumptions: list[str]
) -> ModelSpec:
    lowered = name.lower()
    is_llama_like = any(key in lowered for key in _GATED)
    vocab = read_count(row, "vocab")
    if vocab is None:
        vocab = next((v for key, v in _DEFAULT_VOCAB.items() if key in lowered), 50_257)
        assumptions.append(f"vocabulary of {vocab} assumed")
    seq_len = read_count(row, "seq_len") or 0
    ffn = read_count(row, "ffn_hidden") or 4 * hidden
    layers = read_count(row, "n_layers")
    if layers is None:
        params = read_number(row, "params_b") or 0.0
        layers = max(1, round((params * 1e9 - vocab * hidden) / (12 * hidden * hidden)))
        if layers > _LARGEST["n_layers"]:
            raise Unpredictable(f"{params:g} G parameters don't go with a width of {hidden}")
        assumptions.append("number of blocks derived from the number of parameters")
    heads = read_count(row, "n_heads")
    if heads is None:
        heads = _likely_heads(hidden)
        assumptions.append("number of heads assumed")
    is_mpt = "mpt" in lowered
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=read_count(row, "n_kv_heads") or heads,
        ffn_hidden=ffn,
        vocab=vocab,
        gated=is_llama_like,
        activation="silu" if is_llama_like else "gelu",
        norm="rms" if is_llama_like else "layer",
        norm_bias=not is_llama_like and not is_mpt,
        qkv_bias=not is_llama_like and not is_mpt,
        out_bias=not is_llama_like and not is_mpt,
        ffn_bias=not is_llama_like and not is_mpt,
        positions="rope" if is_llama_like else ("alibi" if "bloom" in lowered else "learned"),
        num_positions=0 if is_llama_like or "bloom" in lowered else max(seq_len, 1),
        embedding_norm="bloom" in lowered,
        tied=not is_llama_like,
    )


def _likely_heads(hidden: int) -> int:
    """Heads that divide the width and are a multiple of 8, as near to 128 wide as can be."""
    candidates = [h for h in range(8, hidden // 32, 8) if hidden % h == 0] or [1]
    return min(candidates, key=lambda h: abs(hidden / h - 128))


def _layout(row: Mapping[str, str]) -> tuple[LayoutSpec, int]:
    num_devices = read_count(row, "n_gpus")
    if num_devices is None:
        raise Unpredictable("the number of GPUs is unstated")
    if (read_count(row, "cp") or 1) > 1:
        raise Unpredictable("context parallelism is not modelled")
    tensor, pipeline = read_count(row, "tp"), read_count(row, "pp")
    if tensor is None or pipeline is None:
        tensor, pipeline = _model_parallel(row)
    data, rest = divmod(num_devices, tensor * pipeline)
    if rest or data < 1:
        raise Unpredictable(
            f"tensor {tensor} x pipeline {pipeline} does not divide {num_devices} GPUs"
        )
    strategy = row.get("strategy", "")
    return _data_axes(
        strategy, data, tensor, pipeline, read_count(row, "vpp") or 1, row
    ), num_devices


def _model_parallel(row: Mapping[str, str]) -> tuple[int, int]:
    """Tensor and pipeline sizes: the stated model-parallel size, tensor inside a node first."""
    match = re.search(r"model-parallel size (\d+)", row.get("notes", ""))
    if match:
        size = int(match.group(1))
        tensor = min(8, size)
        return tensor, size // tensor
    if row.get("strategy") in ("full_shard", "zero2", "zero3", "shard_grad_op", "hybrid_shard"):
        return 1, 1
    raise Unpredictable("the tensor and pipeline sizes are unstated")


def _data_axes(
    strategy: str, data: int, tensor: int, pipeline: int, chunks: int, row: Mapping[str, str]
) -> LayoutSpec:
    named = strategy.split("+", maxsplit=1)[0].strip().lower()
    if named in ("unstated", ""):  # distributed optimizers are these recipes' default
        named = "zero1"
    if named in ("none", "none (dp=1)", "tp_only"):
        named = "ddp"
    replicate, shard = 1, data
    if named in ("hybrid_shard", "hybrid"):
        per_node = read_count(row, "gpus_per_node") or 8
        named, shard = "hybrid", min(per_node, data)
        replicate = data // shard
    if named == "ddp":
        replicate, shard = data, 1
    return LayoutSpec(
        strategy=named,
        replicate=replicate,
        shard=shard,
        tensor=tensor,
        pipeline=pipeline,
        chunks_per_stage=chunks if pipeline > 1 else 1,
    )


def _cluster(
    row: Mapping[str, str], device: DeviceSpec, num_devices: int, stack: Stack
) -> ClusterSpec:
    per_node = math.gcd(num_devices, read_count(row, "gpus_per_node") or 8)
    cluster = make_cluster(
        device,
        num_devices,
        devices_per_node=per_node,
        network=stack.network if stack.network and num_devices > per_node else None,
    )
    stated = _stated_node_gbps(row.get("internode_net", ""), per_node)
    if stated is None:
        return cluster
    cards = max(1, round(stated / 25))
    outer = LinkSpec(
        kind="other",
        bandwidth_gbps=stated / cards,
        latency_us=cluster.outer.latency_us,
        efficiency=cluster.outer.efficiency,
    )
    return replace(cluster, outer=outer, num_nics=cards, is_network_assumed=False)


def _stated_node_gbps(text: str, per_node: int) -> float | None:
    """GB/s out of a node from words such as ``8x200Gbps HDR IB per node``."""
    match = re.search(r"(?:(\d+)x)?(\d+) ?Gb(?:ps|/s)?", text)
    if not match:
        return None
    total = int(match.group(1) or 1) * int(match.group(2)) / 8
    return total * per_node if "per GPU" in text else total


def _workload(
    row: Mapping[str, str],
    model: ModelSpec,
    layout: LayoutSpec,
    stack: Stack,
    assumptions: list[str],
) -> WorkloadSpec:
    seq_len = read_count(row, "seq_len")
    if seq_len is None:
        if not model.max_seq_len:
            raise Unpredictable("the sequence length is unstated")
        seq_len = min(model.max_seq_len, 4096)
        assumptions.append(f"sequence length of {seq_len} assumed")
    batch, micro_batch = read_number(row, "global_batch_seqs"), read_count(row, "micro_batch")
    data = layout.num_data_ranks
    if micro_batch is None:
        if batch is None:
            raise Unpredictable("neither micro-batch nor global batch is stated")
        micro_batch = 1
        assumptions.append("micro-batch of 1 assumed")
    accumulation = 1 if batch is None else max(1, round(batch / (data * micro_batch)))
    return WorkloadSpec(
        seq_len=seq_len,
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpointing=_checkpointing(row, stack),
        precision=_precision(row, stack),
        optimizer=replace(
            stack.optimizer, is_offloaded="cpu offload" in row.get("notes", "").lower()
        ),
        software=_software(row, stack),
    )


def _checkpointing(row: Mapping[str, str], stack: Stack) -> Checkpointing:
    stated = row.get("act_ckpt", "")
    if stated == "full":
        return "full"
    if "layer" in stated:
        return "alternate"
    if stated.startswith("selective"):
        return stack.selective if "op" not in stated else "half_products"
    if stated not in ("", "none", "unstated"):
        raise Unpredictable(f"act_ckpt {stated!r} is not modelled: none, selective and full are")
    return "none"


def _precision(row: Mapping[str, str], stack: Stack) -> PrecisionSpec:
    stated = row.get("precision", "").lower()
    if not stated:
        raise Unpredictable("the precision is unstated")
    if not re.search(r"bf16|fp16|fp8|float8|fp4", stated):
        raise Unpredictable(f"precision {stated!r} is not modelled: bf16, fp16, fp8 and fp4 are")
    param = "fp16" if stated.startswith("fp16") else "bf16"
    matmul = ""
    if "fp4" in stated:
        matmul = "fp4"
    elif "fp8" in stated or "float8" in stated:
        matmul = "fp8"
    if "pure" in stated:  # parameters, gradients and wire in low precision
        return PrecisionSpec(param=param, matmul=matmul, reduce=param)
    reduce = param if stack.reduce == "param" and "fp32 grad" not in stated else "fp32"
    if stack.param == "fp32":
        return PrecisionSpec(param="fp32", matmul=matmul or param, reduce=reduce)
    return PrecisionSpec(param=param, matmul=matmul, reduce=reduce)


def _software(row: Mapping[str, str], stack: Stack) -> SoftwareSpec:
    """The stack's kernels, less what the row itself states."""
    software = stack.software
    compiled = row.get("compile", "").strip()
    if stack.software.engine.startswith("fsdp") and row.get("strategy", "").startswith("zero"):
        software = replace(software, engine="deepspeed")
    if "PURE" in row.get("precision", ""):
        software = replace(software, norm="fused")
    if compiled.lower() not in _UNCOMPILED:
        software = replace(software, class_name="compiled", norm="fused")
    return software


def _settle_checkpointing(
    row: Mapping[str, str], job: Job, stack: Stack, assumptions: list[str]
) -> Job:
    """Where recomputation is unstated: none if that fits, else of every block."""
    stated = row.get("act_ckpt", "")
    if stated not in ("", "unstated") and job.workload.checkpointing != "alternate":
        return job
    estimate = estimate_memory(job.model, job.layout, job.workload)
    fits = estimate.needed_gib <= job.cluster.device.memory_gib
    if job.workload.checkpointing == "alternate":
        assumptions.append(f"recomputation of {'every second' if fits else 'every'} block assumed")
        return job if fits else _with_full_checkpointing(job)
    if fits or not stack.recomputes_unasked:
        assumptions.append("no recomputation assumed")
        return job
    assumptions.append("recomputation of every block assumed: it doesn't fit without")
    return _with_full_checkpointing(job)


def _with_full_checkpointing(job: Job) -> Job:
    return replace(job, workload=replace(job.workload, checkpointing="full"))
