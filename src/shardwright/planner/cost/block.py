"""Seconds of a block and of what surrounds the blocks, forward, backward and recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwright.planner.cost.attention import AttentionShape, attention_s
from shardwright.planner.cost.efficiency import Efficiency
from shardwright.planner.cost.elementwise import (
    block_traffic,
    embedding_bytes,
    loss_bytes,
    stream_s,
)
from shardwright.planner.cost.matmul import matmul_s
from shardwright.planner.device import DeviceSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.workload import WorkloadSpec

__all__ = ["Parts", "PassTime", "block_time", "ends_time", "unit_time"]

_HOST_US_PER_KERNEL = 9.0
"""Time for Python, dispatch and autograd to start one eager operation, µs."""

_COMPILED_HOST_US_PER_KERNEL = 4.5


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """Seconds of one part of the model in one micro-batch.

    Attributes:
        forward_s: Forward.
        backward_s: Backward, recomputation included.
        matmul_s: Of both, matrix products.
        attention_s: Of both, attention's core.
        elementwise_s: Of both, operations bound by memory.
        recompute_s: Of backward, recomputation.
    """

    forward_s: float
    backward_s: float
    matmul_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    recompute_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a unit computes in one direction.

    Attributes:
        products_s: Seconds of matrix products with weights.
        attention_s: Seconds of attention's core.
        elementwise_s: Seconds of operations bound by memory.
        kernels: Operations that the host starts.
    """

    products_s: float
    attention_s: float
    elementwise_s: float
    kernels: float

    def seconds(self, class_name: str) -> float:
        """Seconds of all, or of the host where that takes longer to start them."""
        is_eager = class_name == "eager"
        host_us = _HOST_US_PER_KERNEL if is_eager else _COMPILED_HOST_US_PER_KERNEL
        computed_s = self.products_s + self.attention_s + self.elementwise_s
        return max(computed_s, self.kernels * host_us * 1e-6)


def unit_time(
    forward: Parts, backward: Parts, workload: WorkloadSpec, *, is_checkpointed: bool
) -> PassTime:
    """Seconds of a unit, with what its backward computes again.

    Args:
        forward: Its forward.
        backward: Its backward, without recomputation.
        workload: Recomputation and software.
        is_checkpointed: Whether the workload's kind of recomputation applies to it.
    """
    class_name = workload.software.class_name
    kind = workload.checkpointing if is_checkpointed else "none"
    again = _recomputed_s(kind, forward.products_s, forward.attention_s, forward.elementwise_s)
    return PassTime(
        forward_s=forward.seconds(class_name),
        backward_s=backward.seconds(class_name) + sum(again),
        matmul_s=forward.products_s + backward.products_s + again[0],
        attention_s=forward.attention_s + backward.attention_s + again[1],
        elementwise_s=forward.elementwise_s + backward.elementwise_s + again[2],
        recompute_s=sum(again),
    )


