"""Every long-lived tensor the engine owns, allocated here and counted by category."""

from __future__ import annotations

import torch

__all__ = ["CATEGORIES", "Buffers"]

CATEGORIES = (
    "parameter_shards",
    "compute_shards",
    "parameter_slots",
    "gradient_buffers",
    "gradient_shards",
    "staging",
)
"""Categories of engine memory, in the order they are shown."""


class Buffers:
    """Allocates zeroed flat tensors and remembers how many bytes each category holds.

    Args:
        device: Where tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_by_category = dict.fromkeys(CATEGORIES, 0)
        self.num_allocations = 0

    def allocate(self, category: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Make a flat tensor of zeros.

        Args:
            category: One of `CATEGORIES`.
            numel: Elements.
            dtype: Element type.

        Returns:
            Shape ``(numel,)``, owned by the caller for the life of the engine.
        """
        tensor = torch.zeros(numel, dtype=dtype, device=self.device)
        self.bytes_by_category[category] += numel * tensor.element_size()
        self.num_allocations += 1
        return tensor
