"""Rows that are used as if they were the whole: refused, with what to do instead.

[Note: stray reads] Inside its unit's forward, ``module.weight`` is the gathered weight. Outside, it
is the parameter itself, with this rank's rows, and a layer computed from it would often fit: rows
of a Linear weight are only fewer outputs. So an attribute read from outside (`StrayReads` sees it,
while ``parameters()`` and optimizers go past it) makes that one parameter refuse what layers,
statistics and initialisers are computed with, its copies included. Parameters nobody reads so cost
nothing. Gradients (`ShardedGradient`) refuse the same always: an optimizer's step looks at each
once, which costs it one call of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardwright.core.errors import LifecycleError
from shardwright.core.layout import ParameterSpec
from shardwright.runtime.parameter import ShardedParameter

__all__ = ["ShardedGradient", "StrayReads"]


class _Rows(torch.Tensor):
    """Some rows of a parameter or gradient: refuses what needs every row."""

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
            given = (*args, *(kwargs or {}).values())
            if _is_refused(func, given):
                for rows in _find_rows(given):
                    if not rows.is_full():
                        raise LifecycleError(rows.refusal(func))
            if func is torch.Tensor.detach_:
                return args[0]  # a view, which torch refuses; these have no graph
            result = func(*args, **(kwargs or {}))
            return _carried(given, result) if func in _CARRIES else result

    def like(self, values: torch.Tensor) -> _Rows:
        """Make an alias of other values of the same rows, which refuses the same."""
        raise NotImplementedError

    def is_full(self) -> bool:
        """Whether all rows are here now, on every rank."""
        return False

    def refusal(self, func: Callable[..., Any]) -> str:
        """What to say to who called a function that needs every row."""
        raise NotImplementedError


class _StrayParameter(_Rows, ShardedParameter):
    """A sharded parameter that was read outside its unit's forward."""

    is_full: Callable[[], bool]

    def like(self, values: torch.Tensor) -> _Rows:
        """Such rows of this parameter."""
        return _Copy.of(self, values)

    def refusal(self, func: Callable[..., Any]) -> str:
        """Name the parameter, its unit and the ways out."""
        return (
            f"{_name(func)} was called on {self.full_name!r} outside the forward of its unit "
            f"{self.unit_name!r}, where {_held(self.rows, self.global_shape)}. Call the unit's "
            "forward (one that replaces it must call it), use the weight inside it, make the "
            "modules that share it one unit with units=..., or wrap the code in "
            "`with sw.unsharded(model):` on every rank."
        )


class _Values(_Rows):
    """Rows that are no parameter: copied and saved as a plain tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class ShardedGradient(_Values):
    """This rank's rows of a gradient. It doesn't hold the parameter, whose `.grad` it is."""

    _full_name: str
    _place: str

    @classmethod
    def of(
        cls, spec: ParameterSpec, rows: tuple[int, int], values: torch.Tensor
    ) -> ShardedGradient:
        """Make an alias of this rank's rows of a gradient.

        Args:
            spec: The parameter's.
            rows: ``(start, stop)`` of dimension 0.
            values: The gradient there.
        """
        gradient = values.as_subclass(cls)
        gradient._full_name = spec.name
        gradient._place = _held(rows, spec.shape)
        return gradient

    def like(self, values: torch.Tensor) -> _Rows:
        """Such rows of this gradient."""
        gradient = values.as_subclass(type(self))
        gradient._full_name = self._full_name
        gradient._place = self._place
        return gradient

    def refusal(self, func: Callable[..., Any]) -> str:
        """Name the parameter and what works on all ranks' rows."""
        return (
            f"{_name(func)} was called on the gradient of {self._full_name!r}, of which "
            f"{self._place}. sw.clip_grad_norm_(model, max_norm) takes the norm over all ranks "
            "(math.inf only tells it), and sw.GradScaler checks all ranks for infinities. For an "
            "optimizer that combines elements, let ranks own whole parameters: "
            "sw.shard(model, ..., whole='all'). For sums of your own over all ranks, take these "
            "rows as a plain tensor: .as_subclass(torch.Tensor)."
        )


