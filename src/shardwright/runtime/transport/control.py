"""Small collectives outside the hot path: agreement before the first step, norms, first values."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.core.errors import RankMismatchError
from shardwright.runtime.transport.base import Axis
from shardwright.runtime.transport.names import all_gather_single
from shardwright.runtime.transport.pairwise import Exchange

__all__ = ["agree", "broadcast_", "end_group", "gather_objects", "gather_stack", "sum_over"]

ObjectT = TypeVar("ObjectT")

_ABORT_TAG = (1 << 30) + 7  # no unit uses these
_SMALL_TAG = (1 << 30) + 8


def agree(axis: Axis, lines: list[str], error: Exception | None, what: str) -> None:
    """Fail on all ranks or on none, before anything irreversible happens.

    Args:
        axis: Ranks that must agree.
        lines: What this rank found, one fact a line, to be equal on all ranks.
        error: What is wrong on this rank, if anything.
        what: What the lines describe, for the message.

    Raises:
        ShardwrightError: This rank's own `error`.
        RankMismatchError: Another rank failed, or ranks differ; names rank and first difference.
    """
    report = (None if error is None else f"{type(error).__name__}: {error}", lines)
    found = gather_objects(axis, report)
    if error is not None:
        raise error
    for rank, (message, _) in enumerate(found):
        if message is not None:
            raise RankMismatchError(
                f"all ranks must be able to {what}; rank {rank} of the {axis.name} axis failed "
                f"with {message}. Mend it there; this rank found nothing wrong."
            )
    for rank, (_, theirs) in enumerate(found):
        for mine_here, theirs_there in _differences(found[0][1], theirs):
            raise RankMismatchError(
                f"all ranks must {what} alike; rank 0 has {mine_here}, rank {rank} has "
                f"{theirs_there}. Build the same model with the same settings on every rank."
            )


def _differences(first: list[str], second: list[str]) -> list[tuple[str, str]]:
    size = max(len(first), len(second))
    padded = [lines + ["nothing more"] * (size - len(lines)) for lines in (first, second)]
    return [(a, b) for a, b in zip(*padded, strict=True) if a != b][:1]


def gather_objects(axis: Axis, value: ObjectT) -> list[ObjectT]:
    """Collect a small value that JSON can hold from every rank of an axis, in rank order."""
    if axis.group is None:
        return [value]
    if _is_nccl(axis.group):
        found: list[Any] = [None] * axis.size
        dist.all_gather_object(found, value, axis.group)
        return found
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = gather_stack(torch.tensor([text.numel()]), axis).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: text.numel()] = text
    rows = gather_stack(padded, axis)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]


def broadcast_(tensor: torch.Tensor, axis: Axis) -> None:
    """Replace a tensor's values by those of the axis's first rank."""
    if axis.group is not None:
        dist.broadcast(tensor, group=axis.group, group_src=0)


def end_group(axis: Axis) -> None:
    """Fail every wait on an axis's group, on this rank and its peers.

    gloo knows no abort: but a receive that times out closes all connections of its group, on both
    ends. That is the only way to wake a thread that waits for it.
    """
    if axis.group is None:
        return
    if _is_nccl(axis.group):
        axis.group.abort()
        return
    peer = (axis.rank + 1) % axis.size
    with contextlib.suppress(RuntimeError):
        axis.group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(dt.timedelta(milliseconds=1))


def sum_over(values: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Add a small tensor over an axis, in rank order: the same bits on all ranks."""
    return gather_stack(values, axis).sum(0)


def gather_stack(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Collect a small tensor from every rank of an axis.

    Returns:
        Shape ``(axis.size, *value.shape)``, in rank order and so bitwise equal on all ranks.
    """
    if axis.group is None:
        return value.unsqueeze(0)
    out = value.new_empty((axis.size, *value.shape))
    rows, mine = out.view(axis.size, -1), value.reshape(-1).contiguous()
    if _is_nccl(axis.group):
        all_gather_single(rows.view(-1), mine, axis.group)
        return out
    # Unlike a collective, an exchange tells which peer did not come.
    rows[axis.rank] = mine
    peers = [p for p in range(axis.size) if p != axis.rank]
    exchange = Exchange(axis, _SMALL_TAG, [(p, mine) for p in peers], [(p, rows[p]) for p in peers])
    exchange.start()
    exchange.wait_received()
    exchange.wait_sent()
    return out


def _is_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in group.name()
