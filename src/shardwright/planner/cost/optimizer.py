"""Time of the optimizer step, which is bound by memory bandwidth."""

from __future__ import annotations

from shardwright.planner.cost.efficiency import Efficiency
from shardwright.planner.cost.elementwise import stream_s
from shardwright.planner.device import DeviceSpec
from shardwright.planner.workload import WorkloadSpec

__all__ = ["optimizer_s", "step_overhead_s"]

_CHAIN_BYTES = 80.0
"""Bytes per fp32 element that Adam's chain of nine list operations reads and writes."""

_STEP_OVERHEAD_S = {"eager": 0.012, "compiled": 0.008, "fused": 0.006}
"""Host work per step outside the model: loop, batch to device, logging, optimizer's Python."""

_HOST_ADAM_GBPS = 60.0
"""Memory bandwidth that Adam on one host's share of a node reaches per device, GB/s."""


def optimizer_s(
    owned_numel: float, workload: WorkloadSpec, device: DeviceSpec, efficiency: Efficiency
) -> float:
    """Seconds to update the parameters a rank owns.

    Args:
        owned_numel: Elements.
        workload: Dtypes and implementation.
        device: Where; host memory where the optimizer is offloaded.
        efficiency: Fitted factors.
    """
    precision = workload.precision
    moments = workload.optimizer.num_moments
    master, grad = precision.item_bytes("master"), precision.item_bytes("grad")
    state = precision.item_bytes("state")
    touched = 2 * master + grad + 2 * moments * state
    if precision.param != precision.master:
        touched += precision.item_bytes("param")
    if workload.optimizer.implementation != "fused" and moments == 2:
        touched = max(touched, _CHAIN_BYTES * (master + state) / 8)
    if workload.optimizer.clips:
        touched += 3 * grad
    if workload.optimizer.is_offloaded:
        over_bus = owned_numel * (grad + precision.item_bytes("param"))
        return owned_numel * touched / (_HOST_ADAM_GBPS * 1e9) + over_bus / (
            0.6 * device.pcie_gbps * 1e9
        )
    return stream_s(owned_numel * touched, device, efficiency)


def step_overhead_s(workload: WorkloadSpec) -> float:
    """Seconds of host work per step that nothing overlaps."""
    return _STEP_OVERHEAD_S[workload.software.class_name]
