"""The models and batches that steps are measured on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.app.models import Decoder, DecoderConfig

__all__ = ["WORKLOADS", "Workload", "batch", "build_model"]

LEARNING_RATE = 3e-4
HEAD_WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A decoder and the tokens that each rank feeds it per step.

    Attributes:
        hidden: Width.
        layers: Blocks.
        ffn_hidden: Inner width of the feed-forward.
        vocab_size: Tokens in the vocabulary.
        tokens_per_rank: Length of the one sequence of a rank's step.
        about: What it is for.
    """

    hidden: int
    layers: int
    ffn_hidden: int
    vocab_size: int
    tokens_per_rank: int
    about: str

    @property
    def decoder(self) -> DecoderConfig:
        """The model's shape."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.hidden // HEAD_WIDTH,
            kv_heads=self.hidden // HEAD_WIDTH,
            ffn_hidden=self.ffn_hidden,
            max_seq_len=self.tokens_per_rank,
        )


WORKLOADS = {
    "a": Workload(
        hidden=512,
        layers=8,
        ffn_hidden=1408,
        vocab_size=256,
        tokens_per_rank=256,
        about="compute and communication in balance",
    ),
    "b": Workload(
        hidden=768,
        layers=12,
        ffn_hidden=2048,
        vocab_size=16384,
        tokens_per_rank=256,
        about="a large vocabulary",
    ),
    "c": Workload(
        hidden=1024,
        layers=8,
        ffn_hidden=2816,
        vocab_size=256,
        tokens_per_rank=32,
        about="heavy on communication",
    ),
    "tiny": Workload(
        hidden=128,
        layers=2,
        ffn_hidden=384,
        vocab_size=64,
        tokens_per_rank=32,
        about="to try the measurement itself",
    ),
}


def build_model(workload: Workload) -> Decoder:
    """Build the model, the same on every rank.

    Args:
        workload: Its shape.

    Returns:
        The model, fp32, on the CPU.
    """
    return Decoder(workload.decoder, seed=0)


def batch(workload: Workload, *, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a rank's tokens for a step.

    Args:
        workload: Says how many.
        step: From 0.
        rank: Different ranks get different tokens.

    Returns:
        Inputs and the tokens that follow them, int64, [1, T] each.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(
        workload.vocab_size, (1, workload.tokens_per_rank + 1), generator=generator
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
