"""Mixed precision against one process that applies the same casts. Runs on ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

import shardwright as sw
from tests.support.models import tokens_for
from tests.support.parity import build, make_optimizer, mesh_of, worst_difference


def emulate(
    ranks: int,
    *,
    compute: torch.dtype,
    reduce: torch.dtype,
    stored: torch.dtype,
    sums_travel: bool,
    optimizer: str,
) -> dict[str, torch.Tensor]:
    """One process: masters in float32, gradients of each rank's batch in `compute`, their sum.

    Gradients are cast to `reduce` one by one, added in rank order in float32 and divided last, as
    the engine does. Where sums travel, as in an all-reduce, they are rounded to `reduce` too.
    """
    model = build(torch.float32)
    if stored != torch.float32:
        model = model.to(stored).to(torch.float32)
    masters = dict(model.named_parameters())
    optimizing = make_optimizer(model, optimizer)
    for step in range(3):
        batch = tokens_for(step, 0, ranks)
        sums = {name: torch.zeros_like(p) for name, p in masters.items()}
        for rank in range(ranks):
            mine = batch[2 * rank : 2 * rank + 2]
            cast = {n: p.detach().to(compute).requires_grad_() for n, p in masters.items()}
            tied = {**cast, "head.weight": cast["embedding.weight"]}
            loss = functional_call(model, tied, (mine[:, :-1], mine[:, 1:]), tie_weights=False)
            names = list(cast)
            for name, gradient in zip(
                names, torch.autograd.grad(loss, [cast[n] for n in names]), strict=True
            ):
                sums[name] += gradient.to(reduce).float()
        for name, parameter in masters.items():
            sent = sums[name].to(reduce) if sums_travel else sums[name]
            parameter.grad = sent.float() / ranks
        optimizing.step()
        optimizing.zero_grad()
    return {n: p.detach().clone() for n, p in masters.items()}


def compare(
    strategy: str,
    shape: tuple[int, int],
    param: torch.dtype | None,
    reduce: torch.dtype | None,
    stored: torch.dtype,
) -> tuple[float, set[torch.dtype]]:
    """``(largest difference of masters from the emulation, dtypes of the shards)``."""
    mesh = mesh_of(shape)
    compute = param or stored
    expected = emulate(
        mesh.data_size,
        compute=compute,
        reduce=reduce or torch.float32,
        stored=stored,
        sums_travel=strategy == "ddp",
        optimizer="sgd",
    )
    model = sw.shard(
        build(torch.float32).to(stored),
        strategy,
        mesh=mesh,
        precision=sw.Precision(param=param, reduce=reduce),
    )
    dtypes = {p.dtype for p in model.parameters()}
    optimizer = make_optimizer(model, "sgd")
    for step in range(3):
        batch = tokens_for(step, 0, mesh.data_size)[2 * mesh.data_rank :][:2]
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with sw.unsharded(model):
        actual = {n: p.detach().clone() for n, p in model.named_parameters()}
    return worst_difference(expected, actual), dtypes


class Casts(nn.Module):
    """Says which dtypes it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: dict[str, torch.Tensor], *, extra: torch.Tensor) -> dict[str, object]:
        self.seen = {
            "weight": self.linear.weight.dtype,
            "input": x["values"].dtype,
            "index": x["index"].dtype,
            "keyword": extra.dtype,
            "buffer": self.offset.dtype,
        }
        return {"y": self.linear(x["values"]) + extra + self.offset, "count": 1}


def dtypes_seen(precision: dict[str, torch.dtype]) -> tuple[dict[str, torch.dtype], torch.dtype]:
    model = sw.shard(Casts(), "zero3", units=None, precision=sw.Precision(**precision))
    inputs = {"values": torch.ones(2, 4), "index": torch.ones(2, dtype=torch.long)}
    out = model(inputs, extra=torch.ones(4))
    return model.seen, out["y"].dtype
