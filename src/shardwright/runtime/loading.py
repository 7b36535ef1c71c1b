"""Load safetensors into a sharded model: each rank reads its own rows and nothing more.

Ranks read the files' headers, compare them with the model and with each other, and only then touch
a shard, so that a file that doesn't fit leaves the model as it was, on all ranks.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shardwright.core.errors import CheckpointError, ShardwrightError
from shardwright.runtime.engine import Engine
from shardwright.runtime.lookup import require_engine, require_root
from shardwright.runtime.transport.control import agree
from shardwright.runtime.unit import ShardedUnit
from shardwright.runtime.units import ROOT

__all__ = ["load_safetensors"]

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LISTED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """One tensor of a file, by its header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Wanted:
    """One parameter or persistent buffer of the model.

    Attributes:
        names: Every name it has; any one will do.
        shape: Over all ranks.
        unit: The unit of a parameter; None for a buffer.
        position: Its position in the unit.
        buffer: The buffer.
    """

    names: list[str]
    shape: tuple[int, ...]
    unit: ShardedUnit | None = None
    position: int = 0
    buffer: torch.Tensor | None = None


def load_safetensors(model: nn.Module, path: str | Path, *, strict: bool = True) -> None:
    """Load parameters and persistent buffers into a sharded model.

    Collective over the data ranks. Each reads, through a memory map, only the rows it holds, and
    persistent buffers whole. Values are cast to the dtype of the masters, and of the buffers. Of
    tied names one is enough. What the model held is overwritten; optimizer state is left alone.

    Args:
        model: The model that was given to `shard`; with ``initialize=False`` it needn't have had
            values before.
        path: A ``.safetensors`` file, or a folder with ``model.safetensors`` or
            ``model.safetensors.index.json``, readable by every rank.
        strict: Whether names that only one side has are an error. Otherwise those are passed over,
            and what isn't in the file keeps its values. Wrong shapes are always an error.

    Raises:
        CheckpointError: The file can't be read or doesn't fit; names what differs. The model is
            unchanged, unless the message says otherwise.
        LifecycleError: `model` isn't a whole sharded model, or is computing or unsharded.
        RankMismatchError: Another rank failed, or ranks see different files.
    """
    engine = require_engine(model)
    error: ShardwrightError | None = None
    lines: list[str] = []
    pairs: list[tuple[_Wanted, str, _Stored]] = []
    try:
        require_root(model, "load_safetensors()")
        engine.require_idle("load_safetensors()")
        stored = _read_headers(Path(path))
        pairs = _match(_wanted(engine), stored, Path(path), is_strict=strict)
        lines = [f"{name} of shape {s.shape}, {s.dtype}" for _, name, s in pairs]
    except ShardwrightError as found:
        error = found
    with engine.monitor.explaining("agreement on the file", ROOT):
        agree(engine.mesh.data_axis, lines, error, "load the same file")
    engine.let_sends_finish()
    try:
        _copy(pairs)
    except (OSError, SafetensorError, RuntimeError) as found:
        error = CheckpointError(
            f"reading {str(path)!r} failed with {type(found).__name__}: {found}. The model is "
            "loaded in part: load it again before using it."
        )
    engine.values_changed([u.index for u in engine.units if u.parameters])
    with engine.monitor.explaining("agreement on what was read", ROOT):
        agree(engine.mesh.data_axis, [], error, "read the file")


# What the file has


