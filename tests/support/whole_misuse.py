"""What goes wrong with whole parameters and averages. Each function runs on ranks and raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import shardwright as sw
from tests.support.misuse import batch, rank
from tests.support.models import WIDTH, Stack


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4, WIDTH)).mean().backward()
    optimizer.step()


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def muon_on_rows() -> None:
    model = sw.shard(Stack(), "zero3")
    step(model, torch.optim.Muon(matrices(model)))


def muon_on_one_matrix_of_rows() -> None:
    model = sw.shard(Stack(), "zero2", whole=lambda name, p: p.ndim == 2 and "last" not in name)
    step(model, torch.optim.Muon(matrices(model)))


def muon_given_rows_later() -> None:
    model = sw.shard(Stack(), "zero3", whole=["first.weight"])
    optimizer = torch.optim.Muon([model.first.weight])
    step(model, optimizer)
    optimizer.add_param_group({"params": [model.last.weight]})
    step(model, optimizer)


def adafactor_with_vectors_on_rows() -> None:
    model = sw.shard(Stack(), "zero3", whole="matrices")
    step(model, torch.optim.Adafactor(model.parameters()))


class Lamb(torch.optim.SGD):
    """Stands for any of the packages' own."""


def lamb_on_rows() -> None:
    model = sw.shard(Stack(), "zero1")
    step(model, Lamb(model.parameters(), lr=0.1))


def unknown_kind() -> None:
    sw.shard(Stack(), "zero3", whole="matrix")


def unknown_name() -> None:
    sw.shard(Stack(), "zero3", whole=["blocks.0.up.wieght"])


def a_name_by_itself() -> None:
    sw.shard(Stack(), "zero3", whole="blocks.0.up.weight")


def not_a_name() -> None:
    sw.shard(Stack(), "zero3", whole=[3])


def a_number() -> None:
    sw.shard(Stack(), "zero3", whole=4096)


def frozen_name() -> None:
    model = Stack()
    model.last.weight.requires_grad_(False)
    sw.shard(model, "zero3", whole=["last.weight"])


def chooses_nothing() -> None:
    sw.shard(Stack(), "zero3", whole=lambda name, p: p.numel() > 10**9)


def other_choice_on_rank_1() -> None:
    name = "first.weight" if rank() == 1 else "last.weight"
    sw.shard(Stack(), "zero3", whole=[name])


def averaged_model() -> None:
    AveragedModel(sw.shard(Stack(), "zero3"))


def average_of_a_plain_model() -> None:
    sw.EMA(Stack())


def average_of_a_part() -> None:
    sw.EMA(sw.shard(Stack(), "zero3").blocks[0])


def decay_out_of_range() -> None:
    sw.EMA(sw.shard(Stack(), "zero3"), decay=1.5)


def updated_inside() -> None:
    ema = sw.EMA(sw.shard(Stack(), "zero3"))
    with ema.swapped():
        ema.update()


def stepped_inside() -> None:
    model = sw.shard(Stack(), "zero3")
    ema, optimizer = sw.EMA(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with ema.swapped():
        step(model, optimizer)


def written_inside() -> None:
    model = sw.shard(Stack(), "zero3")
    ema = sw.EMA(model)
    with ema.swapped(), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def swapped_in_forward() -> None:
    class Swaps(Stack):
        averages: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.averages.swapped():
                return super().forward(x)

    model = sw.shard(Swaps(), "zero3")
    model.averages = sw.EMA(model)
    model(batch())


def updated_after_unshard() -> None:
    model = sw.shard(Stack(), "zero3")
    ema = sw.EMA(model)
    sw.unshard_(model)
    ema.update()


def averages_of_another_model() -> None:
    ema = sw.EMA(sw.shard(Stack(), "zero3"))
    state = ema.state_dict()
    state["averages"]["blocks.9.up.weight"] = state["averages"].pop("blocks.0.up.weight")
    ema.load_state_dict(state)


def averages_of_another_mesh() -> None:
    plain = {n: p.detach().clone() for n, p in Stack().named_parameters()}
    ema = sw.EMA(sw.shard(Stack(), "zero3"))
    ema.load_state_dict({"decay": 0.9, "num_updates": 1, "averages": plain})
