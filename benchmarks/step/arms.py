"""The ways to train that a step is measured with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import shardwright as sw
from benchmarks.baselines import ddp, fsdp2, single
from shardwright.app.models import Decoder

__all__ = ["ARMS", "Arm"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    Attributes:
        prepare: Takes the model and the number of ranks; returns what is called and trained.
        sent_bytes: What this rank has sent in the last step, where the arm knows.
        is_alone: It runs on one rank, whatever the others do.
    """

    prepare: Callable[[Decoder, int], nn.Module]
    sent_bytes: Callable[[nn.Module], int] | None = None
    is_alone: bool = False


def _shardwright(strategy: str, **settings: Any) -> Arm:
    return Arm(
        prepare=functools.partial(_shard, strategy=strategy, settings=settings),
        sent_bytes=_sent_in_last_step,
    )


def _shard(model: Decoder, ranks: int, *, strategy: str, settings: dict[str, Any]) -> Decoder:
    return sw.shard(model, strategy, mesh=sw.init_mesh(shard=ranks), **settings)


def _sent_in_last_step(model: nn.Module) -> int:
    return sw.ledger(model).steps[-1].sent_bytes


ARMS = {
    "shardwright zero3": _shardwright("zero3"),
    "FSDP2 zero3": Arm(prepare=fsdp2.shard_zero3),
    "FSDP2 zero3 tuned": Arm(prepare=fsdp2.shard_zero3_tuned),
    "shardwright zero2": _shardwright("zero2"),
    "FSDP2 zero2": Arm(prepare=fsdp2.shard_zero2),
    "shardwright zero1": _shardwright("zero1"),
    "shardwright ddp": _shardwright("ddp"),
    "torch DDP": Arm(prepare=ddp.replicate),
    "one process": Arm(prepare=single.leave_whole, is_alone=True),
}