def _read_headers(path: Path) -> dict[str, _Stored]:
    """Read names, shapes and dtypes of a file, or of those that a folder's index lists."""
    try:
        files = _files(path)
        stored: dict[str, _Stored] = {}
        for file, expected in files.items():
            found = _read_header(file)
            missing = [name for name in expected or () if name not in found]
            if missing:
                raise CheckpointError(
                    f"{_INDEX} in {str(path)!r} says that {file.name!r} holds "
                    f"{_listing(missing)}, which it doesn't; fetch the folder again"
                )
            stored.update({n: s for n, s in found.items() if expected is None or n in expected})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as found:
        raise CheckpointError(
            f"{str(path)!r} must be a .safetensors file or a folder with {_FILE} or {_INDEX}; "
            f"reading it failed with {type(found).__name__}: {found}"
        ) from found
    return stored


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Files to read, each with the names it is to provide; None for all it has."""
    if not path.is_dir():
        return {path: None}
    if (path / _FILE).exists():
        return {path / _FILE: None}
    weight_map = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise CheckpointError(f"{_INDEX} names {file!r}, which is not a file beside it")
        names = files.setdefault(path / file, set())
        assert names is not None, "made just now"
        names.add(name)
    return files


def _read_header(file: Path) -> dict[str, _Stored]:
    with safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {
            name: _Stored(file=file, shape=tuple(s.get_shape()), dtype=str(s.get_dtype()))
            for name, s in slices.items()
        }


# What the model wants


def _wanted(engine: Engine) -> list[_Wanted]:
    """Every parameter and persistent buffer, under all its names."""
    paths: dict[int, list[str]] = {}
    buffers: dict[int, _Wanted] = {}
    for path, module in engine.model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        paths.setdefault(id(module), []).append(prefix)
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            shape = tuple(buffer.shape)
            entry = buffers.setdefault(id(buffer), _Wanted(names=[], shape=shape, buffer=buffer))
            entry.names.append(prefix + name)
    parameters = [
        _Wanted(
            names=[prefix + name for m, name in owned.locations for prefix in paths[id(m)]],
            shape=tuple(unit.layout.placements[position].spec.shape),
            unit=unit,
            position=position,
        )
        for unit in engine.units
        for position, owned in enumerate(unit.modules.owned)
    ]
    return [*parameters, *buffers.values()]


def _match(
    wanted: Iterable[_Wanted], stored: Mapping[str, _Stored], path: Path, *, is_strict: bool
) -> list[tuple[_Wanted, str, _Stored]]:
    """Pair what the model wants with what the file has.

    Raises:
        CheckpointError: They don't fit; names everything that differs.
    """
    pairs: list[tuple[_Wanted, str, _Stored]] = []
    missing: list[str] = []
    unfit: list[str] = []
    left = set(stored)
    for want in wanted:
        found = [name for name in want.names if name in stored]
        left.difference_update(found)
        if not found:
            missing.append(want.names[0])
            continue
        have = stored[found[0]]
        is_float = have.dtype.startswith(("F", "BF"))
        if have.shape != want.shape:
            unfit.append(f"{found[0]!r} has shape {have.shape}, the model's is {want.shape}")
        elif want.unit is not None and not is_float:
            unfit.append(f"{found[0]!r} has dtype {have.dtype}, a parameter is floating-point")
        pairs.append((want, found[0], have))
    problems = list(unfit)
    if is_strict and missing:
        problems.append(f"missing in the file: {_listing(missing, near=left)}")
    if is_strict and left:
        problems.append(f"unknown to the model: {_listing(sorted(left))}")
    if problems:
        remedy = "" if unfit else "; pass strict=False to load what both have"
        raise CheckpointError(
            f"{str(path)!r} does not fit the model: {'; '.join(problems)}{remedy}"
        )
    return pairs


def _listing(names: list[str], *, near: Iterable[str] = ()) -> str:
    """Some names, each with the one it most resembles among others."""
    others = sorted(near)
    shown = []
    for name in names[:_LISTED]:
        close = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
        shown.append(f"{name!r} (the file has {close[0]!r})" if close else repr(name))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(shown) + more


# Values


@torch.no_grad()
def _copy(pairs: Iterable[tuple[_Wanted, str, _Stored]]) -> None:
    """Copy this rank's rows of every pair into shards, and buffers whole."""
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for want, name, have in pairs:
            start, stop = (0, 1) if want.unit is None else want.unit.rows(want.position)
            if stop == start:
                continue
            if have.file not in opened:
                opened[have.file] = stack.enter_context(safe_open(have.file, framework="pt"))
            file = opened[have.file]
            if want.buffer is not None:
                want.buffer.copy_(file.get_tensor(name))
            elif want.unit is not None:
                whole = not want.shape
                rows = file.get_tensor(name) if whole else file.get_slice(name)[start:stop]
                want.unit.store_rows(want.position, rows)
