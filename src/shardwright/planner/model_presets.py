"""Published decoder shapes by name.

Shapes are those of the released checkpoints; `tests/planner/test_model.py` compares each count of
parameters with the published one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardwright.core.errors import SpecError, nearest
from shardwright.planner.model import ModelSpec

__all__ = ["MODELS", "find_model"]

_Shape = tuple[int, int, int, int, int]  # layers, hidden, heads, kv_heads, ffn_hidden


def _llama(name: str, shape: _Shape, vocab: int, **other: Any) -> ModelSpec:
    layers, hidden, heads, kv_heads, ffn_hidden = shape
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=ffn_hidden,
        vocab=vocab,
        **other,
    )


def _qwen(name: str, shape: _Shape, vocab: int, *, tied: bool) -> ModelSpec:
    return _llama(name, shape, vocab, qkv_bias=True, tied=tied, max_seq_len=32_768, family="qwen2")


def _gemma(name: str, shape: _Shape, head_dim: int) -> ModelSpec:
    return _llama(
        name,
        shape,
        256_000,
        head_dim=head_dim,
        activation="gelu",
        norms_per_block=4,
        tied=True,
        max_seq_len=8192,
        family="gemma2",
    )


def _classic(
    name: str, *, layers: int, hidden: int, heads: int, vocab: int, **other: Any
) -> ModelSpec:
    """A GPT-like shape: LayerNorm, four times as wide inside, no gate; biases as `other` says."""
    settings: dict[str, Any] = {
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "activation": "gelu",
        "tied": True,
        **other,
    }
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden=4 * hidden,
        vocab=vocab,
        gated=False,
        **settings,
    )


def _gpt2(name: str, layers: int, hidden: int, heads: int, positions: int = 1024) -> ModelSpec:
    return _classic(
        name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=50_257,
        positions="learned",
        num_positions=positions,
        max_seq_len=positions,
        family="gpt2",
    )


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelSpec:
    return _classic(
        name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=50_272,
        activation="relu",
        positions="learned",
        num_positions=2050,  # two rows for padding
        max_seq_len=2048,
        family="opt",
    )


def _bloom(name: str, layers: int, hidden: int, heads: int) -> ModelSpec:
    return _classic(
        name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=250_880,
        positions="alibi",
        embedding_norm=True,
        max_seq_len=2048,
        family="bloom",
    )


def _mpt(
    name: str, layers: int, hidden: int, heads: int, *, vocab: int = 50_432, seq_len: int = 2048
) -> ModelSpec:
    return _classic(
        name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        norm_bias=False,
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        positions="alibi",
        max_seq_len=seq_len,
        family="mpt",
    )


_L3 = {"vocab": 128_256, "max_seq_len": 8192}
_L31 = {"vocab": 128_256, "max_seq_len": 131_072}

MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        model.name: model
        for model in (
            _llama("llama-7b", (32, 4096, 32, 32, 11_008), 32_000, max_seq_len=2048),
            _llama("llama-13b", (40, 5120, 40, 40, 13_824), 32_000, max_seq_len=2048),
            _llama("llama-30b", (60, 6656, 52, 52, 17_920), 32_000, max_seq_len=2048),
            _llama("llama-65b", (80, 8192, 64, 64, 22_016), 32_000, max_seq_len=2048),
            _llama("llama-2-7b", (32, 4096, 32, 32, 11_008), 32_000, max_seq_len=4096),
            _llama("llama-2-13b", (40, 5120, 40, 40, 13_824), 32_000, max_seq_len=4096),
            _llama("llama-2-34b", (48, 8192, 64, 8, 22_016), 32_000, max_seq_len=4096),
            _llama("llama-2-70b", (80, 8192, 64, 8, 28_672), 32_000, max_seq_len=4096),
            _llama("llama-3-8b", (32, 4096, 32, 8, 14_336), **_L3),
            _llama("llama-3-70b", (80, 8192, 64, 8, 28_672), **_L3),
            _llama("llama-3.1-8b", (32, 4096, 32, 8, 14_336), **_L31),
            _llama("llama-3.1-70b", (80, 8192, 64, 8, 28_672), **_L31),
            _llama("llama-3.1-405b", (126, 16_384, 128, 8, 53_248), **_L31),
            _llama("llama-3.2-1b", (16, 2048, 32, 8, 8192), tied=True, **_L31),
            _llama("llama-3.2-3b", (28, 3072, 24, 8, 8192), tied=True, **_L31),
            _llama("tinyllama-1.1b", (22, 2048, 32, 4, 5632), 32_000, max_seq_len=2048),
            _llama("smollm3-3b", (36, 2048, 16, 4, 11_008), 128_256, tied=True, max_seq_len=65_536),
            _llama(
                "mistral-7b",
                (32, 4096, 32, 8, 14_336),
                32_000,
                max_seq_len=32_768,
                family="mistral",
            ),
            _llama(
                "mistral-nemo-12b",
                (40, 5120, 32, 8, 14_336),
                131_072,
                head_dim=128,
                max_seq_len=131_072,
                family="mistral",
            ),
            _llama(
                "mistral-large-123b",
                (88, 12_288, 96, 8, 28_672),
                32_768,
                max_seq_len=131_072,
                family="mistral",
            ),
            _qwen("qwen2-7b", (28, 3584, 28, 4, 18_944), 152_064, tied=False),
            _qwen("qwen2.5-0.5b", (24, 896, 14, 2, 4864), 151_936, tied=True),
            _qwen("qwen2.5-1.5b", (28, 1536, 12, 2, 8960), 151_936, tied=True),
            _qwen("qwen2.5-3b", (36, 2048, 16, 2, 11_008), 151_936, tied=True),
            _qwen("qwen2.5-7b", (28, 3584, 28, 4, 18_944), 152_064, tied=False),
            _qwen("qwen2.5-14b", (48, 5120, 40, 8, 13_824), 152_064, tied=False),
            _qwen("qwen2.5-32b", (64, 5120, 40, 8, 27_648), 152_064, tied=False),
            _qwen("qwen2.5-72b", (80, 8192, 64, 8, 29_568), 152_064, tied=False),
            _gemma("gemma-2-2b", (26, 2304, 8, 4, 9216), 256),
            _gemma("gemma-2-9b", (42, 3584, 16, 8, 14_336), 256),
            _gemma("gemma-2-27b", (46, 4608, 32, 16, 36_864), 128),
            _gpt2("gpt2", 12, 768, 12),
            _gpt2("gpt2-medium", 24, 1024, 16),
            _gpt2("gpt2-large", 36, 1280, 20),
            _gpt2("gpt2-xl", 48, 1600, 25),
            _gpt2("gpt3-175b", 96, 12_288, 96, 2048),
            _opt("opt-125m", 12, 768, 12),
            _opt("opt-1.3b", 24, 2048, 32),
            _opt("opt-2.7b", 32, 2560, 32),
            _opt("opt-6.7b", 32, 4096, 32),
            _opt("opt-13b", 40, 5120, 40),
            _opt("opt-30b", 48, 7168, 56),
            _opt("opt-66b", 64, 9216, 72),
            _opt("opt-175b", 96, 12_288, 96),
            _bloom("bloom-560m", 24, 1024, 16),
            _bloom("bloom-1b1", 24, 1536, 16),
            _bloom("bloom-1b7", 24, 2048, 16),
            _bloom("bloom-3b", 30, 2560, 32),
            _bloom("bloom-7b1", 30, 4096, 32),
            _bloom("bloom-176b", 70, 14_336, 112),
            _mpt("mpt-7b", 32, 4096, 32),
            _mpt("mpt-30b", 48, 7168, 64, seq_len=8192),
        )
    }
)
"""Known models."""


def find_model(name: str) -> ModelSpec:
    """Look a preset up.

    Args:
        name: Case doesn't matter.

    Raises:
        SpecError: The name is unknown; the message gives the nearest known one.
    """
    found = MODELS.get(name.lower())
    if found is None:
        raise SpecError(f"unknown model {name!r}; {nearest(name.lower(), MODELS)}")
    return found
