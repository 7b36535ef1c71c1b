"""Build a model without memory for its parameters, and know how each would have been initialised.

Inside `meta_init` a parameter is moved to the meta device as soon as a module registers it, and
every operation that touches it from then on is recorded instead of run (`recipe`). What
constructors compute before registration, `torch.randn(n) * 0.02` say, is run and recorded too, so
that its storage can be dropped. Buffers are real. `shard` and `materialize_` replay.

Recording itself is in `recorder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwright.core.errors import SpecError
from shardwright.runtime.recipe import TensorRef, digest, replay
from shardwright.runtime.recorder import (
    RECORDED,
    Disguise,
    Recorded,
    Recorder,
    adopt,
    is_recording,
    tag_of,
)

__all__ = ["Recording", "forget_recording", "materialize_", "meta_init", "recording_of"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """How a parameter on the meta device is initialised.

    Attributes:
        ref: Its values, in the dtype in which they were recorded.
        dtype: The parameter's dtype now.
    """

    ref: TensorRef
    dtype: torch.dtype

    def value(self) -> torch.Tensor:
        """Compute the whole parameter.

        Returns:
            A CPU tensor of its own, in the parameter's shape and the dtype *recorded*; cast what
            is needed of it to `dtype`.
        """
        (value,) = replay([self.ref])
        return value

    def digest(self) -> str:
        """Sum up what the values depend on; equal digests give equal bits."""
        return digest(self.ref)


def recording_of(parameter: nn.Parameter, name: str) -> Recording | None:
    """How a parameter on the meta device is initialised; None where nothing is known.

    Args:
        parameter: Any parameter.
        name: Its name, for messages.

    Raises:
        SpecError: It was changed after its recording ended.
    """
    if not parameter.is_meta:
        return None
    kept: Recorded | None = getattr(parameter, RECORDED, None)
    if kept is not None and kept.version != parameter._version:
        raise SpecError(
            f"{name!r} was changed in place after sw.meta_init() ended, where the change has no "
            "effect. Initialise inside `with sw.meta_init():`, or after sw.shard() inside "
            "`with sw.unsharded(model, writeback=True):`."
        )
    tag = tag_of(parameter)
    if tag is not None and tag.memory.is_deferred:
        ref = TensorRef.of(parameter, tag.memory, tag.memory.last)
    elif kept is not None and kept.ref.size == tuple(parameter.shape):
        ref = kept.ref  # cast since then: its storage is another
    else:
        return None
    return Recording(ref, parameter.dtype)


def forget_recording(parameter: nn.Parameter) -> None:
    """Let go of a parameter's recording once its values exist."""
    parameter.__dict__.pop(RECORDED, None)


def materialize_(model: ModuleT) -> ModuleT:
    """Give a model built inside `meta_init` its parameters, all of them, in place.

    The values are bitwise those that `shard` gives to its ranks.

    Args:
        model: A module that isn't sharded. Parameters that are real already are left alone.

    Returns:
        `model`, on the CPU, with the same parameter objects.

    Raises:
        SpecError: A parameter on the meta device has no recorded initialisation.
    """
    found: list[tuple[nn.Parameter, Recording]] = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            recording = recording_of(parameter, name)
            if recording is None:
                raise SpecError(
                    f"{name!r} is on the meta device and how to initialise it wasn't recorded; "
                    "build the model inside `with sw.meta_init():`"
                )
            found.append((parameter, recording))
    for parameter, recording in found:
        adopt(parameter, recording.value().to(recording.dtype))
        forget_recording(parameter)
    return model


@contextmanager
def meta_init() -> Iterator[None]:
    """Build models without memory for their parameters.

        torch.manual_seed(0)
        with sw.meta_init():
            model = Model()
        model = sw.shard(model, "zero3")

    Parameters end on the meta device, with everything recorded that the constructor, `model.apply`
    and the like did to them in this block; buffers are real. `shard` computes a parameter only on
    ranks that hold some of its rows, one at a time; `materialize_` computes all. Both give the same
    bits, whatever the number of ranks. Draws are governed by ``torch.manual_seed``, but are others
    than those of plain torch, which depend on their order.

    Values from outside (``torch.tensor``, numpy) are kept by reference; parameters that consist of
    nothing else stay real. Values that the constructor asks for in Python, as with ``.item()``, are
    computed on the spot. A block inside another adds nothing to it.
    """
    if is_recording():
        yield
        return
    recorder = Recorder()
    handles = [
        register_module_parameter_registration_hook(recorder.parameter_registered),
        register_module_buffer_registration_hook(recorder.buffer_registered),  # type: ignore[arg-type]
        register_module_module_registration_hook(recorder.module_registered),
    ]
    try:
        with recorder, Disguise(recorder):
            yield
    finally:
        for handle in handles:
            handle.remove()
        recorder.ends()
