"""Times steps and turns each into a `StepRecord`: speed, memory, waiting, MFU."""

from __future__ import annotations

import resource
import sys
import time
from typing import TYPE_CHECKING

import torch

import shardwright as sw
from shardwright.app.device_peaks import peak_flops
from shardwright.app.progress import StepRecord

if TYPE_CHECKING:
    from shardwright.app.trainer import StepOutcome, Trainer

__all__ = ["Meter"]


class Meter:
    """Measures the steps of one rank, from `start` to `finish`."""

    def __init__(self, trainer: Trainer, *, num_ranks: int, seq_len: int) -> None:
        """Prepare.

        Args:
            trainer: Whose steps are measured.
            num_ranks: Devices that share the work, for MFU.
            seq_len: Tokens per sequence, for MFU.
        """
        self.train_s = 0.0
        self._trainer = trainer
        self._ledger = sw.ledger(trainer.model)
        self._is_cuda = trainer.device.type == "cuda"
        self._peak_flops = None
        if self._is_cuda:
            one_device = peak_flops(torch.cuda.get_device_name(trainer.device), trainer.dtype)
            self._peak_flops = one_device and one_device * num_ranks
        self._flops_per_step = trainer.tokens_per_step * trainer.decoder_config.flops_per_token(
            seq_len
        )
        self._start_s = self._start_wait_s = 0.0
        self._start_sent_bytes = 0

    def start(self) -> None:
        """Begin to time a step."""
        self._start_wait_s = self._ledger.wait_s
        self._start_sent_bytes = self._ledger.sent_bytes
        self._start_s = time.perf_counter()

    def finish(self, step: int, outcome: StepOutcome) -> StepRecord:
        """End the step; its outcome is known, so its device work is done.

        Args:
            step: Steps done, this one included.
            outcome: Of the step.

        Returns:
            Its record.
        """
        step_s = time.perf_counter() - self._start_s
        self.train_s += step_s
        return StepRecord(
            step=step,
            loss=outcome.loss,
            lr=outcome.lr,
            grad_norm=outcome.grad_norm,
            tokens=step * self._trainer.tokens_per_step,
            step_s=step_s,
            tokens_per_s=self._trainer.tokens_per_step / step_s,
            sent_bytes=self._ledger.sent_bytes - self._start_sent_bytes,
            wait_share=(self._ledger.wait_s - self._start_wait_s) / step_s,
            peak_memory_bytes=self._peak_memory_bytes(),
            mfu=self._peak_flops and self._flops_per_step / step_s / self._peak_flops,
        )

    def _peak_memory_bytes(self) -> int:
        if self._is_cuda:
            return torch.cuda.max_memory_allocated()
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return resident if sys.platform == "darwin" else resident * 1024  # KiB on Linux
