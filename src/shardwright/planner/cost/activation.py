"""Bytes of activations kept from forward to backward, tensor by tensor.

Follows Korthikanti et al. (arXiv 2205.05198, equations 1 to 5), which is the special case of
LayerNorm, GELU, dropout and written scores with two-byte elements: s b h (34 + 5 a s / h). Other
software keeps other tensors; each is a line below.
"""

from __future__ import annotations

from shardwright.planner.model import ModelSpec
from shardwright.planner.workload import ITEM_BYTES, WorkloadSpec

__all__ = [
    "LOGIT_BYTES",
    "block_kept",
    "block_working",
    "boundary_bytes",
    "ends_kept",
    "head_bytes",
    "per_token_bytes",
]

_STREAM = "stream"  # residual-width tensors, divided over the tensor axis with sequences only
_GATHERED = "gathered"  # inputs of products, which want whole sequences
_INNER = "inner"  # tensors inside attention and feed-forward, always divided


def per_token_bytes(model: ModelSpec, workload: WorkloadSpec) -> dict[str, tuple[str, float]]:
    """What one block keeps per token without recomputation, in bytes.

    Args:
        model: Shape.
        workload: Kernels and dtypes.

    Returns:
        By tensor: whether it has the residual's width, is a product's input or lies inside, and its
        bytes.
    """
    p, wide = _item_bytes(workload)
    software = workload.software
    hidden, queries, keys = model.hidden, model.query_width, model.kv_width
    kept: dict[str, tuple[str, float]] = {}
    norms = model.norms_per_block
    kernel = model.norm_kernel(software.norm)
    if kernel == "fused":
        kept["norm inputs"] = (_STREAM, norms * wide * hidden)
    elif kernel == "autocast_fp32":
        kept["norm inputs"] = (_STREAM, norms * (4 + p) * hidden)
    else:  # the input in fp32, and what is multiplied by the gain
        kept["norm inputs"] = (_STREAM, norms * (4 + wide) * hidden)
    linear = min(p, ITEM_BYTES[workload.precision.product])  # narrow products keep narrow inputs
    kept["attention input"] = (_GATHERED, linear * hidden)
    expands = model.kv_heads < model.heads and software.class_name == "eager"
    kept["queries, keys, values"] = (_INNER, p * (queries + 2 * (queries if expands else keys)))
    kept["attention output"] = (_INNER, linear * queries)
    if software.attention.startswith("flash"):
        kept["softmax statistics"] = (_INNER, 4.0 * model.heads)
    else:
        kept["scores"] = (_INNER, _score_bytes(workload, p) * model.heads * workload.seq_len)
    kept["feed-forward input"] = (_GATHERED, linear * hidden)
    wide_inner = (1 if not model.gated else 3 if software.class_name == "eager" else 2) * p
    kept["feed-forward"] = (_INNER, (wide_inner + linear) * model.ffn_hidden)
    if software.dropout:
        kept["dropout masks"] = (_STREAM, 2.0 * hidden)
    return kept


def _divided(workload: WorkloadSpec, tensor: int) -> dict[str, int]:
    """Ranks that divide each kind of tensor.

    Hand-fused products keep their part of a gathered input and gather it again in backward
    (arXiv 2205.05198, section 4.2.2); elsewhere autograd keeps what was gathered.
    """
    stream = tensor if workload.software.sequence_parallel else 1
    is_fused = workload.software.class_name == "fused"
    return {_STREAM: stream, _GATHERED: stream if is_fused else 1, _INNER: tensor}


def boundary_bytes(model: ModelSpec, workload: WorkloadSpec, *, tensor: int = 1) -> float:
    """Bytes of what passes between blocks, for one micro-batch."""
    _, wide = _item_bytes(workload)
    numel = workload.tokens_per_micro_batch * model.hidden
    return wide * numel / _divided(workload, tensor)[_STREAM]


def ends_kept(model: ModelSpec, workload: WorkloadSpec, *, tensor: int = 1) -> tuple[float, float]:
    """Bytes the look-up and the head keep for one micro-batch, the logits left out.

    What is looked up is the first block's input; a norm on it keeps its own, and dropout its mask.
    The last norm and the output projection keep their inputs.
    """
    boundary = boundary_bytes(model, workload, tensor=tensor)
    p, wide = _item_bytes(workload)
    looked_up = boundary if model.embedding_norm else 0.0
    if workload.software.dropout:
        looked_up += boundary / wide
    gathered = (
        workload.tokens_per_micro_batch * model.hidden / _divided(workload, tensor)[_GATHERED]
    )
    return looked_up, boundary + p * gathered


