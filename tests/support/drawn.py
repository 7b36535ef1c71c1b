"""Models and ways of training, described by plain values so that they can be drawn at random.

A `Spec` says everything about one run. `compare` trains each on the ranks and in one process on the
concatenated batch, and tells what differs. `tests.support.drawing` draws specs; run many with

    python -m tests.support.drawn --examples 500 --seed 1
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.runtime.units import find_units
from tests.support.parity import mean_over_ranks, mesh_of, worst_difference

TOLERANCE = 1e-9
LENGTH = 3
SAMPLES = 2
VOCABULARY = 5


@dataclass(frozen=True, kw_only=True)
class PartSpec:
    """One block: its modules, and when it runs.

    Attributes:
        kind: What it is made of.
        hidden: Its inner size.
        norm: ``""``, ``layer`` or ``rms``; ``shared`` takes the norm of the part before.
        bias: Whether its Linear layers have one.
        scalars: A parameter without dimensions, and one of one element.
        side: Parameters used for some samples only, so on some ranks only.
        inner: A block inside the block.
        frozen: ``""``, ``some``, ``all`` or ``once``: all parameters, in the second step only.
        picked: Whether a predicate chooses it as a unit.
        runs: ``always``, or in which calls of the model it runs or is used.
        calls: How often in a row.
        ties: Whether its first weight is that of the part before, where sizes agree.
    """

    kind: str = "mlp"
    hidden: int = 3
    norm: str = ""
    bias: bool = True
    scalars: bool = False
    side: bool = False
    inner: bool = False
    frozen: str = ""
    picked: bool = True
    runs: str = "always"
    calls: int = 1
    ties: bool = False


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One model and one way of training it.

    Attributes:
        shape: Replicas and shards.
        strategy: How to shard.
        width: Size of vectors between parts.
        parts: The blocks.
        repeats: Indices of parts called again after the last.
        registered_again: Index of a part that the list holds a second time; -1 for none.
        table: ``""``, ``plain`` or ``tied``: an embedding, and whether the head shares its weight.
        units: How the model is divided.
        micro_batches: Backwards per step.
        accumulates: Whether all but the last run inside `sw.accumulate`.
        optimizer: Which.
        clip: Order of the norm; 0 for none.
        to_none: How gradients are discarded.
        style: How a micro-batch runs forward and backward; see `STYLES`.
        discards: Whether the second step throws its first micro-batch's gradients away.
        evaluates: ``""``, or a forward before each step: ``without gradients`` or ``abandoned``.
        checkpoints: ``""``, or when activation checkpointing is asked for.
        residency: Units that stay gathered, as bits over their indices.
        flags: On which ranks and calls side parameters are used, as bits.
        settings: Of the engine.
        seed: Of values and data.
    """

    shape: tuple[int, int] = (1, 2)
    strategy: str = "zero3"
    width: int = 3
    parts: tuple[PartSpec, ...] = (PartSpec(), PartSpec())
    repeats: tuple[int, ...] = ()
    registered_again: int = -1
    table: str = ""
    units: str = "auto"
    micro_batches: int = 1
    accumulates: bool = True
    optimizer: str = "sgd"
    clip: float = 0.0
    to_none: bool = True
    style: str = "plain"
    discards: bool = False
    evaluates: str = ""
    checkpoints: str = ""
    residency: int = 0
    flags: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    @property
    def world(self) -> int:
        return self.shape[0] * self.shape[1]


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.linear(x))


