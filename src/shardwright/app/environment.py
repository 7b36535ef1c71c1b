"""Who started this process: a launcher that gave it a rank, or a person.

torchrun and similar launchers set RANK and WORLD_SIZE; Slurm's `srun` sets names of its own,
which are translated. The command line passes `os.environ` in and, when it joins a job, updates
it with the result, so that everything below reads one set of names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_MASTER_PORT = 29_500


@dataclass(frozen=True, kw_only=True)
class Job:
    """This process's place in a job that an outer launcher started.

    Attributes:
        launcher: For messages.
        rank: Of this process.
        world_size: Processes of the job.
        local_rank: Of this process on its node.
        local_world_size: Processes on this node.
        master_addr: Host of rank 0.
        master_port: Port on that host.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables that torch.distributed reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def find_job(environ: Mapping[str, str]) -> Job | None:
    """Find the job this process belongs to.

    Args:
        environ: Environment variables.

    Returns:
        The job, or None where no launcher gave this process a rank. A Slurm job of one task is
        none: that task may start local ranks itself.

    Raises:
        SpecError: If the variables are incomplete or contradict each other.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        rank, world_size = _numbers(environ, "RANK", "WORLD_SIZE")
        local_rank = _number(environ, "LOCAL_RANK", rank)
        local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size)
        launcher = "torchrun"
    elif "SLURM_PROCID" in environ and environ.get("SLURM_NTASKS", "1") != "1":
        rank, world_size = _numbers(environ, "SLURM_PROCID", "SLURM_NTASKS")
        local_rank = _number(environ, "SLURM_LOCALID", rank)
        local_world_size = _number(environ, "SLURM_NTASKS_PER_NODE", world_size)
        launcher = "Slurm"
    else:
        return None
    if not 0 <= rank < world_size:
        raise SpecError(
            f"the rank must be from 0 to {world_size - 1}; found {rank}; correct the "
            f"{launcher} environment"
        )
    if not environ.get("MASTER_ADDR"):
        raise SpecError(
            f"a job of {launcher} must set MASTER_ADDR to the host of rank 0; found none; run "
            f"for instance: export MASTER_ADDR=$(scontrol show hostnames | head -n 1)"
        )
    return Job(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT", DEFAULT_MASTER_PORT),
    )


def _numbers(environ: Mapping[str, str], *names: str) -> list[int]:
    missing = [name for name in names if name not in environ]
    if missing:
        raise SpecError(
            f"a launched process must have {' and '.join(names)} set; found no "
            f"{', '.join(missing)}; start it with torchrun, or unset the others"
        )
    return [_number(environ, name, 0) for name in names]


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise SpecError(f"{name} must be a whole number; found {text!r}; correct the environment")
    return int(text)
