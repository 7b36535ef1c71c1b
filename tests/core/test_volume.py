"""Bytes sent against closed forms written out here, and against the policy's own actions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest

from shardwright.core.layout import ParameterSpec, UnitLayout, lay_out
from shardwright.core.policy import Op, Policy, PolicySettings, PolicyUnit
from shardwright.core.strategy import STRATEGIES, Gathered, Gradients
from shardwright.core.volume import PassCounts, UnitTraffic, expected_traffic

BYTES = {"float32": 4, "bfloat16": 2}
ROOT_NUMEL = 576  # these two divide evenly over every world below
BLOCK_NUMEL = 1152
NUM_BLOCKS = 5
PARAMETERS_PER_UNIT = 2


@dataclass(frozen=True)
class Setup:
    """A root and equal blocks under one strategy, as the engine would ask for their traffic."""

    strategy: str
    shard: int
    replicate: int
    compute: str = "float32"
    reduce: str = "float32"
    num_slots: int = 2
    kept: tuple[int, ...] = ()

    @property
    def num_shards(self) -> int:
        return self.shard if STRATEGIES[self.strategy].shards_parameters else 1

    @property
    def num_replicas(self) -> int:
        return self.shard * self.replicate // self.num_shards

    @property
    def owners_per_shard(self) -> int:
        return self.num_replicas if STRATEGIES[self.strategy].optimizer_over_replicas else 1

    def layout(self, numel: int) -> UnitLayout:
        rows = numel // 8 // PARAMETERS_PER_UNIT
        spec = ParameterSpec(name="w", shape=(rows, 8), dtype=self.compute)
        layout = lay_out(
            "unit",
            [spec] * PARAMETERS_PER_UNIT,
            shard_size=self.num_shards,
            owners_per_shard=self.owners_per_shard,
            multiple=1 if self.owners_per_shard > 1 else self.num_replicas,
        )
        assert (layout.used_numel, layout.padding_numel) == (numel, 0)
        return layout

    def gathered(self, index: int) -> Gathered:
        if self.num_shards == 1:
            return Gathered.STEP
        return Gathered.BACKWARD if index in self.kept else STRATEGIES[self.strategy].gathered

    def slot(self, index: int) -> int:
        """The root and kept units have one of their own, the others take turns."""
        if index == 0 or self.gathered(index) is not Gathered.USE:
            return 100 + index
        return index % self.num_slots

    def units(self) -> list[UnitTraffic]:
        indices = range(NUM_BLOCKS + 1)
        last_in_slot = {self.slot(i): i for i in indices}
        return [
            UnitTraffic(
                layout=self.layout(BLOCK_NUMEL if i else ROOT_NUMEL),
                gathered=self.gathered(i),
                is_resident_at_turn=last_in_slot[self.slot(i)] == i,
                reduce_itemsize=BYTES[self.reduce],
            )
            for i in indices
        ]

    def traffic(self, counts: PassCounts) -> dict[tuple[str, str], int]:
        return expected_traffic(
            self.units(),
            counts,
            gradients=STRATEGIES[self.strategy].gradients,
            replicas=self.num_replicas,
        )


def one_step(micro_batches: int) -> PassCounts:
    return PassCounts(
        training_forwards=micro_batches, refreshes=1, backwards=micro_batches, synchronised=1
    )


def closed_form(setup: Setup, micro_batches: int) -> dict[tuple[str, str], int]:
    """The table of bytes sent per rank and step, strategy by strategy."""
    s, r, n = setup.shard, setup.replicate, setup.shard * setup.replicate
    p, g, m = BYTES[setup.compute], BYTES[setup.reduce], micro_batches
    psi = ROOT_NUMEL + NUM_BLOCKS * BLOCK_NUMEL
    kept = ROOT_NUMEL + BLOCK_NUMEL * min(NUM_BLOCKS, setup.num_slots)

    def gamma(owners: int, flags_multiple: int) -> int:
        """Gradients, and a flag per parameter and owner, in a whole number per replica."""
        flags = -(-PARAMETERS_PER_UNIT // flags_multiple) * flags_multiple
        return psi + (NUM_BLOCKS + 1) * owners * flags

    if setup.strategy == "ddp":
        found = {("all_reduce", "replicate"): 2 * g * gamma(1, n) * (n - 1) // n}
        return {k: v for k, v in found.items() if v}
    times_gathered = {
        "zero1": psi,
        "zero2": m * psi,
        "hybrid_zero2": m * psi,
    }.get(setup.strategy, m * (2 * psi - kept))
    if s == 1:
        times_gathered = 0
    times_reduced = 1 if setup.strategy == "zero1" else m
    if setup.strategy == "hybrid_full_optimizer":
        gradient = gamma(s * r, 1)
        over_replicas = {
            ("reduce_scatter", "replicate"): g * gradient // s * (r - 1) // r,
            ("all_gather", "replicate"): p * psi // s * (r - 1) // r,
        }
    else:
        gradient = gamma(s, r)
        over_replicas = {("all_reduce", "replicate"): 2 * g * gradient // s * (r - 1) // r}
    found = {
        ("all_gather", "shard"): p * times_gathered * (s - 1) // s,
        ("reduce_scatter", "shard"): times_reduced * g * gradient * (s - 1) // s,
        **over_replicas,
    }
    return {k: v for k, v in found.items() if v}


WORLDS = [(2, 1), (4, 1), (3, 1), (4, 2), (2, 3), (1, 4), (1, 1)]
DTYPES = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w[0]}x{w[1]}")
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_of_a_step_equal_the_closed_form_of_every_strategy(
    strategy: str, dtypes: tuple[str, str], world: tuple[int, int]
) -> None:
    setup = Setup(strategy, *world, *dtypes)
    for micro_batches in (1, 3):
        assert setup.traffic(one_step(micro_batches)) == closed_form(setup, micro_batches)


def test_without_accumulation_zero1_and_zero2_send_the_same_bytes() -> None:
    zero1, zero2 = Setup("zero1", 4, 2, "bfloat16"), Setup("zero2", 4, 2, "bfloat16")
    assert zero1.traffic(one_step(1)) == zero2.traffic(one_step(1))
    assert zero1.traffic(one_step(2)) != zero2.traffic(one_step(2))


@pytest.mark.parametrize(("zero", "hybrid"), [("zero2", "hybrid_zero2"), ("zero3", "hybrid")])
def test_zero_strategies_on_a_mesh_with_replicas_send_what_the_hybrids_send(
    zero: str, hybrid: str
) -> None:
    assert Setup(zero, 4, 2).traffic(one_step(3)) == Setup(hybrid, 4, 2).traffic(one_step(3))


def test_in_fp32_an_optimizer_over_two_replicas_sends_as_much_as_an_all_reduce() -> None:
    """A reduce-scatter, and a gather of updated parameters instead of gradients."""
    whole = Setup("hybrid", 4, 2).traffic(one_step(1))
    divided = Setup("hybrid_full_optimizer", 4, 2).traffic(one_step(1))
    over_replicas = {key[0]: v for key, v in divided.items() if key[1] == "replicate"}
    assert set(over_replicas) == {"all_gather", "reduce_scatter"}
    assert sum(over_replicas.values()) == whole["all_reduce", "replicate"]


def test_nothing_ran_and_nothing_was_sent() -> None:
    for strategy in STRATEGIES:
        assert Setup(strategy, 4, 2).traffic(PassCounts()) == {}


# --- published figures -------------------------------------------------------------------------


def bytes_of_7b_in_bf16_on_8_ranks(strategy: str) -> float:
    num_units = 1000  # so that what stays in the slots is next to nothing
    setup = Setup(strategy, 8, 1, "bfloat16", "bfloat16")
    spec = ParameterSpec(name="w", shape=(7_000_000,), dtype="bfloat16")
    layout = lay_out("u", [spec], shard_size=setup.num_shards, multiple=setup.num_replicas)
    units = [
        UnitTraffic(
            layout=layout,
            gathered=setup.gathered(1),
            is_resident_at_turn=False,
            reduce_itemsize=2,
        )
    ] * num_units
    sent = expected_traffic(
        units,
        one_step(1),
        gradients=STRATEGIES[strategy].gradients,
        replicas=setup.num_replicas,
    )
    return sum(sent.values()) / 1e9


def test_7b_in_bf16_on_8_ranks_sends_24_5_gb_under_ddp_and_half_more_under_zero3() -> None:
    assert bytes_of_7b_in_bf16_on_8_ranks("ddp") == pytest.approx(24.5, abs=0.001)
    assert bytes_of_7b_in_bf16_on_8_ranks("zero1") == pytest.approx(24.5, abs=0.001)
    assert bytes_of_7b_in_bf16_on_8_ranks("zero2") == pytest.approx(24.5, abs=0.001)
    assert bytes_of_7b_in_bf16_on_8_ranks("zero3") == pytest.approx(36.75, abs=0.001)


# --- the policy --------------------------------------------------------------------------------


class Counted:
    """Runs a stack through the policy and adds up the bytes of the actions it answers with."""

    def __init__(self, setup: Setup, *, frozen: tuple[int, ...] = (), prefetch: int = 1) -> None:
        strategy = STRATEGIES[setup.strategy]
        self.setup = setup
        self.frozen = frozen
        self.policy = Policy(
            tuple(
                PolicyUnit(
                    name=str(i),
                    slot=setup.slot(i),
                    parent=0 if i else None,
                    trainable=i not in frozen,
                    gathered=setup.gathered(i),
                )
                for i in range(NUM_BLOCKS + 1)
            ),
            PolicySettings(
                gradients=strategy.gradients,
                replicas=setup.num_replicas,
                optimizer_over_replicas=setup.owners_per_shard > 1,
                forward_prefetch=prefetch,
                backward_prefetch=prefetch,
            ),
        )
        self.policy.trace = []

    def forward(self, *, training: bool) -> None:
        policy, blocks = self.policy, range(1, NUM_BLOCKS + 1)
        policy.forward_enter(0)
        for i in blocks:
            policy.forward_enter(i)
            policy.forward_exit(i, expects_backward=training)
        policy.forward_exit(0, expects_backward=training)

    def step(self, micro_batches: int) -> None:
        policy, blocks = self.policy, range(1, NUM_BLOCKS + 1)
        for micro_batch in range(micro_batches):
            policy.is_last_micro_batch = micro_batch == micro_batches - 1
            self.forward(training=True)
            policy.backward_enter(0)
            for i in reversed(blocks):
                policy.backward_enter(i)
                if i not in self.frozen:
                    policy.backward_exit(i)
            policy.backward_exit(0)
            policy.backward_end()
        policy.step([i for i in range(NUM_BLOCKS + 1) if i not in self.frozen])

    def sent(self) -> dict[tuple[str, str], int]:
        """Bytes of the actions so far, each by what its collective sends per rank."""
        setup = self.setup
        units = setup.units()
        shards, replicas = setup.num_shards, setup.num_replicas
        totals: Counter[tuple[str, str]] = Counter()
        assert self.policy.trace is not None
        for action in self.policy.trace:
            if action.op not in (Op.UNSHARD, Op.REDUCE, Op.REPLICATE):
                continue
            unit = units[int(action.unit)]
            whole = unit.layout.gathered_bytes
            gradient = unit.layout.gradient_numel * unit.reduce_itemsize
            over_replicas = gradient // shards // replicas * (replicas - 1)
            if action.op is Op.REDUCE:
                totals["reduce_scatter", "shard"] += gradient // shards * (shards - 1)
            elif action.op is Op.REPLICATE and setup.owners_per_shard > 1:
                totals["reduce_scatter", "replicate"] += over_replicas
            elif action.op is Op.REPLICATE:
                totals["all_reduce", "replicate"] += 2 * over_replicas
            elif action.axis == "replicate":
                part = whole // shards // replicas
                totals["all_gather", "replicate"] += part * (replicas - 1)
            else:
                totals["all_gather", "shard"] += whole // shards * (shards - 1)
        return {key: num_bytes for key, num_bytes in totals.items() if num_bytes}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [(4, 1), (4, 2), (1, 4)], ids=lambda w: f"{w[0]}x{w[1]}")
@pytest.mark.parametrize(("num_slots", "kept"), [(1, ()), (2, ()), (3, (2,)), (5, ())])
def test_the_policys_actions_send_what_the_closed_form_says(
    strategy: str, world: tuple[int, int], num_slots: int, kept: tuple[int, ...]
) -> None:
    if STRATEGIES[strategy].gathered is not Gathered.USE:
        kept = ()
    setup = Setup(strategy, *world, "bfloat16", "float32", num_slots, kept)
    run = Counted(setup)
    run.step(1)
    run.step(3)
    run.forward(training=False)
    run.forward(training=False)
    run.step(2)
    counts = PassCounts(
        training_forwards=6, inference_forwards=2, refreshes=3, backwards=6, synchronised=3
    )
    assert run.sent() == setup.traffic(counts)


@pytest.mark.parametrize("strategy", ["zero1", "hybrid_full_optimizer"])
def test_a_frozen_block_that_no_optimizer_holds_is_gathered_as_the_closed_form_says(
    strategy: str,
) -> None:
    setup = Setup(strategy, 4, 2)
    key = ("all_gather", "shard" if strategy == "zero1" else "replicate")
    run = Counted(setup, frozen=(2,))
    run.step(1)
    run.step(1)
    counts = PassCounts(training_forwards=2, refreshes=2, backwards=2, synchronised=2)
    units = list(setup.units())
    layout = units[2].layout
    segments = tuple(replace(segment, trainable=False) for segment in layout.segments)
    units[2] = replace(units[2], layout=replace(layout, segments=segments))
    computed = expected_traffic(
        units,
        counts,
        gradients=STRATEGIES[strategy].gradients,
        replicas=setup.num_replicas,
    )
    assert run.sent()[key] == computed[key]


def test_gradients_reduced_in_bf16_send_half_of_those_in_fp32() -> None:
    for strategy in STRATEGIES:
        half = Setup(strategy, 4, 2, "bfloat16", "bfloat16").traffic(one_step(2))
        full = Setup(strategy, 4, 2, "bfloat16", "float32").traffic(one_step(2))
        assert half.keys() == full.keys()
        for key, num_bytes in half.items():
            assert full[key] == (num_bytes if key[0] == "all_gather" else 2 * num_bytes)


def test_whole_gradients_under_zero3_are_reduced_once_per_step() -> None:
    setup = Setup("zero3", 4, 1)
    sent = expected_traffic(setup.units(), one_step(3), gradients=Gradients.WHOLE, replicas=1)
    once = setup.traffic(one_step(1))["reduce_scatter", "shard"]
    assert sent["reduce_scatter", "shard"] == once
