"""Raise, die, dawdle or diverge on one rank at one phase of a step. Runs on ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import shardwright as sw
from tests.support.models import Stack, vectors_for
from tests.support.parity import worst_difference

PHASES = ("forward", "backward", "between", "step")


class Fault(RuntimeError):
    """What a faulty rank raises."""


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Any) -> torch.Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.act()
        return gradient, None


class FaultyStack(Stack):
    """Acts in the third block's forward, or in its backward, when told to."""

    phase = ""

    def act(self) -> None:
        """Replaced by the fault."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for index, block in enumerate(self.blocks):
            if index == 2 and self.phase == "forward":
                self.act()
            if index == 2 and self.phase == "backward":
                h = _FailInBackward.apply(h, self.act)
            h = block(h)
        return self.last(h)


def train(
    strategy: str, kind: str, phase: str, faulty: tuple[int, ...], steps: int = 3
) -> dict[str, torch.Tensor]:
    """Train; in step 1 do `kind` at `phase` on the faulty ranks; returns the full parameters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = sw.shard(FaultyStack().double(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def act() -> None:
        if kind == "raise":
            raise Fault("a fault on purpose")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "delay":
            time.sleep(5.0)

    for step in range(steps):
        x = vectors_for(step, world)[3 * rank : 3 * rank + 3]
        is_faulty = step == 1 and rank in faulty
        model.phase = phase if is_faulty else ""
        model.act = act if is_faulty else (lambda: None)
        loss = (model(x) ** 2).mean()
        if is_faulty and phase == "between":
            act()
        loss.backward()
        if is_faulty and phase == "step":
            act()
        optimizer.step()
        optimizer.zero_grad()
    with sw.unsharded(model):
        return {k: v.clone() for k, v in model.state_dict().items()}


def delayed_equals_undisturbed(strategy: str, phase: str, faulty: tuple[int, ...]) -> float:
    undisturbed = train(strategy, "none", phase, faulty)
    return worst_difference(undisturbed, train(strategy, "delay", phase, faulty))


def all_raise_and_go_on(strategy: str, phase: str) -> tuple[float, int]:
    """Every rank raises in step 1, catches it, and repeats the step.

    Returns:
        Difference of parameters from an undisturbed run, and bytes still unsharded afterwards.
    """
    everyone = tuple(range(dist.get_world_size()))
    expected = train(strategy, "none", phase, everyone)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = sw.shard(FaultyStack().double(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def act() -> None:
        raise Fault

    held = 0
    for step in range(3):
        x = vectors_for(step, world)[3 * rank : 3 * rank + 3]
        if step == 1:
            model.phase, model.act = phase, act
            try:
                (model(x) ** 2).mean().backward()
            except Fault:
                model.phase = ""
                model.zero_grad()
                with torch.no_grad():
                    model(x)
                held = sw.ledger(model).unsharded_bytes
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with sw.unsharded(model):
        actual = {k: v.clone() for k, v in model.state_dict().items()}
    return worst_difference(expected, actual), held


def skips_a_block_on(faulty: int, strategy: str) -> None:
    """One rank leaves out a block: divergent control flow."""

    class Skips(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            for index, block in enumerate(self.blocks):
                if index != 1 or dist.get_rank() != faulty or not self.diverges:
                    h = block(h)
            return self.last(h)

    model = Skips()
    model.diverges = False
    model = sw.shard(model, strategy)
    x = torch.ones(2, 4, 7)
    model(x).mean().backward()
    model.diverges = True
    for _ in range(2):
        model(x).mean().backward()


def runs_fewer_steps() -> None:
    """Rank 1 returns after one step, the others after three."""
    model = sw.shard(Stack(), "zero3")
    for _ in range(1 if dist.get_rank() == 1 else 3):
        model(torch.ones(2, 4, 7)).mean().backward()


def leaves_early(strategy: str) -> None:
    """Rank 1 has no more data and leaves; the others go on."""
    model = sw.shard(Stack(), strategy)
    for _ in range(1 if dist.get_rank() == 1 else 3):
        model(torch.ones(2, 4, 7)).mean().backward()
    if dist.get_rank() == 1:
        os._exit(0)
