"""FSDP1, `torch.distributed.fsdp.FullyShardedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.correctness.engines.base import Engine, Session, Setup

__all__ = ["Fsdp1"]


class Fsdp1Session(Session):
    """A model inside FSDP."""

    module: FullyShardedDataParallel

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """``no_sync`` around all but the last."""
        return nullcontext() if is_last else self.module.no_sync()

    def clip(self) -> None:
        """FSDP's own method."""
        assert self.setup.max_norm is not None, "the scenario says how far"
        self.norm = self.module.clip_grad_norm_(self.setup.max_norm, self.setup.norm_type)

    def full_state(self) -> dict[str, torch.Tensor]:
        """A full state dict on every rank."""
        with self._full():
            return {k: v.detach().clone() for k, v in self.module.state_dict().items()}

    def load_full_state(self, state: dict[str, torch.Tensor]) -> None:
        """From a full state dict on every rank."""
        with self._full():
            self.module.load_state_dict(state)

    def has_gradients(self) -> dict[str, bool] | None:
        """Under the plain model's names."""
        found = super().has_gradients() or {}
        return {k.replace("_fsdp_wrapped_module.", ""): v for k, v in found.items()}

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        """With the root's parameters summoned; inner units gather theirs when called."""
        with FullyShardedDataParallel.summon_full_params(
            self.module, recurse=False, writeback=False
        ):
            return super().generate(x)

    def scale_parameters(self, factor: float) -> None:
        """With the parameters summoned, and written back."""
        with FullyShardedDataParallel.summon_full_params(self.module, writeback=True):
            super().scale_parameters(factor)

    def weight_norm(self) -> float:
        """With the parameters summoned."""
        with FullyShardedDataParallel.summon_full_params(self.module, writeback=False):
            return super().weight_norm()

    def make_scaler(self) -> Any:
        """``ShardedGradScaler``."""
        return ShardedGradScaler("cpu", init_scale=8.0, growth_interval=1000)

    def _full(self) -> AbstractContextManager[Any]:
        return FullyShardedDataParallel.state_dict_type(
            self.module, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)
        )


class Fsdp1(Engine):
    """FULL_SHARD, by `ModuleWrapPolicy`, with ``use_orig_params=True`` as its notes advise."""

    name = "FSDP1"

    def judged(self, setup: Setup) -> tuple[torch.dtype, float]:
        """Its clipping computes norms in float32 and refuses float64."""
        return (torch.float32, 1e-6) if setup.max_norm else super().judged(setup)

    def start(self) -> None:
        """A gloo group."""
        dist.init_process_group("gloo")

    def checkpoint(self, model: nn.Module, setup: Setup) -> nn.Module:
        """After wrapping: see `wrap`."""
        return model

    def wrap(self, model: nn.Module, setup: Setup) -> nn.Module:
        """Wrap, and apply activation checkpointing inside the units, as the tutorial does."""
        module = self._wrap(model, setup)
        super().checkpoint(module, setup)
        return module

    def _wrap(self, model: nn.Module, setup: Setup, **options: Any) -> FullyShardedDataParallel:
        strategy = ShardingStrategy.FULL_SHARD
        if setup.keeps_gathered:
            strategy = ShardingStrategy.SHARD_GRAD_OP
        if setup.shape is not None:
            strategy = ShardingStrategy.HYBRID_SHARD
            names = ("replicate", "shard")
            options["device_mesh"] = init_device_mesh("cpu", setup.shape, mesh_dim_names=names)
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy(setup.units),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            forward_prefetch=setup.prefetches,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            **options,
        )

    def make_session(
        self, module: nn.Module, inner: Any, optimizer: torch.optim.Optimizer, setup: Setup
    ) -> Session:
        """A `Fsdp1Session`."""
        return Fsdp1Session(module, inner, optimizer, setup)

    def prepare_from_meta(self, build: Callable[[], nn.Module], setup: Setup, rank: int) -> Session:
        """``sync_module_states`` with ``param_init_fn`` allocating on the other ranks."""
        model = build()
        module = self._wrap(
            model, setup, sync_module_states=True, param_init_fn=_allocate if rank else None
        )
        optimizer = setup.make_optimizer(module.parameters())
        return Fsdp1Session(module, model, optimizer, setup)

    def initialise(self, build: Callable[[], nn.Module], seed: int, *, alone: bool) -> Any:
        """From the meta device by ``reset_parameters``."""
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        options = {"process_group": groups[dist.get_rank()]} if alone else {}
        with torch.device("meta"):
            model = build()
        torch.manual_seed(seed)
        module = self._wrap(model, Setup(), **options)
        return Fsdp1Session(module, model, None, Setup()).full_state()


def _allocate(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
