"""Keep torch.compile out of the engine, and let it into what the engine runs.

The engine moves data between processes and drives a state machine: nothing a compiler could trace,
and nothing it may leave out. So a unit's wrapper is code that the compiler skips; while the engine
works, compilation pauses; and it resumes for the module's own forward, which then is one graph.

``torch.compiler.disable`` does the same, but importing it takes seconds that a run which compiles
nothing would pay. What it is made of is used here directly, in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["compiled_inside", "is_compiled", "pause", "resume", "skipped_by_compiler"]

_frames: Any = torch._C._dynamo.eval_frame

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def skipped_by_compiler(function: _FunctionT) -> _FunctionT:
    """Decorate a function that torch.compile must neither trace nor inline."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "shardwright's engine"  # type: ignore[attr-defined]
    code = function.__code__
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        _frames.set_code_exec_strategy(code, skip)
    else:
        _frames.skip_code(code)
    return function


@skipped_by_compiler
def pause() -> Any:
    """Stop compiling what runs from now on.

    Returns:
        What `resume` takes; None where nothing was being compiled.
    """
    return _frames.set_eval_frame(None)


@skipped_by_compiler
def resume(compiler: Any) -> None:
    """Go on compiling as before `pause`."""
    _frames.set_eval_frame(compiler)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward, or a module it only wraps, was given to ``torch.compile``."""
    return hasattr(module.forward, "_torchdynamo_orig_callable") or "_orig_mod" in module._modules


@skipped_by_compiler
def compiled_inside(function: Callable[..., Any], compiler: Any) -> Callable[..., Any]:
    """Let a function that is called while compilation is paused be compiled.

    Args:
        function: The function.
        compiler: From `pause`.
    """
    if compiler is None:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        resume(compiler)
        try:
            return function(*args, **kwargs)
        finally:
            pause()

    return call
