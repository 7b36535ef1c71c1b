"""What a run leaves behind: `config.toml`, `metrics.jsonl` and `summary.json` in one folder.

Rank 0 alone opens a `RunFolder`; a line of `metrics.jsonl` is one JSON object, complete on disk
before the next step starts.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.app.settings import to_toml
from shardwright.core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from shardwright.app.config import Config

__all__ = ["METRICS", "RunFolder", "require_unused"]

CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"


def require_unused(folder: Path) -> None:
    """Refuse a folder that another run has written to.

    Args:
        folder: May not exist yet.

    Raises:
        SpecError: The folder holds metrics, or is a file.
    """
    if (folder / METRICS).exists() or folder.is_file():
        raise SpecError(
            f"run.out must be a new or empty folder; found the files of a run in {str(folder)!r}; "
            f"choose another, or remove it"
        )


class RunFolder:
    """Writes a run's files. Use it as a context manager."""

    def __init__(self, config: Config) -> None:
        """Create the folder and write the configuration.

        Args:
            config: Resolved; `run.out` names the folder, or a name is made from the time.

        Raises:
            SpecError: The folder is in use or can't be written.
        """
        self.path = Path(config.run.out) if config.run.out else _new_name(config)
        require_unused(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            named = config.update(run={"out": str(self.path)})
            (self.path / CONFIG).write_text(to_toml(named), encoding="utf-8")
            self._metrics = (self.path / METRICS).open("w", encoding="utf-8")
        except OSError as error:
            raise SpecError(
                f"run folder {str(self.path)!r} must be writable; found: {error.strerror}; set "
                f"run.out to another"
            ) from error

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
    base = Path("runs") / f"{config.model.preset}-{config.parallel.strategy}-{moment}"
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
