"""Count bytes, storages, allocations and copies of the engine, from outside it. Runs on ranks."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from tests.support.models import TiedDecoder, tokens_for
from tests.support.parity import build, make_optimizer, mesh_of


def train_steps(
    model: TiedDecoder,
    optimizer: torch.optim.Optimizer,
    mesh: sw.Mesh,
    *,
    steps: int,
    micro_batches: int = 1,
    evaluations: int = 0,
) -> None:
    for step in range(steps):
        for micro_batch in range(micro_batches):
            batch = tokens_for(step, micro_batch, 1)
            is_last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if is_last else sw.accumulate(model):
                model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(evaluations):
                model(batch[:, :-1], batch[:, 1:])


def live_storages() -> dict[int, int]:
    """Bytes of every CPU storage that a tensor reachable by the collector holds, by address."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def storages_against_formula(
    strategy: str, shape: tuple[int, int], precision: dict[str, Any]
) -> tuple[int, int, dict[str, int]]:
    """``(bytes that training added to the process, bytes by the formula, formula by category)``.

    The model's own parameters are gone after sharding, so what is alive then, and was not before,
    is the engine's and the optimizer's.
    """
    mesh = mesh_of(shape)
    before = live_storages()
    model = sw.shard(build(torch.float32), strategy, mesh=mesh, precision=sw.Precision(**precision))
    optimizer = make_optimizer(model, "adamw")
    train_steps(model, optimizer, mesh, steps=2, micro_batches=2)
    after = live_storages()
    added = sum(size for address, size in after.items() if before.get(address) != size)
    computed = sw.ledger(model).computed_memory
    return added, sum(computed.values()), computed


def reconciliation(
    strategy: str,
    shape: tuple[int, int],
    micro_batches: int,
    precision: dict[str, Any],
    settings: dict[str, Any],
) -> list[tuple[str, int, int]]:
    """Every row of the ledger after three steps with evaluations: name, computed, counted."""
    mesh = mesh_of(shape)
    model = sw.shard(
        build(torch.float32), strategy, mesh=mesh, precision=sw.Precision(**precision), **settings
    )
    optimizer = make_optimizer(model, "adamw")
    train_steps(model, optimizer, mesh, steps=3, micro_batches=micro_batches, evaluations=2)
    with sw.unsharded(model):
        pass
    found = sw.ledger(model).reconcile()
    return [(f"{r.section}: {r.name}", r.computed, r.counted) for r in found.rows]


def sent_per_step(
    strategy: str, shape: tuple[int, int], micro_batches: int, param: torch.dtype | None = None
) -> tuple[dict[tuple[str, str], int], list[dict[str, int]]]:
    """Bytes by ``(collective, axis)`` of one later step, and each unit's padded sizes."""
    mesh = mesh_of(shape)
    model = sw.shard(build(torch.float32), strategy, mesh=mesh, precision=sw.Precision(param=param))
    optimizer = make_optimizer(model, "sgd")
    train_steps(model, optimizer, mesh, steps=2, micro_batches=micro_batches)
    before = sw.ledger(model).sent_by_collective()
    train_steps(model, optimizer, mesh, steps=1, micro_batches=micro_batches)
    after = sw.ledger(model).sent_by_collective()
    units = [
        {
            "gathered_bytes": u.gathered_bytes,
            "gradient_numel": u.gradient_numel,
            "slot": u.slot,
        }
        for u in sw.describe(model).units
    ]
    return {k: v - before.get(k, 0) for k, v in after.items()}, units


class _CountAllocations(TorchDispatchMode):
    """Counts tensors made by tensor factories while active."""

    factories = ("empty", "zeros", "ones", "full", "new_empty", "new_zeros", "clone")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in self.factories:
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


def allocations_after_warm_up(strategy: str, shape: tuple[int, int]) -> tuple[int, int]:
    """``(buffers the engine made in steps 3 to 5, growth of live bytes over those steps)``."""
    mesh = mesh_of(shape)
    model = sw.shard(build(torch.float32), strategy, mesh=mesh)
    optimizer = make_optimizer(model, "adamw")
    train_steps(model, optimizer, mesh, steps=2, micro_batches=2, evaluations=1)
    held, live = sw.ledger(model).memory, live_storages()
    train_steps(model, optimizer, mesh, steps=3, micro_batches=2, evaluations=1)
    now = live_storages()
    return (
        sum(sw.ledger(model).memory.values()) - sum(held.values()),
        sum(now.values()) - sum(live.values()),
    )


def factory_calls_beside_plain(
    strategy: str, shape: tuple[int, int]
) -> tuple[list[str], list[str]]:
    """Factory calls of one later sharded step, and of the same step on the plain model."""
    mesh = mesh_of(shape)
    batch = tokens_for(0, 0, 1)
    found = []
    for is_sharded in (True, False):
        model = build(torch.float32)
        if is_sharded:
            model = sw.shard(model, strategy, mesh=mesh)
        for _ in range(3):
            with _CountAllocations() as mode:
                model(batch[:, :-1], batch[:, 1:]).backward()
            model.zero_grad()
        found.append(sorted(mode.calls))
    return found[0], found[1]


def copies_per_step(strategy: str, shape: tuple[int, int], direct: bool) -> float:
    """Gradients copied into a reduce buffer, per step."""
    mesh = mesh_of(shape)
    model = sw.shard(build(torch.float32), strategy, mesh=mesh, direct_gradients=direct)
    optimizer = make_optimizer(model, "sgd")
    train_steps(model, optimizer, mesh, steps=1)
    before = sw.ledger(model).num_copies
    train_steps(model, optimizer, mesh, steps=2)
    return (sw.ledger(model).num_copies - before) / 2


def leaks(strategy: str, shape: tuple[int, int]) -> int:
    """Tensors more after ten further steps, without a collection in between."""
    mesh = mesh_of(shape)
    model = sw.shard(build(torch.float32), strategy, mesh=mesh)
    optimizer = make_optimizer(model, "adamw")
    train_steps(model, optimizer, mesh, steps=2)
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(t, torch.Tensor) for t in gc.get_objects())
        train_steps(model, optimizer, mesh, steps=10)
        return sum(isinstance(t, torch.Tensor) for t in gc.get_objects()) - before
    finally:
        gc.enable()


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def chosen_by_budget(strategy: str, budget_gib: float | None) -> tuple[str, int, int]:
    """Where gradients live, planned bytes, and reduce-scatters per unit, with 3 micro-batches."""
    model = sw.shard(TiedDecoder(blocks=12), strategy, memory_budget_gib=budget_gib)
    mesh = mesh_of((1, 2))
    train_steps(model, make_optimizer(model, "sgd"), mesh, steps=1, micro_batches=3)
    calls = [r.num_calls for r in sw.ledger(model).traffic if r.collective == "reduce_scatter"]
    description = sw.describe(model)
    return description.gradients, sum(description.memory_bytes.values()), max(calls)
