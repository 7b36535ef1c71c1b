"""What users of sharding engines have stumbled over, one named test each.

Some scenarios have their test elsewhere. A = `test_awkward_models.py`, S = `test_strategies.py`,
F = `tests/runtime/test_failures.py`, E = `tests/runtime/test_errors.py`, D =
`test_drawn_models.py`; what has no letter is here.

| scenario | test |
| --- | --- |
| R1 tied weights | S: its model is tied; D draws ties |
| R2 reductions per micro-batch or per step | test_micro_batches_are_reduced_each_time_or_once |
| R3 global norm | test_one_global_norm_... , test_clipping_takes_the_model_... |
| R5 adapters beside frozen weights | test_adapters_train_and_the_frozen_base_costs_nothing |
| R8 uneven sizes | A: "sizes of all kinds"; S: shards are disjoint and cover |
| R9 more ranks than rows | test_parameters_smaller_than_the_world_train |
| R10 one-rank shard groups | S: 4x1 and 1x4 |
| R11 averages over both axes | S: 2x2 with three micro-batches; replicas stay bitwise equal |
| R12 gloo's average | test_the_gradient_is_the_average_... |
| R26 unused on all ranks | A: "parameters unused everywhere", "block skipped", "output unused" |
| R28 a unit called twice | A: "unit called twice in a row"; test_a_unit_called_twice_... |
| R29 two forwards, two backwards | A: "two forwards, two backwards", "... reversed" |
| R32 structured outputs | A: "dict outputs", "dataclass outputs", "writes into view outputs" |
| R32 structured inputs, cast | test_inputs_in_a_dataclass_are_cast_... |
| R34 other entries than forward | A: "model.forward(x)"; test_a_method_that_generates_..., |
| | test_a_block_called_alone_..., test_generating_outside_... |
| R36 evaluation | A: "evaluation in between"; test_evaluation_gathers_no_more_... |
| R37 exceptions on all ranks | A: "exceptions"; F; test_an_exception_while_accumulating_... |
| R37 an exception on one rank | F, `tests/runtime/test_fault_injection.py` |
| R38 when the optimizer is built | test_the_optimizer_may_be_built_...; stepped before: E |
| R42 who owns what | A: "nested units", "norm shared between units"; |
| | test_every_parameter_has_one_owner_... |
| R44 groups in any order | test_groups_made_by_the_user_..., test_timeouts_... |
| BatchNorm | test_batch_norm_keeps_statistics_of_its_own_rank |
| buffers that are not saved | test_buffers_that_are_not_saved_... |
| dropout | test_dropout_follows_each_rank_s_own_seed |
| hooks on parameters | A: "hooks on gradients" |
| hooks on modules and outputs | test_hooks_on_modules_and_outputs_... |
| keyword-only arguments | A: "keyword arguments" |
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import scenarios
from tests.support.parity import STRATEGIES, worst_difference
from tests.support.pool import RankPool

FIVE = ("ddp", "zero1", "zero2", "zero3", "hybrid_full_optimizer")
SHAPES = [(1, 2), (1, 3), (2, 2)]


def label(value: object) -> str | None:
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=label)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_micro_batches_are_reduced_each_time_or_once(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    """Each time: a rank keeps 1/N of the gradients. Once: it keeps all. The numbers agree."""
    world, states = shape[0] * shape[1], []
    expected = scenarios.micro_batches_plain(world)
    for whole in (False, True):
        for found in pool.run(
            world, scenarios.micro_batches, strategy=strategy, shape=shape, whole=whole
        ):
            memory, everything = found["memory"], found["gradient_bytes"]
            assert found["reductions"] == ({1} if whole else {4})
            if whole:
                assert memory["gradient_buffers"] == everything
                assert memory["gradient_shards"] == 0
            else:
                assert memory["gradient_shards"] == everything // shape[1]
                assert memory["gradient_buffers"] <= 3 * found["largest_gradient_bytes"]
            # Beyond the parameters themselves a gradient has flags, a few per unit and rank.
            assert found["trainable_bytes"] <= everything <= 1.1 * found["trainable_bytes"] + 1024
            states.append(found["state"])
    assert max(worst_difference(expected, s) for s in states) <= 1e-6


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("strategy", FIVE)
def test_one_global_norm_over_parameters_of_all_scales_and_sizes(
    pool: RankPool, strategy: str, norm_type: float
) -> None:
    """Three ranks, one parameter of two elements; the norm is a scalar equal on all ranks."""
    results = pool.run(3, scenarios.clipped, strategy=strategy, shape=(1, 3), norm_type=norm_type)
    for found in results:
        assert found["norms"] == results[0]["norms"]
        assert found["difference"] <= 1e-9
        for kind, shape, norm, expected in found["norms"]:
            assert (kind, shape) == (torch.Tensor, torch.Size([]))
            assert norm == pytest.approx(expected, rel=1e-9)
    if strategy != "ddp":
        assert sum(found["empty"] for found in results) > 0


def test_clipping_takes_the_model_and_refuses_an_iterator_of_parameters(pool: RankPool) -> None:
    for outcome in pool.attempt(2, scenarios.clips_an_iterator):
        assert outcome.raised == "LifecycleError"
        assert "generator" in outcome.message
        assert "sw.shard" in outcome.message


@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("strategy", FIVE)
def test_adapters_train_and_the_frozen_base_costs_nothing(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    for found in pool.run(shape[0] * shape[1], scenarios.adapters, strategy=strategy, shape=shape):
        assert found["difference"] <= 1e-9
        assert found["base_is_unchanged"]
        assert found["base_gradients"] == 0
        # Padding covers the base too, so this bound is loose; the base itself is far larger.
        room = found["padding_numel"] + 3 * 4 * 16
        assert found["adapter_numel"] <= found["gradient_numel"] <= found["adapter_numel"] + room
        assert found["gradient_bytes"] <= 2 * 8 * found["gradient_numel"]
        owned, tensors = found["own_adapter_numel"], found["num_adapters"]
        assert found["optimizer_bytes"] == 2 * 8 * owned + 4 * tensors
        if strategy != "ddp":
            sent = 8 * found["gradient_numel"] * (found["shards"] - 1) // found["shards"]
            over_replicas = found["reduced_bytes"] - 3 * sent
            assert 0 <= over_replicas <= 3 * 8 * found["gradient_numel"]


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)], ids=label)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_smaller_than_the_world_train(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    results = pool.run(4, scenarios.tiny, strategy=strategy, shape=shape)
    assert max(difference for difference, _ in results) <= 1e-9
    if strategy != "ddp" and shape == (1, 4):
        assert min(owned for _, owned in results) == 0


@pytest.mark.parametrize("transport", ["pairwise", "collective"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=label)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_gradient_is_the_average_over_ranks(
    pool: RankPool, strategy: str, shape: tuple[int, int], transport: str
) -> None:
    assert (
        pool.run(
            2,
            scenarios.average_of_one_and_three,
            strategy=strategy,
            shape=shape,
            transport=transport,
        )
        == [[2.0]] * 2
    )


@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("strategy", FIVE)
def test_a_unit_called_twice_with_activation_checkpointing_changes_no_bit(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    for difference, is_exact in pool.run(
        shape[0] * shape[1], scenarios.called_twice_beside_plain, strategy=strategy, shape=shape
    ):
        assert difference <= 1e-9
        assert is_exact


def test_inputs_in_a_dataclass_are_cast_and_the_rest_passes_through(pool: RankPool) -> None:
    for seen, handed_on, has_gradient in pool.run(2, scenarios.dataclass_under_bf16):
        assert seen == (torch.bfloat16, torch.int64, "kept")
        assert handed_on == (None, 3)
        assert has_gradient


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=label)
@pytest.mark.parametrize("strategy", FIVE)
def test_a_method_that_generates_sees_full_weights_inside_unsharded(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    worst = pool.run(
        shape[0] * shape[1], scenarios.generates_unsharded, strategy=strategy, shape=shape
    )
    assert max(worst) <= 1e-9


@pytest.mark.parametrize("strategy", FIVE)
def test_a_block_called_alone_gathers_itself_and_trains(pool: RankPool, strategy: str) -> None:
    assert max(pool.run(4, scenarios.blocks_alone, strategy=strategy, shape=(2, 2))) <= 1e-9


def test_generating_outside_unsharded_names_the_weight_and_the_remedy(pool: RankPool) -> None:
    for outcome in pool.attempt(2, scenarios.generates_without_gathering):
        assert outcome.raised == "LifecycleError", outcome
        assert "first.weight" in outcome.message
        assert "sw.unsharded" in outcome.message


@pytest.mark.parametrize("distance", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_evaluation_gathers_no_more_than_training_and_leaves_nothing(
    pool: RankPool, strategy: str, distance: int
) -> None:
    for found in pool.run(
        2,
        scenarios.gathered_in_evaluation,
        strategy=strategy,
        shape=(1, 2),
        distance=distance,
    ):
        assert 0 < found["evaluating"] <= found["training"]
        assert found["between"] == found["after"] == 0
        assert found["evaluating"] < found["all"]


@pytest.mark.parametrize("strategy", FIVE)
def test_an_exception_while_accumulating_leaves_no_flag_behind(
    pool: RankPool, strategy: str
) -> None:
    for difference, is_grad_enabled in pool.run(
        4, scenarios.raises_while_accumulating, strategy=strategy, shape=(2, 2)
    ):
        assert difference <= 1e-9
        assert is_grad_enabled


@pytest.mark.parametrize("order", ["before", "after", "after a forward"])
@pytest.mark.parametrize("strategy", FIVE)
def test_the_optimizer_may_be_built_before_shard_after_it_or_after_a_forward(
    pool: RankPool, strategy: str, order: str
) -> None:
    for difference, has_changed in pool.run(
        2, scenarios.optimizer_order, strategy=strategy, shape=(1, 2), order=order
    ):
        assert has_changed
        assert difference <= 1e-9


def test_every_parameter_has_one_owner_and_the_description_names_it(pool: RankPool) -> None:
    for names, units, text in pool.run(2, scenarios.owners):
        owned = [name for parameters in units.values() for name in parameters]
        assert sorted(owned) == sorted(names)
        assert units["0"] == ("0.mix",)
        assert set(units["0.one"]) == {n for n in names if n.startswith("0.one.")}
        assert {"0.norm.weight", "0.norm.bias", "2.weight", "2.bias"} <= set(units["(root)"])
        for name in units:
            assert name in text


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "hybrid", "hybrid_full_optimizer"])
def test_groups_made_by_the_user_before_and_after_the_mesh_change_nothing(
    pool: RankPool, strategy: str
) -> None:
    assert max(pool.run(4, scenarios.groups_in_other_order, strategy=strategy)) <= 1e-9


@pytest.mark.parametrize("transport", ["pairwise", "collective"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=label)
@pytest.mark.parametrize("strategy", FIVE)
def test_a_graph_kept_on_one_rank_changes_nothing(
    pool: RankPool, strategy: str, shape: tuple[int, int], transport: str
) -> None:
    """What is communicated, and when, must not depend on how long a rank keeps its objects."""
    worst = pool.run(
        shape[0] * shape[1],
        scenarios.graph_kept_on_one_rank,
        strategy=strategy,
        shape=shape,
        transport=transport,
    )
    assert max(worst) <= 1e-9


def test_timeouts_asked_for_are_those_of_every_group(pool: RankPool) -> None:
    assert pool.run(4, scenarios.timeouts_of_groups, seconds=77.0) == [{77.0}] * 4


@pytest.mark.parametrize("strategy", FIVE)
def test_batch_norm_keeps_statistics_of_its_own_rank(pool: RankPool, strategy: str) -> None:
    for of_statistics, of_parameters in pool.run(
        4, scenarios.batch_norm, strategy=strategy, shape=(2, 2)
    ):
        assert of_statistics <= 1e-9
        assert of_parameters <= 1e-9


def test_buffers_that_are_not_saved_come_from_the_first_rank(pool: RankPool) -> None:
    assert pool.run(3, scenarios.buffers_left_out_of_state) == [([5.0], False)] * 3


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)], ids=label)
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "hybrid"])
def test_dropout_follows_each_rank_s_own_seed(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    """Masks differ on all ranks, those of one replica and those of one shard alike."""
    for difference, values, is_untouched in pool.run(
        4, scenarios.dropout, strategy=strategy, shape=shape
    ):
        assert difference <= 1e-12
        assert len(set(values)) == 4
        assert is_untouched


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=label)
@pytest.mark.parametrize("strategy", FIVE)
def test_hooks_on_modules_and_outputs_see_what_one_process_sees(
    pool: RankPool, strategy: str, shape: tuple[int, int]
) -> None:
    for worst, order in pool.run(
        shape[0] * shape[1], scenarios.hooks_on_modules, strategy=strategy, shape=shape
    ):
        assert order == []
        assert worst <= 1e-9


@pytest.mark.parametrize("kind", scenarios.LOSSES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=label)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_losses_that_enter_a_unit_in_its_middle_train_where_weights_stay(
    pool: RankPool, strategy: str, shape: tuple[int, int], kind: str
) -> None:
    worst = pool.run(
        shape[0] * shape[1],
        scenarios.losses_inside_units,
        strategy=strategy,
        shape=shape,
        kind=kind,
    )
    assert max(worst) <= 1e-9


@pytest.mark.parametrize(
    ("strategy", "kind", "words"),
    [
        ("zero2", "penalty", ["create_graph=True", "zero2", "'zero1'"]),
        ("zero3", "penalty", ["create_graph=True", "zero3", "'zero1'"]),
        ("zero3", "features", ["without passing through its outputs", "Return every tensor"]),
    ],
)
def test_losses_that_enter_a_unit_in_its_middle_are_refused_where_weights_go(
    pool: RankPool, strategy: str, kind: str, words: list[str]
) -> None:
    for outcome in pool.attempt(
        2, scenarios.losses_inside_units, strategy=strategy, shape=(1, 2), kind=kind
    ):
        assert outcome.raised == "LifecycleError"
        assert all(word in outcome.message for word in words)
