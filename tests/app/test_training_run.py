"""Training end to end with the real engine: numbers, files, interruption, failure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwright.app.config import Config, resolve
from shardwright.app.data import DataError
from shardwright.app.launch import launch
from shardwright.app.run_folder import RunFolderError
from shardwright.app.settings import load_config
from shardwright.app.train import NonFiniteError, TrainResult, train, train_rank

STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: {i * i % 97} apples\n" for i in range(600)))
    return path


def config(text: Path, out: Path, *assignments: str, ranks: int = 1) -> Config:
    flags: dict[str, dict[str, Any]] = {
        "model": {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_hidden": 48},
        "data": {"paths": [str(text)]},
        "train": {"steps": STEPS, "seq_len": 32, "global_batch": 8, "eval_every": 3},
        "run": {"out": str(out), "sample_tokens": 8, "prompt": "line "},
    }
    return resolve(load_config(None, flags, assignments), ranks=ranks)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The same run on one rank."""
    return train(config(text, tmp_path_factory.mktemp("alone") / "run"))


def test_a_folder_that_only_the_first_rank_finds_unwritable_is_one_error_on_all(
    text: Path,
) -> None:
    given = config(text, Path("/proc/none/run"), ranks=2)
    errors = launch(train_rank, ranks=2, args=(given,))
    assert {type(error) for error in errors} == {RunFolderError}
    assert {str(error) for error in errors} == {
        "run folder '/proc/none/run' must be writable; found: No such file or directory; set "
        "run.out to another"
    }


def test_a_run_learns_and_leaves_its_record(alone: TrainResult) -> None:
    assert alone.val_loss is not None
    assert alone.run_folder is not None
    assert alone.val_loss < alone.first_val_loss - 0.5
    folder = Path(alone.run_folder)
    records = metrics(folder)
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    assert [record["step"] for record in records if "val_loss" in record] == [0, 3, 6]
    assert all(record["tokens"] == record["step"] * 8 * 32 for record in records)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val_loss"] == alone.val_loss == records[-1]["val_loss"]
    assert summary["sample"].startswith("line ")
    assert "mfu" not in records[-1], "the peak of a CPU isn't known"


def test_a_run_repeats_exactly(alone: TrainResult, text: Path, tmp_path: Path) -> None:
    again = train(config(text, tmp_path / "run"))
    assert again.val_loss == alone.val_loss
    assert again.sample == alone.sample


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_ranks_with_accumulation_train_as_one(
    alone: TrainResult, text: Path, tmp_path: Path, precision: str
) -> None:
    settings = config(
        text,
        tmp_path / "run",
        "train.accumulation=2",
        f"precision.dtype={precision}",
        ranks=2,
    )
    first, second = launch(train, ranks=2, args=(settings,))
    assert (first.val_loss, first.train_loss) == (second.val_loss, second.train_loss)
    assert first.sample == second.sample
    assert second.run_folder is None
    assert first.val_loss == pytest.approx(
        alone.val_loss, abs=1e-5 if precision == "fp32" else 0.02
    )
    assert all(row.difference == 0 for row in first.account)
    assert first.sent_bytes_per_step > 0


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_its_metrics(
    text: Path, tmp_path: Path
) -> None:
    settings = config(text, tmp_path / "run", "train.lr=1e30", "train.warmup_steps=0")
    error = train_rank(settings)
    assert isinstance(error, NonFiniteError)
    assert re.search(r"must be finite; found .* at step", str(error))
    assert len(metrics(tmp_path / "run")) >= 2


def test_too_little_text_leaves_no_folder(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("short")
    with pytest.raises(DataError, match="training data must hold at least"):
        train(config(short, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_an_interrupt_ends_all_ranks_after_a_step(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "shardwright.app.cli", "train", "--ranks", "2"),
        *("--data", str(text), "--steps", "100000", "--seq-len", "32", "--global-batch", "4"),
        *("--set", "model.layers=1", "--out", str(out), "--eval-every", "0"),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or len(metrics_so_far(out)) < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step within a minute"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process gets it
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "as asked" in stdout
    assert "Traceback" not in stderr
    records = metrics(out)
    assert [record["step"] for record in records] == list(range(len(records)))
    assert json.loads((out / "summary.json").read_text())["is_interrupted"] is True


def metrics_so_far(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()
