"""One autograd node per call of a unit, and the hooks that tell when its backward begins.

The node's outputs are the unit's parameters: aliases of its slot that don't share the slot's
version counter, so that gathering the same values into the same slot again leaves autograd's saved
tensors valid. Its backward receives the gradients of all of them at once.

[Note: no cycles] node -> context -> call must never lead back to the aliases, whose `grad_fn` is
the node: the garbage collector can't free such a cycle. A `Call` therefore holds no tensor; the
hooks on a unit's outputs do, and nothing the node owns leads to them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shardwright.runtime.engine import Engine
    from shardwright.runtime.unit import ShardedUnit

__all__ = [
    "BackwardHook",
    "Call",
    "find_engine",
    "find_tensors",
    "make_aliases",
    "watch_outputs",
]


class Call:
    """One forward of a unit that may be followed by a backward.

    Attributes:
        engine: The engine.
        unit: The unit called.
        generation: Optimizer steps taken when it was called: its weights must not change before
            its backward.
        is_outstanding: Whether a backward may come and has not yet.
    """

    __slots__ = ("engine", "generation", "is_outstanding", "unit")

    def __init__(self, engine: Engine, unit: ShardedUnit, generation: int) -> None:
        self.engine = engine
        self.unit = unit
        self.generation = generation
        self.is_outstanding = False

    def expect_backward(self) -> None:
        """Count this call among those that await their backward."""
        self.is_outstanding = True
        self.unit.num_outstanding_calls += 1

    def settle(self) -> None:
        """Count it no more: its backward came, or its graph is gone."""
        if self.is_outstanding:
            self.is_outstanding = False
            self.unit.num_outstanding_calls = max(0, self.unit.num_outstanding_calls - 1)


class _UnitNode(torch.autograd.Function):
    """Input: a dummy leaf that requires grad. Outputs: the trainable parameters, as aliases."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, call: Call, chosen: tuple[int, ...]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.chosen = chosen
        views = call.unit.views
        return tuple(views[i].data for i in chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.call.engine.gradients_ready(ctx.call, ctx.chosen, gradients)
        return None, None, None


def make_aliases(
    anchor: torch.Tensor, call: Call, trainable: tuple[int, ...]
) -> list[torch.Tensor]:
    """Make the tensors that stand in for a unit's parameters during one call.

    Args:
        anchor: A leaf that requires grad.
        call: The call.
        trainable: Positions of the parameters that receive gradients now.

    Returns:
        One tensor per parameter, each a view of the slot, valid while the unit is unsharded.
        Those at `trainable` are outputs of the unit's node.
    """
    if not torch.is_grad_enabled():
        return call.unit.views
    aliases = [view.data for view in call.unit.views]
    if trainable:
        outputs = _UnitNode.apply(anchor, call, trainable)
        for position, alias in zip(trainable, outputs, strict=True):
            aliases[position] = alias
    return aliases


class BackwardHook:
    """Runs when a gradient of one of a call's outputs is about to be propagated."""

    __slots__ = ("aliases", "call")

    def __init__(self, call: Call, aliases: list[torch.Tensor]) -> None:
        self.call = call
        self.aliases = aliases

    def __call__(self, *_: Any) -> None:
        """Tell the engine; gradients pass unchanged."""
        self.call.engine.backward_begins(self.call, self.aliases)


def watch_outputs(outputs: Any, inputs: tuple[Any, Any], hook: BackwardHook) -> bool:
    """Install the hook on every output that autograd will go through.

    Args:
        outputs: What the unit returned.
        inputs: Its positional and keyword arguments; a tensor handed through is not an output.
        hook: The hook.

    Returns:
        Whether any was found.
    """
    handed_through: set[int] | None = None
    found = False
    for tensor in find_tensors(outputs):
        if tensor.grad_fn is None:
            continue
        if handed_through is None:
            handed_through = {id(t) for t in find_tensors(inputs)}
        if id(tensor) in handed_through:
            continue
        found = True
        tensor.register_hook(hook)
        if tensor._is_view() and tensor._base is not None and tensor._base.grad_fn is not None:
            # Writing into a view replaces the view's own node, and its hook with it.
            tensor._base.grad_fn.register_prehook(hook)
    return found


def find_engine(node: Any) -> Engine | None:
    """The engine whose units' parameters a graph leads to, nearest to its root first.

    Args:
        node: A tensor's `grad_fn`.
    """
    waiting, seen = deque([node]), {node}
    while waiting:
        current = waiting.popleft()
        call = getattr(current, "call", None)
        if isinstance(call, Call):
            return call.engine
        for following, _ in current.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return None


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, dicts, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from find_tensors(getattr(value, field.name, None))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        for item in vars(value).values():
            if isinstance(item, (torch.Tensor, dict, list, tuple)):
                yield from find_tensors(item)
