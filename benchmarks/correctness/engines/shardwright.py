"""Shardwright through its public functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from benchmarks.correctness.engines.base import Engine, Session, Setup

__all__ = ["Shardwright"]


class ShardwrightSession(Session):
    """A model that `sw.shard` changed in place."""

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """``sw.accumulate`` around all but the last."""
        return nullcontext() if is_last else sw.accumulate(self.module)

    def backward_tokens(
        self, loss_sum: torch.Tensor, *, num_tokens: int, total: int, ranks: int
    ) -> None:
        """``sw.backward``, which counts by itself."""
        sw.backward(loss_sum, num_tokens)

    def clip(self) -> None:
        """``sw.clip_grad_norm_``."""
        assert self.setup.max_norm is not None, "the scenario says how far"
        self.norm = sw.clip_grad_norm_(self.module, self.setup.max_norm, self.setup.norm_type)

    def full_state(self) -> dict[str, torch.Tensor]:
        """``state_dict`` inside ``sw.unsharded``."""
        with sw.unsharded(self.module):
            return super().full_state()

    def load_full_state(self, state: dict[str, torch.Tensor]) -> None:
        """``load_state_dict`` inside ``sw.unsharded(writeback=True)``."""
        with sw.unsharded(self.module, writeback=True):
            super().load_full_state(state)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        """Inside ``sw.unsharded``."""
        with sw.unsharded(self.module):
            return super().generate(x)

    def weight_norm(self) -> float:
        """Inside ``sw.unsharded``."""
        with sw.unsharded(self.module):
            return super().weight_norm()

    def make_scaler(self) -> Any:
        """``sw.GradScaler``."""
        return sw.GradScaler(self.module, init_scale=8.0, growth_interval=1000)

    def evenly(self, batches: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, float]]:
        """``sw.even_batches`` that joins."""
        return sw.even_batches(batches, self.module, "join")


class Shardwright(Engine):
    """One strategy."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        self.name = f"Shardwright {strategy}"

    def version(self) -> str:
        """Shardwright's."""
        return sw.__version__

    def checkpoint(self, model: nn.Module, setup: Setup) -> nn.Module:
        """``sw.checkpoint_activations``."""
        if setup.checkpoints:
            sw.checkpoint_activations(model, setup.checkpoints)
        return model

    def wrap(self, model: nn.Module, setup: Setup) -> nn.Module:
        """``sw.shard``; a mesh with several replicas makes ``zero3`` hybrid."""
        replicas, shards = setup.shape or (1, dist.get_world_size())
        strategy = "zero2" if setup.keeps_gathered else self.strategy
        mesh = sw.init_mesh(replicate=replicas, shard=shards)
        return sw.shard(model, strategy, mesh=mesh, units=setup.units)

    def make_session(
        self, module: nn.Module, inner: Any, optimizer: torch.optim.Optimizer, setup: Setup
    ) -> Session:
        """A `ShardwrightSession`."""
        return ShardwrightSession(module, inner, optimizer, setup)

    def start(self) -> None:
        """``sw.init_mesh`` starts the group."""
        sw.init_mesh()

    def prepare_from_meta(self, build: Callable[[], nn.Module], setup: Setup, rank: int) -> Session:
        """``sw.shard`` takes everything from the first rank."""
        return self.prepare(build(), setup)

    def initialise(self, build: Callable[[], nn.Module], seed: int, *, alone: bool) -> Any:
        """Built inside ``sw.meta_init``, then sharded; alone: ``sw.materialize_``."""
        torch.manual_seed(seed)
        with sw.meta_init():
            model = build()
        if alone:
            return dict(sw.materialize_(model).state_dict())
        return ShardwrightSession(self.wrap(model, Setup()), model, None, Setup()).full_state()
