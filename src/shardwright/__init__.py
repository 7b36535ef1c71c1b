"""Sharded training for PyTorch that says what a run costs, runs it and accounts for it.

Public names are loaded on first use, so that commands which need no torch start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwright.core.errors import (
    CheckpointError,
    LaunchError,
    LayoutError,
    LifecycleError,
    PlanInfeasible,
    RankFailedError,
    RankMismatchError,
    ShardwrightError,
    SpecError,
)

if TYPE_CHECKING:
    from shardwright.app.launch import launch
    from shardwright.app.plan import plan
    from shardwright.runtime.api import (
        accumulate,
        backward,
        checkpoint_activations,
        clip_grad_norm_,
        describe,
        ledger,
        shard,
        unshard_,
        unsharded,
    )
    from shardwright.runtime.deferred import materialize_, meta_init
    from shardwright.runtime.ema import EMA
    from shardwright.runtime.ledger import Ledger
    from shardwright.runtime.loading import load_safetensors
    from shardwright.runtime.mesh import Mesh, init_mesh
    from shardwright.runtime.planned import read_plan
    from shardwright.runtime.precision import Precision
    from shardwright.runtime.scaler import GradScaler
    from shardwright.runtime.uneven import even_batches

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "CheckpointError",
    "GradScaler",
    "LaunchError",
    "LayoutError",
    "Ledger",
    "LifecycleError",
    "Mesh",
    "PlanInfeasible",
    "Precision",
    "RankFailedError",
    "RankMismatchError",
    "ShardwrightError",
    "SpecError",
    "__version__",
    "accumulate",
    "backward",
    "checkpoint_activations",
    "clip_grad_norm_",
    "describe",
    "even_batches",
    "init_mesh",
    "launch",
    "ledger",
    "load_safetensors",
    "materialize_",
    "meta_init",
    "plan",
    "read_plan",
    "shard",
    "unshard_",
    "unsharded",
]

_HOMES = {
    "EMA": "shardwright.runtime.ema",
    "GradScaler": "shardwright.runtime.scaler",
    "Ledger": "shardwright.runtime.ledger",
    "Mesh": "shardwright.runtime.mesh",
    "Precision": "shardwright.runtime.precision",
    "accumulate": "shardwright.runtime.api",
    "backward": "shardwright.runtime.api",
    "checkpoint_activations": "shardwright.runtime.api",
    "clip_grad_norm_": "shardwright.runtime.api",
    "describe": "shardwright.runtime.api",
    "even_batches": "shardwright.runtime.uneven",
    "init_mesh": "shardwright.runtime.mesh",
    "launch": "shardwright.app.launch",
    "ledger": "shardwright.runtime.api",
    "load_safetensors": "shardwright.runtime.loading",
    "materialize_": "shardwright.runtime.deferred",
    "meta_init": "shardwright.runtime.deferred",
    "plan": "shardwright.app.plan",
    "read_plan": "shardwright.runtime.planned",
    "shard": "shardwright.runtime.api",
    "unshard_": "shardwright.runtime.api",
    "unsharded": "shardwright.runtime.api",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'shardwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
