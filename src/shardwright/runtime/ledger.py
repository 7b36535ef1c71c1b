"""What a run really held and sent, counted as it happens, beside what the arithmetic says.

Counting costs an integer addition per collective. Bytes are each collective's own definition per
rank; the pairwise transport's are those of the messages it posts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwright.core.memory import MemoryPlan
from shardwright.core.volume import PassCounts, UnitTraffic, expected_traffic
from shardwright.runtime.planned import beside_plan, check_plan, read_engine_section

if TYPE_CHECKING:
    from shardwright.core.strategy import Gradients
    from shardwright.runtime.buffers import Buffers
    from shardwright.runtime.transport.base import Operation
    from shardwright.runtime.unit import ShardedUnit

__all__ = [
    "Ledger",
    "LedgerSources",
    "Reconciliation",
    "ReconciliationRow",
    "StepRecord",
    "TrafficRow",
]

_STEPS_KEPT = 256


@dataclass(slots=True)
class TrafficRow:
    """One kind of collective of one unit.

    Attributes:
        collective: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        axis: ``shard`` or ``replicate``.
        unit: Unit name.
        num_calls: Times it was started.
        sent_bytes: Bytes this rank sent for it in all.
    """

    collective: str
    axis: str
    unit: str
    num_calls: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: Index from 0.
        micro_batches: Backward passes since the step before.
        sent_bytes: Bytes this rank sent since the step before.
        wait_s: Seconds the host waited for communication; 0 where streams do the waiting.
        duration_s: Seconds since the step before.
    """

    step: int
    micro_batches: int
    sent_bytes: int
    wait_s: float
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReconciliationRow:
    """One figure, computed and counted.

    Attributes:
        section: ``traffic`` or ``memory``.
        name: What it measures.
        computed: Bytes by the closed form.
        counted: Bytes counted or held.
        reason: Why they differ, or what the figure covers.
        planned: Bytes by a plan file; None where none was given.
    """

    section: str
    name: str
    computed: int
    counted: int
    reason: str = ""
    planned: int | None = None

    @property
    def difference(self) -> int:
        """Counted less computed, in bytes."""
        return self.counted - self.computed

    @property
    def planned_difference(self) -> int:
        """Counted less planned, in bytes; 0 without a plan."""
        return 0 if self.planned is None else self.counted - self.planned


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """All figures of a run, computed beside counted.

    Attributes:
        rows: One per figure.
        counts: Passes and steps that the closed forms were evaluated for.
        num_steps: Optimizer steps.
    """

    rows: tuple[ReconciliationRow, ...]
    counts: PassCounts
    num_steps: int

    @property
    def is_exact(self) -> bool:
        """Whether every figure was counted as computed."""
        return all(row.difference == 0 for row in self.rows)

    @property
    def is_as_planned(self) -> bool:
        """Whether every figure was counted as planned; True without a plan."""
        return all(row.planned_difference == 0 for row in self.rows)

    def __str__(self) -> str:
        if any(row.planned is not None for row in self.rows):
            return self._beside_plan()
        lines = [f"{'':34}{'computed':>16}{'counted':>16}{'difference':>12}  (bytes per rank)"]
        for row in self.rows:
            name = f"{row.section}: {row.name}"
            lines.append(
                f"{name:34}{row.computed:>16,}{row.counted:>16,}{row.difference:>12,}  {row.reason}"
            )
        return "\n".join(lines)

    def _beside_plan(self) -> str:
        lines = [
            f"{'':34}{'planned':>16}{'computed':>16}{'counted':>16}{'difference':>12}"
            "  (bytes per rank; counted less planned)"
        ]
        lines.extend(
            f"{row.section + ': ' + row.name:34}{row.planned or 0:>16,}{row.computed:>16,}"
            f"{row.counted:>16,}{row.planned_difference:>12,}  {row.reason}"
            for row in self.rows
        )
        return "\n".join(lines)


@dataclass(kw_only=True, slots=True, eq=False)
class LedgerSources:
    """Where the ledger looks things up."""

    buffers: Buffers
    plan: MemoryPlan
    traffic: tuple[UnitTraffic, ...]
    gradients: Gradients
    replicas: int
    optimizers: Callable[[], Iterator[torch.optim.Optimizer]]
    units: Callable[[], list[ShardedUnit]]
    is_held: Callable[[int], bool]


