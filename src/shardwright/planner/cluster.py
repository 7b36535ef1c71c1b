"""A cluster: devices in nodes, a link inside a node and network cards between nodes.

Bandwidths are GB/s (1e9 bytes per second) per direction. The card's marketing figure is in Gb/s;
a bandwidth above the line rate of its kind is refused, since bits were most likely taken for bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardwright.core.errors import SpecError, nearest
from shardwright.planner.checks import (
    require_non_negative,
    require_positive,
    require_type,
    require_types,
)
from shardwright.planner.device import DeviceSpec, find_device

__all__ = ["NETWORKS", "ClusterSpec", "LinkSpec", "make_cluster"]

LINE_RATE_GBPS: Mapping[str, float] = MappingProxyType(
    {
        "nvlink2": 150.0,
        "nvlink3": 300.0,
        "nvlink4": 450.0,
        "nvlink5": 900.0,
        "pcie3": 16.0,
        "pcie4": 32.0,
        "pcie5": 64.0,
        "100g": 12.5,
        "200g": 25.0,
        "400g": 50.0,
        "800g": 100.0,
        "other": float("inf"),
    }
)
"""What one link of a kind can carry, per direction."""


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """One kind of link.

    Attributes:
        kind: Key of `LINE_RATE_GBPS`.
        bandwidth_gbps: Per direction, GB/s: of one device inside a node, of one card between nodes.
        latency_us: Of one hop of a collective, software included, µs.
        efficiency: Share of the bandwidth that large collectives reach.
    """

    kind: str
    bandwidth_gbps: float
    latency_us: float
    efficiency: float = 0.8

    def __post_init__(self) -> None:
        owner = f"link {self.kind!r}"
        require_types(owner, self)
        if self.kind not in LINE_RATE_GBPS:
            raise SpecError(
                f"unknown link kind {self.kind!r}; {nearest(self.kind, LINE_RATE_GBPS)}"
            )
        require_positive(owner, bandwidth_gbps=self.bandwidth_gbps, efficiency=self.efficiency)
        require_non_negative(owner, latency_us=self.latency_us)
        limit = LINE_RATE_GBPS[self.kind]
        if self.bandwidth_gbps > limit:
            raise SpecError(
                f"{owner}: bandwidth_gbps={self.bandwidth_gbps:g} is above the line rate of "
                f"{limit:g} GB/s per direction. Bandwidths are in GB/s: divide Gb/s by 8."
            )
        if self.efficiency > 1:
            raise SpecError(f"{owner}: efficiency must be at most 1, found {self.efficiency:g}")


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes of equal devices.

    Attributes:
        name: For people.
        device: Accelerator.
        num_nodes: Nodes.
        devices_per_node: Devices that share the inner link and the cards.
        inner: Between the devices of a node, per device.
        outer: Between nodes, per network card.
        num_nics: Network cards of a node; all its devices share them.
        is_network_assumed: Nobody stated the network; predictions say so.
    """

    name: str = ""
    device: DeviceSpec
    num_nodes: int
    devices_per_node: int
    inner: LinkSpec
    outer: LinkSpec
    num_nics: int
    is_network_assumed: bool = False

    def __post_init__(self) -> None:
        owner = f"cluster {self.name!r}"
        require_types(owner, self)
        require_positive(
            owner,
            num_nodes=self.num_nodes,
            devices_per_node=self.devices_per_node,
            num_nics=self.num_nics,
        )

    @property
    def num_devices(self) -> int:
        """Devices of the whole cluster."""
        return self.num_nodes * self.devices_per_node

    @property
    def node_gbps(self) -> float:
        """Bandwidth out of a node, all its cards together, GB/s per direction."""
        return self.num_nics * self.outer.bandwidth_gbps

    def with_network(self, *, factor: float) -> ClusterSpec:
        """The same cluster with a network `factor` times as fast."""
        outer = replace(self.outer, kind="other", bandwidth_gbps=self.outer.bandwidth_gbps * factor)
        return replace(self, outer=outer)


