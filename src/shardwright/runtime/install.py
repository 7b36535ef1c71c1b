"""Put an engine into a model: wrapped forwards, guarded state dicts, loud misuse."""

from __future__ import annotations

from torch import nn

from shardwright.runtime.direct_linear import DirectLinear
from shardwright.runtime.engine import Engine, UnitForward
from shardwright.runtime.unit import ShardedUnit
from shardwright.runtime.unit_gradients import StrayUseGuard, UnitGradients

__all__ = ["engine_of", "install", "uninstall"]

_ATTRIBUTE = "_shardwright_engine"
"""Instance attribute under which every module of a sharded model knows its engine."""


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that runs a module, or None for a plain one."""
    return module.__dict__.get(_ATTRIBUTE)


def install(model: nn.Module, engine: Engine, *, direct_gradients: bool) -> None:
    """Wrap forwards, guard state dicts and let modules know their engine."""
    for unit in engine.units:
        if direct_gradients and unit.gradient is not None:
            _write_directly(unit, unit.gradient)
        module = unit.modules.module
        module.__dict__["forward"] = UnitForward(engine, unit, module.forward)
    handles = engine.hook_handles
    for module in model.modules():
        module.__dict__[_ATTRIBUTE] = engine
        handles.append(module.register_state_dict_pre_hook(_guard_state_dict))
        handles.append(module.register_load_state_dict_pre_hook(_guard_load_state_dict))
    for unit in engine.units:
        for owned in unit.modules.owned:
            if owned.parameter.requires_grad:
                guard = StrayUseGuard(owned.name)
                handles.append(owned.parameter.register_post_accumulate_grad_hook(guard))


def uninstall(engine: Engine) -> None:
    """Undo `install`."""
    for handle in engine.hook_handles:
        handle.remove()
    engine.hook_handles.clear()
    for module in engine.model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)
        forward = module.__dict__.get("forward")
        while isinstance(forward, (UnitForward, DirectLinear)):
            forward = forward.inner
        if getattr(forward, "__self__", None) is module:
            module.__dict__.pop("forward", None)  # the class's own, bound
        elif forward is not None:
            module.__dict__["forward"] = forward


def _write_directly(unit: ShardedUnit, gradient: UnitGradients) -> None:
    """Let plain Linear layers of a unit write their weights' gradients into its buffer."""
    for k, position in enumerate(unit.trainable):
        for module, name in unit.modules.owned[position].locations:
            is_plain = type(module) is nn.Linear and "forward" not in module.__dict__
            if is_plain and name == "weight":
                assert isinstance(module, nn.Linear)
                module.__dict__["forward"] = DirectLinear(module, gradient.sinks[k])


def _guard_state_dict(module: nn.Module, *_: object) -> None:
    engine = module.__dict__[_ATTRIBUTE]
    engine.require_unsharded(module, "state_dict()")


def _guard_load_state_dict(module: nn.Module, *_: object) -> None:
    engine = module.__dict__[_ATTRIBUTE]
    engine.require_unsharded(module, "load_state_dict()")
