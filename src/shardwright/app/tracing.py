"""Read a model for the planner off any module, by tracing a sample on the meta device.

The engine's own `find_units` divides the module, so that units and their parameters are those of a
run. Then the sample passes through a copy without memory: once to see what each unit is called
with, and once per kind of unit, forward and backward, to count.

    products      their shapes, as operators are dispatched; operations by torch's FlopCounterMode
    attention     calls of scaled_dot_product_attention, taken for the fused kernel that a GPU runs
    saved bytes   what autograd packs: each storage once, parameters and what several units share
                  left out
    the rest      bytes that other operators read and write

Used by `sw.plan(model=module, sample=...)`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shardwright.core.errors import SpecError
from shardwright.core.layout import ParameterSpec
from shardwright.planner.traced import (
    Product,
    TracedAttention,
    TracedModel,
    TracedUnit,
    UnitTrace,
)
from shardwright.runtime.precision import dtype_name, map_tensors
from shardwright.runtime.units import UnitModules, UnitsArgument, find_blocks, find_units

__all__ = ["Sample", "trace_model"]

Sample = tuple[tuple[Any, ...], Mapping[str, Any]] | Callable[[], Any]
"""``(args, kwargs)`` of one micro-batch's forward, or a function without arguments making them."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ATEN = torch.ops.aten
_SDPA_NAME = "scaled_dot_product_attention"
_SDPA = F.scaled_dot_product_attention
_FLASH = _ATEN._scaled_dot_product_flash_attention
_ADVICE = (
    "Pass sample=(args, kwargs), or a function making them, as the module's forward takes for one "
    "micro-batch; values don't matter, but shapes and dtypes do. What depends on values (.item(), "
    "masks turned into sizes, `if tensor:`) can't be traced: give the model by name, configuration "
    "or sizes instead."
)


def trace_model(
    model: nn.Module,
    sample: Sample,
    *,
    param: str = "bf16",
    attention: str = "flash2",
    units: UnitsArgument = "auto",
) -> TracedModel:
    """Trace one micro-batch.

    Args:
        model: Any module, on the meta device or another; it is left as it is.
        sample: See `Sample`.
        param: Dtype of parameters and floating-point inputs: ``"bf16"``, ``"fp16"``, ``"fp32"``.
        attention: Kernel of the plan; those called flash never write scores, whatever the module
            would do on this device.
        units: How to divide the module; as `shard` takes it.

    Returns:
        Units and counts for the sample.

    Raises:
        SpecError: The sample doesn't fit the module, or values decide what it computes.
    """
    dtype = _DTYPES[param]
    twin = _without_memory(model, dtype)
    args, kwargs = _meta_sample(sample, dtype)
    found = find_units(twin, units)
    if not any(unit.owned for unit in found):
        raise SpecError(f"{type(model).__name__} has no parameters to plan for")
    uses_flash = attention.startswith("flash")
    calls = _watch_calls(twin, found, args, kwargs, uses_flash=uses_flash)
    blocks = {id(block) for block in find_blocks(twin, units)}
    traces = _Tracer(found, calls.by_unit, uses_flash=uses_flash).traces()
    samples, tokens = _sizes_of(args, kwargs)
    return TracedModel(
        name=type(model).__name__,
        samples=samples,
        tokens_per_sample=tokens,
        units=tuple(
            TracedUnit(
                name=unit.name,
                parent=unit.parent,
                depth=unit.depth,
                is_block=id(unit.module) in blocks,
                parameters=tuple(
                    ParameterSpec(
                        name=owned.name,
                        shape=tuple(owned.parameter.shape),
                        dtype=dtype_name(owned.parameter.dtype),
                        trainable=owned.parameter.requires_grad,
                    )
                    for owned in unit.owned
                ),
                trace=trace,
            )
            for unit, trace in zip(found, traces, strict=True)
        ),
        param=param,
        output_numel=sum(t.numel() for t in calls.output if t.numel() > 1),
        has_root_head=_computes_output(found, calls.by_unit, calls.output),
        assumptions=_assumptions(calls),
    )


