"""Read models and clusters from JSON and TOML; unknown keys fail with the nearest valid one."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardwright.core.errors import SpecError, nearest
from shardwright.planner.cluster import ClusterSpec, LinkSpec, make_cluster
from shardwright.planner.device import DeviceSpec, find_device
from shardwright.planner.huggingface import from_config
from shardwright.planner.model import ModelSpec
from shardwright.planner.model_presets import MODELS, find_model

__all__ = ["cluster_from_table", "read_cluster", "read_document", "read_model"]

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


def read_document(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file, by its ending.

    Raises:
        SpecError: It can't be read or parsed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise SpecError(f"can't read {path}: {error}") from error
    if not isinstance(found, dict):
        raise SpecError(f"{path} must hold a table of settings, found {type(found).__name__}")
    return found


def read_model(source: str) -> ModelSpec:
    """Read a model: a preset's name, a Hugging Face `config.json`, or sizes in TOML or JSON.

    Args:
        source: Name or path; a folder stands for the `config.json` in it.

    Raises:
        SpecError: The name is unknown, or the file can't be understood.
    """
    path = Path(source)
    if source.lower() in MODELS or not path.exists():
        return find_model(source)
    if path.is_dir():
        path = path / "config.json"
    found = read_document(path)
    if "model_type" in found:
        return from_config(found)
    table = found.get("model", found)
    _refuse_unknown(table, tuple(f.name for f in fields(ModelSpec)), f"model in {path}")
    try:
        return ModelSpec(**{"name": path.stem, **table})
    except TypeError as error:
        raise SpecError(f"model in {path}: {error}") from error


def read_cluster(path: Path) -> ClusterSpec:
    """Read a cluster file.

    Raises:
        SpecError: The file can't be understood.
    """
    found = read_document(path)
    return cluster_from_table(found.get("cluster", found), f"cluster in {path}")


def cluster_from_table(table: Mapping[str, Any], where: str) -> ClusterSpec:
    """Build a cluster from plain data.

    Args:
        table: `device` (a name, or a table of its figures), `num_nodes`, `devices_per_node`, and
            either `network` (a name) or `outer` with `num_nics`; `inner` replaces the link inside
            a node.
        where: For messages.

    Raises:
        SpecError: A key is unknown or missing, or a value impossible.
    """
    _refuse_unknown(table, _CLUSTER_KEYS, where)
    for key in ("device", "num_nodes", "devices_per_node"):
        if key not in table:
            raise SpecError(f"{where} lacks {key!r}")
    device = _device(table["device"], where)
    cluster = make_cluster(
        device,
        table["num_nodes"] * table["devices_per_node"],
        devices_per_node=table["devices_per_node"],
        network=table.get("network"),
        uses_pcie=table.get("uses_pcie", False),
        name=table.get("name", ""),
    )
    changes: dict[str, Any] = {}
    if "inner" in table:
        changes["inner"] = _link(table["inner"], f"inner link of {where}")
    if "outer" in table:
        changes["outer"] = _link(table["outer"], f"outer link of {where}")
        changes["num_nics"] = table.get("num_nics", 1)
        changes["is_network_assumed"] = False
    elif "num_nics" in table:
        raise SpecError(f"{where}: num_nics belongs to outer; give outer too, or network instead")
    return ClusterSpec(
        **{f.name: changes.get(f.name, getattr(cluster, f.name)) for f in fields(ClusterSpec)}
    )


def _device(value: Any, where: str) -> DeviceSpec:
    if isinstance(value, str):
        return find_device(value)
    _refuse_unknown(value, tuple(f.name for f in fields(DeviceSpec)), f"device of {where}")
    try:
        return DeviceSpec(**{"family": value.get("name", ""), "source": where, **value})
    except TypeError as error:
        raise SpecError(f"device of {where}: {error}") from error


def _link(value: Mapping[str, Any], where: str) -> LinkSpec:
    _refuse_unknown(value, tuple(f.name for f in fields(LinkSpec)), where)
    try:
        return LinkSpec(**value)
    except TypeError as error:
        raise SpecError(f"{where}: {error}") from error


def _refuse_unknown(table: Any, valid: tuple[str, ...], where: str) -> None:
    if not isinstance(table, Mapping):
        raise SpecError(f"{where} must be a table of settings, found {type(table).__name__}")
    for key in table:
        if key not in valid:
            raise SpecError(f"{where}: unknown key {key!r}; {nearest(str(key), valid)}")
