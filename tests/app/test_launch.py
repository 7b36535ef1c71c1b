"""Launching local ranks: results, failures, interrupts, and no process left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.app.launch import launch
from shardwright.app.rank_failure import RankFailure, describe_exit, root_cause
from shardwright.app.rank_pickle import pack, unpack
from shardwright.core.errors import LaunchError, SpecError

FOREVER_S = 600.0


def report_surroundings(word: str, *, number: int) -> dict[str, object]:
    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    return {
        "word": word,
        "number": number,
        "rank": dist.get_rank(),
        "total": total,
        "environment": {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")},
        "num_threads": (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]),
    }


def return_all_kinds() -> tuple[object, ...]:
    big = torch.arange(1_000_000)
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    return big[7:9], weight * 2, np.arange(3), torch.empty(0, 4), {"nested": [torch.tensor(1.5)]}


def wait_in_a_collective_while_rank_1(does: str) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if does == "raises":
            raise ValueError("no such block 'layers.7'")
        if does == "exits":
            os._exit(3)
        if does == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    dist.all_reduce(torch.ones(1))


def return_something_that_does_not_travel() -> object:
    return lambda: None


def ignore_being_asked_to_end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        raise ValueError("rank 0 fails")
    signal.pause()


def test_each_rank_finds_its_surroundings_and_returns_its_own_result() -> None:
    results = launch(
        report_surroundings, ranks=2, args=("hello",), kwargs={"number": 7}, threads_per_rank=2
    )
    assert [result["rank"] for result in results] == [0, 1]
    for rank, result in enumerate(results):
        assert (result["word"], result["number"]) == ("hello", 7)
        assert torch.equal(result["total"], torch.tensor(2.0))
        assert result["environment"] == {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        assert result["num_threads"] == (2, "2")
    assert "RANK" not in os.environ


def test_tensors_and_arrays_come_back_as_copies_of_their_elements() -> None:
    (result,) = launch(return_all_kinds, ranks=1)
    view, product, array, empty, nested = result
    assert torch.equal(view, torch.tensor([7, 8]))
    assert view.untyped_storage().nbytes() == 16
    assert torch.equal(product, torch.full((2,), 2.0, dtype=torch.bfloat16))
    assert not product.requires_grad
    assert array.tolist() == [0, 1, 2]
    assert empty.shape == (0, 4)
    assert torch.equal(nested["nested"][0], torch.tensor(1.5))


def test_parameters_stay_parameters_and_shared_ones_stay_shared() -> None:
    module = nn.Linear(2, 2)
    copy, tied = unpack(pack((module, module.weight)))
    assert copy.weight is tied
    assert isinstance(tied, nn.Parameter)
    assert tied.requires_grad
    assert torch.equal(tied, module.weight)


def test_a_tensor_without_dense_elements_is_refused() -> None:
    with pytest.raises(TypeError, match="exchanges dense tensors; found a Tensor with layout"):
        pack(torch.eye(2).to_sparse())


@pytest.mark.parametrize(
    ("does", "found"),
    [
        ("raises", "rank 1 raised ValueError: no such block 'layers.7'; the others were ended"),
        ("exits", "rank 1 exited with code 3 without returning"),
        ("is killed", r"rank 1 died of signal 9 \(SIGKILL\)"),
    ],
)
def test_one_failed_rank_ends_all_and_is_named(does: str, found: str) -> None:
    with pytest.raises(LaunchError, match=found) as caught:
        launch(wait_in_a_collective_while_rank_1, ranks=3, args=(does,), timeout_s=FOREVER_S / 10)
    if does == "raises":
        assert "rank 1's traceback" in str(caught.value)
        assert "in wait_in_a_collective_while_rank_1" in str(caught.value)
        assert "rank_process.py" not in str(caught.value)


def test_a_launch_that_takes_too_long_says_where_each_rank_waits() -> None:
    with pytest.raises(LaunchError, match=r"within 8 s; found ranks 0, 1 still running") as caught:
        launch(wait_in_a_collective_while_rank_1, ranks=2, args=("sleeps",), timeout_s=8)
    assert "in all_reduce" in str(caught.value)
    assert "in wait_in_a_collective_while_rank_1" in str(caught.value)


def test_a_rank_that_ignores_being_asked_is_killed() -> None:
    with pytest.raises(LaunchError, match="rank 0 raised ValueError: rank 0 fails"):
        launch(ignore_being_asked_to_end, ranks=2, timeout_s=FOREVER_S / 10)


def nested_without_end() -> list[object]:
    found: list[object] = []
    for _ in range(100_000):
        found = [found]
    return found


def test_what_is_nested_too_deeply_is_told_once() -> None:
    with pytest.raises(LaunchError, match="nested too deeply for pickle") as caught:
        launch(nested_without_end, ranks=1)
    assert "RecursionError" not in str(caught.value)
    with pytest.raises(SpecError, match="nested too deeply for pickle; change that"):
        launch(return_all_kinds, ranks=1, args=(nested_without_end(),))


def test_a_result_that_does_not_travel_is_named() -> None:
    with pytest.raises(LaunchError, match="found a function that doesn't travel"):
        launch(return_something_that_does_not_travel, ranks=1)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"ranks": 0}, "needs ranks to be a whole number above 0; found 0"),
        ({"ranks": 1, "threads_per_rank": 1.5}, "threads_per_rank .* found 1.5"),
        ({"ranks": 1, "timeout_s": -1}, "timeout_s to be a number above 0; found -1"),
        ({"ranks": 1, "start_method": "thread"}, "'spawn' or 'fork'; found 'thread'"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, object], found: str) -> None:
    with pytest.raises(SpecError, match=found):
        launch(return_all_kinds, **arguments)  # type: ignore[arg-type]


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(SpecError, match="a function at the top level of a module"):
        launch(lambda: None, ranks=1)


# --- which failure is to blame ---------------------------------------------------------------


def failure(rank: int, error: BaseException, time_s: float) -> RankFailure:
    made = RankFailure.of_exception(rank, error, runner="")
    return RankFailure(rank=rank, time_s=time_s, what=made.what, is_echo=made.is_echo)


def test_the_earliest_failure_that_is_no_echo_is_to_blame() -> None:
    echo = failure(0, RuntimeError("[tcp/pair.cc:547] Connection closed by peer [::1]:80"), 1.0)
    later = failure(1, ValueError("boom"), 3.0)
    earlier = failure(2, KeyError("boom"), 2.0)
    assert root_cause([echo, later, earlier]) is earlier
    assert root_cause([echo]) is echo


def test_an_echo_is_recognised_through_the_error_that_wraps_it() -> None:
    inner = RuntimeError("Connection reset by peer")
    outer = ValueError("the step failed")
    outer.__cause__ = inner
    assert RankFailure.of_exception(0, outer, runner="").is_echo


def test_a_death_names_its_signal() -> None:
    assert describe_exit(-11) == "died of signal 11 (SIGSEGV)"
    assert describe_exit(-64) == "died of signal 64 (SIGRTMAX)"


# --- whole programs --------------------------------------------------------------------------


def start(tmp_path: Path, script: str, *, through_stdin: bool = False) -> subprocess.Popen[str]:
    """Start a program; as a notebook would where it has no file."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(script))
    return subprocess.Popen(
        [sys.executable, "-W", "error", *(["-c", path.read_text()] if through_stdin else [path])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(tmp_path: Path, script: str, *, through_stdin: bool = False) -> str:
    program = start(tmp_path, script, through_stdin=through_stdin)
    output, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors
    assert errors == ""
    return output


GUARDED = """
    import dataclasses
    from shardwright.app.launch import launch

    @dataclasses.dataclass
    class Answer:
        rank: int

    def answer():
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print(f"rank {dist.get_rank()} prints", flush=True)
        return Answer(dist.get_rank())

    if __name__ == "__main__":
        print(launch(answer, ranks=2))
    """


def test_a_script_launches_its_own_functions(tmp_path: Path) -> None:
    output = run(tmp_path, GUARDED)
    assert "[Answer(rank=0), Answer(rank=1)]" in output
    assert "rank 1 prints" in output


def test_a_program_without_a_file_starts_copies_of_itself(tmp_path: Path) -> None:
    script = """
        import torch
        from shardwright.app.launch import launch

        layer = torch.nn.Linear(4, 4)
        layer(torch.ones(2, 4)).sum().backward()

        def train():
            import torch.distributed as dist
            dist.init_process_group("gloo")
            layer(torch.ones(2, 4)).sum().backward()
            return dist.get_rank(), float(layer.weight.grad.sum())

        print(launch(train, ranks=2))
        """
    assert run(tmp_path, script, through_stdin=True) == "[(0, 64.0), (1, 64.0)]\n"


def test_a_program_without_a_file_that_uses_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SpecError, match="found CUDA in use here"):
        launch(return_all_kinds, ranks=1, start_method="fork")


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = "from shardwright.app.launch import launch\nlaunch(print, ranks=1)\n"
    program = start(tmp_path, script)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 1
    assert "rank 0 exited with code 1 without returning before it reached" in errors
    assert "a script must call launch under 'if __name__ == \"__main__\":'" in errors


WAITING = """
    import os, signal, sys
    from shardwright.app.launch import launch

    def wait_for_interrupt(is_stubborn):
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if is_stubborn:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        dist.barrier()
        try:
            os.write(1, f"{{os.getpid()}}\\n".encode())  # at once, where print may write in parts
            signal.pause()
            signal.pause()
        except KeyboardInterrupt:
            dist.barrier()
            os.write(1, b"ended in order\\n")

    if __name__ == "__main__":
        launch(wait_for_interrupt, ranks=2, args=({is_stubborn},), grace_s={grace_s})
    """


def read_pids(program: subprocess.Popen[str]) -> list[int]:
    assert program.stdout is not None
    return [int(program.stdout.readline()) for _ in range(2)]


def require_end(pids: list[int], handles: list[int]) -> None:
    """Wait for processes that aren't children of this one."""
    for pid, handle in zip(pids, handles, strict=True):
        readable, _, _ = select.select([handle], [], [], 30)
        assert readable, f"process {pid} is still there"
        os.close(handle)


@pytest.mark.skipif(sys.platform != "linux", reason="watches processes through Linux's pidfd")
@pytest.mark.parametrize("whom", ["program", "terminal"])
def test_an_interrupt_lets_the_ranks_end_in_order(tmp_path: Path, whom: str) -> None:
    program = start(tmp_path, WAITING.format(is_stubborn=False, grace_s=30))
    pids = read_pids(program)
    handles = [os.pidfd_open(pid) for pid in pids]
    if whom == "program":
        os.kill(program.pid, signal.SIGINT)
    else:
        os.killpg(program.pid, signal.SIGINT)
    output, errors = program.communicate(timeout=60)
    require_end(pids, handles)
    assert output == "ended in order\n" * 2
    assert program.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "gloo" not in errors


@pytest.mark.skipif(sys.platform != "linux", reason="watches processes through Linux's pidfd")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_program(tmp_path: Path, number: signal.Signals) -> None:
    program = start(tmp_path, WAITING.format(is_stubborn=True, grace_s=0.5))
    pids = read_pids(program)
    handles = [os.pidfd_open(pid) for pid in pids]
    os.kill(program.pid, number)
    program.communicate(timeout=60)
    require_end(pids, handles)
    assert program.returncode == -number


HOLDS_ON_TO_GROUPS = """
    import sys
    import torch
    import torch.distributed as dist
    from shardwright.app.launch import launch

    held = []

    def leave_worker_threads_holding_tensors():
        dist.init_process_group("gloo")
        held.append(dist.group.WORLD)
        # The interpreter's lock isn't given up any more except in waits, so that a worker thread
        # which wants it gets it only when the interpreter shuts down.
        sys.setswitchinterval(100.0)
        tensors = [torch.ones(64) for _ in range(64)]
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        del tensors, work

    if __name__ == "__main__":
        launch(leave_worker_threads_holding_tensors, ranks=2)
    """


def test_worker_threads_that_still_hold_tensors_do_not_abort_the_exit(tmp_path: Path) -> None:
    assert run(tmp_path, HOLDS_ON_TO_GROUPS) == ""
