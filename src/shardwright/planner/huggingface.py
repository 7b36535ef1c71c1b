"""Read a Hugging Face `config.json` of a dense decoder as a model.

Each architecture below is mapped field by field; any other is refused by name, since a wrong guess
would count wrong parameters silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardwright.core.errors import SpecError, nearest
from shardwright.planner.model import Activation, ModelSpec

__all__ = ["ARCHITECTURES", "from_config"]

_Config = Mapping[str, Any]


def from_config(config: _Config, *, name: str = "") -> ModelSpec:
    """Read a configuration.

    Args:
        config: The file's content.
        name: For people; else the configuration's own.

    Raises:
        SpecError: The architecture isn't a known dense decoder, or a field is missing.
    """
    kind = str(config.get("model_type", "")).lower()
    if kind not in ARCHITECTURES:
        raise SpecError(
            f"config.json has model_type {kind or 'nothing'!r}, which is no dense decoder the "
            f"planner knows; {nearest(kind, ARCHITECTURES)}. Give the sizes explicitly instead."
        )
    title = name or str(config.get("_name_or_path") or kind)
    try:
        return ModelSpec(name=title, family=kind, **ARCHITECTURES[kind](config))
    except KeyError as error:
        raise SpecError(
            f"config.json of {title!r} lacks {error.args[0]!r}, which {kind} models have"
        ) from error


def _llama_like(config: _Config, **other: Any) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    has_bias = bool(config.get("attention_bias", False))
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or 0,
        "ffn_hidden": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "max_seq_len": config.get("max_position_embeddings", 0),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "ffn_bias": bool(config.get("mlp_bias", False)),
        **other,
    }


def _qwen2(config: _Config) -> dict[str, Any]:
    return _llama_like(config, qkv_bias=True)


def _gemma2(config: _Config) -> dict[str, Any]:
    tied = bool(config.get("tie_word_embeddings", True))
    return _llama_like(config, activation="gelu", norms_per_block=4, tied=tied)


def _classic(config: _Config, **other: Any) -> dict[str, Any]:
    """LayerNorm, biases everywhere, no gate; fields under the names `other` gives."""
    return {
        "gated": False,
        "activation": "gelu",
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "tied": bool(config.get("tie_word_embeddings", True)),
        **other,
    }


def _gpt2(config: _Config) -> dict[str, Any]:
    return _classic(
        config,
        layers=config["n_layer"],
        hidden=config["n_embd"],
        heads=config["n_head"],
        kv_heads=config["n_head"],
        ffn_hidden=config.get("n_inner") or 4 * config["n_embd"],
        vocab=config["vocab_size"],
        positions="learned",
        num_positions=config["n_positions"],
        max_seq_len=config["n_positions"],
    )


def _opt(config: _Config) -> dict[str, Any]:
    hidden = config["hidden_size"]
    if config.get("word_embed_proj_dim", hidden) != hidden or not config.get(
        "do_layer_norm_before", True
    ):
        raise SpecError(
            "OPT with projected embeddings or norms behind blocks (the 350m size) is not modelled; "
            "give the sizes explicitly"
        )
    activation: Activation = "relu"
    return _classic(
        config,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=config["num_attention_heads"],
        kv_heads=config["num_attention_heads"],
        ffn_hidden=config["ffn_dim"],
        vocab=config["vocab_size"],
        activation=activation,
        positions="learned",
        num_positions=config["max_position_embeddings"] + 2,  # two rows for padding
        max_seq_len=config["max_position_embeddings"],
    )


def _bloom(config: _Config) -> dict[str, Any]:
    hidden = config.get("hidden_size") or config["n_embed"]
    heads = config.get("n_head") or config["num_attention_heads"]
    return _classic(
        config,
        layers=config.get("n_layer") or config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden=4 * hidden,
        vocab=config["vocab_size"],
        positions="alibi",
        embedding_norm=True,
    )


def _mpt(config: _Config) -> dict[str, Any]:
    uses_alibi = bool((config.get("attn_config") or {}).get("alibi", False))
    has_bias = not config.get("no_bias", True)
    return _classic(
        config,
        layers=config["n_layers"],
        hidden=config["d_model"],
        heads=config["n_heads"],
        kv_heads=config["n_heads"],
        ffn_hidden=config.get("expansion_ratio", 4) * config["d_model"],
        vocab=config["vocab_size"],
        norm_bias=has_bias,
        qkv_bias=has_bias,
        out_bias=has_bias,
        ffn_bias=has_bias,
        positions="alibi" if uses_alibi else "learned",
        num_positions=0 if uses_alibi else config["max_seq_len"],
        max_seq_len=config["max_seq_len"],
    )


ARCHITECTURES: Mapping[str, Callable[[_Config], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama_like,
        "mistral": _llama_like,
        "qwen2": _qwen2,
        "gemma2": _gemma2,
        "gpt2": _gpt2,
        "opt": _opt,
        "bloom": _bloom,
        "mpt": _mpt,
    }
)
"""Known values of `model_type`."""
