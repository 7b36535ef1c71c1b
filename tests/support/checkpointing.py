"""Activation checkpointing, and models made plain again. Runs on ranks."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from tests.support.models import WIDTH, Block, Stack, vectors_for
from tests.support.parity import mesh_of, worst_difference


class Noisy(Block):
    """A block with dropout, so that recomputation must repeat random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3)


class NoisyStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Noisy() for _ in range(4)])


class _CountProducts(TorchDispatchMode):
    """Counts matrix products run while active."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        return function(*args, **(kwargs or {}))


def train(
    strategy: str, order: str, policy: str, shape: tuple[int, int]
) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """Three steps; returns full parameters, names, and matrix products of a step.

    Args:
        strategy: How to shard.
        order: ``before`` or ``after`` shard, or ``never`` to checkpoint.
        policy: What to keep.
        shape: Mesh.
    """
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    model = NoisyStack().double()
    if order == "before":
        sw.checkpoint_activations(model, policy=policy)
    model = sw.shard(model, strategy, mesh=mesh)
    if order == "after":
        sw.checkpoint_activations(model, policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    for step in range(3):
        x = vectors_for(step, mesh.data_size)[3 * mesh.data_rank :][:3]
        with _CountProducts() as mode:
            (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with sw.unsharded(model):
        state = {k: v.clone() for k, v in model.state_dict().items()}
    return state, list(state), mode.count


def compare(strategy: str, policy: str, shape: tuple[int, int]) -> list[str]:
    expected, names, plain_products = train(strategy, "never", policy, shape)
    wrong = []
    for order in ("before", "after"):
        actual, actual_names, products = train(strategy, order, policy, shape)
        if worst_difference(expected, actual) > 1e-12:
            wrong.append(f"{order}: parameters differ")
        if actual_names != names:
            wrong.append(f"{order}: other names")
        if (products > plain_products) != (policy == "full"):
            wrong.append(f"{order}: {products} products, {plain_products} without")
    return wrong


def gathers_do_not_grow(strategy: str, shape: tuple[int, int]) -> bool:
    """Whether checkpointed training sends what plain training sends."""
    sent = []
    for is_checkpointed in (False, True):
        mesh = mesh_of(shape)
        model = sw.shard(Stack().double(), strategy, mesh=mesh)
        if is_checkpointed:
            sw.checkpoint_activations(model)
        for step in range(2):
            (model(vectors_for(step, 1)) ** 2).mean().backward()
        sent.append(sw.ledger(model).sent_by_collective())
    return sent[0] == sent[1]


def checkpoints_twice() -> None:
    model = sw.checkpoint_activations(Stack())
    sw.checkpoint_activations(model)


def unknown_policy() -> None:
    sw.checkpoint_activations(Stack(), policy="selectiv")


def nothing_to_checkpoint() -> None:
    sw.checkpoint_activations(nn.Linear(WIDTH, WIDTH))


def llama_gradients(*, use_cache: bool, policy: str | None) -> list[torch.Tensor]:
    """Those of one step of a small Llama of Hugging Face."""
    from tests.support.loading import plain_llama

    model = plain_llama(tied=True)
    model.config.use_cache = use_cache
    if policy is not None:
        sw.checkpoint_activations(model, policy=policy)
    tokens = torch.arange(12).view(2, 6)
    model(tokens, labels=tokens).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def plain_again(strategy: str, shape: tuple[int, int], checkpointed: bool) -> list[str]:
    """Train a step, make the model plain, and check that nothing of the engine is left."""
    mesh, wrong = mesh_of(shape), []
    torch.manual_seed(0)
    model = Stack()
    identities = [id(p) for p in model.parameters()]
    if checkpointed:
        sw.checkpoint_activations(model)
    model = sw.shard(model, strategy, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = vectors_for(0, mesh.data_size).float()[3 * mesh.data_rank :][:3]
    (model(x) ** 2).mean().backward()
    optimizer.step()
    with sw.unsharded(model):
        expected = {k: v.clone() for k, v in model.state_dict().items()}
    if sw.unshard_(model) is not model:
        wrong.append("another object")
    if [id(p) for p in model.parameters()] != identities:
        wrong.append("other parameters")
    if any(type(p) is not nn.Parameter for p in model.parameters()):
        wrong.append("parameters of another class")
    if worst_difference(expected, dict(model.state_dict())) != 0:
        wrong.append("other values")
    plain = copy.deepcopy(model)
    for one in (model, plain):
        (one(x) ** 2).mean().backward()
    gradients = zip(model.parameters(), plain.parameters(), strict=True)
    if any(not torch.equal(p.grad, q.grad) for p, q in gradients):
        wrong.append("other gradients than a copy's")
    leftover = [
        name
        for module in model.modules()
        for name in module.__dict__
        if name == "forward" or name.startswith("_shardwright")
    ]
    if leftover and not checkpointed:
        wrong.append(f"left behind: {leftover}")
    model.zero_grad()
    again = sw.shard(model, strategy, mesh=mesh)
    (again(x) ** 2).mean().backward()
    return wrong
