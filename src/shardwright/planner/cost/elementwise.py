"""Operations bound by memory bandwidth: norms, residuals, rotations, activations, loss, look-up.

Each is counted in bytes read and written per element, operation by operation as the software runs
it (eager), or with chains fused into one pass (compiled, or by hand).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from shardwright.planner.cost.efficiency import Efficiency
from shardwright.planner.device import DeviceSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.workload import PrecisionSpec, SoftwareSpec

__all__ = [
    "BlockTraffic",
    "block_traffic",
    "embedding_bytes",
    "engine_copy_bytes",
    "loss_bytes",
    "stream_s",
]

_STREAM_SHARE = 0.74
"""Share of peak memory bandwidth that long elementwise kernels reach (STREAM-like measurements)."""

_NORM_BYTES = MappingProxyType(
    {"fused": (4.0, 10.0), "autocast_fp32": (20.0, 30.0), "eager_fp32": (34.0, 64.0)}
)
"""Bytes per element of one norm, forward and backward: one kernel; one fp32 kernel between casts;
a chain of fp32 operations."""

_WIDE_NORM_BYTES = (14.0, 22.0)
"""One fp32 kernel on an fp32 residual, and a cast of its result."""

_RESIDUAL_BYTES = (6.0, 6.0)
"""Two reads and a write, in two-byte elements."""

_WIDE_RESIDUAL_BYTES = (10.0, 12.0)
"""The same with an fp32 residual."""

_CAST_BYTES = 6.0
"""Casting an element between two and four bytes: read one, write the other."""

_ENGINE_COPY_BYTES = MappingProxyType(
    {
        "shardwright": (0.0, 1.5),
        "fsdp1": (0.0, 8.0),
        "fsdp2": (4.0, 6.0),
        "deepspeed": (4.0, 8.0),
        "megatron": (0.0, 4.0),
    }
)
"""Bytes per parameter element that an engine copies on the compute lane in forward and backward of
a micro-batch: out of gathers, and into reductions in the gradient's own dtype. Counted from the
engines' sources."""

_FUSED_NORM_BYTES = (8.0, 14.0)
"""A norm together with the residual sum before it."""

_ACTIVATION_BYTES = MappingProxyType({"plain": (4.0, 6.0), "gated": (10.0, 18.0)})
_FUSED_ACTIVATION_BYTES = MappingProxyType({"plain": (4.0, 6.0), "gated": (6.0, 10.0)})
_ROTATION_BYTES = 24.0
_FUSED_ROTATION_BYTES = 4.0
_DROPOUT_BYTES = 5.0

_LOSS_BYTES = MappingProxyType(
    {
        "shifted": (22.0, 26.0),
        "full": (14.0, 18.0),
        "narrow": (14.0, 18.0),
        "fused_softmax": (2.0, 4.0),
        "chunked": (10.0, 2.0),
    }
)
"""Bytes per logit: with a shifted copy in fp32; in fp32; in 16 bits, whose kernels reach less than
half of the bandwidth on rows this long; one kernel each way; recomputed in parts."""

