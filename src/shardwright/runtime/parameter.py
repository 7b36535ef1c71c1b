"""The parameter a user sees after sharding: this rank's rows, showing the whole's shape.

[Note: stray reads] Inside its unit's forward, ``module.weight`` is the gathered weight. Outside, it
is the parameter itself, with this rank's rows, and a layer computed from it would often fit: rows
of a Linear weight are only fewer outputs. So an attribute read from outside (`StrayReads` sees it,
while ``parameters()`` and optimizers go past it) makes that one parameter refuse what layers,
statistics and initialisers are computed with, its copies included. Parameters nobody reads so cost
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardwright.core.errors import LifecycleError

__all__ = ["ShardedParameter", "StrayReads", "mark_plain", "mark_sharded"]


class ShardedParameter(nn.Parameter):
    """A parameter that holds some rows of a larger one.

    It stays the very object that modules and optimizers hold; only its class tells more.

    Attributes:
        global_shape: Shape over all ranks: what ``shape`` is in one process. Code that decides on
            a parameter's size, such as an optimizer's threshold, should look at this.
        global_numel: Elements over all ranks.
        rows: ``(start, stop)`` rows of dimension 0 held here.
        unit_name: Unit it belongs to.
        full_name: Fully qualified name in the model.
    """

    global_shape: torch.Size
    global_numel: int
    rows: tuple[int, int]
    unit_name: str
    full_name: str

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name, global shape and the rows held, before the values."""
        start, stop = self.rows
        values = repr(self.data)
        return (
            f"ShardedParameter({self.full_name!r}, global_shape={tuple(self.global_shape)}, "
            f"rows={start}:{stop}, unit={self.unit_name!r}, requires_grad={self.requires_grad},\n"
            f"{values})"
        )


class _Stray(torch.Tensor):
    """What was read outside its unit's forward: refuses what needs every row."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function as on any tensor, unless it needs every row and some are elsewhere."""
        with torch._C.DisableTorchFunctionSubclass():
            makes_own = func is torch.Tensor.requires_grad_ and isinstance(args[0], _StrayRows)
            if func in _NEEDS_EVERY_ROW or makes_own:
                for stray in _strays((*args, *(kwargs or {}).values())):
                    if not stray.origin().is_full():
                        raise LifecycleError(_describe_stray(stray.origin(), func))
            result = func(*args, **(kwargs or {}))
            if func in _CARRIES and isinstance(args[0], _Stray) and not isinstance(result, _Stray):
                return _StrayRows.of(args[0].origin(), result)
            return result

    def origin(self) -> _StrayParameter:
        """The parameter whose rows these are."""
        raise NotImplementedError


class _StrayParameter(_Stray, ShardedParameter):
    """A sharded parameter that was read outside its unit's forward.

    Attributes:
        is_full: Says whether it has all its rows now, on every rank.
    """

    is_full: Callable[[], bool]

    def origin(self) -> _StrayParameter:
        """Itself."""
        return self


class _StrayRows(_Stray):
    """Such a parameter's rows, detached or copied."""

    _origin: _StrayParameter

    @classmethod
    def of(cls, origin: _StrayParameter, rows: torch.Tensor) -> _StrayRows:
        """Make an alias of a tensor that knows which parameter's rows it holds."""
        stray = rows.as_subclass(cls)
        stray._origin = origin
        return stray

    def origin(self) -> _StrayParameter:
        """The parameter they were taken from."""
        return self._origin


class StrayReads(dict[str, nn.Parameter | None]):
    """A module's own parameters, which notice when one is read as an attribute.

    Args:
        parameters: The module's.
        is_full: Says whether they have all their rows now.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter | None], is_full: Callable[[], bool]
    ) -> None:
        super().__init__(parameters)
        self._is_full = is_full

    def __getitem__(self, name: str) -> nn.Parameter | None:
        """Called by ``module.name`` where no gathered weight shadows it."""
        parameter = super().__getitem__(name)
        if type(parameter) is ShardedParameter:
            parameter.__class__ = _StrayParameter
            parameter.is_full = self._is_full  # type: ignore[attr-defined]
        return parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and pickled as a plain dict, so that it is the engine that refuses both."""
        return dict, (dict(self),)


