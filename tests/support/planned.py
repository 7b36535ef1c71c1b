"""Record the actions of a real step and plan the same step. Runs on ranks."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

import shardwright as sw
from shardwright.app.models import Decoder
from shardwright.app.plan import _decoder
from shardwright.app.presets import DecoderConfig
from shardwright.core.layout import UnitLayout
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.schedule import ScheduleUnit, make_schedule
from shardwright.planner.units import find_units
from shardwright.runtime.install import engine_of
from tests.support.parity import mesh_of

CONFIG = DecoderConfig(
    vocab_size=64, hidden=32, layers=4, heads=2, kv_heads=2, ffn_hidden=48, max_seq_len=16
)
TIED = replace(CONFIG, tie_embeddings=True)


def built_and_planned_units(
    strategy: str, shape: tuple[int, int], *, tied: bool
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Elements, padding and gradient elements of each unit: the engine's and the planner's."""
    config = TIED if tied else CONFIG
    model = Decoder(config)
    sw.shard(model, strategy=strategy, mesh=mesh_of(shape))
    engine = engine_of(model)
    assert engine is not None
    layout = LayoutSpec(strategy=strategy, replicate=shape[0], shard=shape[1])
    planned = find_units(_decoder(config), layout, "fp32", layers=config.layers)
    return (
        [_sizes(unit.layout) for unit in engine.units if unit.layout is not None],
        [_sizes(unit.layout) for unit in planned],
    )


def _sizes(layout: UnitLayout) -> tuple[int, int, int]:
    return layout.numel, layout.padding_numel, layout.gradient_numel


def recorded_and_planned(
    strategy: str, shape: tuple[int, int], micro_batches: int, *, recomputes: bool, tied: bool
) -> tuple[list[str], list[str]]:
    """Actions of the third step of training, and the planner's for the same units."""
    model = Decoder(TIED if tied else CONFIG)
    sw.shard(model, strategy=strategy, mesh=mesh_of(shape))
    if recomputes:
        sw.checkpoint_activations(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(model)
    assert engine is not None
    for step in range(3):
        if step == 2:
            engine.policy.trace = []
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if is_last else sw.accumulate(model):
                model(torch.zeros(2, 8, dtype=torch.long)).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    recorded = [str(action) for action in engine.policy.trace or ()]
    settings = engine.policy.settings
    planned = make_schedule(
        tuple(
            ScheduleUnit(
                name=unit.name,
                slot=unit.slot,
                gathered=unit.gathered,
            )
            for unit in engine.policy.units
        ),
        gradients=settings.gradients,
        replicas=settings.replicas,
        optimizer_over_replicas=settings.optimizer_over_replicas,
        forward_prefetch=settings.forward_prefetch,
        backward_prefetch=settings.backward_prefetch,
        micro_batches=micro_batches,
        has_root_head=tied,
    )
    return recorded, [str(action) for action in planned]
