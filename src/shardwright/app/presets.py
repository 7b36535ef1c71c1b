"""Decoder sizes as data: the shape of a model and the presets that name common shapes.

Pure Python, no torch: the command line validates a configuration and counts parameters with
this file alone; `shardwright.app.models` builds the modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardwright.core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a Llama-style decoder.

    Attributes:
        vocab_size: Tokens in the vocabulary.
        hidden: Width of the residual stream.
        layers: Number of blocks.
        heads: Query heads per block; each is `hidden / heads` wide.
        kv_heads: Key and value heads per block; divides `heads`.
        ffn_hidden: Inner width of the SwiGLU feed-forward.
        max_seq_len: Longest sequence the model accepts, in tokens.
        rope_theta: Base of the rotary position frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        tie_embeddings: The output projection is the embedding matrix itself.
    """

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "ffn_hidden"):
            _require_positive(name, getattr(self, name))
        for name in ("max_seq_len", "rope_theta", "norm_eps"):
            _require_positive(name, getattr(self, name))
        if self.hidden % (2 * self.heads):
            raise SpecError(
                f"hidden must be a multiple of 2 x heads (rotary positions turn pairs); "
                f"found hidden={self.hidden}, heads={self.heads}; change one of them"
            )
        if self.heads % self.kv_heads:
            raise SpecError(
                f"heads must be a multiple of kv_heads; found heads={self.heads}, "
                f"kv_heads={self.kv_heads}; change one of them"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def block_matmul_numel(self) -> int:
        """Elements of one block's matrices (norm gains left out)."""
        kv_width = self.kv_heads * self.head_dim
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv_width
        return attention + 3 * self.hidden * self.ffn_hidden

    @property
    def matmul_numel(self) -> int:
        """Elements of all matrices a token is multiplied by, the output projection included.

        A tied projection counts (its product is computed); the embedding look-up doesn't.
        """
        return self.layers * self.block_matmul_numel + self.vocab_size * self.hidden

    @property
    def num_parameters(self) -> int:
        """Distinct parameters, in elements; tied embeddings count once."""
        norms = (2 * self.layers + 1) * self.hidden
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.hidden
        return self.matmul_numel + norms + embedding

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations to train on one token, forward and backward.

        Counts the products with matrices, 2 per element forward and 4 backward, and causal
        attention, in which a token meets `(seq_len + 1) / 2` keys on average: 2 products
        (scores, values) of 2 operations per element, times 3 for the backward. Leaves out
        norms, activations, softmax, the embedding look-up and any recomputation.

        Args:
            seq_len: Tokens per sequence.

        Returns:
            Operations per token.
        """
        attention = 6 * self.layers * self.hidden * (seq_len + 1)
        return 6 * self.matmul_numel + attention


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise SpecError(f"{name} must be greater than 0; found {value}; set a positive value")


def _llama_3(*, hidden: int, layers: int, heads: int, ffn_hidden: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=128_256,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        ffn_hidden=ffn_hidden,
        max_seq_len=8192,
        rope_theta=500_000.0,
    )


PRESETS: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        "tiny": DecoderConfig(
            vocab_size=256,
            hidden=128,
            layers=4,
            heads=4,
            kv_heads=4,
            ffn_hidden=352,
            max_seq_len=256,
        ),
        "small": DecoderConfig(
            vocab_size=256,
            hidden=512,
            layers=8,
            heads=8,
            kv_heads=8,
            ffn_hidden=1408,
            max_seq_len=1024,
        ),
        "medium": DecoderConfig(
            vocab_size=16_384,
            hidden=768,
            layers=12,
            heads=12,
            kv_heads=12,
            ffn_hidden=2048,
            max_seq_len=1024,
        ),
        # The published Llama 3 shapes. Llama 3.2 also rescales its rotary frequencies for long
        # sequences; the decoder here does not, which changes no parameter.
        "llama-3-8b": _llama_3(hidden=4096, layers=32, heads=32, ffn_hidden=14_336),
        "llama-3-70b": _llama_3(hidden=8192, layers=80, heads=64, ffn_hidden=28_672),
        "llama-3.2-1b": DecoderConfig(
            vocab_size=128_256,
            hidden=2048,
            layers=16,
            heads=32,
            kv_heads=8,
            ffn_hidden=8192,
            max_seq_len=131_072,
            rope_theta=500_000.0,
            tie_embeddings=True,
        ),
    }
)
"""Named shapes, smallest first."""

_RECOMMENDED_LLAMA = MappingProxyType(
    {"seq_len": 4096, "global_batch": 128, "steps": 1000, "lr": 3e-4}
)

RECOMMENDED: Mapping[str, Mapping[str, int | float]] = MappingProxyType(
    {
        # Two to three minutes on two ranks with one CPU core each.
        "tiny": {"seq_len": 128, "global_batch": 24, "steps": 750, "lr": 4e-3},
        "small": {"seq_len": 256, "global_batch": 48, "steps": 2000, "lr": 1e-3},
        "medium": {"seq_len": 512, "global_batch": 96, "steps": 5000, "lr": 6e-4},
        "llama-3-8b": _RECOMMENDED_LLAMA,
        "llama-3-70b": _RECOMMENDED_LLAMA,
        "llama-3.2-1b": _RECOMMENDED_LLAMA,
    }
)
"""Values of the configuration's train section that suit each preset, unless the user sets them."""