class Side(nn.Module):
    """Uses its parameters for some samples only, and so on some ranks only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        if not flags.any():
            return 0.0 * x
        return flags[:, None, None] * torch.tanh(x @ self.weight + self.bias)


class Body(nn.Module):
    """What a part computes, by its kind."""

    def __init__(self, spec: PartSpec, width: int) -> None:
        super().__init__()
        hidden, self.kind = spec.hidden, spec.kind
        if self.kind == "mlp":
            self.up = nn.Linear(width, hidden, bias=spec.bias)
            self.down = nn.Linear(hidden, width, bias=spec.bias)
        elif self.kind == "convolution":
            self.up = nn.Conv1d(width, hidden, 3, padding=1, bias=spec.bias)
            self.down = nn.Linear(hidden, width, bias=spec.bias)
        elif self.kind == "lstm":
            self.up = nn.LSTM(width, hidden, batch_first=True, bias=spec.bias)
            self.down = nn.Linear(hidden, width, bias=spec.bias)
        elif self.kind == "attention":
            self.up = nn.MultiheadAttention(width, 1, batch_first=True, bias=spec.bias)
        else:
            assert self.kind == "matrices", f"no such kind: {self.kind}"
            self.up = nn.ParameterList([torch.randn(width, hidden), torch.randn(hidden, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "mlp":
            return self.down(torch.tanh(self.up(x)))
        if self.kind == "convolution":
            return self.down(torch.tanh(self.up(x.transpose(1, 2)).transpose(1, 2)))
        if self.kind == "lstm":
            return self.down(self.up(x)[0])
        if self.kind == "attention":
            return self.up(x, x, x, need_weights=False)[0]
        return torch.tanh(x @ self.up[0]) @ self.up[1]


class Part(nn.Module):
    def __init__(self, spec: PartSpec, width: int, before: Part | None) -> None:
        super().__init__()
        self.picked = spec.picked
        self.norm: nn.Module = nn.Identity()
        if spec.norm == "shared" and before is not None:
            self.norm = before.norm
        elif spec.norm:
            self.norm = nn.RMSNorm(width) if spec.norm == "rms" else nn.LayerNorm(width)
        self.body = Body(spec, width)
        self.inner = Inner(width) if spec.inner else nn.Identity()
        self.gain = nn.Parameter(torch.tensor(0.5)) if spec.scalars else 0.5
        self.single = nn.Parameter(torch.full((1,), 0.1)) if spec.scalars else 0.0
        self.side = Side(width) if spec.side else None
        if spec.ties and before is not None:
            _tie(self.body, before.body)

    def forward(self, x: torch.Tensor, *, flags: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.body(self.norm(x)) * self.gain + self.single)
        if self.side is not None:
            y = y + self.side(x, flags)
        return torch.tanh(x + y)


def _tie(body: Body, other: Body) -> None:
    mine, theirs = getattr(body.up, "weight", None), getattr(other.up, "weight", None)
    if mine is not None and theirs is not None and mine.shape == theirs.shape:
        body.up.weight = other.up.weight


RUNS: dict[str, Callable[[int, int, int], bool]] = {
    "always": lambda step, micro_batch, last: True,
    "even steps": lambda step, micro_batch, last: step % 2 == 0,
    "odd steps": lambda step, micro_batch, last: step % 2 == 1,
    "first micro-batch": lambda step, micro_batch, last: micro_batch == 0,
    "last micro-batch": lambda step, micro_batch, last: micro_batch == last,
    "never": lambda step, micro_batch, last: False,
}


Loss = Callable[[float], torch.Tensor]
"""The mean loss of a micro-batch whose inputs are scaled."""


def _plain(loss: Loss, count: int) -> torch.Tensor:
    value = loss(1.0)
    (value / count).backward()
    return value


def _two_forwards(loss: Loss, count: int) -> torch.Tensor:
    value = loss(1.0) + 2 * loss(0.5)
    (value / count).backward()
    return value


def _backwards_in_order(loss: Loss, count: int) -> torch.Tensor:
    first, second = loss(1.0) / count, loss(0.5) / count
    first.backward()
    second.backward()
    return first


def _backwards_reversed(loss: Loss, count: int) -> torch.Tensor:
    first, second = loss(1.0) / count, loss(0.5) / count
    second.backward()
    first.backward()
    return second


def _graph_twice(loss: Loss, count: int) -> torch.Tensor:
    value = loss(1.0) / count
    value.backward(retain_graph=True)
    value.backward()
    return value


STYLES = {
    "plain": _plain,
    "two forwards": _two_forwards,
    "two backwards": _backwards_in_order,
    "two backwards, reversed": _backwards_reversed,
    "graph twice": _graph_twice,
}


class Model(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.width
        parts: list[Part] = []
        for part in spec.parts:
            parts.append(Part(part, width, parts[-1] if parts else None))
        self.order = [i for i, p in enumerate(spec.parts) for _ in range(p.calls)]
        self.order += [i % len(parts) for i in spec.repeats]
        if spec.registered_again >= 0:
            parts.append(parts[spec.registered_again % len(parts)])
            self.order.append(len(parts) - 1)
        self.table = nn.Embedding(VOCABULARY, width) if spec.table else None
        self.first = nn.Linear(width, width)
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if self.table is not None and spec.table == "tied":
            self.head.weight = self.table.weight
        for part, made in zip(spec.parts, self.parts, strict=False):
            for k, parameter in enumerate(made.parameters()):
                if part.frozen == "all" or (part.frozen == "some" and k % 2 == 0):
                    parameter.requires_grad_(False)
        self.head.weight.requires_grad_(True)
        self.frozen_once = [
            p
            for part, made in zip(spec.parts, self.parts, strict=False)
            if part.frozen == "once"
            for p in made.parameters()
            if p.requires_grad
        ]

    def freeze_once(self, step: int) -> None:
        for parameter in self.frozen_once:
            parameter.requires_grad_(step != 1)

    def forward(self, batch: dict[str, torch.Tensor], step: int, micro_batch: int) -> torch.Tensor:
        h = self.first(batch["x"])
        if self.table is not None:
            h = h + self.table(batch["tokens"])
        for index in self.order:
            runs, _, how = self._spec_of(index).runs.partition(", ")
            if RUNS[runs](step, micro_batch, self.spec.micro_batches - 1):
                h = self.parts[index](h, flags=batch["flags"])
            elif how == "output dropped":
                self.parts[index](h, flags=batch["flags"])
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), batch["targets"].flatten())

    def _spec_of(self, index: int) -> PartSpec:
        parts = self.spec.parts
        return parts[index if index < len(parts) else self.spec.registered_again % len(parts)]


def units_of(spec: Spec, model: Model) -> Any:
    """The argument `units`, falling back to None where it would match nothing."""
    if spec.units == "auto":
        return "auto"
    found: Any = {
        "parts": (Part,),
        "nested": (Part, Inner),
        "sides": (Part, Side),
        "bodies": (Body,),
        "picked": lambda m: getattr(m, "picked", False),
        "leaves": lambda m: type(m) in (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding),
        "whole": None,
    }[spec.units]
    if isinstance(found, tuple):
        present = {type(m) for m in model.modules()}
        return tuple(c for c in found if c in present) or None
    if found is not None and not any(found(m) for m in model.modules()):
        return None
    return found


def batch_for(spec: Spec, step: int, micro_batch: int, ranks: int) -> dict[str, torch.Tensor]:
    """All ranks' samples, in rank order."""
    generator = torch.Generator().manual_seed(1000 * spec.seed + 10 * step + micro_batch)
    count = ranks * SAMPLES
    flags = [bool(spec.flags >> ((r + step + micro_batch) % 6) & 1) for r in range(ranks)]
    return {
        "x": torch.randn(count, LENGTH, spec.width, generator=generator, dtype=torch.float64),
        "tokens": torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator),
        "targets": torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator),
        "flags": torch.tensor(flags).repeat_interleave(SAMPLES),
    }


