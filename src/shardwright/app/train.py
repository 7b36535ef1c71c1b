"""The training run, as each rank executes it.

`train` is called once per rank, by the launcher or in a process that torchrun started. It joins
the ranks, builds a `Trainer`, runs the steps and returns a `TrainResult`; rank 0 also prints and
writes the run folder.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import shardwright as sw
from shardwright.app.data import DataError, find_documents, load_corpus
from shardwright.app.interrupt import StopRequest
from shardwright.app.meter import Meter
from shardwright.app.output import RunOutput
from shardwright.app.progress import StepRecord
from shardwright.app.ranks import DataRanks
from shardwright.app.report import verdict
from shardwright.app.run_folder import RunFolderError
from shardwright.app.tokenizer import load_tokenizer
from shardwright.app.trainer import Trainer
from shardwright.core.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.app.config import Config
    from shardwright.app.data import Corpus
    from shardwright.app.tokenizer import Tokenizer
    from shardwright.runtime.ledger import ReconciliationRow

__all__ = ["NonFiniteError", "TrainResult", "train", "train_rank"]

MIB = 2**20


class NonFiniteError(ShardwrightError, ArithmeticError):
    """The loss or the gradient stopped being a finite number; raised on all ranks alike."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to, on one rank.

    Attributes:
        steps: Done.
        tokens: Trained on, over all ranks.
        sent_bytes_per_step: Sent by this rank in the last step, validation left out.
        first_val_loss: Validation loss before training, nats per token.
        val_loss: Validation loss at the end; None if interrupted.
        train_loss: Of the last step, nats per token.
        train_s: Seconds spent in steps, validation left out.
        is_interrupted: The run was asked to stop.
        run_folder: Where the files are; None on ranks other than 0.
        sample: Generated text; empty if none was asked for, or interrupted.
        account: Bytes of this rank, computed and counted.
    """

    steps: int
    tokens: int
    sent_bytes_per_step: int
    first_val_loss: float
    val_loss: float | None
    train_loss: float
    train_s: float
    is_interrupted: bool
    run_folder: str | None
    sample: str
    account: tuple[ReconciliationRow, ...]


def train(config: Config) -> TrainResult:
    """Train a decoder. Collective: every rank calls it with the same configuration.

    Args:
        config: Resolved (see `shardwright.app.config.resolve`).

    Returns:
        The result; losses and counts are the same on every rank.

    Raises:
        NonFiniteError: The loss or the gradient norm is infinite or not a number.
        DataError: The data is missing or too short.
        RunFolderError: The run folder is in use or can't be written.
        SpecError: The configuration isn't resolved.
    """
    mesh = sw.init_mesh(replicate=config.parallel.replicate, shard=config.parallel.shard)
    ranks = DataRanks(mesh)
    tokenizer = load_tokenizer(config.data.tokenizer)
    corpus = _load_data(config, tokenizer, ranks)
    trainer = Trainer(config, mesh=mesh, ranks=ranks, tokenizer=tokenizer, corpus=corpus)
    with StopRequest() as stop, _open_output(config, ranks) as output:
        for line in _introduction(config, trainer, corpus):
            output.print(line)
        result = _run_steps(config, trainer, stop, output, num_ranks=ranks.size)
        output.account(result.account, num_steps=result.steps)
        if result.sent_bytes_per_step:
            output.print(
                f"a training step sends {result.sent_bytes_per_step / MIB:,.3f} MiB per rank "
                f"(validation left out)"
            )
        if not result.is_interrupted and config.run.sample_tokens:
            result = replace(result, sample=trainer.sample())
            output.print(f"\nsample:\n{result.sample}\n")
        if result.val_loss is not None:
            output.print(
                f"validation loss, nats per token: {result.first_val_loss:.4f} before, "
                f"{result.val_loss:.4f} after (guessing: "
                f"{math.log(trainer.decoder_config.vocab_size):.4f})"
            )
        output.summary(_summary(result, trainer, config))
        output.print(f"run folder: {result.run_folder}")
    return result


def train_rank(config: Config) -> TrainResult | ShardwrightError:
    """Train, handing back an error that all ranks raise alike, so that it is told once.

    Args:
        config: Resolved.

    Returns:
        The result, or the error.
    """
    try:
        return train(config)
    except (NonFiniteError, DataError, RunFolderError) as error:
        return error


def _open_output(config: Config, ranks: DataRanks) -> RunOutput:
    """Open the output of each rank, or raise on all alike what is wrong with the first's folder."""
    output, problem = None, ""
    try:
        output = RunOutput(config, is_silent=ranks.rank != 0)
    except RunFolderError as error:
        problem = str(error)
    for found in ranks.gather(problem):
        if found:
            raise RunFolderError(found)
    assert output is not None, "it is there where nothing was wrong"
    return output


