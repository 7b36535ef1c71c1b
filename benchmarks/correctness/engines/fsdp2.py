"""FSDP2, `torch.distributed.fsdp.fully_shard`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from benchmarks.correctness.engines.base import Engine, Session, Setup

__all__ = ["Fsdp2"]


class Fsdp2Session(Session):
    """A model that `fully_shard` changed in place."""

    module: Any

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """No synchronisation before the last; on two axes, no all-reduce before the last."""
        if self.setup.shape is None:
            self.module.set_requires_gradient_sync(is_last)
        else:
            self.module.set_requires_all_reduce(is_last)
        return nullcontext()

    def global_norm(self) -> float:
        """``full_tensor`` of the returned DTensor."""
        return float(_whole(self.norm))

    def full_state(self) -> dict[str, torch.Tensor]:
        """``full_tensor`` of every entry of the state dict."""
        return {k: _whole(v).detach().clone() for k, v in self.inner.state_dict().items()}

    def load_full_state(self, state: dict[str, torch.Tensor]) -> None:
        """``set_model_state_dict`` from a full state dict."""
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.module, dict(state), options=options)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        """After ``register_fsdp_forward_method``."""
        register_fsdp_forward_method(self.module, "generate")
        return super().generate(x)

    def usable_weight(self) -> torch.Tensor:
        """The DTensor's ``full_tensor``."""
        return _whole(self.weight())

    def weight_norm(self) -> float:
        """Of the DTensor's ``full_tensor``."""
        return float(_whole(self.weight().detach()).norm())

    def scale_parameters(self, factor: float) -> None:
        """After ``reshard``, so that the registered parameters are the sharded ones."""
        for module in self.inner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        super().scale_parameters(factor)

    def recover(self) -> None:
        """``reset_iter_state``."""
        self.module.reset_iter_state()


class Fsdp2(Engine):
    """A call for each unit and one for the root, freed after forward."""

    name = "FSDP2"

    def start(self) -> None:
        """A gloo group."""
        dist.init_process_group("gloo")

    def wrap(self, model: nn.Module, setup: Setup) -> nn.Module:
        """``fully_shard`` bottom-up."""
        if setup.shape is None:
            ranks = (dist.get_world_size(),)
            mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("shard",))
        else:
            names = ("replicate", "shard")
            mesh = init_device_mesh("cpu", setup.shape, mesh_dim_names=names)
        module: nn.Module = _shard(model, setup, mesh)
        return module

    def make_session(
        self, module: nn.Module, inner: Any, optimizer: torch.optim.Optimizer, setup: Setup
    ) -> Session:
        """A `Fsdp2Session`."""
        return Fsdp2Session(module, inner, optimizer, setup)

    def prepare_from_meta(self, build: Callable[[], nn.Module], setup: Setup, rank: int) -> Session:
        """Shard on the meta device, allocate, and broadcast the first rank's state dict."""
        built = build()
        state = built.state_dict() if rank == 0 else {}
        model = built.to("meta")
        module = self.wrap(model, setup)
        module.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, state, options=options)
        optimizer = setup.make_optimizer(module.parameters())
        return Fsdp2Session(module, model, optimizer, setup)

    def initialise(self, build: Callable[[], nn.Module], seed: int, *, alone: bool) -> Any:
        """From the meta device: shard, allocate, seed, ``reset_parameters`` on the shards."""
        ranks = [dist.get_rank()] if alone else list(range(dist.get_world_size()))
        with torch.device("meta"):
            model = build()
        module = _shard(model, Setup(), DeviceMesh("cpu", ranks))
        module.to_empty(device="cpu")
        torch.manual_seed(seed)
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        return Fsdp2Session(module, model, None, Setup()).full_state()


def _shard(model: nn.Module, setup: Setup, mesh: DeviceMesh) -> Any:
    reshards = not setup.keeps_gathered
    names = {k: module for k, module in model.named_modules() if isinstance(module, setup.units)}
    for name in sorted(names, key=lambda name: name.count("."), reverse=True):  # bottom-up
        fully_shard(names[name], mesh=mesh, reshard_after_forward=reshards)
    whole: Any = fully_shard(model, mesh=mesh, reshard_after_forward=None if reshards else False)
    if setup.prefetches:
        units: list[Any] = list(names.values())
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    if setup.unused == "somewhere":
        whole.set_reduce_scatter_unused_params(True)
    return whole


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
