"""Reads of parameters outside their unit that are right, and must stay so. Runs on ranks."""

from __future__ import annotations

import copy
import gc
import io

import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from tests.support.models import WIDTH, Stack


def legal_reads() -> dict[str, object]:
    """What reads of attributes of a sharded model give, around a step of training."""
    torch.manual_seed(0)
    plain = Stack()
    torch.manual_seed(0)
    model = sw.shard(Stack(), "zero3")
    x = torch.ones(2, 4, WIDTH)
    up = model.blocks[1].up
    found: dict[str, object] = {
        "dtype": up.weight.dtype,
        "repr": "blocks.1.up.weight" in repr(up.weight),
        "is_parameter": isinstance(up.weight, nn.Parameter),
        "is_registered": up.weight is dict(model.named_parameters())["blocks.1.up.weight"],
    }
    # Parameters that were read must train like the others.
    optimizer = torch.optim.AdamW([{"params": [up.weight]}, {"params": [model.last.bias]}], lr=0.1)
    reference = torch.optim.AdamW([plain.blocks[1].up.weight, plain.last.bias], lr=0.1)
    for trained, step in ((plain, reference), (model, optimizer)):
        for _ in range(2):
            trained(x).mean().backward()
            step.step()
            trained.zero_grad()
    found["block"] = torch.allclose(model.blocks[1](x), plain.blocks[1](x))
    with torch.no_grad(), sw.unsharded(model):
        whole = plain.blocks[1].up.weight
        found["linear"] = torch.allclose(functional.linear(x, up.weight), x @ whole.T)
        found["layer"] = torch.allclose(up(x), plain.blocks[1].up(x))
    with torch.no_grad():
        up.weight.mul_(0.0)
        kept = up.weight.detach().clone()
        up.weight.data.add_(1.0).sub_(1.0)
        found["rows"] = torch.equal(kept, torch.zeros_like(up.weight))
    sw.unshard_(model)
    found["after"] = type(up.weight) is nn.Parameter and type(up._parameters) is dict
    found["plain"] = torch.equal(up(x), up.bias.expand(2, 4, -1))
    return found


class KeepsWeight(Stack):
    """Uses a weight again that a block left behind: a fault of the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](self.first(x))
        kept = self.blocks[0].left_behind
        for block in self.blocks[1:]:
            h = block(h)
        return self.last(h) + kept.sum()


def leave_behind(block: nn.Module) -> None:
    inner = block.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        block.left_behind = block.up.weight.detach()
        return inner(x)

    block.forward = forward


def weight_kept_after_its_unit(*, poison_released: bool) -> bool:
    """Whether a use of a block's weight after its forward shows as NaN."""
    model = KeepsWeight()
    leave_behind(model.blocks[0])
    model = sw.shard(model, "zero3", poison_released=poison_released)
    return bool(model(torch.ones(2, 4, WIDTH)).isnan().all())


def elementwise_uses_of_gradients() -> list[str]:
    """What takes each element by itself, or only looks; names what went wrong."""
    model = sw.shard(Stack(), "zero3")
    model(torch.ones(2, 4, WIDTH)).square().mean().backward()
    gradient = model.last.weight.grad
    assert gradient is not None
    plain = gradient.as_subclass(torch.Tensor)
    kept, same = io.BytesIO(), plain.clone()
    torch.save(gradient, kept)
    kept.seek(0)
    found = {
        "clone": gradient.detach().clone(),
        "copy": copy.deepcopy(gradient),
        "saved": torch.load(kept, weights_only=False),
        "sign": gradient.sign() * gradient.abs(),
        "maximum": torch.max(gradient, gradient - 1),
        "by keyword": torch.max(input=torch.clone(input=gradient), other=gradient),
        "in place": gradient.mul_(2).div_(2),
    }
    gradient[gradient == 1e9] = 0
    torch.testing.assert_close(gradient, gradient.clone())
    gradient.detach_()
    wrong = [name for name, value in found.items() if not torch.equal(value + 0 * plain, same)]
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    if plain.abs().max() > 1e-3:
        wrong.append("clipped by value")
    if "ShardedGradient" not in repr(gradient):
        wrong.append("shown")
    return wrong


def plain_gradient_data(strategy: str) -> list[float]:
    """Gradients of three steps, each of which sets ``grad.data``."""
    model = sw.shard(nn.Linear(4, 2, bias=False), strategy)
    found = []
    for step in range(3):
        (model(torch.ones(2, 4)) * (step + 1)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data * 1
        found.append(model.weight.grad.as_subclass(torch.Tensor).mean().item())
        if step < 1:
            model.zero_grad()
    return found


def rprop() -> float:
    """torch.optim.Rprop, which sets gradients by mask: difference from one process."""
    plain, model = Stack().double(), Stack().double()
    model.load_state_dict(plain.state_dict())
    sw.shard(model, "zero3")
    x = torch.ones(2, 4, WIDTH, dtype=torch.float64)
    for net in (plain, model):
        optimizer = torch.optim.Rprop(net.parameters(), foreach=False)
        for step in range(3):
            net(x * (1 - step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return (plain(x) - model(x)).abs().max().item()


def forward_inside_unsharded() -> float:
    """A forward of a model whose root owns nothing: difference from one outside."""
    model = sw.shard(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), "zero3")
    x = torch.ones(2, 6)
    with torch.no_grad():
        outside = model(x)
        with sw.unsharded(model):
            return (model(x) - outside).abs().max().item()


def trained_after_unshard() -> bool:
    """Whether a model that is plain again trains, though its engine is not collected yet."""
    gc.disable()
    try:
        model = sw.shard(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), "zero3")
        sw.unshard_(model)
        before = model[0].weight.detach().clone()
        model(torch.ones(2, 6)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return not torch.equal(before, model[0].weight)
    finally:
        gc.enable()


def legal_changes() -> tuple[list[str], float]:
    """Additions that hold no parameters, and moves that change nothing: names, difference."""
    torch.manual_seed(0)
    plain = Stack().double()
    torch.manual_seed(0)
    model = sw.shard(Stack().double(), "zero3")
    for changed in (plain, model):
        changed.extra = nn.Dropout(0.0)
        changed.blocks.append(nn.Identity())
        changed.double().to("cpu").train()
        changed.same = changed.blocks[0]  # a second name for what is there
    with sw.unsharded(model, writeback=True):
        nn.init.constant_(model.last.weight, 0.5)
        nn.init.normal_(model.first.bias, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        nn.init.constant_(plain.last.weight, 0.5)
        nn.init.normal_(plain.first.bias, generator=torch.Generator().manual_seed(3))
    x = torch.ones(2, 4, WIDTH, dtype=torch.float64)
    return list(model._modules), (model(x) - plain(x)).abs().max().item()
