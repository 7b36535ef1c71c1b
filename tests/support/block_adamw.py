"""An AdamW whose moments are 8-bit integers in blocks, where a parameter is large enough."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

BLOCK = 256
QUANTISED_FROM = 4096


class _Blocks:
    """A vector as int8 with one scale per block of `BLOCK` elements."""

    def __init__(self, like: torch.Tensor) -> None:
        num_blocks = -(-like.numel() // BLOCK)
        self.shape = like.shape
        self.codes = torch.zeros(num_blocks, BLOCK, dtype=torch.int8)
        self.scales = torch.zeros(num_blocks, 1, dtype=like.dtype)

    def read(self) -> torch.Tensor:
        values = self.codes * self.scales
        return values.flatten()[: self.shape.numel()].view(self.shape)

    def write(self, values: torch.Tensor) -> None:
        padded = values.new_zeros(self.codes.shape)
        padded.view(-1)[: values.numel()] = values.flatten()
        self.scales = padded.abs().amax(1, keepdim=True) / 127
        self.codes = (padded / self.scales.clamp(min=1e-30)).round().to(torch.int8)


class _Plain:
    """The same interface without loss."""

    def __init__(self, like: torch.Tensor) -> None:
        self.values = torch.zeros_like(like)

    def read(self) -> torch.Tensor:
        return self.values

    def write(self, values: torch.Tensor) -> None:
        self.values = values.clone()


class BlockAdamW(torch.optim.Optimizer):
    """Decides by ``p.numel()``, as the packages with 8-bit optimizers do."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"], group["weight_decay"])

    def _update(self, p: torch.Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[p]
        if not state:
            kind = _Blocks if p.numel() >= QUANTISED_FROM else _Plain
            state.update(step=0, first=kind(p), root_second=kind(p))
        state["step"] += 1
        first = state["first"].read().lerp(p.grad, 0.1)
        second = (state["root_second"].read() ** 2).lerp(p.grad**2, 0.05)
        state["first"].write(first)
        state["root_second"].write(second.sqrt())
        first_hat = first / (1 - 0.9 ** state["step"])
        second_hat = second / (1 - 0.95 ** state["step"])
        p.mul_(1 - lr * weight_decay)
        p.add_(first_hat / (second_hat.sqrt() + 1e-6), alpha=-lr)
