"""Models and ways of training, described by plain values so that they can be drawn at random.

A `Spec` says everything about one run. `compare` trains each on the ranks and in one process, and
tells what differs: in float64, plain torch on the concatenated batch, within a tolerance; where a
spec has other dtypes, `Emulated` ranks, bit for bit. `tests.support.drawing` draws specs; run many
with

    python -m tests.support.drawn --examples 500 --seed 1
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.runtime.units import find_units
from tests.support.emulated import Emulated
from tests.support.parity import mesh_of, worst_difference

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
        shift: Whether it adds a floating-point buffer.
        dtypes: Of its norm, the body's first and second module, inner block, side and scalars, in
            turn; all float64 where empty.
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
    shift: bool = False
    dtypes: tuple[str, ...] = ()


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
        dtypes: Of the first layer, the table and the head, in turn; all float64 where empty.
        precision: Fields of `sw.Precision`, with names of dtypes and paths of modules.
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
    dtypes: tuple[str, ...] = ()
    precision: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    @property
    def world(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def has_casts(self) -> bool:
        """Whether anything is not float64 throughout."""
        return bool(self.precision or self.dtypes or any(p.dtypes for p in self.parts))


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
        self.register_buffer("shift", torch.full((width,), 0.3) if spec.shift else None)
        if spec.ties and before is not None:
            _tie(self.body, before.body)

    def forward(self, x: torch.Tensor, *, flags: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.body(self.norm(x)) * self.gain + self.single)
        if self.side is not None:
            y = y + self.side(x, flags)
        if self.shift is not None:
            y = y + self.shift.to(y.dtype)
        return torch.tanh(x + y)

    def take_dtypes(self, dtypes: tuple[str, ...], before: Part | None) -> None:
        """Convert modules in turn; what is shared with the part before keeps its dtype."""
        body, first = self.body, getattr(self.body.up, "weight", None)
        is_tied = first is not None and before is not None
        is_tied = is_tied and first is getattr(before.body.up, "weight", None)
        norm = None if before is not None and self.norm is before.norm else self.norm
        own = [self.gain, self.single, self.shift]
        modules = [norm, body.up, getattr(body, "down", None), self.inner, self.side, *own]
        for i, module in enumerate(modules):
            dtype = getattr(torch, dtypes[min(i, 5) % len(dtypes)])
            if module is body.up and is_tied:
                dtype = next(before.body.up.parameters()).dtype
            if isinstance(module, nn.Module):
                module.to(dtype)
            elif isinstance(module, torch.Tensor):
                module.data = module.data.to(dtype)


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

    def take_dtypes(self) -> None:
        """Convert parameters to the spec's dtypes."""
        spec, before = self.spec, None
        for part, made in zip(spec.parts, self.parts, strict=False):
            made.take_dtypes(part.dtypes or ("float64",), before)
            before = made
        dtypes = [getattr(torch, d) for d in spec.dtypes or ("float64",)]
        self.first.to(dtypes[0])
        self.head.to(dtypes[2 % len(dtypes)])
        if self.table is not None:
            self.table.to(dtypes[1 % len(dtypes)])

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


