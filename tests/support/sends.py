"""Whether shards may be written to: nothing of them is still on its way. Runs on ranks."""

from __future__ import annotations

from typing import Any

import torch

import shardwright as sw
from shardwright.runtime.lookup import engine_of
from tests.support.models import WIDTH, Stack
from tests.support.parity import mesh_of


def _num_pending(model: Stack) -> int:
    engine = engine_of(model)
    assert engine is not None
    exchanges: list[Any] = [
        getattr(operation, "_exchange", None)
        for unit in engine.units
        for operation in (unit.gather, unit.gather_over_replicas)
    ]
    return sum(len(e._sending) for e in exchanges if e is not None)


def pending_after_passes(strategy: str, shape: tuple[int, int]) -> tuple[int, int, int]:
    """Sends of shards pending inside a forward, after an evaluation, and after a backward."""
    model = sw.shard(Stack(), strategy, mesh=mesh_of(shape))
    inside: list[int] = []
    model.last.register_forward_pre_hook(lambda *_: inside.append(_num_pending(model)))
    x = torch.ones(2, 4, WIDTH)
    with torch.no_grad():
        model(x)
    after_evaluation = _num_pending(model)
    model(x).mean().backward()
    return max(inside), after_evaluation, _num_pending(model)
