"""Time of a matrix product: a roofline with the shapes' own losses.

A product of (m, k) by (k, n) is cut into output tiles, dealt out to the multiprocessors in waves;
a last wave that is not full wastes what it doesn't use, and each tile pays a prologue (NVIDIA,
"Matrix multiplication background", section on wave and tile quantisation). Where few tiles meet a
long k the product is split along k. The library is assumed to pick the fastest tile.
"""

from __future__ import annotations

from functools import lru_cache

from shardwright.planner.device import DeviceSpec

__all__ = ["KERNEL_S", "matmul_s"]

KERNEL_S = 4e-6
"""Time between the starts of two dependent kernels on a busy stream, s."""

_TILES = ((128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.75), (64, 64, 0.55))
"""Output tiles (rows, columns) and their share of a multiprocessor's sustained speed."""

_SPLITS = (1, 2, 4, 8)
_PROLOGUE_K = 96
"""Steps along k that filling and draining a tile's pipeline costs."""

_ALIGNMENT = 8
"""Elements (16 bytes) that rows should be a multiple of."""

_MISALIGNED = 4.0
"""How much slower products with misaligned rows are (kernels for narrow loads)."""

_STREAM_SHARE = 0.8
"""Share of memory bandwidth that loading operands reaches."""


def matmul_s(
    m: int, k: int, n: int, device: DeviceSpec, *, dtype: str = "bf16", batch: int = 1
) -> float:
    """Seconds of a product (m, k) x (k, n), repeated `batch` times in one kernel.

    Args:
        m: Rows of the result.
        k: Inner dimension.
        n: Columns of the result.
        device: Where it runs.
        dtype: Of the operands.
        batch: Independent products of one kernel.

    Ignores clock changes over time and what other kernels do at the same time.
    """
    return _matmul_s(
        m,
        k,
        n,
        batch,
        device.peak_flops(dtype) * device.sustained_share * _dtype_share(dtype),
        device.num_sms,
        device.memory_gbps * 1e9 * _STREAM_SHARE,
    )


def _dtype_share(dtype: str) -> float:
    """Narrow products lose more of their peak: scales, casts and operands' bandwidth."""
    return {"fp8": 0.80, "fp4": 0.55}.get(dtype, 1.0)


@lru_cache(maxsize=65_536)
def _matmul_s(
    m: int, k: int, n: int, batch: int, flops_per_s: float, num_sms: int, bytes_per_s: float
) -> float:
    per_sm = flops_per_s / num_sms
    best = float("inf")
    for rows, columns, share in _TILES:
        tiles = -(-m // rows) * -(-n // columns) * batch
        for split in _SPLITS:
            if split > 1 and (k // split < 512 or tiles * (split - 1) > num_sms * 4):
                continue
            waves = -(-tiles * split // num_sms)
            steps = k / split + _PROLOGUE_K
            seconds = waves * 2.0 * rows * columns * steps / (per_sm * share)
            if split > 1:
                seconds += 8.0 * split * m * n * batch / bytes_per_s
            best = min(best, seconds)
    if k % _ALIGNMENT or n % _ALIGNMENT:
        best *= _MISALIGNED
    traffic = 2.0 * batch * (m * k + k * n + m * n) / bytes_per_s
    return max(best, traffic) + KERNEL_S
