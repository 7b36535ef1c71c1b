"""The parameter a user sees after sharding: this rank's rows, knowing the whole's shape."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

__all__ = ["ShardedParameter", "mark_plain", "mark_sharded"]


class ShardedParameter(nn.Parameter):
    """A parameter that holds some rows of a larger one.

    It stays the very object that modules and optimizers hold; only its class tells more.

    Attributes:
        global_shape: Shape over all ranks: what ``shape`` is in one process. Code that decides on
            a parameter's size, such as an optimizer's threshold, should look at this.
        global_numel: Elements over all ranks.
        rows: ``(start, stop)`` rows of dimension 0 held here.
        is_owned_whole: Whether this rank was asked to own it whole, and does.
        unit_name: Unit it belongs to.
        full_name: Fully qualified name in the model.
    """

    global_shape: torch.Size
    global_numel: int
    rows: tuple[int, int]
    is_owned_whole: bool
    unit_name: str
    full_name: str

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name, global shape and the rows held, before the values."""
        start, stop = self.rows
        values = repr(self.data)
        return (
            f"ShardedParameter({self.full_name!r}, global_shape={tuple(self.global_shape)}, "
            f"rows={start}:{stop}, unit={self.unit_name!r}, requires_grad={self.requires_grad},\n"
            f"{values})"
        )


def mark_sharded(
    parameter: nn.Parameter,
    *,
    global_shape: tuple[int, ...],
    rows: tuple[int, int],
    is_owned_whole: bool,
    unit_name: str,
    full_name: str,
) -> None:
    """Turn a plain parameter into a `ShardedParameter` in place, keeping its identity."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ShardedParameter
    parameter.global_shape = torch.Size(global_shape)  # type: ignore[attr-defined]
    parameter.global_numel = math.prod(global_shape)  # type: ignore[attr-defined]
    parameter.rows = rows  # type: ignore[attr-defined]
    parameter.is_owned_whole = is_owned_whole  # type: ignore[attr-defined]
    parameter.unit_name = unit_name  # type: ignore[attr-defined]
    parameter.full_name = full_name  # type: ignore[attr-defined]


def mark_plain(parameter: nn.Parameter) -> None:
    """Undo `mark_sharded`."""
    if isinstance(parameter, ShardedParameter):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    for name in ShardedParameter.__annotations__:
        parameter.__dict__.pop(name, None)
