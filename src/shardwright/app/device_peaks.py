"""Peak matrix throughput of devices whose vendor states it, for MFU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["peak_flops"]

BF16_PEAK_FLOPS = (
    # Dense bf16 with fp32 accumulation, from the vendor's data sheets (without sparsity). The
    # first name contained in the device's name counts.
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
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
    return next((peak for name, peak in BF16_PEAK_FLOPS if name in device_name), None)