def make_optimizer(spec: Spec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    found = list(parameters)
    if spec.optimizer == "sgd":
        return torch.optim.SGD(found, lr=0.05, momentum=0.9)
    groups = [
        {"params": [p for p in found if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in found if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, fused=spec.optimizer == "fused adamw")


def precision_of(spec: Spec, model: nn.Module) -> sw.Precision:
    """The argument `precision`, keeping only what is in the model."""
    fields = dict(spec.precision)
    paths = [f".{path}" for path, _ in model.named_modules()]
    keep = [k for k in fields.pop("keep", ()) if any(p.endswith("." + k) for p in paths)]
    return sw.Precision(keep=tuple(keep), **{n: getattr(torch, d) for n, d in fields.items()})


def build(spec: Spec) -> Model:
    torch.manual_seed(spec.seed)
    model = Model(spec).double()
    model.take_dtypes()
    precision = precision_of(spec, model)
    if spec.has_casts:
        _cast_between(model, precision)
    return model


_CASTING = (nn.Linear, nn.Conv1d, nn.LSTM, nn.MultiheadAttention, nn.LayerNorm, nn.RMSNorm, Side)


def _cast_between(model: Model, precision: sw.Precision) -> None:
    """Let modules cast their inputs to the dtype they compute in, where that is their own.

    With `Precision.param` that is so inside kept modules only, which are cast for as a whole.
    """
    kept = [
        (path, module)
        for path, module in model.named_modules()
        if any(f".{path}".endswith(f".{k}") for k in precision.keep)
    ]
    paths = [path for path, _ in kept]
    outermost = {id(m) for p, m in kept if not any(p.startswith(f"{o}.") for o in paths)}
    inside = {id(m) for _, module in kept for m in module.modules()}
    for module in model.modules():
        is_kept = id(module) in inside
        if precision.param is not None and (not is_kept or id(module) in outermost):
            continue
        is_matrices = isinstance(module, Body) and module.kind == "matrices"
        if is_matrices or isinstance(module, _CASTING):
            dtype = next(module.parameters()).dtype
            if is_kept:
                dtype = torch.promote_types(dtype, torch.float32)
            module.register_forward_pre_hook(CastInputs(dtype))


class CastInputs:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        return tuple(a.to(self.dtype) if a.is_floating_point() else a for a in args)


@dataclass(kw_only=True)
class Found:
    """What training came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    is_none: list[list[str]] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


class OneProcess:
    """A plain model on all ranks' samples."""

    def __init__(self, spec: Spec, mesh: sw.Mesh) -> None:
        self.spec, self.mesh = spec, mesh
        self.model = build(spec)

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.model.parameters()

    def loss(self, rank: int | None, step: int, micro_batch: int, factor: float) -> torch.Tensor:
        """The loss on one rank's samples, or on all."""
        batch = batch_for(self.spec, step, micro_batch, self.mesh.data_size)
        if rank is not None:
            batch = {k: v[SAMPLES * rank : SAMPLES * (rank + 1)] for k, v in batch.items()}
        batch["x"] = factor * batch["x"]
        return self.call(batch, step, micro_batch)

    def call(self, *args: Any) -> torch.Tensor:
        return self.model(*args)

    def train_on(self, rank: int | None, step: int, micro_batch: int) -> torch.Tensor:
        """Forward and backward in the spec's style."""
        loss = functools.partial(self.loss, rank, step, micro_batch)
        return STYLES[self.spec.style](loss, self.spec.micro_batches).detach().double()

    def evaluate(self, step: int) -> None:
        """A forward whose backward never comes."""

    def run(self, step: int, micro_batch: int, *, is_last: bool) -> float:
        """Run one micro-batch; returns its loss over all ranks."""
        return self.train_on(None, step, micro_batch).item()

    def without_gradients(self) -> list[str]:
        return [n for n, p in self.model.named_parameters() if p.grad is None]

    def clip(self, order: float) -> float:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1, order).item()

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=self.spec.to_none)

    def held_bytes(self) -> int:
        """Bytes gathered now."""
        return 0

    def state(self) -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in self.model.state_dict().items()}


class OnRanks(OneProcess):
    """A sharded model on this rank's samples."""

    def __init__(self, spec: Spec, mesh: sw.Mesh) -> None:
        super().__init__(spec, mesh)
        units = units_of(spec, self.model)
        names = [u.name for u in find_units(self.model, units)]
        residency = [n for i, n in enumerate(names) if spec.residency >> i & 1]
        options = dict(spec.settings)
        if spec.has_casts:  # sums inside a matrix product round as nothing else does
            options["direct_gradients"] = False
        if spec.checkpoints == "before":
            sw.checkpoint_activations(self.model, units=Part)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Precision.master")
            sw.shard(
                self.model,
                spec.strategy,
                mesh=mesh,
                units=units,
                residency=residency,
                precision=precision_of(spec, self.model),
                **options,
            )
        if spec.checkpoints == "after":
            sw.checkpoint_activations(self.model, units=Part)

    def evaluate(self, step: int) -> None:
        with torch.set_grad_enabled(self.spec.evaluates == "abandoned"):
            self.loss(self.mesh.data_rank, step, 0, 1.0)

    def run(self, step: int, micro_batch: int, *, is_last: bool) -> float:
        apart = self.spec.accumulates and not is_last
        with sw.accumulate(self.model) if apart else contextlib.nullcontext():
            value = self.train_on(self.mesh.data_rank, step, micro_batch)
        values = torch.zeros(self.mesh.data_size, dtype=torch.float64)
        values[self.mesh.data_rank] = value
        if self.mesh.data_size > 1:
            dist.all_reduce(values)
        return statistics.fmean(values.tolist())

    def clip(self, order: float) -> float:
        return sw.clip_grad_norm_(self.model, 0.1, order).item()

    def held_bytes(self) -> int:
        return sw.ledger(self.model).unsharded_bytes

    def state(self) -> dict[str, torch.Tensor]:
        with sw.unsharded(self.model):
            return super().state()


