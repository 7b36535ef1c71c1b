"""Which parameters one owner holds whole: for optimizers that can't work on some rows of a matrix.

`blueprint` asks once, before layouts; from there on everything follows from the layouts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from shardwright.core.errors import SpecError, nearest
from shardwright.core.layout import UnitLayout

__all__ = ["WholeArgument", "choose_whole", "warn_if_whole_pads"]

WholeArgument = str | Iterable[str] | Callable[[str, nn.Parameter], bool] | None
"""``"matrices"``, ``"all"``, names of parameters, or a predicate on names and parameters."""

_KINDS: dict[str, Callable[[nn.Parameter], bool]] = {
    "matrices": lambda parameter: parameter.ndim == 2,
    "all": lambda _: True,
}

_WARN_SHARE = 0.25
_WARN_NUMEL = 1_000_000


def choose_whole(model: nn.Module, whole: WholeArgument) -> set[int]:
    """Find the parameters that are to be owned whole.

    Args:
        model: The model.
        whole: See `WholeArgument`. Kinds and predicates choose among trainable parameters, since
            optimizers look at no others.

    Returns:
        Their ids.

    Raises:
        SpecError: The argument is of no known kind, chooses nothing, or names a parameter that
            isn't there or doesn't train.
    """
    if whole is None:
        return set()
    if isinstance(whole, str):
        if whole not in _KINDS:
            raise SpecError(
                f"whole must be {' or '.join(map(repr, _KINDS))}, a list of parameter names or a "
                f"callable (name, parameter) -> bool, found {whole!r}; {nearest(whole, _KINDS)}"
            )
        kind = _KINDS[whole]
        chosen = {id(p) for p in model.parameters() if p.requires_grad and kind(p)}
    elif callable(whole):
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        chosen = {id(p) for name, p in trainable if whole(name, p)}
    elif isinstance(whole, Iterable):
        chosen = _by_name(model, whole)
    else:
        raise SpecError(
            f"whole must be {' or '.join(map(repr, _KINDS))}, a list of parameter names or a "
            f"callable (name, parameter) -> bool, found {whole!r}"
        )
    if not chosen:
        label = getattr(whole, "__name__", whole)
        raise SpecError(
            f"whole={label!r} chooses no trainable parameter of {type(model).__name__}; leave it "
            "out, or choose parameters that the optimizer must see whole"
        )
    return chosen


def _by_name(model: nn.Module, names: Iterable[str]) -> set[int]:
    known = dict(model.named_parameters(remove_duplicate=False))
    chosen = set()
    for name in names:
        parameter = known.get(name) if isinstance(name, str) else None
        if parameter is None:
            raise SpecError(
                f"whole names {name!r}, which is no parameter of {type(model).__name__}; "
                f"{nearest(str(name), known)}"
            )
        if not parameter.requires_grad:
            raise SpecError(
                f"whole names {name!r}, which is frozen: no optimizer looks at it, and owning it "
                "whole would only pad the others. Leave it out, or let it require grad."
            )
        chosen.add(id(parameter))
    return chosen


def warn_if_whole_pads(layouts: Sequence[UnitLayout | None]) -> None:
    """Warn where owning parameters whole costs much padding.

    Args:
        layouts: Layouts of all units.
    """
    padded = [
        layout
        for layout in layouts
        if layout is not None and any(p.spec.is_whole for p in layout.placements)
    ]
    padding = sum(layout.padding_numel for layout in padded)
    used = sum(layout.used_numel for layout in padded)
    if used < _WARN_NUMEL or padding <= _WARN_SHARE * used:
        return
    worst = max(padded, key=lambda layout: layout.padding_numel / max(1, layout.used_numel))
    largest = max((p.spec for p in worst.placements if p.spec.is_whole), key=lambda s: s.numel)
    warnings.warn(
        f"whole= pads units by {padding / used:.0%}: {padding:,} elements beside {used:,} of "
        f"parameters, which every gather and reduction sends too and every rank's shards, slots "
        f"and gradients hold their part of. Worst is unit {worst.name!r}: each of its "
        f"{worst.num_owners} owners' chunks has room for its share, the largest with "
        f"{largest.name!r} {largest.shape}. Put more matrices into a unit (units=..., several "
        "blocks at a time), shard over fewer ranks (a mesh with replicas and strategy='hybrid'), "
        "or choose fewer parameters.",
        stacklevel=5,
    )
