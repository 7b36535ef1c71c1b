"""Accelerators as their vendors describe them, with the source of each figure.

Peaks are dense (without structured sparsity), in operations per second with fp32 accumulation.
`memory_gib` is what a program sees as the device's total memory, a little below the marketed size.
`sustained_share` is not the vendor's: it is the generic share of the peak that large matrix
products keep up within the board's power, from public measurements of large bf16 products; the
efficiencies fitted per device family and software class multiply it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwright.core.errors import SpecError, nearest
from shardwright.planner.checks import require_non_negative, require_positive, require_types

__all__ = ["DEVICES", "DeviceSpec", "find_device"]


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One accelerator.

    Attributes:
        name: Key in `DEVICES`.
        family: Devices of one chip, which share fitted efficiencies.
        memory_gib: Total memory a program sees, GiB.
        memory_gbps: Peak memory bandwidth, GB/s.
        bf16_tflops: Dense bf16 peak (fp16 where the device has no bf16), TFLOP/s.
        fp32_tflops: fp32 peak outside tensor cores, TFLOP/s.
        fp8_tflops: Dense fp8 peak; 0 where there is none.
        fp4_tflops: Dense 4-bit peak; 0 where there is none.
        num_sms: Streaming multiprocessors: what tiles are dealt out to.
        sustained_share: See the module.
        link_gbps: Device-to-device bandwidth inside a node, GB/s per direction; PCIe where the
            device has no NVLink.
        pcie_gbps: Bandwidth to the host, GB/s per direction.
        power_w: Board power, W.
        source: Where the figures are from.
    """

    name: str
    family: str
    memory_gib: float
    memory_gbps: float
    bf16_tflops: float
    fp32_tflops: float
    fp8_tflops: float = 0.0
    fp4_tflops: float = 0.0
    num_sms: int
    sustained_share: float
    link_gbps: float
    pcie_gbps: float
    power_w: float
    source: str

    def __post_init__(self) -> None:
        owner = f"device {self.name!r}"
        require_types(owner, self)
        require_non_negative(owner, fp8_tflops=self.fp8_tflops, fp4_tflops=self.fp4_tflops)
        require_positive(
            owner,
            memory_gib=self.memory_gib,
            memory_gbps=self.memory_gbps,
            bf16_tflops=self.bf16_tflops,
            fp32_tflops=self.fp32_tflops,
            num_sms=self.num_sms,
            sustained_share=self.sustained_share,
            link_gbps=self.link_gbps,
            pcie_gbps=self.pcie_gbps,
            power_w=self.power_w,
        )

    @property
    def best_dtype(self) -> str:
        """Dtype to compute in, where nobody states one: bf16 from Ampere on, fp16 before."""
        return "fp16" if self.family in _BEFORE_AMPERE else "bf16"

    def best_attention(self, dtype: str) -> str:
        """Attention kernel that torch takes by itself: FlashAttention 2 from Ampere on, in 16 bits.

        Elsewhere it is the memory-efficient one, which doesn't write scores either: as `flash1`.
        """
        is_old = self.family in _BEFORE_AMPERE
        return "flash1" if is_old or dtype == "fp32" else "flash2"

    def check_dtype(self, dtype: str) -> None:
        """Raise where products can't be computed in a dtype.

        Raises:
            SpecError: It is bf16, and the device is older.
        """
        if dtype == "bf16" and self.family in _BEFORE_AMPERE:
            raise SpecError(
                f"{self.name} has no bf16 units, which came with Ampere; compute in fp16 or fp32 "
                "(--param)"
            )

    def check_attention(self, kernel: str, dtype: str) -> None:
        """Raise where an attention kernel doesn't run.

        Raises:
            SpecError: It was written for later devices, for Hopper alone, or for 16 bits.
        """
        needs = {
            "flash2": ("Ampere or later", self.family not in _BEFORE_AMPERE),
            "flash3": ("Hopper, no other", self.family == _HOPPER),
        }
        wanted, runs = needs.get(kernel, ("", True))
        if not runs or (kernel in needs and dtype == "fp32"):
            raise SpecError(
                f"{kernel} needs {wanted if not runs else '16 bits'}, found {self.name} computing "
                f"in {dtype}; use {self.best_attention(dtype)}"
            )

    def peak_flops(self, dtype: str) -> float:
        """Dense peak for matrix products in a dtype, operations per second.

        Raises:
            SpecError: The device has no units for this dtype.
        """
        peaks = {
            "bf16": self.bf16_tflops,
            "fp16": self.bf16_tflops,
            "fp32": self.fp32_tflops,
            "fp8": self.fp8_tflops,
            "fp4": self.fp4_tflops,
        }
        peak = peaks.get(dtype, 0.0)
        if not peak:
            raise SpecError(f"device {self.name!r} has no {dtype} matrix units; choose bf16")
        return peak * 1e12


