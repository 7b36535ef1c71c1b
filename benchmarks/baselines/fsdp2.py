"""FSDP2, `torch.distributed.fsdp.fully_shard`: as documented, and with its settings tuned."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardwright.app.models import Decoder

__all__ = ["shard_zero2", "shard_zero3", "shard_zero3_tuned"]

PREFETCHED = 2
"""Blocks gathered ahead by the tuned arm."""


def _shard(model: Decoder, *, ranks: int, reshards_after_forward: bool) -> Decoder:
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards_after_forward)
    return model


def shard_zero3(model: Decoder, ranks: int) -> Decoder:
    """Shard per block and at the root, parameters freed after forward."""
    return _shard(model, ranks=ranks, reshards_after_forward=True)


def shard_zero2(model: Decoder, ranks: int) -> Decoder:
    """Shard per block and at the root, parameters kept until after backward."""
    return _shard(model, ranks=ranks, reshards_after_forward=False)


def shard_zero3_tuned(model: Decoder, ranks: int) -> Decoder:
    """Shard as ZeRO-3, gather blocks ahead in both directions, keep the root gathered."""
    mesh = init_device_mesh("cpu", (ranks,))
    blocks = list(model.layers)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for index, block in enumerate(blocks):
        assert isinstance(block, FSDPModule), "fully_shard makes modules FSDP modules"
        block.set_modules_to_forward_prefetch(_fsdp(blocks[index + 1 : index + 1 + PREFETCHED]))
        before = blocks[max(0, index - PREFETCHED) : index]
        block.set_modules_to_backward_prefetch(_fsdp(list(reversed(before))))
    return model


def _fsdp(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
