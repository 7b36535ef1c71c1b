"""Columns of the tables that `shardwright validate` reads: what each holds, and which are needed.

`docs/planner.md` lists them. An empty cell means that the source doesn't say; a cell that holds
something else than its column's kind makes its row unpredictable, never a row that means another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["FIT", "MEMORY", "SPEEDS", "Column", "Unpredictable", "check_cells"]


class Unpredictable(ValueError):
    """A row lacks what a prediction needs, or uses what the planner doesn't model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: Its heading.
        meaning: What a cell says.
        kind: A text, a count (a whole number above zero) or another number above zero.
        is_required: A table without it is refused.
        absent: What every row says in a table without it.
    """

    name: str
    meaning: str
    kind: Literal["text", "count", "number"] = "text"
    is_required: bool = False
    absent: str = ""


def check_cells(row: Mapping[str, str], columns: Sequence[Column]) -> None:
    """Raise `Unpredictable` where a cell isn't of its column's kind.

    Args:
        row: Columns by name.
        columns: Of its table.
    """
    for column in columns:
        text = row.get(column.name, "").strip()
        if not text or column.kind == "text":
            continue
        words = "a whole number" if column.kind == "count" else "a number"
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        is_whole = column.kind == "number" or value.is_integer()
        if not (math.isfinite(value) and value > 0 and is_whole):
            raise Unpredictable(f"{column.name} must be {words} above 0, found {text!r}")


def _count(name: str, meaning: str, *, is_required: bool = False, absent: str = "") -> Column:
    return Column(name=name, meaning=meaning, kind="count", is_required=is_required, absent=absent)


def _number(name: str, meaning: str) -> Column:
    return Column(name=name, meaning=meaning, kind="number")


_ID = Column(name="id", meaning="name of the row, unique", is_required=True)
_LOCATOR = Column(
    name="locator", meaning="where the source says so; names the framework, e.g. `torchtitan`"
)

_SHAPE = (
    _count("n_layers", "blocks; with `hidden` instead of a preset's name"),
    _count("hidden", "width of the residual stream"),
    _count("n_heads", "query heads; default: about 128 wide"),
    _count("n_kv_heads", "key and value heads; default: `n_heads`"),
    _count("ffn_hidden", "inner width of the feed-forward; default: 4 x `hidden`"),
    _count("vocab", "rows of the embedding; default: 50,257, of BLOOM 250,880"),
)

SPEEDS: tuple[Column, ...] = (
    _ID,
    Column(
        name="source",
        meaning="who measured: errors are given per source, with efficiencies fitted without it",
        is_required=True,
    ),
    _LOCATOR,
    Column(name="model", meaning="a preset's name, or a name for the sizes", is_required=True),
    _number("params_b", "parameters in 1e9, where `n_layers` is empty"),
    *_SHAPE,
    _count("seq_len", "tokens per sequence; default: the preset's, at most 4,096"),
    Column(name="gpu", meaning="device, e.g. `A100-80GB` or `H100`", is_required=True),
    _number("gpu_mem_gb", "its memory, where the name leaves it open (A100, V100)"),
    _count("n_gpus", "devices in all", is_required=True),
    _count("gpus_per_node", "devices of a node; default: 8"),
    Column(name="internode_net", meaning="e.g. `8x400Gbps per node`; default: the usual one"),
    Column(
        name="strategy",
        meaning="`ddp`, `zero1` to `zero3`, `full_shard`, `shard_grad_op`, `hybrid_shard`",
        is_required=True,
    ),
    _count("tp", "size of the tensor axis; without the column: 1", absent="1"),
    _count("pp", "pipeline stages; without the column: 1", absent="1"),
    _count("cp", "size of the context axis; above 1 is not predicted"),
    _count("vpp", "pieces that a stage interleaves; default: 1"),
    _count("micro_batch", "sequences per data rank and micro-batch; default: 1"),
    _count("global_batch_seqs", "sequences per step; this or `micro_batch` is needed"),
    Column(
        name="precision",
        meaning="`bf16`, `fp16`, `fp8`, `fp4`; `PURE`: gradients and parameters in it too",
        is_required=True,
    ),
    Column(
        name="act_ckpt",
        meaning="recomputation: `none`, `full`, `selective`; empty: none if that fits",
    ),
    Column(name="compile", meaning="empty, `N` or `eager`: not compiled; all else: compiled"),
    _number("tokens_per_s_per_gpu", "measured: this or `step_time_s` is compared with"),
    _number("step_time_s", "measured, seconds per step"),
    _number("peak_mem_gb", "measured; for reading only"),
    Column(
        name="notes", meaning="`cpu offload` and `model-parallel size N` are read, the rest is not"
    ),
)
"""Measured speeds: `shardwright validate ROWS.csv`."""

MEMORY: tuple[Column, ...] = (
    _ID,
    Column(name="source", meaning="who measured"),
    _LOCATOR,
    Column(name="what", meaning="what was measured; `offload` in it moves states to the host"),
    Column(name="model", meaning="a preset's name, or a name for the sizes", is_required=True),
    _number("params_b", "parameters in 1e9, where the name is no preset"),
    *_SHAPE,
    Column(name="gpu", meaning="device; where empty, `unit_note` may name it"),
    _count("n_gpus", "devices in all", is_required=True),
    Column(
        name="strategy",
        meaning="`ddp`, `zero1` to `zero3`, `full_shard`, `shard_grad_op`; axes: `; dp4 tp2 pp1`",
        is_required=True,
    ),
    _count("seq_len", "tokens per sequence; default: the model's, at most 4,096"),
    _count("micro_batch", "sequences per data rank and micro-batch", is_required=True),
    Column(name="act_ckpt", meaning="`full`, or `none`; empty: none if that fits"),
    Column(name="precision", meaning="e.g. `bf16`, `fp16 mixed`, `bf16-true`", is_required=True),
    _number("value_gb", "measured peak, in the source's GB or GiB"),
    Column(name="unit_note", meaning="`theoretical` or `percent` marks what is no measurement"),
)
"""Measured peaks: `--memory ROWS.csv`."""

FIT: tuple[Column, ...] = (
    _ID,
    _LOCATOR,
    Column(name="model", meaning="a preset's name, or a name for the sizes", is_required=True),
    *_SHAPE,
    Column(name="gpu", meaning="device, e.g. `A100`", is_required=True),
    _number("gpu_mem_gb", "its memory, where the name leaves it open"),
    _count("n_gpus", "devices in all", is_required=True),
    _count("gpus_per_node", "devices of a node; default: 8"),
    Column(
        name="strategy",
        meaning="`ddp`, `none`, `zero1` to `zero3`, `full_shard`, `shard_grad_op`",
        is_required=True,
    ),
    Column(name="offload", meaning="`optimizer`, `optimizer+param`; default: none"),
    Column(
        name="param_dtype",
        meaning="`fp32`, `bf16`, `fp16`, `fp32 (compute bf16)`",
        is_required=True,
    ),
    Column(
        name="master_dtype",
        meaning="`fp32`: the optimizer updates a copy in it; else the parameters themselves",
        absent="fp32",
    ),
    Column(name="optimizer", meaning="for reading only: two moments are counted"),
    _count("seq_len", "tokens per sequence; default: the model's, at most 2,048"),
    _count("micro_batch", "sequences per data rank and micro-batch; default: 1"),
    Column(name="act_ckpt", meaning="`full`; all else: none"),
    Column(name="attention", meaning="`eager`; all else: fused"),
    Column(name="outcome", meaning="`ran` or `oom`: what is compared with", is_required=True),
    _number("peak_mem_gib", "measured peak, GiB"),
    Column(name="states_vs_gpu", meaning="`exceed`: states alone are above the memory"),
    Column(name="loss_kernel", meaning="`fused (liger)`: logits are never held; else they are"),
    Column(name="seq_len_kind", meaning="`cap`: `seq_len` is a limit, not every length"),
    Column(
        name="scorable",
        meaning="`yes`: every input is known; without the column: yes",
        absent="yes",
    ),
)
"""What ran and what ran out of memory: `--fit ROWS.csv`."""
