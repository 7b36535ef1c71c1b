"""Scenarios that aren't one training run beside another."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.correctness.engines.base import Engine, Setup
from benchmarks.correctness.findings import (
    Finding,
    NotApplicable,
    Planted,
    compare_tensors,
    first_line,
)
from benchmarks.correctness.models import Block, Buffered, Stack
from benchmarks.correctness.training import ROWS, Training, World, build, compare_training, data

__all__ = [
    "buffers_from_meta",
    "first_values",
    "names_under_checkpointing",
    "one_rank_raises",
    "one_rank_raises_and_stays",
    "runs_out_of_data",
]

BOUND_S = 10.0
"""Up to which other ranks may wait before they raise too."""
STAY = dt.timedelta(seconds=600)
"""How long the rank that raised would live on; the cell ends first."""


def buffers_from_meta(engine: Engine, world: World) -> list[Finding]:
    """Compare parameters and buffers with the first rank's; fresh memory is full of NaN."""
    torch.use_deterministic_algorithms(True)  # fills what is allocated and not written
    truth = build(Buffered, engine.dtype)
    expected = {**dict(truth.named_parameters()), **dict(truth.named_buffers())}

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        if world.rank == 0:
            return build(Buffered, engine.dtype)
        with torch.device("meta"):
            return build(Buffered, engine.dtype)

    session = engine.prepare_from_meta(make, Setup(), world.rank)
    buffers = {k.replace("_fsdp_wrapped_module.", ""): v for k, v in _buffers(session.inner)}
    state = session.full_state()
    found = {k: buffers[k] if k in buffers else state[k] for k in expected}
    return compare_tensors("parameters and buffers", expected, found, tolerance=0.0)


def _buffers(model: Any) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_buffers())


def first_values(engine: Engine, _: World) -> list[Finding]:
    """Compare first parameters on all ranks with those on one, by the same procedure."""
    alone = engine.initialise(lambda: Stack().to(engine.dtype), 7, alone=True)
    found = engine.initialise(lambda: Stack().to(engine.dtype), 7, alone=False)
    return compare_tensors("first parameters", alone, found, tolerance=0.0)


def names_under_checkpointing(engine: Engine, world: World) -> list[Finding]:
    """Train with recomputed activations, compare names, then load a plain model's state."""
    setup = Setup(checkpoints=(Block,))
    findings = compare_training(Training(setup=setup), engine, world)
    session = engine.prepare(build(Stack, engine.dtype), setup)
    torch.manual_seed(5)
    other = Stack().to(engine.dtype).state_dict()
    with contextlib.suppress(NotApplicable):
        session.load_full_state({k: v.clone() for k, v in other.items()})
        findings += compare_tensors("loaded", other, session.full_state(), tolerance=0.0)
    return findings


def one_rank_raises(engine: Engine, world: World) -> list[Finding]:
    """The last rank raises in a block's forward and ends; how soon do the others raise?"""
    return _one_rank_raises(engine, world, stays=False)


def one_rank_raises_and_stays(engine: Engine, world: World) -> list[Finding]:
    """The same, but the rank catches its exception and stays alive."""
    return _one_rank_raises(engine, world, stays=True)


def _one_rank_raises(engine: Engine, world: World, *, stays: bool) -> list[Finding]:
    session = engine.prepare(build(Stack, engine.dtype), Setup())
    x = data(0, ROWS, engine.dtype)
    dist.barrier()
    started_s = time.monotonic()
    try:
        for step in range(3):
            if step == 1 and world.rank == world.ranks - 1:
                session.inner.blocks[2].register_forward_hook(_raise)
            session.backward((session.module(x) ** 2).mean())
            session.step()
            session.zero_grad()
        message = "did not raise"
        took_s = float("inf")
    except Planted:
        if not stays:
            raise
        _store().wait([f"raised {rank}" for rank in range(world.ranks - 1)], STAY)
        return []
    except Exception as error:  # noqa: BLE001 - whatever the engine raises is what is measured
        message = f"{type(error).__name__}: {first_line(str(error))}"
        took_s = time.monotonic() - started_s
    _store().set(f"raised {world.rank}", "")
    named = f"rank {world.ranks - 1}" in message
    note = f"{'names' if named else 'does not name'} the rank: {message}"
    return [
        Finding(
            what="seconds until the others raised",
            difference=took_s,
            tolerance=BOUND_S,
            note=note,
        )
    ]


def _store() -> Any:
    """The rendezvous store, in the process that started the ranks."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]


def _raise(*_: Any) -> None:
    raise Planted("planted on one rank")


def runs_out_of_data(engine: Engine, world: World) -> list[Finding]:
    """The first rank has 5 batches, the others 3; a step's mean is over what data there is."""
    counts = [5 if rank == 0 else 3 for rank in range(world.ranks)]
    plain = Engine().prepare(build(Stack, engine.dtype), Setup())
    for step in range(max(counts)):
        active = [rank for rank in range(world.ranks) if step < counts[rank]]
        batch = torch.cat([data(10 * step + rank, ROWS, engine.dtype) for rank in active])
        plain.backward((plain.module(batch) ** 2).mean())
        plain.step()
        plain.zero_grad()
    session = engine.prepare(build(Stack, engine.dtype), Setup())
    mine = [data(10 * k + world.rank, ROWS, engine.dtype) for k in range(counts[world.rank])]
    for batch, weight in session.evenly(mine):
        session.backward((session.module(batch) ** 2).mean() * weight)
        session.step()
        session.zero_grad()
    return compare_tensors(
        "parameters", plain.full_state(), session.full_state(), tolerance=engine.tolerance
    )
