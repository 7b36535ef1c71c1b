"""Linear layers whose weight gradient is computed straight into the reduce buffer.

Without this, autograd allocates each weight's gradient and the engine copies it. Here the matrix
product of the backward writes its result where the reduction reads it. Only the first use of a
weight per backward may write; later ones hand autograd an ordinary tensor, which it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["DirectLinear", "GradientSink", "write_indirectly"]


class GradientSink:
    """Where one parameter's gradient may be written directly.

    Attributes:
        view: The parameter's place in its unit's gradient buffer, in its own shape. None before
            gradients are bound.
        open_calls: Calls of the unit whose backward is under way. Where there is none, the buffer
            may be another's still: a loss of what lies inside a unit enters its backward in the
            middle.
        is_filled: Whether `view` already holds a gradient to add to.
        is_written: Whether this backward pass has handed `view` to autograd.
    """

    __slots__ = ("is_filled", "is_written", "open_calls", "view")

    def __init__(self) -> None:
        self.view: torch.Tensor | None = None
        self.open_calls: Sequence[object] = ()
        self.is_filled = False
        self.is_written = False


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias`` with x of shape ``(..., in)`` and weight ``(out, in)``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        ctx.has_bias = bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        sink: GradientSink = ctx.sink
        flat_grad = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (flat_grad @ weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(flat_grad, x.reshape(-1, x.shape[-1]), sink)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = flat_grad.sum(0)
        return grad_x, grad_weight, grad_bias, None


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, sink: GradientSink) -> torch.Tensor:
    view = sink.view
    is_free = bool(sink.open_calls) and not sink.is_written and not torch.is_grad_enabled()
    if view is None or not is_free or view.dtype != grad.dtype:
        return grad.t() @ x
    sink.is_written = True
    if sink.is_filled:
        return view.addmm_(grad.t(), x)
    return torch.mm(grad.t(), x, out=view)


class DirectLinear:
    """Stands in for `nn.Linear.forward` on one instance.

    Args:
        module: A module whose class is exactly `nn.Linear`.
        sink: Where its weight's gradient may go.
    """

    def __init__(self, module: nn.Linear, sink: GradientSink) -> None:
        self.module = module
        self.inner = module.forward
        self.sink = sink

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer; plain where a direct write is impossible."""
        weight, bias = self.module.weight, self.module.bias
        is_plain = (
            not weight.requires_grad
            or weight.is_leaf  # not an alias of a slot: outside its unit's window
            or not torch.is_grad_enabled()
            or torch.is_autocast_enabled(x.device.type)
            or torch.compiler.is_compiling()
        )
        if is_plain:
            return functional.linear(x, weight, bias)
        out: torch.Tensor = _Linear.apply(x, weight, bias, self.sink)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        raise NotImplementedError("copy the model before shard(), or use sw.unsharded(model)")


def write_indirectly(root: nn.Module) -> None:
    """Give the Linear layers inside a module their own forward back.

    A compiler makes its own backward, and would compile one graph per layer that stands in for
    another's forward.
    """
    for module in root.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, DirectLinear):
            del module.__dict__["forward"]
        elif forward is not None and isinstance(getattr(forward, "inner", None), DirectLinear):
            forward.inner = forward.inner.inner