class AllRanksInOne(OneProcess):
    """All ranks of a sharded model, one after another in this process."""

    def __init__(self, spec: Spec, mesh: sw.Mesh, sharded: Model) -> None:
        super().__init__(spec, mesh)
        precision = precision_of(spec, self.model)
        self.ranks = Emulated(self.model, sharded, units_of(spec, self.model), precision)

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.ranks.parameters()

    def call(self, *args: Any) -> torch.Tensor:
        return self.ranks(*args)

    def run(self, step: int, micro_batch: int, *, is_last: bool) -> float:
        values = []
        for rank in range(self.mesh.data_size):
            with self.ranks.as_rank(rank):
                values.append(self.train_on(rank, step, micro_batch).item())
        self.ranks.backward_ended(is_last=is_last or not self.spec.accumulates)
        return statistics.fmean(values)

    def without_gradients(self) -> list[str]:
        return self.ranks.without_gradients()

    def clip(self, order: float) -> float:
        return self.ranks.clip(0.1, order)

    def zero_grad(self) -> None:
        self.ranks.zero_grad(set_to_none=self.spec.to_none)


def train(spec: Spec, way: OneProcess) -> Found:
    """Three steps."""
    found = Found()
    optimizer = make_optimizer(spec, way.parameters())
    for step in range(3):
        way.model.freeze_once(step)
        if spec.evaluates:
            way.evaluate(step)
        for micro_batch in range(spec.micro_batches):
            is_last = micro_batch == spec.micro_batches - 1
            found.losses.append(way.run(step, micro_batch, is_last=is_last))
            if spec.discards and step == 1 and micro_batch == 0:
                way.zero_grad()
        found.is_none.append(way.without_gradients())
        if spec.clip:
            found.norms.append(way.clip(spec.clip))
        found.held_bytes.append(way.held_bytes())
        optimizer.step()
        way.zero_grad()
    found.state = way.state()
    return found


def differences(spec: Spec, mesh: sw.Mesh) -> list[str]:
    """Train one spec both ways; returns what went wrong."""
    sharded = OnRanks(spec, mesh)
    other = AllRanksInOne(spec, mesh, sharded.model) if spec.has_casts else OneProcess(spec, mesh)
    expected, actual = train(spec, other), train(spec, sharded)
    figures = {
        "parameters": worst_difference(expected.state, actual.state),
        "losses": _worst(expected.losses, actual.losses),
        "norms": _worst(expected.norms, actual.norms),
    }
    tolerance = 0.0 if spec.has_casts else TOLERANCE
    wrong = [f"{name} differ by {v:.3g}" for name, v in figures.items() if not v <= tolerance]
    for name, value in expected.state.items():
        if value.dtype != actual.state[name].dtype:
            wrong.append(f"{name} is {actual.state[name].dtype} instead of {value.dtype}")
    for step, (names, found) in enumerate(zip(expected.is_none, actual.is_none, strict=True)):
        if names != found:
            only = sorted(set(names) ^ set(found))
            wrong.append(f"step {step}: None where one process has gradients or not: {only}")
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
        digest = zlib.crc32(value.contiguous().flatten().view(torch.uint8).numpy(), digest)
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
    for i in range(len(spec.precision)):
        precision = spec.precision[:i] + spec.precision[i + 1 :]
        found.append(dataclasses.replace(spec, precision=precision))
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
