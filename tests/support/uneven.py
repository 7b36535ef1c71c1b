"""Ranks with other numbers of batches. Runs on ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

import shardwright as sw
from tests.support.models import Stack, vectors_for
from tests.support.parity import mesh_of, worst_difference

BATCHES = (5, 3, 4, 1)
"""Batches of each rank."""


def batch_of(rank: int, step: int) -> torch.Tensor:
    return vectors_for(100 * rank + step, 1)


def batches_of(rank: int) -> Iterator[torch.Tensor]:
    return iter([batch_of(rank, step) for step in range(BATCHES[rank])])


def reference(ranks: int, policy: str) -> dict[str, torch.Tensor]:
    """One process on the batches of those ranks that have one, at every step."""
    torch.manual_seed(0)
    model = Stack().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    choose = min if policy == "stop" else max
    for step in range(choose(BATCHES[:ranks])):
        there = [batch_of(r, step) for r in range(ranks) if step < BATCHES[r]]
        (model(torch.cat(there)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def compare(strategy: str, shape: tuple[int, int], policy: str) -> tuple[float, list[float]]:
    """``(largest difference of parameters, this rank's weights)``."""
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    model = sw.shard(Stack().double(), strategy, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = []
    for batch, weight in sw.even_batches(batches_of(mesh.data_rank), model, policy):
        weights.append(weight)
        ((model(batch) ** 2).mean() * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    with sw.unsharded(model):
        actual = {n: p.detach().clone() for n, p in model.named_parameters()}
    return worst_difference(reference(mesh.data_size, policy), actual), weights


def token_mean() -> float:
    """Difference of parameters where sums and counts of tokens are joined, from one process."""
    mesh = mesh_of((1, 2))
    torch.manual_seed(0)
    model = sw.shard(Stack().double(), "zero3", mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch, weight in sw.even_batches(batches_of(mesh.data_rank), model, "join"):
        loss_sum = (model(batch) ** 2).sum() * bool(weight)
        sw.backward(loss_sum, 3 * 4 * 3 if weight else 0)
        optimizer.step()
        optimizer.zero_grad()
    with sw.unsharded(model):
        actual = {n: p.detach().clone() for n, p in model.named_parameters()}
    return worst_difference(reference(2, "join"), actual)


def no_batch_on_rank_1(policy: str) -> int:
    mesh = mesh_of((1, 2))
    model = sw.shard(Stack(), "zero3", mesh=mesh)
    batches = [] if mesh.data_rank == 1 else [1, 2]
    return len(list(sw.even_batches(batches, model, policy)))


def data_that_breaks_on_rank_1() -> None:
    """Rank 1's data raise, and rank 1 lives on."""
    mesh = mesh_of((1, 2))
    model = sw.shard(Stack().double(), "zero3", mesh=mesh)

    def batches() -> Iterator[torch.Tensor]:
        yield batch_of(mesh.data_rank, 0)
        if mesh.data_rank == 1:
            raise ValueError("a broken file")
        yield batch_of(mesh.data_rank, 1)

    try:
        for batch, weight in sw.even_batches(batches(), model, "join"):
            ((model(batch) ** 2).mean() * weight).backward()
    except ValueError:
        time.sleep(5)  # a debugger, say
        raise
