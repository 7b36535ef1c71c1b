"""Changes to a model after `shard` that training would not reach: refused where they are made.

The engine owns the parameters it was given. A layer added later would train on each rank alone, and
a cast would move parameters out of the engine's memory: both without a word. What holds no
parameters, or changes none, is let through.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwright.core.errors import LifecycleError
from shardwright.runtime.lookup import ENGINE_ATTRIBUTE, engine_of

__all__ = ["RefuseChanges", "refuse_additions"]


class RefuseChanges:
    """A module's ``_apply``, which ``to``, ``half``, ``to_empty`` and the like go through.

    Args:
        module: A module of a sharded model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        """Apply a function that leaves every parameter's dtype, device and memory alone.

        Raises:
            LifecycleError: It would change one.
        """
        module = self._module
        tried = set()
        for name, parameter in module.named_parameters(recurse=recurse):
            kind = (parameter.dtype, parameter.device, parameter.dim())
            if kind not in tried:
                tried.add(kind)
                probe = torch.empty((2,) * parameter.dim(), dtype=kind[0], device=kind[1])
                with torch.no_grad():
                    _check_same(name, probe, fn(probe))
        applied: nn.Module = type(module)._apply(module, fn, recurse)
        return applied


@cache
def refuse_additions() -> None:
    """Watch the registration of modules and parameters, once per process.

    torch calls these hooks for every module; they do nothing outside sharded models.
    """
    register_module_module_registration_hook(_check_module)
    register_module_parameter_registration_hook(_check_parameter)


def _check_module(parent: nn.Module, name: str, added: nn.Module | None) -> None:
    engine = engine_of(parent)
    if engine is None or added is None:
        return
    if any(id(p) not in engine.unit_of_parameter for p in added.parameters()):
        raise LifecycleError(
            f"{name!r}, a {type(added).__name__} with parameters of its own, was put into a "
            f"{type(parent).__name__} of a sharded model: they would be each rank's own. "
            "Change the model before sw.shard(), or make it plain with sw.unshard_(model) and "
            "shard it again."
        )
    for module in added.modules():
        module.__dict__.setdefault(ENGINE_ATTRIBUTE, engine)


def _check_parameter(module: nn.Module, name: str, added: nn.Parameter | None) -> None:
    if added is None or engine_of(module) is None:
        return
    if module._parameters.get(name) is None:
        raise LifecycleError(
            f"parameter {name!r} was put into a {type(module).__name__} of a sharded model: it "
            "would be each rank's own. Add it before sw.shard(), or make the model plain "
            "with sw.unshard_(model) and shard it again."
        )


def _check_same(name: str, before: torch.Tensor, after: torch.Tensor) -> None:
    if after.dtype != before.dtype:
        change = f"from {before.dtype} to {after.dtype}"
        remedy = f"or compute in it with precision=sw.Precision(param={after.dtype})"
    elif after.device != before.device:
        change = f"from {before.device} to {after.device}"
        remedy = "with a mesh on that device"
    elif after.data_ptr() != before.data_ptr():
        change = "to other memory"
        remedy = "or change values inside sw.unsharded(model, writeback=True)"
    else:
        return
    raise LifecycleError(
        f"{name!r} would be moved {change}, out of the memory that training reaches; call .to(), "
        f".half() and the like before sw.shard(), {remedy}"
    )