NETWORKS: Mapping[str, tuple[int, LinkSpec]] = MappingProxyType(
    {
        "100g-roce": (1, LinkSpec(kind="100g", bandwidth_gbps=12.5, latency_us=12.0)),
        "2x100g-roce": (2, LinkSpec(kind="100g", bandwidth_gbps=12.5, latency_us=12.0)),
        "4x100g-efa": (4, LinkSpec(kind="100g", bandwidth_gbps=12.5, latency_us=20.0)),
        "4x100g-opa": (4, LinkSpec(kind="100g", bandwidth_gbps=12.5, latency_us=8.0)),
        "8x100g-ib": (8, LinkSpec(kind="100g", bandwidth_gbps=12.5, latency_us=8.0)),
        "8x200g-ib": (8, LinkSpec(kind="200g", bandwidth_gbps=25.0, latency_us=7.0)),
        "8x200g-roce": (8, LinkSpec(kind="200g", bandwidth_gbps=25.0, latency_us=9.0)),
        "2x200g-ib": (2, LinkSpec(kind="200g", bandwidth_gbps=25.0, latency_us=7.0)),
        "4x200g-tcpx": (4, LinkSpec(kind="200g", bandwidth_gbps=25.0, latency_us=25.0)),
        "4x400g-ib": (4, LinkSpec(kind="400g", bandwidth_gbps=50.0, latency_us=6.0)),
        "8x400g-ib": (8, LinkSpec(kind="400g", bandwidth_gbps=50.0, latency_us=6.0)),
    }
)
"""Network cards of a node by name: how many, and each card's link."""

_USUAL_NETWORK: Mapping[str, str] = MappingProxyType(
    {"v100": "8x100g-ib", "a100": "8x200g-ib", "h100": "8x400g-ib", "b200": "8x400g-ib"}
)
"""What machines of a family usually have, where nobody states it."""

_INNER_LATENCY_US = 2.5
_PCIE_EFFICIENCY = 0.65


def inner_link(device: DeviceSpec, *, uses_pcie: bool = False) -> LinkSpec:
    """The link between devices of a node: NVLink where the device has it, else PCIe."""
    has_nvlink = device.link_gbps > device.pcie_gbps or device.family == "b200"
    if uses_pcie or not has_nvlink:
        return LinkSpec(
            kind="other",
            bandwidth_gbps=min(device.pcie_gbps, 64.0),
            latency_us=6.0,
            efficiency=_PCIE_EFFICIENCY,
        )
    return LinkSpec(kind="other", bandwidth_gbps=device.link_gbps, latency_us=_INNER_LATENCY_US)


def make_cluster(
    device: str | DeviceSpec,
    num_devices: int,
    *,
    devices_per_node: int = 8,
    network: str | None = None,
    uses_pcie: bool = False,
    name: str = "",
) -> ClusterSpec:
    """Build a cluster from names.

    Args:
        device: A key of `DEVICES`, or a description.
        num_devices: Devices; a multiple of `devices_per_node`, or fewer than that.
        devices_per_node: Devices of a node.
        network: A key of `NETWORKS`; None takes what such machines usually have, and notes it.
        uses_pcie: The devices of a node talk over PCIe though they could over NVLink.
        name: For people.

    Raises:
        SpecError: A name is unknown, or the devices don't fill nodes.
    """
    found = find_device(device) if isinstance(device, str) else device
    counts = {"num_devices": num_devices, "devices_per_node": devices_per_node}
    for count, value in counts.items():
        require_type("cluster", count, value, "int")
    require_positive("cluster", **counts)
    per_node = min(devices_per_node, num_devices)
    if num_devices % per_node:
        raise SpecError(
            f"cluster: devices must fill nodes, found {num_devices} devices and "
            f"{per_node} per node; use a multiple of {per_node}"
        )
    usual = _USUAL_NETWORK.get(found.family, "100g-roce")
    chosen = usual if network is None else network
    if chosen not in NETWORKS:
        raise SpecError(f"unknown network {chosen!r}; {nearest(chosen, NETWORKS)}")
    num_nics, outer = NETWORKS[chosen]
    return ClusterSpec(
        name=name or f"{num_devices} x {found.name}",
        device=found,
        num_nodes=num_devices // per_node,
        devices_per_node=per_node,
        inner=inner_link(found, uses_pcie=uses_pcie),
        outer=outer,
        num_nics=num_nics,
        is_network_assumed=network is None and num_devices > per_node,
    )
