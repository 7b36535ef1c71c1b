"""Data of unequal length on the ranks: end together, or let those without data weigh nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar, get_args

import torch
from torch import nn

from shardwright.core.errors import SpecError, nearest
from shardwright.runtime.engine import Engine
from shardwright.runtime.lookup import require_engine
from shardwright.runtime.transport.control import gather_stack
from shardwright.runtime.units import ROOT

__all__ = ["UnevenPolicy", "even_batches"]

UnevenPolicy = Literal["stop", "join"]

_BatchT = TypeVar("_BatchT")

_NONE_YET, _ENDED, _HAS_BATCH = 0, 1, 2  # what a rank tells of its data

_END = object()


def even_batches(
    batches: Iterable[_BatchT], model: nn.Module, policy: UnevenPolicy = "stop"
) -> Iterator[tuple[_BatchT, float]]:
    """Iterate over batches so that every rank takes the same number of steps.

    A rank that ran out of data would otherwise leave the others waiting in their next collective.
    Collective over the data ranks, once per batch: one byte from each.

    Args:
        batches: This rank's batches; any length, at least one under ``"join"``.
        model: The sharded model they are for.
        policy: ``"stop"``: all ranks end when the first runs out; what others have left is not
            used. ``"join"``: all end when the last runs out; a rank without data repeats its last
            batch with weight 0.

    Yields:
        ``(batch, weight)``. Multiply the rank's mean loss by `weight`: the step's gradient is then
        that of the mean over the ranks that have data. It is the number of data ranks over the
        number of those, or 0 on a rank without data. With `shardwright.backward`, pass a sum and
        a number of tokens of 0 where it is 0.

    Raises:
        SpecError: The policy is unknown, or a rank has no batch at all under ``"join"``.
        RankFailedError: Another rank's batches raised.
    """
    if policy not in get_args(UnevenPolicy):
        raise SpecError(
            f"policy must be 'stop' or 'join', found {policy!r}; "
            f"{nearest(str(policy), get_args(UnevenPolicy))}"
        )
    engine = require_engine(model)
    return _iterate(iter(batches), engine, stops_with_first=policy == "stop")


def _iterate(
    batches: Iterator[_BatchT], engine: Engine, *, stops_with_first: bool
) -> Iterator[tuple[_BatchT, float]]:
    last: list[_BatchT] = []
    while True:
        try:
            found = next(batches, _END)
        except Exception as error:
            engine.monitor.failed_here(error, "the data", ROOT)
            raise
        if found is not _END:
            last = [found]  # type: ignore[list-item]
        state = _HAS_BATCH if found is not _END else _ENDED if last else _NONE_YET
        states = _exchange(state, engine)
        num_active = states.count(_HAS_BATCH)
        if num_active == 0 or (stops_with_first and num_active < len(states)):
            return
        if _NONE_YET in states:
            raise SpecError(
                f"data rank {states.index(_NONE_YET)} has no batch at all, so it has none to "
                "repeat while others finish; give every rank at least one, or use policy='stop'"
            )
        weight = len(states) / num_active if state == _HAS_BATCH else 0.0
        yield last[0], weight


def _exchange(state: int, engine: Engine) -> list[int]:
    flag = torch.tensor([state], dtype=torch.uint8, device=engine.mesh.device)
    with engine.waiting("all_gather of data states", ROOT):
        found: list[int] = gather_stack(flag, engine.mesh.data_axis).flatten().tolist()
    return found
