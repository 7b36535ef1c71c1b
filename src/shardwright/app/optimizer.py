"""AdamW and its learning rate, as a function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from shardwright.app.config import TrainSection

__all__ = ["build_optimizer", "learning_rate", "set_learning_rate"]


def build_optimizer(model: nn.Module, settings: TrainSection) -> torch.optim.AdamW:
    """Build AdamW over a sharded model: matrices decay, vectors and scalars don't.

    Args:
        model: After `sw.shard`; a shard has as many dimensions as its parameter.
        settings: Learning rate, betas and weight decay.

    Returns:
        The optimizer, fused.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {
            "params": [parameter for parameter in parameters if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    beta1, beta2 = settings.betas
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(beta1, beta2), fused=True)


def learning_rate(step: int, *, steps: int, warmup_steps: int, peak: float, final: float) -> float:
    """Compute the learning rate: a linear warm-up, then half a cosine.

    Args:
        step: From 0.
        steps: Of the run.
        warmup_steps: Of the rise to `peak`.
        peak: Largest value.
        final: Value at the last step.

    Returns:
        The value for this step, above 0 from the first.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps))
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = value
