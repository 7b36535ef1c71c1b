"""One run of one arm, as each of its ranks executes it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.harness import ResourceMeter
from benchmarks.step.arms import ARMS
from benchmarks.step.workloads import LEARNING_RATE, WORKLOADS, batch, build_model

__all__ = ["RankRun", "run_arm"]


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """What one rank measured.

    Attributes:
        step_ms: Milliseconds of each step after the warm-up.
        losses: This rank's loss of every step, warm-up included, nats per token.
        sent_bytes: Sent in the last step; None where the arm doesn't know.
        peak_mib: Peak memory over the imports, the building of the model included.
        peak_steps_mib: The same, of the steps after the warm-up only.
        used: Page faults and processor time per step.
    """

    step_ms: list[float]
    losses: list[float]
    sent_bytes: int | None
    peak_mib: float
    peak_steps_mib: float
    used: dict[str, float]


def run_arm(arm_name: str, workload_name: str, *, warmup: int, steps: int) -> RankRun:
    """Train for some steps and measure them.

    Args:
        arm_name: Key of `ARMS`.
        workload_name: Key of `WORKLOADS`.
        warmup: Steps before the measured ones.
        steps: Measured steps.

    Returns:
        The measurement.
    """
    arm, workload = ARMS[arm_name], WORKLOADS[workload_name]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo")
    meter = ResourceMeter()
    model = arm.prepare(build_model(workload), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    step_ms, losses, peak_mib = [], [], 0.0
    for step in range(warmup + steps):
        tokens, targets = batch(workload, step=step, rank=rank)
        if step == warmup:
            peak_mib = meter.peak_mib()
            meter.restart()
        started_s = time.perf_counter()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step_ms.append(1e3 * (time.perf_counter() - started_s))
        losses.append(float(loss.detach()))
    peak_steps_mib = meter.peak_mib()
    return RankRun(
        step_ms=step_ms[warmup:],
        losses=losses,
        sent_bytes=arm.sent_bytes(model) if arm.sent_bytes else None,
        peak_mib=max(peak_mib, peak_steps_mib),
        peak_steps_mib=peak_steps_mib,
        used=meter.since_restart(num_steps=steps),
    )
