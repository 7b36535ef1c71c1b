"""Plan files: a job and what it was predicted to cost, as versioned plain data.

The section `engine` is for a run: `sw.shard(model, **plan["engine"]["shard_arguments"])` shards as
planned, and `sw.ledger(model).reconcile(plan)` puts what it counts beside what was planned. GiB are
not used here: every figure is in bytes or seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.core.errors import SpecError
from shardwright.core.strategy import Gathered
from shardwright.planner.cost.state import state_bytes
from shardwright.planner.predict import Prediction
from shardwright.planner.traced import TracedModel

__all__ = ["FORMAT", "VERSION", "as_document", "read_plan", "write_plan"]

FORMAT = "shardwright-plan"
VERSION = 1


def as_document(prediction: Prediction) -> dict[str, Any]:
    """A prediction as plain data.

    Args:
        prediction: What to write.

    Returns:
        The job (model, cluster, workload, layout), what the engine is to do, and the predicted
        figures of one step and one rank.
    """
    job = prediction.job
    model = job.model.as_data() if isinstance(job.model, TracedModel) else asdict(job.model)
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "cluster": asdict(job.cluster),
        "workload": asdict(job.workload),
        "layout": asdict(job.layout),
        "engine": _engine_section(prediction),
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


def _engine_section(prediction: Prediction) -> dict[str, Any]:
    """What the engine is to do, and what it will hold and send per rank.

    Memory is that of our engine, on the stage that was replayed, whatever else is compared.
    """
    job, stage = prediction.job, prediction.stage
    layout = job.layout
    memory = dict(stage.plan.bytes_by_category)
    state = state_bytes(stage.units, layout, job.workload).at_loss
    memory["optimizer_state"] = round(state.get("optimizer_state", 0.0))
    resident = [
        unit.name
        for unit in stage.units
        if layout.gathered is Gathered.USE and unit.gathered is Gathered.BACKWARD
    ]
    return {
        "shard_arguments": {
            "strategy": layout.resolved.name,
            "forward_prefetch": layout.forward_prefetch,
            "backward_prefetch": layout.backward_prefetch,
            "backward_prefetch_at": layout.backward_prefetch_at,
            "max_in_flight": layout.max_in_flight,
            "reduce_in_flight": layout.reduce_in_flight,
            "residency": resident,
        },
        "shard": layout.shard_degree,
        "replicas": layout.replicas,
        "gradients": layout.resolved.gradients.value,
        "micro_batches": job.workload.accumulation,
        "units": [
            {
                "name": unit.name,
                "numel": unit.layout.numel,
                "gathered_bytes": unit.layout.gathered_bytes,
                "owners": unit.layout.num_owners,
                "gathered": unit.gathered.value,
                "reduced_bytes": unit.layout.gradient_numel
                * int(job.workload.precision.item_bytes("reduce")),
            }
            for unit in stage.units
            if unit.layout is not None
        ],
        "memory_bytes": memory,
        "sent_bytes": {name: round(value) for name, value in prediction.sent_bytes.items()},
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