def _load_data(config: Config, tokenizer: Tokenizer, ranks: DataRanks) -> Corpus:
    """Read the corpus on every rank and make sure that all read the same."""
    corpus = load_corpus(
        find_documents(config.data.paths),
        tokenizer,
        max_bytes=config.data.max_bytes or None,
        bad_bytes=config.data.bad_bytes,
        validation_fraction=config.data.validation_fraction,
    )
    ranks.require_equal(
        "training data", corpus.fingerprint(), "give every node the same files with --data"
    )
    return corpus


def _run_steps(
    config: Config, trainer: Trainer, stop: StopRequest, output: RunOutput, *, num_ranks: int
) -> TrainResult:
    """Train until the last step or until a rank is asked to stop."""
    settings = config.train
    meter = Meter(trainer, num_ranks=num_ranks, seq_len=settings.seq_len)
    first_val_loss = trainer.evaluate()
    record = StepRecord(step=0, val_loss=first_val_loss)
    is_interrupted = False
    with output.progress:
        output.record(record)
        while record.step < settings.steps and not is_interrupted:
            meter.start()
            outcome = trainer.step(record.step, wants_stop=stop.is_made)
            record = meter.finish(record.step + 1, outcome)
            is_interrupted = outcome.is_stop_agreed and record.step < settings.steps
            if not is_interrupted and _is_validated(record.step, config):
                record = replace(record, val_loss=trainer.evaluate())
            output.record(record)
            _require_finite(record)
    if is_interrupted:
        output.print(f"stopped after step {record.step} of {settings.steps}, as asked")
    assert record.loss is not None, "a run has at least one step"
    return TrainResult(
        steps=record.step,
        tokens=record.tokens,
        sent_bytes_per_step=record.sent_bytes or 0,
        first_val_loss=first_val_loss,
        val_loss=record.val_loss,
        train_loss=record.loss,
        train_s=meter.train_s,
        is_interrupted=is_interrupted,
        run_folder=output.folder,
        sample="",
        account=sw.ledger(trainer.model).reconcile().rows,
    )


def _is_validated(step: int, config: Config) -> bool:
    every = config.train.eval_every
    return step == config.train.steps or (every > 0 and step % every == 0)


def _require_finite(record: StepRecord) -> None:
    """Raise on all ranks alike where training went astray."""
    values = {"loss": record.loss, "gradient norm": record.grad_norm}
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise NonFiniteError(
                f"the {name} must be finite; found {value} at step {record.step}; lower "
                f"train.lr, raise train.warmup_steps, or set train.clip"
            )


def _introduction(config: Config, trainer: Trainer, corpus: Corpus) -> list[str]:
    """Say in a few lines what is about to happen."""
    parallel, settings = config.parallel, config.train
    lines = [
        f"model: {config.model.preset}, {trainer.decoder_config.num_parameters:,} parameters, "
        f"{str(trainer.dtype).removeprefix('torch.')} on {trainer.device.type}",
        f"ranks: {parallel.ranks}, {parallel.strategy} "
        f"(replicate {parallel.replicate} x shard {parallel.shard})",
        f"data: {corpus.num_documents:,} files, {corpus.num_text_bytes:,} bytes; "
        f"{len(corpus.train):,} tokens to train on, {len(corpus.validation):,} to validate",
        f"steps: {settings.steps:,} of {trainer.tokens_per_step:,} tokens "
        f"({settings.micro_batch} sequences x {settings.accumulation} micro-batches x "
        f"{parallel.ranks} ranks x {settings.seq_len} tokens)",
    ]
    if corpus.num_bad_documents:
        lines.append(
            f"warning: {corpus.num_bad_documents:,} files hold bytes that are not UTF-8 "
            f"(data.bad_bytes = {config.data.bad_bytes!r}; "
            f"{corpus.num_bad_sequences:,} sequences replaced)"
        )
    if corpus.is_cut:
        lines.append(
            f"warning: the data was cut at data.max_bytes = {config.data.max_bytes:,} bytes"
        )
    return lines


def _summary(result: TrainResult, trainer: Trainer, config: Config) -> dict[str, Any]:
    """Collect what `summary.json` holds."""
    return {
        **{key: value for key, value in asdict(result).items() if key != "account"},
        "num_parameters": trainer.decoder_config.num_parameters,
        "preset": config.model.preset,
        "strategy": config.parallel.strategy,
        "ranks": config.parallel.ranks,
        "dtype": str(trainer.dtype).removeprefix("torch."),
        "device": str(trainer.device),
        "torch_version": torch.__version__,
        "tokens_per_s": result.tokens / result.train_s,
        "verdict": verdict(result.account),
        "account": [{**asdict(row), "difference": row.difference} for row in result.account],
    }
