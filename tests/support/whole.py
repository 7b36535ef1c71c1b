"""Optimizers that need whole parameters, sharded and in one process. Runs on ranks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from tests.support import accounting
from tests.support.block_adamw import QUANTISED_FROM, BlockAdamW
from tests.support.models import Stack, TiedDecoder, tokens_for, vectors_for
from tests.support.parity import build, mesh_of, worst_difference

Optimizers = list[torch.optim.Optimizer]
Make = Callable[[nn.Module], Optimizers]


def muon_and_adamw(model: nn.Module) -> Optimizers:
    """Muon for matrices, as torch's documentation divides parameters; unmodified."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.0),
    ]


def adafactor(model: nn.Module) -> Optimizers:
    return [torch.optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.01)]


def adafactor_foreach(model: nn.Module) -> Optimizers:
    return [torch.optim.Adafactor(model.parameters(), lr=0.05, foreach=True)]


def adafactor_of_attributes(model: nn.Module) -> Optimizers:
    """Weights read as ``module.weight``, as a list written by hand would."""
    read = [getattr(module, name) for module in model.modules() for name in module._parameters]
    weights = {id(weight): weight for weight in read if weight is not None}
    return [torch.optim.Adafactor(weights.values(), lr=0.05, weight_decay=0.01)]


MAKERS: dict[str, tuple[Make, str]] = {
    "muon": (muon_and_adamw, "matrices"),
    "adafactor": (adafactor, "all"),
    "adafactor foreach": (adafactor_foreach, "all"),
    "adafactor of attributes": (adafactor_of_attributes, "all"),
}


