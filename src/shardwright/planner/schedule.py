"""The engine's own policy, driven by synthetic events: which action follows which.

`runtime/engine.py` feeds the policy what hooks notice; here the same calls are made in the order a
decoder makes them; recomputation happens inside a block's backward, unseen by the policy. So what
is simulated and what a run records agree by construction, and a test compares them. Schedules
depend on counts and settings only and are remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwright.core.policy import Action, Policy, PolicySettings, PolicyUnit
from shardwright.core.strategy import Gathered, Gradients

__all__ = ["ScheduleUnit", "make_schedule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleUnit:
    """What the policy wants to know of a unit.

    Attributes:
        name: Its name.
        slot: Slot of its gathered parameters.
        gathered: How long it stays gathered.
        parent: Index of the unit that encloses it; the root's own is not read.
        trainable: Whether it receives gradients.
    """

    name: str
    slot: int
    gathered: Gathered
    parent: int = 0
    trainable: bool = True


@lru_cache(maxsize=128)  # some 200 kB each, for three micro-batches of 126 blocks
def make_schedule(
    units: tuple[ScheduleUnit, ...],
    *,
    gradients: Gradients,
    replicas: int,
    optimizer_over_replicas: bool,
    forward_prefetch: int,
    backward_prefetch: int,
    micro_batches: int,
    backward_prefetch_after: bool = False,
    max_in_flight: int = 2,
    has_root_head: bool = False,
) -> tuple[Action, ...]:
    """All actions of one step.

    Args:
        units: In module order, the root first.
        gradients: Where gradients live between micro-batches.
        replicas: Size of the replicate axis.
        optimizer_over_replicas: Whether the optimizer state is divided over replicas.
        forward_prefetch: Units gathered ahead in forward.
        backward_prefetch: Units gathered ahead in backward.
        micro_batches: Micro-batches of the step.
        backward_prefetch_after: Gather ahead after a unit's backward instead of before it.
        max_in_flight: Bound on gathers started and not yet used.
        has_root_head: Whether the root itself computes what comes out, as with a shared head, so
            that backward reaches it first; else the last unit's outputs are the root's.
    """
    policy = Policy(
        tuple(
            PolicyUnit(
                name=unit.name,
                slot=unit.slot,
                parent=None if i == 0 else unit.parent,
                trainable=unit.trainable,
                gathered=unit.gathered,
            )
            for i, unit in enumerate(units)
        ),
        PolicySettings(
            gradients=gradients,
            replicas=min(replicas, 2),
            optimizer_over_replicas=optimizer_over_replicas,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            backward_prefetch_after=backward_prefetch_after,
            max_in_flight=max_in_flight,
        ),
    )
    _run_step(policy, units, 1, has_root_head)  # the policy prefetches by the order it has seen
    actions: list[Action] = []
    policy.trace = actions
    _run_step(policy, units, micro_batches, has_root_head)
    return tuple(actions)


def _run_step(
    policy: Policy, units: tuple[ScheduleUnit, ...], micro_batches: int, has_root_head: bool
) -> None:
    inner: list[list[int]] = [[] for _ in units]  # units inside each
    for unit in range(1, len(units)):
        inner[units[unit].parent].append(unit)
    outermost = inner[0]
    for micro_batch in range(micro_batches):
        policy.is_last_micro_batch = micro_batch == micro_batches - 1
        policy.forward_enter(0)
        for unit in outermost:
            _run_forward(policy, inner, unit)
        policy.forward_exit(0, expects_backward=True)
        if has_root_head or not outermost:
            policy.backward_enter(0)
        for unit in reversed(outermost):
            _run_backward(policy, inner, unit, enters_root=unit == outermost[-1])
        policy.backward_exit(0)
        policy.backward_end()
    policy.step(index for index, unit in enumerate(units) if unit.trainable)


def _run_forward(policy: Policy, inner: list[list[int]], unit: int) -> None:
    policy.forward_enter(unit)
    for child in inner[unit]:
        _run_forward(policy, inner, child)
    policy.forward_exit(unit, expects_backward=True)


def _run_backward(
    policy: Policy, inner: list[list[int]], unit: int, *, enters_root: bool = False
) -> None:
    policy.backward_enter(unit)
    if enters_root:
        policy.backward_enter(0)
    for child in reversed(inner[unit]):
        _run_backward(policy, inner, child)
    if policy.units[unit].trainable:
        policy.backward_exit(unit)
