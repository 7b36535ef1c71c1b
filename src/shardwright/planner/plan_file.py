"""Plan files: a job and what it was predicted to cost, as versioned plain data.

The section `engine` is for a run: `sw.read_plan` gives its arguments of `sw.init_mesh` and
`sw.shard`, and `sw.ledger(model).reconcile(plan)` puts what a run counts beside what was planned.
What the engine can't run yet has no such section, and no file. GiB are not used here: every figure
is in bytes or seconds.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.core.errors import SpecError
from shardwright.core.strategy import Gathered
from shardwright.planner.cost.state import state_bytes
from shardwright.planner.predict import Prediction
from shardwright.planner.text_files import write_text
from shardwright.planner.traced import TracedModel
from shardwright.planner.units import TORCH_DTYPE

__all__ = ["FORMAT", "VERSION", "as_document", "write_plan"]

FORMAT = "shardwright-plan"
VERSION = 1


def as_document(prediction: Prediction) -> dict[str, Any]:
    """A prediction as plain data.

    Args:
        prediction: What to write.

    Returns:
        The job (model, cluster, workload, layout), the predicted figures of one step and one rank,
        and what the engine is to do, or what it can't do yet (`needs`).
    """
    job = prediction.job
    model = job.model.as_data() if isinstance(job.model, TracedModel) else asdict(job.model)
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "cluster": asdict(job.cluster),
        "workload": asdict(job.workload),
        "layout": asdict(job.layout),
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
    if job.missing:
        return document | {"needs": list(job.missing)}
    return document | {"engine": _engine_section(prediction)}


def _engine_section(prediction: Prediction) -> dict[str, Any]:
    """What the engine is to do, and what it will hold and send per rank.

    Memory is that of our engine, on the stage that was replayed, whatever else is compared.
    """
    job, stage = prediction.job, prediction.stage
    layout, workload = job.layout, job.workload
    memory = dict(stage.plan.bytes_by_category)
    state = state_bytes(stage.units, layout, workload).at_loss
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
            "transport": layout.transport,
            "precision": {
                use: TORCH_DTYPE[getattr(workload.precision, use)]
                for use in ("param", "reduce", "master")
            },
        },
        "shard": layout.shard_degree,
        "replicas": layout.replicas,
        "gradients": layout.resolved.gradients.value,
        "micro_batch": workload.micro_batch,
        "micro_batches": workload.accumulation,
        "checkpoint_policy": None if workload.checkpointing == "none" else workload.checkpointing,
        "units": [
            {
                "name": unit.name,
                "numel": unit.layout.numel,
                "gathered_bytes": unit.layout.gathered_bytes,
                "owners": unit.layout.num_owners,
                "gathered": unit.gathered.value,
                "reduced_bytes": unit.layout.gradient_numel
                * int(workload.precision.item_bytes("reduce")),
            }
            for unit in stage.units
            if unit.layout is not None
        ],
        "memory_bytes": memory,
        "sent_bytes": {name: round(value) for name, value in prediction.sent_bytes.items()},
    }


def write_plan(prediction: Prediction, path: Path, *, why_not: str = "") -> None:
    """Write a plan file.

    Args:
        prediction: What to write.
        path: Where.
        why_not: What is in the way of one that the engine runs, for the message.

    Raises:
        SpecError: The engine can't run that layout yet, or the file can't be written.
    """
    job = prediction.job
    if job.missing:
        raise SpecError(
            f"no plan file is written: {job.layout.describe()} needs {' and '.join(job.missing)}, "
            f"which the engine doesn't run yet; {why_not}"
        )
    text = json.dumps(as_document(prediction), indent=1, sort_keys=True)
    write_text(path, text + "\n", "plan file")
