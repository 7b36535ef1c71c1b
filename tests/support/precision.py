"""Mixed precision against one process that applies the same casts. Runs on ranks."""

from __future__ import annotations

import dataclasses
import warnings

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
    keep_norms: bool,
    optimizer: str,
) -> dict[str, torch.Tensor]:
    """One process: masters in float32, gradients of each rank's batch in `compute`, their sum.

    Gradients are cast to `reduce` one by one, added in rank order in float32 and divided last, as
    the engine does. Where sums travel, as in an all-reduce, they are rounded to `reduce` too.
    """
    model = build(torch.float32)
    if keep_norms:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_pre_hook(lambda _, args: args[0].float())
                module.register_forward_hook(lambda *call: call[-1].to(compute))
    if stored != torch.float32:
        model = model.to(stored).to(torch.float32)
    masters = dict(model.named_parameters())
    optimizing = make_optimizer(model, optimizer)
    for step in range(3):
        batch = tokens_for(step, 0, ranks)
        sums = {name: torch.zeros_like(p) for name, p in masters.items()}
        for rank in range(ranks):
            mine = batch[2 * rank : 2 * rank + 2]
            cast = {
                n: p.detach()
                .to(torch.float32 if keep_norms and "norm" in n else compute, copy=True)
                .requires_grad_()
                for n, p in masters.items()
            }
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
    keep_norms: bool = False,
    transport: str = "auto",
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
        keep_norms=keep_norms,
        optimizer="sgd",
    )
    model = sw.shard(
        build(torch.float32).to(stored),
        strategy,
        mesh=mesh,
        precision=sw.Precision(
            param=param, reduce=reduce, keep=(nn.LayerNorm,) if keep_norms else ()
        ),
        transport=transport,
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
            worst = max(worst, (rows - own.grad).abs().max().item())
    make_optimizer(model, "sgd").step()
    return dtypes, worst, " ".join(str(w.message) for w in caught)


def dtypes_seen(precision: dict[str, torch.dtype]) -> tuple[dict[str, torch.dtype], torch.dtype]:
    model = sw.shard(Casts(), "zero3", units=None, precision=sw.Precision(**precision))
    inputs = {"values": torch.ones(2, 4), "index": torch.ones(2, dtype=torch.long)}
    out = model(inputs, extra=torch.ones(4))
    return model.seen, out["y"].dtype
