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
    """

    name: str
    slot: int
    gathered: Gathered


@lru_cache(maxsize=512)
def make_schedule(
    units: tuple[ScheduleUnit, ...],
    *,
    gradients: Gradients,
    replicas: int,
    optimizer_over_replicas: bool,
    forward_prefetch: int,
    backward_prefetch: int,
    micro_batches: int,
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
        has_root_head: Whether the root itself computes what comes out, as with a shared head, so
            that backward reaches it first; else the last unit's outputs are the root's.
    """
    policy = Policy(
        tuple(
            PolicyUnit(
                name=unit.name,
                slot=unit.slot,
                parent=None if i == 0 else 0,
                trainable=True,
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
            max_in_flight=max(2, forward_prefetch, backward_prefetch),
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
    inner = range(1, len(units))
    for micro_batch in range(micro_batches):
        policy.is_last_micro_batch = micro_batch == micro_batches - 1
        policy.forward_enter(0)
        for unit in inner:
            policy.forward_enter(unit)
            policy.forward_exit(unit, expects_backward=True)
        policy.forward_exit(0, expects_backward=True)
        if has_root_head or not inner:
            policy.backward_enter(0)
        for unit in reversed(inner):
            policy.backward_enter(unit)
            if unit == inner[-1]:
                policy.backward_enter(0)
            policy.backward_exit(unit)
        policy.backward_exit(0)
        policy.backward_end()
    policy.step(range(len(units)))
