"""Units are found where people would put them, and every parameter has one owner."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from shardwright.app.models import Block as DecoderBlock
from shardwright.app.models import Decoder
from shardwright.app.presets import PRESETS
from shardwright.core.errors import SpecError
from shardwright.runtime.units import ROOT, UnitModules, find_units, warn_if_one_unit_dominates
from tests.support.awkward import NestedUnits, SharesABlock, SharesANormBetweenUnits
from tests.support.models import Block, Stack, TiedDecoder


def names(units: list[UnitModules]) -> list[str]:
    return [u.name for u in units]


def owner_of(units: list[UnitModules], parameter: str) -> str:
    (owner,) = [u.name for u in units if parameter in [p.name for p in u.owned]]
    return owner


@pytest.mark.parametrize("preset", ["llama-3-8b", "llama-3-70b"])
def test_blocks_embedding_and_head_of_a_decoder_are_units_and_the_rest_is_the_roots(
    preset: str,
) -> None:
    config = PRESETS[preset]
    with torch.device("meta"):
        model = Decoder(config)
    units = find_units(model)
    blocks = [u for u in units if isinstance(u.module, DecoderBlock)]
    assert len(blocks) == config.layers
    assert len(units) == config.layers + 3
    root = units[0]
    assert root.name == ROOT
    assert root.numel == config.hidden  # the last norm
    assert sum(u.numel for u in units) == sum(p.numel() for p in model.parameters())


def test_a_tied_embedding_and_head_belong_to_the_root() -> None:
    config = dataclasses.replace(PRESETS["tiny"], tie_embeddings=True)
    units = find_units(Decoder(config))
    assert len(units) == config.layers + 1
    assert any(len(p.locations) == 2 for p in units[0].owned)


def test_tied_weights_have_one_owner_and_two_locations() -> None:
    units = find_units(TiedDecoder(), units=(Block, nn.Embedding))
    assert owner_of(units, "embedding.weight") == ROOT
    (tied,) = [p for p in units[0].owned if p.name == "embedding.weight"]
    assert [name for _, name in tied.locations] == ["weight", "weight"]
    assert "embedding" not in names(units)


def test_layers_of_a_sequential_are_units() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    assert names(find_units(model)) == [ROOT, "0", "2", "3"]


def test_a_single_block_in_a_list_is_a_unit() -> None:
    assert "blocks.0" in names(find_units(Stack(1)))


def test_repeated_attributes_are_units_without_a_list() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), Block()

    assert names(find_units(Pair())) == [ROOT, "one", "two"]


def test_lists_of_lists_give_the_inner_blocks() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(2)])
    assert names(find_units(model)) == [ROOT] + [f"stages.{i}.{j}" for i in (0, 1) for j in (0, 1)]


def test_nested_units_own_what_no_inner_unit_does() -> None:
    units = find_units(NestedUnits(), units=(type(NestedUnits().blocks[0]), Block))
    assert owner_of(units, "blocks.0.mix") == "blocks.0"
    assert owner_of(units, "blocks.0.one.up.weight") == "blocks.0.one"
    by_name = {u.name: u for u in units}
    assert by_name["blocks.0.one"].depth == 2
    assert units[by_name["blocks.0.one"].parent or 0].name == "blocks.0"


def test_what_two_units_share_belongs_to_the_unit_around_both() -> None:
    assert owner_of(find_units(SharesANormBetweenUnits()), "blocks.0.norm.weight") == ROOT


def test_a_block_registered_twice_is_one_unit() -> None:
    found = names(find_units(SharesABlock()))
    assert "blocks.0" in found
    assert "blocks.3" not in found


@pytest.mark.parametrize(
    "argument", [Block, (Block,), {Block}, lambda module: isinstance(module, Block)]
)
def test_a_class_classes_or_a_predicate_choose_units(argument: object) -> None:
    found = names(find_units(Stack(), units=argument))
    assert found == [ROOT, "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def test_none_puts_all_in_one_unit() -> None:
    (unit,) = find_units(Stack(), units=None)
    assert unit.numel == sum(p.numel() for p in Stack().parameters())


@pytest.mark.parametrize("argument", ["blocks", 3, (Block, "x"), nn.Conv2d])
def test_arguments_of_no_use_are_refused(argument: object) -> None:
    with pytest.raises(SpecError, match="units"):
        find_units(Stack(), units=argument)


def test_one_unit_that_holds_most_of_a_model_warns_with_its_peak() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=r"unit '0' holds 100% .* 0\.008 GiB are gathered"):
        warn_if_one_unit_dominates(find_units(model), 4)


def test_many_like_units_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
    warn_if_one_unit_dominates(find_units(model), 4)
    assert not recwarn.list
