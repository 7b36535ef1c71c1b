"""Recognising the launcher that started a process."""

from __future__ import annotations

import pytest

from shardwright.app.environment import find_job
from shardwright.core.errors import SpecError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "MASTER_ADDR": "host",
}


def test_a_process_nobody_launched_has_no_job() -> None:
    assert find_job({"PATH": "/bin"}) is None


def test_torchrun_variables_are_taken_as_they_are() -> None:
    job = find_job(TORCHRUN)
    assert job is not None
    assert job.variables() == TORCHRUN


def test_slurm_variables_are_translated() -> None:
    job = find_job(SLURM)
    assert job is not None
    assert job.variables() == TORCHRUN | {"MASTER_PORT": "29500"}


def test_torchrun_inside_slurm_decides() -> None:
    job = find_job(SLURM | TORCHRUN | {"RANK": "2"})
    assert job is not None
    assert (job.launcher, job.rank) == ("torchrun", 2)


def test_a_slurm_job_of_one_task_may_start_its_own_ranks() -> None:
    assert find_job({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "found no WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "found no RANK"),
        (TORCHRUN | {"RANK": "x"}, "RANK must be a whole number; found 'x'"),
        (TORCHRUN | {"RANK": "4"}, "from 0 to 3; found 4"),
        ({**SLURM, "MASTER_ADDR": ""}, "must set MASTER_ADDR to the host of rank 0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "must set MASTER_ADDR"),
    ],
)
def test_incomplete_environments_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        find_job(environ)
