"""What is trained and how: batch, precision, recomputation, kernels, optimizer, software.

`SoftwareSpec` says which implementation of norms, attention, loss and optimizer runs; costs depend
on these facts, never on who measured. `class_name` is the only other thing fitted efficiencies
depend on: how the surrounding code is executed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from shardwright.planner.checks import require_choice, require_positive, require_types

__all__ = [
    "ITEM_BYTES",
    "WIRE_BYTES",
    "Attention",
    "Checkpointing",
    "CompressionSpec",
    "Engine",
    "Loss",
    "NormKernel",
    "OptimizerSpec",
    "PrecisionSpec",
    "SoftwareClass",
    "SoftwareSpec",
    "WorkloadSpec",
]

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}
"""Bytes per element."""

Checkpointing = Literal[
    "none",
    "attention_core",
    "selective",
    "half_products",
    "alternate",
    "full",
]
"""What backward recomputes: nothing; attention's core, as Megatron's selective kind; all but
products and attention, as `sw.checkpoint_activations` does with its policy of that name; every
second product too, as torchtitan's; every other block; every block."""

Attention = Literal["eager", "fused_softmax", "flash1_biased", "flash1", "flash2", "flash3"]
"""Attention kernel: separate products and softmax in fp32; Megatron's fused softmax between the
products; the first FlashAttention or its Triton form, with the causal mask as a bias (masked tiles
are computed too) or skipped, which stands for torch's memory-efficient kernel too; FlashAttention 2
(torch's SDPA); its successors."""

Loss = Literal["shifted", "full", "narrow", "fused_softmax", "chunked"]
"""Cross-entropy: in separate fp32 operations over a shifted copy of the logits; the same without
the copy; in the logits' own dtype; one kernel over held logits; logits never held."""

NormKernel = Literal["eager_fp32", "autocast_fp32", "fused"]
"""Norm: a chain of elementwise operations in fp32; one kernel between casts; one kernel."""

SoftwareClass = Literal["eager", "compiled", "fused"]
"""How a step is executed: operation by operation; through a compiler that fuses elementwise chains;
by hand-fused modules (Megatron, Transformer Engine)."""

Engine = Literal["shardwright", "fsdp1", "fsdp2", "deepspeed", "megatron"]
"""Whose buffers and copies are counted."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "checkpointing": get_args(Checkpointing),
    "attention": get_args(Attention),
    "loss": get_args(Loss),
    "norm": get_args(NormKernel),
    "engine": get_args(Engine),
    "class_name": get_args(SoftwareClass),
}


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """Dtypes, by what they are used for.

    Attributes:
        param: Gathered parameters and activations.
        matmul: Inputs of the blocks' matrix products, where narrower than `param`.
        reduce: Gradients on the wire.
        grad: Gradients the optimizer reads.
        master: Parameters the optimizer updates.
        state: Each of the optimizer's moments.
    """

    param: str = "bf16"
    matmul: str = ""
    reduce: str = "fp32"
    grad: str = "fp32"
    master: str = "fp32"
    state: str = "fp32"

    def __post_init__(self) -> None:
        require_types("precision", self)
        for name in ("param", "reduce", "grad", "master", "state"):
            require_choice("precision", name, getattr(self, name), ("fp32", "bf16", "fp16"))
        if self.matmul:
            require_choice("precision", "matmul", self.matmul, ITEM_BYTES)

    @property
    def product(self) -> str:
        """Dtype of matrix products."""
        return self.matmul or self.param

    @property
    def autocasts(self) -> bool:
        """Whether wide parameters are cast for each product, and the residual stays wide."""
        return self.param == "fp32" and self.product != "fp32"

    def item_bytes(self, use: str) -> float:
        """Bytes per element of one use, such as ``"param"``."""
        return ITEM_BYTES[getattr(self, use)]


WIRE_BYTES = {"int8": 1 + 4 / 256, "int4": 0.5 + 4 / 256}
"""Bytes per element of blocks of 256 whole numbers with an fp32 scale each."""


@dataclass(frozen=True, kw_only=True)
class CompressionSpec:
    """What collectives over shards send, where that is narrower than what is computed with.

    Attributes:
        gather: Key of `WIRE_BYTES` for gathered parameters; empty for their own dtype.
        reduce: The same for reduced gradients.
    """

    gather: str = ""
    reduce: str = ""

    def __post_init__(self) -> None:
        require_types("compression", self)
        for name in ("gather", "reduce"):
            if getattr(self, name):
                require_choice("compression", name, getattr(self, name), WIRE_BYTES)

    def wire_bytes(self, use: str, item_bytes: float) -> float:
        """Bytes per element on the wire.

        Args:
            use: ``"gather"`` or ``"reduce"``.
            item_bytes: Where it is not compressed.
        """
        return WIRE_BYTES.get(getattr(self, use), item_bytes)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer.

    Attributes:
        kind: ``"adamw"`` (two moments), ``"momentum"`` (one) or ``"sgd"`` (none).
        implementation: ``"fused"``: one kernel, no temporaries; ``"foreach"``: a chain of
            operations over lists, with a temporary the size of the parameters at its peak;
            ``"loop"``: the same per parameter, with small temporaries.
        is_offloaded: Moments and masters live in host memory.
        clips: Whether the global gradient norm is computed and applied.
    """

    kind: Literal["adamw", "momentum", "sgd"] = "adamw"
    implementation: Literal["fused", "foreach", "loop"] = "foreach"
    is_offloaded: bool = False
    clips: bool = True

    def __post_init__(self) -> None:
        require_types("optimizer", self)
        require_choice("optimizer", "kind", self.kind, ("adamw", "momentum", "sgd"))
        require_choice(
            "optimizer", "implementation", self.implementation, ("fused", "foreach", "loop")
        )

    @property
    def num_moments(self) -> int:
        """Tensors of the parameters' size the optimizer keeps."""
        return {"adamw": 2, "momentum": 1, "sgd": 0}[self.kind]


