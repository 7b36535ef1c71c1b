"""torch.compile on blocks: the numbers of one process, and one graph for all blocks."""

from __future__ import annotations

import shutil

import pytest

from tests.support import compiled
from tests.support.pool import RankPool

GRAPHS = 2  # one that trains, one without gradients


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("way", compiled.WAYS)
def test_compiled_blocks_equal_one_process_and_share_a_graph(
    pool: RankPool, way: str, strategy: str
) -> None:
    for difference, graphs in pool.run(
        2, compiled.compare, way=way, strategy=strategy, shape=(1, 2), backend="aot_eager"
    ):
        assert difference <= 1e-9
        assert 1 <= graphs <= GRAPHS


@pytest.mark.parametrize("strategy", ["zero3", "hybrid_full_optimizer"])
def test_compiled_blocks_equal_one_process_on_replicas(pool: RankPool, strategy: str) -> None:
    for difference, graphs in pool.run(
        4,
        compiled.compare,
        way="block.compile() after",
        strategy=strategy,
        shape=(2, 2),
        backend="eager",
    ):
        assert difference <= 1e-9
        assert 1 <= graphs <= GRAPHS


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPUs")
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_inductor_equals_one_process(pool: RankPool, strategy: str) -> None:
    for difference, graphs in pool.run(
        2,
        compiled.compare,
        way="block.compile(fullgraph=True) after",
        strategy=strategy,
        shape=(1, 2),
        backend="inductor",
    ):
        assert difference <= 1e-9
        assert 1 <= graphs <= GRAPHS
