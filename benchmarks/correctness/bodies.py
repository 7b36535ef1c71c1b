"""Ways of running forward and backward that are awkward for a sharding engine."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import nn

from benchmarks.correctness.findings import Planted
from benchmarks.correctness.training import Run, data, plainly

__all__ = [
    "calls_forward_by_name",
    "edits_weights",
    "evaluates",
    "evaluates_before_the_step",
    "fails_in_backward",
    "fails_in_forward",
    "mean_of_outputs",
    "one_backward",
    "overflowing_data",
    "penalises_a_weight",
    "reads_scale",
    "same_graph_twice",
    "scales",
    "skips_if_not_finite",
    "steps_with_scaler",
    "token_mean",
    "two_backwards",
    "two_backwards_reversed",
    "uses_input_gradients",
    "warm_up",
]

TOKENS = ((3, 7), (5, 1))
"""Valid tokens of two micro-batches, for each rank."""


def mean_of_outputs(run: Run, x: torch.Tensor) -> Any:
    """The mean output itself: gradients are the inputs."""
    loss = run.session.module(x).mean()
    run.session.backward(loss)
    return loss


def two_backwards(run: Run, x: torch.Tensor) -> None:
    """Two forwards, then their backwards in the same order."""
    first, second = run.mean_square(x), run.mean_square(2 * x, power=3)
    with run.session.several_backwards():
        run.session.backward(first)
        run.session.backward(second)


def two_backwards_reversed(run: Run, x: torch.Tensor) -> None:
    """Two forwards, then their backwards in the other order."""
    first, second = run.mean_square(x), run.mean_square(2 * x, power=3)
    with run.session.several_backwards():
        run.session.backward(second)
        run.session.backward(first)


def one_backward(run: Run, x: torch.Tensor) -> None:
    """Two forwards, one backward of the sum."""
    run.session.backward(run.mean_square(x) + run.mean_square(2 * x, power=3))


def same_graph_twice(run: Run, x: torch.Tensor) -> None:
    """One forward, two backwards."""
    loss = run.mean_square(x)
    with run.session.several_backwards():
        run.session.backward(loss, retain_graph=True)
        run.session.backward(loss)


def evaluates(run: Run, x: torch.Tensor) -> Any:
    """Two evaluations before every training pass."""
    module = run.session.module
    module.eval()
    with torch.no_grad():
        before = (module(x) ** 2).mean()
        module(2 * x)
    module.train()
    run.session.backward(run.mean_square(x))
    return before


def evaluates_before_the_step(run: Run, x: torch.Tensor) -> Any:
    """An evaluation between backward and the optimizer's step."""
    loss = plainly(run, x)
    with torch.no_grad():
        run.session.module(3 * x)
    return loss


def calls_forward_by_name(run: Run, x: torch.Tensor) -> Any:
    """``model.forward(x)`` in place of ``model(x)``."""
    loss = (run.session.module.forward(x) ** 2).mean()
    run.session.backward(loss)
    return loss


def penalises_a_weight(run: Run, x: torch.Tensor) -> Any:
    """Adds a penalty on a block's weight, read after the forward."""
    loss = run.mean_square(x)
    loss = loss + 0.1 * (run.session.usable_weight() ** 2).mean()
    run.session.backward(loss)
    return loss


def uses_input_gradients(run: Run, x: torch.Tensor) -> Any:
    """Asks for the gradient of the input first, as adversarial training does."""
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((run.session.module(leaf) ** 2).mean(), leaf)
    shares = run.ranks if run.world.is_alone else 1
    loss = run.mean_square(x + gradient * shares)
    run.session.backward(loss)
    return loss


def edits_weights(run: Run, x: torch.Tensor) -> Any:
    """Scales all parameters in place between two forwards."""
    with torch.no_grad():
        run.session.module(x)
        run.session.scale_parameters(0.9)
    loss = run.mean_square(x)
    run.session.backward(loss)
    return loss


def fails_in_forward(run: Run, x: torch.Tensor) -> Any:
    """In the second step all ranks raise in a block's forward, and try again."""
    return _fails(run, x, "register_forward_hook")


def fails_in_backward(run: Run, x: torch.Tensor) -> Any:
    """In the second step all ranks raise in a block's backward, and try again."""
    return _fails(run, x, "register_full_backward_hook")


def _fails(run: Run, x: torch.Tensor, register: str) -> Any:
    if run.step == 1:
        hook = getattr(run.session.inner.blocks[1], register)(_raise)
        with contextlib.suppress(Planted):
            run.session.backward(run.mean_square(x))
        hook.remove()
        run.session.recover()
        run.session.zero_grad()
    loss = run.mean_square(x)
    run.session.backward(loss)
    return loss


def _raise(*_: Any) -> None:
    raise Planted("planted")


def overflowing_data(seed: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Data whose second rank makes `Overflows` overflow in step 1."""
    x = data(seed, rows, dtype)
    if seed == 100:
        x[2, 0, 1] = 0.0
    return x


def scales(run: Run, x: torch.Tensor) -> None:
    """Backward through a loss scaler."""
    run.session.scaler = run.session.scaler or run.session.make_scaler()
    run.session.backward(run.session.scaler.scale(run.mean_square(x)))


def steps_with_scaler(run: Run) -> None:
    """``scaler.step`` and ``scaler.update``."""
    run.session.scaler.step(run.session.optimizer)
    run.session.scaler.update()
    run.session.zero_grad()


def reads_scale(run: Run) -> dict[str, torch.Tensor]:
    """The scaler's scale at the end."""
    return {"scale": torch.tensor(run.session.scaler.get_scale())}


def skips_if_not_finite(run: Run) -> None:
    """Steps if the norm is finite."""
    run.session.clip()
    if math.isfinite(run.session.global_norm()):
        run.session.step()
    run.session.zero_grad()


def token_mean(run: Run, _: torch.Tensor) -> None:
    """The mean over all tokens of two ranks and two micro-batches with other counts each."""
    total = sum(map(sum, TOKENS))
    for rank in range(run.ranks) if run.world.is_alone else [run.world.rank]:
        count = TOKENS[rank][run.micro_batch]
        rows = data(1000 * run.step + 10 * run.micro_batch + rank, 3, run.dtype)
        losses = (run.session.module(rows).flatten(0, 1)[:count] ** 2).sum()
        run.session.backward_tokens(losses, num_tokens=count, total=total, ranks=run.world.ranks)


def warm_up(module: nn.Module) -> None:
    """A forward without gradients before the optimizer is built."""
    with torch.no_grad():
        dtype = next(module.parameters()).dtype
        module(data(0, 2, dtype))
