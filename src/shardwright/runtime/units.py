"""Find the units of a model and say which parameters each owns.

A unit is a module whose parameters are gathered and reduced together. Units nest: each parameter
belongs to the innermost unit that contains every module it is registered on, so that tied weights
end in one unit. What no unit claims belongs to the root, which is always unit 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn

from shardwright.core.errors import SpecError, nearest

__all__ = [
    "ROOT",
    "OwnedParameter",
    "UnitModules",
    "UnitsArgument",
    "find_blocks",
    "find_units",
    "warn_if_one_unit_dominates",
]

ROOT = "(root)"
"""Name of the unit that encloses all others."""

UnitsArgument = (
    str | type[nn.Module] | Iterable[type[nn.Module]] | Callable[[nn.Module], bool] | None
)
"""``"auto"``, a module class, several classes, or a predicate on modules."""

_LARGE_LEAF = 1 / 8
"""A lone module such as an embedding is a unit from this share of the largest unit upwards."""

_WARN_SHARE = 0.5
_WARN_NUMEL = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedParameter:
    """One parameter of a unit.

    Attributes:
        name: Its first fully qualified name.
        parameter: The object the module and the optimizer hold.
        locations: Every ``(module, attribute)`` it is registered at; several where tied.
    """

    name: str
    parameter: nn.Parameter
    locations: list[tuple[nn.Module, str]]


@dataclass(kw_only=True, slots=True, eq=False)
class UnitModules:
    """One unit as found in the model.

    Attributes:
        name: Path of its module; `ROOT` for the whole model.
        module: The module whose forward opens the unit.
        depth: Enclosing units.
        parent: Index of the innermost enclosing unit; None for the root.
        owned: Its parameters.
    """

    name: str
    module: nn.Module
    depth: int
    parent: int | None
    owned: list[OwnedParameter] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(p.parameter.numel() for p in self.owned)


def find_units(model: nn.Module, units: UnitsArgument = "auto") -> list[UnitModules]:
    """Divide a model into units.

    Args:
        model: Any module.
        units: See `UnitsArgument`; None puts the whole model in one unit.

    Returns:
        Units in module order, the root first; units without parameters are left out.

    Raises:
        SpecError: The argument is of no known kind, or matches no module.
    """
    chosen = _chosen_modules(model, units)
    found = [UnitModules(name=ROOT, module=model, depth=0, parent=None)]
    paths = [""]
    seen = {id(model)}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in chosen and id(module) not in seen:
            seen.add(id(module))
            parent = _innermost(path, paths)
            depth = found[parent].depth + 1
            found.append(UnitModules(name=path, module=module, depth=depth, parent=parent))
            paths.append(path)
    _assign_parameters(model, found)
    return _without_empty(found)


def find_blocks(model: nn.Module, units: UnitsArgument = "auto") -> list[nn.Module]:
    """The repeated blocks of a model, in module order, without lone modules that are only large.

    Args:
        model: Any module, sharded or not.
        units: ``"auto"``, or what `find_units` takes.
    """
    if isinstance(units, str) and units == "auto":
        blocks: list[nn.Module] = []
        _collect_blocks(model, blocks)
        chosen = {id(b) for b in blocks}
    else:
        chosen = _chosen_modules(model, units)
    return [m for m in model.modules() if id(m) in chosen]


def warn_if_one_unit_dominates(units: list[UnitModules], itemsize: int) -> None:
    """Warn where gathering one unit means gathering most of the model.

    Args:
        units: All units.
        itemsize: Bytes per gathered element.
    """
    total = sum(u.numel for u in units)
    largest = max(units, key=lambda u: u.numel)
    if total >= _WARN_NUMEL and largest.numel > _WARN_SHARE * total:
        share = largest.numel / total
        warnings.warn(
            f"unit {largest.name!r} holds {share:.0%} of the model's {total:,} parameters: while "
            f"it computes, {largest.numel * itemsize / 2**30:.3f} GiB are gathered on every rank. "
            "Divide it with units=<class of the repeated block>.",
            stacklevel=3,
        )


def _chosen_modules(model: nn.Module, units: UnitsArgument) -> set[int]:
    if units is None:
        return set()
    if isinstance(units, str):
        if units != "auto":
            raise SpecError(
                f"units must be 'auto', a module class, classes, a callable or None, found "
                f"{units!r}; to name a class pass the class itself"
            )
        return _automatic(model)
    if isinstance(units, type):
        return _of_classes(model, (units,))
    if callable(units):
        matched = {id(m) for m in model.modules() if m is not model and units(m)}
        if not matched:
            raise SpecError(
                f"units={getattr(units, '__name__', units)!r} is true for no module below "
                f"{type(model).__name__}; check the predicate, or pass units='auto'"
            )
        return matched
    if isinstance(units, Iterable):
        return _of_classes(model, tuple(units))
    raise SpecError(
        f"units must be 'auto', a module class, classes, a callable or None, found {units!r}"
    )


def _of_classes(model: nn.Module, classes: tuple[object, ...]) -> set[int]:
    matched: set[int] = set()
    present = sorted({type(m).__name__ for m in model.modules() if m is not model})
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise SpecError(f"units must be subclasses of nn.Module, found {cls!r}")
        ids = {id(m) for m in model.modules() if m is not model and isinstance(m, cls)}
        if not ids:
            raise SpecError(
                f"units={cls.__name__} matches no module of {type(model).__name__}; "
                f"{nearest(cls.__name__, present)}"
            )
        matched |= ids
    return matched


def _automatic(model: nn.Module) -> set[int]:
    """Repeated blocks, and lone modules that are large beside them."""
    blocks: list[nn.Module] = []
    _collect_blocks(model, blocks)
    opaque = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    inside = {id(m) for block in blocks for m in block.modules()}
    # Attention reads its output projection's weight without calling the projection.
    inside |= {id(m) for attention in opaque for m in attention.modules() if m is not attention}
    largest = max((_numel(b) for b in blocks), default=_numel(model))
    chosen = {id(b) for b in blocks}
    for module in model.modules():
        if module is model or id(module) in inside or not _is_callable(module):
            continue
        own = sum(p.numel() for p in module.parameters(recurse=False))
        if own and own >= _LARGE_LEAF * largest:
            chosen.add(id(module))
    return chosen


def _collect_blocks(module: nn.Module, blocks: list[nn.Module]) -> None:
    children = [c for c in module.children() if next(c.parameters(), None) is not None]
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    is_container = is_list or isinstance(module, nn.Sequential)
    for child in children:
        alike = sum(type(other) is type(child) for other in children)
        has_children = next(child.children(), None) is not None
        is_callable = _is_callable(child)
        repeated = alike > 1 and (is_container or has_children)
        if is_callable and (repeated or (is_list and has_children)):
            blocks.append(child)
        elif not isinstance(child, nn.MultiheadAttention):
            _collect_blocks(child, blocks)


def _is_callable(module: nn.Module) -> bool:
    """Whether a module has a forward of its own: lists and dicts of things are never called."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _innermost(path: str, unit_paths: list[str]) -> int:
    """Index of the unit with the longest path that encloses `path`."""
    best = 0
    for index, candidate in enumerate(unit_paths):
        encloses = candidate == "" or path == candidate or path.startswith(candidate + ".")
        if encloses and len(candidate) >= len(unit_paths[best]):
            best = index
    return best


