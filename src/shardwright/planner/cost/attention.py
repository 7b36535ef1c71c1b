"""Time of attention's core: scores, softmax and values, by kernel.

FlashAttention never writes the scores; forward computes two products of 2 b h s^2 d operations,
backward five (Dao et al., arXiv 2205.14135, 2307.08691), half of it under a causal mask. The
speeds are what those papers and FlashAttention-3 (arXiv 2407.08608) report for long causal
sequences. The other kernels write the scores and pay for reading them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwright.planner.cost.efficiency import Efficiency
from shardwright.planner.cost.elementwise import stream_s
from shardwright.planner.cost.matmul import KERNEL_S, matmul_s
from shardwright.planner.device import DeviceSpec

__all__ = ["AttentionShape", "attention_s"]

_FLASH_SHARE: Mapping[str, Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "flash1": MappingProxyType(
            {"a100": (0.42, 0.30), "h100": (0.235, 0.165), "b200": (0.1175, 0.0825)}
        ),
        "flash2": MappingProxyType(
            {"a100": (0.60, 0.51), "h100": (0.37, 0.30), "b200": (0.185, 0.15)}
        ),
        "flash3": MappingProxyType(
            {"a100": (0.60, 0.51), "h100": (0.60, 0.47), "b200": (0.55, 0.42)}
        ),
    }
)
"""Share of the dense peak in forward and backward, head width 128, long causal sequences.

The first two use Ampere's instructions. On Blackwell these are taken to run as fast per SM and
clock as on Hopper, whose peak per SM and clock is half (4,096 operations against 8,192): so is the
share. That makes 416 and 337 TFLOP/s of a B200; measured were 330 to 380 in forward
(meta-pytorch/tritonbench pull request 171, Dao-AILab/flash-attention issue 1589) and 330 in
backward (the latter), of sequences of 2,048 to 16,384."""

_ELSEWHERE: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"flash1": (0.30, 0.22), "flash2": (0.45, 0.36), "flash3": (0.50, 0.40)}
)

_NARROW_HEAD = 0.92
"""Heads narrower than 128 reach this share of that speed."""

_RAMP_TOKENS = 256
"""Sequence length at which half of the long-sequence speed is reached."""

_TILE_TOKENS = 128
"""Tiles on the diagonal of a causal mask are computed whole."""

_FLASH_GRADIENT_BYTES = 20.0
"""Bytes per query element in backward beside the kernel: outputs times their gradients, summed; an
fp32 sum of query gradients, zeroed, added to and cast."""

_SCORE_BYTES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"eager": (26.0, 26.0), "fused_softmax": (4.0, 6.0)}
)
"""Bytes read and written per score in forward and backward, beside the products' own."""

_DROPOUT_BYTES = 5.0
"""Bytes per score of dropping attention weights: read, write, mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Attention of one micro-batch on one tensor rank.

    Attributes:
        batch: Sequences.
        seq_len: Tokens per sequence.
        heads: Query heads on this rank.
        head_width: Width of a head.
    """

    batch: int
    seq_len: int
    heads: int
    head_width: int


def attention_s(
    shape: AttentionShape,
    kernel: str,
    device: DeviceSpec,
    efficiency: Efficiency,
    *,
    dtype: str = "bf16",
    dropout: bool = False,
) -> tuple[float, float]:
    """Seconds of forward and backward.

    Args:
        shape: What is attended.
        kernel: See `workload.Attention`.
        device: Where.
        efficiency: Fitted factors.
        dtype: Of products; attention's are in 16 bits where those are narrower.
        dropout: Whether attention weights are dropped.
    """
    wide = "fp32" if dtype == "fp32" else "bf16"
    if kernel.startswith("flash"):
        return _flash_s(shape, kernel, device, efficiency, wide)
    return _written_s(shape, kernel, device, efficiency, wide, dropout=dropout)


def _flash_s(
    shape: AttentionShape, kernel: str, device: DeviceSpec, efficiency: Efficiency, dtype: str
) -> tuple[float, float]:
    is_biased = kernel.endswith("_biased")
    kernel = kernel.removesuffix("_biased")
    seen = 1.0 if is_biased else 0.5 * (1 + min(1.0, _TILE_TOKENS / shape.seq_len))
    flops = 4.0 * shape.batch * shape.heads * shape.seq_len**2 * shape.head_width * seen
    forward, backward = _FLASH_SHARE[kernel].get(device.family, _ELSEWHERE[kernel])
    speed = device.peak_flops(dtype) * shape.seq_len / (shape.seq_len + _RAMP_TOKENS)
    speed *= efficiency.matmul * (1.0 if shape.head_width >= 128 else _NARROW_HEAD)
    if device.family == "h100":  # a part with less power runs at a lower clock
        speed *= min(1.0, ((device.power_w - 100) / 600) ** 0.4)
    elements = float(shape.batch) * shape.seq_len * shape.heads * shape.head_width
    beside = stream_s(_FLASH_GRADIENT_BYTES * elements, device, efficiency)
    return (
        flops / (speed * forward) + KERNEL_S,
        2.5 * flops / (speed * backward) + beside + 3 * KERNEL_S,
    )


def _written_s(
    shape: AttentionShape,
    kernel: str,
    device: DeviceSpec,
    efficiency: Efficiency,
    dtype: str,
    *,
    dropout: bool,
) -> tuple[float, float]:
    batch = shape.batch * shape.heads
    s, d = shape.seq_len, shape.head_width
    scores = matmul_s(s, d, s, device, dtype=dtype, batch=batch)
    values = matmul_s(s, s, d, device, dtype=dtype, batch=batch)
    forward_bytes, backward_bytes = _SCORE_BYTES[kernel]
    if dropout:
        forward_bytes += _DROPOUT_BYTES
        backward_bytes += _DROPOUT_BYTES
    num_scores = float(batch) * s * s
    forward = (scores + values) / efficiency.matmul
    backward = 2 * (scores + values) / efficiency.matmul
    return (
        forward + stream_s(forward_bytes * num_scores, device, efficiency),
        backward + stream_s(backward_bytes * num_scores, device, efficiency),
    )