_BEFORE_AMPERE = ("v100", "titan-rtx")
_HOPPER = "h100"
"""Families by what runs on them: FlashAttention 2 needs Ampere and 3 needs Hopper, as their READMEs
say; bf16 came with Ampere (NVIDIA A100 white paper)."""

_A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet, 2021"
_H100_SHEET = "NVIDIA H100 Tensor Core GPU data sheet, 2023 (half of the figures with sparsity)"

_ALL = (
    DeviceSpec(
        name="v100-16",
        family="v100",
        memory_gib=15.78,
        memory_gbps=900,
        bf16_tflops=125,
        fp32_tflops=15.7,
        num_sms=80,
        sustained_share=0.74,
        link_gbps=150,
        pcie_gbps=16,
        power_w=300,
        source="NVIDIA V100 data sheet, 2020 (SXM2)",
    ),
    DeviceSpec(
        name="v100-32",
        family="v100",
        memory_gib=31.75,
        memory_gbps=900,
        bf16_tflops=125,
        fp32_tflops=15.7,
        num_sms=80,
        sustained_share=0.74,
        link_gbps=150,
        pcie_gbps=16,
        power_w=300,
        source="NVIDIA V100 data sheet, 2020 (SXM2)",
    ),
    DeviceSpec(
        name="a100-40",
        family="a100",
        memory_gib=39.4,
        memory_gbps=1555,
        bf16_tflops=312,
        fp32_tflops=19.5,
        num_sms=108,
        sustained_share=0.85,
        link_gbps=300,
        pcie_gbps=32,
        power_w=400,
        source=_A100_SHEET,
    ),
    DeviceSpec(
        name="a100-80",
        family="a100",
        memory_gib=79.25,
        memory_gbps=2039,
        bf16_tflops=312,
        fp32_tflops=19.5,
        num_sms=108,
        sustained_share=0.85,
        link_gbps=300,
        pcie_gbps=32,
        power_w=400,
        source=_A100_SHEET,
    ),
    DeviceSpec(
        name="a800-80",
        family="a100",
        memory_gib=79.25,
        memory_gbps=2039,
        bf16_tflops=312,
        fp32_tflops=19.5,
        num_sms=108,
        sustained_share=0.85,
        link_gbps=200,
        pcie_gbps=32,
        power_w=400,
        source="NVIDIA A800 data sheet, 2022: an A100 with NVLink at 400 GB/s both ways",
    ),
    DeviceSpec(
        name="h100-80",
        family="h100",
        memory_gib=79.1,
        memory_gbps=3350,
        bf16_tflops=989.4,
        fp32_tflops=67,
        fp8_tflops=1978.9,
        num_sms=132,
        sustained_share=0.68,
        link_gbps=450,
        pcie_gbps=64,
        power_w=700,
        source=_H100_SHEET,
    ),
    DeviceSpec(
        name="h100-96-500w",
        family="h100",
        memory_gib=95.0,
        memory_gbps=2400,
        bf16_tflops=989.4,
        fp32_tflops=67,
        fp8_tflops=1978.9,
        num_sms=132,
        # Within 500 W instead of 700, of which about 100 W are not the tensor cores'. Power grows
        # with the clock and the square of a voltage that follows it in part.
        sustained_share=0.68 * ((500 - 100) / (700 - 100)) ** 0.4,
        link_gbps=450,
        pcie_gbps=64,
        power_w=500,
        source="torchtitan benchmarks/llama3_h100_202412: 96 GB HBM2e, 2.4 TB/s, 500 W",
    ),
    DeviceSpec(
        name="h100-pcie",
        family="h100",
        memory_gib=79.1,
        memory_gbps=2000,
        bf16_tflops=756,
        fp32_tflops=51,
        fp8_tflops=1513,
        num_sms=114,
        sustained_share=0.60,
        link_gbps=64,
        pcie_gbps=64,
        power_w=350,
        source=_H100_SHEET + ", PCIe column",
    ),
    DeviceSpec(
        name="h800",
        family="h100",
        memory_gib=79.1,
        memory_gbps=3350,
        bf16_tflops=989.4,
        fp32_tflops=67,
        fp8_tflops=1978.9,
        num_sms=132,
        sustained_share=0.68,
        link_gbps=200,
        pcie_gbps=64,
        power_w=700,
        source=_H100_SHEET + "; NVLink at 400 GB/s both ways",
    ),
    DeviceSpec(
        name="h200",
        family="h100",
        memory_gib=139.8,
        memory_gbps=4800,
        bf16_tflops=989.4,
        fp32_tflops=67,
        fp8_tflops=1978.9,
        num_sms=132,
        sustained_share=0.68,
        link_gbps=450,
        pcie_gbps=64,
        power_w=700,
        source="NVIDIA H200 data sheet, 2024",
    ),
    DeviceSpec(
        name="b200",
        family="b200",
        memory_gib=178.4,
        memory_gbps=8000,
        bf16_tflops=2250,
        fp32_tflops=75,
        fp8_tflops=4500,
        fp4_tflops=9000,
        num_sms=148,
        sustained_share=0.72,
        link_gbps=900,
        pcie_gbps=64,
        power_w=1000,
        source="NVIDIA DGX B200 data sheet, 2024, per GPU",
    ),
    DeviceSpec(
        name="gb200",
        family="b200",
        memory_gib=184.0,
        memory_gbps=8000,
        bf16_tflops=2500,
        fp32_tflops=80,
        fp8_tflops=5000,
        fp4_tflops=10000,
        num_sms=148,
        sustained_share=0.72,
        link_gbps=900,
        pcie_gbps=225,
        power_w=1200,
        source="NVIDIA GB200 NVL72 data sheet, 2024, per GPU; NVLink-C2C to the host",
    ),
    DeviceSpec(
        name="gb300",
        family="b200",
        memory_gib=276.0,
        memory_gbps=8000,
        bf16_tflops=2500,
        fp32_tflops=80,
        fp8_tflops=5000,
        fp4_tflops=15000,
        num_sms=148,
        sustained_share=0.72,
        link_gbps=900,
        pcie_gbps=225,
        power_w=1400,
        source="NVIDIA GB300 NVL72 data sheet, 2025, per GPU; NVLink-C2C to the host",
    ),
    DeviceSpec(
        name="l40s",
        family="l40s",
        memory_gib=44.4,
        memory_gbps=864,
        bf16_tflops=362,
        fp32_tflops=91.6,
        fp8_tflops=733,
        num_sms=142,
        sustained_share=0.60,
        link_gbps=32,
        pcie_gbps=32,
        power_w=350,
        source="NVIDIA L40S data sheet, 2023; PCIe 4.0 x16 only",
    ),
    DeviceSpec(
        name="rtx-4090",
        family="rtx-4090",
        memory_gib=23.6,
        memory_gbps=1008,
        bf16_tflops=165.2,
        fp32_tflops=82.6,
        fp8_tflops=330.3,
        num_sms=128,
        sustained_share=0.90,
        link_gbps=32,
        pcie_gbps=32,
        power_w=450,
        source="NVIDIA Ada GPU architecture white paper, 2022; PCIe 4.0 x16 only",
    ),
    DeviceSpec(
        name="rtx-3090",
        family="rtx-3090",
        memory_gib=23.6,
        memory_gbps=936,
        bf16_tflops=71,
        fp32_tflops=35.6,
        num_sms=82,
        sustained_share=0.90,
        link_gbps=32,
        pcie_gbps=32,
        power_w=350,
        source="NVIDIA GA102 white paper, 2021",
    ),
    DeviceSpec(
        name="titan-rtx",
        family="titan-rtx",
        memory_gib=23.6,
        memory_gbps=672,
        bf16_tflops=65,
        fp32_tflops=16.3,
        num_sms=72,
        sustained_share=0.80,
        link_gbps=16,
        pcie_gbps=16,
        power_w=280,
        source="NVIDIA TU102 white paper, 2018 (fp16 with fp32 accumulation)",
    ),
    DeviceSpec(
        name="a10",
        family="a10",
        memory_gib=22.2,
        memory_gbps=600,
        bf16_tflops=125,
        fp32_tflops=31.2,
        num_sms=72,
        sustained_share=0.60,
        link_gbps=32,
        pcie_gbps=32,
        power_w=150,
        source="NVIDIA A10 data sheet, 2021",
    ),
    DeviceSpec(
        name="a10g",
        family="a10",
        memory_gib=22.2,
        memory_gbps=600,
        bf16_tflops=70,
        fp32_tflops=35,
        num_sms=80,
        sustained_share=0.80,
        link_gbps=32,
        pcie_gbps=32,
        power_w=300,
        source="AWS G5 instance description, 2021: the A10 of the g5 machines",
    ),
)

DEVICES: Mapping[str, DeviceSpec] = MappingProxyType({device.name: device for device in _ALL})
"""Known devices."""

_ALIASES: Mapping[str, str] = MappingProxyType(
    {"v100": "v100-32", "a100": "a100-80", "a800": "a800-80", "h100": "h100-80", "4090": "rtx-4090"}
)


def find_device(name: str) -> DeviceSpec:
    """Look a device up by name or a common short form.

    Raises:
        SpecError: The name is unknown; the message gives the nearest known one.
    """
    key = name.lower()
    found = DEVICES.get(_ALIASES.get(key, key))
    if found is None:
        raise SpecError(f"unknown device {name!r}; {nearest(key, DEVICES)}")
    return found