def make_optimizer(spec: Spec, model: nn.Module) -> torch.optim.Optimizer:
    if spec.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, fused=spec.optimizer == "fused adamw")


@dataclass(kw_only=True)
class Found:
    """What training came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    is_none: list[list[str]] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def shard(spec: Spec, model: Model, mesh: sw.Mesh) -> Model:
    units = units_of(spec, model)
    names = [u.name for u in find_units(model, units)]
    residency = [n for i, n in enumerate(names) if spec.residency >> i & 1]
    if spec.checkpoints == "before":
        sw.checkpoint_activations(model, units=Part)
    settings = dict(spec.settings)
    model = sw.shard(model, spec.strategy, mesh=mesh, units=units, residency=residency, **settings)
    if spec.checkpoints == "after":
        sw.checkpoint_activations(model, units=Part)
    return model


def train(spec: Spec, mesh: sw.Mesh, *, is_sharded: bool) -> Found:
    """Three steps, sharded on this rank's samples or plainly on all."""
    torch.manual_seed(spec.seed)
    model, found = Model(spec).double(), Found()
    if is_sharded:
        model = shard(spec, model, mesh)
    optimizer = make_optimizer(spec, model)
    for step in range(3):
        model.freeze_once(step)
        if spec.evaluates:
            with torch.set_grad_enabled(spec.evaluates == "abandoned"):
                model(_batch(spec, step, 0, mesh, is_sharded), step, 0)
        for micro_batch in range(spec.micro_batches):
            found.losses.append(_run(spec, model, step, micro_batch, mesh, is_sharded))
            if spec.discards and step == 1 and micro_batch == 0:
                model.zero_grad(set_to_none=spec.to_none)
        found.is_none.append([n for n, p in model.named_parameters() if p.grad is None])
        if spec.clip:
            found.norms.append(_clip(spec, model, is_sharded))
        if is_sharded:
            found.held_bytes.append(sw.ledger(model).unsharded_bytes)
        optimizer.step()
        optimizer.zero_grad(set_to_none=spec.to_none)
    with sw.unsharded(model) if is_sharded else contextlib.nullcontext():
        found.state = {k: v.clone() for k, v in model.state_dict().items()}
    return found


