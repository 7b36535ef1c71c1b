"""`shardwright train`: read the settings, find or start the ranks, train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardwright.app.cli.errors import print_error
from shardwright.core.errors import ShardwrightError, SpecError

if TYPE_CHECKING:
    from shardwright.app.config import Config
    from shardwright.app.environment import Job

__all__ = ["EXIT_INTERRUPTED", "train"]

EXIT_INTERRUPTED = 130
"""Exit code of a run that was asked to stop."""

GRACE_S = 120.0
"""After Ctrl-C, how long ranks may take to finish their step; a second Ctrl-C ends them at once."""


def train(
    *,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings; flags override it.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Size of the model.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="File, folder or pattern of UTF-8 text; may be given several times."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="'bytes', or the path of a tokenizer.json.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Start this many local processes (default 1).")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="How training state is divided, e.g. zero3.")
    ] = None,
    replicate: Annotated[int | None, typer.Option(help="Size of the replicate axis.")] = None,
    shard: Annotated[int | None, typer.Option(help="Size of the shard axis.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences per rank and micro-batch.")
    ] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches per step.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences per step over all ranks.")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between validations; 0: only before and after.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of parameters, data order and sample.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bf16 or fp32.")] = None,
    out: Annotated[str | None, typer.Option(help="Run folder, new or empty.")] = None,
    log_every: Annotated[int | None, typer.Option(help="Steps between printed lines.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Start of the sample text.")] = None,
    sample_tokens: Annotated[
        int | None, typer.Option(help="Length of the sample; 0: none.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Any other setting, e.g. data.bad_bytes=skip; may be given several times.",
        ),
    ] = None,
) -> None:
    """Train a decoder on text.

    Starts --ranks local processes, or joins the ranks that torchrun or Slurm started. Without
    --data it trains on the source of Python's standard library. Writes config.toml,
    metrics.jsonl and summary.json to the run folder.

    Example: shardwright train --preset tiny --ranks 2 --strategy zero3
    """
    from shardwright.app.environment import find_job
    from shardwright.app.settings import load_config

    job = find_job(os.environ)
    if job is not None and ranks is not None:
        raise SpecError(
            f"--ranks starts local processes; found a job of {job.launcher} with "
            f"{job.world_size} ranks already; drop --ranks, or start outside the job"
        )
    flags: dict[str, dict[str, Any]] = {
        "model": {"preset": preset},
        "data": {"paths": data or None, "tokenizer": tokenizer},
        "train": {
            "steps": steps,
            "lr": lr,
            "seq_len": seq_len,
            "micro_batch": micro_batch,
            "accumulation": accumulation,
            "global_batch": global_batch,
            "eval_every": eval_every,
            "seed": seed,
        },
        "parallel": {
            "ranks": ranks,
            "strategy": strategy,
            "replicate": replicate,
            "shard": shard,
        },
        "precision": {"dtype": dtype},
        "run": {
            "out": out,
            "log_every": log_every,
            "prompt": prompt,
            "sample_tokens": sample_tokens,
        },
    }
    resolved = _resolve(load_config(config, flags, settings or ()), job)
    _check_inputs(resolved)
    if job is None:
        _launch(resolved)
    _join(resolved, job)


def _resolve(given: Config, job: Job | None) -> Config:
    from shardwright.app.config import resolve

    if job is None:
        return resolve(given, ranks=given.parallel.ranks or 1)
    return resolve(given, ranks=job.world_size, ranks_per_node=job.local_world_size)


def _check_inputs(config: Config) -> None:
    """Refuse wrong paths before any rank starts and anything is written."""
    from shardwright.app.data import find_documents
    from shardwright.app.run_folder import RUNS, RunFolderError, require_unused
    from shardwright.app.tokenizer import load_tokenizer

    config.model.decoder(load_tokenizer(config.data.tokenizer).vocab_size)
    find_documents(config.data.paths)
    try:
        require_unused(RUNS / "new" if config.run.out is None else Path(config.run.out))
    except RunFolderError as error:
        raise SpecError(str(error)) from error  # a wrong setting still: no run has begun


def _launch(config: Config) -> NoReturn:
    """Start local ranks, wait for them, and exit."""
    from shardwright.app.interrupt import terminate_as_interrupt
    from shardwright.app.launch import launch
    from shardwright.app.train import train_rank

    assert config.parallel.ranks is not None, "resolve sets the ranks"
    try:
        with terminate_as_interrupt():
            results = launch(
                train_rank, ranks=config.parallel.ranks, args=(config,), grace_s=GRACE_S
            )
    except KeyboardInterrupt:  # the ranks have stopped after a step, or were ended
        raise typer.Exit(EXIT_INTERRUPTED) from None
    for result in results:
        if isinstance(result, ShardwrightError):
            raise result
    raise typer.Exit(0)


def _join(config: Config, job: Job) -> NoReturn:
    """Train as one rank of a job, and leave the process in order."""
    os.environ.update(job.variables())
    import torch.distributed as dist

    from shardwright.app.process_exit import destroy_groups, end_process
    from shardwright.app.train import train as train_rank

    try:
        is_interrupted = train_rank(config).is_interrupted
    except ShardwrightError as error:
        end_process(print_error(error))
    dist.barrier()  # so that no rank closes its groups under another that still uses them
    destroy_groups()
    end_process(EXIT_INTERRUPTED if is_interrupted else 0)
