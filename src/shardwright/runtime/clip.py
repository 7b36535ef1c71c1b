"""The norm of the whole model's gradient, from what each rank holds."""

from __future__ import annotations

import functools
import math

import torch

from shardwright.core.errors import SpecError
from shardwright.runtime.engine import Engine
from shardwright.runtime.transport.base import Axis
from shardwright.runtime.transport.control import gather_stack
from shardwright.runtime.units import ROOT

__all__ = ["clip_gradients"]


def clip_gradients(
    engine: Engine, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`.

    Each rank sums over the rows it owns; partial sums are gathered in rank order, so that the
    result is bitwise equal on all ranks.

    Args:
        engine: The engine.
        max_norm: Largest norm allowed, more than 0.
        norm_type: Order of the norm, more than 0; ``math.inf`` for the largest element.
        error_if_nonfinite: Raise, on all ranks, if the norm is NaN or infinite.

    Returns:
        Scalar tensor: the norm before clipping, the same on every rank.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise SpecError(
            f"clip_grad_norm_ needs max_norm and norm_type above 0, found {max_norm} and "
            f"{norm_type}"
        )
    gradients = [p.grad for unit in engine.units for p in unit.parameters if p.grad is not None]
    local = _partial_norm(gradients, norm_type, engine.buffers.device)
    for axis in _owner_axes(engine):
        with engine.waiting("all_gather of norms", ROOT):
            stacked = gather_stack(local, axis)
        local = stacked.amax(0) if math.isinf(norm_type) else stacked.sum(0)
    norm = local if math.isinf(norm_type) else local ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {norm.item()}, so gradients cannot be "
            "clipped; lower the learning rate or skip this step"
        )
    if gradients:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for dtype in {g.dtype for g in gradients}:
            same = [g for g in gradients if g.dtype == dtype]
            torch._foreach_mul_(same, scale.to(dtype))
    return norm.to(_result_dtype(gradients))


def _partial_norm(
    gradients: list[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Sum of ``|g| ** norm_type`` over this rank's rows, or their largest, in float64."""
    filled = [g for g in gradients if g.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    with torch._C.DisableTorchFunctionSubclass():  # which would refuse: see `stray`
        norms = torch.stack(torch._foreach_norm(filled, norm_type)).double()
    return norms.amax() if math.isinf(norm_type) else (norms**norm_type).sum()


def _owner_axes(engine: Engine) -> list[Axis]:
    """Axes over which gradients are divided."""
    topology = engine.units[0].topology
    axes = [topology.shard]
    if topology.owners_per_shard > 1:
        axes.append(topology.replicate)
    return axes


def _result_dtype(gradients: list[torch.Tensor]) -> torch.dtype:
    """The widest of the gradients', as in plain torch."""
    dtypes = [g.dtype for g in gradients] or [torch.float32]
    return functools.reduce(torch.promote_types, dtypes)
