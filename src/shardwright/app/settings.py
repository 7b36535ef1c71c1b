"""A `Config` from a TOML file and command-line flags, with one plain line per mistake.

Later sources win: defaults, the preset's recommendations, the file, then flags and `--set`, which
may not both set a key. The command line calls `load_config`; `to_toml` writes a configuration back
so that it can be run again.
"""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from shardwright.app.config import Config
from shardwright.app.presets import RECOMMENDED
from shardwright.core.errors import SpecError, nearest
from shardwright.planner.text_files import parse_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from pydantic_core import ErrorDetails

Sections = dict[str, dict[str, Any]]


def load_config(
    file: Path | None, flags: Mapping[str, Mapping[str, Any]], assignments: Iterable[str] = ()
) -> Config:
    """Build the configuration.

    Args:
        file: A TOML file, or None.
        flags: Section to key to value; None values count as not given.
        assignments: `section.key=value` texts, the value as in TOML; a bare word is a string.

    Returns:
        The validated configuration.

    Raises:
        SpecError: Naming the key, what it takes and what was found.
    """
    given: Sections = {} if file is None else read_toml(file)
    merge(given, flags)
    assigned: set[tuple[str, str]] = set()
    for assignment in assignments:
        section, key, value = parse_assignment(assignment)
        if (section, key) in assigned or flags.get(section, {}).get(key) is not None:
            raise SpecError(f"--set {assignment} sets {section}.{key} a second time; drop one")
        assigned.add((section, key))
        given.setdefault(section, {})[key] = value
    try:
        return Config.model_validate(_with_recommended(given))
    except ValidationError as error:
        lines = [_describe(details) for details in error.errors(include_url=False)]
        raise SpecError("\n".join(lines)) from None


def read_toml(file: Path) -> Sections:
    """Read a TOML file of sections.

    Args:
        file: Its path.

    Returns:
        Section to key to value, not validated beyond its two levels.

    Raises:
        SpecError: If the file is missing, is no TOML or has keys outside sections.
    """
    try:
        document = parse_toml(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SpecError(
            f"configuration {str(file)!r} must be a readable file; found: {error.strerror}; "
            f"check the path"
        ) from error
    except ValueError as error:
        raise SpecError(
            f"configuration {str(file)!r} must be valid TOML; found: {error}; correct the file"
        ) from error
    for name, value in document.items():
        if not isinstance(value, dict):
            raise SpecError(_unknown_key((name,), value))
    return document


def merge(base: Sections, flags: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the flags that were given over `base`, in place."""
    for section, values in flags.items():
        present = {key: value for key, value in values.items() if value is not None}
        if present:
            base.setdefault(section, {}).update(present)


def parse_assignment(text: str) -> tuple[str, str, Any]:
    """Take `section.key=value` apart.

    Args:
        text: For instance `train.lr=1e-3` or `run.prompt=class`.

    Returns:
        Section, key and value; what is no TOML value is a string.

    Raises:
        SpecError: If the text has another form.
    """
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise SpecError(
            f"--set takes section.key=value; found {text!r}; write for instance --set train.lr=1e-3"
        )
    try:
        parsed = parse_toml(f"value = {raw}")
    except ValueError:
        return section, key, raw
    return section, key, parsed["value"] if len(parsed) == 1 else raw


def to_toml(config: Config) -> str:
    """Write a configuration as TOML; keys that are None are left out.

    Args:
        config: Any configuration.

    Returns:
        Text that `load_config` reads back to an equal configuration.
    """
    lines: list[str] = []
    for section, values in config.model_dump(mode="python").items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_value(item)}" for key, item in values.items() if item is not None]
        lines.append("")
    return "\n".join(lines)


def _value(value: bool | int | float | str | list[Any]) -> str:
    """Write one value: JSON's forms are TOML's, but for control characters."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _with_recommended(given: Sections) -> Sections:
    """Add the preset's recommendations beneath what was given."""
    model = given.get("model", {})
    preset = model.get("preset", Config().model.preset)
    recommended = dict(RECOMMENDED.get(preset, {})) if isinstance(preset, str) else {}
    train = given.get("train", {})
    if {"micro_batch", "accumulation"} <= train.keys():
        recommended.pop("global_batch", None)
    return {**given, "train": {**recommended, **train}}


def _describe(details: ErrorDetails) -> str:
    """Turn one of pydantic's complaints into a line."""
    location, found = details["loc"], details["input"]
    if details["type"] == "extra_forbidden":
        return _unknown_key(location, found)
    message = details["msg"].removeprefix("Value error, ")
    name = ".".join(str(part) for part in location)
    if details["type"] == "value_error":  # our own: already a full sentence
        return f"{name}: {message}" if len(location) > 1 else message
    wanted = message.replace("Input should be", "must be").replace("List should", "must")
    wanted = wanted.replace(" after validation", "").replace("String should", "must")
    return f"{name} {wanted}; found {found!r}; it is: {_description(location)}"


def _unknown_key(location: tuple[int | str, ...], found: object) -> str:
    """Say that a key isn't known, and which one may be meant."""
    sections = _keys()
    if len(location) == 1:
        name = str(location[0])
        if isinstance(found, dict):
            return f"unknown section [{name}]; {nearest(name, sections)}"
        if name in sections:
            return f"[{name}] must be a section of keys; found {name} = {found!r}"
        return f"keys must stand in sections; found {name!r} outside; {_home(name, sections)}"
    section, key = str(location[0]), str(location[1])
    if any(key in keys for keys in sections.values()):
        return f"unknown key {key!r} in [{section}]; {_home(key, sections)}"
    return f"unknown key {key!r} in [{section}]; {nearest(key, sections[section])}"


def _home(key: str, sections: Mapping[str, list[str]]) -> str:
    """Say which section holds a key, or the one most like it."""
    all_keys = [known for keys in sections.values() for known in keys]
    for known in difflib.get_close_matches(key, all_keys, n=1, cutoff=0.5):
        homes = [f"[{section}]" for section, keys in sections.items() if known in keys]
        return f"{known!r} belongs to {' or '.join(homes)}"
    return "the sections are " + ", ".join(f"[{section}]" for section in sections)


def _keys() -> dict[str, list[str]]:
    """List every section's keys."""
    return {
        name: list(getattr(Config(), name).__class__.model_fields) for name in Config.model_fields
    }


def _description(location: tuple[int | str, ...]) -> str:
    """Find what the setting at a location is for."""
    model: type[BaseModel] = Config
    description = ""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            break
        description = field.description or ""
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return description