@lru_cache(maxsize=4096)
def block_time(
    model: ModelSpec,
    workload: WorkloadSpec,
    device: DeviceSpec,
    efficiency: Efficiency,
    *,
    tensor: int = 1,
    is_checkpointed: bool = True,
) -> PassTime:
    """Seconds of one block for one micro-batch on one tensor rank.

    Args:
        model: Shape.
        workload: Batch, recomputation and software.
        device: Where.
        efficiency: Fitted factors.
        tensor: Size of the tensor axis.
        is_checkpointed: Whether the workload's kind of recomputation applies to this block.

    Products are counted as the block runs them: one for query, key and value together, forward;
    two per weight, backward. Ignores collectives.
    """
    tokens = workload.tokens_per_micro_batch
    software = workload.software
    dtype = workload.precision.product
    products, product_gradients = _products_s(model, tokens, device, dtype, tensor)
    products, product_gradients = (
        products / efficiency.matmul,
        product_gradients / efficiency.matmul,
    )
    attention, attention_gradient = attention_s(
        AttentionShape(
            batch=workload.micro_batch,
            seq_len=workload.seq_len,
            heads=max(1, model.heads // tensor),
            head_width=model.head_width,
        ),
        software.attention,
        device,
        efficiency,
        dtype=dtype,
        dropout=software.dropout,
    )
    traffic = block_traffic(model, software, tensor=tensor, is_wide=workload.precision.autocasts)
    return unit_time(
        Parts(
            products_s=products,
            attention_s=attention,
            elementwise_s=stream_s(traffic.forward_bytes * tokens, device, efficiency),
            kernels=traffic.forward_kernels,
        ),
        Parts(
            products_s=product_gradients,
            attention_s=attention_gradient,
            elementwise_s=stream_s(traffic.backward_bytes * tokens, device, efficiency),
            kernels=traffic.backward_kernels,
        ),
        workload,
        is_checkpointed=is_checkpointed,
    )


def _product_s(
    m: int, k: int, n: int, device: DeviceSpec, *, dtype: str = "bf16", batch: int = 1
) -> tuple[float, float]:
    """Seconds of a product of ``(m, k)`` with weights ``(k, n)``, and of its two gradients."""
    forward = matmul_s(m, k, n, device, dtype=dtype, batch=batch)
    backward = matmul_s(m, n, k, device, dtype=dtype, batch=batch)
    backward += matmul_s(n, m, k, device, dtype=dtype, batch=batch)
    return forward, backward


def _products_s(
    model: ModelSpec, tokens: int, device: DeviceSpec, dtype: str, tensor: int
) -> tuple[float, float]:
    """Seconds of a block's products with weights, forward and backward."""
    qkv = (model.query_width + 2 * model.kv_width) // tensor
    inner = model.ffn_hidden // tensor
    shapes = [
        (model.hidden, qkv),
        (model.query_width // tensor, model.hidden),
        (model.hidden, 2 * inner if model.gated else inner),
        (inner, model.hidden),
    ]
    forward = backward = 0.0
    for inputs, outputs in shapes:
        one, gradients = _product_s(tokens, inputs, outputs, device, dtype=dtype)
        forward, backward = forward + one, backward + gradients
    return forward, backward


def _recomputed_s(
    kind: str, products: float, attention: float, pointwise: float
) -> tuple[float, float, float]:
    """What backward computes again: products, attention, elementwise operations.

    Attention's core alone is the kind of Korthikanti et al. (arXiv 2205.05198).
    """
    if kind in ("full", "alternate"):
        return products, attention, pointwise
    if kind == "selective":
        return 0.0, 0.0, pointwise
    if kind == "attention_core":
        return 0.0, attention, 0.0
    if kind == "half_products":
        return products / 2, 0.0, pointwise
    return 0.0, 0.0, 0.0


@lru_cache(maxsize=4096)
def ends_time(
    model: ModelSpec,
    workload: WorkloadSpec,
    device: DeviceSpec,
    efficiency: Efficiency,
    *,
    tensor: int = 1,
) -> tuple[PassTime, PassTime]:
    """Seconds of the look-up, and of the output projection with the loss.

    Args:
        model: Shape.
        workload: Batch and software.
        device: Where.
        efficiency: Fitted factors.
        tensor: Size of the tensor axis, which divides the vocabulary.

    Returns:
        Times of the embedding and of the head.
    """
    tokens = workload.tokens_per_micro_batch
    looked_up, looked_up_gradient = embedding_bytes(model, tokens, tensor=tensor)
    embedding_forward = stream_s(looked_up, device, efficiency)
    embedding_backward = stream_s(looked_up_gradient, device, efficiency)
    vocab = -(-model.vocab // tensor)
    rows = -(-vocab // 64) * 64  # libraries pad, or reach the padded speed
    forward, backward = _product_s(tokens, model.hidden, rows, device)
    forward, backward = forward / efficiency.matmul, backward / efficiency.matmul
    logits = float(tokens) * vocab
    loss_forward, loss_backward = loss_bytes(workload.software)
    loss_forward_s = stream_s(loss_forward * logits, device, efficiency)
    loss_backward_s = stream_s(loss_backward * logits, device, efficiency)
    return (
        PassTime(
            forward_s=embedding_forward,
            backward_s=embedding_backward,
            elementwise_s=embedding_forward + embedding_backward,
        ),
        PassTime(
            forward_s=forward + loss_forward_s,
            backward_s=backward + loss_backward_s,
            matmul_s=forward + backward,
            elementwise_s=loss_forward_s + loss_backward_s,
        ),
    )
