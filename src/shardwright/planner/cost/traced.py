"""Costs of a traced unit: its products by shape, its attention, and the bytes of everything else.

The same formulas of devices as for decoders (`matmul`, `attention`, `elementwise`); only the
counts come from a trace. Backward's products have the shapes of forward's, transposed; how many
there are follows from their traced operations, so that frozen parameters cost none.
"""

from __future__ import annotations

from shardwright.planner.cost.activation import LOGIT_BYTES
from shardwright.planner.cost.attention import AttentionShape, attention_s
from shardwright.planner.cost.block import Parts, PassTime, unit_time
from shardwright.planner.cost.efficiency import Efficiency
from shardwright.planner.cost.elementwise import loss_bytes, stream_s
from shardwright.planner.cost.matmul import matmul_s
from shardwright.planner.device import DeviceSpec
from shardwright.planner.traced import Product, TracedAttention, TracedModel, UnitTrace
from shardwright.planner.workload import WorkloadSpec

__all__ = ["output_bytes", "output_time", "traced_kept", "traced_time", "traced_working"]

_FUSED_SHARE = 0.35
"""Share of eager elementwise traffic left once chains are fused: what the eager and the fused
counts of a Llama block in `elementwise` have in common. Rough for other models."""


def traced_time(
    model: TracedModel,
    trace: UnitTrace,
    workload: WorkloadSpec,
    device: DeviceSpec,
    efficiency: Efficiency,
    *,
    is_checkpointed: bool,
) -> PassTime:
    """Seconds of one unit for one micro-batch.

    Args:
        model: Whose sample was traced.
        trace: What the unit does.
        workload: Batch, recomputation and software.
        device: Where.
        efficiency: Fitted factors.
        is_checkpointed: Whether the workload's kind of recomputation applies to this unit.
    """
    scale = workload.micro_batch / model.samples
    software = workload.software
    dtype = workload.precision.product
    products, gradients = _products_s(trace, scale, device, dtype)
    products, gradients = products / efficiency.matmul, gradients / efficiency.matmul
    attention, attention_gradient = _attention_s(trace, scale, workload, device, efficiency)
    fused = 1.0 if software.class_name == "eager" else _FUSED_SHARE
    return unit_time(
        Parts(
            products_s=products,
            attention_s=attention,
            elementwise_s=stream_s(trace.forward_bytes * scale * fused, device, efficiency),
            kernels=trace.forward_kernels,
        ),
        Parts(
            products_s=gradients,
            attention_s=attention_gradient,
            elementwise_s=stream_s(trace.backward_bytes * scale * fused, device, efficiency),
            kernels=trace.backward_kernels,
        ),
        workload,
        is_checkpointed=is_checkpointed,
    )


def _products_s(
    trace: UnitTrace, scale: float, device: DeviceSpec, dtype: str
) -> tuple[float, float]:
    forward = backward = 0.0
    for product in trace.products:
        m, batch = _scaled(product, scale)
        k, n = product.k, product.n
        forward += product.count * matmul_s(m, k, n, device, dtype=dtype, batch=batch)
        backward += product.count * (
            matmul_s(m, n, k, device, dtype=dtype, batch=batch)
            + matmul_s(k, m, n, device, dtype=dtype, batch=batch)
        )
    usual = 2 * trace.product_flops
    return forward, backward * (trace.backward_product_flops / usual if usual else 0.0)


def _scaled(product: Product, scale: float) -> tuple[int, int]:
    if product.is_batched:
        return product.m, max(1, round(product.batch * scale))
    return max(1, round(product.m * scale)), product.batch


def _attention_s(
    trace: UnitTrace,
    scale: float,
    workload: WorkloadSpec,
    device: DeviceSpec,
    efficiency: Efficiency,
) -> tuple[float, float]:
    forward = backward = 0.0
    for call in trace.attentions:
        one, gradient = attention_s(
            _shape(call, scale),
            workload.software.attention,
            device,
            efficiency,
            dtype=workload.precision.product,
            dropout=workload.software.dropout,
        )
        # The formula is that of a causal mask over as many keys as queries.
        times = call.count * (call.keys / call.queries) * (1.0 if call.is_causal else 2.0)
        forward += times * one
        backward += times * gradient
    return forward, backward


def _shape(call: TracedAttention, scale: float) -> AttentionShape:
    return AttentionShape(
        batch=max(1, round(call.batch * scale)),
        seq_len=call.queries,
        heads=call.heads,
        head_width=call.head_width,
    )


def traced_kept(
    model: TracedModel, trace: UnitTrace, workload: WorkloadSpec, *, is_checkpointed: bool
) -> float:
    """Bytes one unit keeps for one micro-batch, by kind of recomputation.

    Args:
        model: Whose sample was traced.
        trace: What the unit does.
        workload: Batch and recomputation.
        is_checkpointed: Whether recomputation applies to this unit.
    """
    kind = workload.checkpointing if is_checkpointed else "none"
    kept = {
        "full": trace.input_bytes,
        "alternate": trace.input_bytes,
        "selective": trace.input_bytes + trace.attention_bytes + trace.product_bytes,
        "half_products": trace.input_bytes + trace.attention_bytes + trace.product_bytes / 2,
        "attention_core": trace.saved_bytes,  # the fused kernel keeps next to nothing
        "none": trace.saved_bytes,
    }[kind]
    # Recomputing never keeps more than what there was.
    return min(kept, trace.saved_bytes) * workload.micro_batch / model.samples


def traced_working(
    model: TracedModel, trace: UnitTrace, workload: WorkloadSpec, *, is_checkpointed: bool
) -> float:
    """Bytes alive only in a unit's backward: two wide gradients, and what it recomputed."""
    scale = workload.micro_batch / model.samples
    is_recomputed = is_checkpointed and workload.checkpointing != "none"
    return scale * (2 * trace.widest_bytes + (trace.saved_bytes if is_recomputed else 0.0))


def output_bytes(model: TracedModel, workload: WorkloadSpec) -> float:
    """Bytes of what the module returns and of the loss on it, at their peak.

    Nothing says which loss follows; a cross-entropy of the workload's kind is assumed, which is an
    upper bound for most. Where the module returns its loss, the trace has it already.
    """
    elements = model.output_numel * workload.micro_batch / model.samples
    return elements * (workload.precision.item_bytes("param") + LOGIT_BYTES[workload.software.loss])


def output_time(
    model: TracedModel, workload: WorkloadSpec, device: DeviceSpec, efficiency: Efficiency
) -> PassTime:
    """Seconds of that loss."""
    elements = model.output_numel * workload.micro_batch / model.samples
    forward, backward = (
        stream_s(num_bytes * elements, device, efficiency)
        for num_bytes in loss_bytes(workload.software)
    )
    return PassTime(
        forward_s=forward,
        backward_s=backward,
        elementwise_s=forward + backward,
    )
