"""Collectives under one name each, whichever name the installed torch gives them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

# torch 2.13 renamed these two and deprecated the older names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
