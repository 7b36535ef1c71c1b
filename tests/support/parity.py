"""Train sharded and in one process on the concatenated batch, and compare. Runs on ranks."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.support.models import TiedDecoder, tokens_for

STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "hybrid",
    "hybrid_zero2",
    "hybrid_full_optimizer",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of training."""

    optimizer: str = "sgd"
    micro_batches: int = 1
    clip: bool = False
    dtype: torch.dtype = torch.float64
    steps: int = 3


@dataclass(kw_only=True)
class Trained:
    """What training came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def build(dtype: torch.dtype) -> TiedDecoder:
    torch.manual_seed(0)
    return TiedDecoder().to(dtype)


def reference(case: Case, ranks: int) -> Trained:
    """One process, plain torch, all ranks' data in rank order."""
    model, result = build(case.dtype), Trained()
    optimizer = make_optimizer(model, case.optimizer)
    for step in range(case.steps):
        for micro_batch in range(case.micro_batches):
            batch = tokens_for(step, micro_batch, ranks)
            loss = model(batch[:, :-1], batch[:, 1:])
            (loss / case.micro_batches).backward()
            result.losses.append(loss.item())
        if case.clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            result.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    result.state = {k: v.clone() for k, v in model.state_dict().items()}
    return result


def sharded(case: Case, strategy: str, mesh: sw.Mesh, **settings: object) -> Trained:
    """The same on the ranks of a mesh."""
    result = Trained()
    model = sw.shard(build(case.dtype), strategy, mesh=mesh, **settings)
    optimizer = make_optimizer(model, case.optimizer)
    mine = slice(2 * mesh.data_rank, 2 * mesh.data_rank + 2)
    for step in range(case.steps):
        for micro_batch in range(case.micro_batches):
            batch = tokens_for(step, micro_batch, mesh.data_size)[mine]
            is_last = micro_batch == case.micro_batches - 1
            with contextlib.nullcontext() if is_last else sw.accumulate(model):
                loss = model(batch[:, :-1], batch[:, 1:])
                (loss / case.micro_batches).backward()
            result.losses.append(mean_over_ranks(loss.detach(), mesh))
        if case.clip:
            result.norms.append(sw.clip_grad_norm_(model, 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    with sw.unsharded(model):
        result.state = {k: v.clone() for k, v in model.state_dict().items()}
    return result


def mean_over_ranks(value: torch.Tensor, mesh: sw.Mesh) -> float:
    total = value.clone()
    if mesh.data_size > 1:
        dist.all_reduce(total)
    return total.item() / mesh.data_size


def worst_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[k] - b[k]).abs().max().item() for k in a if a[k].numel())


def mesh_of(shape: tuple[int, int]) -> sw.Mesh:
    return sw.init_mesh(replicate=shape[0], shard=shape[1])


def compare_float64(strategy: str, shape: tuple[int, int], **settings: object) -> list[str]:
    """Every combination of optimizer, accumulation and clipping; returns what went wrong."""
    mesh, wrong = mesh_of(shape), []
    for optimizer, micro_batches, clip in itertools.product(
        ("sgd", "adamw"), (1, 3), (False, True)
    ):
        case = Case(optimizer=optimizer, micro_batches=micro_batches, clip=clip)
        expected = reference(case, mesh.data_size)
        actual = sharded(case, strategy, mesh, **settings)
        figures = {
            "parameters": worst_difference(expected.state, actual.state),
            "losses": max(abs(a - b) for a, b in zip(expected.losses, actual.losses, strict=True)),
            "norms": max(
                [abs(a - b) for a, b in zip(expected.norms, actual.norms, strict=True)],
                default=0.0,
            ),
        }
        wrong += [f"{case}: {k} differ by {v:.3g}" for k, v in figures.items() if not v <= 1e-9]
    return wrong


def relative_loss_error_float32(strategy: str, shape: tuple[int, int]) -> float:
    """Largest relative difference of losses in float32 over five steps of AdamW."""
    mesh = mesh_of(shape)
    case = Case(optimizer="adamw", micro_batches=2, dtype=torch.float32, steps=5)
    expected, actual = reference(case, mesh.data_size), sharded(case, strategy, mesh)
    return max(abs(a - b) / a for a, b in zip(expected.losses, actual.losses, strict=True))


def initial_state(strategy: str, shape: tuple[int, int]) -> dict[str, bytes]:
    """Gathered first parameters, as bytes."""
    model = sw.shard(build(torch.float32), strategy, mesh=mesh_of(shape))
    with sw.unsharded(model):
        return {k: v.numpy().tobytes() for k, v in model.state_dict().items()}


def replicas_stay_equal(strategy: str, shape: tuple[int, int], steps: int) -> bool:
    """Whether every copy of every parameter is bitwise the same on all ranks after training."""
    mesh = mesh_of(shape)
    case = Case(optimizer="adamw", micro_batches=1, clip=True, dtype=torch.float32, steps=steps)
    actual = sharded(case, strategy, mesh)
    flat = torch.cat([v.flatten() for v in actual.state.values()]).view(torch.int32)
    first = flat.clone()
    if mesh.data_size > 1:
        dist.broadcast(first, 0)
    return bool(torch.equal(first, flat))


def shards_cover(strategy: str, shape: tuple[int, int]) -> list[str]:
    """Check on all ranks together that optimizer shards are disjoint and cover each parameter."""
    mesh = mesh_of(shape)
    model = sw.shard(build(torch.float64), strategy, mesh=mesh)
    mine = [
        (p.full_name, p.rows, tuple(p.global_shape), p.ndim, tuple(p.shape))
        for p in model.parameters()
    ]
    everyone: list[list[tuple[object, ...]]] = [mine]
    if mesh.data_size > 1:
        everyone = [[] for _ in range(mesh.data_size)]
        dist.all_gather_object(everyone, mine)
    wrong = []
    for position, (name, _, shape_, _, _) in enumerate(mine):
        rows = shape_[0] if shape_ else 1
        counts = [0] * rows
        for theirs in everyone:
            _, (start, stop), _, ndim, local = theirs[position]
            if shape_ and (ndim != len(shape_) or local != (stop - start, *shape_[1:])):
                wrong.append(f"{name}: shard {local} of {shape_}")
            for row in range(start, stop):
                counts[row] += 1
        if len(set(counts)) != 1:
            wrong.append(f"{name}: rows held {counts} times")
    return wrong
