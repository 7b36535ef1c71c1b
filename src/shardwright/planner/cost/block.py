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

__all__ = [
    "COMPILED_HOST_US_PER_KERNEL",
    "HOST_US_PER_KERNEL",
    "PassTime",
    "block_time",
    "ends_time",
    "recomputed_s",
]

HOST_US_PER_KERNEL = 9.0
"""Time for Python, dispatch and autograd to start one eager operation, µs."""

COMPILED_HOST_US_PER_KERNEL = 4.5


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
    matmul_s: float
    attention_s: float
    elementwise_s: float
    recompute_s: float


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
        dropout=software.dropout,
    )
    traffic = block_traffic(model, software, tensor=tensor, is_wide=workload.precision.autocasts)
    pointwise = stream_s(traffic.forward_bytes * tokens, device, efficiency)
    pointwise_gradient = stream_s(traffic.backward_bytes * tokens, device, efficiency)
    kind = workload.checkpointing if is_checkpointed else "none"
    again = recomputed_s(kind, software.class_name, products, attention, pointwise)
    host_us = HOST_US_PER_KERNEL if software.class_name == "eager" else COMPILED_HOST_US_PER_KERNEL
    forward = max(products + attention + pointwise, traffic.forward_kernels * host_us * 1e-6)
    backward = max(
        product_gradients + attention_gradient + pointwise_gradient,
        traffic.backward_kernels * host_us * 1e-6,
    )
    return PassTime(
        forward_s=forward,
        backward_s=backward + sum(again),
        matmul_s=products + product_gradients + again[0],
        attention_s=attention + attention_gradient + again[1],
        elementwise_s=pointwise + pointwise_gradient + again[2],
        recompute_s=sum(again),
    )


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
        forward += matmul_s(tokens, inputs, outputs, device, dtype=dtype)
        backward += matmul_s(tokens, outputs, inputs, device, dtype=dtype)
        backward += matmul_s(outputs, tokens, inputs, device, dtype=dtype)
    return forward, backward


def recomputed_s(
    kind: str, class_name: str, products: float, attention: float, pointwise: float
) -> tuple[float, float, float]:
    """What backward computes again: products, attention, elementwise operations.

    Selective means attention's core in hand-fused software (Korthikanti et al., arXiv 2205.05198)
    and, elsewhere, elementwise operations and every second product (torch's policy of operators).
    """
    if kind in ("full", "alternate"):
        return products, attention, pointwise
    if kind == "elementwise":
        return 0.0, 0.0, pointwise
    if kind == "selective" and class_name == "fused":
        return 0.0, attention, 0.0
    if kind == "selective":
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
    forward = matmul_s(tokens, model.hidden, rows, device)
    backward = matmul_s(tokens, rows, model.hidden, device)
    backward += matmul_s(rows, tokens, model.hidden, device)
    forward, backward = forward / efficiency.matmul, backward / efficiency.matmul
    logits = float(tokens) * vocab
    loss_forward, loss_backward = loss_bytes(workload.software)
    loss_forward_s = stream_s(loss_forward * logits, device, efficiency)
    loss_backward_s = stream_s(loss_backward * logits, device, efficiency)
    return (
        PassTime(
            forward_s=embedding_forward,
            backward_s=embedding_backward,
            matmul_s=0.0,
            attention_s=0.0,
            elementwise_s=embedding_forward + embedding_backward,
            recompute_s=0.0,
        ),
        PassTime(
            forward_s=forward + loss_forward_s,
            backward_s=backward + loss_backward_s,
            matmul_s=forward + backward,
            attention_s=0.0,
            elementwise_s=loss_forward_s + loss_backward_s,
            recompute_s=0.0,
        ),
    )
