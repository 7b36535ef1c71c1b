"""Fixtures and settings of all tests. Imports no torch: the tests of the pure layers need none."""

from __future__ import annotations

import gc
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.pool import RankPool

# A shell that starts a run in the background may have it ignore interrupts, which programs under
# test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no bound on the time of one.
settings.register_profile("shardwright", derandomize=True, deadline=None)
settings.load_profile("shardwright")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Rank processes shared by all tests; `tests.support.pool` says how to use them."""
    from tests.support.pool import RankPool

    made = RankPool()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A process group left in this process would reach other tests, and may abort its exit."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()
        pytest.fail("the test left a process group; destroy it, or use the pool")
