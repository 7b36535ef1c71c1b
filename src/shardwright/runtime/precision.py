"""Dtypes of computation, reduction, buffers and outputs, and the casts that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import SpecError

__all__ = ["Precision", "cast_floating", "map_tensors", "master_dtype"]

_SUPPORTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """What is computed and sent in which dtype.

    Masters, the shards the optimizer updates, are float32, or the parameter's own dtype where that
    is wider.

    Attributes:
        param: Dtype parameters are gathered and computed in; None keeps each parameter's own.
        reduce: Dtype gradients are reduced in; None takes the masters' dtype.
        buffer: Dtype floating-point buffers are kept in; None leaves them alone.
        output: Dtype floating-point outputs of the model are cast to; None leaves them alone.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None
    output: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            dtype = getattr(self, field.name)
            if dtype is not None and dtype not in _SUPPORTED:
                raise SpecError(
                    f"Precision.{field.name} must be one of "
                    f"{', '.join(dtype_name(d) for d in _SUPPORTED)} or None, found {dtype!r}"
                )


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as the pure core does: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the master of a parameter stored in `dtype`: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


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
