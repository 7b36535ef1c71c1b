"""What scenarios ask of an engine. As it stands it is the truth: one process, plain torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.correctness.findings import NotApplicable
from benchmarks.correctness.models import Block

__all__ = ["Engine", "Session", "Setup", "make_sgd"]

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD as the scenarios use it: a zero gradient is not the same as none."""
    return torch.optim.SGD(
        [p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.01
    )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a scenario tells an engine before training.

    Attributes:
        units: Module classes to be sharded each by itself; the rest belongs to the root.
        shape: Replicas and shards; None for all ranks in one group.
        make_optimizer: From parameters.
        backwards_per_step: How many a step has, for engines that want to know.
        max_norm: To clip to, for engines that want to know.
        norm_type: Of the clipping.
        unused: Where some parameters get no gradient: nowhere, on every rank, or on some ranks.
        chooses: Module classes whose parameters ranks may use or not.
        keeps_gathered: Parameters stay whole from forward to backward (ZeRO-2).
        prefetches: Ask for parameters ahead.
        optimizer_first: Build the optimizer before the engine changes the model.
        warm_up: Called with the model after the engine changed it, before the optimizer is built.
        checkpoints: Recompute these classes' activations.
        scales_loss: A loss scaler surrounds backward and step.
        skips_by_norm: Whether to step is decided by the norm of the clipping.
    """

    units: tuple[type[nn.Module], ...] = (Block,)
    shape: tuple[int, int] | None = None
    make_optimizer: OptimizerFactory = make_sgd
    backwards_per_step: int = 1
    max_norm: float | None = None
    norm_type: float = 2.0
    unused: Literal["nowhere", "everywhere", "somewhere"] = "nowhere"
    chooses: tuple[type[nn.Module], ...] = ()
    keeps_gathered: bool = False
    prefetches: bool = False
    optimizer_first: bool = False
    warm_up: Callable[[nn.Module], None] | None = None
    checkpoints: tuple[type[nn.Module], ...] = ()
    scales_loss: bool = False
    skips_by_norm: bool = False


class Session:
    """A model in training.

    Attributes:
        module: What is called.
        inner: The user's own model, under whatever the engine put around it.
        optimizer: What steps; None where the engine steps by itself.
        norm: What the last clipping returned.
        scaler: Kept here by scenarios that scale the loss.
    """

    def __init__(
        self, module: nn.Module, inner: Any, optimizer: torch.optim.Optimizer | None, setup: Setup
    ) -> None:
        self.module = module
        self.inner = inner
        self.optimizer = optimizer
        self.setup = setup
        self.norm: Any = None
        self.scaler: Any = None

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Surround the forward and backward of one micro-batch of several."""
        return contextlib.nullcontext()

    def several_backwards(self) -> AbstractContextManager[Any]:
        """Surround the backwards of one micro-batch where it has more than one."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradient of this rank's mean to the step's."""
        loss.backward(retain_graph=retain_graph)

    def backward_tokens(
        self, loss_sum: torch.Tensor, *, num_tokens: int, total: int, ranks: int
    ) -> None:
        """Add the gradient of the part of a mean over `total` tokens of all ranks."""
        self.backward(loss_sum * (ranks / total))

    def clip(self) -> None:
        """Clip by the norm over the whole model, and keep that norm."""
        assert self.setup.max_norm is not None, "the scenario says how far"
        self.norm = torch.nn.utils.clip_grad_norm_(
            self.module.parameters(), self.setup.max_norm, self.setup.norm_type
        )

    def global_norm(self) -> float:
        """The norm of the last clipping, with what the documentation says to do to it."""
        return float(self.norm)

    def step(self) -> None:
        """Update the parameters."""
        assert self.optimizer is not None, "an engine without optimizer steps by itself"
        self.optimizer.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        assert self.optimizer is not None, "an engine without optimizer drops them by itself"
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def full_state(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers by the plain model's names, on every rank."""
        return {k: v.detach().clone() for k, v in self.inner.state_dict().items()}

    def load_full_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take a plain model's state."""
        self.inner.load_state_dict(state)

    def has_gradients(self) -> dict[str, bool] | None:
        """Which parameters have a gradient here; only those with elements on this rank."""
        named = self.inner.named_parameters()
        return {name: p.grad is not None for name, p in named if p.numel()}

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        """Call the model's other entry, in the way that the engine has for it."""
        return self.inner.generate(x)  # type: ignore[no-any-return]

    def weight(self) -> torch.Tensor:
        """A block's weight as a plain model's user reads it, not inside its forward."""
        return self.inner.blocks[1].up.weight  # type: ignore[no-any-return]

    def usable_weight(self) -> torch.Tensor:
        """The same with gradient, in the engine's own way if it has one."""
        return self.weight()

    def weight_norm(self) -> float:
        """Its norm, read in the engine's own way."""
        return float(self.weight().detach().norm())

    def scale_parameters(self, factor: float) -> None:
        """Scale all parameters in place, without gradient."""
        for parameter in self.module.parameters():
            parameter.mul_(factor)

    def recover(self) -> None:
        """Do what the documentation asks for after a step that raised."""

    def make_scaler(self) -> Any:
        """A loss scaler that starts at 8 and doesn't grow."""
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)

    def evenly(self, batches: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, float]]:
        """Iterate where ranks may run out of data at different times.

        Args:
            batches: This rank's.

        Yields:
            A batch, and what to multiply its mean loss by.
        """
        for batch in batches:
            yield batch, 1.0


