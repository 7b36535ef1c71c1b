"""The training configuration: every setting, its type, its limits and its meaning.

`shardwright.app.settings` builds a `Config` from a TOML file and command-line flags and turns
pydantic's complaints into one line each; `resolve` then fills in what depends on the number of
ranks. A resolved `Config` names everything a run does, and is written to its folder.

Pure Python, no torch, so that a mistake is reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shardwright.app.presets import PRESETS, DecoderConfig
from shardwright.core.errors import SpecError, nearest
from shardwright.core.strategy import ALIASES, STRATEGIES, resolve_strategy

DEFAULT_MICRO_BATCH = 8
MAX_DEFAULT_WARMUP = 100


class Section(BaseModel):
    """Base of all sections: no unknown keys, no coerced types, no changes once built."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which decoder to train."""

    preset: str = Field(default="tiny", description=f"named shape: {', '.join(PRESETS)}")
    vocab_size: int | None = Field(
        default=None, gt=0, description="tokens; default: the tokenizer's"
    )
    hidden: int | None = Field(default=None, gt=0, description="width; default: the preset's")
    layers: int | None = Field(default=None, gt=0, description="blocks; default: the preset's")
    heads: int | None = Field(default=None, gt=0, description="query heads; default: the preset's")
    kv_heads: int | None = Field(
        default=None, gt=0, description="key/value heads; default: the preset's share of heads"
    )
    ffn_hidden: int | None = Field(
        default=None, gt=0, description="inner width of the feed-forward; default: the preset's"
    )
    max_seq_len: int | None = Field(
        default=None, gt=0, description="longest sequence, in tokens; default: the preset's"
    )
    rope_theta: float | None = Field(
        default=None, gt=0, description="base of the rotary frequencies; default: the preset's"
    )
    norm_eps: float | None = Field(default=None, gt=0, description="RMSNorm; default: the preset's")
    tie_embeddings: bool | None = Field(
        default=None, description="output projection is the embedding; default: the preset's"
    )

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, value: str) -> str:
        if value not in PRESETS:
            raise SpecError(f"must be a preset; found {value!r}; {nearest(value, PRESETS)}")
        return value

    def decoder(self, vocab_size: int) -> DecoderConfig:
        """Build the shape: the preset, with what is set here in its place.

        Args:
            vocab_size: Of the tokenizer; used unless this section sets one.

        Returns:
            The shape.

        Raises:
            SpecError: If the shape is impossible, or its vocabulary misses the tokenizer's ids.
        """
        preset = PRESETS[self.preset]
        names = {field.name for field in fields(DecoderConfig)}
        chosen = {key: value for key, value in self if key in names and value is not None}
        chosen.setdefault("vocab_size", vocab_size)
        if chosen["vocab_size"] < vocab_size:
            raise SpecError(
                f"model.vocab_size must be at least the tokenizer's {vocab_size}; found "
                f"{chosen['vocab_size']}; raise it, or leave it unset"
            )
        if "heads" in chosen:
            heads_per_kv_head = preset.heads // preset.kv_heads
            chosen.setdefault("kv_heads", max(1, chosen["heads"] // heads_per_kv_head))
        return replace(preset, **chosen)


class DataSection(Section):
    """What to train on."""

    paths: list[str] = Field(
        default=[],
        description="UTF-8 files, folders or patterns; default: Python's standard library",
    )
    tokenizer: str = Field(default="bytes", description="'bytes', or the path of a tokenizer.json")
    max_bytes: int = Field(
        default=16 * 2**20, ge=0, description="bytes of files read at most (default 16 MiB); 0: all"
    )
    bad_bytes: Literal["error", "replace", "skip"] = Field(
        default="replace",
        description="for bytes that are not UTF-8: stop, put U+FFFD, or leave the file out",
    )
    validation_fraction: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="share of the tokens, from the end, kept for validation",
    )


class TrainSection(Section):
    """How to train. Defaults of the first ones come with the preset."""

    steps: int = Field(default=1000, gt=0, description="optimizer steps")
    seq_len: int = Field(default=256, gt=0, description="tokens per sequence")
    micro_batch: int | None = Field(
        default=None,
        gt=0,
        description="sequences per rank and micro-batch; default: from global_batch",
    )
    accumulation: int | None = Field(
        default=None, gt=0, description="micro-batches per step; default: from global_batch, or 1"
    )
    global_batch: int | None = Field(
        default=None,
        gt=0,
        description="sequences per step over all ranks: micro_batch x accumulation x ranks",
    )
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    min_lr: float | None = Field(
        default=None, ge=0, description="learning rate at the last step; default: a tenth of lr"
    )
    warmup_steps: int | None = Field(
        default=None,
        ge=0,
        description="steps of linear warm-up; default: a tenth of steps, at most 100",
    )
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW's, for matrices only")
    betas: list[float] = Field(
        default=[0.9, 0.95], min_length=2, max_length=2, description="AdamW's two decay rates"
    )
    clip: float = Field(default=1.0, ge=0, description="largest global gradient norm; 0: any")
    seed: int = Field(default=0, ge=0, lt=2**31, description="of parameters, data order and sample")
    eval_every: int = Field(
        default=100, ge=0, description="steps between validations; 0: only before and after"
    )
    eval_batches: int = Field(
        default=8, gt=0, description="global batches of validation sequences, at most"
    )

    @field_validator("betas")
    @classmethod
    def _valid_betas(cls, value: list[float]) -> list[float]:
        if not all(0 <= beta < 1 for beta in value):
            raise SpecError(f"must be two numbers from 0 up to, not including, 1; found {value}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> TrainSection:
        if self.min_lr is not None and self.min_lr > self.lr:
            raise SpecError(
                f"train.min_lr must be at most train.lr; found {self.min_lr} and {self.lr}; "
                f"lower it, or leave it unset"
            )
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise SpecError(
                f"train.warmup_steps must be at most train.steps; found {self.warmup_steps} and "
                f"{self.steps}; lower it, or leave it unset"
            )
        return self


class ParallelSection(Section):
    """How training state is divided over the ranks."""

    ranks: int | None = Field(
        default=None, gt=0, description="processes; default: what the launcher started, or 1"
    )
    strategy: str = Field(
        default="zero3", description=f"one of {', '.join(STRATEGIES)}; also {', '.join(ALIASES)}"
    )
    replicate: int | None = Field(
        default=None,
        gt=0,
        description="mesh size of the replicate axis; default: what shard leaves",
    )
    shard: int | None = Field(
        default=None,
        gt=0,
        description="mesh size of the shard axis; default: what replicate leaves",
    )

    @field_validator("strategy")
    @classmethod
    def _canonical(cls, value: str) -> str:
        return resolve_strategy(value).name


class PrecisionSection(Section):
    """Number formats."""

    dtype: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="of forward and backward; masters stay fp32; auto: bf16 on CUDA, fp32 on CPU",
    )


class RunSection(Section):
    """What a run reports and leaves behind."""

    out: str | None = Field(
        default=None,
        min_length=1,
        description="run folder; default: runs/<preset>-<strategy>-<date>-<time>",
    )
    log_every: int = Field(default=10, gt=0, description="steps between printed lines")
    prompt: str = Field(default="def ", min_length=1, description="start of the sample text")
    sample_tokens: int = Field(
        default=200, ge=0, description="length of the sample printed at the end; 0: none"
    )
    temperature: float = Field(
        default=0.8, ge=0, description="of sampling; 0 takes the likeliest token"
    )
    top_k: int = Field(default=40, ge=0, description="sample among the k likeliest tokens; 0: all")


class Config(Section):
    """All settings of a training run."""

    model: ModelSection = Field(default=ModelSection(), description="which decoder to train")
    data: DataSection = Field(default=DataSection(), description="what to train on")
    train: TrainSection = Field(default=TrainSection(), description="how to train")
    parallel: ParallelSection = Field(
        default=ParallelSection(), description="how training state is divided over the ranks"
    )
    precision: PrecisionSection = Field(default=PrecisionSection(), description="number formats")
    run: RunSection = Field(
        default=RunSection(), description="what a run reports and leaves behind"
    )

    def update(self, **sections: dict[str, Any]) -> Config:
        """Return a copy with some keys of some sections replaced."""
        changed = {
            name: getattr(self, name).model_copy(update=values) for name, values in sections.items()
        }
        return self.model_copy(update=changed)


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Sizes of the two data axes; their product is the number of ranks."""

    replicate: int
    shard: int


def resolve(config: Config, *, ranks: int, ranks_per_node: int | None = None) -> Config:
    """Fill in what follows from the number of ranks, and check that it all fits together.

    Args:
        config: As the user gave it.
        ranks: Processes of the run.
        ranks_per_node: Processes that share a machine; None for all.

    Returns:
        A configuration in which mesh, batch and schedule are set.

    Raises:
        SpecError: If sizes contradict each other.
    """
    if config.parallel.ranks not in (None, ranks):
        raise SpecError(
            f"parallel.ranks must equal the processes that the launcher started; found "
            f"{config.parallel.ranks} and {ranks}; change one, or leave parallel.ranks unset"
        )
    decoder = config.model.decoder(vocab_size=config.model.vocab_size or 1)
    if config.train.seq_len > decoder.max_seq_len:
        raise SpecError(
            f"train.seq_len must be at most the model's max_seq_len={decoder.max_seq_len}; found "
            f"{config.train.seq_len}; shorten it, or raise model.max_seq_len"
        )
    mesh = _mesh_sizes(config.parallel, ranks, ranks_per_node or ranks)
    micro_batch, accumulation = _batch_sizes(config.train, ranks)
    min_lr, warmup_steps = config.train.min_lr, config.train.warmup_steps
    if warmup_steps is None:
        warmup_steps = min(config.train.steps // 10, MAX_DEFAULT_WARMUP)
    return config.update(
        parallel={"ranks": ranks, "replicate": mesh.replicate, "shard": mesh.shard},
        train={
            "micro_batch": micro_batch,
            "accumulation": accumulation,
            "global_batch": micro_batch * accumulation * ranks,
            "min_lr": config.train.lr / 10 if min_lr is None else min_lr,
            "warmup_steps": warmup_steps,
        },
    )


def _mesh_sizes(parallel: ParallelSection, ranks: int, ranks_per_node: int) -> MeshSizes:
    """Choose the mesh: what is set, completed so that the sizes multiply to the ranks."""
    replicate, shard = parallel.replicate, parallel.shard
    if replicate is None and shard is None:
        if not resolve_strategy(parallel.strategy).shards_parameters:
            return MeshSizes(replicate=ranks, shard=1)
        if not parallel.strategy.startswith("hybrid"):
            return MeshSizes(replicate=1, shard=ranks)
        if ranks > 1 and (ranks % ranks_per_node or ranks == ranks_per_node):
            raise SpecError(
                f"strategy {parallel.strategy!r} shards inside groups and replicates across "
                f"them; found {ranks} ranks in one group and no mesh sizes; set "
                f"parallel.replicate and parallel.shard (they multiply to {ranks})"
            )
        shard = ranks_per_node
    if shard is None and replicate is not None and ranks % replicate == 0:
        shard = ranks // replicate
    elif replicate is None and shard is not None and ranks % shard == 0:
        replicate = ranks // shard
    if replicate is None or shard is None or replicate * shard != ranks:
        found = [
            f"{name}={size}"
            for name, size in (("replicate", parallel.replicate), ("shard", parallel.shard))
            if size is not None
        ]
        raise SpecError(
            f"parallel.replicate x parallel.shard must equal the {ranks} ranks; found "
            f"{', '.join(found)}; change the sizes or the number of ranks"
        )
    return MeshSizes(replicate=replicate, shard=shard)


def _batch_sizes(train: TrainSection, ranks: int) -> tuple[int, int]:
    """Choose (micro_batch, accumulation) from those set and the global batch."""
    micro_batch, accumulation, total = train.micro_batch, train.accumulation, train.global_batch
    if total is None:
        return micro_batch or DEFAULT_MICRO_BATCH, accumulation or 1
    if micro_batch is None:
        accumulation = accumulation or 1
        micro_batch = total // (ranks * accumulation)
    elif accumulation is None:
        accumulation = total // (ranks * micro_batch)
    if micro_batch * accumulation * ranks != total:
        divisors = {
            "micro_batch": train.micro_batch,
            "accumulation": train.accumulation,
            "ranks": ranks,
        }
        given = " x ".join(f"{name}={size}" for name, size in divisors.items() if size is not None)
        raise SpecError(
            f"train.global_batch must divide evenly into micro-batches over the ranks; found "
            f"global_batch={total} over {given}; change one of them, or set both "
            f"train.micro_batch and train.accumulation"
        )
    return micro_batch, accumulation
