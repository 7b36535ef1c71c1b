"""`launch`: run a function as several ranks on this machine, from a script or a notebook.

The parent hosts the rendezvous store and the ranks connect to it, as under torchrun, so there is no
port to choose and none to lose to another process. `rank_process` is the other side.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.app.rank_group import RankGroup
from shardwright.app.rank_pickle import pack
from shardwright.app.rank_process import RankSetup
from shardwright.core.errors import SpecError

__all__ = ["launch"]

T = TypeVar("T")
HOST = "127.0.0.1"
GRACE_S = 10.0


def launch(
    fn: Callable[..., T],
    *,
    ranks: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    threads_per_rank: int = 1,
    start_method: str = "spawn",
    grace_s: float = GRACE_S,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` in `ranks` local processes and return what each returned.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    set, so `sw.init_mesh` or ``torch.distributed.init_process_group`` join without arguments.
    gloo talks over the loopback interface unless GLOO_SOCKET_IFNAME is set.

    A script calls it under ``if __name__ == "__main__":``, because each rank imports the script. In
    a notebook, whose functions can't be imported, ranks start as copies of this process instead;
    that is possible until CUDA is used here.

    If a rank raises or dies, the others are ended. Ctrl-C is passed on to the ranks, which may
    take `grace_s` to end in order. If this process dies, so do the ranks.

    Args:
        fn: A function at the top level of a module, or, in a notebook, any function.
        ranks: How many processes.
        args: Positional arguments. Each rank gets copies.
        kwargs: Keyword arguments. Each rank gets copies.
        timeout_s: Bound on the whole call, in seconds; None for no bound.
        threads_per_rank: Threads of torch's operators in each rank.
        start_method: ``"spawn"``, or ``"fork"`` to start ranks as copies of this process.
        grace_s: Seconds the ranks may take to end in order after Ctrl-C.

    Returns:
        What each rank returned, in order of rank. Tensors are on the CPU and detached.

    Raises:
        LaunchError: A rank raised, died, or took too long; the message has its traceback.
        SpecError: An argument is wrong, or `fn` can't reach another process.
    """
    _require_positive(ranks=ranks, threads_per_rank=threads_per_rank, grace_s=grace_s)
    if timeout_s is not None:
        _require_positive(timeout_s=timeout_s)
    method, work = _choose_start(fn, tuple(args), dict(kwargs or {}), start_method)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        HOST, 0, None, is_master=True, wait_for_workers=False
    )
    setups = [
        RankSetup(
            rank=rank,
            environment=_environment(rank, ranks, store.port, threads_per_rank),
            num_threads=threads_per_rank,
            parent_pid=os.getpid(),
            is_forked=method == "fork",
            work=work,
        )
        for rank in range(ranks)
    ]
    group = RankGroup(multiprocessing.get_context(method), grace_s=grace_s, timeout_s=timeout_s)
    try:
        group.start(setups)
        return group.results()
    except KeyboardInterrupt:
        group.interrupt()
        raise
    finally:
        group.end()
        del store  # not before: the ranks use it to the last


def _require_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        is_count = name in ("ranks", "threads_per_rank")
        if not isinstance(value, int if is_count else int | float) or value <= 0:
            raise SpecError(
                f"launch needs {name} to be a {'whole ' if is_count else ''}number above 0; "
                f"found {value!r}"
            )


def _environment(rank: int, ranks: int, port: int, num_threads: int) -> dict[str, str]:
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(num_threads),
    }
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo would otherwise resolve the machine's name, which on a laptop often leads nowhere.
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if loopback:
            environment["GLOO_SOCKET_IFNAME"] = loopback[0]
    return environment


def _choose_start(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], start_method: str
) -> tuple[str, bytes | Callable[[], Any]]:
    """Choose how processes start, and how `fn` gets there."""
    if start_method not in ("spawn", "fork"):
        raise SpecError(f"launch needs start_method 'spawn' or 'fork'; found {start_method!r}")
    can_import_main = hasattr(sys.modules["__main__"], "__file__")
    if start_method == "spawn":
        try:
            packed = pack((fn, args, kwargs))
        except Exception as error:
            if can_import_main:
                raise SpecError(
                    f"launch needs a function at the top level of a module, and arguments that "
                    f"pickle takes; found {fn!r}: {error}; change that, or pass start_method='fork'"
                ) from None
        else:
            if can_import_main or not packed.needs_main:
                return "spawn", packed
    if torch.cuda.is_initialized():
        raise SpecError(
            "launch must start ranks as copies of this process, because they can't import "
            "a function of a notebook; found CUDA in use here, which a copy can't share; "
            "restart the notebook and call launch first, or move the function to a file"
        )
    return "fork", functools.partial(fn, *args, **kwargs)
