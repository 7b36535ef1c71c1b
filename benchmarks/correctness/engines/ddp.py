"""torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from benchmarks.correctness.engines.base import Engine, Session, Setup
from benchmarks.correctness.findings import NotApplicable

__all__ = ["Ddp"]


class DdpSession(Session):
    """A model inside DDP."""

    module: DistributedDataParallel

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """``no_sync`` around all but the last."""
        return nullcontext() if is_last else self.module.no_sync()

    def evenly(self, batches: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, float]]:
        """Inside ``Join``, averaging over the ranks that have data."""
        with Join([self.module], divide_by_initial_world_size=False):
            yield from super().evenly(batches)


class Ddp(Engine):
    """As documented; looks for unused parameters where the scenario has some."""

    name = "DDP"

    def lacks(self, setup: Setup) -> str | None:
        """It shards nothing."""
        if setup.shape is not None:
            return "has no shard groups"
        return "gathers nothing" if setup.keeps_gathered or setup.prefetches else None

    def start(self) -> None:
        """A gloo group."""
        dist.init_process_group("gloo")

    def wrap(self, model: nn.Module, setup: Setup) -> nn.Module:
        """``DistributedDataParallel``."""
        return DistributedDataParallel(model, find_unused_parameters=setup.unused != "nowhere")

    def make_session(
        self, module: nn.Module, inner: Any, optimizer: torch.optim.Optimizer, setup: Setup
    ) -> Session:
        """A `DdpSession`."""
        return DdpSession(module, inner, optimizer, setup)

    def prepare_from_meta(self, build: Callable[[], nn.Module], setup: Setup, rank: int) -> Session:
        """Allocate on the other ranks; DDP sends parameters and buffers from the first."""
        model = build()
        if rank > 0:
            model.to_empty(device="cpu")
        return self.prepare(model, setup)

    def initialise(self, build: Callable[[], nn.Module], seed: int, *, alone: bool) -> Any:
        """Every rank holds and initialises the whole model."""
        raise NotApplicable("doesn't shard; every rank initialises the whole model")