def _run(
    spec: Spec, model: Model, step: int, micro_batch: int, mesh: sw.Mesh, is_sharded: bool
) -> float:
    """Run one micro-batch; returns its loss over all ranks."""
    batch = _batch(spec, step, micro_batch, mesh, is_sharded)

    def loss(factor: float) -> torch.Tensor:
        return model({**batch, "x": factor * batch["x"]}, step, micro_batch)

    is_last = micro_batch == spec.micro_batches - 1
    apart = is_sharded and spec.accumulates and not is_last
    with sw.accumulate(model) if apart else contextlib.nullcontext():
        value = STYLES[spec.style](loss, spec.micro_batches).detach()
    return mean_over_ranks(value, mesh) if is_sharded else value.item()


def _batch(
    spec: Spec, step: int, micro_batch: int, mesh: sw.Mesh, is_sharded: bool
) -> dict[str, torch.Tensor]:
    batch = batch_for(spec, step, micro_batch, mesh.data_size)
    mine = slice(SAMPLES * mesh.data_rank, SAMPLES * (mesh.data_rank + 1))
    return {k: v[mine] for k, v in batch.items()} if is_sharded else batch


def _clip(spec: Spec, model: nn.Module, is_sharded: bool) -> float:
    if is_sharded:
        return sw.clip_grad_norm_(model, 0.1, spec.clip).item()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, spec.clip).item()


def differences(spec: Spec, mesh: sw.Mesh) -> list[str]:
    """Train one spec both ways; returns what went wrong."""
    expected = train(spec, mesh, is_sharded=False)
    actual = train(spec, mesh, is_sharded=True)
    figures = {
        "parameters": worst_difference(expected.state, actual.state),
        "losses": _worst(expected.losses, actual.losses),
        "norms": _worst(expected.norms, actual.norms),
    }
    wrong = [f"{name} differ by {v:.3g}" for name, v in figures.items() if not v <= TOLERANCE]
    for step, (names, found) in enumerate(zip(expected.is_none, actual.is_none, strict=True)):
        if names != found:
            other = sorted(set(names) ^ set(found))
            wrong.append(f"step {step}: None where one process has gradients or not: {other}")
    if _frees_after_backward(spec) and any(actual.held_bytes):
        wrong.append(f"still gathered after backward: {actual.held_bytes} bytes")
    if not _equal_on_all_ranks(actual, mesh):
        wrong.append("ranks ended with other bits")
    return wrong


