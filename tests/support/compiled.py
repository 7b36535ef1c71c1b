"""Ways of compiling a sharded model's blocks. Runs on ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import shardwright as sw
from tests.support.models import Block, Stack, vectors_for
from tests.support.parity import mesh_of, worst_difference


def leave(model: Stack, backend: str) -> nn.Module:
    return model


def compile_blocks(model: Stack, backend: str) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def compile_blocks_whole(model: Stack, backend: str) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def compile_forwards(model: Stack, backend: str) -> nn.Module:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    return model


def wrap_blocks(model: Stack, backend: str) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)
    return model


def checkpoint_and_compile(model: Stack, backend: str) -> nn.Module:
    sw.checkpoint_activations(model, units=Block)
    return compile_blocks(model, backend)


def compile_model(model: Stack, backend: str) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend=backend)
    return compiled


Step = Callable[[Stack, str], nn.Module]


@dataclass(frozen=True)
class Way:
    """What is done before and after `sw.shard`."""

    before: Step = leave
    after: Step = leave


WAYS = {
    "block.compile() before": Way(before=compile_blocks),
    "block.compile() after": Way(after=compile_blocks),
    "block.compile(fullgraph=True) after": Way(after=compile_blocks_whole),
    "forwards compiled before": Way(before=compile_forwards),
    "blocks wrapped before": Way(before=wrap_blocks),
    "checkpointed and compiled before": Way(before=checkpoint_and_compile),
    "checkpointed and compiled after": Way(after=checkpoint_and_compile),
    "torch.compile(model) after": Way(after=compile_model),
}


def train(model: nn.Module, runs: nn.Module, mine: slice, ranks: int) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        (runs(vectors_for(step, ranks)[mine]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        runs(vectors_for(0, ranks)[mine])
    return {n.replace("_orig_mod.", ""): p for n, p in model.named_parameters()}


def compare(way: str, strategy: str, shape: tuple[int, int], backend: str) -> tuple[float, int]:
    """Difference from one process that compiles nothing, and how many training graphs there are."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    # The compiler looks for gradients of everything a graph takes, weights in slots included.
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch, by its own compiler
    warnings.filterwarnings("ignore", ".*grad attribute of a Tensor that is not a leaf.*")
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    expected = train(plain := Stack().double(), plain, slice(None), mesh.data_size)
    torch.manual_seed(0)
    model = WAYS[way].before(Stack().double(), backend)
    assert isinstance(model, Stack)
    model = sw.shard(model, strategy, mesh=mesh)
    runs = WAYS[way].after(model, backend)
    mine = slice(3 * mesh.data_rank, 3 * mesh.data_rank + 3)
    train(model, runs, mine, mesh.data_size)
    with sw.unsharded(model):
        actual = {
            n.replace("_orig_mod.", ""): p.detach().clone() for n, p in model.named_parameters()
        }
    return worst_difference(expected, actual), counters["stats"]["unique_graphs"]
