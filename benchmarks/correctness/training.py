"""Train under an engine and in one process, and compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.correctness.engines.base import Engine, Session, Setup
from benchmarks.correctness.findings import Finding, compare_tensors
from benchmarks.correctness.models import WIDTH, Stack

__all__ = ["Run", "Training", "World", "agree", "build", "compare_training", "data", "plainly"]

ROWS = 2
"""Rows of a rank's micro-batch."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Which ranks share a batch.

    Attributes:
        rank: This one.
        ranks: How many.
    """

    rank: int
    ranks: int

    @property
    def is_alone(self) -> bool:
        """Whether this is the one process of the truth."""
        return self.ranks == 1


@dataclass(kw_only=True)
class Run:
    """A training under way, for the bodies of scenarios.

    Attributes:
        session: The model.
        world: The ranks of the batch; of the truth: one.
        ranks: Ranks of the engine, also for the truth.
        step: Which.
        micro_batch: Which of the step.
        parts: Micro-batches of a step.
    """

    session: Session
    world: World
    ranks: int
    dtype: torch.dtype
    step: int = 0
    micro_batch: int = 0
    parts: int = 1

    def mean_square(self, x: torch.Tensor, power: int = 2) -> torch.Tensor:
        """The usual loss, divided by the number of micro-batches."""
        loss: torch.Tensor = (self.session.module(x) ** power).mean() / self.parts
        return loss


Body = Callable[[Run, torch.Tensor], Any]
"""Runs forward and backward on one micro-batch; returns a loss to compare, or None."""


def plainly(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Forward, mean of squares, backward."""
    loss = run.mean_square(x)
    run.session.backward(loss)
    return loss


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a scenario trains.

    Attributes:
        model: The plain model's class.
        setup: For the engine.
        body: Of a micro-batch.
        micro_batches: Per step.
        accumulates: Whether micro-batches but the last run inside the engine's context for that.
        steps: Of the optimizer.
        clips: Whether steps clip.
        logs_norm: Compare what clipping returns, as it is, with ``float``.
        compares_none: Which gradients are None must be as in one process.
        exact: Names of parameters that must not differ at all.
        first_state: Compare whole parameters before the first step exactly.
        set_to_none: Of ``zero_grad``.
        reads_after: Read something after training; compared by name.
        update: Replaces the optimizer's step.
        data: Instead of `data`.
        dtype: Instead of the engine's.
        tolerance: Instead of the engine's.
    """

    model: type[nn.Module] = Stack
    setup: Setup = field(default_factory=Setup)
    body: Body = plainly
    micro_batches: int = 1
    accumulates: bool = True
    steps: int = 3
    clips: bool = False
    logs_norm: bool = False
    compares_none: bool = False
    exact: tuple[str, ...] = ()
    first_state: bool = False
    set_to_none: bool = True
    reads_after: Callable[[Run], dict[str, torch.Tensor]] | None = None
    update: Callable[[Run], None] | None = None
    data: Callable[[int, int, torch.dtype], torch.Tensor] | None = None
    dtype: torch.dtype | None = None
    tolerance: float | None = None

    def judged(self, engine: Engine) -> tuple[torch.dtype, float]:
        """In which dtype it trains under an engine, and what difference counts as right."""
        dtype, tolerance = engine.judged(self.setup)
        return self.dtype or dtype, self.tolerance or tolerance


@dataclass(kw_only=True)
class Trained:
    """What came of it; losses are means over the ranks."""

    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    has_gradients: list[dict[str, bool] | None] = field(default_factory=list)


def build(model: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    """Make a model, the same in every process; a model of mixed dtypes keeps them."""
    torch.manual_seed(0)
    made = model()
    kinds = {p.dtype for p in made.parameters()}
    return made.to(dtype) if len(kinds) == 1 else made


def data(seed: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of 4 vectors. The first rank's first entries are negative, the others' positive."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, WIDTH, generator=generator, dtype=torch.float64)
    x[:, 0, 0] = x[:, 0, 0].abs()
    x[:ROWS, 0, 0] *= -1
    return x.to(dtype)


def train(training: Training, engine: Engine, world: World, ranks: int) -> Trained:
    """Train on this rank's rows; on all rows if the world is one rank."""
    dtype, result = training.judged(engine)[0], Trained()
    session = engine.prepare(build(training.model, dtype), training.setup)
    run = Run(session=session, world=world, ranks=ranks, dtype=dtype, parts=training.micro_batches)
    if training.first_state:
        result.first = session.full_state()
    for run.step in range(training.steps):
        for run.micro_batch in range(training.micro_batches):
            seed = 100 * run.step + run.micro_batch
            x = (training.data or data)(seed, ROWS * ranks, dtype)
            x = x if world.is_alone else x[ROWS * world.rank : ROWS * (world.rank + 1)]
            is_last = run.micro_batch == training.micro_batches - 1
            with (
                session.micro_batch(is_last=is_last)
                if training.accumulates and training.micro_batches > 1
                else contextlib.nullcontext()
            ):
                loss = training.body(run, x)
            if isinstance(loss, torch.Tensor):
                result.losses[f"loss {seed}"] = loss.detach().clone()
        result.has_gradients.append(session.has_gradients() if training.compares_none else None)
        _update(training, run, result)
    if training.reads_after is not None:
        result.read = training.reads_after(run)
    result.state = session.full_state()
    return result


