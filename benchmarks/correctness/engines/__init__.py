"""The engines compared, each used as its documentation advises."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.correctness.engines.base import Engine
from benchmarks.correctness.engines.ddp import Ddp
from benchmarks.correctness.engines.deepspeed import DeepSpeed
from benchmarks.correctness.engines.fsdp1 import Fsdp1
from benchmarks.correctness.engines.fsdp2 import Fsdp2
from benchmarks.correctness.engines.planted import PLANTED
from benchmarks.correctness.engines.shardwright import Shardwright

__all__ = ["ENGINES", "TABLE"]

ENGINES: dict[str, Callable[[], Engine]] = {
    "shardwright": lambda: Shardwright("zero3"),
    "shardwright-zero2": lambda: Shardwright("zero2"),
    "shardwright-zero1": lambda: Shardwright("zero1"),
    "shardwright-ddp": lambda: Shardwright("ddp"),
    "fsdp2": Fsdp2,
    "fsdp1": Fsdp1,
    "ddp": Ddp,
    "deepspeed3": lambda: DeepSpeed(3),
    "deepspeed2": lambda: DeepSpeed(2),
    "deepspeed1": lambda: DeepSpeed(1),
    **PLANTED,
}

TABLE = ("shardwright", "fsdp2", "fsdp1", "ddp", "deepspeed3", "deepspeed2")
"""The columns by default."""
