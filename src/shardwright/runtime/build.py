"""Build an engine: lay out units, allocate what the plan says, move values into shards.

Runs once, in `shard`. Everything that can be wrong on one rank only is checked before the first
parameter moves, and ranks agree on the outcome, so that `shard` fails on all ranks or on none and
leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import nn

from shardwright.core.errors import LifecycleError, ShardwrightError, SpecError, nearest
from shardwright.core.layout import ParameterSpec, UnitLayout, lay_out
from shardwright.core.memory import MemoryPlan, UnitNeeds, plan_memory
from shardwright.core.policy import Policy, PolicySettings, PolicyUnit
from shardwright.core.strategy import Gathered, Gradients, Strategy
from shardwright.core.volume import UnitTraffic
from shardwright.runtime.buffers import Buffers
from shardwright.runtime.direct_linear import DirectLinear
from shardwright.runtime.engine import Engine, UnitForward
from shardwright.runtime.gradients import GradientReducer
from shardwright.runtime.lanes import Lanes
from shardwright.runtime.ledger import Ledger, LedgerSources
from shardwright.runtime.mesh import Mesh
from shardwright.runtime.optimizers import OptimizerWatch
from shardwright.runtime.parameter import mark_sharded
from shardwright.runtime.precision import Precision, cast_buffers, dtype_name, master_dtype
from shardwright.runtime.transport.base import Axis, Transport
from shardwright.runtime.transport.collective import CollectiveTransport
from shardwright.runtime.transport.control import agree, broadcast_
from shardwright.runtime.transport.pairwise import PairwiseTransport
from shardwright.runtime.unit import ShardedUnit, Topology
from shardwright.runtime.units import (
    UnitModules,
    UnitsArgument,
    find_units,
    warn_if_one_unit_dominates,
)

__all__ = ["EngineSettings", "build_engine"]

ENGINE_ATTRIBUTE = "_shardwright_engine"
"""Instance attribute under which every module of a sharded model knows its engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Settings of the engine, final once the model is sharded.

    Attributes:
        forward_prefetch: Units gathered ahead in forward.
        backward_prefetch: Units gathered ahead in backward.
        backward_prefetch_at: ``"pre"``: the next unit's gather starts before a unit's backward
            and hides behind it; ``"post"``: after it, which needs no second slot.
        max_in_flight: Bound on gathers started and not yet used.
        reduce_in_flight: Reductions left unfinished while another unit computes; each costs one
            more gradient buffer.
        residency: Names of units that stay gathered between forward and backward.
        reshard_after_backward: False keeps parameters gathered until the optimizer step, so that
            they are gathered once per step; None leaves it to the strategy.
        accumulation: ``"whole"`` or ``"sharded"`` gradients between micro-batches; None leaves
            it to the strategy.
        direct_gradients: Let Linear layers write weight gradients into the reduce buffer.
        transport: ``"auto"``, ``"pairwise"`` or ``"collective"``.
        broadcast_init: Take first values of parameters and buffers from the first data rank.
    """

    forward_prefetch: int = 1
    backward_prefetch: int = 1
    backward_prefetch_at: Literal["pre", "post"] = "pre"
    max_in_flight: int = 2
    reduce_in_flight: int = 1
    residency: tuple[str, ...] = ()
    reshard_after_backward: bool | None = None
    accumulation: Literal["whole", "sharded"] | None = None
    direct_gradients: bool = True
    transport: Literal["auto", "pairwise", "collective"] = "auto"
    broadcast_init: bool = True

    def __post_init__(self) -> None:
        choices = {
            "backward_prefetch_at": ("pre", "post"),
            "transport": ("auto", "pairwise", "collective"),
            "accumulation": ("whole", "sharded", None),
        }
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise SpecError(
                    f"{name} must be one of {', '.join(map(repr, valid))}, found "
                    f"{getattr(self, name)!r}"
                )
        for name, least in (
            ("forward_prefetch", 0),
            ("backward_prefetch", 0),
            ("max_in_flight", 1),
            ("reduce_in_flight", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SpecError(f"{name} must be a whole number from {least}, found {value!r}")

    @classmethod
    def from_options(cls, options: dict[str, object]) -> EngineSettings:
        """Build from keyword arguments, naming the nearest valid one for a wrong one."""
        valid = [f.name for f in fields(cls)]
        for name in options:
            if name not in valid:
                raise SpecError(f"shard() has no setting {name!r}; {nearest(name, valid)}")
        if "residency" in options:
            residency = options["residency"]
            if isinstance(residency, str) or not isinstance(residency, Iterable):
                raise SpecError(f"residency must be a list of unit names, found {residency!r}")
            options = {**options, "residency": tuple(residency)}
        return cls(**options)  # type: ignore[arg-type]


@dataclass(kw_only=True, slots=True, eq=False)
class _Blueprint:
    """What was decided before anything is allocated."""

    modules: list[UnitModules]
    layouts: list[UnitLayout | None]
    needs: list[UnitNeeds]
    topology: Topology
    plan: MemoryPlan
    strategy: Strategy
    gathered: list[Gathered]


def build_engine(
    model: nn.Module,
    *,
    strategy: Strategy,
    mesh: Mesh,
    units: UnitsArgument,
    precision: Precision,
    settings: EngineSettings,
) -> Engine:
    """Shard a model in place.

    Collective over the mesh's data axes.

    Args:
        model: A materialised module on the mesh's device.
        strategy: Placement of state.
        mesh: Mesh.
        units: How to divide the model; see `find_units`.
        precision: Dtypes.
        settings: Settings.

    Returns:
        The engine that now runs the model's units.

    Raises:
        ShardwrightError: Something is wrong here or on another rank; the model is unchanged.
    """
    transport = _choose_transport(settings, mesh)
    error: ShardwrightError | None = None
    lines: list[str] = []
    blueprint = None
    try:
        _check_model(model, mesh)
        blueprint = _draw(model, strategy, mesh, units, precision, settings, transport)
        lines = _describe_for_agreement(model, blueprint, settings, precision)
    except ShardwrightError as found:
        error = found
    agree(mesh.data_axis, lines, error, "shard the model")
    assert blueprint is not None
    return _construct(model, blueprint, mesh, precision, settings, transport)


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


def _check_model(model: nn.Module, mesh: Mesh) -> None:
    if not isinstance(model, nn.Module):
        raise SpecError(f"shard() takes an nn.Module, found {type(model).__name__}")
    if ENGINE_ATTRIBUTE in model.__dict__:
        raise LifecycleError(
            f"this {type(model).__name__} is sharded already; call shard() once, on the whole model"
        )
    for path, module in model.named_modules():
        if ENGINE_ATTRIBUTE in module.__dict__:
            raise LifecycleError(
                f"sub-module {path!r} is sharded already; shard the whole model once and choose "
                "its units with units=..."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise SpecError(
                f"{path!r} has sparse=True; sharded gradients are dense. Set sparse=False."
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise SpecError(
                f"{name!r} is on the meta device and has no values; build the model on "
                f"{str(mesh.device)!r} before sw.shard()"
            )
        if tensor.device.type != mesh.device.type or (
            tensor.is_cuda and tensor.device != mesh.device
        ):
            raise SpecError(
                f"{name!r} is on device {str(tensor.device)!r}, the mesh computes on "
                f"{str(mesh.device)!r}; call model.to({str(mesh.device)!r}) before sw.shard(), or "
                "pass device=... to sw.init_mesh()"
            )


def _draw(
    model: nn.Module,
    strategy: Strategy,
    mesh: Mesh,
    units: UnitsArgument,
    precision: Precision,
    settings: EngineSettings,
    transport: Transport,
) -> _Blueprint:
    modules = find_units(model, units)
    if not any(m.owned for m in modules):
        raise SpecError(f"{type(model).__name__} has no parameters to shard")
    strategy = strategy.with_gradients(
        None if settings.accumulation is None else Gradients(settings.accumulation)
    )
    topology = _topology(strategy, mesh)
    gathered = [_gathered_for(m, modules, strategy, settings, topology) for m in modules]
    multiple = 1 if topology.owners_per_shard > 1 else topology.replicate.size
    layouts, needs = [], []
    for unit, keeps in zip(modules, gathered, strict=True):
        specs = [_spec(p.name, p.parameter, precision) for p in unit.owned]
        layout = (
            lay_out(
                unit.name,
                specs,
                shard_size=topology.shard.size,
                owners_per_shard=topology.owners_per_shard,
                multiple=multiple,
            )
            if specs
            else None
        )
        master = torch.float32
        for owned in unit.owned:
            master = torch.promote_types(master, master_dtype(owned.parameter.dtype))
        layouts.append(layout)
        needs.append(
            UnitNeeds(
                layout=layout,
                depth=unit.depth,
                gathered=keeps,
                master_dtype=dtype_name(master),
                reduce_dtype=dtype_name(precision.reduce or master),
            )
        )
    if strategy.gathered is Gathered.USE and topology.shard.size > 1:
        itemsize = (precision.param or torch.float32).itemsize
        warn_if_one_unit_dominates(modules, itemsize)
    ahead = max(
        settings.forward_prefetch,
        settings.backward_prefetch if settings.backward_prefetch_at == "pre" else 0,
    )
    plan = plan_memory(
        needs,
        gradients=strategy.gradients,
        replicas=topology.replicate.size,
        gather_distance=min(ahead, settings.max_in_flight),
        reduce_distance=settings.reduce_in_flight,
        needs_staging=transport.needs_staging,
    )
    return _Blueprint(
        modules=modules,
        layouts=layouts,
        needs=needs,
        topology=topology,
        plan=plan,
        strategy=strategy,
        gathered=gathered,
    )


def _topology(strategy: Strategy, mesh: Mesh) -> Topology:
    """The mesh's data axes as the strategy sees them: without sharding, all are replicas."""
    if not strategy.shards_parameters:
        alone = Axis(name="shard", size=1, rank=0, group=None)
        data = mesh.data_axis
        replicas = Axis(name="replicate", size=data.size, rank=data.rank, group=data.group)
        return Topology(shard=alone, reduce=alone, replicate=replicas, owners_per_shard=1)
    divided = strategy.optimizer_over_replicas
    return Topology(
        shard=mesh.shard_axis,
        reduce=mesh.reduce_axis,
        replicate=mesh.replicate_axis,
        owners_per_shard=mesh.replicate if divided else 1,
    )


