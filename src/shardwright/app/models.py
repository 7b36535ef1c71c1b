"""A Llama-style decoder in plain torch, for training and for measuring.

Unmodified modules: nothing here knows about sharding. `shardwright.app.train` builds a
`Decoder` from a `DecoderConfig`; names inside a block follow the Hugging Face Llama layout.

Shapes: B sequences, T tokens per sequence, C hidden width, H query heads, K key/value heads,
D head width, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.app.presets import PRESETS, DecoderConfig
from shardwright.core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PRESETS", "Block", "Decoder", "DecoderConfig", "num_parameters"]

INIT_STD = 0.02


def rotary_table(
    seq_len: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of rotary positions.

    Computed on use rather than kept as buffers: a table that is not module state can't be cast
    to bf16 with the module, whose 8 bits of precision blur positions beyond 256.

    Args:
        seq_len: Number of positions, from 0.
        head_dim: Width of a head, even.
        theta: Base of the frequencies.
        device: Where the tables go.

    Returns:
        Cosines and sines, fp32, each [T, D / 2], fresh tensors.
    """
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(seq_len, device=device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponent)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle, in fp32.

    Args:
        x: Queries or keys, [B, H, T, D], any floating dtype.
        cos: [T, D / 2], fp32.
        sin: [T, D / 2], fp32.

    Returns:
        The rotated tensor, shape and dtype of `x`.
    """
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads and rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix [B, T, C] along T; the result has the shape and dtype of `x`."""
        batch, seq_len, _ = x.shape
        config = self.config
        split = (batch, seq_len, -1, config.head_dim)
        query = self.q_proj(x).view(split).transpose(1, 2)
        key = self.k_proj(x).view(split).transpose(1, 2)
        value = self.v_proj(x).view(split).transpose(1, 2)
        cos, sin = rotary_table(seq_len, config.head_dim, config.rope_theta, x.device)
        mixed = F.scaled_dot_product_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            value,
            is_causal=True,
            enable_gqa=config.kv_heads != config.heads,
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        self.down_proj = nn.Linear(config.ffn_hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, C] to [B, T, C]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each normed first and added back."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, C] to [B, T, C]."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Token embedding, `config.layers` blocks, a final norm and the output projection."""

    def __init__(self, config: DecoderConfig, *, seed: int = 0) -> None:
        """Build the modules and set their parameters.

        Args:
            config: The shape.
            seed: Of the initial parameters; see `init_parameters`.
        """
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        if not self.embed_tokens.weight.is_meta:
            self.init_parameters(seed)

    @torch.no_grad()
    def init_parameters(self, seed: int) -> None:
        """Set every parameter: normal(0, 0.02) matrices, unit norm gains.

        Matrices that write to the residual stream are scaled by 1 / sqrt(2 x layers). Each
        parameter draws from a generator of its own, seeded by `seed` and its name, so that its
        values depend neither on the order of initialisation nor on the other parameters.

        Args:
            seed: Any integer.
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            generator = torch.Generator(device="cpu")
            # 32 bits: torch's CPU generator ignores the upper half of a longer seed.
            generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            values = torch.empty(parameter.shape, dtype=torch.float32)
            values.normal_(0.0, residual_std if is_residual else INIT_STD, generator=generator)
            parameter.copy_(values)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Score the next token at every position.

        Args:
            tokens: [B, T], int64, T at most `config.max_seq_len`.
            targets: [B, T], int64, the token that follows each; or None.

        Returns:
            Without targets the logits [B, T, V] in the dtype of the output projection; with
            them the mean cross-entropy over all positions, 0-dim, fp32, in nats per token.

        Raises:
            SpecError: If the sequences are longer than the model was built for.
        """
        if tokens.shape[-1] > self.config.max_seq_len:
            raise SpecError(
                f"sequences must have at most max_seq_len={self.config.max_seq_len} tokens; "
                f"found {tokens.shape[-1]}; shorten them or build the model with a larger "
                f"max_seq_len"
            )
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Append sampled tokens, each seeing at most the last `max_seq_len`.

        Args:
            tokens: The prompt, [B, T] with T at least 1, int64.
            max_new_tokens: How many to append.
            temperature: Divides the logits; 0 takes the likeliest token.
            top_k: Sample among the k likeliest only; None for all.
            generator: Source of randomness, on the device of `tokens`; None for torch's own.

        Returns:
            [B, T + max_new_tokens], int64, a fresh tensor.
        """
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.config.max_seq_len :])[:, -1].float()
            chosen = _sample(logits, temperature, top_k, generator)
            tokens = torch.cat((tokens, chosen), dim=1)
        return tokens


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Draw one token per row of [B, V] logits; [B, 1], int64."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -math.inf)
    probabilities = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)


def num_parameters(parameters: Iterable[nn.Parameter]) -> int:
    """Count elements, each parameter object once.

    Args:
        parameters: For instance `model.parameters()`.

    Returns:
        The number of elements.
    """
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())
