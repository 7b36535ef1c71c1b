"""Planned memory against closed forms written out here, and against published figures."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shardwright.core.layout import ParameterSpec, UnitLayout, lay_out
from shardwright.core.memory import MemoryPlan, UnitNeeds, plan_memory
from shardwright.core.strategy import STRATEGIES, Gathered, Gradients

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
ROOT_NUMEL = 576  # these two divide evenly over every world below
BLOCK_NUMEL = 1152
NUM_BLOCKS = 5
PARAMETERS_PER_UNIT = 2


@dataclass(frozen=True)
class Setup:
    """A root and equal blocks under one strategy, as the engine would ask for their memory."""

    strategy: str
    shard: int
    replicate: int
    compute: str
    reduce: str
    gather_distance: int = 1
    reduce_distance: int = 1
    needs_staging: bool = False

    @property
    def num_shards(self) -> int:
        return self.shard if STRATEGIES[self.strategy].shards_parameters else 1

    @property
    def num_replicas(self) -> int:
        return self.shard * self.replicate // self.num_shards

    @property
    def owners_per_shard(self) -> int:
        return self.num_replicas if STRATEGIES[self.strategy].optimizer_over_replicas else 1

    @property
    def gathered(self) -> Gathered:
        return Gathered.STEP if self.num_shards == 1 else STRATEGIES[self.strategy].gathered

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

    def plan(self) -> MemoryPlan:
        units = [
            UnitNeeds(
                layout=self.layout(numel),
                depth=depth,
                gathered=self.gathered,
                master_dtype="float32",
                reduce_dtype=self.reduce,
            )
            for numel, depth in [(ROOT_NUMEL, 0), *[(BLOCK_NUMEL, 1)] * NUM_BLOCKS]
        ]
        return plan_memory(
            units,
            gradients=STRATEGIES[self.strategy].gradients,
            replicas=self.num_replicas,
            gather_distance=self.gather_distance,
            reduce_distance=self.reduce_distance,
            needs_staging=self.needs_staging,
        )


def closed_form(setup: Setup) -> dict[str, int]:
    """Bytes per category and rank, after the table of strategies."""
    name = setup.strategy
    shards, replicas = setup.num_shards, setup.num_replicas
    p, m, g = BYTES[setup.compute], 4, BYTES[setup.reduce]
    psi = ROOT_NUMEL + NUM_BLOCKS * BLOCK_NUMEL

    # Gradients travel with one flag per parameter and owner, in a whole number per replica.
    if name == "hybrid_full_optimizer":
        owners, flags = shards * replicas, PARAMETERS_PER_UNIT
    else:
        owners = shards
        flags = -(-PARAMETERS_PER_UNIT // replicas) * replicas
    root_gradient, block_gradient = ROOT_NUMEL + owners * flags, BLOCK_NUMEL + owners * flags
    gamma = root_gradient + NUM_BLOCKS * block_gradient

    def shared(root: int, block: int, distance: int) -> int:
        return root + block * min(NUM_BLOCKS, distance + 1)

    masters_apart = m * psi // owners if p != m else 0
    if shards == 1 or name in ("ddp", "zero1"):
        slots, masters, compute = p * psi, masters_apart, 0
    else:
        slots = (
            p * psi
            if name in ("zero2", "hybrid_zero2")
            else p * shared(ROOT_NUMEL, BLOCK_NUMEL, setup.gather_distance)
        )
        if p == m and owners == shards:
            masters, compute = m * psi // shards, 0
        else:  # the masters lie inside the compute shards where dtypes agree
            masters, compute = masters_apart, p * psi // shards

    if name in ("ddp", "zero1"):
        buffers = g * gamma
        gradient_shards = m * gamma // shards if g != m else 0
    else:
        buffers = g * shared(root_gradient, block_gradient, setup.reduce_distance)
        gradient_shards = m * gamma // shards

    staging = 0
    if setup.needs_staging:
        for part in (
            lambda numel: g * numel * (shards - 1) // shards,
            lambda numel: g * numel // shards * (replicas - 1) // replicas,
        ):
            staging += shared(part(root_gradient), part(block_gradient), setup.reduce_distance)
    return {
        "parameter_shards": masters,
        "compute_shards": compute,
        "parameter_slots": slots,
        "gradient_buffers": buffers,
        "gradient_shards": gradient_shards,
        "staging": staging,
    }


WORLDS = [(2, 1), (4, 1), (3, 1), (4, 2), (2, 3), (1, 4), (1, 1)]
DTYPES = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w[0]}x{w[1]}")
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_planned_bytes_equal_the_closed_form_of_every_strategy(
    strategy: str, dtypes: tuple[str, str], world: tuple[int, int]
) -> None:
    setup = Setup(strategy, *world, *dtypes)
    assert setup.plan().bytes_by_category == closed_form(setup)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("gather_distance", [0, 2, 9])
@pytest.mark.parametrize("reduce_distance", [0, 3])
def test_distances_cost_slots_and_staging_as_the_closed_form_says(
    strategy: str, gather_distance: int, reduce_distance: int
) -> None:
    setup = Setup(
        strategy, 4, 2, "bfloat16", "float32", gather_distance, reduce_distance, needs_staging=True
    )
    assert setup.plan().bytes_by_category == closed_form(setup)


def test_one_rank_alone_stages_nothing() -> None:
    setup = Setup("zero3", 1, 1, "float32", "float32", needs_staging=True)
    assert setup.plan().bytes_by_category["staging"] == 0


def test_a_root_without_parameters_costs_nothing_and_its_blocks_share() -> None:
    setup = Setup("zero3", 2, 1, "float32", "float32")
    block = UnitNeeds(
        layout=setup.layout(BLOCK_NUMEL),
        depth=1,
        gathered=Gathered.USE,
        master_dtype="float32",
        reduce_dtype="float32",
    )
    root = UnitNeeds(
        layout=None,
        depth=0,
        gathered=Gathered.USE,
        master_dtype="float32",
        reduce_dtype="float32",
    )
    plan = plan_memory(
        [root, block, block, block],
        gradients=Gradients.SHARDED,
        replicas=1,
        gather_distance=1,
        reduce_distance=0,
        needs_staging=True,
    )
    assert root.gradient_bytes == 0
    assert plan.parameter_slots.slot_of == (-1, 0, 1, 0)
    assert plan.gradient_buffers.slot_of == (-1, 0, 0, 0)
    assert plan.bytes_by_category["parameter_slots"] == 2 * 4 * BLOCK_NUMEL
    assert plan.bytes_by_category["parameter_shards"] == 3 * 4 * BLOCK_NUMEL // 2


def needs(
    *specs: ParameterSpec, gathered: Gathered, master: str = "float32", reduce: str = "float32"
) -> UnitNeeds:
    return UnitNeeds(
        layout=lay_out("unit", specs, shard_size=2),
        depth=0,
        gathered=gathered,
        master_dtype=master,
        reduce_dtype=reduce,
    )


def bytes_of(unit: UnitNeeds, gradients: Gradients = Gradients.SHARDED) -> dict[str, int]:
    return plan_memory(
        [unit],
        gradients=gradients,
        replicas=1,
        gather_distance=1,
        reduce_distance=1,
        needs_staging=False,
    ).bytes_by_category


@pytest.mark.parametrize("gradients", list(Gradients))
def test_frozen_parameters_have_a_shard_in_their_own_dtype_and_no_gradient(
    gradients: Gradients,
) -> None:
    frozen = ParameterSpec(name="w", shape=(64,), dtype="bfloat16", trainable=False)
    held = bytes_of(needs(frozen, gathered=Gathered.USE), gradients)
    assert held == {
        "parameter_shards": 2 * 64 // 2,
        "compute_shards": 0,
        "parameter_slots": 2 * 64,
        "gradient_buffers": 0,
        "gradient_shards": 0,
        "staging": 0,
    }
    assert bytes_of(needs(frozen, gathered=Gathered.STEP), gradients)["parameter_shards"] == 0


def test_masters_wider_than_four_bytes_cost_their_width() -> None:
    double = ParameterSpec(name="w", shape=(64,), dtype="float64")
    held = bytes_of(needs(double, gathered=Gathered.USE, master="float64", reduce="float64"))
    control = 1
    assert held["parameter_shards"] == 8 * 64 // 2
    assert held["gradient_shards"] == 8 * (64 // 2 + control)
    assert held["gradient_buffers"] == 8 * (64 + 2 * control)


def test_parameters_kept_in_full_precision_have_no_compute_shard_beside_their_master() -> None:
    full = ParameterSpec(name="norm", shape=(64,), dtype="float32")
    half = ParameterSpec(name="w", shape=(64,), dtype="bfloat16")
    held = bytes_of(needs(full, half, gathered=Gathered.USE))
    assert held["parameter_shards"] == 4 * 64 // 2 + 4 * 64 // 2
    assert held["compute_shards"] == 2 * 64 // 2
    assert held["parameter_slots"] == 4 * 64 + 2 * 64


# --- published figures -------------------------------------------------------------------------

GB = 1e9
NUM_UNITS = 600  # small units, so that shared slots and buffers are next to nothing


def model_states(
    psi: float,
    *,
    gathered: Gathered,
    gradients: Gradients,
    shard: int,
    owners_per_shard: int = 1,
) -> dict[str, float]:
    """Bytes per rank of a bf16 model with fp32 masters and Adam, gradients reduced in bf16."""
    spec = ParameterSpec(name="w", shape=(int(psi) // NUM_UNITS,), dtype="bfloat16")
    layout = lay_out("unit", [spec], shard_size=shard, owners_per_shard=owners_per_shard)
    unit = UnitNeeds(
        layout=layout,
        depth=1,
        gathered=gathered,
        master_dtype="float32",
        reduce_dtype="bfloat16",
    )
    held: dict[str, float] = plan_memory(
        [unit] * NUM_UNITS,
        gradients=gradients,
        replicas=owners_per_shard,
        gather_distance=1,
        reduce_distance=1,
        needs_staging=False,
    ).bytes_by_category
    return held | {"moments": 2 * 4.0 * NUM_UNITS * layout.owned_numel}


def test_our_7b_under_zero1_on_8_ranks_is_38_5_gb_and_the_gradients_cast_to_fp32() -> None:
    held = model_states(7e9, gathered=Gathered.STEP, gradients=Gradients.WHOLE, shard=8)
    in_fp32 = held.pop("gradient_shards")
    assert sum(held.values()) / GB == pytest.approx(38.5, abs=0.05)
    assert in_fp32 / GB == pytest.approx(4 * 7 / 8, abs=0.005)


# Ranks; GB per rank of the 7.5B model under P_os, P_os+g and P_os+g+p.
ZERO_PAPER_TABLE_1 = [
    (1, 120, 120, 120),
    (4, 52.5, 41.3, 30),
    (16, 35.6, 21.6, 7.5),
    (64, 31.4, 16.6, 1.88),
    (256, 30.4, 15.4, 0.47),
    (1024, 30.1, 15.1, 0.12),
]


@pytest.mark.parametrize(("ranks", "stage1", "stage2", "stage3"), ZERO_PAPER_TABLE_1)
def test_model_states_equal_table_1_of_the_zero_paper_but_for_fp32_gradient_shards(
    ranks: int, stage1: float, stage2: float, stage3: float
) -> None:
    """arXiv 1910.02054, table 1: 2-byte gradients, and no room for what computes.

    torch's Adam takes gradients as wide as the masters, so that our shards have 4 bytes per
    element: beside the 2-byte buffer at stage 1, instead of a 2-byte shard at stages 2 and 3.
    """
    psi = 7.5e9
    held = model_states(psi, gathered=Gathered.STEP, gradients=Gradients.WHOLE, shard=ranks)
    assert held.pop("gradient_shards") == pytest.approx(4 * psi / ranks, rel=1e-3)
    assert sum(held.values()) / GB == pytest.approx(stage1, abs=0.06)

    kinds = [(Gathered.STEP, stage2), (Gathered.USE, stage3)]
    for gathered, published in kinds:
        held = model_states(psi, gathered=gathered, gradients=Gradients.SHARDED, shard=ranks)
        assert held["gradient_shards"] == pytest.approx(4 * psi / ranks, rel=1e-3)
        held["gradient_shards"] /= 2
        del held["gradient_buffers"]  # two units
        if gathered is Gathered.USE:
            del held["parameter_slots"]  # two units
        assert sum(held.values()) / GB == pytest.approx(
            published, abs=0.06 if published > 2 else 0.006
        )


def test_a_70b_with_its_optimizer_over_128_ranks_and_shards_over_8_is_59_6_gb() -> None:
    """4 bytes of Ψ/8 for gradients held between micro-batches; 41.9 GB with those of 2 bytes."""
    held = model_states(
        70.6e9,
        gathered=Gathered.USE,
        gradients=Gradients.SHARDED,
        shard=8,
        owners_per_shard=16,
    )
    states = sum(held.values()) - held["gradient_buffers"] - held["parameter_slots"]
    assert states / GB == pytest.approx(59.6, abs=0.05)
    with_half = states - held["gradient_shards"] / 2
    assert with_half / GB == pytest.approx(41.9, abs=0.05)


def test_hybrid_for_the_same_model_needs_its_whole_state_divided_by_8_only() -> None:
    held = model_states(70.6e9, gathered=Gathered.USE, gradients=Gradients.SHARDED, shard=8)
    states = sum(held.values()) - held["gradient_buffers"] - held["parameter_slots"]
    with_half = states - held["gradient_shards"] / 2
    assert with_half / GB == pytest.approx(16 * 70.6 / 8, abs=0.1)