def _without_memory(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on the meta device, parameters in the compute dtype; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        wanted = dtype if parameter.is_floating_point() else parameter.dtype
        bare = torch.empty(parameter.shape, dtype=wanted, device="meta")
        memo[id(parameter)] = nn.Parameter(bare, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:  # a constructor's choice of attributes decides what is raised
        raise SpecError(
            f"{type(model).__name__} can't be copied, which tracing needs: {error}. Give the model "
            "by name, configuration or sizes instead."
        ) from error
    return twin.train()


def _meta_sample(sample: Sample, dtype: torch.dtype) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The sample on the meta device, floating-point tensors in the compute dtype."""
    made: Any = sample
    if callable(sample):
        with torch.device("meta"):
            made = sample()
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not (is_pair and isinstance(made[0], (tuple, list)) and isinstance(made[1], Mapping)):
        raise SpecError(
            "sample must be (args, kwargs), such as ((tokens,), {}), or a function making them, "
            f"found {type(made).__name__}"
        )

    def bare(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, device="meta", dtype=wanted).requires_grad_(
            tensor.requires_grad
        )

    return tuple(map_tensors(list(made[0]), bare)), map_tensors(dict(made[1]), bare)


def _sizes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Samples of the micro-batch, and tokens of each: whole numbers in rows are sequences."""
    tensors = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]
    if not tensors or not tensors[0].dim():
        raise SpecError(
            f"the sample's first tensor must have samples as its dimension 0. {_ADVICE}"
        )
    first = tensors[0]
    is_tokens = first.dim() == 2 and not first.is_floating_point()
    return first.shape[0], first.shape[1] if is_tokens else 1


@dataclass(kw_only=True, slots=True, eq=False)
class _Calls:
    """One forward pass: calls by unit, what came out, and what had to be assumed."""

    by_unit: dict[int, _Call]
    output: list[torch.Tensor]
    num_assumed: int


@dataclass(slots=True, eq=False)
class _Call:
    """What a unit was called with, and what came out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor] = field(default_factory=list)
    times: int = 1


def _watch_calls(
    twin: nn.Module,
    units: list[UnitModules],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    uses_flash: bool,
) -> _Calls:
    """Run forward once, noting by unit how it is called."""
    calls: dict[int, _Call] = {}

    def entered(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index in calls:
                calls[index].times += 1
            else:
                calls[index] = _Call(args, kwargs)

        return hook

    def left(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            calls[index].outputs = _tensors(output)

        return hook

    handles: list[Any] = []
    for index, unit in enumerate(units):
        handles.append(unit.module.register_forward_pre_hook(entered(index), with_kwargs=True))
        handles.append(unit.module.register_forward_hook(left(index)))
    try:
        with _errors_named(type(twin).__name__), _StandIns(is_on=uses_flash) as stand_ins:
            twin(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return _Calls(
        by_unit=calls,
        output=_trained_on(calls[0].outputs),
        num_assumed=stand_ins.num_assumed,
    )


def _trained_on(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What backward starts from: the loss where the module returns one, else all it returns."""
    found = [t for t in outputs if t.is_floating_point()]
    return [t for t in found if t.numel() == 1 and t.requires_grad] or found


def _assumptions(calls: _Calls) -> tuple[str, ...]:
    found = []
    if calls.num_assumed:
        found.append(
            f"{calls.num_assumed} conditions on values of the sample were taken as in a batch "
            "without padding"
        )
    if any(t.numel() > 1 for t in calls.output):
        found.append(
            "what the module returns is taken into a cross-entropy; have the sample make it return "
            "its loss to count its own"
        )
    return tuple(found)


def _computes_output(
    units: list[UnitModules], calls: dict[int, _Call], output: list[torch.Tensor]
) -> bool:
    """Whether the root makes what it returns itself, instead of handing on a unit's output."""
    made = {id(t) for i in range(1, len(units)) if i in calls for t in calls[i].outputs}
    return not any(id(t) in made for t in output)


@contextmanager
def _errors_named(name: str) -> Iterator[None]:
    """Turn whatever a module raises on the meta device into an error that says what to pass."""
    try:
        yield
    except SpecError:
        raise
    except Exception as error:  # user code: anything may come
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise SpecError(f"{name} can't be traced with this sample: {text[0]}. {_ADVICE}") from error


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors of a nested value, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(kw_only=True, eq=False)
class _Counts:
    """What a module does with everything inside it."""

    products: Counter[Product] = field(default_factory=Counter)
    attentions: Counter[TracedAttention] = field(default_factory=Counter)
    backward_product_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0
    saved_bytes: float = 0.0
    input_bytes: float = 0.0
    product_bytes: float = 0.0
    attention_bytes: float = 0.0
    widest_bytes: float = 0.0

    def without(self, inner: _Counts, times: int) -> None:
        """Take away what a unit inside does."""
        self.products.subtract({p: n * times for p, n in inner.products.items()})
        self.attentions.subtract({a: n * times for a, n in inner.attentions.items()})
        for name in _ADDITIVE:
            setattr(self, name, max(0, getattr(self, name) - times * getattr(inner, name)))

    @cached_property
    def trace(self) -> UnitTrace:
        """The same as plain data."""
        return UnitTrace(
            products=tuple(
                Product(m=p.m, k=p.k, n=p.n, batch=p.batch, is_batched=p.is_batched, count=count)
                for p, count in self.products.items()
                if count > 0
            ),
            attentions=tuple(
                TracedAttention(
                    batch=a.batch,
                    heads=a.heads,
                    queries=a.queries,
                    keys=a.keys,
                    head_width=a.head_width,
                    is_causal=a.is_causal,
                    count=count,
                )
                for a, count in self.attentions.items()
                if count > 0
            ),
            input_bytes=self.input_bytes,
            widest_bytes=self.widest_bytes,
            **{name: getattr(self, name) for name in _ADDITIVE},
        )


_ADDITIVE = (
    "backward_product_flops",
    "forward_bytes",
    "backward_bytes",
    "forward_kernels",
    "backward_kernels",
    "saved_bytes",
    "product_bytes",
    "attention_bytes",
)


class _Tracer:
    """Counts every unit, those of one kind once."""

    def __init__(
        self, units: list[UnitModules], calls: dict[int, _Call], *, uses_flash: bool
    ) -> None:
        self.units = units
        self.calls = calls
        self.uses_flash = uses_flash
        given = Counter(
            storage
            for index, call in calls.items()
            if units[index].parent is not None
            for storage in {_storage(t) for t in _tensors((call.args, call.kwargs))}
        )
        self.shared = {storage for storage, times in given.items() if times > 2}
        self.known: dict[tuple[Any, ...], _Counts] = {}

    def traces(self) -> list[UnitTrace]:
        """What each unit does, without those inside it."""
        whole = [self._counts(index) for index in range(len(self.units))]
        own = [copy.copy(counts) for counts in whole]
        for index, counts in enumerate(own):
            counts.products = counts.products.copy()
            counts.attentions = counts.attentions.copy()
            for inner, unit in enumerate(self.units):
                if unit.parent == index and inner in self.calls:
                    counts.without(whole[inner], self.calls[inner].times)
        alike: dict[tuple[Any, ...], UnitTrace] = {}
        found = []
        for index, counts in enumerate(own):
            key = (id(whole[index]), self._names_inside(index))
            found.append(alike.setdefault(key, counts.trace))
        return found

    def _names_inside(self, index: int) -> int:
        return sum(unit.parent == index for unit in self.units)

    def _counts(self, index: int) -> _Counts:
        call = self.calls.get(index)
        if call is None:  # never called: it has parameters and costs nothing else
            return _Counts()
        key = self._kind(index, call)
        if key not in self.known:
            unit = self.units[index]
            with _errors_named(f"unit {unit.name!r} ({type(unit.module).__name__})"):
                self.known[key] = _count(
                    unit.module,
                    call,
                    self.shared,
                    uses_flash=self.uses_flash,
                    is_root=unit.parent is None,
                )
        return self.known[key]

    def _kind(self, index: int, call: _Call) -> tuple[Any, ...]:
        """Units with equal kinds do the same: class, parameters, and what they are called with."""
        module = self.units[index].module
        return (
            type(module),
            tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()),
            str(module),
            tuple(
                (tuple(t.shape), t.dtype, t.requires_grad, _storage(t) in self.shared)
                for t in _tensors((call.args, call.kwargs))
            ),
            call.times,
        )


