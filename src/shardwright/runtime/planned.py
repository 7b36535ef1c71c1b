"""A plan file for a run: how to shard as planned; is it a plan of this job; what differs from it.

The planner isn't imported: its file is versioned plain data, of which the section ``engine`` is
read here. `read_plan` is public; the rest is called by the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwright.core.errors import SpecError
from shardwright.runtime.precision import Precision, dtype_name

if TYPE_CHECKING:
    from shardwright.core.strategy import Gradients
    from shardwright.runtime.ledger import ReconciliationRow
    from shardwright.runtime.unit import ShardedUnit

__all__ = ["RunPlan", "beside_plan", "check_plan", "read_engine_section", "read_plan"]

_FORMAT = "shardwright-plan"
_VERSION = 1

_KEYS = (
    "shard_arguments",
    "shard",
    "replicas",
    "gradients",
    "micro_batch",
    "micro_batches",
    "checkpoint_policy",
    "units",
    "memory_bytes",
    "sent_bytes",
)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a plan says about a run.

    Attributes:
        mesh_arguments: Arguments of `init_mesh`.
        shard_arguments: Arguments of `shard`, beside the mesh.
        micro_batch: Samples per data rank and micro-batch.
        micro_batches: Micro-batches per step.
        checkpoint_policy: Policy for `checkpoint_activations`; None where backward recomputes
            nothing.
    """

    mesh_arguments: dict[str, int]
    shard_arguments: dict[str, Any]
    micro_batch: int
    micro_batches: int
    checkpoint_policy: str | None


def read_plan(plan: Mapping[str, Any] | str | Path) -> RunPlan:
    """Read how a plan file wants a run.

    Args:
        plan: A plan file, or its content.

    Raises:
        SpecError: It can't be read, is no plan, or is of another version.
    """
    section = read_engine_section(plan)
    arguments = dict(section["shard_arguments"])
    names = arguments.get("precision")
    if not isinstance(names, Mapping):
        raise SpecError("the plan's 'shard_arguments' lack 'precision'; plan again")
    param, reduce, master = (_dtype(names.get(use)) for use in ("param", "reduce", "master"))
    arguments["precision"] = Precision(param=param, reduce=reduce, master=master)
    return RunPlan(
        mesh_arguments={"replicate": section["replicas"], "shard": section["shard"]},
        shard_arguments=arguments,
        micro_batch=section["micro_batch"],
        micro_batches=section["micro_batches"],
        checkpoint_policy=section["checkpoint_policy"],
    )


def _dtype(name: object) -> torch.dtype:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if name == dtype_name(dtype):
            return dtype
    raise SpecError(f"the plan's precision must be float32, bfloat16 or float16, found {name!r}")


