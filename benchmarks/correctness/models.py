"""Small models, each with one thing that is awkward to shard. Sizes divide by nothing."""

# ruff: noqa: D102 - what forward does is said by its class

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = [
    "VOCABULARY",
    "WIDTH",
    "Adapted",
    "Adapter",
    "BigAndSmall",
    "Block",
    "Buffered",
    "CallsBlocksTwice",
    "Chooser",
    "DictBlock",
    "DropsAnOutput",
    "FewRows",
    "FreezesForAWhile",
    "MixedDtypes",
    "OneWeight",
    "Overflows",
    "PassesDataclasses",
    "PassesDicts",
    "ReturnsWeights",
    "Scalars",
    "SharesANorm",
    "SkipsABlock",
    "Stack",
    "TakesTurns",
    "Tied",
    "Uneven",
    "UnusedEverywhere",
    "UnusedOnSomeRanks",
    "WritesIntoViews",
]

WIDTH = 5
VOCABULARY = 11


class Block(nn.Module):
    """A norm and a two-layer network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """A linear layer, four blocks, a linear layer."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.block() for _ in range(4)])
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> Any:
        """An entry that isn't forward: three rounds through the parts."""
        h = x
        for _ in range(3):
            h = self.first(h)
            for block in self.blocks:
                h = block(h)
        return self.last(h)


class Tied(nn.Module):
    """A decoder whose head is its embedding; takes numbers and turns them into tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> Any:
        h = self.emb((x[..., 0].abs() * 7).long() % VOCABULARY)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class BigAndSmall(Stack):
    """Parameters of very different scales, one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.full((1,), 1e-3))
        self.pair = nn.Parameter(torch.full((2,), 30.0))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.tiny * self.pair.sum() * 10


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank correction, together one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.base(x) + x @ self.a.T @ self.b.T)


class Adapted(nn.Module):
    """Three adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adapter() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class MixedBlock(Block):
    """Stored with its norm in float32 and its linear layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.up.to(torch.bfloat16)
        self.down.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> Any:
        assert self.norm.weight.dtype == torch.float32, (
            f"the norm is stored in float32 and computes in {self.norm.weight.dtype}"
        )
        h = self.norm(x).to(self.up.weight.dtype)
        return x + self.down(torch.tanh(self.up(h))).to(x.dtype)


class MixedDtypes(Stack):
    """Blocks of two dtypes between float32 layers."""

    block = MixedBlock


class Uneven(nn.Module):
    """Linear(7, 5), Embedding(13, 3), Conv1d(3, 5, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(WIDTH, 7)
        self.linear = nn.Linear(7, 5)
        self.table = nn.Embedding(13, 3)
        self.convolution = nn.Conv1d(3, 5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(torch.tanh(self.spread(x))).sum(-1)
        rows = self.table((x.abs() * 4).long().clamp(max=12))
        filtered = self.convolution(rows.flatten(1, 2).transpose(1, 2)).mean((1, 2))
        return h + filtered[:, None]


class FewRows(nn.Module):
    """Parameters with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.ones(1))
        self.one_row = nn.Linear(2, 1)
        self.rest = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(x) * self.single + self.one_row(x[..., :2])


class Scalars(FewRows):
    """A parameter without dimensions besides."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.scalar


class OneWeight(nn.Module):
    """The mean input is its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x).sum(-1)


class Buffered(Stack):
    """A persistent buffer, a non-persistent one computed in the constructor, an integer."""

    inv_freq: torch.Tensor
    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / 100.0 ** (torch.arange(WIDTH, dtype=torch.float32) / WIDTH)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("running", torch.rand(WIDTH, dtype=torch.float32) + 1.0)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> Any:
        scale = self.inv_freq.to(x.dtype) / self.running.to(x.dtype)
        return super().forward(x * scale)


class UnusedEverywhere(Stack):
    """A layer and a vector take part in every second call only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.vector = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        h = super().forward(x)
        if self.calls % 2:
            h = h + (self.extra(x) + self.vector * x).sum(-1, keepdim=True)
        return h


class SkipsABlock(Stack):
    """One block is left out in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        h = self.first(x)
        for index, block in enumerate(self.blocks):
            if index != 1 or self.calls % 2:
                h = block(h)
        return self.last(h)