class Engine:
    """One way to train.

    Attributes:
        name: Column.
        dtype: In which it is judged.
        tolerance: Largest difference that counts as right.
    """

    name = "one process"
    dtype = torch.float64
    tolerance = 1e-9

    def judged(self, setup: Setup) -> tuple[torch.dtype, float]:
        """In which dtype a scenario is judged, and what difference counts as right."""
        return self.dtype, self.tolerance

    def version(self) -> str:
        """Version of what is compared."""
        return torch.__version__

    def lacks(self, setup: Setup) -> str | None:
        """Say what a scenario asks for that the engine doesn't have, if anything."""
        return None

    def start(self) -> None:
        """Join the other ranks."""

    def prepare(self, model: nn.Module, setup: Setup) -> Session:
        """Put a plain model, the same on every rank, under the engine."""
        early = setup.make_optimizer(model.parameters()) if setup.optimizer_first else None
        inner = self.checkpoint(model, setup)
        module = self.wrap(inner, setup)
        if setup.warm_up is not None:
            setup.warm_up(module)
        optimizer = early or setup.make_optimizer(module.parameters())
        return self.make_session(module, inner, optimizer, setup)

    def checkpoint(self, model: nn.Module, setup: Setup) -> nn.Module:
        """Apply activation checkpointing before `wrap`, where that is the order."""
        return _checkpointed(model, setup)

    def wrap(self, model: nn.Module, setup: Setup) -> nn.Module:
        """Change or wrap the model; returns what is called."""
        return model

    def make_session(
        self, module: nn.Module, inner: Any, optimizer: torch.optim.Optimizer, setup: Setup
    ) -> Session:
        """Make the session of a wrapped model."""
        return Session(module, inner, optimizer, setup)

    def prepare_from_meta(self, build: Callable[[], nn.Module], setup: Setup, rank: int) -> Session:
        """Have real values on the first rank, none on the others, and every rank end up equal."""
        raise NotApplicable("has no path from the meta device")

    def initialise(self, build: Callable[[], nn.Module], seed: int, *, alone: bool) -> Any:
        """Make first parameters from the meta device and a seed, as ZeRO-3.

        Args:
            build: Makes the model.
            seed: Set on every rank.
            alone: In a group of this rank only.

        Returns:
            Whole parameters by name.
        """
        raise NotApplicable("has no path from the meta device")


def _checkpointed(model: nn.Module, setup: Setup) -> nn.Module:
    if setup.checkpoints:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            apply_activation_checkpointing,
        )

        apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, setup.checkpoints)
        )
    return model
