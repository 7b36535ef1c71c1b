"""`shardwright train` before any rank starts: flags, refusals, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.app.cli import main
from shardwright.app.config import Config
from shardwright.core.errors import ShardwrightError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "MASTER_ADDR")

Run = Callable[..., int]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Replace launching and training: what would have been started is collected."""
    started: list[Config] = []

    def launch(fn: object, *, ranks: int, args: tuple[Config], grace_s: float) -> list[object]:
        started.append(args[0])
        assert grace_s > 0
        if args[0].run.prompt == "interrupt me":
            raise KeyboardInterrupt
        if args[0].run.prompt == "fail":
            return [ShardwrightError("the loss must be finite")] * ranks
        if args[0].run.prompt == "terminate me":
            os.kill(os.getpid(), signal.SIGTERM)
        return [None] * ranks

    for name, contents in {"launch": {"launch": launch}, "train": {"train_rank": None}}.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, f"shardwright.app.{name}", module)
    for variable in LAUNCHER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return started


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command in an empty folder; its exit code."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0)

    return call


def test_flags_reach_the_ranks(run: Run, launched: list[Config]) -> None:
    code = run(
        *"train --preset small --ranks 2 --strategy full_shard --steps 20 --lr 1e-3".split(),
        *"--accumulation 2 --dtype bf16 --out here --set train.clip=0.5".split(),
    )
    assert code == 0
    (config,) = launched
    assert config.model.preset == "small"
    assert (config.parallel.ranks, config.parallel.strategy) == (2, "zero3")
    assert (config.parallel.replicate, config.parallel.shard) == (1, 2)
    assert (config.train.steps, config.train.lr, config.train.clip) == (20, 1e-3, 0.5)
    assert (config.train.accumulation, config.precision.dtype) == (2, "bf16")


def test_one_rank_is_the_default_and_the_file_may_say_otherwise(
    run: Run, launched: list[Config], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("[parallel]\nranks = 3\n[train]\nsteps = 4\n")
    assert run("train") == 0
    assert run("train", "--config", "run.toml", "--steps", "5") == 0
    assert [config.parallel.ranks for config in launched] == [1, 3]
    assert launched[1].train.steps == 5


def test_data_may_be_given_several_times(run: Run, launched: list[Config], tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("text")
    assert run("train", "--data", "a", "--data", "b") == 0
    assert launched[0].data.paths == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--strategy zero4", 2, "did you mean 'zero3'?"),
        ("--preset tinny", 2, "did you mean 'tiny'?"),
        ("--ranks 0", 2, "parallel.ranks must be greater than 0; found 0"),
        ("--ranks 2 --shard 3", 2, "must equal the 2 ranks"),
        ("--micro-batch 5", 2, "global_batch=24 over micro_batch=5"),
        ("--set train.lrr=1", 2, "did you mean 'lr'?"),
        ("--config missing.toml", 2, "must be a readable file"),
        ("--out /proc/version/run", 2, "'/proc/version' is a file"),
        ("--out=", 2, "run.out must have at least 1 character"),
        ("--lr 1e-3 --set train.lr=2e-3", 2, "sets train.lr a second time"),
        ("--tokenizer missing.json", 2, "which is no file"),
        ("--data missing", 1, "found nothing there"),
        ("--lr fast", 2, "--lr"),
        ("--stratgy zero3", 2, "--stratgy"),
    ],
)
def test_mistakes_are_told_on_stderr_before_anything_starts(
    run: Run,
    launched: list[Config],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    code: int,
    message: str,
) -> None:
    assert run("train", *arguments.split()) == code
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""
    assert launched == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(
    run: Run, launched: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert run("train", "--out", ".") == 2
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert launched == []


@pytest.mark.parametrize("prompt", ["interrupt me", "terminate me"])
def test_an_interrupted_run_exits_with_130(run: Run, launched: list[Config], prompt: str) -> None:
    assert run("train", "--prompt", prompt) == 130
    assert len(launched) == 1


def test_an_error_that_all_ranks_raise_is_told_once(
    run: Run, launched: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", "--prompt", "fail", "--ranks", "2") == 1
    assert capsys.readouterr().err == "error: the loss must be finite\n"


def test_ranks_inside_a_job_are_refused(
    run: Run,
    launched: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}.items():
        monkeypatch.setenv(name, value)
    assert run("train", "--ranks", "2") == 2
    assert "drop --ranks" in capsys.readouterr().err
    assert launched == []


def test_slurm_without_an_address_says_how_to_set_it(
    run: Run,
    launched: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert run("train") == 2
    assert "export MASTER_ADDR=" in capsys.readouterr().err


def test_the_version_is_printed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("shardwright ")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["train", "--ranks", "0"]])
def test_help_and_refusals_load_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['shardwright', *{arguments!r}]\n"
        "from shardwright.app.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert "AssertionError" not in done.stderr
    assert done.returncode in (0, 2)
