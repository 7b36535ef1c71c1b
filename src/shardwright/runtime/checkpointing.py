"""Activation checkpointing by block, without wrapper modules: names in state dicts stay the same.

A block's forward is replaced on the instance, inside the unit's own wrapper where the model is
sharded. So recomputation runs while the block's parameters are gathered for its backward, costs no
further gather, and may be asked for before or after `shard`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardwright.core.errors import LifecycleError, SpecError, nearest
from shardwright.runtime.engine import UnitForward
from shardwright.runtime.units import UnitsArgument, find_blocks

__all__ = ["Policy", "checkpoint_blocks"]

Policy = str | Callable[..., Any]
"""``"full"``, ``"selective"``, or a policy function as torch's selective checkpointing takes."""

_EXPENSIVE = (
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operators whose results ``"selective"`` keeps: products of matrices, and attention."""


class CheckpointedForward:
    """Stands in for a block's forward: keeps its inputs, and computes the rest again."""

    def __init__(self, inner: Callable[..., Any], options: dict[str, Any]) -> None:
        self.inner = inner
        self.options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; plainly where no backward may follow.

        Raises:
            LifecycleError: It has a cache, under a policy that keeps results by their order.
        """
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if self.options and kwargs.get("use_cache"):
            raise LifecycleError(
                "this block was given a cache of keys and values, which recomputation would find "
                "filled already; train with model.config.use_cache = False, or checkpoint with "
                "policy='full'"
            )
        return checkpoint(self.inner, *args, use_reentrant=False, **self.options, **kwargs)


def checkpoint_blocks(model: nn.Module, units: UnitsArgument, policy: Policy) -> int:
    """Checkpoint the activations of a model's blocks.

    Args:
        model: The model, sharded or not.
        units: Which blocks; see `find_blocks`.
        policy: What is kept.

    Returns:
        How many blocks are checkpointed now.

    Raises:
        SpecError: The policy is unknown, or no block is found.
        LifecycleError: A block is checkpointed already.
    """
    options = _options(policy)
    blocks = find_blocks(model, units)
    if not blocks:
        raise SpecError(
            f"found no repeated block in {type(model).__name__} to checkpoint; name the blocks' "
            "class with units=..."
        )
    for block in blocks:
        if isinstance(_innermost(block), CheckpointedForward):
            raise LifecycleError(
                f"a {type(block).__name__} is checkpointed already; call checkpoint_activations() "
                "once per model"
            )
    for block in blocks:
        current = block.__dict__.get("forward")
        if isinstance(current, UnitForward):
            current.inner = CheckpointedForward(current.inner, options)
        else:
            block.__dict__["forward"] = CheckpointedForward(block.forward, options)
    return len(blocks)


def _innermost(block: nn.Module) -> object:
    current = block.__dict__.get("forward")
    return current.inner if isinstance(current, UnitForward) else current


def _options(policy: Policy) -> dict[str, Any]:
    if policy == "full":
        return {}
    if policy == "selective":
        aten = torch.ops.aten
        kept: Any = [getattr(aten, name).default for name in _EXPENSIVE if hasattr(aten, name)]
    elif callable(policy):
        kept = policy
    else:
        raise SpecError(
            f"policy must be 'full', 'selective' or a function, found {policy!r}; "
            f"{nearest(str(policy), ('full', 'selective'))}"
        )
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, kept)}
