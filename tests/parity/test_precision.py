"""Casts: what is computed, reduced and kept in which dtype, and that the numbers follow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.errors import SpecError
from shardwright.runtime.precision import find_kept_modules
from tests.support import precision
from tests.support.pool import RankPool

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("param", "reduce", "stored"),
    [(BF16, FP32, FP32), (BF16, BF16, FP32), (None, None, BF16), (FP32, BF16, FP32)],
    ids=["bf16", "bf16 on the wire", "stored in bf16", "fp32, bf16 on the wire"],
)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_two_ranks_equal_one_process_with_the_same_casts(
    pool: RankPool,
    strategy: str,
    param: torch.dtype | None,
    reduce: torch.dtype | None,
    stored: torch.dtype,
) -> None:
    """Bit for bit: what rounds, and in which order, is the same."""
    for difference, dtypes in pool.run(
        2,
        precision.compare,
        strategy=strategy,
        shape=(1, 2),
        param=param,
        reduce=reduce,
        stored=stored,
    ):
        assert dtypes == {FP32}
        assert difference == 0


@pytest.mark.parametrize("transport", ["pairwise", "collective"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_norms_kept_in_float32_equal_one_process_that_keeps_them(
    pool: RankPool, strategy: str, transport: str
) -> None:
    options = {"param": BF16, "reduce": FP32, "stored": FP32, "shape": (1, 2)}
    for difference, _ in pool.run(
        2, precision.compare, strategy=strategy, keep_norms=True, transport=transport, **options
    ):
        assert difference == 0


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_kept_modules_see_float32_and_hand_on_what_they_were_given(
    pool: RankPool, strategy: str
) -> None:
    for seen in pool.run(2, precision.kept_modules, strategy=strategy):
        assert seen == {
            "pair": BF16,
            "norm in": BF16,
            "norm out": BF16,
            "norm.weight": FP32,
            "last.weight": FP32,
            "grads": {FP32},
            "plain": FP32,
        }


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_narrow_masters_are_taken_with_a_warning(pool: RankPool, strategy: str) -> None:
    for dtypes, difference, warning in pool.run(2, precision.narrow_masters, strategy=strategy):
        assert dtypes == {BF16}
        assert difference == 0
        assert "lost to rounding" in warning


@pytest.mark.parametrize("strategy", ["hybrid", "hybrid_full_optimizer", "zero1"])
def test_replicas_reduce_in_the_reduce_dtype_and_keep_float32_masters(
    pool: RankPool, strategy: str
) -> None:
    """Partial sums are rounded on their way between replicas, in the emulation too."""
    for difference, dtypes in pool.run(
        4,
        precision.compare,
        strategy=strategy,
        shape=(2, 2),
        param=BF16,
        reduce=BF16,
        stored=FP32,
    ):
        assert dtypes == {FP32}
        assert difference == 0


@pytest.mark.parametrize(
    ("settings", "expected", "output"),
    [
        ({}, {"weight": FP32, "input": FP32, "keyword": FP32, "buffer": FP32}, FP32),
        ({"param": BF16}, {"weight": BF16, "input": BF16, "keyword": BF16, "buffer": FP32}, FP32),
        (
            {"param": BF16, "buffer": BF16},
            {"weight": BF16, "input": BF16, "keyword": BF16, "buffer": BF16},
            BF16,
        ),
        (
            {"param": BF16, "buffer": BF16, "output": FP32},
            {"weight": BF16, "input": BF16, "keyword": BF16, "buffer": BF16},
            FP32,
        ),
    ],
    ids=["default", "param", "buffer", "output"],
)
def test_inputs_buffers_and_outputs_are_cast_where_asked(
    pool: RankPool,
    settings: dict[str, torch.dtype],
    expected: dict[str, torch.dtype],
    output: torch.dtype,
) -> None:
    for seen, out in pool.run(2, precision.dtypes_seen, precision=settings):
        assert seen == {**expected, "index": torch.int64}
        assert out == output


@pytest.mark.parametrize("name", ["blocks", "blocks.0"])
def test_keeping_what_is_never_called_is_refused(name: str) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ParameterList([torch.ones(2)])])
    with pytest.raises(SpecError, match=f"'{name}', a (Module|Parameter)List: it is never called"):
        find_kept_modules(model, sw.Precision(keep=(name,)))