class _Copy(_Values):
    """Such a parameter's rows, copied or computed with element by element."""

    _origin: _StrayParameter

    @classmethod
    def of(cls, origin: _StrayParameter, rows: torch.Tensor) -> _Copy:
        """Make an alias of a tensor that knows whose rows it holds."""
        copy = rows.as_subclass(cls)
        copy._origin = origin
        return copy

    def like(self, values: torch.Tensor) -> _Rows:
        """Such rows of the same parameter."""
        return _Copy.of(self._origin, values)

    def is_full(self) -> bool:
        """Whether the parameter is."""
        return self._origin.is_full()

    def refusal(self, func: Callable[..., Any]) -> str:
        """As the parameter's."""
        return self._origin.refusal(func)


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
        if type(parameter) is ShardedParameter and not parameter.is_owned_whole:
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
        prelu normalize cosine_similarity l1_loss mse_loss scaled_dot_product_attention
        multi_head_attention_forward"""
    of_torch = """matmul mm bmm mv addmm addmv baddbmm einsum tensordot inner outer t transpose
        permute movedim swapaxes cat stack index_select gather layer_norm rms_norm group_norm
        batch_norm prelu eye normal norm_except_dim dist std_mean var_mean"""
    of_tensors = """matmul mm bmm mv addmm __matmul__ __rmatmul__ __getitem__ __setitem__ t
        transpose permute index_select gather __array__ numpy tolist item view_as bernoulli_ cauchy_
        exponential_ geometric_ log_normal_ normal_ random_ uniform_ index_add_ index_copy_
        index_fill_ scatter_ fill_diagonal_ tril_ triu_"""
    of_both = """norm sum mean std var max min amax amin aminmax median quantile count_nonzero prod
        logsumexp softmax log_softmax cumsum argmax argmin sort topk unique histc trace det inverse
        svd qr dot vdot nansum nanmean"""
    inits = """uniform_ normal_ trunc_normal_ eye_ dirac_ xavier_uniform_ xavier_normal_
        kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_"""
    found = [getattr(functional, name) for name in functions.split()]
    found += [getattr(torch, name) for name in (of_torch + " " + of_both).split()]
    found += [getattr(torch.Tensor, name) for name in (of_tensors + " " + of_both).split()]
    found += [getattr(nn.init, name) for name in inits.split()]
    found += [f for name, f in vars(torch.linalg).items() if callable(f) and name[0] != "_"]
    found += [torch.Tensor.T.__get__, torch.Tensor.mT.__get__]  # type: ignore[attr-defined]
    found += [torch._foreach_norm, torch._amp_foreach_non_finite_check_and_unscale_]
    return frozenset(found)


def _gives_the_same_rows() -> frozenset[Callable[..., Any]]:
    """What gives the same rows again, or something computed from each element."""
    of_tensors = """cpu to float double half bfloat16 contiguous view __getitem__ __pow__ __mul__
        __rmul__ __add__ __radd__ __sub__ __rsub__ __truediv__ __neg__"""
    of_torch = "_foreach_mul _foreach_div _foreach_add _foreach_abs _foreach_pow"
    of_both = "clone detach abs square sqrt pow mul add sub div neg reshape flatten ravel"
    found = [getattr(torch.Tensor, name) for name in (of_tensors + " " + of_both).split()]
    found += [getattr(torch, name) for name in (of_torch + " " + of_both).split()]
    found += [torch.Tensor.data.__get__]  # type: ignore[attr-defined]
    return frozenset(found)


_NEEDS_EVERY_ROW = _needs_every_row()
_CARRIES = _gives_the_same_rows()
_PAIRWISE = frozenset((torch.max, torch.min, torch.Tensor.max, torch.Tensor.min))
"""What takes each element by itself where it is given two tensors."""


_INDEXING = frozenset((torch.Tensor.__getitem__, torch.Tensor.__setitem__))


def _is_refused(func: Callable[..., Any], given: tuple[Any, ...]) -> bool:
    if func is torch.Tensor.requires_grad_:  # as nn.Parameter(rows) does
        return isinstance(given[0], _Copy)
    if func not in _NEEDS_EVERY_ROW:
        return False
    second = given[1] if len(given) > 1 else None
    if not isinstance(second, torch.Tensor):
        return True
    is_mask = second.dtype == torch.bool and second.shape == given[0].shape
    return not (func in _PAIRWISE or (func in _INDEXING and is_mask))


def _carried(given: tuple[Any, ...], result: Any) -> Any:
    """Let what was computed from rows, one tensor or several, refuse what they refuse."""
    if isinstance(result, (list, tuple)):
        return tuple(_carried((r,), each) for r, each in zip(given[0], result, strict=True))
    source = next(_find_rows(given[:2]), None)
    return result if source is None or isinstance(result, _Rows) else source.like(result)


def _find_rows(values: Iterable[Any]) -> Iterator[_Rows]:
    for value in values:
        if isinstance(value, _Rows):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _find_rows(value)


def _name(func: Callable[..., Any]) -> str:
    return f"{getattr(func, '__name__', func)}()"


def _held(rows: tuple[int, int], shape: tuple[int, ...]) -> str:
    return f"this rank has rows {rows[0]}:{rows[1]} of shape {tuple(shape)} only"
