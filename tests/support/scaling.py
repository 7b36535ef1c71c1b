"""An overflow on one rank under a gradient scaler. Runs on ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

import shardwright as sw
from tests.support.models import Stack, vectors_for
from tests.support.parity import mesh_of, worst_difference

OVERFLOW_STEP = 2
STEPS = 5


@dataclass(kw_only=True)
class Scaled:
    """What five steps came to, the third of which overflowed on the last rank."""

    scales: list[float] = field(default_factory=list)
    moved: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def optimizer_for(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=kind == "fused adamw")


def train(
    model: nn.Module, scaler: torch.amp.GradScaler, kind: str, batches: slice, ranks: int
) -> Scaled:
    """Five steps on a part of every batch; in one of them the last rank's loss overflows."""
    optimizer, result = optimizer_for(model, kind), Scaled()
    overflows = batches.stop is None or batches.stop == 3 * ranks
    for step in range(STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        loss = (model(vectors_for(step, ranks)[batches].float()) ** 2).mean()
        if step == OVERFLOW_STEP and overflows:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if kind == "clipped sgd":
            scaler.unscale_(optimizer)
            clip = sw.clip_grad_norm_ if isinstance(scaler, sw.GradScaler) else _clip
            result.norms.append(float(clip(model, 0.1)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        result.scales.append(scaler.get_scale())
        after = list(model.parameters())
        result.moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return result


def _clip(model: nn.Module, max_norm: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def compare(strategy: str, shape: tuple[int, int], kind: str) -> tuple[Scaled, Scaled, float]:
    """``(sharded, one process on all batches, largest difference of their parameters)``."""
    mesh = mesh_of(shape)
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    torch.manual_seed(0)
    plain = Stack()
    torch.manual_seed(0)
    model = sw.shard(Stack(), strategy, mesh=mesh)
    ranks = mesh.data_size
    mine = slice(3 * mesh.data_rank, 3 * mesh.data_rank + 3)
    expected = train(plain, torch.amp.GradScaler("cpu", **options), kind, slice(None), ranks)
    actual = train(model, sw.GradScaler(model, **options), kind, mine, ranks)
    with sw.unsharded(model):
        state = {n: p.detach().clone() for n, p in model.named_parameters()}
    return actual, expected, worst_difference(dict(plain.named_parameters()), state)


class Tiny(nn.Module):
    """Fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean()


def half_precision_on_ranks_without_rows() -> tuple[list[float], int]:
    """Scales over three steps in float16 of which the second overflows, and rows held here."""
    model = sw.shard(Tiny(), "zero3", precision=sw.Precision(param=torch.float16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = sw.GradScaler(model, init_scale=4.0)
    scales = []
    for size in (1.0, 60000.0, 1.0):
        scaler.scale(model(torch.full((3, 2), size)) * size).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, sum(p.numel() for p in model.parameters())


def plain_model() -> None:
    sw.GradScaler(Stack())
