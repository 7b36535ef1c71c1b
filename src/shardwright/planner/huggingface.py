"""Read a Hugging Face `config.json` of a dense decoder as a model.

Each architecture below is mapped field by field; any other is refused by name, since a wrong guess
would count wrong parameters silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardwright.core.errors import SpecError, nearest
from shardwright.planner.checks import require_positive, require_type
from shardwright.planner.model import Activation, ModelSpec

__all__ = ["ARCHITECTURES", "from_config"]


class _Config:
    """Fields of a configuration, each of one type; null stands for a field that isn't there.

    Args:
        fields: The file's content.
        where: For messages.
    """

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number above zero under the first of several names that is there."""
        for name in names:
            value = self._fields.get(name)
            if value is not None:
                require_type(self._where, name, value, "int")
                require_positive(self._where, **{name: value})
                return int(value)
        if default is None:
            raise SpecError(f"{self._where} lacks {names[0]!r}, which such models have")
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        """A truth value."""
        value = self._fields.get(name)
        if value is None:
            return default
        require_type(self._where, name, value, "bool")
        return bool(value)

    def section(self, name: str) -> _Config:
        """A table inside; an empty one where there is none."""
        value = self._fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise SpecError(f"{self._where}: {name} must be a table, found {value!r}")
        return _Config(value or {}, f"{name} of {self._where}")


def from_config(config: Mapping[str, Any], *, name: str = "") -> ModelSpec:
    """Read a configuration.

    Args:
        config: The file's content.
        name: For people; else the configuration's own.

    Raises:
        SpecError: The architecture isn't a known dense decoder, or a field is missing.
    """
    _refuse_variants(config)
    kind = str(config.get("model_type") or "nothing").lower()
    if kind not in ARCHITECTURES:
        raise SpecError(
            f"config.json has model_type {kind!r}, which is no dense decoder the "
            f"planner knows; {nearest(kind, ARCHITECTURES)}. Give the sizes in TOML "
            "(docs/planner.md has an example), or from Python the module itself with sample=..., "
            "which is traced."
        )
    title = name or str(config.get("_name_or_path") or kind)
    read = _Config(config, f"config.json of {title!r}")
    return ModelSpec(name=title, family=kind, **ARCHITECTURES[kind](read))


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """Refuse experts and quantised weights, of which the fields that are read say nothing."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        count = config.get(name)
        if isinstance(count, int) and count > 1:
            raise SpecError(
                f"config.json has {name}={count}: a mixture of experts, and only dense models are "
                "planned; trace the module with sample=..., or give a dense model"
            )
    if config.get("quantization_config"):
        raise SpecError(
            "config.json has a quantization_config: only unquantised models are planned; drop "
            "it to plan for the same model in 16 bits"
        )


def _llama_like(config: _Config, **other: Any) -> dict[str, Any]:
    heads = config.count("num_attention_heads")
    has_bias = config.flag("attention_bias", default=False)
    return {
        "layers": config.count("num_hidden_layers"),
        "hidden": config.count("hidden_size"),
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", default=heads),
        "head_dim": config.count("head_dim", default=0),
        "ffn_hidden": config.count("intermediate_size"),
        "vocab": config.count("vocab_size"),
        "tied": config.flag("tie_word_embeddings", default=False),
        "max_seq_len": config.count("max_position_embeddings", default=0),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "ffn_bias": config.flag("mlp_bias", default=False),
        **other,
    }


def _qwen2(config: _Config) -> dict[str, Any]:
    return _llama_like(config, qkv_bias=True)


def _gemma2(config: _Config) -> dict[str, Any]:
    tied = config.flag("tie_word_embeddings", default=True)
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
        "tied": config.flag("tie_word_embeddings", default=True),
        **other,
    }


def _gpt2(config: _Config) -> dict[str, Any]:
    hidden, heads = config.count("n_embd"), config.count("n_head")
    positions = config.count("n_positions")
    return _classic(
        config,
        layers=config.count("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden=config.count("n_inner", default=4 * hidden),
        vocab=config.count("vocab_size"),
        positions="learned",
        num_positions=positions,
        max_seq_len=positions,
    )


def _opt(config: _Config) -> dict[str, Any]:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    positions = config.count("max_position_embeddings")
    is_projected = config.count("word_embed_proj_dim", default=hidden) != hidden
    if is_projected or not config.flag("do_layer_norm_before", default=True):
        raise SpecError(
            "OPT with projected embeddings or norms behind blocks (the 350m size) is not modelled; "
            "give the sizes explicitly"
        )
    activation: Activation = "relu"
    return _classic(
        config,
        layers=config.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden=config.count("ffn_dim"),
        vocab=config.count("vocab_size"),
        activation=activation,
        positions="learned",
        num_positions=positions + 2,  # two rows for padding
        max_seq_len=positions,
    )


def _bloom(config: _Config) -> dict[str, Any]:
    hidden = config.count("hidden_size", "n_embed")
    heads = config.count("n_head", "num_attention_heads")
    return _classic(
        config,
        layers=config.count("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden=4 * hidden,
        vocab=config.count("vocab_size"),
        positions="alibi",
        embedding_norm=True,
    )


def _mpt(config: _Config) -> dict[str, Any]:
    uses_alibi = config.section("attn_config").flag("alibi", default=False)
    has_bias = not config.flag("no_bias", default=True)
    hidden, heads = config.count("d_model"), config.count("n_heads")
    max_seq_len = config.count("max_seq_len")
    return _classic(
        config,
        layers=config.count("n_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden=config.count("expansion_ratio", default=4) * hidden,
        vocab=config.count("vocab_size"),
        norm_bias=has_bias,
        qkv_bias=has_bias,
        out_bias=has_bias,
        ffn_bias=has_bias,
        positions="alibi" if uses_alibi else "learned",
        num_positions=0 if uses_alibi else max_seq_len,
        max_seq_len=max_seq_len,
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
