"""The parameter a user sees after sharding: this rank's rows, showing the whole's shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["ShardedParameter", "mark_plain", "mark_sharded"]


class ShardedParameter(nn.Parameter):
    """A parameter that holds some rows of a larger one.

    It stays the very object that modules and optimizers hold; only its class tells more.

    Attributes:
        global_shape: Shape over all ranks.
        rows: ``(start, stop)`` rows of dimension 0 held here.
        unit_name: Unit it belongs to.
        full_name: Fully qualified name in the model.
    """

    global_shape: torch.Size
    rows: tuple[int, int]
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
    unit_name: str,
    full_name: str,
) -> None:
    """Turn a plain parameter into a `ShardedParameter` in place, keeping its identity."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ShardedParameter
    parameter.global_shape = torch.Size(global_shape)  # type: ignore[attr-defined]
    parameter.rows = rows  # type: ignore[attr-defined]
    parameter.unit_name = unit_name  # type: ignore[attr-defined]
    parameter.full_name = full_name  # type: ignore[attr-defined]


def mark_plain(parameter: nn.Parameter) -> None:
    """Undo `mark_sharded`."""
    if type(parameter) is ShardedParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    for name in ("global_shape", "rows", "unit_name", "full_name"):
        parameter.__dict__.pop(name, None)