def _assign_parameters(model: nn.Module, units: list[UnitModules]) -> None:
    """Give each parameter to the innermost unit that contains all its locations."""
    unit_of_module = _units_of_modules(model, units)
    owned: dict[int, OwnedParameter] = {}
    holders: dict[int, list[int]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = id(parameter)
            if key not in owned:
                full = f"{path}.{name}" if path else name
                owned[key] = OwnedParameter(name=full, parameter=parameter, locations=[])
            owned[key].locations.append((module, name))
            holders.setdefault(key, []).extend(unit_of_module[id(module)])
    for key, parameter in owned.items():
        units[_common_ancestor(units, holders[key])].owned.append(parameter)


def _units_of_modules(model: nn.Module, units: list[UnitModules]) -> dict[int, list[int]]:
    """For each module, the units it lies in: several where it is registered at several paths."""
    index_of = {id(u.module): i for i, u in enumerate(units)}
    result: dict[int, list[int]] = {}

    def visit(module: nn.Module, unit: int) -> None:
        unit = index_of.get(id(module), unit)
        known = result.setdefault(id(module), [])
        if unit in known:
            return
        known.append(unit)
        for child in module.children():
            visit(child, unit)

    visit(model, 0)
    return result


def _common_ancestor(units: list[UnitModules], indices: list[int]) -> int:
    def chain(index: int | None) -> list[int]:
        found = []
        while index is not None:
            found.append(index)
            index = units[index].parent
        return found

    common = set(chain(indices[0]))
    for index in indices[1:]:
        common &= set(chain(index))
    return max(common, key=lambda i: units[i].depth)


def _without_empty(units: list[UnitModules]) -> list[UnitModules]:
    """Drop units that own nothing, handing their children to their parents."""
    kept: list[UnitModules] = []
    new_index: dict[int, int] = {}
    for index, unit in enumerate(units):
        parent = unit.parent
        while parent is not None and parent not in new_index:
            parent = units[parent].parent
        if index == 0 or unit.owned:
            new_index[index] = len(kept)
            unit.parent = None if parent is None else new_index[parent]
            unit.depth = 0 if unit.parent is None else kept[unit.parent].depth + 1
            kept.append(unit)
    return kept
