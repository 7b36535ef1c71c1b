"""How the engine notices optimizer steps, and refuses optimizers that cannot work on shards.

torch calls global hooks before and after any optimizer's step. Version counters would miss the
fused kernels, so these hooks are the only reliable sign that shards changed.

[Note: one registration per process] torch's table of step hooks belongs to the process, and taking
an entry out while a step walks it raises, which a garbage collection in the middle of a step would
do. So one pair of hooks is registered for good, and looks up the engines that still live.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwright.core.errors import LifecycleError
from shardwright.core.layout import ParameterSpec
from shardwright.runtime.engine import Engine
from shardwright.runtime.optimizer_kinds import Need, need_of

__all__ = ["OptimizerWatch"]


class OptimizerWatch:
    """Connects one engine to every optimizer that holds its shards.

    Args:
        engine: The engine; held weakly, so that it lives no longer than its model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._needs: weakref.WeakKeyDictionary[torch.optim.Optimizer, Need | None] = (
            weakref.WeakKeyDictionary()
        )
        self._hidden: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]
        ] = weakref.WeakKeyDictionary()
        self._divided: dict[int, ParameterSpec] = {}
        self._elsewhere: dict[int, ParameterSpec] = {}
        for unit in engine.units:
            places = unit.layout.placements if unit.parameters else ()
            for parameter, place in zip(unit.parameters, places, strict=True):
                if place.spec.can_be_cut and unit.layout.num_owners > 1:
                    self._divided[id(parameter)] = place.spec
                elif parameter.numel() < place.spec.numel:
                    self._elsewhere[id(parameter)] = place.spec
        _watches.add(self)
        _register_hooks_once()

    def remove(self) -> None:
        """Look at no further step."""
        _watches.discard(self)

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Optimizers that have stepped this engine's parameters."""
        return iter(list(self._needs))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer and its gradients before it steps this engine's shards."""
        engine = self._engine()
        if engine is None or not self._units(engine, optimizer):
            return
        is_new = optimizer not in self._needs
        need = need_of(optimizer) if is_new else self._needs[optimizer]
        if need is not None:
            need.check(optimizer, self._divided)
        if is_new:
            self._check_state(engine, optimizer, need)
            self._needs[optimizer] = need
        _check_in_place(engine, optimizer)
        engine.before_step()
        self._hide(optimizer, need)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which units an optimizer has changed."""
        engine = self._engine()
        if engine is None:
            return
        for parameter, gradient in self._hidden.pop(optimizer, ()):
            if parameter.grad is None:
                parameter.grad = gradient
        changed = self._units(engine, optimizer)
        if changed:
            engine.after_step(changed)

    def _is_passed_over(self, parameter: torch.Tensor, need: Need | None) -> bool:
        """Whether steps are to leave a parameter to the rank that owns it whole.

        One that only happens to lie on another rank, such as a scalar, is left to optimizers that
        take any rows, and so take none.
        """
        spec = self._elsewhere.get(id(parameter))
        return spec is not None and (spec.is_whole or need is not None)

    def _hide(self, optimizer: torch.optim.Optimizer, need: Need | None) -> None:
        """Let a step pass over parameters that another rank owns whole.

        What has no elements here needs no state and no time, and optimizers that divide by a
        parameter's size would fail on it. All of them pass over a gradient of None.
        """
        hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._elsewhere:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None and self._is_passed_over(p, need):
                        hidden.append((p, p.grad))
                        p.grad = None
        self._hidden[optimizer] = hidden

    def _check_state(
        self, engine: Engine, optimizer: torch.optim.Optimizer, need: Need | None
    ) -> None:
        """Refuse state that was made for whole parameters where a shard has only some rows."""
        for parameter, state in optimizer.state.items():
            is_here = id(parameter) not in self._divided and id(parameter) not in self._elsewhere
            if is_here or self._is_passed_over(parameter, need):
                continue
            unit = engine.unit_of_parameter[id(parameter)]
            for key, value in state.items():
                is_elementwise = isinstance(value, torch.Tensor) and value.dim() > 0
                if is_elementwise and value.shape != parameter.shape:
                    raise LifecycleError(
                        f"{type(optimizer).__name__} holds {key} of shape {tuple(value.shape)} for "
                        f"a parameter of unit {unit.name!r} whose shard has "
                        f"{tuple(parameter.shape)}: it was made for whole parameters. Build the "
                        "optimizer after sw.shard(), and load no state of a plain model into it."
                    )

    def _units(self, engine: Engine, optimizer: torch.optim.Optimizer) -> list[int]:
        """Indices of the engine's units that the optimizer holds parameters of, in order."""
        unit_of = engine.unit_of_parameter
        found = {
            unit.index
            for group in optimizer.param_groups
            for p in group["params"]
            if (unit := unit_of.get(id(p))) is not None
        }
        return sorted(found)


_watches: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()
"""Watches of living engines; see the note on top of this file."""


@cache
def _register_hooks_once() -> None:
    register_optimizer_step_pre_hook(_before_any_step)
    register_optimizer_step_post_hook(_after_any_step)


def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watches):
        watch.before_step(optimizer)


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watches):
        watch.after_step(optimizer)


def _check_in_place(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to step where a shard was moved out of the engine's memory."""
    places = engine.shard_pointers
    for group in optimizer.param_groups:
        for p in group["params"]:
            expected = places.get(id(p))
            if expected is not None and p.data_ptr() != expected:
                raise LifecycleError(
                    f"a parameter of unit {engine.unit_of_parameter[id(p)].name!r} was moved or "
                    "replaced after sw.shard(), so training would not reach it. Call .to(), "
                    ".half() and the like before sw.shard(), and change values inside "
                    "sw.unsharded(model, writeback=True)."
                )
