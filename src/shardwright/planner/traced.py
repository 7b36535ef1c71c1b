"""A model known by tracing one pass of it, not by its architecture's sizes.

The torch front end (`app/tracing.py`) fills these in from any module; everything here is plain
data. Counts are those of the traced sample: a micro-batch of another size scales them, which is
exact for what is counted per sample and takes batch statistics and the like for as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwright.core.errors import SpecError
from shardwright.core.layout import ParameterSpec
from shardwright.planner.checks import require_positive

__all__ = ["Product", "TracedAttention", "TracedModel", "TracedUnit", "UnitTrace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Products of one shape in a forward pass.

    Attributes:
        m: Rows of the result; with samples as rows, this is what a larger micro-batch enlarges.
        k: Inner dimension.
        n: Columns of the result.
        batch: Independent products of one kernel.
        is_batched: Whether samples are spread over `batch`, not over rows.
        count: Times it runs.
    """

    m: int
    k: int
    n: int
    batch: int = 1
    is_batched: bool = False
    count: int = 1

    @property
    def flops(self) -> float:
        """Operations of all of them."""
        return 2.0 * self.m * self.k * self.n * self.batch * self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedAttention:
    """Calls of fused attention of one shape.

    Attributes:
        batch: Sequences.
        heads: Query heads.
        queries: Tokens that look.
        keys: Tokens looked at.
        head_width: Width of a head.
        is_causal: Whether tokens see only those before them.
        count: Times it runs.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    head_width: int
    is_causal: bool
    count: int = 1

    @property
    def flops(self) -> float:
        """Operations of both products of forward; half of them under a causal mask."""
        whole = 4.0 * self.batch * self.heads * self.queries * self.keys * self.head_width
        return self.count * (whole / 2 if self.is_causal else whole)


@dataclass(frozen=True, kw_only=True)
class UnitTrace:
    """What one unit does for the traced sample, without the units inside it.

    Attributes:
        products: Matrix products and convolutions of forward.
        attentions: Fused attention of forward.
        backward_product_flops: Operations of backward's products.
        forward_bytes: What elementwise operations of forward read and write.
        backward_bytes: The same in backward.
        forward_kernels: Operations that the host starts in forward.
        backward_kernels: The same in backward.
        saved_bytes: What autograd keeps from forward to backward, parameters left out.
        input_bytes: The unit's own input: what full recomputation keeps.
        product_bytes: Results of products.
        attention_bytes: Results of attention.
        widest_bytes: The largest tensor that forward makes.
    """

    products: tuple[Product, ...] = ()
    attentions: tuple[TracedAttention, ...] = ()
    backward_product_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0
    saved_bytes: float = 0.0
    input_bytes: float = 0.0
    product_bytes: float = 0.0
    attention_bytes: float = 0.0
    widest_bytes: float = 0.0

    @property
    def product_flops(self) -> float:
        """Operations of forward's products."""
        return sum(product.flops for product in self.products)

    @property
    def flops(self) -> float:
        """Operations to train on the sample once, without recomputation.

        Attention counts twice its forward in backward, as is usual for model FLOPs; the kernel's
        own recomputation is left out.
        """
        attention = 3 * sum(call.flops for call in self.attentions)
        return self.product_flops + self.backward_product_flops + attention


@dataclass(frozen=True, kw_only=True)
class TracedUnit:
    """One unit as the engine finds it.

    Attributes:
        name: Path of its module.
        parent: Index of the unit that encloses it; None for the root.
        depth: Units that enclose it.
        is_block: Whether it is a repeated block, which recomputation applies to.
        parameters: Its parameters, in the engine's order, in their compute dtypes.
        trace: What it does.
    """

    name: str
    parent: int | None
    depth: int
    is_block: bool
    parameters: tuple[ParameterSpec, ...]
    trace: UnitTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """A module's units and what they do, for one sample micro-batch.

    Compared by identity, so that cached formulas need not read it through.

    Attributes:
        name: For people: the module's class.
        samples: Sequences, images or rows of the traced micro-batch.
        tokens_per_sample: Length of a sequence; 1 where samples are no sequences.
        units: In module order, the root first.
        param: Dtype it was traced in, such as ``"bf16"``.
        output_numel: Elements that the module returns; 0 where it returns its loss.
        has_root_head: Whether the root itself computes what comes out.
        assumptions: What tracing had to take for granted, in words.
    """

    name: str
    samples: int
    tokens_per_sample: int
    units: tuple[TracedUnit, ...]
    param: str
    output_numel: int
    has_root_head: bool
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_positive(
            f"traced model {self.name!r}",
            samples=self.samples,
            tokens_per_sample=self.tokens_per_sample,
            units=len(self.units),
        )

    @cached_property
    def layers(self) -> int:
        """Number of repeated blocks."""
        return sum(unit.is_block for unit in self.units)

    @cached_property
    def num_parameters(self) -> int:
        """Distinct parameters, in elements."""
        return sum(p.numel for unit in self.units for p in unit.parameters)

    @cached_property
    def flops_per_sample(self) -> float:
        """Operations to train on one sample, frozen parameters considered."""
        return sum(unit.trace.flops for unit in self.units) / self.samples

    def flops_per_token(self, seq_len: int, *, causal: bool = True) -> float:
        """Operations to train on one token, for the sequence length that was traced.

        Args:
            seq_len: Must be the traced one.
            causal: Attention is counted as it was traced.
        """
        self.check_seq_len(seq_len)
        return self.flops_per_sample / self.tokens_per_sample

    def check_seq_len(self, seq_len: int) -> None:
        """Raise unless the sequence length is the traced one."""
        if seq_len != self.tokens_per_sample:
            raise SpecError(
                f"{self.name} was traced with {self.tokens_per_sample} tokens per sample, the "
                f"workload has seq_len={seq_len}; make them equal (1 where samples are no "
                "sequences)"
            )

    def as_data(self) -> dict[str, Any]:
        """Name and counts, for plan files."""
        return {
            "name": self.name,
            "traced": True,
            "num_parameters": self.num_parameters,
            "samples": self.samples,
            "tokens_per_sample": self.tokens_per_sample,
            "flops_per_sample": self.flops_per_sample,
            "saved_bytes": {unit.name: unit.trace.saved_bytes for unit in self.units},
        }
