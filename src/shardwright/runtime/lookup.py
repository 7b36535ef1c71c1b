"""Which engine runs a module."""

from __future__ import annotations

from torch import nn

from shardwright.core.errors import LifecycleError
from shardwright.runtime.engine import Engine

__all__ = ["ENGINE_ATTRIBUTE", "engine_of", "require_engine", "require_root"]

ENGINE_ATTRIBUTE = "_shardwright_engine"
"""Instance attribute under which every module of a sharded model knows its engine."""


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that runs a module, or None for a plain one."""
    return module.__dict__.get(ENGINE_ATTRIBUTE)


_SHARD_FIRST = "call model = sw.shard(model, ...) first"


def require_engine(module: nn.Module, remedy: str = _SHARD_FIRST) -> Engine:
    """The engine that runs a module.

    Args:
        module: The module.
        remedy: What to do with a plain one, for the message.

    Raises:
        LifecycleError: It is a plain one.
    """
    engine = engine_of(module) if isinstance(module, nn.Module) else None
    if engine is None:
        raise LifecycleError(
            f"expected a module sharded by sw.shard(), found a plain {type(module).__name__}; "
            f"{remedy}"
        )
    return engine


def require_root(model: nn.Module, what: str, remedy: str = _SHARD_FIRST) -> Engine:
    """The engine of a model that was given to `shard` itself.

    Args:
        model: The model.
        what: What is asked of it, for the message.
        remedy: What to do with a plain one.

    Raises:
        LifecycleError: It is a plain one, or only a part of a sharded one.
    """
    engine = require_engine(model, remedy)
    if engine.model is not model:
        raise LifecycleError(
            f"this {type(model).__name__} is part of a sharded {type(engine.model).__name__}; call "
            f"{what} on the model that was given to shard()"
        )
    return engine
