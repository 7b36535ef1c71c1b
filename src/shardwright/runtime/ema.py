"""Exponential moving averages of a sharded model's parameters, each rank averaging its own shards.

Averaging is elementwise, so that nothing is sent. The averages lie as the masters do: one flat
tensor per unit and trainable segment, in the masters' dtype, updated by one foreach for the whole
model. Frozen parameters never change and take no memory here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import LifecycleError, SpecError, nearest
from shardwright.runtime.lookup import engine_of, require_root

__all__ = ["EMA"]

_EXCHANGE_NUMEL = 1 << 20
"""Elements exchanged at a time: what `EMA.swapped` needs beside averages and masters."""


class EMA:
    """Averages of the trainable parameters of a sharded model.

    They begin as the parameters' values when this is made; each `update` takes them
    ``1 - decay`` of the way to the parameters as they are then. Module buffers, such as BatchNorm's
    statistics, are left alone.

        ema = sw.EMA(model, decay=0.999)
        for batch in batches:
            ...
            optimizer.step()
            ema.update()
        with ema.swapped():
            evaluate(model)

    Holds one more copy of this rank's trainable shards, `num_bytes` in all.

    Args:
        model: The model that was given to `shard`.
        decay: Share of the average that an update keeps, from 0 to 1.

    Attributes:
        decay: As given; may be changed between updates, such as to warm up.
        num_updates: Updates so far.
        averages: By parameter name, this rank's rows of the average: views, which updates change.

    Raises:
        LifecycleError: The model isn't sharded, or is a part of a sharded one.
        SpecError: The decay is out of range.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        engine = require_root(model, "sw.EMA()", "for plain modules use torch.optim.swa_utils")
        if not 0.0 <= decay <= 1.0:
            raise SpecError(f"decay must be from 0 to 1, found {decay}")
        self.decay = decay
        self.num_updates = 0
        self.averages: dict[str, torch.Tensor] = {}
        self._engine = engine
        self._is_swapped = False
        self._masters: list[torch.Tensor] = []
        self._averages: list[torch.Tensor] = []
        self._changed = [u.index for u in engine.units if u.trainable]
        for index in self._changed:
            unit = engine.units[index]
            pieces = list(unit.owned_masters)
            for segment in unit.layout.trainable_segments:
                average = unit.owned_masters[segment].detach().clone()
                self._masters.append(unit.owned_masters[segment])
                self._averages.append(average)
                pieces[segment] = average
            rows = unit.own_rows(pieces)
            names = [owned.name for owned in unit.modules.owned]
            self.averages.update({names[i]: rows[i] for i in unit.trainable})

    @property
    def num_bytes(self) -> int:
        """Bytes of the averages on this rank, padding included."""
        return sum(a.numel() * a.element_size() for a in self._averages)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters: call it after ``optimizer.step()``.

        Lane: compute. Local to each rank.
        """
        self._require_live("update()")
        torch._foreach_lerp_(self._averages, self._masters, 1.0 - self.decay)
        self.num_updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the parameters be the averages inside a ``with`` block, and themselves again after.

        Enter it on all ranks; forward passes, `unsharded` and what saves the model then see the
        averages. Values are exchanged in place, so that no second copy is made. Gathered values
        are dropped, on the way in and out; optimizers must not step inside.

        Raises:
            LifecycleError: Swapped already, a pass is under way, or parameters were changed
                inside: such changes have gone to the averages.
        """
        self._require_live("swapped()")
        self._exchange()
        self._is_swapped = True
        generation = self._engine.generation
        try:
            yield
        finally:
            was_changed = self._engine.generation != generation or self._were_written()
            self._is_swapped = False
            self._exchange()
        if was_changed:
            raise LifecycleError(
                "parameters were changed inside ema.swapped(), by an optimizer or by hand, which "
                "changed the averages in their place; leave the block before training goes on"
            )

    def state_dict(self) -> dict[str, Any]:
        """This rank's averages by parameter name, and the counts: what `load_state_dict` takes.

        They are rows, so that they fit the same mesh, strategy and units only. For a file that
        fits any, save the model itself inside `swapped`.
        """
        self._require_live("state_dict()")
        return {
            "decay": self.decay,
            "num_updates": self.num_updates,
            "averages": dict(self.averages),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rank of an equal run gave.

        Args:
            state: The state; its tensors are copied.

        Raises:
            SpecError: Names or shapes differ. Nothing is taken over then.
        """
        self._require_live("load_state_dict()")
        found = dict(state["averages"])
        different = sorted({*found} ^ {*self.averages})
        if different:
            name = different[0]
            kind, others = ("unexpected", self.averages) if name in found else ("missing", found)
            raise SpecError(
                f"averages of another model: {name!r} is {kind}; {nearest(name, others)}"
            )
        for name, average in self.averages.items():
            if found[name].shape != average.shape:
                raise SpecError(
                    f"the average of {name!r} has shape {tuple(found[name].shape)}, this rank's "
                    f"rows have {tuple(average.shape)}: it is of another mesh, strategy or choice "
                    "of units. Save the model inside ema.swapped() to move averages between these."
                )
        for name, average in self.averages.items():
            average.copy_(found[name])
        self.decay, self.num_updates = float(state["decay"]), int(state["num_updates"])

    def _require_live(self, what: str) -> None:
        if self._is_swapped:
            raise LifecycleError(f"ema.{what} came inside ema.swapped(); leave that block first")
        if engine_of(self._engine.model) is not self._engine:
            raise LifecycleError(
                f"ema.{what} came after unshard_(), which took the shards away; make the averages "
                "anew when the model is sharded again"
            )
        self._engine.require_idle(f"ema.{what}")

    def _were_written(self) -> bool:
        """Whether parameters were written to in place since they were last looked at."""
        return any(self._engine.units[i].was_written() for i in self._changed)

    @torch.no_grad()
    def _exchange(self) -> None:
        engine = self._engine
        engine.let_sends_finish()
        for master, average in zip(self._masters, self._averages, strict=True):
            halves = zip(master.split(_EXCHANGE_NUMEL), average.split(_EXCHANGE_NUMEL), strict=True)
            for ours, theirs in halves:
                kept = ours.clone()
                ours.copy_(theirs)
                theirs.copy_(kept)
        engine.values_changed(self._changed)