def _item_bytes(workload: WorkloadSpec) -> tuple[float, float]:
    """Bytes per element of products' results, and of the residual, which autocast keeps wide."""
    precision = workload.precision
    if precision.autocasts:
        return 2.0, precision.item_bytes("param")
    return precision.item_bytes("param"), precision.item_bytes("param")


def _score_bytes(workload: WorkloadSpec, p: float) -> float:
    """Bytes kept per score where scores are written."""
    dropped = (1 + p) if workload.software.dropout else 0.0
    if workload.software.attention == "fused_softmax":
        return p + dropped
    return 4 + p + dropped  # softmax in fp32, and its copy for the product with values


def _whole(model: ModelSpec, workload: WorkloadSpec, tensor: int) -> tuple[float, float]:
    """Bytes per token of everything, and of attention's core alone."""
    divided = _divided(workload, tensor)
    total = core = 0.0
    for name, (where, num_bytes) in per_token_bytes(model, workload).items():
        part = num_bytes / divided[where]
        total += part
        if name in ("scores", "softmax statistics"):
            core += part
    return total, core


def block_kept(
    model: ModelSpec, workload: WorkloadSpec, *, tensor: int = 1, is_checkpointed: bool = True
) -> float:
    """Bytes one block keeps for one micro-batch.

    Full recomputation keeps the block's input; the selective kinds keep that and the results of
    attention and of products, or of every second one; Megatron's drops attention's core only.
    """
    tokens = workload.tokens_per_micro_batch
    p, wide = _item_bytes(workload)
    divided = _divided(workload, tensor)[_STREAM]
    boundary = wide * model.hidden / divided
    total, core = _whole(model, workload, tensor)
    kind = workload.checkpointing if is_checkpointed else "none"
    if kind in ("full", "alternate"):
        return tokens * boundary
    if kind == "selective":
        inner = (2 if model.gated else 1) * model.ffn_hidden
        results = p * (2 * model.query_width + 2 * model.kv_width + inner) / tensor
        return tokens * (boundary + 2 * p * model.hidden / divided + results)
    if kind == "attention_core":
        return tokens * (total - core)
    if kind == "half_products":
        results = p * (2 * model.query_width + model.kv_width + 1.5 * model.ffn_hidden) / tensor
        return tokens * (boundary + p * model.hidden / divided + results)
    return tokens * total


def block_working(
    model: ModelSpec, workload: WorkloadSpec, *, tensor: int = 1, is_checkpointed: bool = True
) -> float:
    """Bytes alive only while a block's backward runs: what it recomputed, and gradients of tensors.

    Gradients are counted as the two widest tensors of the block.
    """
    tokens = workload.tokens_per_micro_batch
    p, _ = _item_bytes(workload)
    total, core = _whole(model, workload, tensor)
    divided = _divided(workload, tensor)[_STREAM]
    widest = p * (2 * model.ffn_hidden / tensor + 2 * model.hidden / divided)
    kind = workload.checkpointing if is_checkpointed else "none"
    if kind == "none":
        return tokens * (widest + core / 2)
    return tokens * (total + widest + core / 2)


LOGIT_BYTES = {"shifted": 18.0, "full": 8.0, "narrow": 4.0, "fused_softmax": 2.0, "chunked": 0.0}
"""Bytes per logit beside the logits themselves at the loss's peak: fp32 copies and gradients."""

_CHUNK_TOKENS = 8192
"""Tokens whose logits a chunked loss holds at once."""


def head_bytes(model: ModelSpec, workload: WorkloadSpec, *, tensor: int = 1) -> float:
    """Bytes of logits and loss at their peak for one micro-batch.

    Full: logits, log-probabilities, and the fp32 copy or the gradient. Shifted: a shifted copy and
    its gradient too. A chunked loss holds a chunk and the gradient of its input.
    """
    tokens = workload.tokens_per_micro_batch
    p, _ = _item_bytes(workload)
    logits = tokens * -(-model.vocab // tensor)
    stream = tokens * model.hidden * p
    if workload.software.loss == "chunked":
        return 2 * stream + min(1.0, _CHUNK_TOKENS / tokens) * logits * (p + 4)
    extra = LOGIT_BYTES[workload.software.loss]
    if workload.software.class_name == "compiled":
        extra = min(extra, 6.0)
    return 2 * stream + logits * (p + extra)