def _count(
    module: nn.Module, call: _Call, shared: set[int], *, uses_flash: bool, is_root: bool
) -> _Counts:
    """Run a module forward and backward on the meta device and count."""
    given = {
        id(t): t.detach().requires_grad_(t.requires_grad)
        for t in _tensors((call.args, call.kwargs))
    }
    args, kwargs = map_tensors((list(call.args), dict(call.kwargs)), lambda t: given[id(t)])
    counts = _Counts()
    excluded = shared | {_storage(p) for p in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(_storage(tensor), tensor)
        return tensor

    attention = _StandIns(is_on=uses_flash)
    watcher = _Operations(counts)
    with FlopCounterMode(display=False), watcher, attention:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = module(*args, **kwargs)
        made = _trained_on(_tensors(output)) if is_root else _tensors(output)
        ends = [t for t in made if t.requires_grad]
        watcher.is_forward = False
        with FlopCounterMode(display=False) as flops:
            if ends:
                torch.autograd.backward(ends, [torch.empty_like(t) for t in ends])
    for parameter in module.parameters():
        parameter.grad = None
    counts.attentions.update(attention.calls)
    counts.backward_product_flops = float(
        sum(
            count
            for operator, count in flops.get_flop_counts().get("Global", {}).items()
            if "scaled_dot_product" not in str(operator)
        )
    )
    counts.saved_bytes = float(
        sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in excluded)
    )
    counts.input_bytes = float(
        sum(
            t.numel() * t.element_size()
            for t in given.values()
            if t.is_floating_point() and _storage(t) not in shared
        )
    )
    return counts


