"""Mixed precision against one process that applies the same casts. Runs on ranks."""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import nn

import shardwright as sw
from tests.support.emulated import Emulated
from tests.support.models import tokens_for
from tests.support.parity import build, make_optimizer, mesh_of, worst_difference


def compare(
    strategy: str,
    shape: tuple[int, int],
    param: torch.dtype | None,
    reduce: torch.dtype | None,
    stored: torch.dtype,
    keep_norms: bool = False,
    transport: str = "auto",
) -> tuple[float, set[torch.dtype]]:
    """``(largest difference of masters from the emulation, dtypes of the shards)``."""
    mesh = mesh_of(shape)
    precision = sw.Precision(param=param, reduce=reduce, keep=(nn.LayerNorm,) if keep_norms else ())
    model = sw.shard(
        build(torch.float32).to(stored),
        strategy,
        mesh=mesh,
        precision=precision,
        transport=transport,
        direct_gradients=False,
    )
    dtypes = {p.dtype for p in model.parameters()}
    ranks = Emulated(build(torch.float32).to(stored), model, "auto", precision)
    optimizers = [make_optimizer(m, "sgd") for m in (model, ranks)]
    for step in range(3):
        batch = tokens_for(step, 0, mesh.data_size)
        for rank in range(mesh.data_size):
            mine = batch[2 * rank :][:2]
            with ranks.as_rank(rank):
                ranks(mine[:, :-1], mine[:, 1:]).backward()
        ranks.backward_ended(is_last=True)
        mine = batch[2 * mesh.data_rank :][:2]
        model(mine[:, :-1], mine[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        ranks.zero_grad(set_to_none=True)
    expected = {n: p.detach().clone() for n, p in ranks.model.named_parameters()}
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


@dataclasses.dataclass
class Wrapped:
    """Inputs of a model that takes a dataclass."""

    values: torch.Tensor
    pair: tuple[torch.Tensor, int]


class Kept(nn.Module):
    """A norm, and a head that is no unit of its own, between Linear layers; says what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 2)
        self.seen: dict[str, torch.dtype] = {}
        self.norm.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
        self.seen |= {"norm in": args[0].dtype, "norm out": out.dtype}

    def forward(self, x: Wrapped) -> torch.Tensor:
        h = self.first(x.values + x.pair[0])
        self.seen |= {"pair": x.pair[0].dtype, "norm.weight": self.norm.weight.dtype}
        self.seen |= {"last.weight": self.last.weight.dtype}
        return self.last(self.norm(h))


def kept_modules(strategy: str) -> dict[str, object]:
    """Dtypes inside a model with kept modules, of its gradients and of a plain one made of it."""
    precision = sw.Precision(param=torch.bfloat16, keep=(nn.LayerNorm, "last"))
    model = sw.shard(Kept(), strategy, units=None, precision=precision)
    ones = torch.ones(2, 4)
    model(Wrapped(values=ones, pair=(ones, 3))).sum().backward()
    grads = {n: p.grad.dtype for n, p in model.named_parameters() if p.grad is not None}
    seen = dict(model.seen)
    sw.unshard_(model)
    plain = model(Wrapped(values=ones, pair=(ones, 3))).dtype
    return {**seen, "grads": set(grads.values()), "plain": plain}


def narrow_masters(strategy: str) -> tuple[set[torch.dtype], float, str]:
    """Masters in bfloat16: dtypes, difference of gradients from one process's, the warning."""
    plain = build(torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = sw.shard(
            build(torch.bfloat16), strategy, precision=sw.Precision(master=torch.bfloat16)
        )
    dtypes = {p.dtype for p in model.parameters()}
    batch = tokens_for(0, 0, 1)
    for trained in (plain, model):  # the same batch on every rank: sums of two halve exactly
        trained(batch[:, :-1], batch[:, 1:]).backward()
    worst = 0.0
    for whole, own in zip(plain.parameters(), model.parameters(), strict=True):
        start, stop = own.rows
        if stop > start:
            rows = whole.grad[start:stop] if whole.dim() else whole.grad
            difference = (rows - own.grad).as_subclass(torch.Tensor)
            worst = max(worst, difference.abs().max().item())
    make_optimizer(model, "sgd").step()
    return dtypes, worst, " ".join(str(w.message) for w in caught)


def dtypes_seen(precision: dict[str, torch.dtype]) -> tuple[dict[str, torch.dtype], torch.dtype]:
    model = sw.shard(Casts(), "zero3", units=None, precision=sw.Precision(**precision))
    inputs = {"values": torch.ones(2, 4), "index": torch.ones(2, dtype=torch.long)}
    out = model(inputs, extra=torch.ones(4))
    return model.seen, out["y"].dtype
