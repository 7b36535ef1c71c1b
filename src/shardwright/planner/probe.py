"""Scale the planner by one measured step on the user's own stack.

One measured row per stack is the best single input a planner can have. The factor is chosen so that
the measured job is predicted exactly, and applied to all computation on that device and class.
"""

from __future__ import annotations

from shardwright.core.errors import SpecError
from shardwright.planner.checks import require_positive
from shardwright.planner.cost.efficiency import GENERIC, Efficiency, Factors, load_efficiencies
from shardwright.planner.job import Job
from shardwright.planner.predict import predict

__all__ = ["factors_from_probe"]

_LOWEST, _HIGHEST = 0.05, 4.0


def factors_from_probe(job: Job, measured_step_s: float) -> Factors:
    """Factors under which a job takes the measured time.

    Args:
        job: What was measured.
        measured_step_s: Its step, in seconds.

    Raises:
        SpecError: No plausible speed of computation explains the measurement.
    """
    require_positive("probe", measured_step_s=measured_step_s)
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
    return dict(known) | {key: _scaled(base, high)}


def _scaled(base: Efficiency, factor: float) -> Efficiency:
    return Efficiency(matmul=base.matmul * factor, memory=base.memory * factor)
