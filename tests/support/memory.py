"""Count what a process holds during many steps. Runs on ranks."""

from __future__ import annotations

import gc
import types
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

import shardwright as sw
from tests.support.accounting import live_storages, train_steps
from tests.support.models import TiedDecoder
from tests.support.parity import make_optimizer, mesh_of

MIB = 2**20
PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What a process holds after a step.

    Attributes:
        step: Steps done.
        storages: How many CPU storages live tensors hold.
        storage_bytes: Their bytes.
        num_tensors: Tensors alive.
        objects: Python objects that the collector knows, by type.
        resident_bytes: Of the process.
    """

    step: int
    storages: int
    storage_bytes: int
    num_tensors: int
    objects: dict[str, int]
    resident_bytes: int


_UNCOUNTED = (list, tuple, types.FrameType, Counter, Holdings)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def take_stock(step: int) -> Holdings:
    resident = resident_bytes()
    storages = live_storages()
    things = gc.get_objects()
    return Holdings(
        step=step,
        storages=len(storages),
        storage_bytes=sum(storages.values()),
        num_tensors=sum(isinstance(t, torch.Tensor) for t in things),
        # Lists and the like hold what is counted here; earlier stock is no news.
        objects=dict(Counter(type(t).__name__ for t in things if not isinstance(t, _UNCOUNTED))),
        resident_bytes=resident,
    )


def steps_with_evaluations(
    strategy: str, shape: tuple[int, int], stops: tuple[int, ...]
) -> list[Holdings]:
    """Train a small model with AdamW and clipping; take stock at some steps."""
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    model = sw.shard(TiedDecoder(2), strategy, mesh=mesh)
    optimizer = make_optimizer(model, "adamw")

    def clip(*_: object) -> None:
        sw.clip_grad_norm_(model, 1.0)

    optimizer.register_step_pre_hook(clip)
    found: list[Holdings] = []
    step = 0
    take_stock(0)  # looking at everything once makes caches of Python's own
    for stop in stops:
        while step < stop:
            train_steps(model, optimizer, mesh, steps=1, evaluations=int(step % 100 == 0))
            step += 1
        found.append(take_stock(step))
    return found
