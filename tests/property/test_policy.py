"""Random models, passes and orders of events: the policy keeps its promises in all of them.

A `Machine` carries the actions out on imaginary slots, and stops where a unit would compute on
another's values or on old ones, where a slot is taken from a unit that is open, or where a gradient
is left behind. A `Program` produces what hooks and autograd could: nested, repeated and skipped
calls, units called from elsewhere, dropped outputs, unused and frozen units, evaluations in
between, several forwards before their backwards, recomputation, and passes that fail half-way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from random import Random

from hypothesis import event, given, settings
from hypothesis import strategies as st

from shardwright.core.policy import Action, Op, Policy, PolicySettings, PolicyUnit
from shardwright.core.strategy import Gathered, Gradients


@dataclass
class Machine:
    """Carries actions out and checks every one."""

    policy: Policy
    open_windows: Counter[int] = field(default_factory=Counter)
    content: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot: unit, version
    version: list[int] = field(default_factory=list)
    over_replicas: list[int] = field(default_factory=list)  # version gathered over replicas
    ahead: set[int] = field(default_factory=set)  # gathered and not yet used
    num_ahead: int = 0  # in all
    unreduced: set[int] = field(default_factory=set)  # has a gradient that is only local
    reductions: Counter[int] = field(default_factory=Counter)  # of this step
    exits: Counter[int] = field(default_factory=Counter)  # backward exits of this step
    replications: Counter[int] = field(default_factory=Counter)  # of this step

    def __post_init__(self) -> None:
        self.version = [0] * len(self.policy.units)
        self.over_replicas = [-1] * len(self.policy.units)
        self._index = {u.name: i for i, u in enumerate(self.policy.units)}

    def is_in_place(self, unit: int) -> bool:
        slot = self.policy.units[unit].slot
        return self.content.get(slot) == (unit, self.version[unit])

    def carry_out(self, actions: list[Action], *, opened: int | None = None) -> None:
        """Carry out the answer to one event, which may open a window."""
        for action in actions:
            assert Action.parse(str(action)) == action
            if action.op is not Op.STEP:
                self._carry_out(action, self._index[action.unit], opened)
        if opened is not None:
            self.open_windows[opened] += 1
        for unit in range(len(self.version)):
            if self.open_windows[unit]:
                assert self.policy.is_open(unit), f"unit {unit} was closed too early"
            if self.policy.is_open(unit):
                assert self.is_in_place(unit), f"unit {unit} is open but not in place"
                assert self.policy.is_held(unit)
        assert len(self.ahead) <= self.policy.settings.max_in_flight

    def _carry_out(self, action: Action, unit: int, opened: int | None) -> None:
        settings = self.policy.settings
        if action.op is Op.UNSHARD and action.axis == "replicate":
            assert settings.optimizer_over_replicas
            assert self.over_replicas[unit] < self.version[unit], "was gathered already"
            self.over_replicas[unit] = self.version[unit]
        elif action.op is Op.UNSHARD:
            self._gather(unit, opened)
        elif action.op in (Op.FORWARD, Op.BACKWARD):
            assert unit == opened
            assert self.is_in_place(unit), f"{action} would compute on other values"
            self.ahead.discard(unit)
        elif action.op is Op.RESHARD:
            assert not self.open_windows[unit], f"{action} of an open unit"
            self.ahead.discard(unit)
        elif action.op is Op.REDUCE:
            assert self.policy.units[unit].trainable
            self.unreduced.discard(unit)
            self.reductions[unit] += 1
        elif action.op is Op.REPLICATE:
            assert settings.replicas > 1
            assert unit not in self.unreduced, f"{action} of a gradient that is not reduced"
            assert self.policy.is_last_micro_batch
            self.replications[unit] += 1

    def _gather(self, unit: int, opened: int | None) -> None:
        slot = self.policy.units[unit].slot
        holder, _ = self.content.get(slot, (unit, 0))
        assert not self.open_windows[holder], f"slot {slot} is in use by unit {holder}"
        if self.policy.settings.optimizer_over_replicas:
            assert self.over_replicas[unit] == self.version[unit], "parts of it are old"
        self.ahead.discard(holder)
        self.content[slot] = (unit, self.version[unit])
        if unit != opened:
            self.ahead.add(unit)
            self.num_ahead += 1

    # Events that change what is true of values and gradients

    def gradient_came(self, unit: int) -> None:
        self.unreduced.add(unit)
        self.exits[unit] += 1

    def backward_ended(self) -> None:
        is_open = [self.policy.is_open(unit) for unit in range(len(self.version))]
        assert not any(is_open), "a window is left open"
        assert not self.ahead, "a gather ahead is left"
        if not self.policy.is_last_micro_batch:
            assert not self.replications
            if self.policy.settings.gradients is Gradients.WHOLE:
                assert not self.reductions
            return
        assert not self.unreduced, "a gradient is left behind"
        assert set(self.reductions) >= set(self.exits)
        times = 1 if self.policy.settings.replicas > 1 else 0
        assert self.replications == Counter(dict.fromkeys(self.reductions, times)) - Counter()
        for unit, reductions in self.reductions.items():
            if self.policy.settings.gradients is Gradients.WHOLE:
                assert reductions == 1
            else:  # once per exit, and at the end for what didn't run in the last micro-batch
                assert reductions in (self.exits[unit], self.exits[unit] + 1)
        self.begin_step()

    def begin_step(self) -> None:
        self.unreduced.clear()
        for counts in (self.reductions, self.exits, self.replications):
            counts.clear()

    def changed(self, units: list[int]) -> None:
        for unit in units:
            self.version[unit] += 1

    def aborted(self) -> None:
        self.open_windows.clear()
        self.content.clear()
        self.ahead.clear()
        self.begin_step()


class Interrupted(Exception):
    """Stands for an exception in the middle of a pass."""


@dataclass
class Call:
    """One call of a unit, as far as its backward is concerned."""

    unit: int
    inner: list[Call]


class Program:
    """Produces events in an order that hooks and autograd can produce.

    Args:
        units: The units.
        settings: Settings.
        random: Makes all choices.
    """

    def __init__(
        self, units: tuple[PolicyUnit, ...], settings: PolicySettings, random: Random
    ) -> None:
        self.policy = Policy(units, settings)
        self.machine = Machine(self.policy)
        self.random = random
        self.outstanding: Counter[int] = Counter()
        self.events_left: int | None = None  # until the pass fails
        self.new_slots = count(100)
        self.num_moves = self.num_aborts = 0

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def run(self) -> None:
        for _ in range(self.random.randrange(1, 4)):
            self.step()

    def step(self) -> None:
        num_micro_batches = self.random.randrange(1, 4)
        self.events_left = self.random.randrange(60) if self.chance(15) else None
        try:
            at_once = self.random.randrange(1, num_micro_batches + 1)
            for first in range(0, num_micro_batches, at_once):
                batch = range(first, min(first + at_once, num_micro_batches))
                graphs = [self.forward_pass(training=True) for _ in batch]
                if self.chance(20):
                    self.forward_pass(training=False)
                if self.chance(50):
                    graphs.reverse()
                for number, graph in zip(batch, graphs, strict=True):
                    self.policy.is_last_micro_batch = number == num_micro_batches - 1
                    self.backward_pass(graph)
        except Interrupted:
            self.policy.abort()
            self.machine.aborted()
            self.outstanding.clear()
            self.policy.is_last_micro_batch = True
            self.num_aborts += 1
            return
        finally:
            self.events_left = None
        if self.chance(80):
            units = range(len(self.policy.units))
            changed = [u for u in units if self.policy.units[u].trainable or self.chance(50)]
            self.machine.changed(changed)
            self.machine.carry_out(self.policy.step(changed))
        if self.chance(20):
            self.forward_pass(training=False)

    def tick(self) -> None:
        if self.events_left is not None:
            self.events_left -= 1
            if self.events_left < 0:
                raise Interrupted

    # Forward

    def forward_pass(self, *, training: bool) -> list[Call]:
        graph = self.call(0, training=training, depth=0)
        assert not self.machine.ahead, "a gather ahead is left"
        return graph

    def call(self, unit: int, *, training: bool, depth: int) -> list[Call]:
        """Call a unit; one that is open already runs as a plain module."""
        if self.policy.is_open(unit):
            return self.call_inside(unit, training=training, depth=depth)
        self.enter_forward(unit)
        inner = self.call_inside(unit, training=training, depth=depth)
        # Outputs without gradient, such as masks, let no backward in.
        expects_backward = training and (depth == 0 or not self.chance(5))
        self.exit_forward(unit, expects_backward=expects_backward)
        if not expects_backward:
            for call in inner:
                self.let_go(call)
            return []
        self.outstanding[unit] += 1
        if self.policy.units[unit].trainable:
            self.machine.unreduced.add(unit)
        return [Call(unit, inner)]

    def enter_forward(self, unit: int) -> None:
        self.tick()
        if self.policy.blocking_unit(unit) is not None:
            self.policy.move(unit, next(self.new_slots))
            self.num_moves += 1
        self.machine.carry_out(self.policy.forward_enter(unit), opened=unit)

    def exit_forward(self, unit: int, *, expects_backward: bool) -> None:
        self.tick()
        self.machine.open_windows[unit] -= 1
        self.machine.carry_out(self.policy.forward_exit(unit, expects_backward=expects_backward))

    def call_inside(self, unit: int, *, training: bool, depth: int) -> list[Call]:
        units = self.policy.units
        inside = [i for i, u in enumerate(units) if u.parent == unit and not self.chance(10)]
        if inside and self.chance(15):
            inside.insert(self.random.randrange(len(inside) + 1), self.random.choice(inside))
        if self.chance(8) and depth < 3:
            inside.append(self.random.randrange(len(units)))  # one that belongs elsewhere
        if depth > 4:
            inside = []
        return [
            call
            for other in inside
            for call in self.call(other, training=training, depth=depth + 1)
        ]

    # Backward

    def backward_pass(self, graph: list[Call]) -> None:
        unreached: list[Call] = []
        for call in graph:
            self.propagate(call, unreached)
        self.tick()
        self.machine.carry_out(self.policy.backward_end())
        self.machine.backward_ended()
        for call in unreached:  # their graph is freed now
            self.outstanding[call.unit] -= 1

    def propagate(self, call: Call, unreached: list[Call]) -> None:
        if self.chance(8):  # the loss doesn't depend on this call
            self.collect(call, unreached)
            return
        unit, machine = call.unit, self.machine
        self.tick()
        machine.carry_out(self.policy.backward_enter(unit), opened=unit)
        if call.inner and self.chance(10):  # a checkpoint around several calls
            for other in call.inner[self.random.randrange(len(call.inner)) :]:
                self.recompute(other)
        for other in reversed(call.inner):
            self.propagate(other, unreached)
        if not self.policy.units[unit].trainable or self.chance(5):
            unreached.append(call)  # no gradient for its parameters: nothing tells the end
            machine.open_windows[unit] -= 1
            return
        self.tick()
        self.outstanding[unit] -= 1
        machine.gradient_came(unit)
        machine.open_windows[unit] -= 1
        is_last_call = self.outstanding[unit] == 0
        machine.carry_out(self.policy.backward_exit(unit, is_last_call=is_last_call))

    def recompute(self, call: Call) -> None:
        """Run the forward of a call again; a unit that is open runs as a plain module."""
        is_plain = self.policy.is_open(call.unit)
        if not is_plain:
            self.enter_forward(call.unit)
        for other in call.inner:
            self.recompute(other)
        if not is_plain:
            self.exit_forward(call.unit, expects_backward=True)

    def collect(self, call: Call, into: list[Call]) -> None:
        into.append(call)
        for other in call.inner:
            self.collect(other, into)

    def let_go(self, call: Call) -> None:
        freed: list[Call] = []
        self.collect(call, freed)
        for other in freed:
            self.outstanding[other.unit] -= 1


@st.composite
def units(draw: st.DrawFn) -> tuple[PolicyUnit, ...]:
    """A root and units below it; those gathered for use only share slots with others as deep."""
    num_units = draw(st.integers(1, 9))
    ring = draw(st.integers(1, 3))
    kinds = draw(st.sampled_from([(Gathered.USE,), tuple(Gathered), (Gathered.STEP,)]))
    depths = [0]
    slots: dict[tuple[int, ...], int] = {}
    found = [unit_of("u0", 0, None, Gathered.USE, trainable=True)]
    order: Counter[int] = Counter()
    for i in range(1, num_units):
        parent = draw(st.integers(0, i - 1))
        depths.append(depths[parent] + 1)
        gathered = draw(st.sampled_from(kinds))
        key = (depths[i], order[depths[i]] % ring) if gathered is Gathered.USE else (i,)
        order[depths[i]] += 1
        slot = slots.setdefault(key, len(slots) + 1)
        trainable = draw(st.sampled_from([True, True, False]))
        found.append(unit_of(f"u{i}", slot, parent, gathered, trainable=trainable))
    return tuple(found)


def unit_of(
    name: str, slot: int, parent: int | None, gathered: Gathered, *, trainable: bool
) -> PolicyUnit:
    return PolicyUnit(name=name, slot=slot, parent=parent, trainable=trainable, gathered=gathered)


@st.composite
def settings_of_policies(draw: st.DrawFn) -> PolicySettings:
    replicas = draw(st.integers(1, 2))
    return PolicySettings(
        gradients=draw(st.sampled_from(Gradients)),
        replicas=replicas,
        optimizer_over_replicas=replicas > 1 and draw(st.booleans()),
        forward_prefetch=draw(st.integers(0, 3)),
        backward_prefetch=draw(st.integers(0, 3)),
        backward_prefetch_after=draw(st.booleans()),
        max_in_flight=draw(st.integers(1, 3)),
    )


@settings(max_examples=300)
@given(units(), settings_of_policies(), st.integers(0, 2**32))
def test_any_program_runs_and_every_promise_is_kept(
    chosen: tuple[PolicyUnit, ...], policy_settings: PolicySettings, seed: int
) -> None:
    program = Program(chosen, policy_settings, Random(seed))
    program.run()
    event(f"units moved to another slot: {program.num_moves > 0}")
    event(f"a pass failed: {program.num_aborts > 0}")
    event(f"gathered ahead: {program.machine.num_ahead > 0}")


@given(units(), settings_of_policies(), st.integers(0, 2**32))
def test_the_same_events_have_the_same_answers(
    chosen: tuple[PolicyUnit, ...], policy_settings: PolicySettings, seed: int
) -> None:
    """Ranks decide on their own, and must decide alike."""
    traces = []
    for _ in range(2):
        program = Program(chosen, policy_settings, Random(seed))
        program.policy.trace = []
        program.run()
        traces.append(program.policy.trace)
    assert traces[0] == traces[1]


NAMES = st.text(st.characters(blacklist_characters=":", blacklist_categories=("Cs",)), max_size=12)


@given(st.sampled_from(Op), NAMES, st.sampled_from(["", "shard", "replicate"]), st.integers(0, 999))
def test_an_action_reads_back_as_it_was_printed(
    op: Op, unit: str, axis: str, micro_batch: int
) -> None:
    action = Action(op, unit, axis, micro_batch)
    assert Action.parse(str(action)) == action
