"""What a dense decoder consists of: its parameters by name and shape, and its counts.

Shapes follow the published checkpoints, so that parameter counts can be tested to the unit. The
cost formulas read widths from here; the layout of shards is computed from `block_parameters` and
its siblings by the same code the engine uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwright.core.errors import SpecError
from shardwright.core.layout import ParameterSpec
from shardwright.planner.checks import (
    require_choice,
    require_non_negative,
    require_positive,
    require_types,
)

__all__ = ["Activation", "ModelSpec", "Norm", "Positions"]

Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned", "alibi"]
Activation = Literal["gelu", "relu", "silu"]

_MOST_LAYERS = 10_000

_FUSED_QKV = ("gpt2", "bloom", "mpt")
"""Architectures with one matrix for queries, keys and values."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of a dense decoder.

    Attributes:
        name: For people.
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Query heads per block.
        kv_heads: Key and value heads per block; divides `heads`.
        ffn_hidden: Inner width of the feed-forward.
        vocab: Rows of the embedding matrix, as stored (padding included).
        head_dim: Width of one head; 0 means `hidden / heads`.
        gated: Whether the feed-forward has a gate (SwiGLU, GeGLU): three matrices, not two.
        activation: Nonlinearity of the feed-forward.
        norm: RMSNorm or LayerNorm.
        norm_bias: Whether norms have a bias.
        norms_per_block: Norms in a block (Gemma 2 has four).
        qkv_bias: Whether the query, key and value projections have biases.
        out_bias: Whether attention's output projection has one.
        ffn_bias: Whether the feed-forward's matrices have biases.
        positions: How positions enter.
        num_positions: Rows of the learned position matrix; 0 for other kinds.
        embedding_norm: Whether a norm follows the embedding (BLOOM).
        tied: Whether the output projection is the embedding matrix.
        max_seq_len: Longest sequence the published model accepts; 0 where nothing says.
        family: Architecture, as a Hugging Face configuration names it.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    head_dim: int = 0
    gated: bool = True
    activation: Activation = "silu"
    norm: Norm = "rms"
    norm_bias: bool = False
    norms_per_block: int = 2
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    positions: Positions = "rope"
    num_positions: int = 0
    embedding_norm: bool = False
    tied: bool = False
    max_seq_len: int = 0
    family: str = "llama"

    def __post_init__(self) -> None:
        owner = f"model {self.name!r}"
        require_types(owner, self)
        require_positive(
            owner,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn_hidden=self.ffn_hidden,
            vocab=self.vocab,
            norms_per_block=self.norms_per_block,
        )
        require_non_negative(
            owner,
            head_dim=self.head_dim,
            num_positions=self.num_positions,
            max_seq_len=self.max_seq_len,
        )
        if self.layers > _MOST_LAYERS:
            raise SpecError(
                f"{owner}: layers must be at most {_MOST_LAYERS:,}, since each is planned for "
                f"itself; found {self.layers:,}"
            )
        require_choice(owner, "norm", self.norm, ("rms", "layer"))
        require_choice(owner, "positions", self.positions, ("rope", "learned", "alibi"))
        require_choice(owner, "activation", self.activation, ("gelu", "relu", "silu"))
        if self.heads % self.kv_heads:
            raise SpecError(
                f"{owner}: heads must be a multiple of kv_heads, found heads={self.heads}, "
                f"kv_heads={self.kv_heads}; change one of them"
            )
        if not self.head_dim and self.hidden % self.heads:
            raise SpecError(
                f"{owner}: hidden must be a multiple of heads, found hidden={self.hidden}, "
                f"heads={self.heads}; set head_dim, or change one of them"
            )
        if (self.positions == "learned") != (self.num_positions > 0):
            raise SpecError(
                f"{owner}: learned positions need num_positions above 0 and other kinds need 0, "
                f"found positions={self.positions!r}, num_positions={self.num_positions}"
            )

    def norm_kernel(self, chosen: str) -> str:
        """The norm kernel that runs: LayerNorm is one kernel where RMSNorm is a chain of them."""
        return "fused" if chosen == "eager_fp32" and self.norm == "layer" else chosen

    @cached_property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @cached_property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_width

    @cached_property
    def kv_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.kv_heads * self.head_width

    @cached_property
    def block_parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters of one block, in module order."""
        norms = [self._norm(f"norm.{i}") for i in range(self.norms_per_block)]
        found = list(norms[0])
        widths = {"q": self.query_width, "k": self.kv_width, "v": self.kv_width}
        if self.family in _FUSED_QKV:
            widths = {"qkv": sum(widths.values())}
        for name, width in widths.items():
            found.extend(_matrix(f"attention.{name}", width, self.hidden, self.qkv_bias))
        found.extend(_matrix("attention.out", self.hidden, self.query_width, self.out_bias))
        for norm in norms[1:]:
            found.extend(norm)
        if self.gated:
            found.extend(_matrix("ffn.gate", self.ffn_hidden, self.hidden, self.ffn_bias))
        found.extend(_matrix("ffn.up", self.ffn_hidden, self.hidden, self.ffn_bias))
        found.extend(_matrix("ffn.down", self.hidden, self.ffn_hidden, self.ffn_bias))
        return tuple(found)

    @cached_property
    def embedding_parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters read before the first block."""
        found = [ParameterSpec(name="embedding.weight", shape=(self.vocab, self.hidden))]
        if self.num_positions:
            found.append(
                ParameterSpec(name="positions.weight", shape=(self.num_positions, self.hidden))
            )
        if self.embedding_norm:
            found.extend(self._norm("embedding_norm"))
        return tuple(found)

    @cached_property
    def final_norm_parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters of the norm behind the last block."""
        return tuple(self._norm("final_norm"))

    @cached_property
    def head_parameters(self) -> tuple[ParameterSpec, ...]:
        """The output projection; empty where it is the embedding."""
        if self.tied:
            return ()
        return (ParameterSpec(name="head.weight", shape=(self.vocab, self.hidden)),)

    @cached_property
    def block_numel(self) -> int:
        """Elements of one block."""
        return _numel(self.block_parameters)

    @cached_property
    def embedding_numel(self) -> int:
        """Elements read before the first block."""
        return _numel(self.embedding_parameters)

    @cached_property
    def head_numel(self) -> int:
        """Elements of the output projection; 0 where tied."""
        return _numel(self.head_parameters)

    @cached_property
    def num_parameters(self) -> int:
        """Distinct parameters, in elements; a tied matrix counts once."""
        return (
            self.layers * self.block_numel
            + self.embedding_numel
            + _numel(self.final_norm_parameters)
            + self.head_numel
        )

    @cached_property
    def block_matrix_numel(self) -> int:
        """Elements of one block's matrices, norms and biases left out."""
        attention = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @cached_property
    def matrix_numel(self) -> int:
        """Elements a token is multiplied by: all blocks and the output projection."""
        return self.layers * self.block_matrix_numel + self.vocab * self.hidden

    def flops_per_token(self, seq_len: int, *, causal: bool = True) -> float:
        """Operations to train on one token without recomputation: 6 per matrix element + attention.

        PaLM (arXiv 2204.02311, appendix B) counts full attention, 12 L (heads x head width) s;
        causal attention needs half. Norms, activations and the look-up are left out.

        Args:
            seq_len: Tokens per sequence.
            causal: Count only keys a token may see.
        """
        attention = 12.0 * self.layers * self.query_width * seq_len
        return 6.0 * self.matrix_numel + (attention / 2 if causal else attention)

    def _norm(self, name: str) -> list[ParameterSpec]:
        found = [ParameterSpec(name=f"{name}.weight", shape=(self.hidden,))]
        if self.norm_bias:
            found.append(ParameterSpec(name=f"{name}.bias", shape=(self.hidden,)))
        return found


def _matrix(name: str, rows: int, columns: int, bias: bool) -> list[ParameterSpec]:
    found = [ParameterSpec(name=f"{name}.weight", shape=(rows, columns))]
    if bias:
        found.append(ParameterSpec(name=f"{name}.bias", shape=(rows,)))
    return found


def _numel(parameters: tuple[ParameterSpec, ...]) -> int:
    return sum(p.numel for p in parameters)
