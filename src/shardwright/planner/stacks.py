"""Training stacks as facts: which kernels a published framework runs, with where that is written.

A stack says nothing about speed. It fills in what a table of measurements leaves out because its
readers could look it up: which norm, attention and loss kernels ran, whether elementwise chains are
fused, which engine's buffers there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from shardwright.planner.workload import OptimizerSpec, SoftwareSpec

__all__ = ["INFERRED", "STACKS", "Stack", "as_documented"]

Recompute = Literal["alternate", "attention_core", "half_products", "selective"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A framework's documented choices.

    Attributes:
        software: Kernels, where nothing else is stated.
        optimizer: Optimizer and its implementation.
        param: "fp32" where parameters are gathered wide and cast for each product.
        reduce: Dtype of gradients on the wire: fp32, or that of products.
        selective: What its "selective" recomputation repeats.
        recomputes_unasked: Whether its recipes recompute where nothing says so and memory is short.
        network: Network its machines have by their product name; "" where that isn't known.
        source: Where the facts are written.
    """

    software: SoftwareSpec
    optimizer: OptimizerSpec
    param: Literal["", "fp32"] = ""
    reduce: Literal["fp32", "param"] = "fp32"
    selective: Recompute = "half_products"
    recomputes_unasked: bool = True
    network: str = ""
    source: str


_LOOP = OptimizerSpec(implementation="loop")
_FUSED = OptimizerSpec(implementation="fused")
_FOREACH = OptimizerSpec(implementation="foreach")

# Kernels that several stacks share.
_PLAIN = SoftwareSpec(norm="eager_fp32", attention="flash2", loss="full", engine="fsdp2")
_PLAIN_FSDP1 = replace(_PLAIN, engine="fsdp1")
_MOSAIC = SoftwareSpec(norm="fused", attention="flash1", loss="narrow", engine="fsdp1")
_MAXTEXT = SoftwareSpec(
    class_name="compiled",
    norm="fused",
    attention="flash2",
    loss="full",
    engine="fsdp1",
    overlaps_replicas=False,
)
_MEGATRON_2021 = SoftwareSpec(
    class_name="fused",
    norm="fused",
    attention="fused_softmax",
    loss="full",
    engine="megatron",
    overlaps=False,
    dropout=True,
)
_MEGATRON_CORE = SoftwareSpec(
    class_name="fused",
    norm="fused",
    attention="flash3",
    loss="fused_softmax",
    engine="megatron",
    sequence_parallel=True,
    overlaps_tensor=True,
)

