"""Collectives under one name each, whichever name the installed torch gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather_coalesced", "all_gather_single", "reduce_scatter_coalesced"]

# torch 2.13 renamed these and deprecated the older names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_coalesced(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Gather several flat tensors, of any dtypes, by one call."""
    names = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    return _first_of(group, names)(list(outputs), list(inputs))


def reduce_scatter_coalesced(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Reduce several flat tensors of one dtype to their sums, by one call."""
    names = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    return _first_of(group, names)(list(outputs), list(inputs))


def _first_of(group: dist.ProcessGroup, names: Sequence[str]) -> Callable[..., dist.Work]:
    call: Callable[..., dist.Work] = next(
        getattr(group, name) for name in names if hasattr(group, name)
    )
    return call
