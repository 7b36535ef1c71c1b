"""Scenarios that users of sharding engines have met, each small. Run on ranks.

Each function trains or looks, and returns what its test compares with the right answer.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.support.models import WIDTH, Block, Stack, vectors_for
from tests.support.parity import mesh_of, worst_difference

Shape = tuple[int, int]
Change = Callable[[nn.Module], None]


def nothing(model: nn.Module) -> None:
    """Change no model."""


def own(x: torch.Tensor, mesh: sw.Mesh) -> torch.Tensor:
    """This rank's samples."""
    count = len(x) // mesh.data_size
    return x[count * mesh.data_rank :][:count]


def train_plain(make: Callable[[], nn.Module], ranks: int, steps: int = 3) -> nn.Module:
    """One process on all ranks' samples."""
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        (model(vectors_for(step, ranks)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    with sw.unsharded(model):
        return {k: v.clone() for k, v in model.state_dict().items()}


# Micro-batches with and without a reduction each


def micro_batches(strategy: str, shape: Shape, *, whole: bool) -> dict[str, Any]:
    """One step of four micro-batches, reduced each time or once."""
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    settings = {"accumulation": "whole"} if whole else {}
    model = sw.shard(Stack().double().float(), strategy, mesh=mesh, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro_batch in range(4):
        x = own(vectors_for(micro_batch, mesh.data_size).float(), mesh)
        is_apart = whole and micro_batch < 3
        with sw.accumulate(model) if is_apart else contextlib.nullcontext():
            ((model(x) ** 2).mean() / 4).backward()
    optimizer.step()
    ledger, units = sw.ledger(model), sw.describe(model).units
    return {
        "reductions": {r.num_calls for r in ledger.traffic if r.collective == "reduce_scatter"},
        "memory": dict(ledger.memory),
        "gradient_bytes": 4 * sum(u.gradient_numel for u in units),
        "largest_gradient_bytes": 4 * max(u.gradient_numel for u in units),
        "trainable_bytes": 4 * sum(u.numel + u.padding_numel for u in units),
        "state": full_state(model),
    }


def micro_batches_plain(ranks: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Stack().double().float()
    for micro_batch in range(4):
        ((model(vectors_for(micro_batch, ranks).float()) ** 2).mean() / 4).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return dict(model.state_dict())


# The norm of all gradients


class ManyScales(nn.Module):
    """Gradients from 1e-6 to 1e6, and a parameter of two elements."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5)
        self.pair = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 1e3 * self.large(x) + 1e-6 * self.small(x)
        return y * self.pair[0] + self.pair[1]


def clipped(strategy: str, shape: Shape, norm_type: float) -> dict[str, Any]:
    """Three steps with a global norm of at most 0.1, beside one process."""
    mesh, norms = mesh_of(shape), []
    torch.manual_seed(0)
    plain = ManyScales().double()
    model = sw.shard(copy.deepcopy(plain), strategy, mesh=mesh)
    for step in range(3):
        x = vectors_for(step, mesh.data_size)
        (plain(x) ** 2).mean().backward()
        (model(own(x, mesh)) ** 2).mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        norm = sw.clip_grad_norm_(model, 0.1, norm_type)
        norms.append((type(norm), norm.shape, norm.item(), expected.item()))
        for each in (plain, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    empty = sum(p.numel() == 0 for p in model.parameters())
    return {
        "norms": norms,
        "difference": worst_difference(dict(plain.state_dict()), full_state(model)),
        "empty": empty,
    }


def clips_an_iterator() -> None:
    sw.clip_grad_norm_(sw.shard(Stack(), "zero3").parameters(), 1.0)  # type: ignore[arg-type]


# Adapters beside frozen weights


class Adapted(nn.Module):
    """A frozen Linear and two narrow trainable ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(torch.tanh(self.a(x)))


class AdaptedStack(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Adapted(), Adapted(), Adapted())


def adapters(strategy: str, shape: Shape) -> dict[str, Any]:
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    plain = AdaptedStack().double()
    first = {k: v.clone() for k, v in plain.state_dict().items()}
    model = sw.shard(copy.deepcopy(plain), strategy, mesh=mesh, units=Adapted)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01)
        for m in (plain, model)
    ]
    for step in range(3):
        x = vectors_for(step, mesh.data_size)
        (plain(x) ** 2).mean().backward()
        (model(own(x, mesh)) ** 2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = full_state(model)
    ledger, units = sw.ledger(model), sw.describe(model).units
    return {
        "difference": worst_difference(dict(plain.state_dict()), state),
        "base_is_unchanged": all(torch.equal(first[k], v) for k, v in state.items() if "base" in k),
        "base_gradients": sum(
            p.grad is not None for n, p in model.named_parameters() if "base" in n
        ),
        "adapter_numel": sum(p.numel() for p in plain.parameters() if p.requires_grad),
        "gradient_numel": sum(u.gradient_numel for u in units),
        "padding_numel": sum(u.padding_numel for u in units),
        "gradient_bytes": ledger.memory["gradient_shards"] + ledger.memory["gradient_buffers"],
        "optimizer_bytes": ledger.memory["optimizer_state"],
        "own_adapter_numel": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "num_adapters": sum(p.requires_grad for p in model.parameters()),
        "reduced_bytes": sum(
            r.sent_bytes for r in ledger.traffic if r.collective == "reduce_scatter"
        ),
        "shards": shape[1],
    }


# The smallest parameters


class Tiny(nn.Module):
    """Fewer rows than ranks everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.ones(1))
        self.row = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.row(x[..., :2]) * self.scalar + self.single


def tiny(strategy: str, shape: Shape) -> tuple[float, int]:
    """``(difference from one process, elements this rank owns)``."""
    mesh = mesh_of(shape)
    expected = dict(train_plain(Tiny, mesh.data_size).state_dict())
    torch.manual_seed(0)
    model = sw.shard(Tiny().double(), strategy, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        (model(own(vectors_for(step, mesh.data_size), mesh)) ** 2).mean().backward()
        sw.clip_grad_norm_(model, 1e9)
        optimizer.step()
        optimizer.zero_grad()
    return worst_difference(expected, full_state(model)), sum(p.numel() for p in model.parameters())


def average_of_one_and_three(strategy: str, shape: Shape, transport: str) -> list[float]:
    """The gradient where rank 0 has 1 and rank 1 has 3, element by element on this rank."""
    mesh = mesh_of(shape)
    model = sw.shard(nn.Linear(4, 4, bias=False), strategy, mesh=mesh, transport=transport)
    model(torch.full((1, 4), 1.0 + 2.0 * mesh.data_rank)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None, "the weight was used"
    return sorted(set(gradient.as_subclass(torch.Tensor).flatten().tolist()))


# A unit called twice, with activation checkpointing


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.encoder(x) + self.encoder(torch.flip(x, [1])))


def called_twice(strategy: str, shape: Shape, checkpoints: str) -> dict[str, torch.Tensor]:
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    model = Siamese().double()
    if checkpoints == "before":
        sw.checkpoint_activations(model, units=Block)
    model = sw.shard(model, strategy, mesh=mesh, units=Block)
    if checkpoints == "after":
        sw.checkpoint_activations(model, units=Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        (model(own(vectors_for(step, mesh.data_size), mesh)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model)


def called_twice_beside_plain(strategy: str, shape: Shape) -> tuple[float, bool]:
    """``(difference from one process, whether checkpointing changes no bit)``."""
    expected = dict(train_plain(Siamese, shape[0] * shape[1]).state_dict())
    states = [called_twice(strategy, shape, c) for c in ("never", "before", "after")]
    exact = all(torch.equal(states[0][k], s[k]) for s in states[1:] for k in s)
    return max(worst_difference(expected, s) for s in states), exact


# Structured inputs under mixed precision


@dataclass
class Inputs:
    values: torch.Tensor
    index: torch.Tensor
    note: str = ""


class TakesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: tuple[Any, ...] = ()

    def forward(self, given: Inputs) -> dict[str, Any]:
        self.seen = (given.values.dtype, given.index.dtype, given.note)
        return {"y": self.linear(given.values), "nothing": None, "pair": (3, given.values)}


def dataclass_under_bf16() -> tuple[tuple[Any, ...], Any, bool]:
    model = sw.shard(TakesDataclass(), "zero3", precision=sw.Precision(param=torch.bfloat16))
    found = model(Inputs(torch.ones(2, 4), torch.ones(2, dtype=torch.long), "kept"))
    found["y"].sum().backward()
    return model.seen, (found["nothing"], found["pair"][0]), model.linear.weight.grad is not None


# Other entries than forward


class Generates(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale

    def generate(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """Uses blocks and weights without passing through forward."""
        h = nn.functional.linear(x, self.first.weight, self.first.bias)
        for _ in range(length):
            for block in self.blocks:
                h = block(h)
        return self.last(h) * self.scale


def generates_unsharded(strategy: str, shape: Shape) -> float:
    """Largest difference of a method's result, before and after a training step."""
    mesh, worst = mesh_of(shape), 0.0
    torch.manual_seed(0)
    plain = Generates().double()
    model = sw.shard(copy.deepcopy(plain), strategy, mesh=mesh, units=Block)
    for step in range(2):
        x = vectors_for(step, mesh.data_size)
        with sw.unsharded(model), torch.no_grad():
            worst = max(worst, (model.generate(x, 3) - plain.generate(x, 3)).abs().max().item())
        (plain(x) ** 2).mean().backward()
        (model(own(x, mesh)) ** 2).mean().backward()
        for each in (plain, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    return worst


def blocks_alone(strategy: str, shape: Shape) -> float:
    """A unit called by itself, outside the model's forward, with and without gradients."""
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    plain = Stack().double()
    model = sw.shard(copy.deepcopy(plain), strategy, mesh=mesh, units=Block)
    x = vectors_for(0, mesh.data_size)
    with torch.no_grad():
        worst = (model.blocks[1](x) - plain.blocks[1](x)).abs().max().item()
    (plain.blocks[1](x) ** 2).mean().backward()
    (model.blocks[1](own(x, mesh)) ** 2).mean().backward()
    for each in (plain, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    return max(worst, worst_difference(dict(plain.state_dict()), full_state(model)))


def generates_without_gathering() -> None:
    model = sw.shard(Generates(), "zero3", units=Block)
    (model.generate(torch.ones(2, 4, WIDTH), 1) ** 2).mean().backward()


# Evaluation


@contextlib.contextmanager
def watch_gathered(model: nn.Module) -> Iterator[list[int]]:
    """Bytes gathered at every module's entry and exit, and at every output's gradient."""
    found: list[int] = []

    def note(*_: object) -> None:
        found.append(sw.ledger(model).unsharded_bytes)

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(note))
        handles.append(module.register_forward_hook(note))
        handles.append(module.register_full_backward_hook(note))
    yield found
    for handle in handles:
        handle.remove()


def gathered_in_evaluation(strategy: str, shape: Shape, distance: int) -> dict[str, int]:
    mesh = mesh_of(shape)
    model = sw.shard(
        Stack(6).double(),
        strategy,
        mesh=mesh,
        forward_prefetch=distance,
        backward_prefetch=distance,
    )
    x = own(vectors_for(0, mesh.data_size), mesh).requires_grad_()  # for hooks on the first
    with watch_gathered(model) as training:
        (model(x) ** 2).mean().backward()
    model.zero_grad()
    with watch_gathered(model) as evaluating, torch.no_grad():
        model(x)
        between = sw.ledger(model).unsharded_bytes
        model(x)
    return {
        "training": max(training),
        "evaluating": max(evaluating),
        "between": between,
        "after": sw.ledger(model).unsharded_bytes,
        "all": sum(u.gathered_bytes for u in sw.describe(model).units),
    }


def raises_while_accumulating(strategy: str, shape: Shape) -> tuple[float, bool]:
    """``(difference after a retry, whether the retry's own micro-batch counts as last)``."""
    mesh = mesh_of(shape)
    expected = dict(train_plain(Stack, mesh.data_size, steps=1).state_dict())
    torch.manual_seed(0)
    model = sw.shard(Stack().double(), strategy, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = own(vectors_for(0, mesh.data_size), mesh)

    def fail(*_: object) -> None:
        raise KeyError("on all ranks")

    handle = model.blocks[2].register_forward_hook(fail)
    with contextlib.suppress(KeyError), sw.accumulate(model):
        model(x)
    handle.remove()
    model.zero_grad()
    grad_mode = torch.is_grad_enabled()
    (model(x) ** 2).mean().backward()
    optimizer.step()
    return worst_difference(expected, full_state(model)), grad_mode


# When the optimizer is built


def optimizer_order(strategy: str, shape: Shape, order: str) -> tuple[float, bool]:
    """``(difference from one process, whether the first step changed a shard on any rank)``."""
    mesh = mesh_of(shape)
    expected = dict(train_plain(Stack, mesh.data_size).state_dict())
    torch.manual_seed(0)
    model, optimizer = Stack().double(), None

    def make() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    if order == "before":
        optimizer = make()
    model = sw.shard(model, strategy, mesh=mesh)
    if order == "after a forward":
        model(own(vectors_for(0, mesh.data_size), mesh))
    optimizer = optimizer or make()
    changed = torch.zeros(())
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        (model(own(vectors_for(step, mesh.data_size), mesh)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            pairs = zip(before, model.parameters(), strict=True)
            changed += sum(not torch.equal(a, b) for a, b in pairs)
    dist.all_reduce(changed)
    return worst_difference(expected, full_state(model)), bool(changed > 0)


# Groups of the user's


def groups_in_other_order(strategy: str) -> float:
    """Sub-groups of the user's, made by their members only, before or after the mesh."""
    rank = dist.get_rank()
    expected = dict(train_plain(Stack, 4).state_dict())
    pair = [0, 1] if rank < 2 else [2, 3]

    def make_pair() -> Any:
        return dist.new_group(pair, use_local_synchronization=True)

    group = make_pair() if rank < 2 else None
    mesh = mesh_of((2, 2))
    crossed = dist.new_group([3, 1, 0, 2])
    group = group or make_pair()
    torch.manual_seed(0)
    model = sw.shard(Stack().double(), strategy, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        (model(own(vectors_for(step, 4), mesh)) ** 2).mean().backward()
        dist.all_reduce(torch.ones(1), group=group)
        dist.all_reduce(torch.ones(1), group=crossed)
        optimizer.step()
        optimizer.zero_grad()
    return worst_difference(expected, full_state(model))


def timeouts_of_groups(seconds: float) -> set[float]:
    mesh = sw.init_mesh(replicate=2, shard=2, timeout_s=seconds)
    axes = (mesh.shard_axis, mesh.reduce_axis, mesh.replicate_axis, mesh.data_axis)
    cpu = torch.device("cpu")
    found = [axis.group._get_backend(cpu).options._timeout for axis in axes if axis.group]
    assert all(isinstance(t, dt.timedelta) for t in found)
    return {t.total_seconds() for t in found}


# What each rank keeps for itself


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 5), nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)
        self.register_buffer("offset", torch.ones(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x.flatten(0, 1)) + self.offset))


def batch_norm(strategy: str, shape: Shape) -> tuple[float, float]:
    """Differences from plain per-rank models whose gradients are averaged.

    Returns:
        Of this rank's running statistics, and of the parameters.
    """
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    plain = [Normalised().double()]
    plain += [copy.deepcopy(plain[0]) for _ in range(mesh.data_size - 1)]
    model = sw.shard(copy.deepcopy(plain[0]), strategy, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (*plain, model)]
    for step in range(3):
        x = vectors_for(step, mesh.data_size)
        (model(own(x, mesh)) ** 2).mean().backward()
        for rank, each in enumerate(plain):
            (each(x[3 * rank :][:3]) ** 2).mean().backward()
        for parameters in zip(*(m.parameters() for m in plain), strict=True):
            mean = torch.stack([p.grad for p in parameters]).mean(0)
            for p in parameters:
                p.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    mine, actual = dict(plain[mesh.data_rank].state_dict()), full_state(model)
    running = {k for k in mine if "running" in k or "tracked" in k}
    return (
        worst_difference({k: mine[k] for k in running}, {k: actual[k] for k in running}),
        worst_difference(
            {k: v for k, v in mine.items() if k not in running},
            {k: v for k, v in actual.items() if k not in running},
        ),
    )


def buffers_left_out_of_state() -> tuple[list[float], bool]:
    """A buffer that other ranks began with other values, and whether state dicts have it."""
    model = Normalised()
    model.offset.fill_(dist.get_rank() + 5.0)
    model = sw.shard(model, "zero3")
    with sw.unsharded(model):
        is_saved = "offset" in model.state_dict()
    return sorted(set(model.offset.tolist())), is_saved


def dropout(strategy: str, shape: Shape) -> tuple[float, list[float], bool]:
    """Losses with a seed per rank, beside a plain model with the same seed.

    Returns:
        Difference from the plain model, every rank's output for the same input, and whether
        `shard` left the random state alone.
    """
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), nn.Dropout(0.5), Block(), nn.Dropout(0.5)).double()
    torch.manual_seed(100 + mesh.data_rank)
    before = torch.get_rng_state()
    model = sw.shard(copy.deepcopy(plain), strategy, mesh=mesh, units=Block)
    is_untouched = torch.equal(before, torch.get_rng_state())
    x, worst, value = vectors_for(0, 1), 0.0, torch.zeros(())
    for _ in range(3):
        state = torch.get_rng_state()
        value = (model(x) ** 2).mean()
        value.backward()
        torch.set_rng_state(state)
        worst = max(worst, ((plain(x) ** 2).mean() - value).abs().item())
        model.zero_grad()
    values: list[Any] = [None] * mesh.data_size
    dist.all_gather_object(values, value.item())
    return worst, values, is_untouched


def hooks_on_modules(strategy: str, shape: Shape) -> tuple[float, list[str]]:
    """Forward hooks, full backward hooks and hooks on outputs see what one process sees.

    Returns:
        Largest difference from this rank's part, and the order of calls if it differs.
    """
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    plain = Stack().double()
    model = sw.shard(copy.deepcopy(plain), strategy, mesh=mesh)
    x = vectors_for(0, mesh.data_size)
    seen = [_watch(plain, x), _watch(model, own(x, mesh))]
    worst = 0.0
    for (name, expected), (other, actual) in zip(*seen, strict=True):
        if name != other:
            return worst, [name, other]
        mine = own(expected, mesh)
        if "gradient" in name:
            actual = actual / mesh.data_size
        worst = max(worst, (mine - actual).abs().max().item())
    return worst, []


def _watch(model: nn.Module, x: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []

    def forward(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            found.append((f"{name} input", inputs[0].detach().clone()))
            found.append((f"{name} output", output.detach().clone()))
            if output.requires_grad:
                output.register_hook(
                    lambda g: found.append((f"{name} output's gradient", g.clone()))
                )

        return hook

    def backward(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, grad_input: Any, grad_output: Any) -> None:
            found.append((f"{name} gradient out", grad_output[0].clone()))
            found.append((f"{name} gradient in", grad_input[0].clone()))

        return hook

    for index, block in enumerate(model.blocks):
        block.register_forward_hook(forward(f"block {index}"))
        block.register_full_backward_hook(backward(f"block {index}"))
    (model(x) ** 2).mean().backward()
    return found


def owners() -> tuple[list[str], dict[str, tuple[str, ...]], str]:
    """Names of all parameters, those of each unit, and the description as text."""

    class Outer(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.ones(WIDTH))
            self.one, self.two, self.norm = Block(), Block(), norm

    norm = nn.LayerNorm(WIDTH)
    model = nn.Sequential(Outer(norm), Outer(norm), nn.Linear(WIDTH, 3))
    names = [n for n, _ in model.named_parameters()]
    found = sw.describe(sw.shard(model, "zero3", units=(Outer, Block)))
    return names, {u.name: u.parameters for u in found.units}, str(found)


class RunsBackToFront(Stack):
    """Calls its blocks in another order than it registers them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in reversed(self.blocks):
            h = block(h)
        return self.last(h)


def graph_kept_on_one_rank(strategy: str, shape: Shape, transport: str) -> float:
    """Rank 0 keeps the output of a forward that has no backward; the others let it go."""
    mesh = mesh_of(shape)
    expected = dict(train_plain(RunsBackToFront, mesh.data_size).state_dict())
    torch.manual_seed(0)
    model = sw.shard(RunsBackToFront().double(), strategy, mesh=mesh, transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept = []
    for step in range(3):
        x = own(vectors_for(step, mesh.data_size), mesh)
        output = model(x)
        if mesh.data_rank == 0:
            kept.append(output)
        del output
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return worst_difference(expected, full_state(model))


# Losses that enter backward elsewhere than through a unit's outputs


def penalty_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A gradient penalty, as in WGAN-GP."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return (gradient.norm(dim=-1) - 1).square().mean()


def feature_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss of what a layer inside a unit gives."""
    seen: list[torch.Tensor] = []
    layer = model.get_submodule("blocks.1.up")
    handle = layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    model(x)
    handle.remove()
    return seen[0].square().mean()


LOSSES = {"penalty": penalty_loss, "features": feature_loss}


def losses_inside_units(strategy: str, shape: Shape, kind: str) -> float:
    """Train by such a loss after an ordinary backward: difference from one process."""
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    plain = Stack().double()
    torch.manual_seed(0)
    model = sw.shard(Stack().double(), strategy, mesh=mesh)
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            x = vectors_for(step, mesh.data_size)
            x = x if net is plain else own(x, mesh)
            net(x).square().mean().backward()
            LOSSES[kind](net, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return worst_difference(dict(plain.state_dict()), full_state(model))
