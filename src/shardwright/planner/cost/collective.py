"""Time of collectives, by algorithm, message size and the links a group spans.

A ring moves (n-1)/n of the data over every link (Thakur et al., 2005; NCCL's rings); groups that
span nodes send it through the nodes' cards, which all groups of a node share. Small messages pay
latency per hop; all-reduces may take a tree instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from shardwright.planner.cluster import ClusterSpec, LinkSpec
from shardwright.planner.device import DeviceSpec

__all__ = [
    "Group",
    "all_gather_s",
    "all_reduce_s",
    "make_group",
    "point_to_point_s",
    "taken_s",
]

_LAUNCH_S = 12e-6
"""Time to start a collective's kernel on all ranks, s."""

_RAMP_BYTES = 2**20
"""Bytes per rank and hop at which half of a link's bandwidth is reached inside a node."""


_ACCESSES = 3.0
"""Passes through device memory per byte of a ring: it arrives in a buffer, is read from there, and
is written as a result or added to what is there."""

_CHANNELS = 8
"""Multiprocessors that a collective's kernel holds; NCCL takes 1 to 32, by what the links need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks of one collective.

    Attributes:
        size: Ranks.
        num_nodes: Nodes they lie in.
        gbps: Bandwidth of the ring's slowest part, GB/s per direction, shared cards considered.
        hop_s: Average latency of one hop of the ring.
        node_hop_s: Latency between nodes.
    """

    size: int
    num_nodes: int
    gbps: float
    hop_s: float
    node_hop_s: float

    @property
    def spans_nodes(self) -> bool:
        """Whether it leaves a node."""
        return self.num_nodes > 1


def _gbps(link: LinkSpec) -> float:
    return link.bandwidth_gbps * link.efficiency


@lru_cache(maxsize=4096)
def make_group(cluster: ClusterSpec, *, size: int, stride: int) -> Group:
    """Describe a group of ranks `stride` apart.

    Args:
        cluster: Where.
        size: Ranks.
        stride: Distance of neighbours in rank order: the sizes of the axes inside this one.

    Returns:
        The group. Ranks of one node that belong to other groups of the same kind share its cards.
    """
    per_node = max(1, min(size, cluster.devices_per_node // stride))
    num_nodes = -(-size // per_node)
    inner, outer = cluster.inner, cluster.outer
    if num_nodes == 1:
        return Group(
            size=size,
            num_nodes=1,
            gbps=_gbps(inner),
            hop_s=inner.latency_us * 1e-6,
            node_hop_s=inner.latency_us * 1e-6,
        )
    sharing = max(1, cluster.devices_per_node // per_node)
    node_share = cluster.node_gbps * outer.efficiency / sharing
    crossing = num_nodes / size
    hop_us = (1 - crossing) * inner.latency_us + crossing * outer.latency_us
    return Group(
        size=size,
        num_nodes=num_nodes,
        gbps=min(_gbps(inner), node_share) if per_node > 1 else node_share,
        hop_s=hop_us * 1e-6,
        node_hop_s=outer.latency_us * 1e-6,
    )


def all_gather_s(num_bytes: float, group: Group) -> float:
    """Seconds to gather `num_bytes` (the whole) on every rank; a reduce-scatter takes the same."""
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    moved = num_bytes * (group.size - 1) / group.size
    ramp = 1 + _RAMP_BYTES / (num_bytes / group.size + _RAMP_BYTES / 8)
    ring = min(ramp, 1.6) * moved / (group.gbps * 1e9)
    return _LAUNCH_S + ring + (group.size - 1) * group.hop_s


def all_reduce_s(num_bytes: float, group: Group) -> float:
    """Seconds to sum `num_bytes` over all ranks, by ring or tree, whichever is faster."""
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    moved = 2 * num_bytes * (group.size - 1) / group.size
    ring = moved / (group.gbps * 1e9) + 2 * (group.size - 1) * group.hop_s
    depth = math.ceil(math.log2(group.size))
    tree = 2 * num_bytes / (0.85 * group.gbps * 1e9) + 2 * depth * group.node_hop_s
    return _LAUNCH_S + min(ring, tree)


def point_to_point_s(num_bytes: float, group: Group) -> float:
    """Seconds to send `num_bytes` to a neighbour in a group."""
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    return _LAUNCH_S + num_bytes / (group.gbps * 1e9) + group.node_hop_s


def taken_s(hidden_s: float, moved_bytes: float, device: DeviceSpec) -> float:
    """Seconds that collectives take from the computation they are hidden behind.

    What they move passes through device memory, and their kernels hold multiprocessors as long as
    they run. The first depends on bytes alone and the second grows with time: a slower link takes
    more, never less. Ignores that products leave memory bandwidth unused.

    Args:
        hidden_s: Time they run beside computation.
        moved_bytes: Bytes a rank sends in that time.
        device: Whose memory and multiprocessors.
    """
    through_memory_s = _ACCESSES * moved_bytes / (device.memory_gbps * 1e9)
    return min(hidden_s, through_memory_s + hidden_s * _CHANNELS / device.num_sms)
