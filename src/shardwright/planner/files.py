"""Read models and clusters from JSON and TOML; unknown keys fail with the nearest valid one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardwright.core.errors import SpecError, nearest
from shardwright.planner.checks import require_positive, require_type
from shardwright.planner.cluster import ClusterSpec, LinkSpec, make_cluster
from shardwright.planner.device import DeviceSpec, find_device
from shardwright.planner.huggingface import from_config
from shardwright.planner.model import ModelSpec
from shardwright.planner.model_presets import MODELS, find_model
from shardwright.planner.text_files import read_document

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["cluster_from_table", "read_cluster", "read_model"]

SpecT = TypeVar("SpecT", bound="DataclassInstance")

_CLUSTER_KEYS = (
    "name",
    "device",
    "num_nodes",
    "devices_per_node",
    "network",
    "num_nics",
    "uses_pcie",
    "inner",
    "outer",
)


def read_model(source: str) -> ModelSpec:
    """Read a model: a preset's name, a Hugging Face `config.json`, or sizes in TOML or JSON.

    Args:
        source: Name or path; a folder stands for the `config.json` in it.

    Raises:
        SpecError: The name is unknown, or the file can't be understood.
    """
    path = Path(source)
    is_path = len(path.parts) > 1 or path.suffix in (".json", ".toml") or _exists(path)
    if source.lower() in MODELS or not is_path:
        return find_model(source)
    if path.is_dir():
        path = path / "config.json"
    found = read_document(path, "model file")
    if "model_type" in found:
        return from_config(found)
    table = _section(found, "model", f"model file {str(path)!r}")
    return _build(ModelSpec, table, f"model in {path}", name=path.stem)


def read_cluster(path: Path) -> ClusterSpec:
    """Read a cluster file.

    Raises:
        SpecError: The file can't be understood.
    """
    found = read_document(path, "cluster file")
    return cluster_from_table(
        _section(found, "cluster", f"cluster file {str(path)!r}"), f"cluster in {path}"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a name of a file
        return False


def _section(found: Mapping[str, Any], name: str, where: str) -> Any:
    """The section of that name, or all where there is none; keys beside a section are refused."""
    if name not in found:
        return found
    others = sorted(set(found) - {name})
    if others:
        raise SpecError(
            f"{where}: found {', '.join(map(repr, others))} beside the section [{name}]; move "
            "them into it, or drop them"
        )
    return found[name]


def cluster_from_table(table: Mapping[str, Any], where: str) -> ClusterSpec:
    """Build a cluster from plain data.

    Args:
        table: `device` (a name, or a table of its figures), `num_nodes`, `devices_per_node`, and
            either `network` (a name) or `outer` with `num_nics`; `inner` replaces the link inside
            a node.
        where: For messages.

    Raises:
        SpecError: A key is unknown or missing, a value impossible, or two keys say the same.
    """
    _refuse_unknown(table, _CLUSTER_KEYS, where)
    for key in ("device", "num_nodes", "devices_per_node"):
        if key not in table:
            raise SpecError(f"{where} lacks {key!r}")
    for key, kind in (
        ("num_nodes", "int"),
        ("devices_per_node", "int"),
        ("network", "str"),
        ("uses_pcie", "bool"),
        ("name", "str"),
    ):
        if key in table:
            require_type(where, key, table[key], kind)
    for first, second in (("network", "outer"), ("uses_pcie", "inner")):
        if first in table and second in table:
            raise SpecError(f"{where}: {first} and {second} describe the same link; drop one")
    if "num_nics" in table and "outer" not in table:
        raise SpecError(f"{where}: num_nics belongs to outer; give outer too, or network instead")
    require_positive(
        where, num_nodes=table["num_nodes"], devices_per_node=table["devices_per_node"]
    )
    cluster = make_cluster(
        _device(table["device"], where),
        table["num_nodes"] * table["devices_per_node"],
        devices_per_node=table["devices_per_node"],
        network=table.get("network"),
        uses_pcie=table.get("uses_pcie", False),
        name=table.get("name", ""),
    )
    changes: dict[str, Any] = {}
    if "inner" in table:
        changes["inner"] = _build(LinkSpec, table["inner"], f"inner link of {where}")
    if "outer" in table:
        changes["outer"] = _build(LinkSpec, table["outer"], f"outer link of {where}")
        changes["num_nics"] = table.get("num_nics", 1)
        changes["is_network_assumed"] = False
    return ClusterSpec(
        **{f.name: changes.get(f.name, getattr(cluster, f.name)) for f in fields(ClusterSpec)}
    )


def _device(value: Any, where: str) -> DeviceSpec:
    if isinstance(value, str):
        return find_device(value)
    owner = f"device of {where}"
    family = value.get("name", "") if isinstance(value, Mapping) else ""
    return _build(DeviceSpec, value, owner, family=family, source=where)


def _build(kind: type[SpecT], table: Any, where: str, **defaults: Any) -> SpecT:
    """Build a description from a table, after naming what it doesn't know or lacks."""
    _refuse_unknown(table, tuple(f.name for f in fields(kind)), where)
    given = {**defaults, **table}
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]
    if missing:
        raise SpecError(f"{where} lacks {', '.join(missing)}")
    return kind(**given)


def _refuse_unknown(table: Any, valid: tuple[str, ...], where: str) -> None:
    if not isinstance(table, Mapping):
        raise SpecError(f"{where} must be a table of settings, found {type(table).__name__}")
    for key in table:
        if key not in valid:
            raise SpecError(f"{where}: unknown key {key!r}; {nearest(str(key), valid)}")
