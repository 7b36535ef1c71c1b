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

from shardwright.core.errors import LifecycleError, SpecError
from shardwright.runtime.engine import Engine

__all__ = ["OptimizerWatch"]

_WHOLE_MODEL = "it looks at all parameters at once, and a rank sees only its shards"
_WHOLE_MATRIX = "it looks at whole matrices, and a rank may hold only some of their rows"
_REFUSED = {
    "LBFGS": _WHOLE_MODEL,
    "Adafactor": _WHOLE_MATRIX,
    "Muon": _WHOLE_MATRIX,
    "SparseAdam": "gradients of sharded parameters are dense",
}


class OptimizerWatch:
    """Connects one engine to every optimizer that holds its shards.

    Args:
        engine: The engine; held weakly, so that it lives no longer than its model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        _watches.add(self)
        _register_hooks_once()

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Optimizers that have stepped this engine's parameters."""
        return iter(list(self._seen))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer and its gradients before it steps this engine's shards."""
        engine = self._engine()
        if engine is None or not self._units(engine, optimizer):
            return
        if optimizer not in self._seen:
            _check_kind(engine, optimizer)
            _check_state(engine, optimizer)
            self._seen.add(optimizer)
        _check_in_place(engine, optimizer)
        engine.before_step()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which units an optimizer has changed."""
        engine = self._engine()
        if engine is None:
            return
        changed = self._units(engine, optimizer)
        if changed:
            engine.after_step(changed)

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


def _check_kind(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    is_divided = any(u.parameters and u.layout.num_owners > 1 for u in engine.units)
    for cls in type(optimizer).__mro__:
        reason = _REFUSED.get(cls.__name__)
        if reason is not None and (is_divided or reason is not _WHOLE_MATRIX):
            raise SpecError(
                f"{cls.__name__} cannot update a sharded model: {reason}. Use an elementwise "
                "optimizer, such as torch.optim.AdamW or SGD."
            )


def _check_state(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that was made for whole parameters, before the model was sharded."""
    for parameter, state in optimizer.state.items():
        unit = engine.unit_of_parameter.get(id(parameter))
        if unit is None:
            continue
        for key, value in state.items():
            is_elementwise = isinstance(value, torch.Tensor) and value.dim() > 0
            if is_elementwise and value.shape != parameter.shape:
                raise LifecycleError(
                    f"{type(optimizer).__name__} holds {key} of shape {tuple(value.shape)} for a "
                    f"parameter of unit {unit.name!r} whose shard has {tuple(parameter.shape)}: it "
                    "was made for whole parameters. Build the optimizer after sw.shard(), and "
                    "load no state of a plain model into it."
                )


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
