"""Settings from a file and flags: what wins, what is refused, and how that reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from shardwright.app.config import Config, resolve
from shardwright.app.presets import PRESETS, RECOMMENDED
from shardwright.app.settings import load_config, parse_assignment, to_toml
from shardwright.core.errors import SpecError


def from_toml(folder: Path, text: str) -> Config:
    path = folder / "settings.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, {})


def test_flags_and_assignments_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[train]\nlr = 1.0\nsteps = 10\nseed = 5\n")
    flags = {"train": {"steps": 20, "clip": None}}
    config = load_config(path, flags, ["train.lr=3"])
    assert (config.train.lr, config.train.steps, config.train.seed) == (3.0, 20, 5)
    assert config.train.clip == 1.0


@pytest.mark.parametrize("assignments", [["train.lr=3"], ["train.clip=1", "train.clip=2"]])
def test_a_setting_given_twice_on_the_command_line_is_refused(assignments: list[str]) -> None:
    with pytest.raises(SpecError, match="a second time; drop one"):
        load_config(None, {"train": {"lr": 2.0}}, assignments)


def test_settings_nested_without_end_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("a = " + "[" * 100_000)
    with pytest.raises(SpecError, match=r"must be valid TOML; found: it is nested too deeply"):
        load_config(path, {})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_brings_its_recommended_settings(preset: str) -> None:
    config = resolve(load_config(None, {"model": {"preset": preset}}), ranks=2)
    for key, value in RECOMMENDED[preset].items():
        assert getattr(config.train, key) == value
    assert config.train.seq_len <= PRESETS[preset].max_seq_len


def test_what_the_user_sets_wins_over_the_recommendation() -> None:
    config = load_config(None, {"train": {"steps": 7}})
    assert config.train.steps == 7
    assert config.train.lr == RECOMMENDED["tiny"]["lr"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nlrr = 1", r"unknown key 'lrr' in \[train\]; did you mean 'lr'\?"),
        ("[train]\nstrategy = 'ddp'", r"unknown key 'strategy' in \[train\]; .* \[parallel\]"),
        ("[trian]\nlr = 1", r"unknown section \[trian\]; did you mean 'train'\?"),
        ("lr = 1", r"found 'lr' outside; 'lr' belongs to \[train\]"),
        ("zzz = 1", r"found 'zzz' outside; the sections are \[model\]"),
        ("model = 'tiny'", r"\[model\] must be a section of keys"),
        ("[train]\nlr = 'fast'", r"train\.lr must be a valid number; found 'fast'; it is: peak"),
        ("[train]\nsteps = 1.5", r"train\.steps must be a valid integer; found 1\.5"),
        ("[train]\nsteps = true", r"train\.steps must be a valid integer; found True"),
        ("[train]\nlr = nan", r"train\.lr must be a finite number"),
        ("[train]\nsteps = 0", r"train\.steps must be greater than 0; found 0"),
        ("[train]\nclip = -1", r"train\.clip must be greater than or equal to 0; found -1"),
        ("[train]\nbetas = [0.9]", r"train\.betas must have at least 2 items, not 1"),
        ("[train]\nbetas = [0.9, 1.0]", r"train\.betas: must be two numbers"),
        ("[train]\nmin_lr = 1.0", r"train\.min_lr must be at most train\.lr"),
        ("[train]\nsteps = 5\nwarmup_steps = 6", r"train\.warmup_steps must be at most"),
        ("[model]\npreset = 'smal'", r"model\.preset: must be a preset; .* mean 'small'\?"),
        ("[model]\npreset = 3", r"model\.preset must be a valid string; found 3"),
        ("[parallel]\nstrategy = 'zero4'", r"parallel\.strategy: .* did you mean 'zero3'\?"),
        ("[data]\nbad_bytes = 'ignore'", r"must be 'error', 'replace' or 'skip'; found 'ignore'"),
        ("[data]\npaths = 'x'", r"data\.paths must be a valid list; found 'x'"),
        ("[train\n", "must be valid TOML"),
    ],
)
def test_a_mistake_is_one_line_naming_key_and_finding(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        from_toml(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 1


def test_several_mistakes_are_a_line_each(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        from_toml(tmp_path, "[train]\nlrr = 1\nsteps = -1\n")
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gone\.toml' must be a readable file"):
        load_config(tmp_path / "gone.toml", {})


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("train.lr=1e-3", ("train", "lr", 1e-3)),
        ("run.prompt=class", ("run", "prompt", "class")),
        ('run.prompt="a=b"', ("run", "prompt", "a=b")),
        ("run.prompt=x\ny = 2", ("run", "prompt", "x\ny = 2")),
        ("data.paths=['a', 'b']", ("data", "paths", ["a", "b"])),
        ("model.tie_embeddings=true", ("model", "tie_embeddings", True)),
    ],
)
def test_assignments_take_toml_values_or_bare_words(text: str, parsed: tuple[object, ...]) -> None:
    assert parse_assignment(text) == parsed


@pytest.mark.parametrize("text", ["lr=3", "train.lr", ".lr=3", "train.=3", ""])
def test_assignments_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"--set takes section\.key=value"):
        parse_assignment(text)


def test_a_resolved_configuration_written_as_toml_reads_back_equal(tmp_path: Path) -> None:
    flags = {
        "run": {"prompt": 'quote " back\\slash \x7f \n é'},
        "data": {"paths": ["a b", "c'd"]},
        "model": {"tie_embeddings": True},
    }
    config = resolve(load_config(None, flags), ranks=2)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(path, {}) == config
    assert resolve(config, ranks=2) == config


def test_configurations_travel_to_other_processes() -> None:
    config = resolve(Config(), ranks=2)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("parallel", "ranks", "ranks_per_node", "sizes"),
    [
        ({"strategy": "ddp"}, 4, None, (4, 1)),
        ({"strategy": "zero3"}, 4, None, (1, 4)),
        ({"strategy": "full_shard"}, 4, None, (1, 4)),
        ({"strategy": "hybrid"}, 8, 4, (2, 4)),
        ({"strategy": "hybrid", "replicate": 2}, 4, None, (2, 2)),
        ({"strategy": "hybrid", "shard": 4}, 4, None, (1, 4)),
        ({"strategy": "hybrid"}, 1, None, (1, 1)),
        ({"strategy": "zero2", "replicate": 2, "shard": 3}, 6, None, (2, 3)),
    ],
)
def test_mesh_sizes_are_completed_to_the_ranks(
    parallel: dict[str, object],
    ranks: int,
    ranks_per_node: int | None,
    sizes: tuple[int, int],
) -> None:
    given = load_config(None, {"parallel": parallel})
    config = resolve(given, ranks=ranks, ranks_per_node=ranks_per_node)
    assert (config.parallel.replicate, config.parallel.shard) == sizes


@pytest.mark.parametrize(
    ("parallel", "ranks", "message"),
    [
        ({"replicate": 2}, 3, "must equal the 3 ranks; found replicate=2"),
        ({"replicate": 2, "shard": 2}, 6, "must equal the 6 ranks; found replicate=2, shard=2"),
        ({"strategy": "hybrid"}, 4, "set parallel.replicate and parallel.shard"),
        ({"ranks": 2}, 4, "found 2 and 4"),
    ],
)
def test_mesh_sizes_that_miss_the_ranks_are_refused(
    parallel: dict[str, object], ranks: int, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        resolve(load_config(None, {"parallel": parallel}), ranks=ranks)


@pytest.mark.parametrize(
    ("train", "ranks", "batch"),
    [
        ({}, 2, (12, 1, 24)),
        ({"accumulation": 3}, 2, (4, 3, 24)),
        ({"micro_batch": 3}, 4, (3, 2, 24)),
        ({"micro_batch": 5, "accumulation": 2}, 3, (5, 2, 30)),
        ({"global_batch": 6}, 1, (6, 1, 6)),
    ],
)
def test_batch_sizes_follow_from_those_set(
    train: dict[str, int], ranks: int, batch: tuple[int, int, int]
) -> None:
    chosen = resolve(load_config(None, {"train": train}), ranks=ranks).train
    assert (chosen.micro_batch, chosen.accumulation, chosen.global_batch) == batch


@pytest.mark.parametrize(
    ("train", "ranks", "found"),
    [
        ({}, 5, "global_batch=24 over ranks=5"),
        ({"micro_batch": 5}, 2, "global_batch=24 over micro_batch=5 x ranks=2"),
        ({"micro_batch": 1, "accumulation": 2, "global_batch": 5}, 2, "global_batch=5 over"),
        ({"global_batch": 1}, 2, "global_batch=1 over ranks=2"),
        ({"global_batch": 2, "micro_batch": 4}, 2, "global_batch=2 over micro_batch=4"),
    ],
)
def test_batch_sizes_that_do_not_divide_are_refused(
    train: dict[str, int], ranks: int, found: str
) -> None:
    with pytest.raises(SpecError, match=found):
        resolve(load_config(None, {"train": train}), ranks=ranks)


def test_warm_up_and_last_learning_rate_follow_the_run() -> None:
    train = resolve(load_config(None, {"train": {"steps": 20, "lr": 0.5}}), ranks=1).train
    assert (train.warmup_steps, train.min_lr) == (2, 0.05)


def test_sequences_longer_than_the_model_takes_are_refused() -> None:
    with pytest.raises(SpecError, match="max_seq_len=256; found 300"):
        resolve(load_config(None, {"train": {"seq_len": 300}}), ranks=1)


def test_the_tokenizer_decides_the_vocabulary_unless_the_user_does() -> None:
    model = load_config(None, {"model": {"preset": "medium"}}).model
    assert model.decoder(vocab_size=256).vocab_size == 256
    padded = load_config(None, {"model": {"vocab_size": 320}}).model
    assert padded.decoder(vocab_size=256).vocab_size == 320
    with pytest.raises(SpecError, match="at least the tokenizer's 1000; found 320"):
        padded.decoder(vocab_size=1000)


def test_parts_of_a_preset_can_be_replaced() -> None:
    model = load_config(None, {"model": {"preset": "llama-3-8b", "heads": 16, "layers": 2}}).model
    decoder = model.decoder(vocab_size=256)
    assert (decoder.layers, decoder.heads, decoder.kv_heads) == (2, 16, 4)
    assert decoder.hidden == PRESETS["llama-3-8b"].hidden


def test_every_setting_is_described() -> None:
    for section in Config.model_fields.values():
        assert section.description
        assert section.annotation is not None
        for name, field in section.annotation.model_fields.items():
            assert field.description, name