def read_engine_section(plan: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Read what a plan says about a run.

    Args:
        plan: A plan file, or its content.

    Raises:
        SpecError: It can't be read, is no plan, or is of another version.
    """
    name = "the plan"
    found: Any = plan
    if isinstance(plan, (str, Path)):
        name = f"the plan {plan}"
        try:
            found = json.loads(Path(plan).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise SpecError(f"can't read {name}: {error}") from error
    if not isinstance(found, Mapping) or found.get("format") != _FORMAT:
        raise SpecError(
            f"{name} is none: expected format {_FORMAT!r}. Write one with `shardwright plan --out` "
            "or plans.save()."
        )
    if found.get("version") != _VERSION:
        raise SpecError(
            f"{name} has version {found.get('version')}, this release reads {_VERSION}; plan again"
        )
    if found.get("needs"):
        raise SpecError(
            f"{name} needs {' and '.join(found['needs'])}, which the engine doesn't run yet; plan "
            "with max_tensor=1 and max_pipeline=1"
        )
    section = found.get("engine")
    missing = [key for key in _KEYS if not isinstance(section, Mapping) or key not in section]
    if missing:
        raise SpecError(f"{name} lacks {', '.join(missing)} in its section 'engine'; plan again")
    assert isinstance(section, Mapping), "checked above"
    return section


def check_plan(
    section: Mapping[str, Any], units: Sequence[ShardedUnit], gradients: Gradients
) -> None:
    """Raise `SpecError` for a plan of another job, naming the first difference.

    Args:
        section: The plan's section ``engine``.
        units: The run's units.
        gradients: Where the run's gradients live between micro-batches.
    """
    topology = units[0].topology
    planned_strategy = section["shard_arguments"].get("strategy")
    _require_equal("the shard axis", section["shard"], topology.shard.size)
    _require_equal("replicas", section["replicas"], topology.replicate.size)
    _require_equal(
        f"gradients between micro-batches ({planned_strategy})",
        section["gradients"],
        gradients.value,
    )
    owning = [unit for unit in units if unit.parameters]
    planned = section["units"]
    for position, (unit, wanted) in enumerate(zip(owning, planned, strict=False)):
        layout = unit.layout
        name = f"unit {position} ({unit.name!r}, planned as {wanted['name']!r})"
        reduced_bytes = 0
        if unit.gradient is not None:
            reduced_bytes = layout.gradient_numel * unit.gradient.reduce_dtype.itemsize
        for what, plans, has in (
            ("elements", wanted["numel"], layout.numel),
            ("owners", wanted["owners"], layout.num_owners),
            ("gathered bytes", wanted["gathered_bytes"], layout.gathered_bytes),
            (f"time gathered ({planned_strategy})", wanted["gathered"], unit.gathered.value),
            ("reduced bytes", wanted["reduced_bytes"] if unit.trainable else 0, reduced_bytes),
        ):
            _require_equal(f"{what} of {name}", plans, has)
    _require_equal("the number of units", len(planned), len(owning))


def _require_equal(what: str, planned: object, found: object) -> None:
    if planned != found:
        raise SpecError(
            f"the plan is for another job: {what} is {planned} in the plan, {found} in this run. "
            "Plan this model, strategy, mesh and precision, or shard with the plan's "
            "'shard_arguments'."
        )


def beside_plan(
    rows: Sequence[ReconciliationRow], section: Mapping[str, Any], num_steps: int
) -> tuple[ReconciliationRow, ...]:
    """Add planned bytes to the ledger's rows, and rows for what was planned and never happened.

    Args:
        rows: Computed beside counted.
        section: The plan's section ``engine``.
        num_steps: Optimizer steps so far: traffic is planned per step.
    """
    planned = {
        "traffic": {name: size * num_steps for name, size in section["sent_bytes"].items()},
        "memory": {
            name.replace("_", " "): size for name, size in section["memory_bytes"].items() if size
        },
    }
    found = [_with_plan(row, planned[row.section].pop(row.name, 0), section) for row in rows]
    for kind, sizes in planned.items():
        for name, size in sizes.items():
            blank = replace(rows[0], section=kind, name=name, computed=0, counted=0, reason="")
            found.append(_with_plan(blank, size, section))
    return tuple(found)


def _with_plan(
    row: ReconciliationRow, planned: int, section: Mapping[str, Any]
) -> ReconciliationRow:
    reason = row.reason
    if planned != row.counted and not reason:
        reason = _REASONS.get(row.name, "")
        if row.section == "traffic":
            reason = (
                "evaluations, a step under way, or other than the planned "
                f"{section['micro_batches']} micro-batches per step"
            )
    return replace(row, planned=planned, reason=reason)


_REASONS = {
    "optimizer state": (
        "planned for whole chunks of fp32 moments; a rank has its rows, step counts, and nothing "
        "before the first step"
    ),
    "staging": "buffers of the pairwise transport: plan with settings={'transport': 'pairwise'}",
    "parameter slots": "another prefetch distance, bound on gathers in flight, or residency",
    "gradient buffers": "another number of reductions in flight",
}
