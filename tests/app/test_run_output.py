"""What a run prints and leaves behind."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from shardwright.app.config import Config, resolve
from shardwright.app.interrupt import StopRequest
from shardwright.app.progress import Progress, StepRecord, format_record
from shardwright.app.run_folder import RunFolder, RunFolderError, require_unused
from shardwright.app.settings import load_config

RECORD = StepRecord(
    step=3,
    loss=1.25,
    lr=1e-3,
    grad_norm=0.5,
    tokens=300,
    step_s=0.5,
    tokens_per_s=1234.5,
    wait_share=0.125,
    peak_memory_bytes=5 * 2**20,
)


def config(out: Path | None = None) -> Config:
    flags = {"run": {"out": None if out is None else str(out)}}
    return resolve(load_config(None, flags), ranks=2)


def test_a_line_shows_what_is_known_and_omits_the_rest() -> None:
    line = format_record(RECORD, 100)
    assert line == ("step   3/100  loss 1.2500  1,234 tokens/s  peak 5 MiB  waiting 12.5%")
    assert "MFU 40.0%" in format_record(StepRecord(step=1, mfu=0.4), 100)
    assert "validation loss 2.0000" in format_record(StepRecord(step=0, val_loss=2.0), 9)


def test_plain_output_prints_every_so_often_and_each_validation() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    with Progress(console, num_steps=9, log_every=4) as progress:
        for step in range(1, 10):
            val_loss = 2.0 if step == 6 else None
            progress.show(StepRecord(step=step, loss=1.0, val_loss=val_loss))
    steps = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert steps == ["1/9", "4/9", "6/9", "8/9", "9/9"]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_live_line_too() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=200, force_terminal=True)
    with Progress(console, num_steps=9, log_every=4) as progress:
        progress.show(RECORD)
    assert "\x1b" in stream.getvalue()


def test_the_folder_holds_a_configuration_that_runs_again(tmp_path: Path) -> None:
    with RunFolder(config(tmp_path / "deep" / "run")) as folder:
        pass
    again = load_config(folder.path / "config.toml", {})
    assert again == config(tmp_path / "deep" / "run")


def test_metrics_are_on_disk_line_by_line(tmp_path: Path) -> None:
    with RunFolder(config(tmp_path / "run")) as folder:
        folder.write_metrics(RECORD.as_dict())
        folder.write_metrics({"step": 4, "loss": math.nan, "grad_norm": math.inf})
        lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["loss"] == 1.25
    assert json.loads(lines[1]) == {"step": 4, "loss": None, "grad_norm": None}


def test_the_summary_replaces_an_older_one_in_one_go(tmp_path: Path) -> None:
    with RunFolder(config(tmp_path / "run")) as folder:
        folder.write_summary({"steps": 1})
        folder.write_summary({"steps": 2})
    assert json.loads((folder.path / "summary.json").read_text()) == {"steps": 2}
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "summary.json",
    ]


def test_a_folder_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with RunFolder(config(tmp_path / "run")) as folder:
        folder.write_metrics({"step": 1})
    with pytest.raises(RunFolderError, match=r"run\.out must be a new or empty folder"):
        RunFolder(config(tmp_path / "run"))
    assert (folder.path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    require_unused(tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "found"),
    [("file", "is a file"), ("file/run", "is a file"), ("a" * 300, "File name too long")],
)
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "file").touch()
    for open_folder in (require_unused, lambda folder: RunFolder(config(folder))):
        with pytest.raises(RunFolderError, match=f"must be writable; found: .*{found}"):
            open_folder(tmp_path / name)


def test_folders_are_named_after_the_run_and_never_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunFolder(config()) as one, RunFolder(config()) as two:
        assert one.path != two.path
        assert one.path.name.startswith("tiny-zero3-")
        assert one.path.parent == Path("runs")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_to_stop(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.is_made
        os.kill(os.getpid(), number)
        assert stop.is_made
    assert signal.getsignal(number) is before


def test_the_second_interrupt_is_not_held_back() -> None:
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
