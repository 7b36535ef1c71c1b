"""Small models with awkward sizes. Module-level, so that rank processes can import them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 11
WIDTH = 7


class Block(nn.Module):
    """LayerNorm and a two-layer network whose sizes divide by nothing."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TiedDecoder(nn.Module):
    """Embedding tied to the head, blocks of odd size, a scalar; returns the mean loss."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h)) * self.scale
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Stack(nn.Module):
    """Linear in, blocks, linear out, on vectors of `WIDTH`."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


def tokens_for(step: int, micro_batch: int, ranks: int, per_rank: int = 2) -> torch.Tensor:
    """Tokens of all ranks in rank order, shape ``(ranks * per_rank, 6)``: inputs and targets."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    return torch.randint(0, VOCABULARY, (ranks * per_rank, 6), generator=generator)


def vectors_for(step: int, ranks: int, per_rank: int = 3) -> torch.Tensor:
    """Vectors of all ranks in rank order, shape ``(ranks * per_rank, 4, WIDTH)``, float64."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ranks * per_rank, 4, WIDTH, generator=generator, dtype=torch.float64)