def _frees_after_backward(spec: Spec) -> bool:
    """Whether nothing may stay gathered between a backward and the optimizer's step."""
    reshards = dict(spec.settings).get("reshard_after_backward", spec.strategy != "zero1")
    # A forward whose backward has not come keeps what its backward will use. torch's LSTM keeps
    # the weights of its last forward, and with them the graph of one that was only computed again.
    keeps_graphs = any(p.kind == "lstm" for p in spec.parts) and spec.checkpoints
    awaits_more = spec.evaluates == "abandoned" or keeps_graphs
    return bool(reshards and spec.strategy != "ddp" and spec.shape[1] > 1 and not awaits_more)


def _worst(a: Sequence[float], b: Sequence[float]) -> float:
    assert len(a) == len(b), f"{len(a)} figures against {len(b)}"
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)


def _equal_on_all_ranks(found: Found, mesh: sw.Mesh) -> bool:
    if mesh.data_size == 1:
        return True
    digest = 0
    for value in found.state.values():
        digest = zlib.crc32(value.contiguous().numpy().tobytes(), digest)
    digests: list[Any] = [None] * mesh.data_size
    dist.all_gather_object(digests, (digest, found.norms))
    return all(d == digests[0] for d in digests)


def compare(specs: Sequence[Spec]) -> list[list[str]]:
    """Compare specs of one world, one after another; stops after the first that raises."""
    meshes: dict[tuple[int, int], sw.Mesh] = {}
    results = []
    for spec in specs:
        if spec.shape not in meshes:
            meshes[spec.shape] = mesh_of(spec.shape)
        try:
            results.append(differences(spec, meshes[spec.shape]))
        except Exception as error:
            lines = traceback.format_exception(error)
            results.append(["".join(lines[-3:]).strip()])
            break
    return results


def simpler(spec: Spec) -> list[Spec]:
    """Specs that are one step simpler, boldest first."""
    plain, found = Spec(), []
    for i in range(len(spec.parts)):
        if len(spec.parts) > 1:
            parts = spec.parts[:i] + spec.parts[i + 1 :]
            found.append(dataclasses.replace(spec, parts=parts))
    for i in range(len(spec.repeats)):
        repeats = spec.repeats[:i] + spec.repeats[i + 1 :]
        found.append(dataclasses.replace(spec, repeats=repeats))
    for i in range(len(spec.settings)):
        settings = spec.settings[:i] + spec.settings[i + 1 :]
        found.append(dataclasses.replace(spec, settings=settings))
    for f in dataclasses.fields(Spec):
        if f.name not in ("parts", "repeats", "settings", "shape"):
            default = getattr(plain, f.name)
            if getattr(spec, f.name) != default:
                found.append(dataclasses.replace(spec, **{f.name: default}))
    for i, part in enumerate(spec.parts):
        for f in dataclasses.fields(PartSpec):
            default = getattr(PartSpec(), f.name)
            if getattr(part, f.name) != default:
                changed = dataclasses.replace(part, **{f.name: default})
                parts = (*spec.parts[:i], changed, *spec.parts[i + 1 :])
                found.append(dataclasses.replace(spec, parts=parts))
    return found


def brief(spec: Spec) -> str:
    """A spec as Python, without what is default."""

    def write(value: Any) -> str:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain = type(value)()
            given = [
                f"{f.name}={write(getattr(value, f.name))}"
                for f in dataclasses.fields(value)
                if getattr(value, f.name) != getattr(plain, f.name)
            ]
            return f"{type(value).__name__}({', '.join(given)})"
        if isinstance(value, tuple):
            return f"({', '.join(map(write, value))}{',' * (len(value) == 1)})"
        if isinstance(value, float) and math.isinf(value):
            return "math.inf"
        return repr(value)

    return write(spec)


if __name__ == "__main__":
    from tests.support.drawing import main

    main()
