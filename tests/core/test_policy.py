"""The policy, fed synthetic events: exact action traces, and counts against closed forms.

Models are a root and blocks in a row unless a test says otherwise. A call is written as
``(unit, calls inside it)``; backward runs the calls of a forward in reverse, as autograd does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

import pytest

from shardwright.core.errors import LifecycleError, SpecError
from shardwright.core.policy import Action, Op, Policy, PolicySettings, PolicyUnit
from shardwright.core.strategy import Gathered, Gradients

Call = tuple[int, tuple["Call", ...]]

USE, BACKWARD, STEP = Gathered.USE, Gathered.BACKWARD, Gathered.STEP
WHOLE, SHARDED = Gradients.WHOLE, Gradients.SHARDED


def unit(
    name: str,
    slot: int,
    parent: int | None = 0,
    *,
    trainable: bool = True,
    gathered: Gathered = USE,
) -> PolicyUnit:
    return PolicyUnit(name=name, slot=slot, parent=parent, trainable=trainable, gathered=gathered)


def stack(num_blocks: int, num_slots: int, gathered: Gathered = USE) -> list[PolicyUnit]:
    """A root in slot 0 and blocks b1, b2, ... that take turns in the other slots."""
    return [
        unit("root", 0, None, gathered=gathered),
        *(
            unit(f"b{i}", 1 + (i - 1) % num_slots, gathered=gathered)
            for i in range(1, num_blocks + 1)
        ),
    ]


def in_a_row(num_blocks: int) -> Call:
    return 0, tuple((i, ()) for i in range(1, num_blocks + 1))


class Run:
    """Feeds events to a policy as the hooks of a model would.

    Attributes:
        policy: The policy.
        computed: Units in the order they computed, forward and backward.
        ahead: Units gathered ahead, each with how many had computed by then.
        most_ahead: Largest number of units that were gathered ahead at once.
    """

    def __init__(
        self,
        units: Iterable[PolicyUnit],
        *,
        gradients: Gradients = SHARDED,
        replicas: int = 1,
        optimizer_over_replicas: bool = False,
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        **settings: int,
    ) -> None:
        self.policy = Policy(
            tuple(units),
            PolicySettings(
                gradients=gradients,
                replicas=replicas,
                optimizer_over_replicas=optimizer_over_replicas,
                forward_prefetch=forward_prefetch,
                backward_prefetch=backward_prefetch,
                **settings,
            ),
        )
        self.policy.trace = []
        self.computed: list[str] = []
        self.ahead: list[tuple[str, int]] = []
        self.most_ahead = 0
        self._in_flight: set[str] = set()
        self._outstanding: Counter[int] = Counter()

    def forward(self, call: Call, *, training: bool = True) -> None:
        index, inner = call
        self._note(self.policy.forward_enter(index), opened=self.policy.units[index].name)
        for other in inner:
            self.forward(other, training=training)
        self._note(self.policy.forward_exit(index, expects_backward=training))
        self._outstanding[index] += training

    def backward(self, call: Call) -> None:
        self.propagate(call)
        self._note(self.policy.backward_end())

    def propagate(self, call: Call) -> None:
        index, inner = call
        self._note(self.policy.backward_enter(index), opened=self.policy.units[index].name)
        for other in reversed(inner):
            self.propagate(other)
        self._outstanding[index] -= 1
        if self.policy.units[index].trainable:
            is_last_call = self._outstanding[index] == 0
            self._note(self.policy.backward_exit(index, is_last_call=is_last_call))

    def _note(self, actions: list[Action], opened: str = "") -> None:
        """Keep account of what computed and of what was gathered ahead of its use."""
        self._in_flight.discard(opened)
        self.computed += [a.unit for a in actions if a.op in (Op.FORWARD, Op.BACKWARD)]
        for action in actions:
            if action.op is Op.RESHARD:
                self._in_flight.discard(action.unit)
            elif action.op is Op.UNSHARD and action.axis == "shard" and action.unit != opened:
                self._in_flight.add(action.unit)
                self.ahead.append((action.unit, len(self.computed)))
        self.most_ahead = max(self.most_ahead, len(self._in_flight))

    def train(self, call: Call, *, micro_batches: int = 1) -> None:
        """Run all micro-batches of a step, and the optimizer."""
        for i in range(micro_batches):
            self.policy.is_last_micro_batch = i == micro_batches - 1
            self.forward(call)
            self.backward(call)
        self.step()

    def step(self, changed: Iterable[int] | None = None) -> None:
        self.policy.step(range(len(self.policy.units)) if changed is None else changed)

    def evaluate(self, call: Call) -> None:
        self.forward(call, training=False)

    def take(self) -> list[Action]:
        """The actions since the last call of this."""
        assert self.policy.trace is not None
        taken, self.policy.trace = self.policy.trace, []
        return taken

    def take_text(self) -> list[str]:
        return [str(action) for action in self.take()]


def count(actions: Iterable[Action], op: Op, axis: str | None = None) -> int:
    return sum(a.op is op and axis in (None, a.axis) for a in actions)


def per_unit(actions: Iterable[Action], op: Op) -> dict[str, int]:
    return dict(Counter(a.unit for a in actions if a.op is op))


# --- exact traces ------------------------------------------------------------------------------


def test_a_stack_gathered_for_use_only_is_gathered_again_in_backward_but_for_the_last_block() -> (
    None
):
    run = Run(stack(2, 1))
    run.train(in_a_row(2))
    assert run.take_text() == [
        "0:UNSHARD:root:shard",
        "0:FORWARD:root:",
        "0:UNSHARD:b1:shard",
        "0:FORWARD:b1:",
        "0:RESHARD:b1:",
        "0:UNSHARD:b2:shard",
        "0:FORWARD:b2:",
        "0:RESHARD:b2:",
        "0:RESHARD:root:",
        "0:BACKWARD:root:",
        "0:BACKWARD:b2:",
        "0:REDUCE:b2:shard",
        "0:RESHARD:b2:",
        "0:UNSHARD:b1:shard",
        "0:BACKWARD:b1:",
        "0:REDUCE:b1:shard",
        "0:RESHARD:b1:",
        "0:REDUCE:root:shard",
        "0:RESHARD:root:",
        "0:STEP::",
    ]


def test_units_kept_from_forward_to_backward_are_gathered_once_per_micro_batch() -> None:
    run = Run(stack(1, 1, BACKWARD))
    run.train(in_a_row(1), micro_batches=2)
    one = [
        "UNSHARD:root:shard",
        "FORWARD:root:",
        "UNSHARD:b1:shard",
        "FORWARD:b1:",
        "BACKWARD:root:",
        "BACKWARD:b1:",
        "REDUCE:b1:shard",
        "RESHARD:b1:",
        "REDUCE:root:shard",
        "RESHARD:root:",
    ]
    assert run.take_text() == [f"0:{x}" for x in one] + [f"1:{x}" for x in one] + ["0:STEP::"]


def test_units_kept_through_the_step_are_released_by_the_optimizer() -> None:
    run = Run(stack(1, 1, STEP), gradients=WHOLE)
    run.train(in_a_row(1), micro_batches=2)
    assert run.take_text() == [
        "0:UNSHARD:root:shard",
        "0:FORWARD:root:",
        "0:UNSHARD:b1:shard",
        "0:FORWARD:b1:",
        "0:BACKWARD:root:",
        "0:BACKWARD:b1:",
        "1:FORWARD:root:",
        "1:FORWARD:b1:",
        "1:BACKWARD:root:",
        "1:BACKWARD:b1:",
        "1:REDUCE:b1:shard",
        "1:REDUCE:root:shard",
        "0:STEP::",
        "0:RESHARD:root:",
        "0:RESHARD:b1:",
    ]


def test_from_the_second_pass_on_the_next_unit_is_gathered_ahead() -> None:
    run = Run(stack(3, 2), forward_prefetch=1, backward_prefetch=1)
    run.train(in_a_row(3))
    run.take()
    run.train(in_a_row(3))
    assert run.take_text() == [
        "0:UNSHARD:root:shard",
        "0:UNSHARD:b1:shard",
        "0:FORWARD:root:",
        "0:UNSHARD:b2:shard",
        "0:FORWARD:b1:",
        "0:RESHARD:b1:",
        "0:UNSHARD:b3:shard",
        "0:FORWARD:b2:",
        "0:RESHARD:b2:",
        "0:FORWARD:b3:",
        "0:RESHARD:b3:",
        "0:RESHARD:root:",
        "0:BACKWARD:root:",
        "0:BACKWARD:b3:",
        "0:REDUCE:b3:shard",
        "0:RESHARD:b3:",
        "0:UNSHARD:b1:shard",
        "0:BACKWARD:b2:",
        "0:REDUCE:b2:shard",
        "0:RESHARD:b2:",
        "0:BACKWARD:b1:",
        "0:REDUCE:b1:shard",
        "0:RESHARD:b1:",
        "0:REDUCE:root:shard",
        "0:RESHARD:root:",
        "0:STEP::",
    ]


def test_gradients_go_over_replicas_right_after_the_shards_once_per_step() -> None:
    run = Run(stack(1, 1), replicas=2)
    run.train(in_a_row(1), micro_batches=2)
    reductions = [a for a in run.take_text() if "RE" in a.split(":")[1] and "RESHARD" not in a]
    assert reductions == [
        "0:REDUCE:b1:shard",
        "0:REDUCE:root:shard",
        "1:REDUCE:b1:shard",
        "1:REPLICATE:b1:replicate",
        "1:REDUCE:root:shard",
        "1:REPLICATE:root:replicate",
    ]


def test_updated_parts_are_gathered_over_replicas_before_anything_else() -> None:
    run = Run(stack(2, 1), replicas=2, optimizer_over_replicas=True)
    run.evaluate(in_a_row(2))
    assert run.take_text()[:4] == [
        "0:UNSHARD:root:replicate",
        "0:UNSHARD:b1:replicate",
        "0:UNSHARD:b2:replicate",
        "0:UNSHARD:root:shard",
    ]
    run.evaluate(in_a_row(2))
    assert count(run.take(), Op.UNSHARD, "replicate") == 0
    run.step(changed=[1])
    run.evaluate(in_a_row(2))
    assert [a.unit for a in run.take() if a.axis == "replicate"] == ["b1"]


# --- counts ------------------------------------------------------------------------------------

MODELS = [(1, 1), (2, 1), (3, 2), (5, 1), (5, 2), (5, 3), (6, 4), (2, 4)]
PREFETCHES = [
    (0, 0, False),
    (1, 1, False),
    (1, 1, True),
    (2, 2, False),
    (0, 3, False),
    (2, 0, True),
]


@pytest.mark.parametrize(("num_blocks", "num_slots"), MODELS)
@pytest.mark.parametrize(("forward", "backward", "after"), PREFETCHES)
def test_a_training_pass_gathers_each_block_twice_less_those_still_in_their_slots(
    num_blocks: int, num_slots: int, forward: int, backward: int, after: bool
) -> None:
    run = Run(
        stack(num_blocks, num_slots),
        forward_prefetch=forward,
        backward_prefetch=backward,
        backward_prefetch_after=after,
    )
    expected = 1 + num_blocks + max(0, num_blocks - num_slots)
    for micro_batches in (1, 3, 2):
        run.train(in_a_row(num_blocks), micro_batches=micro_batches)
        assert count(run.take(), Op.UNSHARD) == micro_batches * expected


@pytest.mark.parametrize("num_blocks", [1, 4])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_kept_until_backward_a_unit_is_gathered_once_per_pass_and_until_step_once_per_step(
    num_blocks: int, prefetch: int, micro_batches: int
) -> None:
    for gathered, passes in ((BACKWARD, micro_batches), (STEP, 1)):
        units = stack(num_blocks, num_blocks, gathered)
        run = Run(units, forward_prefetch=prefetch, backward_prefetch=prefetch)
        for _ in range(3):
            run.train(in_a_row(num_blocks), micro_batches=micro_batches)
            assert per_unit(run.take(), Op.UNSHARD) == {u.name: passes for u in units}


@pytest.mark.parametrize("gathered", list(Gathered))
@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_evaluation_gathers_each_unit_once_or_not_at_all_where_nothing_changed(
    gathered: Gathered, prefetch: int
) -> None:
    num_slots = 2 if gathered is USE else 4
    run = Run(stack(4, num_slots, gathered), forward_prefetch=prefetch, backward_prefetch=prefetch)
    for expected in (5, 0 if gathered is STEP else 5):
        run.evaluate(in_a_row(4))
        actions = run.take()
        assert count(actions, Op.UNSHARD) == expected
        assert count(actions, Op.RESHARD) == (0 if gathered is STEP else 5)
        assert count(actions, Op.REDUCE) == 0


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("gathered", list(Gathered))
def test_sharded_gradients_are_reduced_per_micro_batch_and_whole_ones_once_per_step(
    gathered: Gathered, micro_batches: int, replicas: int
) -> None:
    for gradients, times in ((SHARDED, micro_batches), (WHOLE, 1)):
        units = stack(3, 3, gathered)
        run = Run(units, gradients=gradients, replicas=replicas)
        for _ in range(2):
            run.train(in_a_row(3), micro_batches=micro_batches)
            actions = run.take()
            assert per_unit(actions, Op.REDUCE) == {u.name: times for u in units}
            expected = {u.name: 1 for u in units} if replicas > 1 else {}
            assert per_unit(actions, Op.REPLICATE) == expected


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_optimizer_over_replicas_gathers_its_parts_once_per_step(micro_batches: int) -> None:
    run = Run(stack(4, 2), replicas=2, optimizer_over_replicas=True, forward_prefetch=1)
    for _ in range(3):
        run.train(in_a_row(4), micro_batches=micro_batches)
        actions = run.take()
        assert count(actions, Op.UNSHARD, "replicate") == 5
        assert count(actions, Op.UNSHARD, "shard") == micro_batches * 7


def test_without_a_step_an_optimizer_over_replicas_gathers_nothing_twice() -> None:
    run = Run(stack(2, 2), replicas=2, optimizer_over_replicas=True)
    run.forward(in_a_row(2))
    run.backward(in_a_row(2))
    run.take()
    run.forward(in_a_row(2))
    assert count(run.take(), Op.UNSHARD, "replicate") == 0


def test_one_kept_unit_among_others_saves_its_second_gather() -> None:
    units = stack(4, 1)
    units[2] = unit("b2", 2, gathered=BACKWARD)
    run = Run(units)
    run.train(in_a_row(4), micro_batches=2)
    assert per_unit(run.take(), Op.UNSHARD) == {"root": 2, "b1": 4, "b2": 2, "b3": 4, "b4": 2}


def test_an_evaluation_between_forward_and_backward_costs_gathers_and_nothing_else() -> None:
    run = Run(stack(3, 3))
    run.forward(in_a_row(3))
    run.evaluate(in_a_row(3))
    run.take()
    run.backward(in_a_row(3))
    actions = run.take()
    assert per_unit(actions, Op.UNSHARD) == {"root": 1, "b1": 1, "b2": 1, "b3": 1}
    assert per_unit(actions, Op.REDUCE) == {"root": 1, "b1": 1, "b2": 1, "b3": 1}


def test_two_forwards_may_come_before_their_backwards() -> None:
    run = Run(stack(3, 1), gradients=WHOLE, replicas=2)
    run.policy.is_last_micro_batch = False
    run.forward(in_a_row(3))
    run.forward(in_a_row(3))
    run.backward(in_a_row(3))
    run.policy.is_last_micro_batch = True
    run.backward(in_a_row(3))
    actions = run.take()
    # The second forward finds the root in place, the first backward the root and the last block.
    assert per_unit(actions, Op.UNSHARD) == {"root": 2, "b1": 4, "b2": 4, "b3": 3}
    assert per_unit(actions, Op.REDUCE) == per_unit(actions, Op.REPLICATE)
    assert per_unit(actions, Op.REDUCE) == {"root": 1, "b1": 1, "b2": 1, "b3": 1}


def test_micro_batches_are_numbered_within_the_step() -> None:
    run = Run(stack(1, 1))
    for _ in range(2):
        run.train(in_a_row(1), micro_batches=3)
        backwards = [a.micro_batch for a in run.take() if a.op is Op.BACKWARD and a.unit == "b1"]
        assert backwards == [0, 1, 2]


# --- repeated, skipped, nested and frozen units ------------------------------------------------


def test_a_block_called_twice_in_a_row_is_still_there_the_second_time() -> None:
    run = Run(stack(2, 1))
    twice: Call = (0, ((1, ()), (1, ()), (2, ()), (2, ())))
    run.forward(twice)
    assert per_unit(run.take(), Op.UNSHARD) == {"root": 1, "b1": 1, "b2": 1}


@pytest.mark.parametrize("gradients", list(Gradients))
def test_a_unit_called_twice_is_replicated_once_and_whole_gradients_are_reduced_once(
    gradients: Gradients,
) -> None:
    run = Run(stack(2, 2), gradients=gradients, replicas=2)
    run.train((0, ((1, ()), (2, ()), (1, ()))), micro_batches=2)
    actions = run.take()
    # One reduction per call where gradients are sharded: two calls in two micro-batches.
    reductions = 4 if gradients is SHARDED else 1
    assert per_unit(actions, Op.REDUCE)["b1"] == reductions
    assert per_unit(actions, Op.REPLICATE) == {"root": 1, "b1": 1, "b2": 1}
    last = [a.op for a in actions if a.unit == "b1" and a.op in (Op.REDUCE, Op.REPLICATE)][-2:]
    assert last == [Op.REDUCE, Op.REPLICATE]


def test_a_skipped_block_costs_nothing() -> None:
    run = Run(stack(3, 2), forward_prefetch=1, backward_prefetch=1)
    run.train((0, ((1, ()), (3, ()))))
    actions = run.take()
    assert all(a.unit != "b2" for a in actions)
    assert per_unit(actions, Op.REDUCE) == {"root": 1, "b1": 1, "b3": 1}


def test_a_block_skipped_against_expectation_is_dropped_at_the_end_of_the_pass() -> None:
    run = Run(stack(3, 3), forward_prefetch=1)
    run.train(in_a_row(3))
    run.take()
    run.forward((0, ((1, ()), (3, ()))))
    assert run.take_text() == [
        "0:UNSHARD:root:shard",
        "0:UNSHARD:b1:shard",
        "0:FORWARD:root:",
        "0:UNSHARD:b2:shard",  # foreseen, in vain
        "0:FORWARD:b1:",
        "0:RESHARD:b1:",
        "0:UNSHARD:b3:shard",
        "0:FORWARD:b3:",
        "0:RESHARD:b3:",
        "0:RESHARD:root:",
        "0:RESHARD:b2:",
    ]


def test_a_block_that_ran_in_an_earlier_micro_batch_only_takes_part_in_the_last() -> None:
    run = Run(stack(2, 2), replicas=2)
    run.policy.is_last_micro_batch = False
    run.forward(in_a_row(2))
    run.backward(in_a_row(2))
    run.policy.is_last_micro_batch = True
    run.take()
    only_first: Call = (0, ((1, ()),))
    run.forward(only_first)
    run.backward(only_first)
    assert [str(a) for a in run.take() if a.unit == "b2"] == [
        "1:REDUCE:b2:shard",
        "1:REPLICATE:b2:replicate",
    ]


@pytest.mark.parametrize("gradients", list(Gradients))
def test_a_block_whose_output_is_dropped_is_reduced_when_the_backward_ends(
    gradients: Gradients,
) -> None:
    run = Run(stack(2, 2), gradients=gradients, replicas=2)
    run.forward(in_a_row(2))
    run.take()
    run.backward((0, ((1, ()),)))  # the loss doesn't depend on b2
    assert run.take_text()[-2:] == ["0:REDUCE:b2:shard", "0:REPLICATE:b2:replicate"]


def test_nested_units_are_open_while_those_inside_them_run() -> None:
    units = [unit("root", 0, None), unit("outer", 1, 0), unit("inner", 2, 1)]
    run = Run(units)
    run.train((0, ((1, ((2, ()),)),)))
    assert run.take_text() == [
        "0:UNSHARD:root:shard",
        "0:FORWARD:root:",
        "0:UNSHARD:outer:shard",
        "0:FORWARD:outer:",
        "0:UNSHARD:inner:shard",
        "0:FORWARD:inner:",
        "0:RESHARD:inner:",
        "0:RESHARD:outer:",
        "0:RESHARD:root:",
        "0:BACKWARD:root:",
        "0:BACKWARD:outer:",
        "0:BACKWARD:inner:",
        "0:REDUCE:inner:shard",
        "0:RESHARD:inner:",
        "0:REDUCE:outer:shard",
        "0:RESHARD:outer:",
        "0:REDUCE:root:shard",
        "0:RESHARD:root:",
        "0:STEP::",
    ]


def test_a_frozen_block_is_gathered_but_never_reduced_and_closed_by_the_next_backward() -> None:
    units = stack(3, 1)
    units[2] = unit("b2", 1, trainable=False)
    run = Run(units, replicas=2)
    run.train(in_a_row(3), micro_batches=2)
    actions = run.take()
    assert per_unit(actions, Op.UNSHARD) == {"root": 2, "b1": 4, "b2": 4, "b3": 2}
    assert per_unit(actions, Op.REDUCE) == {"root": 2, "b1": 2, "b3": 2}
    assert per_unit(actions, Op.REPLICATE) == {"root": 1, "b1": 1, "b3": 1}
    closing = [str(a) for a in actions].index("0:BACKWARD:b2:")
    assert [str(a) for a in actions[closing + 1 : closing + 3]] == [
        "0:RESHARD:b2:",
        "0:UNSHARD:b1:shard",
    ]


def test_a_frozen_block_at_the_start_is_closed_when_the_backward_ends() -> None:
    units = stack(2, 2)
    units[1] = unit("b1", 1, trainable=False)
    run = Run(units)
    run.forward(in_a_row(2))
    run.propagate(in_a_row(2))
    assert run.policy.is_open(1)
    run.take()
    run.policy.backward_end()
    assert run.take_text() == ["0:RESHARD:b1:"]
    assert not any(run.policy.is_open(i) for i in range(3))


def test_a_frozen_unit_stays_open_while_the_trainable_units_inside_it_run() -> None:
    units = [
        unit("root", 0, None),
        unit("frozen", 1, 0, trainable=False),
        unit("inner", 2, 1),
        unit("other", 1, 0),
    ]
    run = Run(units)
    call: Call = (0, ((3, ()), (1, ((2, ()),))))
    run.forward(call)
    run.policy.backward_enter(0)
    run.policy.backward_enter(1)
    run.policy.backward_enter(2)
    assert run.policy.is_held(1)
    run.policy.backward_exit(2)
    assert run.policy.is_held(1)
    run.policy.backward_enter(3)
    assert not run.policy.is_held(1)
    assert run.policy.is_held(0)


def test_the_second_gradient_of_an_open_unit_changes_nothing() -> None:
    run = Run(stack(1, 1))
    run.forward(in_a_row(1))
    run.policy.backward_enter(0)
    assert run.policy.backward_enter(0) == []


def test_recomputation_opens_units_again_and_is_not_mistaken_for_a_pass() -> None:
    run = Run(stack(2, 2), forward_prefetch=1)
    run.train(in_a_row(2))
    run.forward(in_a_row(2))
    run.policy.backward_enter(0)
    run.policy.backward_enter(2)
    run.policy.backward_exit(2)
    run.take()
    run.forward((1, ()))  # a checkpoint around b1 runs it again, and b2 doesn't follow
    assert run.take_text() == ["0:FORWARD:b1:", "0:RESHARD:b1:"]
    run.policy.backward_enter(1)
    run.policy.backward_exit(1)
    run.policy.backward_exit(0)
    run.policy.backward_end()
    actions = run.take()
    assert count(actions, Op.UNSHARD) == 0  # the recomputed b1 is still in its slot
    assert per_unit(actions, Op.REDUCE) == {"b1": 1, "root": 1}
    run.step()
    run.forward(in_a_row(2))
    assert run.take_text()[2:4] == ["0:UNSHARD:b1:shard", "0:FORWARD:root:"]


# --- prefetch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_nothing_is_foreseen_in_the_first_forward_pass(prefetch: int) -> None:
    run = Run(stack(4, 4), forward_prefetch=prefetch)
    run.forward(in_a_row(4))
    assert run.ahead == []


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("num_blocks", [3, 6])
def test_a_unit_gathered_one_ahead_is_always_the_one_that_computes_next(
    num_blocks: int, num_slots: int
) -> None:
    run = Run(stack(num_blocks, num_slots), forward_prefetch=1, backward_prefetch=1)
    for _ in range(3):
        run.train(in_a_row(num_blocks))
    assert len(run.ahead) == 2 * num_blocks + 3 * (num_blocks - num_slots)
    assert all(run.computed[position] == name for name, position in run.ahead)


def test_what_follows_a_repeated_block_depends_on_which_of_its_calls_it_is() -> None:
    run = Run(stack(3, 3), forward_prefetch=1)
    call: Call = (0, ((1, ()), (2, ()), (1, ()), (3, ())))
    run.forward(call, training=False)
    run.forward(call, training=False)
    assert [name for name, _ in run.ahead] == ["b1", "b2", "b1", "b3"]
    assert all(run.computed[position] == name for name, position in run.ahead)


def test_every_block_is_foreseen_in_forward_and_backward_where_slots_allow() -> None:
    run = Run(stack(5, 2), forward_prefetch=1, backward_prefetch=1)
    run.train(in_a_row(5))
    run.ahead.clear()
    run.train(in_a_row(5))
    forward = ["b1", "b2", "b3", "b4", "b5"]
    backward = ["b3", "b2", "b1"]  # b5 and b4 are still in their slots
    assert [name for name, _ in run.ahead] == forward + backward


def test_one_slot_leaves_room_to_gather_the_first_block_ahead_and_no_other() -> None:
    run = Run(stack(4, 1), forward_prefetch=2, backward_prefetch=2)
    for _ in range(2):
        run.train(in_a_row(4))
    assert [name for name, _ in run.ahead] == ["b1"]


def test_gathering_after_backward_needs_one_slot_only() -> None:
    run = Run(stack(3, 1), backward_prefetch=1, backward_prefetch_after=True)
    run.train(in_a_row(3))
    assert [name for name, _ in run.ahead] == ["b2", "b1"]
    text = run.take_text()
    assert text[text.index("0:BACKWARD:b3:") :] == [
        "0:BACKWARD:b3:",
        "0:REDUCE:b3:shard",
        "0:RESHARD:b3:",
        "0:UNSHARD:b2:shard",
        "0:BACKWARD:b2:",
        "0:REDUCE:b2:shard",
        "0:RESHARD:b2:",
        "0:UNSHARD:b1:shard",
        "0:BACKWARD:b1:",
        "0:REDUCE:b1:shard",
        "0:RESHARD:b1:",
        "0:REDUCE:root:shard",
        "0:RESHARD:root:",
        "0:STEP::",
    ]


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("after", [False, True])
def test_gathers_ahead_never_exceed_their_bound_and_reach_it(
    max_in_flight: int, after: bool
) -> None:
    run = Run(
        stack(8, 5),
        forward_prefetch=4,
        backward_prefetch=4,
        backward_prefetch_after=after,
        max_in_flight=max_in_flight,
    )
    for _ in range(3):
        run.train(in_a_row(8))
    assert run.most_ahead == max_in_flight


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_the_distance_bounds_how_far_ahead_units_are_gathered(distance: int) -> None:
    run = Run(stack(8, 8), forward_prefetch=distance, backward_prefetch=distance, max_in_flight=9)
    for _ in range(3):
        run.train(in_a_row(8))
    assert run.most_ahead == distance


# --- slots -------------------------------------------------------------------------------------


def test_two_units_open_at_once_in_one_slot_are_refused_by_name() -> None:
    run = Run([unit("root", 0, None), unit("encoder", 1, 0), unit("adapter", 1, 1)])
    run.policy.forward_enter(0)
    run.policy.forward_enter(1)
    assert run.policy.blocking_unit(2) == 1
    with pytest.raises(LifecycleError, match="'adapter' cannot unshard: slot 1") as caught:
        run.policy.forward_enter(2)
    assert "in use by 'encoder'" in str(caught.value)
    assert "residency" in str(caught.value)


def test_a_unit_that_found_its_slot_taken_can_be_given_another() -> None:
    run = Run([unit("root", 0, None), unit("encoder", 1, 0), unit("adapter", 1, 1)])
    run.policy.forward_enter(0)
    run.policy.forward_enter(1)
    run.policy.move(2, 2)
    assert run.policy.blocking_unit(2) is None
    run.forward((2, ()))
    run.policy.forward_exit(1, expects_backward=True)
    run.policy.forward_exit(0, expects_backward=True)
    moved = run.policy.units[2]
    assert (moved.name, moved.slot, moved.parent, moved.trainable) == ("adapter", 2, 1, True)
    run.take()
    run.backward((0, ((1, ((2, ()),)),)))
    assert count(run.take(), Op.UNSHARD) == 0  # all three are still in their slots


def test_a_unit_that_moves_leaves_its_values_behind_and_its_slot_free() -> None:
    run = Run(stack(2, 1))
    run.policy.forward_enter(0)
    run.forward((1, ()))
    run.policy.move(1, 7)
    run.take()
    run.forward((1, ()))
    run.forward((2, ()))
    run.forward((1, ()))
    assert per_unit(run.take(), Op.UNSHARD) == {"b1": 1, "b2": 1}


def test_a_unit_is_not_blocked_by_one_that_is_closed_or_by_itself() -> None:
    run = Run(stack(2, 1))
    run.policy.forward_enter(0)
    run.policy.forward_enter(1)
    assert run.policy.blocking_unit(1) is None
    assert run.policy.blocking_unit(2) == 1
    run.policy.forward_exit(1, expects_backward=True)
    assert run.policy.blocking_unit(2) is None


def test_a_gather_ahead_never_takes_the_slot_of_an_open_unit() -> None:
    run = Run(stack(3, 1), forward_prefetch=2, backward_prefetch=2)
    for _ in range(2):
        run.train(in_a_row(3), micro_batches=2)
    is_open = ""
    for action in run.take():
        if action.unit in ("", "root"):
            continue
        if action.op in (Op.FORWARD, Op.BACKWARD):
            is_open = action.unit
        elif action.op is Op.RESHARD:
            is_open = ""
        elif action.op is Op.UNSHARD:
            assert is_open == "", f"{action} while {is_open} computes in that slot"


def test_open_and_held_follow_the_windows() -> None:
    run = Run(stack(1, 1))
    policy = run.policy
    assert (policy.is_open(1), policy.is_held(1)) == (False, False)
    policy.forward_enter(1)
    assert (policy.is_open(1), policy.is_held(1)) == (True, True)
    policy.forward_exit(1, expects_backward=True)
    assert (policy.is_open(1), policy.is_held(1)) == (False, False)
    kept = Run(stack(1, 1, BACKWARD)).policy
    kept.forward_enter(1)
    kept.forward_exit(1, expects_backward=True)
    assert (kept.is_open(1), kept.is_held(1)) == (False, True)


# --- steps and aborts --------------------------------------------------------------------------


@pytest.mark.parametrize("gathered", list(Gathered))
def test_a_step_makes_only_changed_units_be_gathered_anew(gathered: Gathered) -> None:
    run = Run(stack(2, 2, gathered), gradients=WHOLE)
    run.forward(in_a_row(2), training=True)
    run.take()
    run.step(changed=[1])
    run.forward(in_a_row(2), training=True)
    assert per_unit(run.take(), Op.UNSHARD) == {"b1": 1}


@pytest.mark.parametrize("num_events", range(1, 15))
def test_after_an_abort_anywhere_the_next_pass_is_like_the_first(num_events: int) -> None:
    fresh = Run(stack(3, 2), replicas=2, optimizer_over_replicas=True)
    fresh.train(in_a_row(3))
    expected = [text for text in fresh.take_text() if "replicate" not in text]

    run = Run(stack(3, 2), replicas=2, optimizer_over_replicas=True)
    policy = run.policy
    exit_forward = partial(policy.forward_exit, expects_backward=True)
    events = [
        (policy.forward_enter, 0),
        (policy.forward_enter, 1),
        (exit_forward, 1),
        (policy.forward_enter, 2),
        (exit_forward, 2),
        (policy.forward_enter, 3),
        (exit_forward, 3),
        (exit_forward, 0),
        (policy.backward_enter, 0),
        (policy.backward_enter, 3),
        (policy.backward_exit, 3),
        (policy.backward_enter, 2),
        (policy.backward_exit, 2),
        (policy.backward_enter, 1),
    ]
    for event, index in events[:num_events]:
        event(index)
    policy.abort()
    assert not any(policy.is_open(i) or policy.is_held(i) for i in range(4))
    run.take()
    run.train(in_a_row(3))
    assert [text for text in run.take_text() if "replicate" not in text] == expected


def test_an_abort_forgets_gradients_that_were_waiting() -> None:
    run = Run(stack(2, 2), gradients=WHOLE, replicas=2)
    run.policy.is_last_micro_batch = False
    run.forward(in_a_row(2))
    run.backward(in_a_row(2))
    run.policy.abort()
    run.policy.is_last_micro_batch = True
    run.take()
    only_first: Call = (0, ((1, ()),))
    run.forward(only_first)
    run.backward(only_first)
    actions = run.take()
    assert per_unit(actions, Op.REDUCE) == {"root": 1, "b1": 1}
    assert all(a.micro_batch == 0 for a in actions)


# --- what the policy doesn't do yet ------------------------------------------------------------


def test_a_unit_whose_output_the_unit_around_it_returns_stays_open() -> None:
    """Both watch the same tensor, and the hook of the inner one, registered first, runs first."""
    run = Run(stack(1, 1))
    run.forward(in_a_row(1))
    run.policy.backward_enter(1)
    run.policy.backward_enter(0)
    assert run.policy.is_open(1)
    assert run.policy.is_held(1)


def test_gathering_ahead_costs_no_gathers_where_units_nest() -> None:
    units = [
        unit("root", 0, None),
        unit("outer1", 1, 0),
        unit("inner1", 3, 1),
        unit("inner2", 4, 1),
        unit("outer2", 2, 0),
        unit("inner3", 3, 4),
        unit("inner4", 4, 4),
    ]
    call: Call = (0, ((1, ((2, ()), (3, ()))), (4, ((5, ()), (6, ())))))
    plain, ahead = Run(units), Run(units, backward_prefetch=1)
    for run in (plain, ahead):
        run.train(call)
    assert count(ahead.take(), Op.UNSHARD) == count(plain.take(), Op.UNSHARD)


def test_gathering_ahead_costs_no_gathers_where_units_repeat() -> None:
    call: Call = (0, ((1, ()), (2, ()), (3, ()), (2, ())))
    plain, ahead = Run(stack(3, 2)), Run(stack(3, 2), backward_prefetch=1)
    for run in (plain, ahead):
        run.train(call)
    assert count(ahead.take(), Op.UNSHARD) == count(plain.take(), Op.UNSHARD)


@pytest.mark.parametrize("gathered", [USE, BACKWARD])
def test_gathers_of_a_micro_batch_do_not_depend_on_the_one_before(gathered: Gathered) -> None:
    run = Run(stack(2, 2, gathered))
    run.policy.is_last_micro_batch = False
    without_b2: Call = (0, ((1, ()),))
    gathers = []
    for _ in range(2):
        run.forward(in_a_row(2))
        run.backward(without_b2)  # the loss doesn't depend on b2
        gathers.append(per_unit(run.take(), Op.UNSHARD))
    assert gathers[0] == gathers[1]


def test_units_whose_gradients_never_come_are_named_when_backward_goes_past_them() -> None:
    run = Run(stack(3, 3))
    run.forward(in_a_row(3))
    run.policy.backward_enter(0)
    run.policy.backward_enter(3)  # none of its parameters gets a gradient on this rank
    assert run.policy.finished_before(2) == [3]
    run.policy.backward_exit(3)
    run.policy.backward_enter(2)
    assert run.policy.finished_before(1) == [2]
    assert run.policy.finished_before(None) == [2, 0]  # innermost first, the root last


def test_a_unit_that_ends_names_the_open_ones_that_it_does_not_lie_in() -> None:
    units = [unit("root", 0, None), unit("outer", 1), unit("inner", 2, 1), unit("other", 3)]
    run = Run(units)
    run.forward((0, ((1, ((2, ()),)), (3, ()))))
    for index in (0, 3, 1, 2):
        run.policy.backward_enter(index)
    assert run.policy.finished_inside(2) == []
    assert run.policy.finished_inside(1) == [2]
    run.policy.backward_exit(2)
    assert run.policy.finished_inside(1) == []
    assert run.policy.finished_before(None) == [1, 0]


def test_entering_a_backward_is_enough_to_be_reduced_and_a_frozen_unit_never_is() -> None:
    units = [unit("root", 0, None), unit("b1", 1), unit("b2", 2, trainable=False)]
    run = Run(units, gradients=WHOLE)
    run.forward(in_a_row(2))
    run.take()
    for index in (0, 2, 1):
        run.policy.backward_enter(index)
        run.policy.backward_exit(index)
    run.policy.backward_end()
    assert per_unit(run.take(), Op.REDUCE) == {"root": 1, "b1": 1}


# --- actions and settings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Op.UNSHARD, "layers.0", "shard", 3), "3:UNSHARD:layers.0:shard"),
        (Action(Op.FORWARD, "(root)"), "0:FORWARD:(root):"),
        (Action(Op.STEP), "0:STEP::"),
        (Action(Op.REPLICATE, "a", "replicate", 12), "12:REPLICATE:a:replicate"),
    ],
)
def test_an_action_prints_and_parses(action: Action, text: str) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text",
    ["", "UNSHARD", "0:UNSHARD:a", "x:UNSHARD:a:shard", "0:GATHER:a:shard", "0"],
)
def test_what_is_no_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SpecError, match="expected an action such as") as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)


def test_a_policy_records_nothing_unless_asked() -> None:
    run = Run(stack(1, 1))
    run.policy.trace = None
    assert [str(a) for a in run.policy.forward_enter(0)] == [
        "0:UNSHARD:root:shard",
        "0:FORWARD:root:",
    ]
    assert run.policy.trace is None


@pytest.mark.parametrize("name", ["forward_prefetch", "backward_prefetch", "max_in_flight"])
def test_settings_below_their_least_value_are_refused_by_name(name: str) -> None:
    least = 1 if name == "max_in_flight" else 0
    with pytest.raises(SpecError, match=f"{name} must be {least} or more, found {least - 1}"):
        Run(stack(1, 1), **{name: least - 1})
    Run(stack(1, 1), **{name: least})
