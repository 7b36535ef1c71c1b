"""Put an engine into a model: wrapped forwards, guarded state dicts, loud misuse."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn

from shardwright.runtime.compiling import is_compiled
from shardwright.runtime.direct_linear import DirectLinear
from shardwright.runtime.engine import Engine, UnitForward
from shardwright.runtime.later_changes import RefuseChanges, refuse_additions
from shardwright.runtime.lookup import ENGINE_ATTRIBUTE
from shardwright.runtime.precision import CastForward
from shardwright.runtime.stray import StrayReads
from shardwright.runtime.unit import ShardedUnit
from shardwright.runtime.unit_gradients import StrayUseGuard, UnitGradients
from shardwright.runtime.units import OwnedParameter

__all__ = ["install", "uninstall"]


def install(
    model: nn.Module,
    engine: Engine,
    *,
    direct_gradients: bool,
    kept: Iterable[tuple[nn.Module, torch.dtype]],
) -> None:
    """Wrap forwards, guard state dicts and let modules know their engine.

    Args:
        model: The model.
        engine: What runs it from now on.
        direct_gradients: Whether Linear layers write their weights' gradients themselves.
        kept: Modules that compute in a dtype of their own, and that dtype.
    """
    for unit in engine.units:
        if direct_gradients and unit.gradient is not None:
            _write_directly(unit, unit.gradient)
    for module, dtype in kept:
        module.__dict__["forward"] = CastForward(module, dtype, engine.precision.param)
    for unit in engine.units:
        module = unit.modules.module
        forward = UnitForward(engine, unit, module.forward)
        if is_compiled(module):
            forward.give_way_to_compiler()
        module.__dict__["forward"] = forward
        module.__dict__["compile"] = forward.compile
    refuse_additions()
    handles = engine.hook_handles
    for module in model.modules():
        module.__dict__[ENGINE_ATTRIBUTE] = engine
        module.__dict__["_apply"] = RefuseChanges(module)
        handles.append(module.register_state_dict_pre_hook(_guard_state_dict))
        handles.append(module.register_load_state_dict_pre_hook(_guard_load_state_dict))
    for unit in engine.units:
        for owned in unit.modules.owned:
            if owned.parameter.requires_grad:
                guard = StrayUseGuard(owned.name)
                handles.append(owned.parameter.register_post_accumulate_grad_hook(guard))
            if unit.layout.num_owners > 1:
                _make_reads_loud(unit, owned)


def uninstall(engine: Engine) -> None:
    """Undo `install`."""
    for handle in engine.hook_handles:
        handle.remove()
    engine.hook_handles.clear()
    for module in engine.model.modules():
        module.__dict__.pop(ENGINE_ATTRIBUTE, None)
        module.__dict__.pop("_apply", None)
        module.__dict__["_parameters"] = dict(module._parameters)
        forward = module.__dict__.get("forward")
        if isinstance(forward, UnitForward):
            module.__dict__.pop("compile", None)
        while isinstance(forward, (UnitForward, DirectLinear, CastForward)):
            forward = forward.inner
        if getattr(forward, "__self__", None) is module:
            module.__dict__.pop("forward", None)  # the class's own, bound
        elif forward is not None:
            module.__dict__["forward"] = forward


def _make_reads_loud(unit: ShardedUnit, owned: OwnedParameter) -> None:
    """Notice reads outside the unit; see [Note: stray reads] in `stray`."""
    for module, _ in owned.locations:
        if not isinstance(module._parameters, StrayReads):
            is_full = functools.partial(getattr, unit, "is_unsharded_by_user")
            module.__dict__["_parameters"] = StrayReads(module._parameters, is_full)


def _write_directly(unit: ShardedUnit, gradient: UnitGradients) -> None:
    """Let plain Linear layers of a unit write their weights' gradients into its buffer."""
    for k, position in enumerate(unit.trainable):
        for module, name in unit.modules.owned[position].locations:
            is_plain = type(module) is nn.Linear and "forward" not in module.__dict__
            if is_plain and name == "weight":
                assert isinstance(module, nn.Linear)
                module.__dict__["forward"] = DirectLinear(module, gradient.sinks[k])


def _guard_state_dict(module: nn.Module, *_: object) -> None:
    engine = module.__dict__[ENGINE_ATTRIBUTE]
    engine.require_unsharded(module, "state_dict()")


def _guard_load_state_dict(module: nn.Module, *_: object) -> None:
    engine = module.__dict__[ENGINE_ATTRIBUTE]
    engine.require_unsharded(module, "load_state_dict()")
