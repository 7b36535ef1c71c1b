"""Decide everything about a sharded model before anything is allocated or moved.

`draw` finds units, lays them out and plans memory; `check_model` refuses what can't be sharded.
Both are free of side effects, so that ranks can agree on the outcome first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import nn

from shardwright.core.errors import LifecycleError, SpecError, nearest
from shardwright.core.layout import ParameterSpec, UnitLayout, lay_out
from shardwright.core.memory import MemoryPlan, UnitNeeds, plan_memory
from shardwright.core.strategy import Gathered, Gradients, Strategy
from shardwright.runtime.lookup import engine_of
from shardwright.runtime.mesh import Mesh
from shardwright.runtime.precision import (
    Precision,
    dtype_name,
    find_kept_modules,
    kept_dtype,
    warn_if_masters_are_narrow,
)
from shardwright.runtime.settings import EngineSettings
from shardwright.runtime.transport.base import Axis, Transport
from shardwright.runtime.unit import Topology
from shardwright.runtime.units import (
    UnitModules,
    UnitsArgument,
    find_units,
    warn_if_one_unit_dominates,
)
from shardwright.runtime.whole import WholeArgument, choose_whole, warn_if_whole_pads

__all__ = ["Blueprint", "check_model", "describe_for_agreement", "draw"]


@dataclass(kw_only=True, slots=True, eq=False)
class Blueprint:
    """What was decided before anything is allocated."""

    modules: list[UnitModules]
    layouts: list[UnitLayout | None]
    needs: list[UnitNeeds]
    topology: Topology
    plan: MemoryPlan
    strategy: Strategy
    gathered: list[Gathered]
    kept: list[tuple[nn.Module, torch.dtype]]  # those that `Precision.keep` names


_REWRITING_MODULES = (
    "torch.nn.utils.weight_norm",
    "torch.nn.utils.spectral_norm",
    "torch.nn.utils.prune",
)
"""Older torch utilities that compute a weight in a hook before forward."""


def check_model(model: nn.Module, mesh: Mesh) -> None:
    """Raise `SpecError` or `LifecycleError` for a model that cannot be sharded on this rank."""
    if not isinstance(model, nn.Module):
        raise SpecError(f"shard() takes an nn.Module, found {type(model).__name__}")
    if engine_of(model) is not None:
        raise LifecycleError(
            f"this {type(model).__name__} is sharded already; call shard() once, on the whole model"
        )
    _check_modules(model)
    _check_tensors(model, mesh)


def _check_modules(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if engine_of(module) is not None:
            raise LifecycleError(
                f"sub-module {path!r} is sharded already; shard the whole model once and choose "
                "its units with units=..."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise SpecError(
                f"{path!r} has sparse=True; sharded gradients are dense. Set sparse=False."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise SpecError(
                f"{path!r} has max_norm={module.max_norm}, which rewrites its weight in forward, "
                "each rank for its own tokens. Set max_norm=None."
            )
        for hook in module._forward_pre_hooks.values():
            if type(hook).__module__ in _REWRITING_MODULES:
                raise SpecError(
                    f"{path!r} has {type(hook).__name__} from {type(hook).__module__}, which "
                    "rewrites its weight before forward, where it is still sharded. Use "
                    "torch.nn.utils.parametrizations, or prune for good before sw.shard()."
                )


def _check_tensors(model: nn.Module, mesh: Mesh) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise SpecError(
                f"{name!r} has a gradient, which sharding would drop; step or call "
                "model.zero_grad() before sw.shard()"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            continue  # `first_values` knows whether there are values for it
        if tensor.device.type != mesh.device.type or (
            tensor.is_cuda and tensor.device != mesh.device
        ):
            raise SpecError(
                f"{name!r} is on device {str(tensor.device)!r}, the mesh computes on "
                f"{str(mesh.device)!r}; call model.to({str(mesh.device)!r}) before sw.shard(), or "
                "pass device=... to sw.init_mesh()"
            )


def draw(
    model: nn.Module,
    strategy: Strategy,
    mesh: Mesh,
    units: UnitsArgument,
    precision: Precision,
    settings: EngineSettings,
    transport: Transport,
    whole: WholeArgument = None,
) -> Blueprint:
    """Find units, lay them out and plan memory; moves and allocates nothing."""
    modules = find_units(model, units)
    if not any(m.owned for m in modules):
        raise SpecError(f"{type(model).__name__} has no parameters to shard")
    topology = _topology(strategy, mesh)
    gathered = [_gathered_for(m, modules, strategy, settings, topology) for m in modules]
    kept = find_kept_modules(model, precision)
    in_kept = {id(p) for module in kept for p in module.parameters()}
    specs = _specify(modules, precision, in_kept, choose_whole(model, whole))
    layouts = _lay_out_units(modules, specs, topology)
    needs = [
        _needs(unit, layout, keeps, precision)
        for unit, layout, keeps in zip(modules, layouts, gathered, strict=True)
    ]
    warn_if_masters_are_narrow(model, precision)
    warn_if_whole_pads(layouts)
    if strategy.gathered is Gathered.USE and topology.shard.size > 1:
        itemsize = (precision.param or torch.float32).itemsize
        warn_if_one_unit_dominates(modules, itemsize)
    strategy, plan = _plan(needs, strategy, topology, settings, transport)
    return Blueprint(
        modules=modules,
        layouts=layouts,
        needs=needs,
        topology=topology,
        plan=plan,
        strategy=strategy,
        gathered=gathered,
        kept=[(module, kept_dtype(module)) for module in kept],
    )


def _specify(
    units: list[UnitModules], precision: Precision, in_kept: Set[int], owned_whole: Set[int]
) -> list[list[ParameterSpec]]:
    """What the layout needs to know of every parameter, by unit."""
    return [
        [
            ParameterSpec(
                name=owned.name,
                shape=tuple(owned.parameter.shape),
                dtype=dtype_name(
                    precision.compute_of(
                        owned.parameter.dtype, is_kept=id(owned.parameter) in in_kept
                    )
                ),
                trainable=owned.parameter.requires_grad,
                is_whole=id(owned.parameter) in owned_whole,
            )
            for owned in unit.owned
        ]
        for unit in units
    ]


def _lay_out_units(
    units: list[UnitModules], specs: list[list[ParameterSpec]], topology: Topology
) -> list[UnitLayout | None]:
    divided = topology.owners_per_shard > 1
    return [
        lay_out(
            unit.name,
            parameters,
            shard_size=topology.shard.size,
            owners_per_shard=topology.owners_per_shard,
            multiple=1 if divided else topology.replicate.size,
            turn=turn,
        )
        if parameters
        else None
        for turn, (unit, parameters) in enumerate(zip(units, specs, strict=True))
    ]


def _needs(
    unit: UnitModules, layout: UnitLayout | None, gathered: Gathered, precision: Precision
) -> UnitNeeds:
    master = precision.master or torch.float32
    for owned in unit.owned:
        if owned.parameter.requires_grad:
            master = torch.promote_types(master, precision.master_of(owned.parameter.dtype))
    return UnitNeeds(
        layout=layout,
        depth=unit.depth,
        gathered=gathered,
        master_dtype=dtype_name(master),
        reduce_dtype=dtype_name(precision.reduce or master),
    )


def _plan(
    needs: list[UnitNeeds],
    strategy: Strategy,
    topology: Topology,
    settings: EngineSettings,
    transport: Transport,
) -> tuple[Strategy, MemoryPlan]:
    """Plan memory, and decide where gradients live between micro-batches.

    A setting overrules the strategy; a memory budget chooses whole gradients, which are reduced
    once per step, where they fit into it.
    """
    ahead = max(
        settings.forward_prefetch,
        settings.backward_prefetch if settings.backward_prefetch_at == "pre" else 0,
    )

    def plan_for(gradients: Gradients) -> MemoryPlan:
        return plan_memory(
            needs,
            gradients=gradients,
            replicas=topology.replicate.size,
            gather_distance=min(ahead, settings.max_in_flight),
            reduce_distance=settings.reduce_in_flight,
            needs_staging=transport.needs_staging,
        )

    gradients = strategy.gradients
    if settings.accumulation is not None:
        gradients = Gradients(settings.accumulation)
    elif settings.memory_budget_gib is not None and topology.shard.size > 1:
        whole_bytes = sum(plan_for(Gradients.WHOLE).bytes_by_category.values())
        fits = whole_bytes <= settings.memory_budget_gib * 2**30
        gradients = Gradients.WHOLE if fits else Gradients.SHARDED
    return strategy.with_gradients(gradients), plan_for(gradients)


def _topology(strategy: Strategy, mesh: Mesh) -> Topology:
    """The mesh's data axes as the strategy sees them: without sharding, all are replicas."""
    if not strategy.shards_parameters:
        alone = Axis(name="shard", size=1, rank=0, group=None)
        data = mesh.data_axis
        replicas = dataclasses.replace(data, name="replicate")
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


def describe_for_agreement(
    model: nn.Module, blueprint: Blueprint, settings: EngineSettings, precision: Precision
) -> list[str]:
    """List what must be equal on all ranks, one fact a line, parameters in model order."""
    lines = [
        f"class {type(model).__name__}",
        f"strategy {blueprint.strategy.name}",
        f"settings {settings}",
        f"precision {precision}",
    ]
    lines += [
        f"parameter {name} of shape {tuple(p.shape)}, {p.dtype}, "
        f"{'trainable' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    ]
    lines += [
        f"unit {unit.name} of {', '.join(p.name for p in unit.owned)}" for unit in blueprint.modules
    ]
    lines += [
        f"parameter {place.spec.name} owned whole"
        for layout in blueprint.layouts
        if layout is not None
        for place in layout.placements
        if place.spec.is_whole
    ]
    lines += [
        f"buffer {name} of shape {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()
    ]
    return lines