def _update(training: Training, run: Run, result: Trained) -> None:
    session = run.session
    if training.update is not None:
        training.update(run)
        return
    if training.clips:
        session.clip()
    session.step()
    if training.clips:
        norm = float(session.norm) if training.logs_norm else session.global_norm()
        result.norms[f"norm {run.step}"] = torch.tensor(norm, dtype=torch.float64)
    session.zero_grad(set_to_none=training.set_to_none)


def compare_training(training: Training, engine: Engine, world: World) -> list[Finding]:
    """Train twice and compare whole parameters, losses, norms and what else is asked for."""
    plain, setup = Engine(), training.setup
    plain.dtype, tolerance = training.judged(engine)
    expected = train(training, plain, World(rank=0, ranks=1), world.ranks)
    found = train(training, engine, world, world.ranks)
    means = {k: _mean(v) for k, v in found.losses.items()}
    findings = compare_tensors("parameters", expected.state, found.state, tolerance=tolerance)
    findings += compare_tensors("losses", expected.losses, means, tolerance=tolerance)
    findings += compare_tensors("read", expected.read, found.read, tolerance=tolerance)
    findings += compare_tensors("norms", expected.norms, found.norms, tolerance=tolerance)
    findings += compare_tensors("first state", expected.first, found.first, tolerance=0.0)
    exact = {k: expected.state[k] for k in training.exact}
    kept = {k: v for k, v in found.state.items() if k in exact}
    findings += compare_tensors("frozen parameters", exact, kept, tolerance=0.0)
    if setup.shape is not None:
        findings.append(_replicas_equal(found.state))
    if training.compares_none:
        findings += _compare_none(expected.has_gradients, found.has_gradients)
    return [f for f in findings if f.difference or f.what == "parameters"]


def agree(value: Any) -> list[Any]:
    """What every rank says."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _mean(value: torch.Tensor) -> torch.Tensor:
    total = value.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _replicas_equal(state: dict[str, torch.Tensor]) -> Finding:
    mine = torch.cat([v.double().flatten() for v in state.values()])
    first = mine.clone()
    dist.broadcast(first, 0)
    gap = (mine - first).abs().max().item()
    return Finding(what="copies on other ranks", difference=gap, tolerance=0.0)


def _compare_none(
    expected: list[dict[str, bool] | None], found: list[dict[str, bool] | None]
) -> list[Finding]:
    wrong = []
    for step, (wanted, mine) in enumerate(zip(expected, found, strict=True)):
        everyone = agree(mine)
        if wanted is None or any(theirs is None for theirs in everyone):
            return []
        for name, value in wanted.items():
            if any(theirs.get(name, False) for theirs in everyone) != value:
                wrong.append(f"{name} in step {step}")
    note = f"other gradients are None than in one process: {', '.join(wrong[:3])}"
    return [Finding(what="gradients", difference=len(wrong), tolerance=0, note=note)]
