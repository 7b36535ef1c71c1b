"""`shardwright plan` and `shardwright validate` as a person meets them."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from shardwright.app.cli import app
from shardwright.app.device_peaks import peak_flops
from shardwright.core.errors import SpecError
from shardwright.planner.columns import FIT, MEMORY, SPEEDS
from shardwright.planner.files import read_model
from shardwright.planner.model import ModelSpec
from shardwright.planner.workload import Attention, Checkpointing, Loss
from shardwright.runtime.planned import read_engine_section

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
        (("--compression", "int8"), "compression must read like"),
        (("--max-in-flight", "0"), "max_in_flight must be greater than 0"),
        (("--backward-prefetch-at", "later"), "unknown backward_prefetch_at 'later'"),
        (("--micro-batch", "0"), "micro_batch must be greater than 0, found 0"),
        (("--micro-batch", "3"), r"3 divides no rank's share .*; the nearest that do: 2 and 4"),
        (("--micro-batch", "96"), r"96 divides no rank's share .*; the nearest that does: 32"),
        (("--global-batch", "12", "--max-tensor", "1"), "have 8 data ranks; .* do: 8 and 16"),
        (("--strategy", "hybrid"), "no mesh of 8 devices suits the strategies asked for"),
        (("--devices-per-node", "0"), "devices_per_node must be greater than 0"),
        (("--headroom", "nan"), "headroom must be a number, found nan"),
        (("--residency", "13"), "residency must be from 0 to the 12 blocks of gpt2, found 13"),
        (("--residency", "1", "--strategy", "ddp"), "that ddp would not drop; leave it out"),
        (("--global-batch-tokens", "65536"), "found both"),
        (("--cluster", "x.toml"), "found --device, --devices too; change the file 'x.toml'"),
        (("--json", "--csv"), "--json and --csv exclude each other"),
        (("--json", "--explain"), "--json and --explain exclude each other"),
        (("--csv", "--top", "3"), "--csv and --top exclude each other"),
        (("--out", "none/plan.json"), "there is no folder 'none'; make it first"),
        (("--out", "/"), "it is a folder; give the name of a file"),
        (("--out", "a" * 300), "File name too long; choose another place"),
        (("--model", "a" * 300), "unknown model 'aaa"),
        (("--network", ""), "unknown network ''"),
        (("--seq-len", "1025"), "at most the 1024 positions that gpt2 has learned, found 1025"),
        (("--probe", "none.json"), r"can't read the probe 'none\.json': No such file"),
    ],
)
def test_wrong_requests_are_refused_with_what_to_change(changes, message):
    with pytest.raises(SpecError, match=message):
        run(*PLAN, *changes)


@pytest.mark.parametrize("top", ["0", "-2"])
def test_a_table_has_at_least_one_layout(top):
    result = CliRunner().invoke(app, [*PLAN, "--top", top])
    assert result.exit_code == 2
    assert "'--top'" in result.stderr


SHELL = f"{sys.executable} -m shardwright.app.cli"


@pytest.mark.parametrize("output", ["| true", "> /dev/full"])
@pytest.mark.parametrize(
    "command",
    [
        " ".join((*PLAN, "--json")),
        " ".join((*PLAN, "--csv")),
        f"validate --fit {DATA / 'fit.csv'}",
    ],
)
def test_an_output_that_takes_no_more_ends_the_command_without_a_traceback(command, output):
    line = f"set -o pipefail; {SHELL} {command} {output}"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    full = "error: can't write the output: No space left on device\n"
    assert done.stderr == ("" if "true" in output else full)


def test_a_layout_that_the_engine_cannot_run_is_shown_and_not_written(tmp_path):
    path = tmp_path / "plan.json"
    arguments = (*PLAN, "--offload-optimizer", "--out", str(path))
    result = CliRunner().invoke(app, list(arguments))
    assert "Take " in result.stdout
    assert isinstance(result.exception, SpecError)
    assert re.search(
        r"no plan file is written: .* needs offloading of the optimizer, which the engine doesn't "
        "run yet; an option asked for that: plan without it",
        str(result.exception),
    )
    assert not path.exists()


def test_json_of_a_layout_that_the_engine_cannot_run_is_no_plan_for_it(tmp_path):
    best = json.loads(run(*PLAN, "--offload-optimizer", "--json"))["best"]
    assert best["needs"] == ["offloading of the optimizer"]
    assert "engine" not in best
    with pytest.raises(SpecError, match="needs offloading of the optimizer, which the engine"):
        read_engine_section(best)


def test_the_table_and_the_advice_give_one_figure_of_memory():
    text = run(*PLAN, "--max-tensor", "1", "--strategy", "zero3")
    document = json.loads(run(*PLAN, "--max-tensor", "1", "--strategy", "zero3", "--json"))
    (needed,) = re.findall(r"it needs ([\d.]+) of", text)
    layout = document["best"]["layout"]
    (row,) = [r for r in document["layouts"] if r["layout"] == f"zero3 shard={layout['shard']}"]
    assert f"{row['needed_gib']:.1f}" == needed
    assert row["needed_gib"] == pytest.approx(row["peak_gib"] + 0.75)
    assert re.search(rf"^> zero3 shard=8 .* {needed} ", text, re.MULTILINE)


def test_the_recommended_layout_is_in_every_table_with_the_figures_of_the_advice():
    for top in ("1", "12"):
        text = run(*PLAN, "--top", top)
        (layout,) = re.findall(r"^Take (.*?), ", text, re.MULTILINE)
        (row,) = re.findall(rf"^> {re.escape(layout)} .*$", text, re.MULTILINE)
        (needed,) = re.findall(r"it needs ([\d.]+) of", text)
        (step,) = re.findall(r"^  - ([\d.]+) s per step", text, re.MULTILINE)
        assert f" {step} " in row
        assert f" {needed} " in row


def test_a_probe_s_values_are_of_their_types(tmp_path):
    path = tmp_path / "measured.json"
    good = {"step_s": 0.1, "strategy": "zero3", "micro_batch": 2}
    for changes, message in (
        ({"step_s": "0.1"}, "step_s must be a number, found '0.1'"),
        ({"micro_batch": 0}, "micro_batch must be greater than 0"),
        ({"devices": 8.5}, "devices must be a whole number"),
        ({"step": 1}, "unknown key 'step'; did you mean 'step_s'"),
    ):
        path.write_text(json.dumps({**good, **changes}))
        with pytest.raises(SpecError, match=message):
            run(*PLAN, "--probe", str(path))


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
    with pytest.raises(SpecError, match="lacks the columns id, source, model, gpu"):
        run("validate", str(path))
    path.write_text("id,id\n1,2\n")
    with pytest.raises(SpecError, match="two columns 'id'; rename one"):
        run("validate", str(path))
    for content, message in (
        (b"\xff\xfe", "must be UTF-8 text"),
        (b"", "is empty"),
        (b",,,\n", "has no rows below its headings"),
        (b"id,source,model,gpu,n_gpus,strategy,precision\n1,2,3,4,5,6,7,8\n", "8 cells in line 2"),
        (b'id,source\n1,"2\n', "must be CSV; found: unexpected end of data"),
    ):
        path.write_bytes(content)
        with pytest.raises(SpecError, match=message):
            run("validate", str(path))
    with pytest.raises(SpecError, match="can't read the table"):
        run("validate", str(tmp_path / "none.csv"))


ROW = {
    "id": "a",
    "source": "mine",
    "model": "gpt2",
    "gpu": "A100-80GB",
    "n_gpus": "8",
    "strategy": "zero1",
    "seq_len": "1024",
    "global_batch_seqs": "64",
    "precision": "bf16",
    "tokens_per_s_per_gpu": "100000",
}


def validated(tmp_path, *rows, option=()):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return json.loads(run("validate", *option, str(path), "--json"))


def test_a_table_of_the_needed_columns_alone_is_predicted(tmp_path):
    document = validated(tmp_path, ROW, {**ROW, "id": "b", "strategy": "ddp"})
    assert document["speed"]["unpredicted"] == []
    assert document["speed"]["data_parallel_predicted"] == 2
    assert document["notes"] == []


def test_a_table_of_one_source_has_no_baseline_to_compare_with(tmp_path):
    document = validated(tmp_path, ROW, {**ROW, "id": "b", "strategy": "ddp"})
    assert document["speed"]["data_parallel"]["constant_utilisation"] is None
    text = run("validate", str(tmp_path / "rows.csv"))
    assert "constant utilisation: - (no other source to take it from)" in text
    assert re.search(r"mine .* - │", text)


def test_ids_of_rows_are_unique(tmp_path):
    with pytest.raises(SpecError, match="several rows with the id 'a'; ids must be unique"):
        validated(tmp_path, ROW, ROW)


def test_a_table_of_which_no_row_is_predicted_is_an_error_with_the_reasons(tmp_path):
    reason = "none of the 1 rows of the table of speeds can be predicted: device 'x'.* \\(1\\)"
    with pytest.raises(SpecError, match=reason):
        validated(tmp_path, {**ROW, "gpu": "x"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_gpus": "banana"}, "n_gpus must be a whole number above 0, found 'banana'"),
        ({"seq_len": "4096.5"}, "seq_len must be a whole number above 0, found '4096.5'"),
        ({"tokens_per_s_per_gpu": "fast"}, "tokens_per_s_per_gpu must be a number above 0"),
        ({"tokens_per_s_per_gpu": "nan"}, "tokens_per_s_per_gpu must be a number above 0"),
        ({"precision": "fp32"}, "precision 'fp32' is not modelled"),
        ({"act_ckpt": "yes"}, "act_ckpt 'yes' is not modelled"),
        ({"precision": "fp8", "gpu": "A100-80GB"}, "has no fp8 matrix units"),
    ],
)
def test_a_row_with_a_wrong_cell_is_named_with_the_reason_and_loses_no_other(
    tmp_path, changes, reason
):
    wrong = {**ROW, "act_ckpt": "none", "id": "", **changes}
    document = validated(tmp_path, {**ROW, "act_ckpt": "none"}, wrong)
    (entry,) = document["speed"]["unpredicted"]
    assert entry["id"] == "line 3"
    assert reason in entry["reason"]
    assert document["speed"]["data_parallel_predicted"] == 1


def test_columns_that_nobody_reads_are_named_with_the_one_that_was_meant(tmp_path):
    (note,) = validated(tmp_path, {**ROW, "n_layer": "12", "colour": "red"})["notes"]
    assert note.endswith("not read: n_layer, colour; 'n_layer': did you mean 'n_layers'?")


def test_tables_of_memory_and_of_what_ran_need_only_their_needed_columns(tmp_path):
    memory = {"id": "a", "model": "gpt2", "gpu": "A100-80GB", "n_gpus": "8", "strategy": "zero1"}
    memory |= {"micro_batch": "4", "precision": "bf16", "value_gb": "4"}
    found = validated(tmp_path, memory, option=("--memory",))
    assert (found["memory"]["unpredicted"], found["memory"]["num_rows"]) == ([], 1)
    fit = {"id": "a", "model": "gpt2", "gpu": "A100-80GB", "n_gpus": "8", "strategy": "zero1"}
    fit |= {"param_dtype": "bf16", "outcome": "ran"}
    found = validated(tmp_path, fit, option=("--fit",))
    assert (found["fit"]["unpredicted"], found["fit"]["right"]) == ([], 1)


def test_the_documentation_lists_every_kernel_and_kind_of_recomputation():
    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    for option, values in (
        ("checkpointing", Checkpointing),
        ("attention", Attention),
        ("loss", Loss),
    ):
        (table,) = re.findall(rf"\| `--{option}` \|.*?\n\n", text, re.DOTALL)
        assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(get_args(values))


def test_the_documented_model_is_read_and_every_key_is_named(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(\[model\].*?)```", text, re.DOTALL)
    path = tmp_path / "qwen3.toml"
    path.write_text(example)
    assert read_model(str(path)).num_parameters == pytest.approx(8.19e9, rel=1e-3)
    section = text[text.index("## Sizes of a model") : text.index("## Any module")]
    for field in fields(ModelSpec):
        assert re.search(rf"`{field.name}`|^{field.name} =", section, re.MULTILINE), field.name


def test_the_documentation_lists_every_column_and_which_are_needed():
    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    for title, columns in (
        ("Measured speeds", SPEEDS),
        ("Measured memory", MEMORY),
        ("What ran", FIT),
    ):
        section = text.split(f"### {title}")[1].split("\n#")[0]
        lines = [
            f"| `{column.name}`{' *' if column.is_required else ''} | {column.meaning} |"
            for column in columns
        ]
        assert "\n".join(lines) in section, "\n".join(lines)


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
