"""Models built inside `sw.meta_init` hold no parameters, and get the ones plain torch would make.

The reference builds the same model for real, with the same draws for the same operations: a
`Recorder` that nothing tells of parameters runs every operation, and replays none.
"""

from __future__ import annotations

import copy
import gc
import math
import resource
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import shardwright as sw
from shardwright.core.errors import LifecycleError, SpecError
from shardwright.runtime.deferred import recording_of
from shardwright.runtime.recorder import Recorder
from tests.support import deferred
from tests.support.deferred import Everything, Holder, Rotary, on_meta
from tests.support.models import Block, TiedDecoder
from tests.support.parity import STRATEGIES
from tests.support.pool import RankPool


def reference(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with Recorder():
        return make()


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        found = actual.state_dict()[name]
        assert found.dtype == value.dtype, name
        assert torch.equal(found, value), name
    assert actual.state_dict().keys() == expected.state_dict().keys()
    for (name, found), (_, value) in zip(
        actual.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert type(found) is nn.Parameter, name
        assert found.requires_grad == value.requires_grad, name
        assert not found.is_meta, name


def initialized(make: Callable[[], nn.Module], function: Callable[..., Any]) -> nn.Module:
    model = make()
    model.apply(function)
    return model


def renormalize(module: nn.Module) -> None:
    """As Hugging Face models do it: through `.data`, by kind of module."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(mean=0.0, std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        module.weight.data = module.weight.data.double().normal_(0, 0.1).float()


def scale_rows(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.mul_(1 / math.sqrt(2))
            module.weight[0].fill_(0.5)
            module.weight.chunk(2)[1].add_(module.weight[:1] * 3)
            module.weight[torch.tensor([True] + [False] * (module.weight.shape[0] - 1))] = 9.0


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def normalized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))


def orthogonal_by_parametrization() -> nn.Module:
    return nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))


def sparse() -> nn.Module:
    layer = nn.Linear(6, 8)
    nn.init.sparse_(layer.weight, 0.5)
    return layer


def identity() -> nn.Module:
    layer = nn.Conv2d(3, 3, 3)
    nn.init.dirac_(layer.weight)
    nn.init.eye_(nn.init.xavier_normal_(layer.weight)[0, 0])
    return layer


def split_matrix() -> nn.Module:
    model = nn.Module()
    both = torch.randn(6, 4)
    model.first, model.second = nn.Parameter(both[:2]), nn.Parameter(both[2:])
    both.mul_(2)  # both parameters are views of it
    model.first.data.add_(1)
    return model


def out_arguments() -> nn.Module:
    values = torch.empty(5)
    torch.linspace(0, 1, 5, out=values)
    model = Holder(values)
    torch.mul(values, 2, out=model.weight.data)
    return model


def complex_rotation() -> nn.Module:
    turns = torch.polar(torch.ones(4), torch.arange(4.0))
    model = Holder(torch.view_as_real(turns) + 1)
    model.sines = nn.Parameter(turns.conj().imag * 2)
    model.products = nn.Parameter((turns.conj() * turns.conj()).imag.clone())
    return model


def with_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = Holder(torch.empty(4, 5))
    nn.init.normal_(model.weight, generator=generator)
    model.other = nn.Parameter(torch.randn(3, generator=generator))
    nn.init.uniform_(model.other, generator=generator)
    return model


def reads_values() -> nn.Module:
    model = Holder(torch.randn(4, 4))
    weight = model.weight.detach()
    model.scale = nn.Parameter(torch.full((3,), weight.abs().max().item()) + float(weight.sum()))
    model.order = nn.Parameter(torch.tensor(model.weight[0].tolist()).sort().values * 2)
    model.copy = nn.Parameter(torch.from_numpy(model.weight.detach().numpy().copy()) * 1)
    if (model.weight > 0).any() and torch.equal(model.weight, model.weight):
        nn.init.zeros_(model.scale)
    return model


def device_of_a_weight() -> nn.Module:
    model = Holder(torch.empty(4, 4))
    nn.init.normal_(model.weight)
    device = model.weight.device
    model.register_buffer("mask", torch.ones(4, device=device))
    model.register_buffer("squares", model.weight.detach() ** 2)
    model.register_buffer("zeros", torch.zeros_like(model.weight))
    if not model.weight.is_meta:
        nn.init.constant_(model.weight, 2.0)
    return model


def half_inside() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).to(torch.bfloat16)


def default_double() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    finally:
        torch.set_default_dtype(torch.float32)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).requires_grad_(False)
    model[1].bias.requires_grad_(True)
    return model


def seeded_in_the_constructor() -> nn.Module:
    torch.manual_seed(4)
    first = nn.Linear(3, 3)
    torch.manual_seed(4)
    model = nn.Sequential(first, nn.Linear(3, 3))
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model.append(nn.Linear(3, 3))
    return model.append(nn.Linear(3, 3))


MODELS: list[Callable[[], nn.Module]] = [
    Everything,
    TiedDecoder,
    Block,
    Rotary,
    encoder,
    normalized,
    orthogonal_by_parametrization,
    sparse,
    identity,
    split_matrix,
    out_arguments,
    complex_rotation,
    with_generator,
    reads_values,
    device_of_a_weight,
    half_inside,
    default_double,
    frozen,
    seeded_in_the_constructor,
    lambda: nn.Linear(5, 3),
    lambda: nn.Embedding(7, 4, padding_idx=2),
    lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
    lambda: nn.GRUCell(3, 4),
    lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    lambda: nn.ConvTranspose2d(2, 3, 3),
    lambda: nn.Sequential(nn.BatchNorm2d(3), nn.LayerNorm(4), nn.GroupNorm(1, 2), nn.PReLU()),
    lambda: nn.Bilinear(2, 3, 4),
    lambda: nn.ParameterList([nn.Parameter(torch.randn(2)), nn.Parameter(torch.zeros(3))]),
    lambda: Holder(torch.randn(4, 3) * 0.02 + torch.arange(3)),
    lambda: Holder(nn.functional.dropout(torch.ones(40), 0.5)),
    lambda: Holder(torch.from_numpy(np.arange(4.0)).float().cos()),
    lambda: initialized(TiedDecoder, renormalize),
    lambda: initialized(TiedDecoder, scale_rows),
    lambda: initialized(lambda: copy.deepcopy(Block()), scale_rows),
]


@pytest.mark.parametrize("make", MODELS, ids=lambda m: getattr(m, "__name__", ""))
def test_values_are_those_of_a_model_built_for_real(make: Callable[[], nn.Module]) -> None:
    expected = reference(make)
    model = on_meta(make)
    assert_same(sw.materialize_(model), expected)


def test_parameters_hold_no_memory_and_buffers_are_real() -> None:
    model, plain = on_meta(Everything), Everything()
    kinds = {name: p.device.type for name, p in model.named_parameters()}
    assert kinds.pop("scalar") == "cpu"  # nothing but a value from outside
    assert set(kinds.values()) == {"meta"}
    for name, buffer in plain.named_buffers():
        found = dict(model.named_buffers())[name]
        assert found.dtype == buffer.dtype, name
        assert torch.equal(found, buffer), name
    assert "rotary.inv_freq" not in model.state_dict()


def test_a_large_model_costs_next_to_nothing_to_build() -> None:
    """Half a tebibyte of parameters, half of them copies."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(1 << 15, 1 << 15) for _ in range(64)])
            for layer in self.layers:
                nn.init.kaiming_normal_(layer.weight)
                layer.weight.data.mul_(0.5)
            self.copy = copy.deepcopy(self.layers)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = on_meta(Large)
    assert sum(p.numel() * p.element_size() for p in model.parameters()) > 2**39
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_seeds_govern_values_and_the_default_generator_moves_little() -> None:
    first = sw.materialize_(on_meta(TiedDecoder, 1)).state_dict()
    again = sw.materialize_(on_meta(TiedDecoder, 1)).state_dict()
    other = sw.materialize_(on_meta(TiedDecoder, 2)).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    layers = [first[f"blocks.{i}.up.weight"] for i in range(3)]
    assert not torch.equal(layers[0], layers[1])
    torch.manual_seed(1)
    with sw.meta_init():
        TiedDecoder()
    after = torch.rand(1)
    torch.manual_seed(1)
    with sw.meta_init():
        TiedDecoder(blocks=2)
    assert torch.equal(torch.rand(1), after)


def test_draws_have_the_distribution_asked_for() -> None:
    layer = nn.Linear
    model = sw.materialize_(on_meta(lambda: layer(400, 300)))
    bound = 1 / math.sqrt(400)
    assert model.weight.abs().max() <= bound
    assert abs(model.weight.std().item() - bound / math.sqrt(3)) < 0.01 * bound
    assert abs(model.weight.mean().item()) < 0.01 * bound
    assert len(model.weight.unique()) > 100_000


def test_each_parameter_is_replayed_alone_and_in_any_order() -> None:
    model, expected = on_meta(TiedDecoder), reference(TiedDecoder)
    for name, parameter in reversed(list(model.named_parameters())):
        recording = recording_of(parameter, name)
        assert recording is not None
        assert torch.equal(recording.value(), dict(expected.named_parameters())[name])
        assert torch.equal(recording.value(), recording.value())


def test_a_parameter_overwritten_as_a_whole_replays_only_its_last_values() -> None:
    model = on_meta(lambda: initialized(lambda: nn.Linear(4, 3), renormalize))
    recording = recording_of(model.weight, "weight")
    assert recording is not None
    calls = []
    write = recording.ref.write
    while write is not None:
        calls.append(str(write.call.function))
        write = write.before
    assert calls == ["aten.normal_.default"]


def test_memory_never_written_is_nan_and_not_chance() -> None:
    model = on_meta(lambda: Holder(torch.empty(3, 2)))
    with torch.no_grad():
        assert sw.materialize_(model).weight.isnan().all()


def test_tied_weights_stay_one_object_and_one_parameter() -> None:
    model = on_meta(TiedDecoder)
    weight = model.embedding.weight
    assert model.head.weight is weight
    sw.materialize_(model)
    assert model.head.weight is model.embedding.weight is weight


def test_copies_of_a_layer_start_alike_as_in_plain_torch() -> None:
    model = sw.materialize_(on_meta(encoder))
    first, *others = [layer.state_dict() for layer in model.layers]
    for other in others:
        assert all(torch.equal(first[k], other[k]) for k in first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_after_the_block_cast_the_values(dtype: torch.dtype) -> None:
    model = on_meta(TiedDecoder).to(dtype)
    model.blocks[0].requires_grad_(False)
    expected = reference(TiedDecoder).to(dtype)
    expected.blocks[0].requires_grad_(False)
    assert_same(sw.materialize_(model), expected)


def test_a_copied_layer_is_cast_after_the_block_too() -> None:
    expected = reference(encoder).half()
    assert_same(sw.materialize_(on_meta(encoder).half()), expected)


def test_outside_values_are_kept_though_the_constructor_changes_them_later() -> None:
    def make() -> nn.Module:
        base = torch.tensor([1.0, 2.0])
        model = Holder(base * 10)
        base.zero_()
        model.after = nn.Parameter(base + 1)
        return model

    model = sw.materialize_(on_meta(make))
    assert model.weight.tolist() == [10.0, 20.0]
    assert model.after.tolist() == [1.0, 1.0]


def test_outside_values_changed_after_the_block_are_an_error() -> None:
    base = torch.tensor([1.0, 2.0])
    model = on_meta(lambda: Holder(base * 10))
    base.zero_()
    with pytest.raises(LifecycleError, match=r"shape \(2,\).*was changed"):
        sw.materialize_(model)


def test_memory_written_past_torch_is_not_replayed_without_it() -> None:
    def make() -> nn.Module:
        values = torch.zeros(3)
        values.numpy()[:] = 4.0
        model = Holder(values)
        model.double_ = nn.Parameter(values * 2)
        return model

    model = sw.materialize_(on_meta(make))
    assert model.weight.tolist() == [4.0] * 3
    assert model.double_.tolist() == [8.0] * 3


def test_buffers_changed_between_two_blocks_count_as_they_are() -> None:
    with sw.meta_init():
        model = Holder(torch.ones(2))
        model.register_buffer("state", torch.zeros(2))
    model.state.fill_(5.0)
    with sw.meta_init():
        model.derived = nn.Parameter(model.state * 2)
        model.from_first = nn.Parameter(model.weight.detach() + 1)
    sw.materialize_(model)
    assert model.derived.tolist() == [10.0, 10.0]
    assert model.from_first.tolist() == [2.0, 2.0]


def test_a_second_block_goes_on_recording() -> None:
    model = on_meta(TiedDecoder)
    with sw.meta_init():
        model.apply(renormalize)
        nn.init.constant_(model.blocks[0].norm.weight, 2.0)
        with torch.no_grad():
            model.blocks[0].norm.weight[1] = 3.0
    sw.materialize_(model)
    assert model.blocks[0].norm.weight.tolist() == [2.0, 3.0] + [2.0] * 5
    assert 0.01 < model.blocks[1].up.weight.std() < 0.03
    assert torch.equal(model.blocks[1].up.bias, torch.zeros(15))


def test_a_real_parameter_data_may_replace_a_deferred_one() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        layer.bias.data = torch.ones(2) * 3
        with torch.no_grad():
            layer.weight.mul_(2)
        return layer

    model = sw.materialize_(on_meta(make))
    assert model.weight.tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert model.bias.tolist() == [3.0, 3.0]


def test_blocks_nest_and_an_inner_one_changes_nothing() -> None:
    def nested() -> nn.Module:
        with sw.meta_init():
            inner = nn.Linear(3, 3)
        return nn.Sequential(inner, nn.Linear(3, 3))

    def flat() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    assert_same(sw.materialize_(on_meta(nested)), reference(flat))


def test_exceptions_leave_no_hooks_and_no_modes() -> None:
    def hooks() -> int:
        return sum(
            len(getattr(torch_module, name))
            for name in (
                "_global_parameter_registration_hooks",
                "_global_buffer_registration_hooks",
                "_global_module_registration_hooks",
            )
        )

    before = hooks()
    with pytest.raises(TypeError, match="out_features"), sw.meta_init():
        nn.Sequential(nn.Linear(2, hooks() - before), nn.Linear(3))
    assert hooks() == before
    assert not _get_current_dispatch_mode_stack()
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_model_without_a_recording_is_an_error_that_names_a_parameter() -> None:
    with torch.device("meta"):
        model = TiedDecoder()
    with pytest.raises(SpecError, match=r"'scale' is on the meta device.*sw\.meta_init"):
        sw.materialize_(model)
    with pytest.raises(SpecError, match=r"is on the meta device on data rank 0.*sw\.meta_init"):
        sw.shard(model)


def test_writes_after_the_block_are_an_error_and_not_lost() -> None:
    model = on_meta(TiedDecoder)
    nn.init.zeros_(model.blocks[1].up.weight)
    for function in (sw.materialize_, sw.shard):
        with pytest.raises(SpecError, match=r"'blocks\.1\.up\.weight' was changed in place"):
            function(model)


def test_a_parameter_in_a_graph_of_autograd_is_an_error_before_anything_moves() -> None:
    model = on_meta(TiedDecoder)
    kept = model.blocks[0](torch.ones(2, 7, device="meta"))
    with pytest.raises(SpecError, match=r"blocks\.0\..*graph"):
        sw.shard(model)
    assert all(p.is_meta for p in model.parameters())
    del kept
    sw.shard(model)


def test_other_threads_build_real_models_meanwhile() -> None:
    built: list[nn.Module] = []
    with sw.meta_init():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(3, 3)))
        thread.start()
        thread.join()
    assert not built[0].weight.is_meta


def test_what_is_no_longer_needed_is_freed() -> None:
    watched: list[weakref.ref[torch.Tensor]] = []

    def make() -> nn.Module:
        used, passing = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
        watched.extend([weakref.ref(used), weakref.ref(passing)])
        model = Holder(used * 2)
        model.register_buffer("kept", passing * 1)
        model.kept = torch.zeros(1)
        return model

    model = on_meta(make)
    gc.collect()
    assert watched[0]() is not None
    assert watched[1]() is None
    sw.materialize_(model)
    gc.collect()
    assert watched[0]() is None


# Several ranks


SHAPES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2)]


