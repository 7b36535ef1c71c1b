"""Full parameters on every rank for a while, to look at, save, generate from or write to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.core.errors import LifecycleError
from shardwright.runtime.engine import Engine
from shardwright.runtime.install import uninstall
from shardwright.runtime.parameter import mark_plain
from shardwright.runtime.transport.base import Axis, Piece
from shardwright.runtime.unit import ShardedUnit

__all__ = ["make_plain", "unsharded_units"]

_COLLECTIVE = "all_gather (unsharded)"
_TAG = 1 << 20  # apart from the tags of units' own operations


@contextmanager
def unsharded_units(engine: Engine, module: nn.Module, *, writeback: bool) -> Iterator[None]:
    """Replace the shards of a module's parameters by full parameters, in the masters' dtype.

    Collective over the data axes.

    Args:
        engine: The engine.
        module: The model or any sub-module.
        writeback: Take over changes made to the full parameters when the context ends; every
            rank must have made the same.
    """
    inside = {id(m) for m in module.modules()}
    units = [
        u
        for u in engine.units
        if any(id(m) in inside for o in u.modules.owned for m, _ in o.locations)
        or (not u.parameters and id(u.modules.module) in inside)
    ]
    for unit in units:
        if unit.is_shadowed or engine.policy.is_open(unit.index):
            raise LifecycleError(
                f"unit {unit.name!r} is computing; enter sw.unsharded() outside forward "
                "and backward"
            )
    already = [u for u in units if u.is_unsharded_by_user]
    units = [u for u in units if not u.is_unsharded_by_user]
    full: dict[int, list[nn.Parameter | None]] = {u.index: [*_gather(engine, u)] for u in units}
    try:
        for unit in units:
            _register(unit, full[unit.index])
            unit.is_unsharded_by_user = True
        yield
    finally:
        for unit in units:
            full[unit.index] = [
                owned.locations[0][0]._parameters[owned.locations[0][1]]
                for owned in unit.modules.owned
            ]
            unit.is_unsharded_by_user = False
            _register(unit, unit.parameters)
    if writeback:
        if already:
            raise LifecycleError(
                f"unit {already[0].name!r} was unsharded by an enclosing sw.unsharded(); ask for "
                "writeback=True there"
            )
        _write_back(engine, units, full)


def make_plain(engine: Engine) -> None:
    """Give every parameter its full value and take the engine out of the model.

    Collective over the data axes.

    Args:
        engine: The engine; of no more use afterwards.
    """
    engine.require_idle("unshard_()")
    engine.let_sends_finish()
    for unit in engine.units:
        full = _gather(engine, unit)
        for parameter, value, dtype in zip(
            unit.parameters, full, unit.original_dtypes, strict=True
        ):
            parameter.grad = None
            parameter.data = value.data.to(dtype, copy=True)
            mark_plain(parameter)
    uninstall(engine)


def _gather(engine: Engine, unit: ShardedUnit) -> list[nn.Parameter]:
    """Gather one unit's masters into memory of its own; nothing for a unit that owns none."""
    if not unit.parameters:
        return []
    layout, topology = unit.layout, unit.topology
    wholes, over_replicas, over_shards = [], [], []
    for i, segment in enumerate(layout.segments):
        owned = unit.owned_masters[i]
        whole = owned.new_empty(segment.numel)
        chunk_numel = segment.chunk_numel * layout.owners_per_shard
        chunk = whole[topology.shard.rank * chunk_numel :][:chunk_numel]
        over_replicas.append(Piece(whole=chunk, own=owned))
        over_shards.append(Piece(whole=whole, own=chunk))
        wholes.append(whole)
    replicate = topology.replicate
    if layout.owners_per_shard == 1:
        replicate = Axis(name="replicate", size=1, rank=0, group=None)
    for pieces, axis in ((over_replicas, replicate), (over_shards, topology.shard)):
        operation = engine.transport.all_gather(pieces, axis, _TAG + unit.index)
        with engine.waiting(_COLLECTIVE, unit.name):
            operation.start()
            operation.finish()
            operation.release()
        if axis.size > 1:
            engine.ledger.count(_COLLECTIVE, axis.name, unit, operation)
            own_bytes = sum(p.own.numel() * p.own.element_size() for p in pieces)
            engine.ledger.expect(_COLLECTIVE, axis.name, own_bytes * (axis.size - 1))
    return [
        nn.Parameter(wholes[p.segment][p.start : p.stop].view(p.spec.shape), requires_grad=False)
        for p in layout.placements
    ]


def _register(unit: ShardedUnit, parameters: Sequence[nn.Parameter | None]) -> None:
    for owned, parameter in zip(unit.modules.owned, parameters, strict=True):
        for module, name in owned.locations:
            module._parameters[name] = parameter


def _write_back(
    engine: Engine, units: list[ShardedUnit], full: dict[int, list[nn.Parameter | None]]
) -> None:
    engine.let_sends_finish()
    with torch.no_grad():
        for unit in units:
            for position, parameter in enumerate(full[unit.index]):
                spec = unit.layout.placements[position].spec
                if parameter is None or tuple(parameter.shape) != spec.shape:
                    found = "nothing" if parameter is None else tuple(parameter.shape)
                    raise LifecycleError(
                        f"{spec.name!r} must keep its shape {spec.shape} inside sw.unsharded(), "
                        f"found {found}"
                    )
                unit.store(position, parameter)
    engine.values_changed([u.index for u in units])
