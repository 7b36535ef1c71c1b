"""A user may write to parameters as soon as a pass has ended: no peer still reads them."""

from __future__ import annotations

import pytest

from tests.support import sends
from tests.support.pool import RankPool


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "hybrid_full_optimizer"])
def test_no_send_of_a_shard_outlives_the_pass_that_began_it(pool: RankPool, strategy: str) -> None:
    for inside, after_evaluation, after_backward in pool.run(
        4, sends.pending_after_passes, strategy=strategy, shape=(2, 2)
    ):
        assert inside > 0
        assert after_evaluation == 0
        assert after_backward == 0