def _needs_every_row() -> frozenset[Callable[..., Any]]:
    """What layers, statistics, draws and exports are computed with."""
    functions = """linear bilinear embedding embedding_bag conv1d conv2d conv3d conv_transpose1d
        conv_transpose2d conv_transpose3d layer_norm rms_norm group_norm batch_norm instance_norm
        prelu normalize cosine_similarity scaled_dot_product_attention
        multi_head_attention_forward"""
    of_torch = """matmul mm bmm mv addmm addmv baddbmm einsum tensordot inner outer t transpose
        permute movedim swapaxes cat stack index_select gather layer_norm rms_norm group_norm
        batch_norm prelu eye normal norm_except_dim"""
    of_tensors = """matmul mm bmm mv addmm __matmul__ __rmatmul__ __getitem__ __setitem__ t
        transpose permute index_select gather numpy tolist item view_as bernoulli_ cauchy_
        exponential_ geometric_ log_normal_ normal_ random_ uniform_ index_add_ index_copy_
        index_fill_ scatter_ fill_diagonal_ tril_ triu_"""
    of_both = """norm sum mean std var max min amax amin aminmax median quantile count_nonzero prod
        logsumexp softmax log_softmax cumsum argmax argmin sort topk unique histc trace det inverse
        svd qr"""
    inits = """uniform_ normal_ trunc_normal_ eye_ dirac_ xavier_uniform_ xavier_normal_
        kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_"""
    found = [getattr(functional, name) for name in functions.split()]
    found += [getattr(torch, name) for name in (of_torch + " " + of_both).split()]
    found += [getattr(torch.Tensor, name) for name in (of_tensors + " " + of_both).split()]
    found += [getattr(nn.init, name) for name in inits.split()]
    found += [f for name, f in vars(torch.linalg).items() if callable(f) and name[0] != "_"]
    found += [torch.Tensor.T.__get__, torch.Tensor.mT.__get__]  # type: ignore[attr-defined]
    return frozenset(found)


def _gives_the_same_rows() -> frozenset[Callable[..., Any]]:
    """What gives the same rows again, or other values of each, as a tensor of its own."""
    of_tensors = "detach clone cpu to float double half bfloat16 abs square sqrt pow __pow__"
    of_torch = "clone detach abs square sqrt pow"
    found = [getattr(torch.Tensor, name) for name in of_tensors.split()]
    found += [getattr(torch, name) for name in of_torch.split()]
    found += [torch.Tensor.data.__get__]  # type: ignore[attr-defined]
    return frozenset(found)


_NEEDS_EVERY_ROW = _needs_every_row()
_CARRIES = _gives_the_same_rows()


def _strays(values: Iterable[Any]) -> Iterator[_Stray]:
    for value in values:
        if isinstance(value, _Stray):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _strays(value)


def _describe_stray(parameter: ShardedParameter, func: Callable[..., Any]) -> str:
    start, stop = parameter.rows
    return (
        f"{getattr(func, '__name__', func)}() was called on {parameter.full_name!r} outside the "
        f"forward of its unit {parameter.unit_name!r}, where this rank has rows {start}:{stop} of "
        f"shape {tuple(parameter.global_shape)} only. Call the unit's forward, use the weight "
        "inside it, make the modules that share it one unit with units=..., or wrap the code in "
        "`with sw.unsharded(model):` on every rank."
    )


def mark_sharded(
    parameter: nn.Parameter,
    *,
    global_shape: tuple[int, ...],
    rows: tuple[int, int],
    unit_name: str,
    full_name: str,
) -> None:
    """Turn a plain parameter into a `ShardedParameter` in place, keeping its identity."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ShardedParameter
    parameter.global_shape = torch.Size(global_shape)  # type: ignore[attr-defined]
    parameter.global_numel = math.prod(global_shape)  # type: ignore[attr-defined]
    parameter.rows = rows  # type: ignore[attr-defined]
    parameter.unit_name = unit_name  # type: ignore[attr-defined]
    parameter.full_name = full_name  # type: ignore[attr-defined]


def mark_plain(parameter: nn.Parameter) -> None:
    """Undo `mark_sharded`."""
    if type(parameter) in (ShardedParameter, _StrayParameter):
        parameter.__class__ = nn.Parameter
    for name in ("global_shape", "global_numel", "rows", "unit_name", "full_name"):
        parameter.__dict__.pop(name, None)