def step_all(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(
    kind: str, strategy: str | None, mesh: sw.Mesh, micro_batches: int
) -> dict[str, torch.Tensor]:
    """Four steps; plainly, on all ranks' data, where strategy is None."""
    make, whole = MAKERS[kind]
    model: nn.Module = build(torch.float64)
    mine = slice(None)
    if strategy is not None:
        model = sw.shard(model, strategy, mesh=mesh, whole=whole)
        mine = slice(2 * mesh.data_rank, 2 * mesh.data_rank + 2)
    optimizers = make(model)
    for step in range(4):
        for micro_batch in range(micro_batches):
            batch = tokens_for(step, micro_batch, mesh.data_size)[mine]
            is_last = strategy is None or micro_batch == micro_batches - 1
            with contextlib.nullcontext() if is_last else sw.accumulate(model):
                (model(batch[:, :-1], batch[:, 1:]) / micro_batches).backward()
        if strategy is None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            sw.clip_grad_norm_(model, 1.0)
        step_all(optimizers)
    return full_state(model, is_sharded=strategy is not None)


def full_state(model: nn.Module, *, is_sharded: bool = True) -> dict[str, torch.Tensor]:
    with sw.unsharded(model) if is_sharded else contextlib.nullcontext():
        return {k: v.clone() for k, v in model.state_dict().items()}


def worst_of_training(kind: str, strategy: str, shape: tuple[int, int]) -> float:
    """Largest difference of any parameter from one process, with and without accumulation."""
    mesh = mesh_of(shape)
    return max(
        worst_difference(train(kind, None, mesh, count), train(kind, strategy, mesh, count))
        for count in (1, 2)
    )


def differs_bitwise(kind: str, strategy: str, shape: tuple[int, int]) -> list[str]:
    """Parameters that differ in any bit from one process that is given the same gradients, fp32.

    The process adds up the gradients of both ranks' parts of the batch and halves the sum, as the
    reduction does. Linear layers hand their gradients to autograd as plain ones do: a product
    written straight into the reduce buffer may be rounded otherwise, since it lies elsewhere.
    """
    mesh = mesh_of(shape)
    assert mesh.data_size == 2, "sums of more than two depend on their order"
    make, whole = MAKERS[kind]
    plain = build(torch.float32)
    sharded = sw.shard(
        build(torch.float32), strategy, mesh=mesh, whole=whole, direct_gradients=False
    )
    plain_optimizers, optimizers = make(plain), make(sharded)
    for step in range(5):
        parts = tokens_for(step, 0, 2).split(2)
        leaves = list(plain.parameters())
        one, two = (torch.autograd.grad(plain(part[:, :-1], part[:, 1:]), leaves) for part in parts)
        for parameter, a, b in zip(leaves, one, two, strict=True):
            parameter.grad = (a + b) * 0.5
        mine = parts[mesh.data_rank]
        sharded(mine[:, :-1], mine[:, 1:]).backward()
        step_all(plain_optimizers)
        step_all(optimizers)
    expected, actual = plain.state_dict(), full_state(sharded)
    return [name for name, value in expected.items() if not torch.equal(value, actual[name])]


def state_of_muon(shape: tuple[int, int]) -> tuple[int, int, bool, list[tuple[str, int, int]]]:
    """``(matrices with state here, matrices owned here, whether gradients are all set, rows)``."""
    mesh = mesh_of(shape)
    model = sw.shard(build(torch.float32), "zero3", mesh=mesh, whole="matrices")
    muon, adamw = muon_and_adamw(model)
    batch = tokens_for(0, 0, 1)
    model(batch[:, :-1], batch[:, 1:]).backward()
    muon.step()
    adamw.step()
    matrices = muon.param_groups[0]["params"]
    rows = sw.ledger(model).reconcile().rows
    return (
        len(muon.state),
        sum(p.numel() > 0 for p in matrices),
        all(p.grad is not None and p.grad.shape == p.shape for p in matrices),
        [(r.name, r.computed, r.counted) for r in rows if r.section == "traffic"],
    )


def shapes_of_shards(
    strategy: str, shape: tuple[int, int], whole: Any
) -> list[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """Name, local shape, global shape and global size of every parameter on this rank."""
    model = sw.shard(build(torch.float32), strategy, mesh=mesh_of(shape), whole=whole)
    return [
        (p.full_name, tuple(p.shape), tuple(p.global_shape), p.global_numel)
        for p in model.parameters()
    ]


def described(whole: Any) -> tuple[str, set[str]]:
    """The description in words, and the names it lists as owned whole."""
    found = sw.describe(sw.shard(build(torch.float32), "zero3", mesh=mesh_of((1, 2)), whole=whole))
    return str(found), {name for unit in found.units for name in unit.whole}


def storages_against_formula(strategy: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Bytes that training added to the process, and bytes by the formula."""
    mesh = mesh_of(shape)
    before = accounting.live_storages()
    model = sw.shard(build(torch.float32), strategy, mesh=mesh, whole="matrices")
    optimizers = muon_and_adamw(model)
    for step in range(2):
        batch = tokens_for(step, 0, 1)
        model(batch[:, :-1], batch[:, 1:]).backward()
        step_all(optimizers)
        del batch
    after = accounting.live_storages()
    added = sum(size for address, size in after.items() if before.get(address) != size)
    return added, sum(sw.ledger(model).computed_memory.values())


# --- block-quantised state -------------------------------------------------------------------


class Wide(nn.Module):
    """Some parameters above the size from which state is quantised, some below."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(40, 130)
        self.down = nn.Linear(130, 40)
        self.small = nn.Linear(40, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.down(torch.tanh(self.up(x))))


def is_quantised(name: str, parameter: nn.Parameter) -> bool:
    return parameter.numel() >= QUANTISED_FROM


def block_quantised(shape: tuple[int, int], strategy: str, *, whole: bool) -> float:
    """Largest difference from one process after steps of an AdamW with block-quantised state."""
    mesh = mesh_of(shape)

    def train(is_sharded: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model: nn.Module = Wide().double()
        mine = slice(None)
        if is_sharded:
            model = sw.shard(model, strategy, mesh=mesh, whole=is_quantised if whole else None)
            mine = slice(3 * mesh.data_rank, 3 * mesh.data_rank + 3)
        optimizer = BlockAdamW(model.parameters())
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(3 * mesh.data_size, 40, dtype=torch.float64, generator=generator)
            (model(x[mine]) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_state(model, is_sharded=is_sharded)

    return worst_difference(train(False), train(True))


# --- several optimizers, several models ------------------------------------------------------


def decayed_by_ndim(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def my_part(x: torch.Tensor, mesh: sw.Mesh, *, is_sharded: bool) -> torch.Tensor:
    """This rank's part of a batch, in rank order; all of it in one process."""
    if not is_sharded:
        return x
    size = len(x) // mesh.data_size
    return x[size * mesh.data_rank : size * (mesh.data_rank + 1)]


def made(kind: type[nn.Module], seed: int, strategy: str | None, mesh: sw.Mesh) -> nn.Module:
    torch.manual_seed(seed)
    model = kind().double()
    return model if strategy is None else sw.shard(model, strategy, mesh=mesh)


State = dict[str, torch.Tensor]


def adds_a_group(strategy: str | None, mesh: sw.Mesh) -> State:
    """Blocks train first, the rest joins the optimizer after two steps."""
    model = made(Stack, 0, strategy, mesh)
    late = [*model.first.parameters(), *model.last.parameters()]
    ids = {id(p) for p in late}
    early = [p for p in model.parameters() if id(p) not in ids]
    optimizer = torch.optim.AdamW(early, lr=0.01)
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": late, "lr": 0.02, "weight_decay": 0.0})
        x = my_part(vectors_for(step, mesh.data_size), mesh, is_sharded=strategy is not None)
        (model(x) ** 2).mean().backward()
        optimizer.step()
        model.zero_grad()
    return full_state(model, is_sharded=strategy is not None)


def decays_by_ndim(strategy: str | None, mesh: sw.Mesh) -> State:
    model = made(Stack, 0, strategy, mesh)
    optimizer = decayed_by_ndim(model)
    for step in range(5):
        x = my_part(vectors_for(step, mesh.data_size), mesh, is_sharded=strategy is not None)
        (model(x) ** 2).mean().backward()
        step_all([optimizer])
    return full_state(model, is_sharded=strategy is not None)


class Generator(Stack):
    """Vectors in, vectors of the same width out."""

    def __init__(self) -> None:
        super().__init__(2)
        self.last = nn.Linear(7, 7)


class Discriminator(Stack):
    def __init__(self) -> None:
        super().__init__(3)


def adversarial(strategy: str | None, mesh: sw.Mesh, *, freezes: bool) -> State:
    """Two models, two optimizers, in turn; the generator learns through the discriminator."""
    generator = made(Generator, 0, strategy, mesh)
    discriminator = made(Discriminator, 1, strategy, mesh)
    of_generator = torch.optim.AdamW(generator.parameters(), lr=0.01)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.9)
    is_sharded = strategy is not None
    for step in range(4):
        real = my_part(vectors_for(step, mesh.data_size), mesh, is_sharded=is_sharded)
        noise = my_part(vectors_for(100 + step, mesh.data_size), mesh, is_sharded=is_sharded)
        fake = generator(noise)
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        (functional.softplus(-on_real).mean() + functional.softplus(on_fake).mean()).backward()
        step_all([of_discriminator])
        if freezes:
            discriminator.requires_grad_(False)
        functional.softplus(-discriminator(fake)).mean().backward()
        step_all([of_generator])
        if freezes:
            discriminator.requires_grad_(True)
        else:
            discriminator.zero_grad()
    states = [full_state(m, is_sharded=is_sharded) for m in (generator, discriminator)]
    return {f"{i}.{k}": v for i, state in enumerate(states) for k, v in state.items()}


def adversarial_frozen(strategy: str | None, mesh: sw.Mesh) -> State:
    return adversarial(strategy, mesh, freezes=True)


def adversarial_discarding(strategy: str | None, mesh: sw.Mesh) -> State:
    return adversarial(strategy, mesh, freezes=False)


def distils(strategy: str | None, mesh: sw.Mesh) -> State:
    """A teacher without gradients, sharded too, and a student that follows it."""
    teacher = made(Stack, 5, strategy, mesh)
    student = made(Stack, 6, strategy, mesh)
    optimizer = decayed_by_ndim(student)
    for step in range(4):
        x = my_part(vectors_for(step, mesh.data_size), mesh, is_sharded=strategy is not None)
        with torch.no_grad():
            target = teacher(x)
        functional.mse_loss(student(x), target).backward()
        step_all([optimizer])
    states = [full_state(m, is_sharded=strategy is not None) for m in (teacher, student)]
    return {f"{i}.{k}": v for i, state in enumerate(states) for k, v in state.items()}


SCRIPTS: dict[str, Callable[[str | None, sw.Mesh], State]] = {
    "parameter group added mid-run": adds_a_group,
    "weight decay by ndim": decays_by_ndim,
    "GAN, discriminator frozen in turn": adversarial_frozen,
    "GAN, gradients discarded": adversarial_discarding,
    "teacher and student": distils,
}


def compare_script(name: str, strategy: str, shape: tuple[int, int]) -> float:
    """Largest difference from one process."""
    mesh = mesh_of(shape)
    return worst_difference(SCRIPTS[name](None, mesh), SCRIPTS[name](strategy, mesh))


# --- averages --------------------------------------------------------------------------------


def ema_differs(strategy: str, shape: tuple[int, int], whole: str | None) -> dict[str, float]:
    """Differences from one process: of averages, of evaluations with them, of what comes after."""
    mesh = mesh_of(shape)
    plain = build(torch.float64)
    sharded = sw.shard(build(torch.float64), strategy, mesh=mesh, whole=whole)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    expected = {k: p.detach().clone() for k, p in plain.named_parameters()}
    ema = sw.EMA(sharded, decay=0.8)
    worst = {"averages": 0.0, "evaluation": 0.0, "trained": 0.0}
    for step in range(4):
        batch = tokens_for(step, 0, mesh.data_size)
        mine = batch[2 * mesh.data_rank : 2 * mesh.data_rank + 2]
        plain(batch[:, :-1], batch[:, 1:]).backward()
        sharded(mine[:, :-1], mine[:, 1:]).backward()
        step_all([plain_optimizer])
        step_all([optimizer])
        ema.update()
        for name, parameter in plain.named_parameters():
            expected[name].lerp_(parameter.detach(), 0.2)
        with ema.swapped(), torch.no_grad():
            loss = sharded(batch[:, :-1], batch[:, 1:])
            averages = full_state(sharded)
        values = torch.func.functional_call(plain, expected, (batch[:, :-1], batch[:, 1:]))
        found = {k: averages[k] for k in expected}
        worst["averages"] = max(worst["averages"], worst_difference(expected, found))
        worst["evaluation"] = max(worst["evaluation"], (loss - values).abs().item())
        trained = worst_difference(dict(plain.state_dict()), full_state(sharded))
        worst["trained"] = max(worst["trained"], trained)
    return worst


def ema_is_swapped_back_after_an_error(strategy: str) -> tuple[bool, bool]:
    """Whether parameters, and averages, are bitwise as before."""
    model = sw.shard(build(torch.float32), strategy, mesh=mesh_of((1, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = sw.EMA(model, decay=0.5)
    batch = tokens_for(0, 0, 1)
    model(batch[:, :-1], batch[:, 1:]).backward()
    step_all([optimizer])
    ema.update()
    parameters = [p.detach().clone() for p in model.parameters()]
    averages = {k: v.clone() for k, v in ema.averages.items()}
    with contextlib.suppress(ZeroDivisionError), ema.swapped():
        model(batch[:, :-1], batch[:, 1:])
        raise ZeroDivisionError
    same = all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    return same, all(torch.equal(v, ema.averages[k]) for k, v in averages.items())


def ema_with_narrow_compute(strategy: str, shape: tuple[int, int]) -> list[bool]:
    """Whether outputs in bfloat16 are bitwise those of the first weights, then of the later ones.

    The averages stay what they were made as; only the cast and the gather can bring them back.
    """
    mesh = mesh_of(shape)
    model = sw.shard(
        build(torch.float32), strategy, mesh=mesh, precision=sw.Precision(param=torch.bfloat16)
    )
    batch = tokens_for(0, 0, 1)

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return model(batch[:, :-1], batch[:, 1:])

    first = evaluate()
    ema = sw.EMA(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(batch[:, :-1], batch[:, 1:]).backward()
    step_all([optimizer])
    later = evaluate()
    with ema.swapped():
        inside = evaluate()
    return [torch.equal(inside, first), torch.equal(evaluate(), later), not first.equal(later)]


def ema_memory(strategy: str, shape: tuple[int, int]) -> tuple[int, int, int]:
    """``(bytes that making averages added, bytes stated, bytes left by updates and swaps)``."""
    model = sw.shard(build(torch.float32), strategy, mesh=mesh_of(shape))
    before = accounting.live_storages()
    ema = sw.EMA(model)
    after = accounting.live_storages()
    for _ in range(3):
        ema.update()
        with ema.swapped():
            pass
    later = accounting.live_storages()
    added = sum(size for address, size in after.items() if before.get(address) != size)
    return added, ema.num_bytes, sum(later.values()) - sum(after.values())


def ema_state_travels() -> tuple[bool, int, list[str]]:
    """Save, load into another of the same kind: ``(equal, updates, names)``."""
    mesh = mesh_of((1, 2))
    model = sw.shard(build(torch.float32), "zero3", mesh=mesh)
    ema = sw.EMA(model, decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    ema.update()
    file = io.BytesIO()
    torch.save(ema.state_dict(), file)
    file.seek(0)
    other = sw.EMA(sw.shard(build(torch.float32), "zero3", mesh=mesh))
    other.load_state_dict(torch.load(file, weights_only=True))
    equal = all(torch.equal(v, other.averages[k]) for k, v in ema.averages.items())
    return equal and other.decay == 0.5, other.num_updates, sorted(other.averages)


class HalfFrozen(TiedDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


def ema_names_of_a_half_frozen_model() -> list[str]:
    model = sw.shard(HalfFrozen(), "zero3", mesh=mesh_of((1, 2)))
    return sorted(sw.EMA(model).averages)
