"""One rank's model, optimizer and data, and the three things done with them.

`Trainer` steps, evaluates and samples; it prints and writes nothing. `shardwright.app.train`
decides when.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

import shardwright as sw
from shardwright.app.batches import (
    BatchShape,
    evaluation_windows,
    gather_windows,
    global_windows,
    rank_windows,
    require_windows,
)
from shardwright.app.models import Decoder
from shardwright.app.optimizer import build_optimizer, learning_rate, set_learning_rate
from shardwright.core.errors import SpecError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from shardwright.app.config import Config
    from shardwright.app.data import Corpus
    from shardwright.app.ranks import DataRanks
    from shardwright.app.tokenizer import Tokenizer
    from shardwright.runtime.mesh import Mesh

__all__ = ["StepOutcome", "Trainer", "batch_shape", "choose_dtype"]


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one step gave, the same on every rank.

    Attributes:
        loss: Mean over the global batch, nats per token.
        grad_norm: Global norm before clipping.
        lr: Learning rate used.
        is_stop_agreed: Some rank was asked to stop; all know it after the same step.
    """

    loss: float
    grad_norm: float
    lr: float
    is_stop_agreed: bool


def batch_shape(config: Config) -> BatchShape:
    """Take the division of a step out of a resolved configuration.

    Raises:
        SpecError: The configuration isn't resolved.
    """
    train, ranks = config.train, config.parallel.ranks
    if train.micro_batch is None or train.accumulation is None or ranks is None:
        raise SpecError(
            "train needs a resolved configuration; found batch sizes unset; pass it through "
            "shardwright.app.config.resolve first"
        )
    return BatchShape(
        micro_batch=train.micro_batch, accumulation=train.accumulation, num_ranks=ranks
    )


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn `precision.dtype` into the dtype of forward and backward."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32


class Trainer:
    """Builds the sharded model and its optimizer, and runs steps on this rank's data."""

    def __init__(
        self,
        config: Config,
        *,
        mesh: Mesh,
        ranks: DataRanks,
        tokenizer: Tokenizer,
        corpus: Corpus,
    ) -> None:
        """Check the data, build the model and shard it. Collective.

        Args:
            config: Resolved.
            mesh: From `sw.init_mesh`.
            ranks: The data ranks of `mesh`.
            tokenizer: That encoded `corpus`.
            corpus: The same on every rank.

        Raises:
            DataError: Training or validation data hold no sequence.
            SpecError: The model's shape is impossible.
        """
        self._config = config
        self._ranks = ranks
        self.device = mesh.device
        self._tokenizer = tokenizer
        self._corpus = corpus
        self._shape = batch_shape(config)
        seq_len = config.train.seq_len
        self._num_train_windows = require_windows(corpus.train, seq_len, "training")
        num_validation_windows = require_windows(corpus.validation, seq_len, "validation")
        self._validation_windows = evaluation_windows(
            num_validation_windows,
            config.train.eval_batches * self._shape.global_batch,
            self._shape,
            ranks.rank,
        )
        self.decoder_config = config.model.decoder(tokenizer.vocab_size)
        self.dtype = choose_dtype(config.precision.dtype, mesh.device)
        precision = sw.Precision(param=self.dtype) if self.dtype != torch.float32 else None
        with sw.meta_init():  # no rank ever holds the whole model
            model = Decoder(self.decoder_config, seed=config.train.seed)
        self.model = sw.shard(
            model,
            strategy=config.parallel.strategy,
            mesh=mesh,
            precision=precision,
        )
        self._optimizer = build_optimizer(self.model, config.train)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self._shape.global_batch * self._config.train.seq_len

    def step(self, index: int, *, wants_stop: bool = False) -> StepOutcome:
        """Train on one global batch. Collective.

        Args:
            index: From 0; decides the data and the learning rate.
            wants_stop: This rank was asked to stop.

        Returns:
            The outcome.
        """
        settings = self._config.train
        loss = self._accumulate_gradients(index)
        grad_norm = float(sw.clip_grad_norm_(self.model, settings.clip or math.inf))
        lr = learning_rate(
            index,
            steps=settings.steps,
            warmup_steps=settings.warmup_steps or 0,
            peak=settings.lr,
            final=settings.min_lr or 0.0,
        )
        set_learning_rate(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()
        total_loss, num_wanting_stop = self._ranks.sum([loss, float(wants_stop)])
        return StepOutcome(
            loss=total_loss / self._ranks.size,
            grad_norm=grad_norm,
            lr=lr,
            is_stop_agreed=num_wanting_stop > 0,
        )

    def _accumulate_gradients(self, index: int) -> float:
        """Run the step's micro-batches; this rank's mean loss."""
        shape = self._shape
        windows = global_windows(
            self._num_train_windows, shape.global_batch, self._config.train.seed, index
        )
        loss = torch.zeros((), device=self.device)
        for micro_batch_index in range(shape.accumulation):
            mine = rank_windows(windows, shape, micro_batch_index, self._ranks.rank)
            inputs, targets = self._sequences(self._corpus.train, mine)
            is_last = micro_batch_index == shape.accumulation - 1
            with nullcontext() if is_last else sw.accumulate(self.model):
                micro_batch_loss = self.model(inputs, targets) / shape.accumulation
                micro_batch_loss.backward()
            loss += micro_batch_loss.detach()
        return float(loss)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Compute the mean loss over the validation windows. Collective.

        Returns:
            Nats per token; the same on every rank, and on any number of ranks.
        """
        total, count = 0.0, 0
        for windows in self._validation_windows:
            is_real = torch.from_numpy(windows >= 0).to(self.device)
            inputs, targets = self._sequences(self._corpus.validation, np.maximum(windows, 0))
            logits = self.model(inputs).float().transpose(1, 2)
            losses = F.cross_entropy(logits, targets, reduction="none").mean(dim=1)
            total += float(losses[is_real].sum())
            count += int(is_real.sum())
        all_total, all_count = self._ranks.sum([total, float(count)])
        return all_total / all_count

    def sample(self) -> str:
        """Generate text from the prompt. Collective; every rank generates the same.

        Returns:
            The prompt and what follows it.
        """
        settings = self._config.run
        generator = torch.Generator(self.device).manual_seed(self._config.train.seed)
        prompt = torch.from_numpy(self._tokenizer.encode(settings.prompt).astype(np.int64))
        with sw.unsharded(self.model):
            tokens = self.model.generate(
                prompt[None].to(self.device),
                settings.sample_tokens,
                temperature=settings.temperature,
                top_k=settings.top_k or None,
                generator=generator,
            )
        return self._tokenizer.decode(tokens[0].tolist())

    def _sequences(
        self, tokens: NDArray[np.unsignedinteger], windows: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Copy windows to the device: inputs and targets, int64, [B, T]."""
        inputs, targets = gather_windows(tokens, windows, self._config.train.seq_len)
        return (
            torch.from_numpy(inputs).to(self.device),
            torch.from_numpy(targets).to(self.device),
        )
