"""What a run prints while it trains: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

__all__ = ["Progress", "StepRecord", "format_record"]

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step as rank 0 saw it: a line of `metrics.jsonl`.

    Attributes:
        step: Steps done, from 1; 0 is the validation before the first.
        loss: Mean over the global batch, nats per token.
        lr: Learning rate of the step.
        grad_norm: Global norm before clipping.
        tokens: Trained on so far, over all ranks.
        step_s: Duration of the step, validation left out.
        tokens_per_s: Over all ranks.
        sent_bytes: By this rank in the step.
        wait_share: Share of the step that the engine waited for communication, 0 to 1.
        peak_memory_bytes: Of this rank: allocated on CUDA, resident on the CPU.
        mfu: Share of the device's peak, 0 to 1; None where the peak isn't known.
        val_loss: Nats per token; None where this step wasn't validated.
    """

    step: int
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    step_s: float | None = None
    tokens_per_s: float | None = None
    sent_bytes: int | None = None
    wait_share: float | None = None
    peak_memory_bytes: int | None = None
    mfu: float | None = None
    val_loss: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the values that are known, for JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def format_record(record: StepRecord, num_steps: int) -> str:
    """Write a record as one line of text.

    Args:
        record: Any.
        num_steps: Steps of the whole run.

    Returns:
        The line; what isn't known is left out.
    """
    parts = [f"step {record.step:>{len(str(num_steps))}}/{num_steps}"]
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4f}")
    if record.val_loss is not None:
        parts.append(f"validation loss {record.val_loss:.4f}")
    if record.tokens_per_s is not None:
        parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    if record.peak_memory_bytes is not None:
        parts.append(f"peak {record.peak_memory_bytes / MIB:,.0f} MiB")
    if record.wait_share is not None:
        parts.append(f"waiting {record.wait_share:.1%}")
    return "  ".join(parts)


class Progress:
    """Shows records as they come. Use it as a context manager."""

    def __init__(self, console: Console, *, num_steps: int, log_every: int) -> None:
        """Prepare; nothing is printed yet.

        Args:
            console: Where to; a terminal gets a live line.
            num_steps: Steps of the whole run.
            log_every: Steps between lines that stay; validated steps always stay.
        """
        self._console = console
        self._num_steps = num_steps
        self._log_every = log_every
        self._live = Live(console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, record: StepRecord) -> None:
        """Show one record."""
        line = Text(format_record(record, self._num_steps), overflow="ellipsis", no_wrap=True)
        if self._live is not None:
            self._live.update(line)
        is_kept = record.val_loss is not None or record.step in (1, self._num_steps)
        if is_kept or record.step % self._log_every == 0:
            self._console.print(line, soft_wrap=self._live is None)
