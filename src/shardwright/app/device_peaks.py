"""Peak matrix throughput of devices whose vendor states it, for MFU: the planner's figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.planner.device import DEVICES

if TYPE_CHECKING:
    import torch

__all__ = ["peak_flops"]

_NAMES = (
    # What a device's own name contains, and the planner's name for it; the first match counts.
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("H200", "h200"),
    ("H100 PCIe", "h100-pcie"),
    ("H100", "h100-80"),
    ("H800", "h800"),
    ("A100", "a100-80"),
    ("A800", "a800-80"),
    ("L40S", "l40s"),
    ("RTX 4090", "rtx-4090"),
    ("A10G", "a10g"),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Look up a device's peak.

    Args:
        device_name: As `torch.cuda.get_device_name` gives it.
        dtype: Of the matrix products.

    Returns:
        Operations per second, or None where it isn't known (all CPUs; all of fp32, whose
        speed depends on whether TF32 is on).
    """
    if not str(dtype).endswith("bfloat16"):
        return None
    key = next((key for name, key in _NAMES if name in device_name), None)
    return None if key is None else DEVICES[key].peak_flops("bf16")
