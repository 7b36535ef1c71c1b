"""Thousands of steps hold what hundreds did: no tensor, no object, no memory is left behind."""

from __future__ import annotations

import pytest

from tests.support import memory
from tests.support.pool import RankPool

STOPS = (300, 500, 2000)
"""The first is past the 256 steps whose records the ledger keeps."""

MOST_GROWTH_BYTES = 4 * memory.MIB
"""After step 500; seen: 0.2 to 1.7 MiB, of pages that the allocator touches once."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_two_thousand_steps_leave_nothing_behind(pool: RankPool, strategy: str) -> None:
    """With AdamW, clipping, and an evaluation every hundred steps."""
    for holdings in pool.run(
        2,
        memory.steps_with_evaluations,
        strategy=strategy,
        shape=(1, 2),
        stops=STOPS,
        timeout_s=300.0,
    ):
        early, middle, late = holdings
        assert late.storages == early.storages
        assert late.storage_bytes == early.storage_bytes
        assert late.num_tensors == early.num_tensors
        assert late.objects == early.objects
        assert late.resident_bytes - middle.resident_bytes <= MOST_GROWTH_BYTES
