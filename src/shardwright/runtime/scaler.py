"""Loss scaling for float16, with one finite check for all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.runtime.lookup import require_engine
from shardwright.runtime.transport.control import gather_stack
from shardwright.runtime.units import ROOT

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch's gradient scaler for a sharded model.

    An overflow on one rank ends in the rows of one owner only, so ranks that looked at their own
    rows would disagree on whether to step. Here all look at what any of them found: all skip the
    same step and halve the scale together. It also skips steps without float16: give it
    ``init_scale=1.0, growth_factor=1.0 + 1e-9``.

    Use it as torch's: ``scaler.scale(loss).backward()``; ``scaler.unscale_(optimizer)`` before
    `clip_grad_norm_`; ``scaler.step(optimizer)``; ``scaler.update()``. Collective over the data
    ranks: `unscale_`, or `step` where that did not come before.

    Args:
        model: A sharded model.
        **options: Those of ``torch.amp.GradScaler``: `init_scale`, `growth_factor`,
            `backoff_factor`, `growth_interval`, `enabled`.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._engine = require_engine(model)
        super().__init__(device=self._engine.mesh.device.type, **options)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Divide this rank's gradients, and tell whether any rank's were not finite."""
        engine = self._engine
        engine.reducer.check_complete()
        with torch._C.DisableTorchFunctionSubclass():  # which would refuse: see `stray`
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        device = engine.mesh.device
        local = found.get(device, found_inf)  # absent where this rank holds no gradient
        with engine.waiting("all_gather of finite checks", ROOT):
            local.copy_(gather_stack(local, engine.mesh.data_axis).amax(0))
        return {**found, device: local}