@dataclass(frozen=True, kw_only=True)
class SoftwareSpec:
    """Which implementations run.

    Attributes:
        class_name: How the step is executed.
        norm: Norm kernel.
        attention: Attention kernel.
        loss: Cross-entropy kernel.
        engine: Whose buffers and copies are counted.
        overlaps: Whether collectives over data axes run beside computation.
        overlaps_replicas: Whether reductions over replicas begin before backward ends.
        overlaps_tensor: Whether collectives over the tensor axis run beside their products, in
            pieces.
        sequence_parallel: Whether tensor parallelism also divides what lies between its products.
        dropout: Whether dropout masks are made and kept.
    """

    class_name: SoftwareClass = "eager"
    norm: NormKernel = "fused"
    attention: Attention = "flash2"
    loss: Loss = "full"
    engine: Engine = "shardwright"
    overlaps: bool = True
    overlaps_replicas: bool = True
    overlaps_tensor: bool = False
    sequence_parallel: bool = False
    dropout: bool = False

    def __post_init__(self) -> None:
        require_types("software", self)
        for name in ("class_name", "norm", "attention", "loss"):
            require_choice("software", name, getattr(self, name), _CHOICES[name])
        require_choice("software", "engine", self.engine, _CHOICES["engine"])


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """One optimizer step.

    Attributes:
        seq_len: Tokens per sequence.
        micro_batch: Sequences per data rank and micro-batch.
        accumulation: Micro-batches per step.
        checkpointing: What backward recomputes.
        precision: Dtypes.
        optimizer: Optimizer.
        software: Implementations.
        parameters_offloaded: Parameter shards live in host memory too.
        compression: What collectives over shards send.
    """

    seq_len: int
    micro_batch: int
    accumulation: int = 1
    checkpointing: Checkpointing = "none"
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    software: SoftwareSpec = field(default_factory=SoftwareSpec)
    parameters_offloaded: bool = False
    compression: CompressionSpec = field(default_factory=CompressionSpec)

    def __post_init__(self) -> None:
        require_types("workload", self)
        require_positive(
            "workload",
            seq_len=self.seq_len,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
        )
        require_choice("workload", "checkpointing", self.checkpointing, _CHOICES["checkpointing"])

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens per data rank and micro-batch."""
        return self.seq_len * self.micro_batch

    @property
    def tokens_per_rank(self) -> int:
        """Tokens per data rank and step."""
        return self.tokens_per_micro_batch * self.accumulation
