"""Dtypes of computation, reduction, buffers and outputs, and the casts that follow from them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import SpecError, nearest

__all__ = [
    "CastForward",
    "Precision",
    "cast_floating",
    "find_kept_modules",
    "kept_dtype",
    "map_tensors",
    "master_dtype",
    "warn_if_masters_are_narrow",
]

_SUPPORTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """What is computed and sent in which dtype.

    Attributes:
        param: Dtype parameters are gathered and computed in; None keeps each parameter's own.
            Floating-point inputs of the model are cast to it, wherever they sit in tuples, lists,
            dicts and dataclasses.
        reduce: Dtype gradients are reduced in; None takes the masters' dtype.
        buffer: Dtype floating-point buffers are kept in; None leaves them alone.
        output: Dtype floating-point outputs of the model are cast to; None leaves them alone.
        master: Dtype of the shards the optimizer updates; None takes float32, or where a trainable
            parameter of the same unit is wider, that one's dtype for all of them. A narrower one
            halves the optimizer's memory and loses small updates, which `shard` warns of.
        keep: Modules that compute in float32, or their parameters' own dtype where that is wider,
            whatever `param` says: classes such as ``nn.LayerNorm``, or paths of modules, from any
            dot on. Their inputs are cast up and their outputs back to the inputs' dtype, or to
            `param` where inputs are integers, as an embedding's are; their parameters travel with
            their unit, uncast.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None
    output: torch.dtype | None = None
    master: torch.dtype | None = None
    keep: tuple[type[nn.Module] | str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "buffer", "output", "master"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in _SUPPORTED:
                raise SpecError(
                    f"Precision.{name} must be one of "
                    f"{', '.join(dtype_name(d) for d in _SUPPORTED)} or None, found {dtype!r}"
                )
        keep: object = self.keep
        if isinstance(keep, (str, type)) or not isinstance(keep, Iterable):
            keep = (keep,)
        object.__setattr__(self, "keep", tuple(keep))
        for item in self.keep:
            is_class = isinstance(item, type) and issubclass(item, nn.Module)
            if not is_class and not isinstance(item, str):
                raise SpecError(
                    f"Precision.keep takes classes of modules and names of modules, found {item!r}"
                )

    def master_of(self, stored: torch.dtype) -> torch.dtype:
        """Dtype of the master of a trainable parameter stored in `stored`."""
        return master_dtype(stored) if self.master is None else self.master

    def compute_of(self, stored: torch.dtype, *, is_kept: bool) -> torch.dtype:
        """Dtype a parameter is gathered and computed in.

        Args:
            stored: The parameter's own dtype.
            is_kept: Whether it belongs to a module that `keep` names.
        """
        if not stored.is_floating_point:
            return stored
        if is_kept:
            return master_dtype(stored)
        return stored if self.param is None else self.param


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as the pure core does: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the master of a parameter stored in `dtype`: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def find_kept_modules(model: nn.Module, precision: Precision) -> list[nn.Module]:
    """The outermost modules that `precision.keep` names, in module order.

    Raises:
        SpecError: An entry matches no module, or one that is never called, or a parameter is shared
            between a kept module and another.
    """
    kept: dict[str, nn.Module] = {}
    modules = dict(model.named_modules())
    for item in precision.keep:
        found = {path: m for path, m in modules.items() if _is_named(path, m, item)}
        if not found:
            label = item if isinstance(item, str) else item.__name__
            names = (
                modules if isinstance(item, str) else {type(m).__name__ for m in model.modules()}
            )
            raise SpecError(
                f"Precision.keep names {label!r}, which matches no module of "
                f"{type(model).__name__}; {nearest(label, sorted(names))}"
            )
        for path, module in found.items():
            if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
                raise SpecError(
                    f"Precision.keep names {path!r}, a {type(module).__name__}: it is never called "
                    "itself, so nothing would cast what its modules are given. Name those instead, "
                    "or the module that holds it."
                )
        kept.update(found)
    outermost = [
        module
        for path, module in modules.items()
        if path in kept and not any(path != other and _encloses(other, path) for other in kept)
    ]
    inside = {id(m) for module in outermost for m in module.modules()}
    owner = {id(p): type(m).__name__ for m in outermost for p in m.parameters()}
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if id(module) not in inside and id(parameter) in owner:
                raise SpecError(
                    f"{name!r} of {path!r} is also a parameter of a {owner[id(parameter)]} that "
                    "Precision.keep names, so it would have two dtypes; keep both or neither"
                )
    return outermost


def kept_dtype(module: nn.Module) -> torch.dtype:
    """Dtype a kept module computes in: float32, or its parameters' own, not yet sharded, if wider.

    Masters say nothing of it: they may be wider than what is computed with.
    """
    dtype = torch.float32
    for parameter in module.parameters():
        dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype


def _is_named(path: str, module: nn.Module, item: type[nn.Module] | str) -> bool:
    if isinstance(item, str):
        return path == item or path.endswith("." + item)
    return isinstance(module, item)


def _encloses(outer: str, path: str) -> bool:
    return outer == "" or path.startswith(outer + ".")


class CastForward:
    """Stands in for the forward of a kept module: inputs cast up, outputs cast back.

    Args:
        module: The module.
        dtype: What it computes in; see `kept_dtype`.
        outside: Dtype of outputs where no input has a floating-point one; None leaves them alone.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, outside: torch.dtype | None = None
    ) -> None:
        self.inner: Callable[..., Any] = module.forward
        self.dtype = dtype
        self.outside = outside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; outputs get the dtype of its first floating-point input."""
        given: list[torch.dtype] = []

        def cast_up(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            given.append(tensor.dtype)
            return tensor.to(self.dtype)

        args, kwargs = map_tensors((args, kwargs), cast_up)
        outputs = self.inner(*args, **kwargs)
        outside = given[0] if given else self.outside
        return outputs if outside is None else cast_floating(outputs, outside)


def warn_if_masters_are_narrow(model: nn.Module, precision: Precision) -> None:
    """Warn where the optimizer would update shards of less than 32 bits."""
    master = precision.master
    if master is None or master.itemsize >= 4:
        return
    if any(p.requires_grad for p in model.parameters()):
        warnings.warn(
            f"Precision.master={master}: updates below about {torch.finfo(master).eps:.0e} of a "
            "weight are lost to rounding. Leave master out for float32 masters, unless the "
            "optimizer rounds stochastically.",
            stacklevel=3,
        )


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor found in nested tuples, lists, dicts and dataclasses."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to every tensor in a nested value, rebuilding only what changed."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        mapped = {k: map_tensors(v, function) for k, v in value.items()}
        if all(mapped[k] is value[k] for k in value):
            return value
        if type(value) is dict:
            return mapped
        copy = value.copy()  # keeps subclasses such as a library's output type
        copy.update(mapped)
        return copy
    if isinstance(value, (list, tuple)):
        items = [map_tensors(v, function) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in dataclasses.fields(value):
            if field.init:
                old = getattr(value, field.name)
                new = map_tensors(old, function)
                if new is not old:
                    changed[field.name] = new
        return dataclasses.replace(value, **changed) if changed else value
    return value


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's floating-point buffers in place of the old ones."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                owner._buffers[name] = buffer.to(dtype)