@pytest.mark.parametrize("seeds_differ", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_first_values_are_bitwise_the_same_for_every_world_and_strategy(
    pool: RankPool, shape: tuple[int, int], seeds_differ: bool
) -> None:
    """Seeds that differ by rank: the first rank's count."""
    expected = deferred.materialized_values()
    for by_strategy in pool.run(
        shape[0] * shape[1], deferred.initial_values, shape=shape, seeds_differ=seeds_differ
    ):
        assert set(by_strategy) == set(STRATEGIES)
        for strategy, values in by_strategy.items():
            assert values.keys() == expected.keys()
            wrong = [name for name in expected if values[name] != expected[name]]
            assert not wrong, (strategy, wrong)


@pytest.mark.parametrize("others", ["device", "meta_init"])
@pytest.mark.parametrize(
    ("strategy", "shape"),
    [("zero3", (1, 3)), ("ddp", (1, 2)), ("zero1", (1, 2)), ("hybrid", (2, 2))],
    ids=str,
)
def test_parameters_and_buffers_come_from_a_rank_0_that_is_real_alone(
    pool: RankPool, strategy: str, shape: tuple[int, int], others: str
) -> None:
    for wrong in pool.run(
        shape[0] * shape[1],
        deferred.from_a_real_rank_0,
        strategy=strategy,
        shape=shape,
        others=others,
    ):
        assert wrong == []


@pytest.mark.parametrize("build", ["meta_init", "rank 0"])
@pytest.mark.parametrize(
    ("strategy", "shape"), [("zero3", (1, 1)), ("zero3", (1, 4)), ("hybrid", (2, 2))], ids=str
)
def test_sharding_holds_one_whole_parameter_at_most_beside_the_shards(
    pool: RankPool, strategy: str, shape: tuple[int, int], build: str
) -> None:
    largest = 500 * 100 * 4
    ranks = pool.run(
        shape[0] * shape[1], deferred.costs_of_sharding, strategy=strategy, shape=shape, build=build
    )
    for costs in ranks:
        assert costs["beside"] <= largest + 8192, costs  # state of a random generator
        if build != "meta_init" or costs["holds_wide"]:
            assert costs["beside"] >= largest, costs


def test_ranks_draw_only_parameters_of_which_they_hold_rows(pool: RankPool) -> None:
    ranks = pool.run(
        4, deferred.costs_of_sharding, strategy="zero3", shape=(1, 4), build="meta_init"
    )
    assert all(costs["drawn"] == costs["expected"] for costs in ranks)
    assert len({costs["drawn"] for costs in ranks}) > 1


def test_training_is_the_same_and_an_optimizer_may_be_built_before(pool: RankPool) -> None:
    for shape in ((1, 1), (1, 2)):
        first = pool.run(shape[1], deferred.trained_losses, shape=shape, deferred=True)
        assert first == pool.run(shape[1], deferred.trained_losses, shape=shape, deferred=False)
        assert first[0][0] != first[0][-1]


def test_a_model_cast_before_sharding_starts_at_rounded_values(pool: RankPool) -> None:
    for same in pool.run(2, deferred.cast_before_sharding, shape=(1, 2)):
        assert same
        assert all(same)


def test_outside_values_that_differ_by_rank_are_taken_from_the_first(pool: RankPool) -> None:
    for values in pool.run(2, deferred.numpy_constants_by_rank, shape=(1, 2)):
        assert values == [10.0] * 12


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (deferred.meta_on_the_first_rank, ["'last.weight'", "rank 0", "sw.meta_init()"]),
        (deferred.meta_buffer_on_the_first_rank, ["buffer '1.running_var'", "rank 0"]),
    ],
)
def test_values_missing_on_the_first_rank_are_an_error_on_all(
    pool: RankPool, function: Callable[[], None], words: list[str]
) -> None:
    for outcome in pool.attempt(2, function):
        assert outcome.raised == "SpecError"
        for word in words:
            assert word in outcome.message
        assert outcome.seconds < 10
