"""Text files that people name: read and written whole, each failure one line that says what to do.

The command line's files pass through here, so that a missing, binary, deeply nested or unwritable
one is told the same way everywhere.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from shardwright.core.errors import SpecError

__all__ = ["parse_toml", "read_document", "read_text", "require_writable", "write_text"]


def read_text(path: Path, what: str) -> str:
    """Read a file of UTF-8 text, with or without a byte order mark.

    Args:
        path: Where.
        what: What it is, for messages, such as ``"cluster file"``.

    Raises:
        SpecError: It can't be read, holds other bytes, or nothing.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise SpecError(
                f"{what} {str(path)!r} must be UTF-8 text; found other bytes, first at byte "
                f"{error.start}; give another file, or convert it"
            ) from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError(f"can't read the {what} {str(path)!r}: {reason}; check the path") from error
    if not text.strip():
        raise SpecError(f"the {what} {str(path)!r} is empty; give another file")
    return text


def read_document(path: Path, what: str) -> dict[str, Any]:
    """Read a table of settings: TOML where the name ends so, else JSON.

    Args:
        path: Where.
        what: What it is, for messages.

    Raises:
        SpecError: It can't be read or parsed.
    """
    text = read_text(path, what)
    is_toml = path.suffix.lower() == ".toml"
    try:
        found = parse_toml(text) if is_toml else _parse_json(text)
    except ValueError as error:
        kind = "TOML" if is_toml else "JSON (TOML files end in .toml)"
        raise SpecError(f"{what} {str(path)!r} must be {kind}; found: {error}") from error
    if not isinstance(found, dict):
        raise SpecError(
            f"{what} {str(path)!r} must hold a table of settings, found {type(found).__name__}"
        )
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: It is none, or nested deeper than Python can follow.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def require_writable(path: Path, what: str) -> None:
    """Raise where a file can't be written, before the work whose outcome it is to hold.

    Args:
        path: Where it is to be; may exist.
        what: What it is, for messages.

    Raises:
        SpecError: The folder is missing, the path is a folder, or permissions forbid it.
    """
    try:
        found = _obstacle(path)
    except OSError as error:
        found = f"{error.strerror}; choose another place"
    if found:
        raise SpecError(f"can't write the {what} {str(path)!r}: {found}")


def _obstacle(path: Path) -> str:
    """What keeps a file from being written, and what to do; empty where nothing does."""
    folder = path.parent
    if path.is_dir():
        return "it is a folder; give the name of a file"
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}; make it first"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return "permission denied; choose another place"
    return ""


def write_text(path: Path, text: str, what: str) -> None:
    """Write a file of UTF-8 text, line ends as they are.

    Args:
        path: Where.
        text: What.
        what: What it is, for messages.

    Raises:
        SpecError: It can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise SpecError(
            f"can't write the {what} {str(path)!r}: {error.strerror}; choose another place"
        ) from error