def _gathered_for(
    unit: UnitModules,
    units: list[UnitModules],
    strategy: Strategy,
    settings: EngineSettings,
    topology: Topology,
) -> Gathered:
    names = [u.name for u in units]
    for name in settings.residency:
        if name not in names:
            raise SpecError(f"residency names no unit {name!r}; {nearest(name, names)}")
    keeps = strategy.gathered
    reshard = settings.reshard_after_backward
    if reshard is False and keeps is Gathered.USE:
        raise SpecError(
            f"reshard_after_backward=False keeps every unit gathered, which strategy "
            f"{strategy.name!r} is there to avoid; use zero2, or name units in residency=[...]"
        )
    if topology.shard.size == 1 or (reshard is False and keeps is Gathered.BACKWARD):
        return Gathered.STEP
    if reshard is True and keeps is Gathered.STEP:
        return Gathered.BACKWARD
    if unit.name in settings.residency and keeps is Gathered.USE:
        return Gathered.BACKWARD
    return keeps


def _spec(name: str, parameter: nn.Parameter, precision: Precision) -> ParameterSpec:
    is_float = parameter.dtype.is_floating_point
    dtype = precision.param if precision.param is not None and is_float else parameter.dtype
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=dtype_name(dtype),
        trainable=parameter.requires_grad,
    )


