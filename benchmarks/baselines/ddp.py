"""torch's DistributedDataParallel with gradients as views of its buckets."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["replicate"]


def replicate(model: nn.Module, ranks: int) -> nn.Module:
    """Wrap a model; every rank holds all of it."""
    del ranks  # the default group's
    return DistributedDataParallel(model, gradient_as_bucket_view=True)
