"""What a run leaves behind: `config.toml`, `metrics.jsonl` and `summary.json` in one folder.

Rank 0 alone opens a `RunFolder`; a line of `metrics.jsonl` is one JSON object, complete on disk
before the next step starts.
"""

from __future__ import annotations

import json
import math
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.app.settings import to_toml
from shardwright.core.errors import ShardwrightError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from shardwright.app.config import Config

__all__ = ["METRICS", "RUNS", "RunFolder", "RunFolderError", "require_unused"]

CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"

RUNS = Path("runs")
"""Where folders are made that nobody names."""


class RunFolderError(ShardwrightError, ValueError):
    """The run folder is in use or can't be written; raised on all ranks alike."""


def require_unused(folder: Path) -> None:
    """Refuse a folder that another run has written to, or that can't be made.

    Args:
        folder: May not exist yet.

    Raises:
        RunFolderError: The folder holds metrics, is a file, or lies where nothing can be written.
    """
    try:
        if (folder / METRICS).exists():
            raise RunFolderError(
                f"run.out must be a new or empty folder; found the files of a run in "
                f"{str(folder)!r}; choose another, or remove it"
            )
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise _unwritable(folder, error.strerror) from error
    if not there.is_dir():
        raise _unwritable(folder, f"{str(there)!r} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unwritable(folder, f"no permission to write in {str(there)!r}")


def _unwritable(folder: Path, found: str | None) -> RunFolderError:
    return RunFolderError(
        f"run folder {str(folder)!r} must be writable; found: {found}; set run.out to another"
    )


class RunFolder:
    """Writes a run's files. Use it as a context manager."""

    def __init__(self, config: Config) -> None:
        """Create the folder and write the configuration.

        Args:
            config: Resolved; `run.out` names the folder, or a name is made from the time.

        Raises:
            RunFolderError: The folder is in use or can't be written.
        """
        self.path = Path(config.run.out) if config.run.out else _new_name(config)
        require_unused(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            named = config.update(run={"out": str(self.path)})
            (self.path / CONFIG).write_text(to_toml(named), encoding="utf-8")
            self._metrics = (self.path / METRICS).open("w", encoding="utf-8")
        except OSError as error:
            raise _unwritable(self.path, error.strerror) from error

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._metrics.close()

    def write_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one line and flush it; numbers that aren't finite become null."""
        self._metrics.write(_json(record) + "\n")
        self._metrics.flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, whole or not at all."""
        unfinished = self.path / f".{SUMMARY}.part"
        unfinished.write_text(_json(summary, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(self.path / SUMMARY)


def _new_name(config: Config) -> Path:
    moment = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    base = RUNS / f"{config.model.preset}-{config.parallel.strategy}-{moment}"
    name, attempt = base, 1
    while name.exists():
        attempt += 1
        name = base.with_name(f"{base.name}-{attempt}")
    return name


def _json(record: Mapping[str, Any], indent: int | None = None) -> str:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(finite, indent=indent, allow_nan=False)