STACKS: Mapping[str, Stack] = MappingProxyType(
    {
        "mosaicgpt-0.0.3": Stack(
            software=SoftwareSpec(
                norm="autocast_fp32", attention="flash1_biased", loss="full", engine="fsdp1"
            ),
            optimizer=_LOOP,
            param="fp32",
            reduce="param",
            source="mosaicml/examples examples/llm/src/mosaic_gpt/model.py at f6db16a: "
            "nn.LayerNorm, torch's cross-entropy; mosaicml/composer "
            "composer/trainer/mosaic_fsdp.py at 281844c, get_mixed_precision: "
            "DEFAULT leaves parameters in fp32 and reduces in 16 bits; "
            "that masked tiles are computed is inferred",
        ),
        "mosaicgpt-0.0.4": Stack(
            software=_MOSAIC,
            optimizer=_LOOP,
            source="mosaicml/examples examples/llm/src/models/mosaic_gpt.py at 002992f: layer "
            "norms in low precision where configured; the fused cross-entropy with gpt_block: "
            "optimized only, else torch's, on logits in the products' dtype",
        ),
        "llm-foundry": Stack(
            software=_MOSAIC,
            optimizer=_LOOP,
            source="mosaicml/llm-foundry scripts/train/benchmarking/submit_benchmarks.py at "
            "12a6319: low_precision_layernorm, attn_impl triton; that torch's cross-entropy ran is "
            "inferred",
        ),
        "torchtitan": Stack(
            software=_PLAIN,
            optimizer=_FUSED,
            source="pytorch/torchtitan models/llama3: nn.RMSNorm, SDPA, fp32 cross-entropy, FSDP2",
        ),
        "fms-fsdp": Stack(
            software=_PLAIN_FSDP1,
            optimizer=_FOREACH,
            reduce="param",
            selective="alternate",
            source="foundation-model-stack: LayerNormParameterized, SDPA, every k-th block; "
            "fms_fsdp policies: parameters, reductions and buffers in bf16",
        ),
        "litgpt": Stack(
            software=_PLAIN_FSDP1,
            optimizer=_FUSED,
            source="Lightning-AI/litgpt pretrain: RMSNorm in fp32, SDPA, fused AdamW",
        ),
        "transformers": Stack(
            software=SoftwareSpec(
                norm="eager_fp32", attention="flash2", loss="shifted", engine="fsdp1"
            ),
            optimizer=_FOREACH,
            source="huggingface/transformers modeling_llama: RMSNorm in fp32, float logits, shift",
        ),
        "maxtext-blackwell": Stack(
            software=replace(_MAXTEXT, attention="flash3"),
            optimizer=_FUSED,
            selective="selective",
            source="as maxtext, with cuDNN 9: release 8 has no kernels for Blackwell",
        ),
        "maxtext": Stack(
            software=_MAXTEXT,
            optimizer=_FUSED,
            selective="selective",
            network="4x200g-tcpx",
            source="AI-Hypercomputer/maxtext: XLA, cuDNN 8 attention, remat keeps all products, "
            "gradients of scanned layers are reduced after the scan; "
            "A3 machines have four 200 Gb/s cards",
        ),
        "megatron-2021": Stack(
            software=_MEGATRON_2021,
            optimizer=_FUSED,
            selective="attention_core",
            reduce="param",
            source="NVIDIA/Megatron-LM v2: fused layer norm, scaled masked softmax, bias-gelu; "
            "gradients all-reduced after the last backward; dropout 0.1",
        ),
        "megatron-2022": Stack(
            software=replace(_MEGATRON_2021, sequence_parallel=True),
            optimizer=_FUSED,
            selective="attention_core",
            reduce="param",
            source="arXiv 2205.05198: sequence parallelism and selective recomputation",
        ),
        "megatron-deepspeed": Stack(
            software=replace(_MEGATRON_2021, engine="deepspeed"),
            optimizer=_FUSED,
            selective="attention_core",
            reduce="param",
            source="bigscience-workshop/Megatron-DeepSpeed: Megatron v2 kernels, ZeRO-1",
        ),
        "deepspeed-zero3": Stack(
            software=replace(_MEGATRON_2021, engine="deepspeed", overlaps=True),
            optimizer=_FUSED,
            selective="attention_core",
            reduce="param",
            source="DeepSpeed ZeRO-3 over Megatron v2 kernels",
        ),
        "megatron-core": Stack(
            software=_MEGATRON_CORE,
            optimizer=_FUSED,
            selective="attention_core",
            reduce="param",
            recomputes_unasked=False,
            source="NVIDIA/Megatron-LM core with Transformer Engine: cuDNN attention, fused norms, "
            "gradients, parameters and tensor-parallel collectives overlapped, "
            "sequence parallelism",
        ),
        "megatron-lm-2024": Stack(
            software=replace(_MEGATRON_CORE, loss="full"),
            optimizer=_FUSED,
            selective="attention_core",
            reduce="param",
            recomputes_unasked=False,
            source="NVIDIA/Megatron-LM core, README of 2024: as megatron-core; "
            "fused cross-entropy is off by default",
        ),
        "pytorch": Stack(
            software=_PLAIN,
            optimizer=_FOREACH,
            source="what plain torch code of a decoder does",
        ),
    }
)
"""Known stacks."""

INFERRED: Mapping[str, str] = MappingProxyType(
    {
        "mosaicgpt-0.0.3": (
            "attention computes masked tiles too. Errors fall as if it did; but the module passes "
            "causal=True and a bias of zeros to its Triton kernel (mosaicml/examples "
            "examples/llm/src/mosaic_gpt/layers.py at 10e6d5f, not the commit of the release "
            "itself), and the published kernel stops at the diagonal under that flag. Whatever it "
            "really lost its time on, it took about as long"
        ),
        "llm-foundry": (
            "the cross-entropy is torch's, in bf16. The benchmark script leaves loss_fn alone, and "
            "the model's default is the fused one, without which it refuses to run "
            "(llmfoundry/models/mpt/modeling_mpt.py at 0085285, later than the tables)"
        ),
    }
)
"""Facts that nobody wrote down: taken from what the rows' errors looked like."""


def as_documented() -> Mapping[str, Stack]:
    """The stacks with what is written where a fact is inferred."""
    bias, foundry = STACKS["mosaicgpt-0.0.3"], STACKS["llm-foundry"]
    return MappingProxyType(
        {
            **STACKS,
            "mosaicgpt-0.0.3": replace(bias, software=replace(bias.software, attention="flash1")),
            "llm-foundry": replace(
                foundry, software=replace(foundry.software, loss="fused_softmax")
            ),
        }
    )
