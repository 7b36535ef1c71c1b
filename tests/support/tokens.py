"""Losses averaged over tokens, with other numbers of tokens in every micro-batch. Runs on ranks."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.support.models import Stack, vectors_for
from tests.support.parity import mesh_of, worst_difference

COUNTS = ((3, 7), (5, 1), (2, 2), (0, 4))
"""Valid tokens of two micro-batches, for each rank."""


def loss_sum(model: nn.Module, rank: int, micro_batch: int, step: int) -> torch.Tensor:
    """Sum of the losses of the valid tokens."""
    x = vectors_for(10 * step + 2 * rank + micro_batch, 1).flatten(0, 1)
    return (model(x)[: COUNTS[rank][micro_batch]] ** 2).sum()


def reference(ranks: int, *, mean_of_means: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Stack().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    total = sum(sum(COUNTS[rank]) for rank in range(ranks))
    for step in range(3):
        for rank in range(ranks):
            for micro_batch in range(2):
                value = loss_sum(model, rank, micro_batch, step)
                naive = max(COUNTS[rank][micro_batch], 1) * ranks * 2
                (value / (naive if mean_of_means else total)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def compare(strategy: str, shape: tuple[int, int]) -> tuple[float, float]:
    """Difference of parameters from the token mean, and of the mean of means from it."""
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    model = sw.shard(Stack().double(), strategy, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        for micro_batch in range(2):
            with contextlib.nullcontext() if micro_batch else sw.accumulate(model):
                value = loss_sum(model, mesh.data_rank, micro_batch, step)
                sw.backward(value, COUNTS[mesh.data_rank][micro_batch])
        optimizer.step()
        optimizer.zero_grad()
    expected = reference(mesh.data_size, mean_of_means=False)
    naive = reference(mesh.data_size, mean_of_means=True)
    with sw.unsharded(model):
        actual = dict(model.state_dict())
        return worst_difference(expected, actual), worst_difference(expected, naive)


def forgets_zero_grad() -> None:
    model = sw.shard(Stack().double(), "zero3")
    for _ in range(2):
        sw.backward(loss_sum(model, dist.get_rank(), 0, 0), 3)


def plain_model() -> None:
    sw.backward(loss_sum(Stack().double(), 0, 0, 0), 3)
