"""One step as discrete events: the policy's actions, replayed over lanes and links.

A lane does one thing at a time, in the order the actions come. The host runs ahead of the device,
so a gather starts as soon as its lane, its link and its slot are free; computation waits for what
it needs. Collectives whose groups use the same link take turns on it.

    compute  | F0 | F1 | F2 |         B2 | B1 | B0 | step
    gather   |G1|G2 |                |G1|G0 |
    reduce   |                            |R2 |R1 |R0 |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.core.policy import Action, Op

__all__ = ["Mark", "Timeline", "UnitCost", "replay"]

_LANES = ("gather", "reduce", "replicate")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCost:
    """What one unit costs.

    Attributes:
        forward_s: Its forward on the compute lane.
        backward_s: Its backward, recomputation included.
        gather_s: A gather over the shard axis.
        reduce_s: A reduction over the shard axis.
        replicate_s: A reduction over the replicate axis.
        refresh_s: A gather over the replicate axis.
        slot: Slot of its gathered parameters.
        gradient_slot: Slot of its gradient buffer.
        kept_bytes: Activations it keeps from forward to backward.
        working_bytes: Further activations alive while its backward runs.
    """

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float
    replicate_s: float
    refresh_s: float
    slot: int
    gradient_slot: int
    kept_bytes: float
    working_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Totals at one instant, in seconds."""

    end_s: float
    compute_s: float
    busy_s: dict[str, float]
    exposed_s: dict[str, float]


@dataclass(kw_only=True, slots=True)
class Timeline:
    """What a replay found.

    Attributes:
        end_s: When the last action ended.
        compute_s: Time the compute lane worked.
        busy_s: Time collectives took, by ``"gather"``, ``"reduce"`` and ``"replicate"``.
        exposed_s: Time the compute lane waited for them, by the same names.
        marks: Totals at the end of each micro-batch's backward: time, time computed, time of
            collectives and time waited for them.
        activation_bytes: ``(time, bytes)`` after each change of what activations hold.
    """

    end_s: float = 0.0
    compute_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_LANES, 0.0))
    exposed_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_LANES, 0.0))
    marks: list[Mark] = field(default_factory=list)
    activation_bytes: list[tuple[float, float]] = field(default_factory=list)


class _Replay:
    """State of one replay."""

    def __init__(
        self, costs: Mapping[str, UnitCost], links: Mapping[str, str], *, overlaps: bool
    ) -> None:
        self.costs = costs
        self.links = links  # lane -> link its groups use
        self.overlaps = overlaps
        self.overlaps_replicas = True
        self.postponed_s = 0.0  # reductions over replicas that wait for the end of backward
        self.timeline = Timeline()
        self.compute_free = 0.0
        self.lane_free = dict.fromkeys(_LANES, 0.0)
        self.link_free: dict[str, float] = {}
        self.slot_free: dict[int, float] = {}
        self.gradient_slot_free: dict[int, float] = {}
        self.gathered_at: dict[str, float] = {}
        self.open: list[str] = []  # units whose backward has begun and whose time is not spent yet
        self.backward_done: dict[str, float] = {}
        self.reduced_at: dict[str, float] = {}
        self.last_reduction = ("reduce", 0.0)
        self.root = ""
        self.is_root_done = False  # whether what only the loss needs is released
        self.held = 0.0

    def collective(self, lane: str, ready: float, seconds: float) -> float:
        """Run a collective as soon as its lane and link allow; returns when it ends."""
        if seconds <= 0:
            return ready
        link = self.links[lane]
        start = max(ready, self.lane_free[lane], self.link_free.get(link, 0.0))
        if not self.overlaps:
            start = max(start, self.compute_free)
        end = start + seconds
        self.lane_free[lane] = self.link_free[link] = end
        self.timeline.busy_s[lane] += seconds
        if not self.overlaps:
            self.timeline.exposed_s[lane] += end - self.compute_free
            self.compute_free = end
        return end

    def compute(self, seconds: float, waits: Sequence[tuple[str, float]]) -> None:
        """Run on the compute lane after what it waits for."""
        start = self.compute_free
        for lane, ready in waits:
            if ready > start:
                self.timeline.exposed_s[lane] += ready - start
                start = ready
        self.compute_free = start + seconds
        self.timeline.compute_s += seconds

    def mark(self) -> None:
        """Note the totals at the end of a micro-batch."""
        timeline = self.timeline
        timeline.marks.append(
            Mark(
                end_s=self.compute_free,
                compute_s=timeline.compute_s,
                busy_s=dict(timeline.busy_s),
                exposed_s=dict(timeline.exposed_s),
            )
        )

    def hold(self, num_bytes: float) -> None:
        """Note a change of what activations hold, now on the compute lane."""
        self.held += num_bytes
        self.timeline.activation_bytes.append((self.compute_free, self.held))


