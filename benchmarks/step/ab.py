"""Measure a training step: Shardwright's strategies against FSDP2, DDP and one process.

    python -m benchmarks.step.ab --workloads a,c --rounds 5

Ranks are local processes with one thread each that talk over gloo; fp32, fused AdamW. Every run
starts fresh processes, and the arms alternate. All arms of several ranks must compute the same
losses, or nothing is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import (
    MIB,
    Spread,
    alternate,
    capture_environment,
    markdown_table,
    write_results,
)
from benchmarks.step.arms import ARMS
from benchmarks.step.worker import RankRun, run_arm
from benchmarks.step.workloads import WORKLOADS
from shardwright.app.launch import launch

LOSS_TOLERANCE = 1e-5
"""Relative. fp32 rounds to 6e-8; sums of gradients in another order move a loss by some 1e-6 over
the few steps measured."""

Run = list[RankRun]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for and write the files."""
    options = _parse(arguments)
    environment = capture_environment()
    results: dict[str, dict[str, Any]] = {}
    for workload in options.workloads:

        def run(arm: str, workload: str = workload) -> Run:
            return launch(
                run_arm,
                ranks=1 if ARMS[arm].is_alone else options.ranks,
                args=(arm, workload),
                kwargs={"warmup": options.warmup, "steps": options.steps},
                timeout_s=options.timeout_s,
            )

        runs = alternate(options.arms, rounds=options.rounds, run=run)
        require_equal_losses(workload, runs)
        results[workload] = {arm: summarise(runs[arm]) for arm in options.arms}
        print("\n".join(_table(workload, results[workload])), flush=True)
    content = {
        "theme": "step",
        "command": f"python -m benchmarks.step.ab {' '.join(arguments or sys.argv[1:])}".rstrip(),
        "environment": environment,
        "settings": {
            "ranks": options.ranks,
            "rounds": options.rounds,
            "warmup": options.warmup,
            "steps": options.steps,
            "threads_per_rank": 1,
            "transport": "gloo",
            "dtype": "fp32",
            "optimizer": "AdamW, fused",
        },
        "workloads": {name: dataclasses.asdict(WORKLOADS[name]) for name in options.workloads},
        "results": results,
    }
    if not options.dry:
        for path in write_results("step", content, _page(content)):
            print(path.relative_to(path.parents[2]))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default="a,c", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--arms", default=",".join(ARMS), help="default: all; separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each arm")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=900.0, help="bound on one run")
    parser.add_argument("--dry", action="store_true", help="print only, write no file")
    options = parser.parse_args(arguments)
    for name, known in (("workloads", WORKLOADS), ("arms", ARMS)):
        chosen = [item.strip() for item in getattr(options, name).split(",")]
        unknown = [item for item in chosen if item not in known]
        if unknown:
            parser.error(f"--{name} takes {', '.join(known)}; found {', '.join(unknown)}")
        setattr(options, name, chosen)
    return options


def require_equal_losses(workload: str, runs: dict[str, list[Run]]) -> None:
    """Make sure that all arms of several ranks trained the same model.

    Args:
        workload: For the message.
        runs: The runs of each arm.

    Raises:
        SystemExit: A loss differs.
    """
    expected: tuple[str, list[float]] | None = None
    for arm, of_arm in runs.items():
        if ARMS[arm].is_alone:
            continue
        for run in of_arm:
            losses = [statistics.fmean(step) for step in zip(*(r.losses for r in run), strict=True)]
            if expected is None:
                expected = (arm, losses)
            for step, (found, wanted) in enumerate(zip(losses, expected[1], strict=True)):
                if not abs(found - wanted) <= LOSS_TOLERANCE * abs(wanted):
                    sys.exit(
                        f"workload {workload}: all arms must compute the same losses to "
                        f"{LOSS_TOLERANCE:g}; found {found!r} from '{arm}' and {wanted!r} from "
                        f"'{expected[0]}' in step {step}; nothing was written"
                    )


def summarise(runs: list[Run]) -> dict[str, Any]:
    """Reduce the runs of an arm to medians and spreads.

    Args:
        runs: At least one.

    Returns:
        Milliseconds per step (a step lasts as long as its slowest rank; a run is the median of its
        steps), and per rank the bytes sent, peak memory, page faults and processor time.
    """
    first = runs[0][0]
    return {
        "step_ms": dataclasses.asdict(
            Spread.of(
                statistics.median(map(max, zip(*(rank.step_ms for rank in run), strict=True)))
                for run in runs
            )
        ),
        "sent_mib_per_step": None if first.sent_bytes is None else first.sent_bytes / MIB,
        "peak_mib": _greatest(runs, "peak_mib"),
        "peak_steps_mib": _greatest(runs, "peak_steps_mib"),
        **{
            f"{name}_per_step": dataclasses.asdict(
                Spread.of(max(rank.used[name] for rank in run) for run in runs)
            )
            for name in first.used
        },
        "last_loss": statistics.fmean(rank.losses[-1] for rank in runs[0]),
    }


def _greatest(runs: list[Run], name: str) -> dict[str, Any]:
    return dataclasses.asdict(Spread.of(max(getattr(rank, name) for rank in run) for run in runs))


def _table(workload: str, results: dict[str, Any]) -> Iterator[str]:
    shape = WORKLOADS[workload]
    yield (
        f"## {workload}: {shape.hidden}x{shape.layers}, vocabulary {shape.vocab_size}, "
        f"{shape.decoder.num_parameters / 1e6:.1f} M parameters, {shape.tokens_per_rank} tokens "
        f"per rank"
    )
    yield ""
    header = ["arm", "step, ms (least-greatest)", "sent, MiB", "peak, MiB", "peak of steps, MiB"]
    yield from markdown_table(
        [*header, "page faults", "user / system, ms"],
        (_row(arm, result) for arm, result in results.items()),
    )
    yield ""


def _row(arm: str, result: dict[str, Any]) -> list[str]:
    step, sent = result["step_ms"], result["sent_mib_per_step"]
    return [
        arm,
        f"**{step['median']:,.0f}** ({step['low']:,.0f}-{step['high']:,.0f})",
        "-" if sent is None else f"{sent:,.1f}",
        f"{result['peak_mib']['median']:,.0f}",
        f"{result['peak_steps_mib']['median']:,.0f}",
        f"{result['faults_per_step']['median']:,.0f}",
        f"{result['user_ms_per_step']['median']:,.0f} / "
        f"{result['system_ms_per_step']['median']:,.0f}",
    ]


def _page(content: dict[str, Any]) -> Iterator[str]:
    environment, settings = content["environment"], content["settings"]
    yield "# A training step"
    yield ""
    yield f"`{content['command']}`"
    yield ""
    yield (
        f"{environment['processor']}, {environment['cores']} cores, "
        f"{environment['memory_gib']} GiB; torch {environment['torch']}, Python "
        f"{environment['python']}; commit {environment['commit']}. {settings['ranks']} ranks, "
        f"gloo, one thread each, fp32, fused AdamW. Medians of {settings['rounds']} runs of "
        f"{settings['steps']} steps after {settings['warmup']} of warm-up, arms alternated. Bytes, "
        f"memory (over the imports), faults and processor time are per rank; sent bytes are "
        f"what the arm itself counts."
    )
    yield ""
    for workload, results in content["results"].items():
        yield from _table(workload, results)


if __name__ == "__main__":
    main()
