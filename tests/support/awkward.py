"""Models and ways of training that break sharding engines. Runs on ranks.

Each `Scenario` is a model class and a function that runs forward and backward once. They train
sharded and plainly, and must agree in float64 in every parameter and in which gradients are None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from tests.support.models import WIDTH, Block, Stack, vectors_for
from tests.support.parity import mesh_of, worst_difference

Backward = Callable[[nn.Module, torch.Tensor, int], None]
"""``(model, inputs, data ranks that share the batch)``: run forward and backward."""


def mean_square(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    (model(x) ** 2).mean().backward()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One awkward thing."""

    model: type[nn.Module] = Stack
    run: Backward = mean_square
    units: object = "auto"
    set_to_none: bool = True


class CallsEachBlockTwice(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(block(h))
        return self.last(h)


class RunsTheStackTwice(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(2):
            for block in self.blocks:
                h = block(h)
        return self.last(h)


class SkipsParametersEverySecondTime(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.extra_vector = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = super().forward(x)
        if self.calls % 2 == 0:
            h = h + (self.extra(x) + self.extra_vector * x).sum(-1, keepdim=True)
        return h


class SkipsABlockEverySecondTime(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.first(x)
        for index, block in enumerate(self.blocks):
            if index != 1 or self.calls % 2:
                h = block(h)
        return self.last(h)


class DropsABlocksOutput(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.first(x)
        for index, block in enumerate(self.blocks):
            y = block(h)
            if index != 1 or self.calls % 2:
                h = y
        return self.last(h)


class UsesAParameterOnSomeRanksOnly(Stack):
    """Samples choose the parameter, so that one process sees the same function of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.ones(WIDTH))
        self.matrix_never_used = nn.Parameter(torch.ones(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        chosen = x[:, 0, 0] > 0.8
        if chosen.any():
            h = h + (chosen[:, None, None] * (x * self.vector)).sum(-1, keepdim=True)
        return h


class PartlyFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight.requires_grad_(False)
        for parameter in self.blocks[2].parameters():
            parameter.requires_grad_(False)


class FreezesForAWhile(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad_(self.calls % 2 == 1)
        return super().forward(x)


class CheckpointedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointsInsideUnits(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CheckpointedBlock() for _ in range(4)])


class CheckpointsAroundUnits(Stack):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(h)


class CheckpointsReentrantly(CheckpointsAroundUnits):
    reentrant = True


class CheckpointsPairsOfUnits(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for k in (0, 2):
            pair = (self.blocks[k], self.blocks[k + 1])
            h = checkpoint(lambda z, pair=pair: pair[1](pair[0](z)), h, use_reentrant=False)
        return self.last(h)


class ParallelBranches(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(sum(block(h) for block in self.blocks))


class DictBlock(Block):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        y = super().forward(x)
        return {"y": y, "aux": (y**2).mean(-1, keepdim=True), "nothing": None, "count": 3}


class PassesDictsAlong(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DictBlock() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, aux = self.first(x), 0
        for block in self.blocks:
            found = block(h)
            h, aux = found["y"], aux + found["aux"]
        return self.last(h) + aux


@dataclass
class Output:
    hidden: torch.Tensor
    count: int = 0


class DataclassBlock(Block):
    def forward(self, given: Output) -> Output:  # type: ignore[override]
        return Output(hidden=super().forward(given.hidden), count=given.count + 1)


class PassesDataclassesAlong(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DataclassBlock() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = Output(hidden=self.first(x))
        for block in self.blocks:
            state = block(state)
        return self.last(state.hidden)


class ViewBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1, WIDTH)


class WritesIntoViewsReturned(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ViewBlock() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).view(-1, WIDTH)
        for block in self.blocks:
            h = block(h)
            h.mul_(1.5)
        return self.last(h)


class ReturnsItsWeight(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), self.down.weight


class HandsWeightsOut(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ReturnsItsWeight() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, penalty = self.first(x), 0
        for block in self.blocks:
            h, weight = block(h)
            penalty = penalty + (weight**2).mean()
        return self.last(h) + penalty


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(WIDTH))
        self.one, self.two = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x) @ self.mix) @ self.mix


class HandsOn(nn.Module):
    """Returns the very tensor that its inner unit returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + self.bias)


class HandsOutputsOn(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(HandsOn(), HandsOn(), Block(), HandsOn())


class NestedUnits(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair() for _ in range(3)])


class SharesANormBetweenUnits(Stack):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(WIDTH)
        for block in self.blocks:
            block.norm = norm


class SharesABlock(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3] = self.blocks[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, num_layers=2)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0])


class KeywordOnly(Stack):
    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return super().forward(x) * factor


class SizesOfAllKinds(nn.Module):
    """Empty shards, scalars, a convolution, an embedding with fewer columns than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.ones(1))
        self.one_row = nn.Linear(2, 1)
        self.linear = nn.Linear(WIDTH, 5)
        self.table = nn.Embedding(13, 3)
        self.convolution = nn.Conv1d(3, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sum(-1, keepdim=True) * self.scalar + self.single
        rows = self.table((x[..., :3].abs() * 4).long().clamp(max=12))
        filtered = self.convolution(rows.flatten(1, 2).transpose(1, 2)).mean((1, 2))
        return h + self.one_row(x[..., :2]) + filtered[:, None, None]


def two_forwards_then_two_backwards(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    first, second = (model(x) ** 2).mean(), (model(2 * x) ** 3).mean()
    first.backward()
    second.backward()


def two_forwards_then_backwards_reversed(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    first, second = (model(x) ** 2).mean(), (model(2 * x) ** 3).mean()
    second.backward()
    first.backward()


def one_backward_through_two_forwards(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    ((model(x) ** 2).mean() + (model(2 * x) ** 3).mean()).backward()


def same_graph_twice(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    loss = (model(x) ** 2).mean()
    loss.backward(retain_graph=True)
    loss.backward()


def several_backwards_without_accumulate(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    for factor in range(3):
        mean_square(model, factor * x, ranks)


def accumulated_then_several(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    context = sw.accumulate(model) if ranks else contextlib.nullcontext()
    with context:
        mean_square(model, x, ranks)
        mean_square(model, 0.5 * x, ranks)
    mean_square(model, 2 * x, ranks)
    mean_square(model, 3 * x, ranks)


def discards_half_way(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    context = sw.accumulate(model) if ranks else contextlib.nullcontext()
    with context:
        mean_square(model, 5 * x, ranks)
    model.zero_grad()
    with sw.accumulate(model) if ranks else contextlib.nullcontext():
        mean_square(model, x, ranks)
    mean_square(model, 2 * x, ranks)


def evaluates_in_between(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    with torch.no_grad():
        model(x)
        model(x)
    mean_square(model, x, ranks)
    with torch.no_grad():
        model(x)


def asks_for_input_gradients_first(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((model(leaf) ** 2).mean(), leaf)
    mean_square(model, x + gradient / max(ranks, 1), ranks)


def replaces_gradients(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    mean_square(model, x, ranks)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone() * 2
    mean_square(model, x, ranks)


def writes_to_parameters(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    """By hand, between forwards: nothing but the tensors' versions tells."""
    with torch.no_grad():
        model(x)
        for parameter in model.parameters():
            parameter.mul_(0.9)
        model(x)
        for parameter in model.parameters():
            parameter.add_(0.01)
    mean_square(model, x, ranks)


def hooks_on_gradients(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    """A hook that replaces, and one that changes, what the optimizer will see."""
    first, second = list(model.parameters())[:2]

    def double(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(2.0)

    handles = [
        first.register_hook(lambda gradient: gradient * 3.0),
        second.register_post_accumulate_grad_hook(double),
    ]
    mean_square(model, x, ranks)
    for handle in handles:
        handle.remove()


class ListsOfParameters(nn.Module):
    """Parameters in a list and a dict, which are never called, and attention by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.eye(WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(WIDTH))})
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.listed[0] @ self.listed[1] * self.named["scale"]
        return self.last(self.attention(h, h, h, need_weights=False)[0])


def fails_and_recovers(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    """An exception in a forward and one in a backward, on all ranks, each followed by a retry."""

    class Boom(RuntimeError):
        pass

    def raise_boom(*_: object) -> None:
        raise Boom

    hook = model.blocks[2].register_forward_hook(raise_boom)
    with contextlib.suppress(Boom):
        model(x)
    hook.remove()
    hook = model.blocks[1].register_full_backward_hook(raise_boom)
    with contextlib.suppress(Boom):
        mean_square(model, x, ranks)
    hook.remove()
    model.zero_grad()
    mean_square(model, x, ranks)


def calls_forward_by_name(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    (model.forward(x) ** 2).mean().backward()


def passes_keywords(model: nn.Module, x: torch.Tensor, ranks: int) -> None:
    (model(x=x, factor=2.0) ** 2).mean().backward()


SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(),
    "unit called twice in a row": Scenario(model=CallsEachBlockTwice),
    "units called again later": Scenario(model=RunsTheStackTwice),
    "two forwards, two backwards": Scenario(run=two_forwards_then_two_backwards),
    "two forwards, backwards reversed": Scenario(run=two_forwards_then_backwards_reversed),
    "two forwards, one backward": Scenario(run=one_backward_through_two_forwards),
    "retain_graph": Scenario(run=same_graph_twice),
    "retain_graph with reused units": Scenario(model=RunsTheStackTwice, run=same_graph_twice),
    "several backwards": Scenario(run=several_backwards_without_accumulate),
    "accumulate, then several": Scenario(run=accumulated_then_several),
    "zero_grad while accumulating": Scenario(run=discards_half_way),
    "zero_grad to zeros": Scenario(set_to_none=False),
    "parameters unused everywhere": Scenario(model=SkipsParametersEverySecondTime),
    "block skipped": Scenario(model=SkipsABlockEverySecondTime),
    "output unused": Scenario(model=DropsABlocksOutput),
    "parameter unused on some ranks": Scenario(model=UsesAParameterOnSomeRanksOnly),
    "frozen parts": Scenario(model=PartlyFrozen),
    "frozen for a while": Scenario(model=FreezesForAWhile),
    "checkpoint inside units": Scenario(model=CheckpointsInsideUnits),
    "checkpoint around units": Scenario(model=CheckpointsAroundUnits),
    "reentrant checkpoint": Scenario(model=CheckpointsReentrantly),
    "checkpoint around pairs": Scenario(model=CheckpointsPairsOfUnits),
    "parallel branches": Scenario(model=ParallelBranches),
    "dict outputs": Scenario(model=PassesDictsAlong),
    "dataclass outputs": Scenario(model=PassesDataclassesAlong),
    "writes into view outputs": Scenario(model=WritesIntoViewsReturned),
    "weight as output": Scenario(model=HandsWeightsOut),
    "nested units": Scenario(model=NestedUnits, units=(Pair, Block)),
    "outputs handed on": Scenario(model=HandsOutputsOn, units=(HandsOn, Block)),
    "norm shared between units": Scenario(model=SharesANormBetweenUnits),
    "block shared": Scenario(model=SharesABlock),
    "LSTM": Scenario(model=Recurrent),
    "sizes of all kinds": Scenario(model=SizesOfAllKinds),
    "evaluation in between": Scenario(run=evaluates_in_between),
    "input gradients": Scenario(run=asks_for_input_gradients_first),
    "gradients replaced": Scenario(run=replaces_gradients),
    "parameters written by hand": Scenario(run=writes_to_parameters),
    "hooks on gradients": Scenario(run=hooks_on_gradients),
    "lists of parameters, attention": Scenario(model=ListsOfParameters),
    "exceptions": Scenario(run=fails_and_recovers),
    "model.forward(x)": Scenario(run=calls_forward_by_name),
    "keyword arguments": Scenario(model=KeywordOnly, run=passes_keywords),
}

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hybrid_full_optimizer")


def train(
    scenario: Scenario, strategy: str | None, mesh: sw.Mesh, **settings: object
) -> tuple[dict[str, torch.Tensor], list[list[bool]]]:
    """Four steps of SGD with momentum; plainly, on all ranks' data, where strategy is None."""
    torch.manual_seed(0)
    model = scenario.model().double()
    ranks = 0
    if strategy is not None:
        model = sw.shard(model, strategy, mesh=mesh, units=scenario.units, **settings)
        ranks = mesh.data_size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    is_none = []
    for step in range(4):
        x = vectors_for(step, mesh.data_size)
        if strategy is not None:
            x = x[3 * mesh.data_rank : 3 * mesh.data_rank + 3]
        scenario.run(model, x, ranks)
        is_none.append([p.grad is None for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=scenario.set_to_none)
    with sw.unsharded(model) if strategy is not None else contextlib.nullcontext():
        return {k: v.clone() for k, v in model.state_dict().items()}, is_none


def compare(name: str, shape: tuple[int, int], **settings: object) -> list[str]:
    """Train one scenario under every strategy; returns what went wrong."""
    mesh, scenario, wrong = mesh_of(shape), SCENARIOS[name], []
    expected, expected_none = train(scenario, None, mesh)
    for strategy in STRATEGIES:
        actual, is_none = train(scenario, strategy, mesh, **settings)
        difference = worst_difference(expected, actual)
        if not difference <= 1e-9:
            wrong.append(f"{strategy}: parameters differ by {difference:.3g}")
        if is_none != expected_none:
            wrong.append(f"{strategy}: other gradients are None")
    return wrong