@dataclass(slots=True, eq=False)
class _Open:
    """The step that is being counted."""

    micro_batches: int = 0
    sent_bytes: int = 0
    wait_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)


class Ledger:
    """Counts for one sharded model on one rank.

    Attributes:
        wait_s: Seconds the host has waited for communication so far.
        sent_bytes: Bytes sent so far.
        num_copies: Gradients that had to be copied into the reduce buffer so far.
        num_steps: Optimizer steps so far.
        steps: The last 256 steps.
    """

    def __init__(self) -> None:
        self.wait_s = 0.0
        self.sent_bytes = 0
        self.num_copies = 0
        self.num_steps = 0
        self.steps: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)
        self._rows: dict[tuple[str, str, int], TrafficRow] = {}
        self._counts = PassCounts()
        self._is_changed = True
        self._sources: LedgerSources | None = None
        self._open = _Open()
        self._requested: dict[tuple[str, str], int] = {}

    def attach(self, sources: LedgerSources) -> None:
        """Tell the ledger where buffers and closed forms are."""
        self._sources = sources

    # Events, called by the engine

    def count(self, collective: str, axis: str, unit: ShardedUnit, operation: Operation) -> None:
        """Count one start of an operation."""
        key = (collective, axis, unit.index)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = TrafficRow(collective, axis, unit.name)
        row.num_calls += 1
        row.sent_bytes += operation.sent_bytes
        self.sent_bytes += operation.sent_bytes

    def expect(self, collective: str, axis: str, num_bytes: int) -> None:
        """Add what a request of the user's must send by the closed form to what is computed."""
        key = (collective, axis)
        self._requested[key] = self._requested.get(key, 0) + num_bytes

    def count_copies(self, num_copies: int) -> None:
        """Count gradients copied into a reduce buffer."""
        self.num_copies += num_copies

    def pass_begins(self, *, expects_backward: bool) -> None:
        """Count a forward pass of the root."""
        counts = self._counts
        if self._is_changed:
            self._is_changed = False
            counts = replace(counts, refreshes=counts.refreshes + 1)
        if expects_backward:
            counts = replace(counts, training_forwards=counts.training_forwards + 1)
        else:
            counts = replace(counts, inference_forwards=counts.inference_forwards + 1)
        self._counts = counts

    def backward_ended(self, *, is_last: bool) -> None:
        """Count a backward pass."""
        counts = self._counts
        self._counts = replace(
            counts,
            backwards=counts.backwards + 1,
            synchronised=counts.synchronised + int(is_last),
        )
        self._open.micro_batches += 1

    def values_changed(self) -> None:
        """Note that parameters must be gathered anew."""
        self._is_changed = True

    def step_ended(self) -> None:
        """Count an optimizer step."""
        now = time.perf_counter()
        opened = self._open
        self.steps.append(
            StepRecord(
                step=self.num_steps,
                micro_batches=opened.micro_batches,
                sent_bytes=self.sent_bytes - opened.sent_bytes,
                wait_s=self.wait_s - opened.wait_s,
                duration_s=now - opened.started,
            )
        )
        self.num_steps += 1
        self._open = _Open(sent_bytes=self.sent_bytes, wait_s=self.wait_s, started=now)

    # What people ask

    def __str__(self) -> str:
        """Computed beside counted."""
        return str(self.reconcile())

    @property
    def traffic(self) -> list[TrafficRow]:
        """Bytes sent by this rank, per collective, axis and unit."""
        return list(self._rows.values())

    @property
    def memory(self) -> dict[str, int]:
        """Bytes this rank holds for training state, per category, now."""
        sources = self._require_sources()
        held = dict(sources.buffers.bytes_by_category)
        held["optimizer_state"] = self._optimizer_state_bytes()
        return held

    @property
    def computed_memory(self) -> dict[str, int]:
        """Bytes per category by the closed forms."""
        sources = self._require_sources()
        computed = sources.plan.bytes_by_category
        computed["optimizer_state"] = self._computed_optimizer_state_bytes()
        return computed

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of parameters that are gathered now, or being gathered, on this rank."""
        sources = self._require_sources()
        return sum(
            unit.layout.gathered_bytes
            for unit in sources.units()
            if unit.parameters and sources.is_held(unit.index)
        )

    def sent_by_collective(self) -> dict[tuple[str, str], int]:
        """Bytes sent by this rank, per ``(collective, axis)``."""
        totals: dict[tuple[str, str], int] = {}
        for row in self._rows.values():
            if row.sent_bytes:
                key = (row.collective, row.axis)
                totals[key] = totals.get(key, 0) + row.sent_bytes
        return totals

    def computed_traffic(self) -> dict[tuple[str, str], int]:
        """Bytes per ``(collective, axis)`` by the closed forms, for the passes counted."""
        sources = self._require_sources()
        computed = expected_traffic(
            sources.traffic,
            self._counts,
            gradients=sources.gradients,
            replicas=sources.replicas,
        )
        return computed | self._requested

    def reconcile(self, plan: Mapping[str, Any] | str | Path | None = None) -> Reconciliation:
        """Put every counted figure beside the closed form, and beside a plan.

        Args:
            plan: A plan file of the same job, or its content.

        Returns:
            Rows for traffic since the start of the run and for memory held now, in bytes per rank.

        Raises:
            SpecError: The plan can't be read, or is for another model, strategy or mesh.
        """
        found = self._reconciled()
        if plan is None:
            return found
        section = read_engine_section(plan)
        sources = self._require_sources()
        check_plan(section, sources.units(), sources.gradients)
        return replace(found, rows=beside_plan(found.rows, section, self.num_steps))

    def _reconciled(self) -> Reconciliation:
        computed, counted = self.computed_traffic(), self.sent_by_collective()
        rows = [
            ReconciliationRow(
                section="traffic",
                name=f"{key[0]} over {key[1]}",
                computed=computed.get(key, 0),
                counted=counted.get(key, 0),
                reason=_traffic_reason(key, computed.get(key, 0), counted.get(key, 0)),
            )
            for key in sorted({*computed, *counted})
        ]
        held, planned = self.memory, self.computed_memory
        rows += [
            ReconciliationRow(
                section="memory",
                name=name.replace("_", " "),
                computed=planned[name],
                counted=held[name],
                reason="" if planned[name] == held[name] else _MEMORY_REASONS.get(name, ""),
            )
            for name in held
            if held[name] or planned[name]
        ]
        return Reconciliation(tuple(rows), self._counts, self.num_steps)

    def _require_sources(self) -> LedgerSources:
        assert self._sources is not None, "the ledger is attached when the model is sharded"
        return self._sources

    def _optimizer_state_bytes(self) -> int:
        sources = self._require_sources()
        ours = {id(p) for unit in sources.units() for p in unit.parameters}
        total = 0
        for optimizer in sources.optimizers():
            for parameter, state in optimizer.state.items():
                if id(parameter) in ours:
                    total += sum(
                        v.numel() * v.element_size()
                        for v in state.values()
                        if isinstance(v, torch.Tensor)
                    )
        return total

    def _computed_optimizer_state_bytes(self) -> int:
        """State of the optimizers whose per-element cost is known, over this rank's shards."""
        sources = self._require_sources()
        ours = {id(p) for unit in sources.units() for p in unit.parameters}
        total = 0
        for optimizer in sources.optimizers():
            for group in optimizer.param_groups:
                copies, has_step = _state_per_element(optimizer, group)
                for parameter in group["params"]:
                    if id(parameter) in ours and parameter in optimizer.state:
                        total += copies * parameter.numel() * parameter.element_size()
                        total += 4 * has_step
        return total


_MEMORY_REASONS = {
    "parameter_slots": "units found to overlap were given slots of their own",
    "optimizer_state": "no closed form for this optimizer",
}


def _traffic_reason(key: tuple[str, str], computed: int, counted: int) -> str:
    if computed == counted:
        return ""
    if key[0] == "all_gather":
        return "passes in another order than the first, recomputation, or passes left half-way"
    return "units called several times per pass, or parts of the model trained in turn"


def _state_per_element(
    optimizer: torch.optim.Optimizer, group: dict[str, object]
) -> tuple[int, bool]:
    """``(tensors per parameter, whether a 4-byte step count is kept)`` of known optimizers."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return (3 if group.get("amsgrad") else 2), True
    if isinstance(optimizer, torch.optim.Muon):
        return 1, False
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(group.get("momentum"))), False
    return 0, False
