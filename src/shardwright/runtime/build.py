"""Build an engine: lay out units, allocate what the plan says, move values into shards.

Runs once, in `shard`. Everything that can be wrong on one rank only is checked before the first
parameter moves, and ranks agree on the outcome, so that `shard` fails on all ranks or on none and
leaves the model as it was.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwright.core.errors import SpecError
from shardwright.core.policy import Policy, PolicySettings, PolicyUnit
from shardwright.core.strategy import Strategy
from shardwright.core.volume import UnitTraffic
from shardwright.runtime.blueprint import Blueprint, check_model, describe_for_agreement, draw
from shardwright.runtime.buffers import Buffers
from shardwright.runtime.engine import Engine
from shardwright.runtime.failure import Waiting
from shardwright.runtime.first_values import (
    FirstValues,
    LocalValues,
    agree_on_first_values,
    find_local_values,
)
from shardwright.runtime.gradients import GradientReducer
from shardwright.runtime.install import install
from shardwright.runtime.lanes import Lanes
from shardwright.runtime.ledger import Ledger, LedgerSources
from shardwright.runtime.mesh import Mesh
from shardwright.runtime.optimizers import OptimizerWatch
from shardwright.runtime.parameter import mark_sharded
from shardwright.runtime.precision import Precision, cast_buffers
from shardwright.runtime.settings import EngineSettings
from shardwright.runtime.transport.base import Transport
from shardwright.runtime.transport.collective import CollectiveTransport
from shardwright.runtime.transport.control import agree
from shardwright.runtime.transport.pairwise import PairwiseTransport
from shardwright.runtime.unit import ShardedUnit
from shardwright.runtime.unit_gradients import UnitGradients
from shardwright.runtime.units import ROOT, UnitsArgument
from shardwright.runtime.whole import WholeArgument

__all__ = ["build_engine"]


def build_engine(
    model: nn.Module,
    *,
    strategy: Strategy,
    mesh: Mesh,
    units: UnitsArgument,
    precision: Precision,
    settings: EngineSettings,
    whole: WholeArgument = None,
    initialize: bool = True,
) -> Engine:
    """Shard a model in place.

    Collective over the mesh's data axes.

    Args:
        model: A module on the mesh's device, or on the meta device; see `first_values`.
        strategy: Placement of state.
        mesh: Mesh.
        units: How to divide the model; see `find_units`.
        precision: Dtypes.
        settings: Settings.
        whole: Which parameters one owner has whole; see `choose_whole`.
        initialize: False leaves parameters on the meta device NaN, to be loaded.

    Returns:
        The engine that now runs the model's units.

    Raises:
        ShardwrightError: Something is wrong here or on another rank; the model is unchanged.
    """
    if mesh.monitor.broken is not None:
        raise mesh.monitor.broken
    transport = _choose_transport(settings, mesh)
    error: Exception | None = None
    lines: list[str] = []
    blueprint: Blueprint | None = None
    local: LocalValues | None = None
    try:
        check_model(model, mesh)
        blueprint = draw(model, strategy, mesh, units, precision, settings, transport, whole)
        lines = describe_for_agreement(model, blueprint, settings, precision)
        lines.append(f"initialize {initialize}")
        local = find_local_values(model, blueprint.modules)
    except Exception as found:  # noqa: BLE001  # a user's predicate may raise anything
        error = found
    with mesh.monitor.explaining("agreement on the model", ROOT):
        agree(mesh.data_axis, lines, error, "shard the model")
        assert blueprint is not None
        assert local is not None
        first_values = agree_on_first_values(
            local, mesh, is_broadcast=settings.broadcast_init, is_initialized=initialize
        )
    return _construct(model, blueprint, mesh, precision, settings, transport, first_values)


def _choose_transport(settings: EngineSettings, mesh: Mesh) -> Transport:
    is_cpu = mesh.device.type == "cpu"
    kind = settings.transport
    if kind == "auto":
        kind = "pairwise" if is_cpu else "collective"
    if kind == "pairwise":
        if not is_cpu:
            raise SpecError(
                "transport='pairwise' needs CPU tensors and gloo; use 'collective' on CUDA"
            )
        return PairwiseTransport()
    return CollectiveTransport()


def _construct(
    model: nn.Module,
    blueprint: Blueprint,
    mesh: Mesh,
    precision: Precision,
    settings: EngineSettings,
    transport: Transport,
    first_values: FirstValues,
) -> Engine:
    buffers = Buffers(mesh.device)
    plan = blueprint.plan
    if precision.buffer is not None:
        cast_buffers(model, precision.buffer)
    first_values.fill_buffers(model)

    def allocate(category: str, sizes: tuple[int, ...]) -> list[torch.Tensor]:
        return [buffers.allocate(category, size, torch.uint8) for size in sizes]

    slots = allocate("parameter_slots", plan.parameter_slots.sizes)
    gradient_buffers = allocate("gradient_buffers", plan.gradient_buffers.sizes)
    staging = allocate("staging", plan.staging.sizes)
    replicate_staging = allocate("staging", plan.replicate_staging.sizes)

    units: list[ShardedUnit] = []
    for index, (modules, layout, needs) in enumerate(
        zip(blueprint.modules, blueprint.layouts, blueprint.needs, strict=True)
    ):
        unit = ShardedUnit(
            index=index,
            modules=modules,
            layout=layout,
            gathered=blueprint.gathered[index],
            topology=blueprint.topology,
            master=getattr(torch, needs.master_dtype),
        )
        units.append(unit)
        if layout is None:
            continue
        slot = plan.parameter_slots.slot_of[index]
        unit.bind_parameters(slot, slots[slot], buffers, transport)
        for position, owned in enumerate(modules.owned):
            first_values.store(unit, position)
            owned.parameter.grad = None
            mark_sharded(
                owned.parameter,
                global_shape=layout.placements[position].spec.shape,
                rows=layout.rows(position, blueprint.topology.owner),
                is_owned_whole=layout.owns_whole(position, blueprint.topology.owner),
                unit_name=unit.name,
                full_name=owned.name,
            )
        if unit.trainable:
            unit.gradient = _bind_gradients(
                unit, blueprint, gradient_buffers, staging, replicate_staging, buffers, transport
            )
    for unit in units:
        unit.was_written()  # what building wrote is no change
    return _assemble(model, blueprint, mesh, precision, settings, transport, units, buffers, slots)


def _bind_gradients(
    unit: ShardedUnit,
    blueprint: Blueprint,
    gradient_buffers: list[torch.Tensor],
    staging: list[torch.Tensor],
    replicate_staging: list[torch.Tensor],
    buffers: Buffers,
    transport: Transport,
) -> UnitGradients:
    dtype = getattr(torch, blueprint.needs[unit.index].reduce_dtype)
    plan = blueprint.plan

    def pick(memory: list[torch.Tensor], slot: int) -> torch.Tensor | None:
        if slot < 0:
            return None
        size = memory[slot].numel() // dtype.itemsize * dtype.itemsize
        return memory[slot][:size].view(dtype)

    gradient = UnitGradients(unit, blueprint.strategy.gradients, dtype)
    gradient.slot = plan.gradient_buffers.slot_of[unit.index]
    gradient.staging_slot = plan.staging.slot_of[unit.index]
    gradient.replicate_staging_slot = plan.replicate_staging.slot_of[unit.index]
    buffer = pick(gradient_buffers, gradient.slot)
    assert buffer is not None, f"unit {unit.name} was planned no gradient buffer"
    gradient.bind(
        buffer,
        pick(staging, gradient.staging_slot),
        pick(replicate_staging, gradient.replicate_staging_slot),
        buffers,
        transport,
    )
    return gradient


def _assemble(
    model: nn.Module,
    blueprint: Blueprint,
    mesh: Mesh,
    precision: Precision,
    settings: EngineSettings,
    transport: Transport,
    units: list[ShardedUnit],
    buffers: Buffers,
    slots: list[torch.Tensor],
) -> Engine:
    """Connect units, policy, lanes, ledger and hooks into an engine."""
    topology = blueprint.topology
    policy = Policy(
        tuple(
            PolicyUnit(
                name=u.name,
                slot=u.slot,
                parent=u.modules.parent,
                trainable=bool(u.trainable),
                gathered=u.gathered,
            )
            for u in units
        ),
        PolicySettings(
            gradients=blueprint.strategy.gradients,
            replicas=topology.replicate.size,
            optimizer_over_replicas=topology.owners_per_shard > 1,
            forward_prefetch=settings.forward_prefetch,
            backward_prefetch=settings.backward_prefetch,
            backward_prefetch_after=settings.backward_prefetch_at == "post",
            max_in_flight=settings.max_in_flight,
            forgets_on_reshard=settings.poison_released,
        ),
    )
    lanes = Lanes(mesh.device, len(units), len(slots))
    ledger = Ledger()
    waiting = Waiting(ledger, mesh.monitor)
    reducer = GradientReducer(
        num_data_ranks=mesh.data_size,
        device=mesh.device,
        max_in_flight=settings.reduce_in_flight,
        lanes=lanes,
        ledger=ledger,
        monitor=mesh.monitor,
        waiting=waiting,
    )
    reducer.attach(units)
    engine = Engine(
        model=model,
        units=units,
        policy=policy,
        lanes=lanes,
        reducer=reducer,
        ledger=ledger,
        waiting=waiting,
        buffers=buffers,
        slots=slots,
        transport=transport,
        precision=precision,
        mesh=mesh,
        strategy=blueprint.strategy,
        poisons_released=settings.poison_released,
    )
    watch = OptimizerWatch(engine)
    engine.hook_handles.append(watch)
    last_in_slot = {u.slot: u.index for u in units if u.parameters}
    ledger.attach(
        LedgerSources(
            buffers=buffers,
            plan=blueprint.plan,
            traffic=tuple(
                UnitTraffic(
                    layout=u.layout,
                    gathered=u.gathered,
                    is_resident_at_turn=not settings.poison_released
                    and last_in_slot[u.slot] == u.index,
                    reduce_itemsize=needs.reduce_itemsize,
                )
                for u, needs in zip(units, blueprint.needs, strict=True)
                if u.parameters
            ),
            gradients=blueprint.strategy.gradients,
            replicas=topology.replicate.size,
            optimizers=watch.optimizers,
            units=lambda: engine.units,
            is_held=policy.is_held,
        )
    )
    install(model, engine, direct_gradients=settings.direct_gradients, kept=blueprint.kept)
    return engine
