"""The pool itself: worlds, failures, deaths, hangs, and jobs that follow them."""

from __future__ import annotations

import os
import random
import signal
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import PoolFailure, RankPool


def add(value: float) -> torch.Tensor:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor


def surroundings() -> tuple[object, ...]:
    return (
        dist.get_rank(),
        dist.get_world_size(),
        torch.get_num_threads(),
        os.environ["LOCAL_WORLD_SIZE"],
        os.environ.get("LEFT_BEHIND"),
        torch.get_default_dtype(),
        float(torch.rand(())),
        os.getpid(),
    )


def change_the_process() -> None:
    os.environ["LEFT_BEHIND"] = "yes"
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)


def use_subgroups_and_leave_them() -> float:
    group = dist.new_group([0, 1])
    cycle: list[object] = [group]
    cycle.append(cycle)
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        dist.isend(tensor, 1, group=group).wait()
    else:
        dist.irecv(tensor, 0, group=group).wait()
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    return float(tensor.sum())


def is_there_a_group() -> bool:
    return dist.is_initialized()


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raises":
            raise ValueError("rank fails on purpose")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            signal.pause()
        warnings.warn("a warning on purpose", UserWarning, stacklevel=1)
    dist.barrier()


def return_a_lambda() -> object:
    return lambda: None


def test_a_job_runs_on_its_own_world(pool: RankPool) -> None:
    for world in (1, 2, 4, 2):
        assert pool.run(world, add, value=3.0) == [3.0 * world] * world


def test_a_function_may_be_named(pool: RankPool) -> None:
    assert pool.run(2, "tests.support.test_pool:add", value=1.0) == [2.0, 2.0]


def test_processes_are_reused_and_jobs_start_alike(pool: RankPool) -> None:
    before = pool.run(2, surroundings)
    pool.run(2, change_the_process)
    assert pool.run(2, surroundings) == before
    assert [result[:6] for result in before] == [
        (rank, 2, 1, "2", None, torch.float32) for rank in range(2)
    ]


def test_groups_that_a_job_leaves_are_closed(pool: RankPool) -> None:
    assert pool.run(2, use_subgroups_and_leave_them) == [8.0, 8.0]
    assert pool.run(2, add, value=1.0) == [2.0, 2.0]


def test_a_job_may_start_its_own_group(pool: RankPool) -> None:
    assert pool.run(2, is_there_a_group, starts_group=False) == [False, False]


def test_an_exception_fails_the_test_and_keeps_the_pool(pool: RankPool) -> None:
    pids = pool.run(2, os.getpid)
    with pytest.raises(PoolFailure, match="rank 1 of 2 raised ValueError: rank fails on p") as it:
        pool.run(2, fail_on, rank=1, how="raises")
    assert "in fail_on" in str(it.value)
    assert "rank 0 of 2 raised" in str(it.value)
    assert pool.run(2, os.getpid) == pids


def test_expected_exceptions_are_returned(pool: RankPool) -> None:
    waiting, raising = pool.attempt(2, fail_on, rank=1, how="raises")
    assert (raising.raised, raising.message) == ("ValueError", "rank fails on purpose")
    assert waiting.failure is not None
    assert waiting.failure.is_echo
    assert 0 <= raising.seconds <= waiting.seconds
    assert [outcome.raised for outcome in pool.attempt(2, add, value=1.0)] == ["", ""]


def test_a_rank_that_dies_is_named_and_replaced(pool: RankPool) -> None:
    waiting, dead = pool.attempt(2, fail_on, rank=1, how="is killed")
    assert dead.failure is not None
    assert dead.failure.what == "died of signal 9 (SIGKILL)"
    assert waiting.failure is not None
    assert waiting.failure.is_echo
    assert pool.run(2, add, value=1.0) == [2.0, 2.0]


def test_a_hang_fails_the_test_and_names_the_ranks(pool: RankPool) -> None:
    with pytest.raises(PoolFailure, match=r"ranks \[0, 1\] did not") as caught:
        pool.run(2, fail_on, rank=0, how="hangs", timeout_s=2)
    assert "in fail_on" in str(caught.value)
    assert pool.run(2, add, value=1.0) == [2.0, 2.0]


def test_a_warning_is_an_error_as_it_is_in_this_process(pool: RankPool) -> None:
    raised, _ = pool.attempt(2, fail_on, rank=0, how="warns")
    assert (raised.raised, raised.message) == ("UserWarning", "a warning on purpose")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool.run(2, fail_on, rank=0, how="warns")


def test_a_result_that_does_not_travel_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(PoolFailure, match=r"rank 0 of 1 raised .*return_a_lambda"):
        pool.run(1, return_a_lambda)


def test_a_world_beyond_the_pool_is_refused(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="1 to 4 ranks; found 5"):
        pool.run(5, random.random)
