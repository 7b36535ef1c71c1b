"""Mistakes with whole parameters, their optimizers and averages say what to do, on every rank."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.core.errors import SpecError
from shardwright.core.layout import ParameterSpec, lay_out
from shardwright.runtime.optimizer_kinds import need_of
from shardwright.runtime.whole import warn_if_whole_pads
from tests.support import whole_misuse as misuse
from tests.support.pool import RankPool

CASES: list[tuple[Callable[[], None], str, list[str]]] = [
    (misuse.muon_on_rows, "SpecError", ["Muon", "'first.weight'", "whole='matrices'", "AdamW"]),
    (misuse.muon_on_one_matrix_of_rows, "SpecError", ["Muon", "'last.weight'", "(3, 7)"]),
    (misuse.muon_given_rows_later, "SpecError", ["Muon", "'last.weight'", "whole='matrices'"]),
    (misuse.adafactor_with_vectors_on_rows, "SpecError", ["Adafactor", ".bias'", "whole='all'"]),
    (misuse.lamb_on_rows, "SpecError", ["Lamb", "norms", "whole="]),
    (misuse.unknown_kind, "SpecError", ["'matrices' or 'all'", "did you mean 'matrices'"]),
    (misuse.unknown_name, "SpecError", ["'blocks.0.up.wieght'", "'blocks.0.up.weight'"]),
    (misuse.a_name_by_itself, "SpecError", ["a list of parameter names"]),
    (misuse.not_a_name, "SpecError", ["names 3"]),
    (misuse.a_number, "SpecError", ["callable", "4096"]),
    (misuse.frozen_name, "SpecError", ["'last.weight'", "frozen"]),
    (misuse.chooses_nothing, "SpecError", ["<lambda>", "no trainable parameter of Stack"]),
    (misuse.averaged_model, "LifecycleError", ["deep-copied", "sw.EMA(model, decay)"]),
    (misuse.average_of_a_plain_model, "LifecycleError", ["plain Stack", "swa_utils"]),
    (misuse.average_of_a_part, "LifecycleError", ["Block", "part of a sharded Stack"]),
    (misuse.decay_out_of_range, "SpecError", ["from 0 to 1", "1.5"]),
    (misuse.updated_inside, "LifecycleError", ["update()", "ema.swapped()"]),
    (misuse.stepped_inside, "LifecycleError", ["changed inside ema.swapped()", "averages"]),
    (misuse.written_inside, "LifecycleError", ["changed inside ema.swapped()", "averages"]),
    (misuse.swapped_in_forward, "LifecycleError", ["between passes"]),
    (misuse.updated_after_unshard, "LifecycleError", ["unshard_()"]),
    (misuse.averages_of_another_model, "SpecError", ["blocks.0.up.weight", "missing"]),
    (misuse.averages_of_another_mesh, "SpecError", ["shape", "ema.swapped()"]),
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


def test_another_choice_on_one_rank_raises_on_all(pool: RankPool) -> None:
    for outcome in pool.attempt(2, misuse.other_choice_on_rank_1):
        assert outcome.raised == "RankMismatchError", outcome
        assert "owned whole" in outcome.message


# --- recognised by name ----------------------------------------------------------------------


def optimizer_named(name: str, module: str, **attributes: Any) -> torch.optim.Optimizer:
    """An optimizer whose class pretends to come from a package."""
    cls = type(name, (torch.optim.SGD,), {"__module__": module})
    optimizer = cls([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    for key, value in attributes.items():
        setattr(optimizer, key, value)
    return optimizer


class Args:
    """As bitsandbytes keeps its settings."""

    def __init__(self, optim_bits: int, min_8bit_size: int) -> None:
        self.optim_bits = optim_bits
        self.min_8bit_size = min_8bit_size


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Lamb", "timm.optim.lamb"),
        ("LAMB", "bitsandbytes.optim.lamb"),
        ("FusedLAMB", "apex.optimizers.fused_lamb"),
        ("LARS", "pytorch_optimizer.optimizer.lars"),
        ("Shampoo", "torch_optimizer.shampoo"),
        ("DistributedShampoo", "distributed_shampoo"),
        ("SOAP", "soap"),
        ("Muon", "muon"),
        ("Adafactor", "transformers.optimization"),
        ("AdamW", "galore_torch.adamw"),
        ("AdamW8bit", "bitsandbytes.optim.adamw"),
        ("AdamW8bit", "torchao.optim.adam"),
        ("AdamW4bit", "torchao.prototype.low_bit_optim.adam"),
        ("AdamWFp8", "torchao.optim.adam"),
    ],
)
def test_optimizers_that_combine_elements_are_accepted_for_whole_parameters_only(
    name: str, module: str
) -> None:
    optimizer = optimizer_named(name, module)
    need = need_of(optimizer)
    assert need is not None
    need.check(optimizer, {})
    parameter = optimizer.param_groups[0]["params"][0]
    large = ParameterSpec(name="blocks.0.w", shape=(100, 100))
    with pytest.raises(SpecError, match=re.escape(f"{name} cannot update a sharded model")) as c:
        need.check(optimizer, {id(parameter): large})
    assert "'blocks.0.w'" in str(c.value)
    assert "whole=" in str(c.value)


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "SAM", "LBFGS", "SparseAdam"])
def test_optimizers_that_look_at_the_whole_model_are_refused_always(name: str) -> None:
    optimizer = optimizer_named(name, "somewhere")
    need = need_of(optimizer)
    assert need is not None
    with pytest.raises(SpecError, match=f"{name} cannot update a sharded model"):
        need.check(optimizer, {})


@pytest.mark.parametrize(
    "optimizer",
    [
        optimizer_named("Lion", "lion_pytorch"),
        optimizer_named("_AdamW", "torchao.optim.adam"),
        optimizer_named("AdamW8bit", "bitsandbytes.optim.adamw", args=Args(32, 4096)),
        torch.optim.AdamW([nn.Parameter(torch.ones(1))]),
        torch.optim.RMSprop([nn.Parameter(torch.ones(1))]),
    ],
    ids=lambda o: type(o).__name__,
)
def test_elementwise_optimizers_need_nothing(optimizer: torch.optim.Optimizer) -> None:
    assert need_of(optimizer) is None


def test_subclasses_are_recognised_too() -> None:
    class Mine(torch.optim.Adafactor):
        pass

    need = need_of(Mine([nn.Parameter(torch.ones(1))]))
    assert need is not None
    assert need.name == "Adafactor"


def test_groups_that_muon_leaves_to_its_elementwise_part_may_be_divided() -> None:
    optimizer = optimizer_named("MuonWithAuxAdam", "muon")
    group = optimizer.param_groups[0]
    divided = {id(group["params"][0]): ParameterSpec(name="w", shape=(20, 20))}
    need = need_of(optimizer)
    assert need is not None
    group["use_muon"] = False
    need.check(optimizer, divided)
    group["use_muon"] = True
    with pytest.raises(SpecError, match="MuonWithAuxAdam"):
        need.check(optimizer, divided)


@pytest.mark.parametrize(("threshold", "is_refused"), [(4096, False), (1024, True)])
def test_small_parameters_may_be_divided_where_their_state_is_not_quantised(
    threshold: int, is_refused: bool
) -> None:
    optimizer = optimizer_named("Adam", "bitsandbytes.optim.adam", args=Args(8, threshold))
    need = need_of(optimizer)
    assert need is not None
    parameter = optimizer.param_groups[0]["params"][0]
    divided = {id(parameter): ParameterSpec(name="w", shape=(2000,))}
    if not is_refused:
        need.check(optimizer, divided)
        return
    with pytest.raises(SpecError, match=r"whole=lambda name, p: p\.numel\(\) >= 1024"):
        need.check(optimizer, divided)


# --- padding ---------------------------------------------------------------------------------


def unit_of(*shapes: tuple[int, ...], owners: int, is_whole: bool = True) -> Any:
    specs = [ParameterSpec(name=f"w{i}", shape=s, is_whole=is_whole) for i, s in enumerate(shapes)]
    return lay_out("blocks.3", specs, shard_size=owners)


def test_much_padding_is_warned_of_with_its_cost_and_what_helps() -> None:
    layout = unit_of((2000, 1000), (100, 1000), owners=4)
    with pytest.warns(UserWarning, match="whole= pads units by 281%") as caught:
        warn_if_whole_pads([None, layout])
    text = str(caught[0].message)
    for word in ("5,900,000", "2,100,000", "'blocks.3'", "'w0' (2000, 1000)", "units=", "hybrid"):
        assert word in text


@pytest.mark.parametrize(
    "layout",
    [
        unit_of(*[(1000, 1000)] * 4, owners=4),
        unit_of((200, 10), owners=8),
        unit_of((2000, 1000), owners=7, is_whole=False),
    ],
    ids=["no padding", "a small model", "not whole"],
)
def test_little_padding_is_not_warned_of(layout: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_whole_pads([layout])