class Chooser(nn.Module):
    """A vector and a layer that only some rows use; it computes nothing where no row does."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.ones(WIDTH))
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, chosen: torch.Tensor) -> Any:
        if not chosen.any():
            return h
        return h + chosen[:, None, None] * (self.extra(h) + self.vector * h)


class UnusedOnSomeRanks(Stack):
    """The first rank's rows don't use one part's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.chooser = Chooser()

    def forward(self, x: torch.Tensor) -> Any:
        h = self.chooser(self.first(x), x[:, 0, 0] > 0)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


class DropsAnOutput(Stack):
    """One block runs in every call, and its result is used in every second."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        h = self.first(x)
        for index, block in enumerate(self.blocks):
            y = block(h)
            if index != 1 or self.calls % 2:
                h = y
        return self.last(h)


class TakesTurns(Stack):
    """Two halves, of which every call uses one: the two players of an adversarial pair."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        h = self.first(x)
        for block in list(self.blocks)[self.calls % 2 :: 2]:
            h = block(h)
        return self.last(h)


class FreezesForAWhile(Stack):
    """A block is trained in every second call only, by its parameters' requires_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad_(self.calls % 2 == 1)
        return super().forward(x)


class Overflows(Stack):
    """One element's gradient is infinite where a row has a certain zero."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> Any:
        first, rest = self.probe[:1], self.probe[1:]
        if first.requires_grad and (x[:, 0, 1] == 0).any():
            first.register_hook(lambda gradient: gradient * torch.inf)
        return super().forward(x) * first * rest.mean()


class CallsBlocksTwice(Stack):
    """Every block runs twice in a row."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        for block in self.blocks:
            h = block(block(h))
        return self.last(h)


class SharesANorm(Stack):
    """All blocks use one norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(WIDTH)
        for block in self.blocks:
            block.norm = norm


class DictBlock(Block):
    """Returns a dict with a None and a number in it."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = super().forward(x)
        return {"y": y, "aux": (y**2).mean(-1, keepdim=True), "nothing": None, "count": 3}


class PassesDicts(Stack):
    """Blocks that return dicts; a tuple with an int travels too."""

    block = DictBlock

    def forward(self, x: torch.Tensor) -> Any:
        h, aux = self.first(x), torch.zeros((), dtype=x.dtype)
        for block in self.blocks:
            found = block(h)
            h, aux = found["y"], aux + 0.1 * found["aux"] * found["count"]
        return self.last(h) + aux


@dataclass
class Carried:
    """What dataclass blocks take and return."""

    hidden: torch.Tensor
    count: int = 0


class DataclassBlock(Block):
    """Takes and returns a dataclass."""

    def forward(self, given: Carried) -> Carried:  # type: ignore[override]
        return Carried(hidden=super().forward(given.hidden), count=given.count + 1)


class PassesDataclasses(Stack):
    """Blocks joined by dataclasses."""

    block = DataclassBlock

    def forward(self, x: torch.Tensor) -> Any:
        carried = Carried(hidden=self.first(x))
        for block in self.blocks:
            carried = block(carried)
        return self.last(carried.hidden) * carried.count


class ViewBlock(Block):
    """Returns a view of what it computed."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).view(-1, WIDTH)


class WritesIntoViews(Stack):
    """Writes in place into the views that its blocks return."""

    block = ViewBlock

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x).view(-1, WIDTH)
        for block in self.blocks:
            h = block(h)
            h.mul_(1.5)
        return self.last(h)


class WeightBlock(Block):
    """Returns its weight beside its result."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.down.weight


class ReturnsWeights(Stack):
    """Adds a penalty on the weights that its blocks return."""

    block = WeightBlock

    def forward(self, x: torch.Tensor) -> Any:
        h, penalty = self.first(x), torch.zeros((), dtype=x.dtype)
        for block in self.blocks:
            h, weight = block(h)
            penalty = penalty + F.mse_loss(weight, torch.zeros_like(weight))
        return self.last(h) + penalty
