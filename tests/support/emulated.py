"""One process that stands in for all ranks of a sharded model, bit for bit.

It applies the casts that `sw.Precision` asks for, computes each rank's gradients one rank after
another, and adds them up as the ranks do: which rounds where, and in which order. From the engine
it takes what decides the order and no number: who owns which rows, and whether gradients are whole
or sharded between micro-batches. The rules:

    master    float32, or the widest trainable parameter of the unit; or `Precision.master`
    compute   `Precision.param` or what is stored; in kept modules float32 or what is stored
    gradient  of each call of a unit, rounded to the reduce dtype and added up there (whole), or
              reduced at once and added up in the masters' dtype (sharded)
    sums      begin with the owner's own and go on with the rank after it, rounding to the masters'
              dtype; over replicas, and by the backend's collectives, to the reduce dtype
    mean      sums times one over the ranks, in the masters' dtype
    step      of each owner's rows, which are tensors of their own
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

import shardwright as sw
from shardwright.core.layout import ITEMSIZE
from shardwright.core.strategy import Gradients
from shardwright.runtime.lookup import engine_of
from shardwright.runtime.unit import ShardedUnit
from shardwright.runtime.units import UnitModules, UnitsArgument, find_units

Gradient = tuple[int, torch.Tensor]
"""Position of a parameter in its unit, and its gradient for one call of the unit."""


class Emulated:
    """All ranks of a sharded model in one process; call it as the model, inside `as_rank`.

    Args:
        model: A plain model like the one that was sharded; its parameters become whole masters.
        sharded: The sharded model.
        units: The argument `units` that it was sharded with.
        precision: The precision that it was sharded with.
    """

    def __init__(
        self, model: nn.Module, sharded: nn.Module, units: UnitsArgument, precision: sw.Precision
    ) -> None:
        engine = engine_of(sharded)
        assert engine is not None, "the other model is not sharded"
        self.model, self.precision = model, precision
        self.num_ranks = engine.mesh.data_size
        self._calls: list[list[Gradient]] = []
        kept = _find_kept(model, precision)
        for buffer in model.buffers():
            if precision.buffer is not None and buffer.is_floating_point():
                buffer.data = buffer.data.to(precision.buffer)
        found = [u for u in find_units(model, units) if u.owned]
        pairs = zip(found, [u for u in engine.units if u.parameters], strict=True)
        is_collective = engine.transport.name == "collective"
        self.units = [EmulatedUnit(a, b, precision, kept, is_collective) for a, b in pairs]
        for module, dtype in kept:
            module.forward = _keep(module.forward, dtype, precision.param)  # type: ignore[method-assign]
        for unit in self.units:
            unit.take_forward(lambda: self._rank)
        self._rank = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model for the rank that was entered."""
        if self.precision.param is not None:
            args, kwargs = _cast((args, kwargs), self.precision.param)
        outputs = self.model(*args, **kwargs)
        return outputs if self.precision.output is None else _cast(outputs, self.precision.output)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizers of all owners see: views of the masters."""
        return itertools.chain.from_iterable(u.slices.values() for u in self.units)

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Let gradients of backwards inside be this rank's."""
        self._rank = rank
        yield
        self._rank = -1

    def backward_ended(self, *, is_last: bool) -> None:
        """Reduce what all ranks' backwards left, once each has run one micro-batch."""
        for unit in self.units:
            unit.reduce(is_last=is_last)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Discard gradients."""
        for unit in self.units:
            unit.discard(set_to_none=set_to_none)

    def without_gradients(self) -> list[str]:
        """Names of parameters whose `.grad` would be None on the ranks, in model order."""
        found = {o.name for u in self.units for k, o in enumerate(u.owned) if not u.is_used(k)}
        return [n for n, _ in self.model.named_parameters() if n in found]

    def clip(self, max_norm: float, order: float) -> float:
        """Clip as the ranks do: each owner's norms in float64, added up over the owners."""
        partial: dict[int, list[torch.Tensor]] = {}
        for unit in self.units:
            for (_, owner), piece in unit.slices.items():
                rank = unit.rank_of(owner)
                if piece.grad is not None:
                    partial.setdefault(rank, []).append(piece.grad)
        columns: dict[int, list[torch.Tensor]] = {}
        shards = self.units[0].shards
        for rank in range(self.num_ranks):
            norms = [torch.linalg.vector_norm(g, order).double() for g in partial.get(rank, [])]
            columns.setdefault(rank // shards, []).append(_combine(norms, order))
        rows = [_combine(c, order, is_partial=True) for c in columns.values()]
        norm = rows[0] if self.units[0].divided == 1 else _combine(rows, order, is_partial=True)
        norm = norm if math.isinf(order) else norm ** (1.0 / order)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for piece in self.parameters():
            if piece.grad is not None:
                piece.grad.mul_(factor.to(piece.dtype))
        dtypes = [p.dtype for p in self.parameters() if p.grad is not None] or [torch.float32]
        return norm.to(functools.reduce(torch.promote_types, dtypes)).item()


class EmulatedUnit:
    """One unit on all ranks: whole masters, and each rank's gradients."""

    def __init__(
        self,
        modules: UnitModules,
        sharded: ShardedUnit,
        precision: sw.Precision,
        kept: list[tuple[nn.Module, torch.dtype]],
        is_collective: bool,
    ) -> None:
        layout, topology = sharded.layout, sharded.topology
        assert [o.name for o in modules.owned] == [o.name for o in sharded.modules.owned]
        self.module, self.owned, self.layout = modules.module, modules.owned, layout
        self.shards, self.replicas = topology.shard.size, topology.replicate.size
        self.divided = layout.owners_per_shard
        self.is_collective = is_collective
        self.is_whole = sharded.gradient is not None and sharded.gradient.home is Gradients.WHOLE
        in_kept = {id(p) for m, _ in kept for p in m.parameters()}
        self.compute = [
            torch.promote_types(o.parameter.dtype, torch.float32)
            if id(o.parameter) in in_kept
            else precision.param or o.parameter.dtype
            for o in self.owned
        ]
        self.trainable = [i for i, o in enumerate(self.owned) if o.parameter.requires_grad]
        self.master = precision.master or torch.float32
        if precision.master is None:
            for i in self.trainable:
                self.master = torch.promote_types(self.master, self.owned[i].parameter.dtype)
        self.reduce_dtype = precision.reduce or self.master
        self.slices: dict[tuple[int, int], nn.Parameter] = {}  # by position and owner
        for i, o in enumerate(self.owned):
            dtype = self.master if i in self.trainable else self.compute[i]
            o.parameter.data = o.parameter.data.to(dtype, copy=True)
            for owner in range(layout.num_owners):
                start, stop = layout.rows(i, owner)
                if stop > start:
                    rows = o.parameter.data[start:stop] if o.parameter.dim() else o.parameter.data
                    self.slices[i, owner] = nn.Parameter(rows, requires_grad=i in self.trainable)
        self.calls: dict[int, list[list[Gradient]]] = {}  # by rank, as backward ended them
        self.has_run = False  # on any rank, since the last reduction
        ranks = range(self.shards * self.replicas)
        sizes = {s: layout.segments[s].numel for s in layout.trainable_segments}
        self.wholes = [
            {s: torch.zeros(n, dtype=self.reduce_dtype) for s, n in sizes.items()} for _ in ranks
        ]
        self.has_sums_apart = not self.is_whole or self.reduce_dtype != self.master
        self.sums = [
            {s: self._chunk(w, r).to(self.master, copy=self.has_sums_apart) for s, w in ws.items()}
            for r, ws in enumerate(self.wholes)
        ]
        self.discard(set_to_none=True)

    def rank_of(self, owner: int) -> int:
        """The rank that is an owner; the first of several replicas."""
        return owner % self.divided * self.shards + owner // self.divided

    def is_used(self, position: int) -> bool:
        """Whether a parameter's gradient is alive."""
        return position in self.used

    # Forward

    def take_forward(self, rank_now: Callable[[], int]) -> None:
        """Let the unit's module compute with casts of the masters, one node per call."""
        inner = self.module.forward
        anchor = torch.empty(0, requires_grad=True)

        def forward(*args: Any, **kwargs: Any) -> Any:
            values = self._gathered()
            chosen = [i for i in self.trainable if self.owned[i].parameter.requires_grad]
            self.has_run = True
            if chosen:
                calls = self.calls.setdefault(rank_now(), [])
                cast = _Call.apply(anchor, calls, chosen, *[values[i] for i in chosen])
                for i, value in zip(chosen, cast, strict=True):
                    values[i] = value
            places = [(m.__dict__, n, i) for i, o in enumerate(self.owned) for m, n in o.locations]
            for attributes, name, i in places:
                attributes[name] = values[i]
            try:
                return inner(*args, **kwargs)
            finally:
                for attributes, name, _ in places:
                    del attributes[name]

        self.module.forward = forward  # type: ignore[method-assign]

    def _gathered(self) -> list[torch.Tensor]:
        """Casts of the masters, laid out as gathered: products depend on how memory is aligned."""
        memory = torch.empty(self.layout.gathered_bytes, dtype=torch.uint8)
        parts = memory.split([s.numel * ITEMSIZE[s.dtype] for s in self.layout.segments])
        flat = [
            p.view(getattr(torch, s.dtype))
            for p, s in zip(parts, self.layout.segments, strict=True)
        ]
        values = []
        for o, place, dtype in zip(self.owned, self.layout.placements, self.compute, strict=True):
            value = flat[place.segment][place.start : place.stop].view(o.parameter.shape)
            assert value.dtype == dtype, f"{o.name} is gathered in {value.dtype}"
            values.append(value.copy_(o.parameter.detach()))
        return values

    # Gradients

    def discard(self, *, set_to_none: bool) -> None:
        """Forget all gradients."""
        for tensor in self._everything():
            tensor.zero_()
        if set_to_none:
            self.used: set[int] = set()
        self.filled: list[set[int]] = [set() for _ in self.wholes]
        self.has_sums = self.is_final = False
        for piece in self.slices.values():
            if set_to_none:
                piece.grad = None
            elif piece.grad is not None:
                piece.grad.zero_()

    def reduce(self, *, is_last: bool) -> None:
        """Take the calls of one backward of every rank."""
        has_run, self.has_run = self.has_run, False
        if self.is_final:
            if not has_run:
                return  # means stay as they are
            self._reopen_means()
        num_calls = max([len(c) for c in self.calls.values()], default=0)
        factor = 1.0 / len(self.wholes)
        scales_early = is_last and self.shards > 1 and self.replicas == 1
        for n in range(num_calls):
            for rank, calls in self.calls.items():
                self._collect(rank, calls[n] if n < len(calls) else [])
            if not self.is_whole:
                if n > 0 and scales_early:
                    self._multiply(factor)
                    self._multiply(1.0 / factor)
                self._reduce_over_shards()
        self.calls.clear()
        if is_last:
            if self.is_whole:
                self._reduce_over_shards()
            if self.replicas > 1:
                self._reduce_over_replicas()
            self._multiply(factor)
            self.is_final = True
            self._assign()

    def _collect(self, rank: int, call: list[Gradient]) -> None:
        for position, gradient in call:
            self.used.add(position)
            place = self.layout.placements[position]
            view = self.wholes[rank][place.segment][place.start : place.stop]
            if position in self.filled[rank]:
                view.add_(gradient.flatten())
            else:
                view.copy_(gradient.flatten())
            self.filled[rank].add(position)

    def _reduce_over_shards(self) -> None:
        for rank in range(len(self.wholes)):
            group = rank - rank % self.shards
            order = [group + (rank + i) % self.shards for i in range(self.shards)]
            for segment, own in self.sums[rank].items():
                parts = [self._chunk(self.wholes[r][segment], rank) for r in order]
                if self.is_collective and len(parts) > 1:
                    assert len(parts) == 2, "the order in which a backend adds is its own"
                    parts = [parts[0] + parts[1]]
                if self.has_sums_apart and self.has_sums:
                    own.add_(parts[0])
                else:
                    own.copy_(parts[0])
                for part in parts[1:]:
                    own.add_(part)
        if self.has_sums_apart:
            for whole in self.wholes:
                for tensor in whole.values():
                    tensor.zero_()
            self.filled = [set() for _ in self.wholes]
        self.has_sums = True

    def _reduce_over_replicas(self) -> None:
        for shard in range(self.shards):
            ranks = [r * self.shards + shard for r in range(self.replicas)]
            for segment in self.layout.trainable_segments:
                chunks = [self.sums[r][segment].to(self.reduce_dtype, copy=True) for r in ranks]
                if self.is_collective:
                    assert len(ranks) == 2, "the order in which a backend adds is its own"
                total = torch.empty_like(chunks[0])
                size = total.numel() // self.replicas
                for first in range(self.replicas):
                    part = slice(first * size, (first + 1) * size)
                    added = chunks[first][part].clone()
                    for i in range(1, self.replicas):
                        added.add_(chunks[(first + i) % self.replicas][part])
                    total[part] = added
                for rank in ranks:
                    self.sums[rank][segment].copy_(total)

    def _reopen_means(self) -> None:
        """Turn means back into sums that only their owner has."""
        self.is_final = False
        owned = {}
        for rank in range(len(self.wholes)):
            for segment, sums in self.sums[rank].items():
                part = self._owned_part(sums, rank)
                owned[rank, segment] = part * float(self.layout.num_owners)
        for tensor in self._everything():
            tensor.zero_()
        for (rank, segment), value in owned.items():
            self._owned_part(self.sums[rank][segment], rank).copy_(value)
        is_kept = not self.has_sums_apart
        self.filled = [set(self.used) if is_kept else set() for _ in self.wholes]
        self.has_sums = True

    def _assign(self) -> None:
        for (position, owner), piece in self.slices.items():
            if not self.is_used(position):
                continue
            place, rank = self.layout.placements[position], self.rank_of(owner)
            start, stop = self.layout.rows(position, owner)
            size = self.layout.segments[place.segment].chunk_numel
            flat = self._owned_part(self.sums[rank][place.segment], rank)
            low = place.start + start * place.spec.row_numel - owner * size
            rows = flat[low : low + (stop - start) * place.spec.row_numel]
            piece.grad = rows.view(piece.shape).clone()

    def _multiply(self, factor: float) -> None:
        for sums in self.sums:
            for tensor in sums.values():
                tensor.mul_(factor)

    def _everything(self) -> Iterator[torch.Tensor]:
        for tensors in [*self.wholes, *self.sums]:
            yield from tensors.values()

    def _chunk(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        size = whole.numel() // self.shards
        return whole[rank % self.shards * size :][:size]

    def _owned_part(self, chunk: torch.Tensor, rank: int) -> torch.Tensor:
        size = chunk.numel() // self.divided
        index = rank // self.shards if self.divided > 1 else 0
        return chunk[index * size :][:size]


class _Call(torch.autograd.Function):
    """Hands a unit's cast parameters to one call, and notes that call's gradients."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, calls: Any, chosen: Any, *values: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.calls, ctx.chosen = calls, chosen
        return tuple(v.detach() for v in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        pairs = zip(ctx.chosen, gradients, strict=True)
        ctx.calls.append([(i, g.clone()) for i, g in pairs if g is not None])
        return (None,) * (3 + len(ctx.chosen))


def _find_kept(model: nn.Module, precision: sw.Precision) -> list[tuple[nn.Module, torch.dtype]]:
    """The outermost kept modules, and the dtype each computes in."""

    def is_named(path: str, module: nn.Module) -> bool:
        return any(
            isinstance(module, item) if isinstance(item, type) else f".{path}".endswith(f".{item}")
            for item in precision.keep
        )

    paths = [path for path, module in model.named_modules() if is_named(path, module)]
    found = []
    for path in paths:
        if not any(path.startswith(other + ".") for other in paths):
            module, dtype = model.get_submodule(path), torch.float32
            for parameter in module.parameters():
                dtype = torch.promote_types(dtype, parameter.dtype)
            found.append((module, dtype))
    return found


def _keep(
    inner: Callable[..., Any], dtype: torch.dtype, param: torch.dtype | None
) -> Callable[..., Any]:
    """A forward that casts its inputs up, and its outputs back to what the first input had."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [
            t.dtype
            for t in _pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
        args, kwargs = _cast((args, kwargs), dtype)
        outputs, outside = inner(*args, **kwargs), given[0] if given else param
        return outputs if outside is None else _cast(outputs, outside)

    return forward


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return _pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value
    )


def _combine(norms: list[torch.Tensor], order: float, *, is_partial: bool = False) -> torch.Tensor:
    """Norms of several tensors, or sums of powers of them, as one sum of powers or largest."""
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    stacked = torch.stack(norms)
    if math.isinf(order):
        return stacked.amax()
    return stacked.sum(0) if is_partial else (stacked**order).sum()