def replay(
    actions: Sequence[Action],
    costs: Mapping[str, UnitCost],
    *,
    links: Mapping[str, str],
    step_s: float,
    overlaps: bool = True,
    overlaps_replicas: bool = True,
) -> Timeline:
    """Replay the actions of a step.

    Args:
        actions: As the policy gave them.
        costs: By unit name.
        links: Name of the link each lane's groups use; equal names take turns.
        step_s: Time of the optimizer step on the compute lane.
        overlaps: Whether collectives run beside computation.
        overlaps_replicas: Whether reductions over replicas begin before backward ends.
    """
    state = _Replay(costs, links, overlaps=overlaps)
    state.overlaps_replicas = overlaps_replicas
    micro_batch = 0
    for action in actions:
        if action.op is not Op.STEP and action.micro_batch != micro_batch:
            micro_batch = action.micro_batch
            _end_all(state)
            state.mark()
        _HANDLERS[action.op](state, action)
    _end_all(state)
    state.mark()
    if state.postponed_s:
        end = state.collective("replicate", state.compute_free, state.postponed_s)
        state.last_reduction = ("replicate", end)
    lane, ready = state.last_reduction
    state.compute(step_s, [(lane, ready)])
    state.timeline.end_s = state.compute_free
    return state.timeline


def _unshard(state: _Replay, action: Action) -> None:
    cost = state.costs[action.unit]
    if action.axis == "replicate":
        end = state.collective("replicate", 0.0, cost.refresh_s)
    else:
        ready = max(state.slot_free.get(cost.slot, 0.0), state.gathered_at.get(action.unit, 0.0))
        end = state.collective("gather", ready, cost.gather_s)
    state.gathered_at[action.unit] = end


def _forward(state: _Replay, action: Action) -> None:
    cost = state.costs[action.unit]
    state.root = state.root or action.unit
    state.compute(cost.forward_s, [("gather", state.gathered_at.get(action.unit, 0.0))])
    state.hold(cost.kept_bytes)


def _reshard(state: _Replay, action: Action) -> None:
    _end_backward(state, action.unit)
    state.slot_free[state.costs[action.unit].slot] = state.compute_free


def _backward(state: _Replay, action: Action) -> None:
    """Note that backward entered; its time is spent when its gradients are there."""
    if action.unit != state.root:  # the root encloses the others
        for unit in [unit for unit in state.open if unit != state.root]:
            _end_backward(state, unit)
        if state.root in state.open and not state.is_root_done:
            state.is_root_done = True  # the loss is the first thing backward is through with
            state.hold(-state.costs[state.root].working_bytes)
    cost = state.costs[action.unit]
    state.open.append(action.unit)
    waits = [
        ("gather", state.gathered_at.get(action.unit, 0.0)),
        ("reduce", state.gradient_slot_free.get(cost.gradient_slot, 0.0)),
    ]
    state.compute(0.0, waits)
    state.hold(cost.working_bytes)


def _end_backward(state: _Replay, unit: str) -> None:
    if unit not in state.open:
        return
    cost = state.costs[unit]
    state.open.remove(unit)
    state.compute(cost.backward_s, ())
    is_released = unit == state.root and state.is_root_done
    state.hold(-cost.kept_bytes - (0.0 if is_released else cost.working_bytes))
    state.is_root_done = state.is_root_done and unit != state.root
    state.backward_done[unit] = state.compute_free


def _end_all(state: _Replay) -> None:
    for unit in reversed(state.open[:]):
        _end_backward(state, unit)


def _reduce(state: _Replay, action: Action) -> None:
    _end_backward(state, action.unit)
    cost = state.costs[action.unit]
    end = state.collective(
        "reduce", state.backward_done.get(action.unit, state.compute_free), cost.reduce_s
    )
    state.gradient_slot_free[cost.gradient_slot] = end
    state.reduced_at[action.unit] = end
    if end >= state.last_reduction[1]:
        state.last_reduction = ("reduce", end)


def _replicate(state: _Replay, action: Action) -> None:
    cost = state.costs[action.unit]
    if not state.overlaps_replicas:
        state.postponed_s += cost.replicate_s
        return
    ready = state.reduced_at.get(action.unit, state.compute_free)
    end = state.collective("replicate", ready, cost.replicate_s)
    if end >= state.last_reduction[1]:
        state.last_reduction = ("replicate", end)


def _step(state: _Replay, action: Action) -> None:
    """The optimizer step is added by `replay`."""


_HANDLERS = {
    Op.UNSHARD: _unshard,
    Op.FORWARD: _forward,
    Op.RESHARD: _reshard,
    Op.BACKWARD: _backward,
    Op.REDUCE: _reduce,
    Op.REPLICATE: _replicate,
    Op.STEP: _step,
}
