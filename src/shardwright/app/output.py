"""Everything a run prints and writes, in one place; on ranks other than 0, nothing."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rich.console import Console

from shardwright.app.progress import Progress, StepRecord
from shardwright.app.report import print_account
from shardwright.app.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from shardwright.app.config import Config
    from shardwright.runtime.ledger import ReconciliationRow

__all__ = ["RunOutput"]


class RunOutput:
    """A run's console, progress and folder. Use it as a context manager."""

    def __init__(self, config: Config, *, is_silent: bool) -> None:
        """Open the run folder.

        Args:
            config: Resolved.
            is_silent: This rank neither prints nor writes.

        Raises:
            RunFolderError: The run folder is in use or can't be written.
        """
        self._folder = None if is_silent else RunFolder(config)
        self._console = Console(force_terminal=False, quiet=True) if is_silent else Console()
        self._num_steps = config.train.steps
        self._closing = ExitStack()
        self.progress = Progress(
            self._console, num_steps=self._num_steps, log_every=config.run.log_every
        )

    def __enter__(self) -> RunOutput:
        if self._folder is not None:
            self._closing.enter_context(self._folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.close()

    @property
    def folder(self) -> str | None:
        """Path of the run folder; None where silent."""
        return None if self._folder is None else str(self._folder.path)

    def print(self, text: str) -> None:
        """Print text as it is."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def record(self, record: StepRecord) -> None:
        """Write one line of metrics, then show it."""
        if self._folder is not None:
            self._folder.write_metrics(record.as_dict())
        self.progress.show(record)

    def account(self, rows: Sequence[ReconciliationRow], *, num_steps: int) -> None:
        """Print bytes computed and counted."""
        print_account(self._console, rows, num_steps=num_steps)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary."""
        if self._folder is not None:
            self._folder.write_summary(summary)
