"""Plan files: a job and what it was predicted to cost, as versioned plain data.

The engine reads the layout, the ledger compares its counts with the traffic and memory. GiB are not
used here: every figure is in bytes or seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.core.errors import SpecError
from shardwright.planner.predict import Prediction
from shardwright.planner.units import find_units

__all__ = ["FORMAT", "VERSION", "as_document", "read_plan", "write_plan"]

FORMAT = "shardwright-plan"
VERSION = 1


def as_document(prediction: Prediction) -> dict[str, Any]:
    """A prediction as plain data.

    Args:
        prediction: What to write.

    Returns:
        The job (model, cluster, workload, layout), units, and the predicted figures of one step
        and one rank.
    """
    job = prediction.job
    units = find_units(
        job.model,
        job.layout,
        job.workload.precision.param,
        layers=job.model.layers // job.layout.pipeline,
    )
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": asdict(job.model),
        "cluster": asdict(job.cluster),
        "workload": asdict(job.workload),
        "layout": asdict(job.layout),
        "units": [{"name": unit.name, "numel": unit.numel} for unit in units],
        "predicted": {
            "step_s": prediction.step_s,
            "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
            "mfu": prediction.mfu,
            "exposed_s": dict(prediction.exposed_s),
            "compute_s": dict(prediction.parts_s),
            "bubble_s": prediction.bubble_s,
            "sent_bytes": dict(prediction.sent_bytes),
            "memory_bytes": dict(prediction.memory.categories),
            "memory_peak_at": prediction.memory.peak_at,
        },
        "warnings": list(prediction.warnings),
    }


def write_plan(prediction: Prediction, path: Path) -> None:
    """Write a plan file."""
    text = json.dumps(as_document(prediction), indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def read_plan(path: Path) -> Mapping[str, Any]:
    """Read a plan file.

    Raises:
        SpecError: It isn't one, or of a newer version.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise SpecError(f"can't read the plan {path}: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise SpecError(f"{path} is no plan file: expected a format of {FORMAT!r}")
    if found.get("version") != VERSION:
        raise SpecError(
            f"{path} is a plan of version {found.get('version')}; this release reads {VERSION}. "
            "Plan again, or update."
        )
    return found