class _StandIns(TorchFunctionMode):
    """Stands in for what the meta device has no kernel for or no values.

    Every call of scaled_dot_product_attention is taken for the fused kernel, and counted. The
    function in torch's module is replaced meanwhile, since torch's own layers call it where modes
    don't see it. RMSNorm is the one kernel that it is on GPUs.

    On the meta device torch would write the scores out, which no GPU that the planner knows does.
    A mask is counted as none: scores it hides are computed all the same.

    A condition on values can't be read here. One over all elements is taken to hold and one over
    any not to, as in a batch without padding; that it was needed is said in the plan.
    """

    def __init__(self, *, is_on: bool) -> None:
        super().__init__()
        self.is_on = is_on
        self.calls: Counter[TracedAttention] = Counter()
        self.assumed: dict[int, tuple[torch.Tensor, bool]] = {}
        self.num_assumed = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.__bool__ and id(args[0]) in self.assumed:
            self.num_assumed += 1
            return self.assumed[id(args[0])][1]
        if function in (F.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **kwargs)
        if function is not _SDPA:
            result = function(*args, **kwargs)
            if function in _CONDITIONS and not args[0].dtype.is_floating_point:
                self.assumed[id(result)] = (result, _CONDITIONS[function])
            return result
        return self.attend(*args, **kwargs)

    def __enter__(self) -> Self:
        setattr(F, _SDPA_NAME, self.attend)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: object) -> None:
        setattr(F, _SDPA_NAME, _SDPA)
        super().__exit__(*error)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **other: Any,
    ) -> torch.Tensor:
        """Attention as the plan's kernel computes it."""
        if not self.is_on or query.dim() < 4 or query.shape[-1] != value.shape[-1]:
            return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, **other)
        batch = query.shape[:-3].numel()
        self.calls[
            TracedAttention(
                batch=batch,
                heads=query.shape[-3],
                queries=query.shape[-2],
                keys=key.shape[-2],
                head_width=query.shape[-1],
                is_causal=is_causal,
            )
        ] += 1
        flat = [t.reshape(batch, *t.shape[-3:]) for t in (query, key, value)]
        result: torch.Tensor = _FLASH(*flat, dropout_p, is_causal)[0]
        return result.reshape(query.shape)