_COMPILED_LOSS_BYTES = (6.0, 6.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTraffic:
    """What a block's elementwise operations move, per token.

    Attributes:
        forward_bytes: Forward.
        backward_bytes: Backward.
        forward_kernels: Kernels the host starts in forward, products included.
        backward_kernels: The same in backward.
    """

    forward_bytes: float
    backward_bytes: float
    forward_kernels: int
    backward_kernels: int


def stream_s(num_bytes: float, device: DeviceSpec, efficiency: Efficiency) -> float:
    """Seconds to move bytes through device memory in elementwise kernels."""
    return num_bytes / (device.memory_gbps * 1e9 * _STREAM_SHARE * efficiency.memory)


def engine_copy_bytes(
    numel: float, engine: str, precision: PrecisionSpec, *, is_sharded: bool
) -> tuple[float, float]:
    """Bytes an engine moves for a unit on the compute lane, forward and backward.

    Args:
        numel: Elements of the unit.
        engine: Whose.
        precision: Dtypes; gradients are written in a wider dtype of reductions; parameters wider
            than products are cast for each of them, and their gradients back.
        is_sharded: Whether parameters are gathered at all.
    """
    forward, backward = _ENGINE_COPY_BYTES[engine] if is_sharded else (0.0, 4.0)
    if is_sharded and engine != "shardwright" and precision.reduce != precision.product:
        backward += 4.0  # written as fp32 for the wire
    if precision.autocasts:
        forward += _CAST_BYTES
        backward += _CAST_BYTES
    return forward * numel, backward * numel


def block_traffic(
    model: ModelSpec, software: SoftwareSpec, *, tensor: int = 1, is_wide: bool = False
) -> BlockTraffic:
    """Bytes per token of one block's elementwise operations.

    Args:
        model: Shape.
        software: Implementations.
        is_wide: Whether the residual is in fp32.
        tensor: Size of the tensor axis; norms and residuals are divided only where the software
            divides sequences too.

    Returns:
        The counts. Biases ride on products in forward and are summed in backward.
    """
    if software.class_name == "eager":
        return _eager(model, software, tensor, is_wide)
    return _fused(model, software, tensor)


def _eager(model: ModelSpec, software: SoftwareSpec, tensor: int, is_wide: bool) -> BlockTraffic:
    stream = model.hidden / (tensor if software.sequence_parallel else 1)
    queries, keys = model.query_width / tensor, model.kv_width / tensor
    inner = model.ffn_hidden / tensor
    kernel = model.norm_kernel(software.norm)
    norm_forward, norm_backward = _WIDE_NORM_BYTES if is_wide else _NORM_BYTES[kernel]
    add_forward, add_backward = _WIDE_RESIDUAL_BYTES if is_wide else _RESIDUAL_BYTES
    gate_forward, gate_backward = _ACTIVATION_BYTES["gated" if model.gated else "plain"]
    forward = model.norms_per_block * stream * norm_forward + 2 * stream * add_forward
    backward = model.norms_per_block * stream * norm_backward + 2 * stream * add_backward
    forward += inner * gate_forward
    backward += inner * gate_backward
    forward_kernels, backward_kernels = 18, 32
    if kernel == "eager_fp32":
        forward_kernels += 6 * model.norms_per_block
        backward_kernels += 10 * model.norms_per_block
    if kernel == "autocast_fp32":
        forward_kernels += 3 * model.norms_per_block
        backward_kernels += 3 * model.norms_per_block
    if model.positions == "rope":
        forward += (queries + keys) * _ROTATION_BYTES
        backward += (queries + keys) * _ROTATION_BYTES
        forward_kernels += 10
        backward_kernels += 12
    forward += 4 * queries  # heads back into rows
    backward += 4 * (queries + 2 * keys)
    if model.gated:  # separate query, key, value and gate products: their input gradients are added
        backward += 3 * stream * add_backward
    if model.kv_heads < model.heads:
        forward += 4 * (queries + keys)
        backward += 4 * (queries + keys)
    if software.dropout:
        forward += 2 * stream * _DROPOUT_BYTES
        backward += 2 * stream * _DROPOUT_BYTES
    backward += _bias_bytes(model, tensor)
    return BlockTraffic(
        forward_bytes=forward,
        backward_bytes=backward,
        forward_kernels=forward_kernels,
        backward_kernels=backward_kernels,
    )


def _fused(model: ModelSpec, software: SoftwareSpec, tensor: int) -> BlockTraffic:
    stream = model.hidden / (tensor if software.sequence_parallel else 1)
    queries, keys = model.query_width / tensor, model.kv_width / tensor
    inner = model.ffn_hidden / tensor
    gate_forward, gate_backward = _FUSED_ACTIVATION_BYTES["gated" if model.gated else "plain"]
    forward = model.norms_per_block * stream * _FUSED_NORM_BYTES[0] + inner * gate_forward
    backward = model.norms_per_block * stream * _FUSED_NORM_BYTES[1] + inner * gate_backward
    if model.positions == "rope":
        forward += (queries + keys) * _FUSED_ROTATION_BYTES
        backward += (queries + keys) * _FUSED_ROTATION_BYTES
    backward += 4 * (queries + 2 * keys)
    if software.dropout:
        forward += 2 * stream * 1.0
        backward += 2 * stream * 1.0
    backward += _bias_bytes(model, tensor)
    return BlockTraffic(
        forward_bytes=forward, backward_bytes=backward, forward_kernels=16, backward_kernels=28
    )


def _bias_bytes(model: ModelSpec, tensor: int) -> float:
    """Summing gradients over tokens for biases reads them once more."""
    columns = 0.0
    if model.qkv_bias:
        columns += (model.query_width + 2 * model.kv_width) / tensor
    if model.out_bias:
        columns += model.hidden
    if model.ffn_bias:
        columns += model.ffn_hidden / tensor + model.hidden
    return 2 * columns


def loss_bytes(software: SoftwareSpec) -> tuple[float, float]:
    """Bytes per logit of the cross-entropy, forward and backward, beside the products."""
    if software.class_name == "compiled" and software.loss in ("full", "narrow", "shifted"):
        return _COMPILED_LOSS_BYTES
    forward, backward = _LOSS_BYTES[software.loss]
    return forward, backward


def embedding_bytes(model: ModelSpec, tokens: int, *, tensor: int = 1) -> tuple[float, float]:
    """Bytes of the look-up: rows read and written; a whole gradient zeroed, rows added to it."""
    width = float(model.hidden)
    return 4 * width * tokens, 2 * model.vocab * width / tensor + 8 * width * tokens