def _describe_for_agreement(
    model: nn.Module, blueprint: _Blueprint, settings: EngineSettings, precision: Precision
) -> list[str]:
    lines = [
        f"class {type(model).__name__}",
        f"strategy {blueprint.strategy.name}",
        f"settings {settings}",
        f"precision {precision}",
    ]
    for unit in blueprint.modules:
        lines.append(f"unit {unit.name}")
        lines += [
            f"parameter {p.name} of shape {tuple(p.parameter.shape)}, {p.parameter.dtype}, "
            f"{'trainable' if p.parameter.requires_grad else 'frozen'}"
            for p in unit.owned
        ]
    lines += [
        f"buffer {name} of shape {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()
    ]
    return lines


def _construct(
    model: nn.Module,
    blueprint: _Blueprint,
    mesh: Mesh,
    precision: Precision,
    settings: EngineSettings,
    transport: Transport,
) -> Engine:
    buffers = Buffers(mesh.device)
    plan = blueprint.plan
    if precision.buffer is not None:
        cast_buffers(model, precision.buffer)
    if settings.broadcast_init:
        for buffer in model.buffers():
            broadcast_(buffer, mesh.data_axis)

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
        reduce = getattr(torch, needs.reduce_dtype)
        unit = ShardedUnit(
            index=index,
            modules=modules,
            layout=layout,
            gathered=blueprint.gathered[index],
            gradients=blueprint.strategy.gradients,
            topology=blueprint.topology,
            master=getattr(torch, needs.master_dtype),
            reduce=reduce,
        )
        units.append(unit)
        if layout is None:
            continue
        values = [p.detach().contiguous() for p in unit.parameters]
        if settings.broadcast_init:
            for value in values:
                broadcast_(value, mesh.data_axis)
        slot = plan.parameter_slots.slot_of[index]
        unit.bind_parameters(slot, slots[slot], values, buffers, transport)
        del values
        for position, (owned, shard) in enumerate(zip(modules.owned, unit.shards, strict=True)):
            owned.parameter.data = shard
            owned.parameter.grad = None
            mark_sharded(
                owned.parameter,
                global_shape=layout.placements[position].spec.shape,
                rows=layout.rows(position, blueprint.topology.owner),
                unit_name=unit.name,
                full_name=owned.name,
            )
        if not unit.trainable:
            continue

        def pick(memory: list[torch.Tensor], slot: int, dtype: torch.dtype = reduce) -> torch.Tensor:
            size = memory[slot].numel() // dtype.itemsize * dtype.itemsize
            return memory[slot][:size].view(dtype)

        unit.gradient_slot = plan.gradient_buffers.slot_of[index]
        unit.staging_slot = plan.staging.slot_of[index]
        unit.replicate_staging_slot = plan.replicate_staging.slot_of[index]
        unit.bind_gradients(
            pick(gradient_buffers, unit.gradient_slot),
            pick(staging, unit.staging_slot) if unit.staging_slot >= 0 else None,
            pick(replicate_staging, unit.replicate_staging_slot)
            if unit.replicate_staging_slot >= 0
            else None,
            buffers,
            transport,
        )
    return _assemble(model, blueprint, mesh, precision, settings, transport, units, buffers, slots)