def _rms_norm(
    source: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """RMSNorm as the one kernel that GPUs have for it; `eps` only has to be accepted."""
    del eps
    result: torch.Tensor = _FusedRMSNorm.apply(source, weight, len(normalized_shape))
    return result


class _FusedRMSNorm(torch.autograd.Function):
    """What that kernel reads, writes and keeps; on the meta device there are no values."""

    @staticmethod
    def forward(
        context: Any, source: torch.Tensor, weight: torch.Tensor | None, num_dims: int
    ) -> torch.Tensor:
        rows = source.shape[: source.dim() - num_dims]
        scale = torch.empty(*rows, 1, dtype=torch.float32, device=source.device)
        context.save_for_backward(source, weight, scale)
        return source.clone() if weight is None else source * weight

    @staticmethod
    def backward(
        context: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        source, weight, _ = context.saved_tensors
        return gradient + source, None if weight is None else torch.empty_like(weight), None


_CONDITIONS: dict[Any, bool] = {
    torch.all: True,
    torch.Tensor.all: True,
    torch.any: False,
    torch.Tensor.any: False,
}

_COUNTED_ELSEWHERE = frozenset(
    {
        _ATEN.mm,
        _ATEN.addmm,
        _ATEN.bmm,
        _ATEN.baddbmm,
        _ATEN.convolution,
        _ATEN.convolution_backward,
        _FLASH,
        _ATEN._scaled_dot_product_flash_attention_backward,
    }
)


class _Operations(TorchDispatchMode):
    """Counts products by shape, and the bytes of all other operators that are no views."""

    def __init__(self, counts: _Counts) -> None:
        super().__init__()
        self.counts = counts
        self.is_forward = True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if _is_view(function):
            return result
        counts = self.counts
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        made_bytes = sum(t.numel() * t.element_size() for t in made)
        if self.is_forward:
            counts.forward_kernels += 1
            widest = max((t.numel() * t.element_size() for t in made), default=0)
            counts.widest_bytes = max(counts.widest_bytes, widest)
        else:
            counts.backward_kernels += 1
        if function.overloadpacket in _COUNTED_ELSEWHERE:
            if self.is_forward:
                self._product(function.overloadpacket, args, kwargs, made, made_bytes)
            return result
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        # Rows that an index picks are read, not all there are.
        moved = made_bytes + sum(
            min(t.numel() * t.element_size(), made_bytes)
            if function.overloadpacket in (_ATEN.embedding, _ATEN.index, _ATEN.gather)
            else t.numel() * t.element_size()
            for t in read
        )
        if self.is_forward:
            counts.forward_bytes += moved
        else:
            counts.backward_bytes += moved
        return result

    def _product(
        self, packet: Any, args: Any, kwargs: Any, made: list[torch.Tensor], made_bytes: int
    ) -> None:
        if packet is _FLASH:
            self.counts.attention_bytes += made[0].numel() * made[0].element_size()
            return
        self.counts.product_bytes += made_bytes
        if packet is _ATEN.convolution:
            self.counts.products[_convolution(args, made[0])] += 1
            return
        left, right = args[1:3] if packet in (_ATEN.addmm, _ATEN.baddbmm) else args[:2]
        is_batched = left.dim() == 3
        self.counts.products[
            Product(
                m=left.shape[-2],
                k=left.shape[-1],
                n=right.shape[-1],
                batch=left.shape[0] if is_batched else 1,
                is_batched=is_batched,
            )
        ] += 1


def _convolution(args: Any, result: torch.Tensor) -> Product:
    """A convolution as the product that it is: positions by (channels x kernel), per group."""
    source, weight, is_transposed, groups = args[0], args[1], args[6], args[8]
    kernel = weight.shape[2:].numel()
    if is_transposed:  # every input position spreads over the kernel
        positions = source.shape[0] * source.shape[2:].numel()
        return Product(
            m=positions, k=weight.shape[0] // groups, n=weight.shape[1] * kernel, batch=groups
        )
    positions = result.shape[0] * result.shape[2:].numel()
    return Product(
        m=positions, k=weight.shape[1] * kernel, n=weight.shape[0] // groups, batch=groups
    )


def _is_view(function: Any) -> bool:
    """Whether an operator only looks at its argument in another way."""
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns
    )
