"""Engines that fail on purpose, so that the comparison can be seen to notice."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.correctness.engines.base import Engine, Setup

__all__ = ["PLANTED"]


class Planted(Engine):
    """Data parallelism by a hook on every gradient."""

    name = "planted"

    def start(self) -> None:
        """A gloo group."""
        dist.init_process_group("gloo")

    def wrap(self, model: nn.Module, setup: Setup) -> nn.Module:
        """Reduce gradients as soon as they are there."""
        for parameter in model.parameters():
            parameter.register_hook(self.reduce)
        return model

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """What is wrong with it."""
        raise NotImplementedError


class Sums(Planted):
    """Sums gradients over ranks where the mean is meant."""

    name = "planted sum"

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """The sum."""
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Hangs(Planted):
    """Waits for nothing on the second rank."""

    name = "planted hang"

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Come back late."""
        time.sleep(1000.0 * dist.get_rank())
        return gradient


class Dies(Planted):
    """Ends the second rank's process."""

    name = "planted death"

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Don't come back."""
        if dist.get_rank() == 1:
            os._exit(9)
        return gradient


PLANTED: dict[str, type[Engine]] = {
    "planted-sum": Sums,
    "planted-hang": Hangs,
    "planted-death": Dies,
}
