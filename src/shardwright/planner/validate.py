"""Predict rows of published tables and compare: speed, memory, and what fits.

Measured columns are compared with, never read for a prediction. Reading and printing files is the
application's; this module takes rows and returns results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.errors import ShardwrightError
from shardwright.planner.accuracy import Judged
from shardwright.planner.columns import Unpredictable
from shardwright.planner.cost.efficiency import Factors, load_efficiencies, load_left_out
from shardwright.planner.fit import Sample
from shardwright.planner.memory_rows import MemoryRange, read_fit_row, read_memory_row
from shardwright.planner.predict import Prediction, predict
from shardwright.planner.rows import (
    RowJob,
    family_of,
    is_dense_data_parallel,
    read_row,
)
from shardwright.planner.stacks import STACKS, Stack

__all__ = [
    "MemoryResult",
    "RowResult",
    "judged_rows",
    "measured_speed",
    "predict_fit_rows",
    "predict_memory_rows",
    "predict_rows",
    "samples_of",
]


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """One row.

    Attributes:
        row: Its columns.
        read: What it was read as; None where it can't be predicted.
        prediction: The prediction, likewise.
        reason: Why it can't be predicted; empty otherwise.
    """

    row: Mapping[str, str]
    read: RowJob | None
    prediction: Prediction | None
    reason: str = ""

    @property
    def is_data_parallel(self) -> bool:
        """Whether it is a dense 16-bit run over data axes only, with a measured speed."""
        return is_dense_data_parallel(self.row)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What weakens the prediction, assumptions included."""
        if self.prediction is None or self.read is None:
            return ()
        return (*self.read.assumptions, *self.prediction.warnings)


def predict_rows(
    rows: Sequence[Mapping[str, str]],
    efficiencies: Mapping[str, Factors] | None = None,
    *,
    stacks: Mapping[str, Stack] = STACKS,
) -> list[RowResult]:
    """Predict rows of a table of speeds.

    Args:
        rows: Columns by name.
        efficiencies: Fitted factors by the family they leave out; None takes the committed ones.
            A family that the fit never saw takes the factors of all.
        stacks: What each training stack runs.
    """
    left_out = load_left_out() if efficiencies is None else efficiencies
    everyone = load_efficiencies() if efficiencies is None else {}
    found = []
    for row in rows:
        try:
            read = read_row(row, stacks)
            family = family_of(row.get("source", ""))
            factors = left_out.get(family, everyone)
            prediction = predict(read.job, efficiencies=factors)
        except (Unpredictable, ShardwrightError) as error:
            found.append(RowResult(row=row, read=None, prediction=None, reason=str(error)))
        else:
            found.append(RowResult(row=row, read=read, prediction=prediction))
    return found


def measured_speed(result: RowResult) -> float | None:
    """Measured tokens per second and device, from the speed or from the step's time.

    None where neither is there, or the row can't be predicted.
    """
    if result.prediction is None:
        return None
    text = result.row.get("tokens_per_s_per_gpu", "").strip()
    if text:
        return float(text)
    step = result.row.get("step_time_s", "").strip()
    if not step:
        return None
    predicted = result.prediction
    return predicted.tokens_per_s_per_device * predicted.step_s / float(step)


def judged_rows(results: Sequence[RowResult]) -> list[Judged]:
    """Rows with a prediction and a measured speed."""
    found = []
    for result in results:
        measured = measured_speed(result)
        if result.prediction is None or measured is None:
            continue
        row, job = result.row, result.prediction.job
        model = job.model
        seq_len = job.workload.seq_len
        flops = model.flops_per_token(seq_len, causal=False)
        if job.workload.checkpointing == "full":
            flops *= 4 / 3
        found.append(
            Judged(
                row_id=row.get("id", ""),
                source=row.get("source", ""),
                family=family_of(row.get("source", "")),
                device=job.cluster.device.name,
                group=tuple(row.get(key, "") for key in ("source", "model", "gpu", "n_gpus")),
                predicted=result.prediction.tokens_per_s_per_device,
                measured=measured,
                hardware_flops=flops,
                peak_flops=job.cluster.device.peak_flops("bf16"),
            )
        )
    return found


def samples_of(results: Sequence[RowResult]) -> list[Sample]:
    """Rows to fit on: 16-bit ones with a measured speed, the network's share of the step small."""
    found = []
    for result in results:
        measured = measured_speed(result)
        if measured is None or result.prediction is None or result.read is None:
            continue
        precision = result.read.job.workload.precision
        if precision.product not in ("bf16", "fp16") or result.prediction.exposed_share > 0.2:
            continue
        found.append(
            Sample(
                job=result.read.job,
                family=family_of(result.row.get("source", "")),
                tokens_per_s_per_device=measured,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class MemoryResult:
    """One row of a table of memory, or of what ran.

    Attributes:
        row: Its columns.
        found: What it needs; None where that can't be said.
        reason: Why not; empty otherwise.
    """

    row: Mapping[str, str]
    found: MemoryRange | None
    reason: str = ""

    @property
    def measured_gib(self) -> float | None:
        """The stated peak, if any, in the source's own GB or GiB."""
        text = (self.row.get("value_gb") or self.row.get("peak_mem_gib") or "").strip()
        return float(text) if text else None

    @property
    def is_right(self) -> bool | None:
        """Whether what fits is what ran; None where the row doesn't say."""
        outcome = self.row.get("outcome", "")
        if self.found is None or outcome not in ("ran", "oom"):
            return None
        return self.found.fits == (outcome == "ran")

    @property
    def is_scorable(self) -> bool:
        """Whether every input of a row of what ran is known or a documented default."""
        return self.row.get("scorable") == "yes"


def predict_memory_rows(
    rows: Sequence[Mapping[str, str]], speeds: Sequence[Mapping[str, str]] = ()
) -> list[MemoryResult]:
    """Predict rows of the memory table; those that mirror a row of speeds are read there."""
    by_id = {row.get("id", ""): row for row in speeds}
    return [_memory(row, lambda r: read_memory_row(r, by_id)) for row in rows]


def predict_fit_rows(rows: Sequence[Mapping[str, str]]) -> list[MemoryResult]:
    """Predict rows of what ran and what ran out of memory."""
    return [_memory(row, read_fit_row) for row in rows]


def _memory(
    row: Mapping[str, str], read: Callable[[Mapping[str, str]], MemoryRange]
) -> MemoryResult:
    try:
        return MemoryResult(row=row, found=read(row))
    except (Unpredictable, ShardwrightError) as error:
        return MemoryResult(row=row, found=None, reason=str(error))
