"""Raise, die, dawdle or diverge on one rank at one phase of a step. Runs on ranks."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.support.models import Block, Stack, vectors_for
from tests.support.parity import worst_difference

PHASES = ("forward", "backward", "between", "step")
"""In a unit's forward or backward, between them, and before the optimizer's step."""

OTHER_PHASES = ("shard", "start", "hook", "clip", "in step", "unsharded", "in unsharded")
"""While units are sought, before a forward, at the end of a reduction, before and in calls."""


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


def perform(kind: str, delay_s: float) -> None:
    """What a faulty rank does."""
    if kind == "raise":
        raise Fault("a fault on purpose")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(3)
    if kind == "delay":
        time.sleep(delay_s)


def train(
    strategy: str,
    kind: str,
    phase: str,
    faulty: tuple[int, ...],
    steps: int = 3,
    delay_s: float = 5.0,
) -> dict[str, torch.Tensor]:
    """Train; in step 1 do `kind` at `phase` on the faulty ranks; returns the full parameters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    now, calls = [0], [0]

    def act(here: str) -> None:
        if here == phase and rank in faulty and now[0] == 1:
            calls[0] += 1
            if calls[0] == 1:
                perform(kind, delay_s)

    def chosen(module: nn.Module) -> bool:
        now[0] = 1
        act("shard")
        return isinstance(module, Block)

    torch.manual_seed(0)
    model = sw.shard(FaultyStack().double(), strategy, units=chosen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: act("in step"))
    model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda _: act("hook"))
    for step in range(steps):
        now[0] = step
        x = vectors_for(step, world)[3 * rank : 3 * rank + 3]
        model.phase = phase if step == 1 and rank in faulty else ""
        model.act = functools.partial(act, phase)
        act("start")
        loss = (model(x) ** 2).mean()
        act("between")
        loss.backward()
        act("clip")
        sw.clip_grad_norm_(model, 0.5)
        act("step")
        optimizer.step()
        optimizer.zero_grad()
        act("unsharded")
        with sw.unsharded(model):
            act("in unsharded")
            state = {k: v.clone() for k, v in model.state_dict().items()}
    return state


def delayed_equals_undisturbed(
    strategy: str, phases: tuple[str, ...], faulty: tuple[int, ...], delay_s: float = 5.0
) -> list[float]:
    """For each phase, the difference that a delay makes to the parameters."""
    undisturbed = train(strategy, "none", "", faulty)
    return [
        worst_difference(undisturbed, train(strategy, "delay", phase, faulty, delay_s=delay_s))
        for phase in phases
    ]


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
        if model.phase == phase:
            raise Fault

    model.blocks[1].up.weight.register_post_accumulate_grad_hook(
        lambda _: act() if phase == "hook" else None
    )
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
        sw.clip_grad_norm_(model, 0.5)
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
