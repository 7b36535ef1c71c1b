"""Time of narrowing what collectives over shards send, and of widening what arrives.

Block-wise quantisation as in ZeRO++ (Wang et al., arXiv 2306.10209): weights are gathered in 8
bits, gradients exchanged in 4 and summed at full width. Bound by memory bandwidth; what it costs in
accuracy is not modelled.
"""

from __future__ import annotations

from shardwright.planner.cost.efficiency import Efficiency
from shardwright.planner.cost.elementwise import stream_s
from shardwright.planner.device import DeviceSpec
from shardwright.planner.workload import CompressionSpec

__all__ = ["narrow_gather_s", "narrow_reduce_s"]


def narrow_gather_s(
    numel: float,
    item_bytes: float,
    ranks: int,
    compression: CompressionSpec,
    device: DeviceSpec,
    efficiency: Efficiency,
) -> float:
    """Seconds beside a gather: a rank narrows its shard, and widens the whole.

    Args:
        numel: Elements of the whole.
        item_bytes: Of an element as it is used.
        ranks: Ranks that share it.
        compression: What is sent.
        device: Where.
        efficiency: Fitted factors.
    """
    if not compression.gather or ranks == 1:
        return 0.0
    both = item_bytes + compression.wire_bytes("gather", item_bytes)
    return stream_s(both * numel * (1 + 1 / ranks), device, efficiency)


def narrow_reduce_s(
    numel: float,
    item_bytes: float,
    ranks: int,
    compression: CompressionSpec,
    device: DeviceSpec,
    efficiency: Efficiency,
) -> float:
    """Seconds beside a reduction: a rank narrows the whole, and adds up all parts of its shard.

    Args: as of `narrow_gather_s`.
    """
    if not compression.reduce or ranks == 1:
        return 0.0
    wire = compression.wire_bytes("reduce", item_bytes)
    moved = (item_bytes + wire) * numel + wire * numel + item_bytes * numel / ranks
    return stream_s(moved, device, efficiency)