def _assemble(
    model: nn.Module,
    blueprint: _Blueprint,
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
        ),
    )
    lanes = Lanes(mesh.device, len(units), len(slots))
    ledger = Ledger()
    reducer = GradientReducer(
        num_data_ranks=mesh.data_size,
        max_in_flight=settings.reduce_in_flight,
        lanes=lanes,
        ledger=ledger,
    )
    engine = Engine(
        model=model,
        units=units,
        policy=policy,
        lanes=lanes,
        reducer=reducer,
        ledger=ledger,
        buffers=buffers,
        slots=slots,
        transport=transport,
        precision=precision,
        mesh=mesh,
        strategy=blueprint.strategy,
    )
    engine.watch = watch = OptimizerWatch(engine)
    last_in_slot = {u.slot: u.index for u in units if u.parameters}
    ledger.attach(
        LedgerSources(
            buffers=buffers,
            plan=blueprint.plan,
            traffic=tuple(
                UnitTraffic(
                    layout=u.layout,
                    gathered=u.gathered,
                    is_resident_at_turn=last_in_slot[u.slot] == u.index,
                    reduce_itemsize=u.reduce_dtype.itemsize,
                )
                for u in units
                if u.parameters
            ),
            gradients=blueprint.strategy.gradients,
            replicas=topology.replicate.size,
            optimizers=watch.optimizers,
            units=lambda: engine.units,
        )
    )
    _install(model, engine, direct_gradients=settings.direct_gradients)
    return engine


def _install(model: nn.Module, engine: Engine, *, direct_gradients: bool) -> None:
    """Wrap forwards, guard state dicts and let modules know their engine."""
    for unit in engine.units:
        module = unit.modules.module
        module.__dict__["forward"] = UnitForward(engine, unit, module.forward)
        if not direct_gradients:
            continue
        for owned, position in zip(unit.modules.owned, range(len(unit.parameters)), strict=True):
            k = unit.trainable_index.get(position)
            for owner, name in owned.locations:
                if k is not None and name == "weight" and _is_plain_linear(owner):
                    owner.__dict__["forward"] = DirectLinear(owner, unit.sinks[k])
    for module in model.modules():
        module.__dict__[ENGINE_ATTRIBUTE] = engine
        module.register_state_dict_pre_hook(_guard_state_dict)
        module.register_load_state_dict_pre_hook(_guard_load_state_dict)
    for unit in engine.units:
        for owned in unit.modules.owned:
            if owned.parameter.requires_grad:
                owned.parameter.register_post_accumulate_grad_hook(_refuse_stray_use(owned.name))


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and "forward" not in module.__dict__


def _guard_state_dict(module: nn.Module, *_: object) -> None:
    engine = module.__dict__[ENGINE_ATTRIBUTE]
    engine.require_unsharded(module, "state_dict()")


def _guard_load_state_dict(module: nn.Module, *_: object) -> None:
    engine = module.__dict__[ENGINE_ATTRIBUTE]
    engine.require_unsharded(module, "load_state_dict()")


def _refuse_stray_use(name: str):  # type: ignore[no-untyped-def]
    def refuse(_: torch.Tensor) -> None:
        raise LifecycleError(
            f"a gradient reached the shard of {name!r} directly: the parameter was used outside "
            "the forward of its unit, where it holds only this rank's rows. Use it inside that "
            "forward, or make the modules that share it one unit with units=..."
        )

    return refuse
