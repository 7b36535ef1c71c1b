"""Mistakes raise on every rank, soon, and say what was expected, what was found, what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import misuse
from tests.support.pool import RankPool

CASES: list[tuple[Callable[[], None], str, list[str]]] = [
    (misuse.wrong_mesh, "SpecError", ["replicate=2 x shard=2", "found 2 ranks", "start 4 ranks"]),
    (misuse.zero_sized_axis, "SpecError", ["shard", "from 1", "found 0"]),
    (misuse.unknown_strategy, "SpecError", ["'zero4'", "did you mean", "zero3"]),
    (misuse.unknown_setting, "SpecError", ["'forward_prefech'", "'forward_prefetch'"]),
    (misuse.bad_setting, "SpecError", ["backward_prefetch_at", "'pre'", "'before'"]),
    (misuse.unknown_residency, "SpecError", ["'block.0'", "'blocks.0'"]),
    (misuse.unit_class_matches_nothing, "SpecError", ["Conv2d", "Stack", "Block"]),
    (misuse.predicate_matches_nothing, "SpecError", ["true for no module", "units='auto'"]),
    (misuse.parameter_on_another_device, "SpecError", ["blocks.1", "meta", "'cpu'"]),
    (misuse.sparse_embedding, "SpecError", ["embedding", "sparse=False"]),
    (misuse.no_parameters, "SpecError", ["no parameters"]),
    (misuse.integer_parameters, "LayoutError", ["codes", "int8", "buffer"]),
    (misuse.sharded_twice, "LifecycleError", ["sharded already"]),
    (misuse.sub_module_sharded_before, "LifecycleError", ["blocks.0", "units="]),
    (misuse.lbfgs, "SpecError", ["LBFGS", "AdamW"]),
    (misuse.adafactor, "SpecError", ["Adafactor", "rows", "whole='all'"]),
    (misuse.optimizer_stepped_before_shard, "LifecycleError", ["AdamW", "after sw.shard()"]),
    (misuse.state_dict_of_shards, "LifecycleError", ["state_dict()", "sw.unsharded(model)"]),
    (misuse.state_dict_of_a_block, "LifecycleError", ["blocks.1", "sw.unsharded(model)"]),
    (misuse.load_into_shards, "LifecycleError", ["load_state_dict()", "writeback=True"]),
    (misuse.step_while_accumulating, "LifecycleError", ["sw.accumulate", "zero_grad"]),
    (misuse.clip_while_accumulating, "LifecycleError", ["sw.accumulate"]),
    (misuse.weight_used_outside_its_unit, "LifecycleError", ["blocks.0.norm.bias", "units="]),
    (misuse.layer_called_outside_its_unit, "LifecycleError", ["'blocks.1.up.", "sw.unsharded"]),
    (misuse.weight_multiplied_outside_its_unit, "LifecycleError", ["'blocks.2'", "forward"]),
    (misuse.weight_indexed_outside_its_unit, "LifecycleError", ["'embedding.weight'", "(11, 7)"]),
    (misuse.statistic_of_a_weight, "LifecycleError", ["norm()", "'last.weight'", "unsharded"]),
    (misuse.statistic_of_a_detached_weight, "LifecycleError", ["norm()", "'last.weight'"]),
    (misuse.weight_as_an_array, "LifecycleError", ["numpy()", "'last.weight'", "unsharded"]),
    (misuse.module_replaced_after_shard, "LifecycleError", ["'up'", "Block", "before sw.shard()"]),
    (misuse.block_appended_after_shard, "LifecycleError", ["ModuleList", "before sw.shard()"]),
    (misuse.parameter_added_after_shard, "LifecycleError", ["'gain'", "before sw.shard()"]),
    (misuse.parametrized_after_shard, "LifecycleError", ["'blocks.0.up.weight'", "unsharded"]),
    (misuse.parameter_of_rows, "LifecycleError", ["requires_grad_()", "'last.weight'"]),
    (misuse.initialised_after_shard, "LifecycleError", ["'first.weight'", "sw.unsharded"]),
    (misuse.orthogonal_after_shard, "LifecycleError", ["'last.weight'", "sw.unsharded"]),
    (misuse.drawn_after_shard, "LifecycleError", ["normal_()", "'last.weight'"]),
    (misuse.sum_of_squares_outside_its_unit, "LifecycleError", ["sum()", "'last.weight'"]),
    (misuse.singular_values_outside_their_unit, "LifecycleError", ["'last.weight'"]),
    (misuse.cast_after_shard, "LifecycleError", ["bfloat16", "sw.Precision"]),
    (misuse.block_cast_after_shard, "LifecycleError", ["float16", "before sw.shard()"]),
    (misuse.torch_clipping, "LifecycleError", ["_foreach_norm()", "sw.clip_grad_norm_"]),
    (misuse.torch_clipping_one_by_one, "LifecycleError", ["vector_norm()", "sw.clip_grad_norm_"]),
    (misuse.torch_clipping_of_whole_parameters, "LifecycleError", ["sw.clip_grad_norm_"]),
    (misuse.norm_of_a_gradient, "LifecycleError", ["norm()", "gradient of 'last.weight'"]),
    (misuse.norm_of_all_gradients_in_a_row, "LifecycleError", ["cat()", "as_subclass"]),
    (misuse.sum_of_a_gradients_squares, "LifecycleError", ["sum()", "gradient of 'last.weight'"]),
    (misuse.norms_of_scaled_gradients, "LifecycleError", ["_foreach_norm()"]),
    (misuse.normalising_hook, "LifecycleError", ["sum()", "gradient of 'last.weight'"]),
    (misuse.torch_scaler, "LifecycleError", ["gradient of", "sw.GradScaler"]),
    (misuse.optimizer_that_combines_elements, "LifecycleError", ["norm()", "whole='all'"]),
    (misuse.functional_call, "LifecycleError", ["another object", "functional_call"]),
    (misuse.auxiliary_loss_kept_on_self, "LifecycleError", ["auxiliary", "outputs"]),
    (misuse.deep_copy, "LifecycleError", ["before sw.shard()"]),
    (misuse.tied_after_shard, "LifecycleError", ["embedding.weight", "before sw.shard()"]),
    (misuse.embedding_with_max_norm, "SpecError", ["embedding", "max_norm=None"]),
    (misuse.old_weight_norm, "SpecError", ["'0'", "WeightNorm", "parametrizations"]),
    (misuse.gradient_before_shard, "SpecError", ["first.weight", "zero_grad()"]),
    (misuse.written_in_forward, "LifecycleError", ["first.weight", "in place"]),
    (misuse.step_while_unsharded, "LifecycleError", ["sw.unsharded()", "outside"]),
    (misuse.other_shape_written_back, "LifecycleError", ["last.weight", "(3, 7)", "(4, 7)"]),
    (misuse.dtype_for_precision, "SpecError", ["sw.Precision(param="]),
    (misuse.pickled, "LifecycleError", ["pickled", "sw.unsharded(model)"]),
    (misuse.backward_after_step, "LifecycleError", ["optimizer step", "forward again"]),
    (misuse.moved_after_shard, "LifecycleError", ["moved or replaced", "before sw.shard()"]),
    (misuse.create_graph, "LifecycleError", ["create_graph=True"]),
    (misuse.unfrozen_after_shard, "LifecycleError", ["first.weight", "frozen"]),
    (misuse.unsharded_in_forward, "LifecycleError", ["computing"]),
    (misuse.plain_model_in_ledger, "LifecycleError", ["plain Stack", "sw.shard"]),
    (misuse.not_a_module, "SpecError", ["nn.Module", "Tensor"]),
    (misuse.not_a_mesh, "SpecError", ["sw.init_mesh()", "int"]),
    (misuse.reshard_setting_against_strategy, "SpecError", ["zero2", "residency"]),
    (misuse.negative_clip, "SpecError", ["max_norm", "-1.0"]),
]

ON_ONE_RANK: list[tuple[Callable[[], None], list[str]]] = [
    (misuse.other_model_on_rank_1, ["rank 0", "rank 1", "blocks.3"]),
    (misuse.other_width_on_rank_1, ["rank 1", "last.weight", "(4, 7)", "(3, 7)"]),
    (misuse.other_strategy_on_rank_1, ["zero3", "zero2"]),
    (misuse.frozen_on_rank_1, ["first.weight", "frozen", "trainable"]),
    (misuse.parameter_without_values_on_rank_0, ["rank 0", "blocks.1", "meta_init"]),
]


@pytest.mark.parametrize(
    ("function", "error", "words"), CASES, ids=lambda v: getattr(v, "__name__", "")
)
def test_mistake_raises_clearly_on_all_ranks(
    pool: RankPool, function: Callable[[], None], error: str, words: list[str]
) -> None:
    for outcome in pool.attempt(2, function):
        assert outcome.raised == error, outcome
        for word in words:
            assert word in outcome.message
        assert outcome.seconds < 10


@pytest.mark.parametrize(
    ("function", "words"), ON_ONE_RANK, ids=lambda v: getattr(v, "__name__", "")
)
def test_difference_on_one_rank_raises_on_all_and_names_it(
    pool: RankPool, function: Callable[[], None], words: list[str]
) -> None:
    outcomes = pool.attempt(3, function)
    for outcome in outcomes:
        assert outcome.raised in ("RankMismatchError", "SpecError"), outcome
        assert outcome.seconds < 10
    for word in words:
        assert word in outcomes[0].message
