"""`shardwright plan` and `shardwright validate` as a person meets them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright.app.cli import app
from shardwright.app.device_peaks import peak_flops
from shardwright.core.errors import SpecError

DATA = Path(__file__).with_name("data")
PLAN = (
    "plan",
    "--model",
    "gpt2",
    "--device",
    "a100-80",
    "--devices",
    "8",
    "--seq-len",
    "1024",
    "--global-batch",
    "64",
)


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_planning_loads_neither_torch_nor_plotly():
    program = (
        "import sys\n"
        "sys.argv = ['shardwright', *sys.argv[1:]]\n"
        "from shardwright.app.cli import main\n"
        "main_error = None\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "loaded = {'torch', 'plotly', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *PLAN], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Take " in done.stdout


def test_a_plan_prints_a_table_with_its_units():
    text = run(*PLAN)
    assert "Memory in GiB" in text
    assert "GB/s" in text
    assert "tok/s/dev" in text


def test_a_plan_as_json_and_csv_is_machine_readable():
    document = json.loads(run(*PLAN, "--json"))
    assert document["best"]["format"] == "shardwright-plan"
    lines = list(csv.DictReader(run(*PLAN, "--csv").splitlines()))
    assert len(lines) == len(document["layouts"])


def test_explain_derives_each_figure_in_five_steps():
    text = run(*PLAN, "--explain")
    for step in ("1. why", "2. picture", "3. small numbers", "4. formula", "5. sanity"):
        assert text.count(step) == 3


def test_a_plan_file_is_written(tmp_path):
    run(*PLAN, "--out", str(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--model", "gtp2"), "did you mean 'gpt2'"),
        (("--devices", "0"), "greater than 0"),
        (("--devices", "-8"), "greater than 0"),
        (("--strategy", "zero4"), "unknown strategy 'zero4'"),
        (("--seq-len", "0"), "seq_len must be greater than 0"),
        (("--global-batch", "3"), "divides over no mesh"),
        (("--checkpointing", "some"), "unknown checkpointing 'some'"),
        (("--attention", "flash9"), "unknown attention 'flash9'"),
        (("--context", "2"), "context parallelism.* not modelled"),
        (("--compression", "int8"), "compressed collectives are not modelled"),
        (("--max-in-flight", "0"), "max_in_flight must be greater than 0"),
        (("--backward-prefetch-at", "later"), "unknown backward_prefetch_at 'later'"),
    ],
)
def test_wrong_requests_are_refused_with_what_to_change(changes, message):
    with pytest.raises(SpecError, match=message):
        run(*PLAN, *changes)


def test_strategies_are_restricted_by_name_or_alias():
    document = json.loads(run(*PLAN, "--strategy", "full_shard", "--max-tensor", "1", "--json"))
    assert {row["layout"].split(" ")[0] for row in document["layouts"]} == {"zero3"}


# --- validate ----------------------------------------------------------------------------------


@pytest.fixture
def some_rows(tmp_path):
    with (DATA / "throughput.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows[::30])
    return path, rows[::30]


def test_validate_writes_one_line_per_row_with_the_promised_columns(some_rows, tmp_path):
    path, rows = some_rows
    out = tmp_path / "out.csv"
    run("validate", str(path), "--rows-out", str(out))
    with out.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == [
        "id",
        "tokens_per_s_per_gpu",
        "step_time_s",
        "peak_mem_gib",
        "fits",
        "exposed_share",
        "warnings",
    ]
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    for line in lines:
        if line["tokens_per_s_per_gpu"]:
            assert float(line["step_time_s"]) > 0
            assert line["fits"] in ("true", "false")
        else:
            assert line["warnings"].startswith("not predicted: ")


def test_validate_prints_errors_beside_the_baseline(some_rows):
    text = run("validate", str(some_rows[0]))
    for words in ("planner: median", "constant utilisation: median", "equal-source", "worst:"):
        assert words in text


def test_validate_prints_json_for_all_three_tables():
    document = json.loads(
        run(
            "validate",
            "--memory",
            str(DATA / "memory.csv"),
            "--fit",
            str(DATA / "fit.csv"),
            "--json",
        )
    )
    assert document["memory"]["num_rows"] > 0
    assert document["fit"]["scorable"] == 40


def test_validate_without_a_table_or_with_a_foreign_one_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"give ROWS\.csv, --memory or --fit"):
        run("validate")
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SpecError, match="lacks the columns id, source"):
        run("validate", str(path))
    with pytest.raises(SpecError, match="can't read the table"):
        run("validate", str(tmp_path / "none.csv"))


# --- the training loop's MFU takes the planner's figures -----------------------------------------


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA B200", 2250),
    ],
)
def test_peaks_of_devices_are_found_by_their_own_names(name, tflops):
    assert peak_flops(name, "torch.bfloat16") == pytest.approx(tflops * 1e12)
    assert peak_flops(name, "torch.float32") is None
    assert peak_flops("some CPU", "torch.bfloat16") is None


def test_an_offloaded_optimizer_saves_memory_and_is_marked_as_not_running_yet():
    kept = json.loads(run(*PLAN, "--strategy", "zero3", "--max-tensor", "1", "--json"))
    moved = json.loads(
        run(*PLAN, "--strategy", "zero3", "--max-tensor", "1", "--offload-optimizer", "--json")
    )
    assert all("offloading" in row["needs"] for row in moved["layouts"])
    assert all(row["needs"] == "" for row in kept["layouts"])
    assert "optimizer_state" not in moved["best"]["predicted"]["memory_bytes"]
