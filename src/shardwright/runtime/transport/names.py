"""Collectives under one name each, whichever name the installed torch gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "all_gather_coalesced",
    "all_gather_single",
    "reduce_scatter_coalesced",
    "reduce_scatter_single",
]

# torch 2.13 renamed these two and deprecated the older names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def all_gather_coalesced(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Gather several flat tensors, of any dtypes, by one call."""
    name = "all_gather_single_coalesced"
    call: Any = getattr(group, name, None) or group.allgather_into_tensor_coalesced
    work: dist.Work = call(list(outputs), list(inputs))
    return work


def reduce_scatter_coalesced(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Reduce several flat tensors of one dtype to their sums, by one call."""
    name = "reduce_scatter_single_coalesced"
    call: Any = getattr(group, name, None) or group.reduce_scatter_tensor_coalesced
    work: dist.Work = call(list(outputs), list(inputs))
    return work
