"""Models whose constructors initialise in every way, and sharding them from the meta device.

Functions that take a mesh's shape run on ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwright as sw
from tests.support.models import Stack
from tests.support.parity import STRATEGIES, mesh_of


class Rotary(nn.Module):
    """Buffers of several dtypes, persistent and not, computed by the constructor."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        steps = torch.arange(0, width, 2, dtype=torch.float32)
        self.register_buffer("inv_freq", 1.0 / 100.0 ** (steps / width), persistent=False)
        self.register_buffer("positions", torch.arange(5).expand(1, -1))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
        self.register_buffer("table", torch.linspace(0, 1, 6, dtype=torch.float64))


class Everything(nn.Module):
    """One of each awkward way of getting values into parameters and buffers.

    Args:
        reads: Ask for the value of a parameter, which torch can't do on the meta device.
    """

    def __init__(self, reads: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=3)
        self.rotary = Rotary()
        self.lstm = nn.LSTM(8, 6, num_layers=2)
        self.attention = nn.MultiheadAttention(8, 2)
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.convolution = nn.Conv1d(3, 5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.scaled = nn.Parameter(torch.randn(7, 3) * 0.02)
        self.ones = nn.Parameter(torch.ones(5))
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.outside = nn.Parameter(torch.from_numpy(np.arange(6.0).reshape(2, 3)).float() * 2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.orthogonal = nn.Linear(6, 9)
        nn.init.orthogonal_(self.orthogonal.weight, gain=0.5)
        self.truncated = nn.Linear(40, 5)
        nn.init.trunc_normal_(self.truncated.weight, std=0.5, a=-0.6, b=0.6)
        self.register_buffer("start", self.ones.detach().clone() * 3)
        with torch.no_grad():
            self.orthogonal.bias[2:4] = 7.0
            if reads and self.truncated.weight.abs().max().item() > 0.1:
                self.truncated.bias.fill_(-1.0)


class Holder(nn.Module):
    """A module with one parameter, `weight`, made by a function."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = make if isinstance(make, nn.Parameter) else nn.Parameter(make)


def on_meta(make: Any, seed: int = 0) -> nn.Module:
    """Build a model inside `sw.meta_init`."""
    torch.manual_seed(seed)
    with sw.meta_init():
        return make()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, under all their names, and buffers, those that aren't persistent too."""
    found = {k: v.detach() for k, v in model.named_parameters(remove_duplicate=False)}
    return {**found, **dict(model.named_buffers())}


def materialized_values() -> dict[str, bytes]:
    return {k: _bytes(v) for k, v in values_of(sw.materialize_(on_meta(Everything, 5))).items()}


def initial_values(shape: tuple[int, int], seeds_differ: bool) -> dict[str, dict[str, bytes]]:
    """By strategy, every value of a model made inside `sw.meta_init`, gathered."""
    found = {}
    for strategy in STRATEGIES:
        mesh = mesh_of(shape)
        seed = 5 + (mesh.data_rank if seeds_differ else 0)
        model = sw.shard(on_meta(Everything, seed), strategy, mesh=mesh)
        with sw.unsharded(model):
            found[strategy] = {k: _bytes(v) for k, v in values_of(model).items()}
    return found


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Have `torch.empty` give NaN, and the largest integers."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _to_bfloat16(model: Everything) -> Everything:
    """Everything in bfloat16 but one buffer, as models do with rotary frequencies."""
    kept = model.rotary.inv_freq
    model.to(torch.bfloat16)
    model.rotary.inv_freq = kept
    return model


def from_a_real_rank_0(strategy: str, shape: tuple[int, int], others: str) -> list[str]:
    """Shard a model that is real on rank 0 only; returns what isn't as it was on rank 0."""
    mesh = mesh_of(shape)
    torch.manual_seed(11)
    expected = _to_bfloat16(Everything())  # other ranks build it to compare
    expected.norm.running_mean.fill_(0.25)
    expected.norm.num_batches_tracked.fill_(9)
    expected.rotary.inv_freq.add_(0.125)
    if mesh.data_rank == 0:
        model = copy.deepcopy(expected)
    elif others == "device":
        with torch.device("meta"):
            model = _to_bfloat16(Everything(reads=False))
    else:
        model = _to_bfloat16(on_meta(Everything, 99))
    if mesh.data_rank > 0:
        assert model.embedding.weight.is_meta
        assert model.norm.running_mean.is_meta == (others == "device")
    with poisoned_memory():
        sw.shard(model, strategy, mesh=mesh)
    wrong = []
    with sw.unsharded(model):
        actual = values_of(model)
        for name, value in values_of(expected).items():
            if not torch.equal(actual[name], value.to(actual[name].dtype)):
                wrong.append(f"{name} differs")
        for name, buffer in expected.named_buffers():
            if actual[name].dtype != buffer.dtype:
                wrong.append(f"{name} is {actual[name].dtype}, was {buffer.dtype}")
        if model.head.weight is not model.embedding.weight:
            wrong.append("tied weights came apart")
    return wrong


class Watch(TorchDispatchMode):
    """Which CPU storages that operations returned were alive together, and elements drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn_numel = 0
        self._alive: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._count = 0
        self._moments: list[dict[int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._alive:
                    self._count += 1
                    entry = (StorageWeakRef(storage), self._count, storage.nbytes())
                    self._alive[storage._cdata] = entry
        self._moments.append({number: size for _, number, size in self._alive.values()})
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn_numel += result.numel()
        return result

    def peak_of_passing_bytes(self) -> int:
        """Most bytes alive at once of storages that are gone now."""
        staying = {number for ref, number, _ in self._alive.values() if not ref.expired()}
        return max(
            sum(size for number, size in moment.items() if number not in staying)
            for moment in self._moments
        )


class Wide(Stack):
    """Blocks, and one matrix larger than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(500, 100, bias=False)


def costs_of_sharding(strategy: str, shape: tuple[int, int], build: str) -> dict[str, int]:
    """What sharding held beside the engine's memory, and drew, on this rank."""
    mesh = mesh_of(shape)
    if build == "meta_init":
        model = on_meta(Wide)
    else:
        with torch.device("cpu" if mesh.data_rank == 0 else "meta"):
            model = Wide()
    with Watch() as watch:
        sw.shard(model, strategy, mesh=mesh)
    if mesh.data_axis.group is not None:
        dist.barrier(mesh.data_axis.group)  # a backend's threads hold what they sent a while longer
    held = {p.full_name: p.global_shape for p in model.parameters() if p.numel()}
    return {
        "beside": watch.peak_of_passing_bytes(),
        "drawn": watch.drawn_numel,
        "expected": sum(s.numel() for name, s in held.items() if "norm" not in name),
        "holds_wide": int("wide.weight" in held),
    }


def cast_before_sharding(shape: tuple[int, int]) -> list[bool]:
    """Whether each parameter of a model cast to bfloat16 starts at the rounded values."""
    expected = values_of(sw.materialize_(on_meta(Stack, 3)).to(torch.bfloat16))
    model = sw.shard(on_meta(Stack, 3).to(torch.bfloat16), "zero3", mesh=mesh_of(shape))
    with sw.unsharded(model):
        return [torch.equal(p, expected[n].float()) for n, p in model.named_parameters()]


def trained_losses(shape: tuple[int, int], deferred: bool) -> list[float]:
    """Losses of some steps from the same first values, made on the meta device or not."""
    mesh = mesh_of(shape)
    model = on_meta(Stack, 3) if deferred else sw.materialize_(on_meta(Stack, 3))
    optimizer_first = torch.optim.SGD(model.parameters(), lr=0.1)
    sw.shard(model, "zero3", mesh=mesh)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        loss = (model(torch.randn(4, 3, 7, generator=generator)) ** 2).mean()
        loss.backward()
        optimizer_first.step()
        optimizer_first.zero_grad()
        losses.append(loss.item())
    return losses


def numpy_constants_by_rank(shape: tuple[int, int]) -> list[float]:
    """A parameter computed from values that differ by rank: the first rank's count."""
    mesh = mesh_of(shape)
    outside = torch.full((6, 2), float(mesh.data_rank + 1))
    model = sw.shard(on_meta(lambda: nn.Sequential(Scaled(outside))), "ddp", mesh=mesh)
    with sw.unsharded(model):
        return model[0].weight.flatten().tolist()


class Scaled(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values * 10)


def meta_on_the_first_rank() -> None:
    mesh = mesh_of((1, 2))
    with torch.device("meta" if mesh.data_rank == 0 else "cpu"):
        model = Stack()
    sw.shard(model, mesh=mesh)


def meta_buffer_on_the_first_rank() -> None:
    mesh = mesh_of((1, 2))
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model[1].running_var = torch.ones(3, device="meta" if mesh.data_rank == 0 else "cpu")
    sw.shard(model, mesh=mesh)
