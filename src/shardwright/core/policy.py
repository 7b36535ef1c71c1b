"""When to unshard, reshard, reduce and prefetch: a deterministic function from events to actions.

The engine feeds it the events of real hooks and carries the actions out; a simulator feeds it
synthetic events and replays the same actions over modelled lanes and links. So recorded and
simulated actions agree by construction. Strategies enter as data: per unit, how long it stays
gathered; per model, where gradients live between micro-batches and which axes have replicas.

No torch, no clocks, no I/O: every answer follows from the event and the policy's own state.

[Note: residual content] A resharded unit's values stay in its slot until another unit takes it or
the optimizer changes them. Between forward and backward of one micro-batch such a unit is taken up
again without a gather; that is why the last units of a forward pass cost one gather, not two.
After a backward, or a forward without gradients, residual content is forgotten, so that the bytes
of a micro-batch don't depend on the one before it.

[Note: order of backward] Autograd runs, of the nodes that are ready, the one created last. A node
waits only for nodes created after it. So when backward enters a unit, everything created after
that unit's forward has run: windows still open belong to units that enclose it, to units inside it
whose output is its own, or to units whose parameters get no gradient (frozen, unused, or not asked
for), which nothing else would close. `finished_before` and `finished_inside` name them, and
the engine ends their backward as if gradients had come: another rank may have some, and reduce the
unit here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from shardwright.core.errors import LifecycleError, SpecError
from shardwright.core.strategy import Gathered, Gradients

__all__ = ["Action", "Op", "Policy", "PolicySettings", "PolicyUnit"]


class Op(StrEnum):
    """Operations an action may name."""

    UNSHARD = "UNSHARD"
    FORWARD = "FORWARD"
    RESHARD = "RESHARD"
    BACKWARD = "BACKWARD"
    REDUCE = "REDUCE"
    REPLICATE = "REPLICATE"
    SEND = "SEND"
    RECV = "RECV"
    STEP = "STEP"


SHARD = "shard"
REPLICATE = "replicate"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do, printable and parseable: ``3:UNSHARD:layers.0:shard``.

    Attributes:
        op: What.
        unit: Unit name; empty for `Op.STEP`.
        axis: Mesh axis for communication, empty otherwise.
        micro_batch: Index of the micro-batch within the step, from 0.
    """

    op: Op
    unit: str = ""
    axis: str = ""
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.micro_batch}:{self.op.value}:{self.unit}:{self.axis}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` wrote."""
        try:
            micro_batch, op, rest = text.split(":", 2)
            unit, axis = rest.rsplit(":", 1)
            return cls(Op(op), unit, axis, int(micro_batch))
        except ValueError as error:
            raise SpecError(
                f"expected an action such as '0:UNSHARD:layers.3:shard', found {text!r}"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyUnit:
    """One unit as the policy sees it.

    Attributes:
        name: Unit name, unique.
        slot: Slot its gathered parameters use; units that share one are never gathered at once.
        parent: Index of the enclosing unit, or None for the root.
        trainable: Whether any parameter receives gradients.
        gathered: How long it stays gathered once needed.
    """

    name: str
    slot: int
    parent: int | None
    trainable: bool
    gathered: Gathered


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """Settings of the policy.

    Attributes:
        gradients: Where gradients live between micro-batches.
        replicas: Size of the replicate axis.
        optimizer_over_replicas: Whether the optimizer state is divided over replicas, so that
            updated parameters are gathered over that axis once per step.
        forward_prefetch: Units gathered ahead in forward.
        backward_prefetch: Units gathered ahead in backward.
        backward_prefetch_after: Prefetch in backward after a unit's backward (BACKWARD_POST)
            instead of before it (BACKWARD_PRE).
        max_in_flight: Bound on gathers issued and not yet used.
        forgets_on_reshard: Never count on what a resharded unit left in its slot.
    """

    gradients: Gradients
    replicas: int
    optimizer_over_replicas: bool
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    backward_prefetch_after: bool = False
    max_in_flight: int = 2
    forgets_on_reshard: bool = False

    def __post_init__(self) -> None:
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) < 0:
                raise SpecError(f"{name} must be 0 or more, found {getattr(self, name)}")
        if self.max_in_flight < 1:
            raise SpecError(f"max_in_flight must be 1 or more, found {self.max_in_flight}")


class Policy:
    """The state machine: call the method named after the event, carry out what it returns.

    Args:
        units: All units; index 0 is the root, which encloses every other.
        settings: Settings.
    """

    def __init__(self, units: tuple[PolicyUnit, ...], settings: PolicySettings) -> None:
        self.units = units
        self.settings = settings
        self.micro_batch = 0
        self.is_last_micro_batch = True
        self.trace: list[Action] | None = None
        n = len(units)
        self._resident = [False] * n  # the slot holds this unit's current values
        self._held = [False] * n  # unsharded: must not be evicted by a prefetch
        self._windows = [0] * n  # open forward and backward windows
        self._in_flight = [False] * n  # gathered ahead and not yet used
        self._unreduced = [False] * n  # has, or may have, a local gradient to reduce
        self._unreplicated = [False] * n  # reduced over shards, not yet over replicas
        self._stale_over_replicas = [settings.optimizer_over_replicas] * n
        self._slot_unit: dict[int, int] = {}
        self._entered: list[int] = []  # units whose forwards are running, outermost first
        self._sequence: list[int] = []  # units as their forwards began in this pass
        self._previous: list[int] = []  # the same of the pass before
        self._exits: list[int] = []  # units as their forwards ended: backward runs them in reverse
        self._backward_position = 0  # calls in `_exits` that backward has not reached yet
        self._awaits_backward = [False] * n
        self._in_backward: list[int] = []  # units in backward, in the order they were entered
        self._enclosing = [self._find_ancestors(i) for i in range(n)]

    # Events

    def forward_enter(self, unit: int) -> list[Action]:
        """A unit's forward begins."""
        out: list[Action] = []
        self._entered.append(unit)
        if self._in_backward:  # recomputation: the pass it repeats is already recorded
            self._open(unit, out)
            out.append(self._action(Op.FORWARD, unit))
            return self._record(out)
        if not any(self._windows):
            self._start_pass(out)
        position = len(self._sequence)
        self._sequence.append(unit)
        self._enclosing[unit].update(other for other in self._entered if other != unit)
        self._open(unit, out)
        self._prefetch(self._following(unit, position), self.settings.forward_prefetch, out)
        out.append(self._action(Op.FORWARD, unit))
        return self._record(out)

    def forward_exit(self, unit: int, *, expects_backward: bool) -> list[Action]:
        """A unit's forward ended.

        Args:
            unit: Index of the unit.
            expects_backward: Whether a backward may follow for this call.
        """
        out: list[Action] = []
        self._windows[unit] -= 1
        self._entered.remove(unit)
        if not self._in_backward:
            self._exits.append(unit)
            self._backward_position = len(self._exits)
        if expects_backward:
            self._awaits_backward[unit] = True
            self._unreduced[unit] = self._unreduced[unit] or self.units[unit].trainable
        if self._windows[unit] == 0:
            keeps = self.units[unit].gathered
            if keeps is Gathered.USE or (keeps is Gathered.BACKWARD and not expects_backward):
                self._reshard(unit, out, forget=not expects_backward)
        if not any(self._windows):
            self._drop_unused(out)
        return self._record(out)

    def backward_enter(self, unit: int) -> list[Action]:
        """The first gradient of a unit's outputs is about to be propagated."""
        if unit in self._in_backward:
            return []
        out: list[Action] = []
        for finished in self.finished_before(unit):
            self._close_backward(finished, out)
        self._in_backward.append(unit)
        self._awaits_backward[unit] = False
        self._unreduced[unit] = self._unreduced[unit] or self.units[unit].trainable
        self._find_in_exits(unit)
        self._open(unit, out)
        if not self.settings.backward_prefetch_after:
            self._prefetch(self._preceding(), self.settings.backward_prefetch, out)
        out.append(self._action(Op.BACKWARD, unit))
        return self._record(out)

    def backward_exit(self, unit: int, *, is_last_call: bool = True) -> list[Action]:
        """All gradients of a unit's parameters are there.

        Args:
            unit: Index of the unit.
            is_last_call: Whether no other call of the unit awaits its backward: whole gradients,
                and sums over replicas, are reduced once, after the last.
        """
        out: list[Action] = []
        is_sharded = self.settings.gradients is Gradients.SHARDED
        ends_unit = self.is_last_micro_batch and is_last_call
        if self.units[unit].trainable:
            self._unreduced[unit] = True
            if is_sharded or ends_unit:
                self._reduce(unit, out)
            if ends_unit:
                self._replicate(unit, out)
        keeps = self.units[unit].gathered is Gathered.BACKWARD and not is_last_call
        self._close_backward(unit, out, keeps=keeps)
        if self.settings.backward_prefetch_after:
            self._prefetch(self._preceding(), self.settings.backward_prefetch, out)
        return self._record(out)

    def backward_end(self) -> list[Action]:
        """The whole backward ended: settle what never fired."""
        out: list[Action] = []
        for unit in reversed(range(len(self.units))):
            if self.is_last_micro_batch:
                if self._unreduced[unit]:
                    self._reduce(unit, out)
                self._replicate(unit, out)
            if unit in self._in_backward or self._awaits_backward[unit]:
                self._close_backward(unit, out)
            self._awaits_backward[unit] = False
        self._drop_unused(out)
        self._backward_position = len(self._exits)
        self.micro_batch = 0 if self.is_last_micro_batch else self.micro_batch + 1
        return self._record(out)

    def step(self, changed: Iterable[int]) -> list[Action]:
        """The optimizer changed parameters.

        Args:
            changed: Indices of the units it may have changed.
        """
        out = [Action(Op.STEP)]
        for unit in changed:
            if self._held[unit]:
                self._reshard(unit, out, forget=True)
            self._resident[unit] = False
            self._stale_over_replicas[unit] = self.settings.optimizer_over_replicas
        return self._record(out)

    def abort(self) -> None:
        """Forget open windows, gathered content and gradients, after an exception."""
        n = len(self.units)
        for flags in (
            self._resident,
            self._held,
            self._in_flight,
            self._awaits_backward,
        ):
            flags[:] = [False] * n
        self._unreduced = [False] * n
        self._unreplicated = [False] * n
        self._windows = [0] * n
        self._slot_unit.clear()
        self._entered, self._sequence, self._exits = [], [], []
        self._in_backward = []
        self._backward_position = 0
        self.micro_batch = 0

    # What the engine and the ledger ask

    def is_open(self, unit: int) -> bool:
        """Whether a forward or backward window of the unit is open."""
        return self._windows[unit] > 0

    def finished_before(self, entering: int | None) -> list[int]:
        """Units whose backward no gradient has ended, though it is over, innermost first.

        They must leave as if their gradients had come: other ranks may have used parameters that
        this one did not, and reduce the unit here; see [Note: order of backward].

        Args:
            entering: The unit backward is about to enter; None at the end of backward.
        """
        waiting = self._in_backward[::-1]
        if entering is None:
            return waiting
        around = self._enclosing[entering] | {entering}
        return [u for u in waiting if u not in around and entering not in self._enclosing[u]]

    def finished_inside(self, leaving: int) -> list[int]:
        """The same where all gradients of a unit have come: those that it doesn't lie in.

        Args:
            leaving: The unit whose backward is about to end.
        """
        around = self._enclosing[leaving] | {leaving}
        return [u for u in self._in_backward[::-1] if u not in around]

    def is_any_open(self) -> bool:
        """Whether any window is open."""
        return any(self._windows)

    def is_held(self, unit: int) -> bool:
        """Whether the unit is unsharded, or being gathered."""
        return self._held[unit]

    def move(self, unit: int, slot: int) -> None:
        """Give a unit another slot, for units found to overlap."""
        old = self.units[unit]
        if self._slot_unit.get(old.slot) == unit:
            del self._slot_unit[old.slot]
        self._resident[unit] = self._held[unit] = False
        moved = PolicyUnit(
            name=old.name,
            slot=slot,
            parent=old.parent,
            trainable=old.trainable,
            gathered=old.gathered,
        )
        self.units = (*self.units[:unit], moved, *self.units[unit + 1 :])

    def blocking_unit(self, unit: int) -> int | None:
        """The unit that is open in this unit's slot, if another is."""
        holder = self._slot_unit.get(self.units[unit].slot)
        if holder is None or holder == unit or self._windows[holder] == 0:
            return None
        return holder

    # Transitions

    def _start_pass(self, out: list[Action]) -> None:
        if self._sequence:
            self._previous, self._sequence, self._exits = self._sequence, [], []
            self._backward_position = 0
        for unit, stale in enumerate(self._stale_over_replicas):
            if stale:
                self._stale_over_replicas[unit] = False
                out.append(self._action(Op.UNSHARD, unit, REPLICATE))

    def _open(self, unit: int, out: list[Action]) -> None:
        self._unshard(unit, out)
        self._in_flight[unit] = False
        self._windows[unit] += 1

    def _unshard(self, unit: int, out: list[Action]) -> None:
        if not self._resident[unit]:
            holder = self.blocking_unit(unit)
            if holder is not None:
                raise LifecycleError(
                    f"unit {self.units[unit].name!r} cannot unshard: slot "
                    f"{self.units[unit].slot} is in use by {self.units[holder].name!r}. Units "
                    "that compute at the same time need slots of their own; keep one of them "
                    "gathered with residency=[...]."
                )
            slot = self.units[unit].slot
            evicted = self._slot_unit.get(slot)
            if evicted is not None and evicted != unit:
                self._resident[evicted] = self._held[evicted] = False
                self._in_flight[evicted] = False
            self._slot_unit[slot] = unit
            self._resident[unit] = True
            out.append(self._action(Op.UNSHARD, unit, SHARD))
        self._held[unit] = True

    def _reshard(self, unit: int, out: list[Action], *, forget: bool) -> None:
        if self._held[unit]:
            self._held[unit] = False
            out.append(self._action(Op.RESHARD, unit))
        if forget or self.settings.forgets_on_reshard:
            self._resident[unit] = False

    def _reduce(self, unit: int, out: list[Action]) -> None:
        self._unreduced[unit] = not self.is_last_micro_batch
        self._unreplicated[unit] = self.settings.replicas > 1
        out.append(self._action(Op.REDUCE, unit, SHARD))

    def _replicate(self, unit: int, out: list[Action]) -> None:
        if self._unreplicated[unit]:
            self._unreplicated[unit] = False
            out.append(self._action(Op.REPLICATE, unit, REPLICATE))

    def _close_backward(self, unit: int, out: list[Action], *, keeps: bool = False) -> None:
        if unit in self._in_backward:
            self._in_backward.remove(unit)
            self._windows[unit] -= 1
        keeps = keeps or self.units[unit].gathered is Gathered.STEP
        if self._windows[unit] == 0 and not keeps:
            self._reshard(unit, out, forget=True)

    def _drop_unused(self, out: list[Action]) -> None:
        for unit, is_in_flight in enumerate(self._in_flight):
            if is_in_flight:
                self._in_flight[unit] = False
                self._reshard(unit, out, forget=True)

    # Prediction

    def _following(self, unit: int, position: int) -> list[int]:
        """Units that followed this one in the previous forward pass, nearest first."""
        previous = self._previous
        if position >= len(previous) or previous[position] != unit:
            if unit not in previous:
                return []
            position = previous.index(unit)
        return previous[position + 1 : position + 1 + self.settings.forward_prefetch]

    def _find_in_exits(self, unit: int) -> None:
        """Note how far back in the forward pass backward has come."""
        exits, position = self._exits, self._backward_position
        while position > 0 and exits[position - 1] != unit:
            position -= 1
        if position > 0:
            self._backward_position = position - 1

    def _preceding(self) -> list[int]:
        """Units whose forwards ended before the one backward has reached, nearest first."""
        position = self._backward_position
        return self._exits[max(0, position - self.settings.backward_prefetch) : position][::-1]

    def _prefetch(self, candidates: Iterable[int], distance: int, out: list[Action]) -> None:
        if not distance:
            return
        wanted_sooner: set[int] = set()
        for unit in candidates:
            slot = self.units[unit].slot
            if sum(self._in_flight) >= self.settings.max_in_flight or slot in wanted_sooner:
                return
            wanted_sooner.add(slot)
            if self._resident[unit]:
                continue
            slot_unit = self._slot_unit.get(slot)
            if slot_unit is not None and self._held[slot_unit]:
                return
            self._unshard(unit, out)
            self._in_flight[unit] = True

    def _find_ancestors(self, unit: int) -> set[int]:
        found = []
        parent = self.units[unit].parent
        while parent is not None:
            found.append(parent)
            parent = self.units[parent].parent
        return set(found)

    def _action(self, op: Op, unit: int, axis: str = "") -> Action:
        return Action(op, self.units[unit].name, axis, self.micro_batch)

    def _record(self, actions: list[Action]) -> list[Action]:
        if self.trace is not None:
            self.trace.extend(actions)
        return actions
