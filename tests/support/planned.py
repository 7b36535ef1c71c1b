"""Record the actions of a real step and plan the same step. Runs on ranks."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.app.models import Decoder
from shardwright.app.plan_request import decoder_shape
from shardwright.app.presets import DecoderConfig
from shardwright.app.tracing import trace_model
from shardwright.core.errors import SpecError
from shardwright.core.layout import UnitLayout
from shardwright.planner.cluster import make_cluster
from shardwright.planner.job import Job
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.plan_file import as_document
from shardwright.planner.predict import predict
from shardwright.planner.schedule import ScheduleUnit, make_schedule
from shardwright.planner.units import find_units
from shardwright.planner.workload import PrecisionSpec, WorkloadSpec
from shardwright.runtime.lookup import engine_of
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
    planned = find_units(decoder_shape(config), layout, "fp32", layers=config.layers)
    return (
        [_sizes(unit.layout) for unit in engine.units if unit.layout is not None],
        [_sizes(unit.layout) for unit in planned],
    )


def _sizes(layout: UnitLayout) -> tuple[int, int, int]:
    return layout.numel, layout.padding_numel, layout.gradient_numel


def recorded_and_planned(
    strategy: str,
    shape: tuple[int, int],
    micro_batches: int,
    *,
    recomputes: bool,
    tied: bool,
    settings: dict[str, Any] | None = None,
) -> tuple[list[str], list[str]]:
    """Actions of the third step of training, and the planner's for the same units."""
    model = Decoder(TIED if tied else CONFIG)
    sw.shard(model, strategy=strategy, mesh=mesh_of(shape), **(settings or {}))
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
    followed = engine.policy.settings
    planned = make_schedule(
        tuple(
            ScheduleUnit(
                name=unit.name,
                slot=unit.slot,
                gathered=unit.gathered,
            )
            for unit in engine.policy.units
        ),
        gradients=followed.gradients,
        replicas=followed.replicas,
        optimizer_over_replicas=followed.optimizer_over_replicas,
        forward_prefetch=followed.forward_prefetch,
        backward_prefetch=followed.backward_prefetch,
        micro_batches=micro_batches,
        backward_prefetch_after=followed.backward_prefetch_after,
        max_in_flight=followed.max_in_flight,
        has_root_head=tied,
    )
    return recorded, [str(action) for action in planned]


SEQ_LEN = 8


def plan_of(
    strategy: str,
    shape: tuple[int, int],
    *,
    config: DecoderConfig = CONFIG,
    traced: bool = False,
    param: str = "fp32",
    micro_batches: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """A plan file's content for training the decoder, as a reader of the file has it."""
    precision = PrecisionSpec(param=param)
    model = decoder_shape(config)
    if traced:
        tokens = torch.zeros(2, SEQ_LEN, dtype=torch.long)
        model = trace_model(Decoder(config), ((tokens,), {}), param=param)
    job = Job(
        model=model,
        cluster=make_cluster("a100-80", shape[0] * shape[1]),
        workload=WorkloadSpec(
            seq_len=SEQ_LEN, micro_batch=2, accumulation=micro_batches, precision=precision
        ),
        layout=LayoutSpec(
            strategy=strategy,
            replicate=shape[0],
            shard=shape[1],
            transport="pairwise",
            **settings,
        ),
    )
    return json.loads(json.dumps(as_document(predict(job))))


def reconciled(
    strategy: str,
    shape: tuple[int, int],
    *,
    micro_batches: int = 1,
    param: str = "fp32",
    evaluations: int = 0,
    plan: dict[str, Any] | None = None,
    traced: bool = True,
    **settings: Any,
) -> list[tuple[str, int, int, int, str]]:
    """Train as planned; every row of the ledger: name, planned, computed, counted, reason."""
    document = plan or plan_of(
        strategy, shape, traced=traced, param=param, micro_batches=micro_batches, **settings
    )
    model = Decoder(CONFIG)
    run = sw.read_plan(document)
    sw.shard(model, mesh=sw.init_mesh(**run.mesh_arguments), **run.shard_arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.zeros(2, SEQ_LEN, dtype=torch.long)
    for _ in range(3):
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if is_last else sw.accumulate(model):
                model(tokens).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for _ in range(evaluations):
            model(tokens)
    found = sw.ledger(model).reconcile(document)
    assert str(found)
    return [
        (f"{r.section}: {r.name}", r.planned or 0, r.computed, r.counted, r.reason)
        for r in found.rows
    ]


def stack_of_blocks() -> nn.Module:
    """No decoder: a first layer, blocks with blocks inside, and a last layer."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    return nn.Sequential(nn.Linear(16, 32), block(), block(), block(), nn.Linear(32, 4))


def traced_stack_and_run(
    strategy: str,
) -> tuple[list[str], list[str], list[tuple[str, int, int, int, str]]]:
    """Recorded and planned actions of a step of that stack, and the ledger's rows."""
    model = stack_of_blocks()
    inputs = torch.zeros(4, 16)
    job = Job(
        model=trace_model(model, ((inputs,), {}), param="fp32"),
        cluster=make_cluster("a100-80", 2),
        workload=WorkloadSpec(seq_len=1, micro_batch=4, precision=PrecisionSpec(param="fp32")),
        layout=LayoutSpec(strategy=strategy, shard=2, transport="pairwise"),
    )
    prediction = predict(job)
    document = as_document(prediction)
    sw.shard(model, mesh=mesh_of((1, 2)), **sw.read_plan(document).shard_arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(model)
    assert engine is not None
    for step in range(3):
        if step == 2:
            engine.policy.trace = []
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    recorded = [str(action) for action in engine.policy.trace or ()]
    found = sw.ledger(model).reconcile(document)
    rows = [
        (f"{r.section}: {r.name}", r.planned or 0, r.computed, r.counted, r.reason)
        for r in found.rows
    ]
    return recorded, [str(action) for action in prediction.stage.actions()], rows


def error_of(plan: dict[str, Any], strategy: str, shape: tuple[int, int]) -> str:
    """What the ledger says of a plan for another job."""
    model = sw.shard(Decoder(CONFIG), strategy=strategy, mesh=mesh_of(shape))
    try:
        sw.ledger(model).reconcile(plan)
    except SpecError as error:
        return str(error)
    return ""
