"""Scale the planner by one measured step on the user's own stack.

One measured row per stack is the best single input a planner can have. The factor is chosen so that
the measured job is predicted exactly, and applied to all computation on that device and class.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.core.errors import SpecError
from shardwright.planner.checks import require_positive
from shardwright.planner.cost.efficiency import GENERIC, Efficiency, Factors, load_efficiencies
from shardwright.planner.job import Job
from shardwright.planner.predict import predict

__all__ = ["factors_from_probe"]

_LOWEST, _HIGHEST = 0.05, 4.0

_DOUBTFUL_SHARE = 0.75
"""Share of the peak that no published training of dense decoders in 16 bits has reached."""

_COMPUTED_TWICE = {"full": 1 / 3, "alternate": 1 / 6, "half_products": 1 / 6}
"""Share of a step's operations that recomputation adds: forward is a third of them."""


def factors_from_probe(job: Job, measured_step_s: float) -> Factors:
    """Factors under which a job takes the measured time.

    Args:
        job: What was measured.
        measured_step_s: Its step, in seconds.

    Returns:
        The factors, with the doubt that an implausibly short step leaves.

    Raises:
        SpecError: No speed of computation below the device's peak explains the measurement.
    """
    require_positive("probe", measured_step_s=measured_step_s)
    doubt = _doubt(job, measured_step_s)
    key = (job.cluster.device.family, job.workload.software.class_name)
    known = load_efficiencies()
    base = known.get(key, GENERIC)

    def step_s(factor: float) -> float:
        return predict(job, efficiencies={key: _scaled(base, factor)}).step_s

    low, high = _LOWEST, _HIGHEST  # slower, faster
    if not step_s(high) <= measured_step_s <= step_s(low):
        raise SpecError(
            f"the probe's step of {measured_step_s:g} s can't be explained by the speed of "
            f"computation: between {step_s(high):.3g} and {step_s(low):.3g} s are possible for "
            f"{job.layout.describe()}. Check the probe's model, batch and layout."
        )
    for _ in range(40):
        middle = (low * high) ** 0.5
        if step_s(middle) > measured_step_s:
            low = middle
        else:
            high = middle
    return dict(known) | {key: replace(_scaled(base, high), doubt=doubt)}


def _scaled(base: Efficiency, factor: float) -> Efficiency:
    return Efficiency(matmul=base.matmul * factor, memory=base.memory * factor)


def _doubt(job: Job, measured_step_s: float) -> str:
    """What is odd about a measurement: it needs more of the device's peak than runs reach.

    Raises:
        SpecError: It needs more than the peak.
    """
    workload, device = job.workload, job.cluster.device
    tokens = workload.tokens_per_rank * job.layout.num_data_ranks / job.layout.world_size
    flops = tokens * job.model.flops_per_token(workload.seq_len)
    peak = max(device.peak_flops(dtype) for dtype in ("bf16", workload.precision.product))
    mfu = flops / measured_step_s / peak
    share = mfu * (1 + _COMPUTED_TWICE.get(workload.checkpointing, 0.0))
    text = (
        f"the probe's step of {measured_step_s:g} s implies an MFU of {mfu:.0%} and computes at "
        f"{share:.0%} of the peak of {device.name} ({peak / 1e12:.0f} TFLOP/s)"
    )
    advice = "Check its step_s, model, micro_batch, accumulation, checkpointing and devices"
    if share > 1:
        raise SpecError(f"{text}, more than there is. {advice}.")
    return f"{text}: hardly any run does. {advice}" if share > _DOUBTFUL_SHARE else ""
