"""Where a sharded model's first values come from, decided by all ranks together.

The first data rank decides, parameter by parameter:

    real there                         broadcast from it; other ranks may have it on the meta device
    recorded (`deferred`) everywhere,  every rank replays those of which it holds rows, and nothing
      with equal digests               is sent
    recorded there, otherwise          it replays, and broadcasts
      elsewhere
    neither                            an error on all ranks, or NaN where values are loaded later

Parameters come one at a time, so that beside its shards a rank holds one whole parameter at most.
Buffers are broadcast. `build` calls this.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwright.core.errors import SpecError
from shardwright.runtime.deferred import Recording, forget_recording, recording_of
from shardwright.runtime.mesh import Mesh
from shardwright.runtime.recorder import adopt
from shardwright.runtime.transport.control import broadcast_, gather_objects
from shardwright.runtime.unit import ShardedUnit
from shardwright.runtime.units import OwnedParameter, UnitModules

__all__ = ["FirstValues", "LocalValues", "agree_on_first_values", "find_local_values"]

_REAL = "real"
_NOTHING = "nothing"


class _Source(enum.Enum):
    OWN = "this rank's own"
    BROADCAST = "the first data rank's"
    REPLAY = "replayed"
    LATER = "NaN until loaded"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalValues:
    """What this rank could provide.

    Attributes:
        parameters: For each parameter, by name, ``real``, ``nothing`` or its recording's digest.
        buffers: For each buffer ``real`` or ``nothing``.
        recordings: Recordings by parameter name.
    """

    parameters: dict[str, str]
    buffers: dict[str, str]
    recordings: dict[str, Recording]


def find_local_values(model: nn.Module, units: Sequence[UnitModules]) -> LocalValues:
    """Look at what each parameter and buffer holds on this rank.

    Args:
        model: The model.
        units: Its units.

    Raises:
        SpecError: A parameter was changed after its recording ended, or is in use.
        LifecycleError: What a parameter is computed from was changed.
    """
    kinds: dict[str, str] = {}
    recordings: dict[str, Recording] = {}
    for owned in (o for unit in units for o in unit.owned):
        recording = recording_of(owned.parameter, owned.name)
        if owned.parameter.is_meta and owned.parameter._use_count() > 1:  # type: ignore[attr-defined]
            raise SpecError(
                f"{owned.name!r} on the meta device is part of a graph of autograd, which would "
                "not see its values; let go of what was computed from it before sw.shard()"
            )
        if recording is not None:
            recordings[owned.name] = recording
            kinds[owned.name] = recording.digest()
        else:
            kinds[owned.name] = _NOTHING if owned.parameter.is_meta else _REAL
    buffers = {n: _NOTHING if b.is_meta else _REAL for n, b in model.named_buffers()}
    return LocalValues(parameters=kinds, buffers=buffers, recordings=recordings)


def agree_on_first_values(
    local: LocalValues, mesh: Mesh, *, is_broadcast: bool, is_initialized: bool
) -> FirstValues:
    """Decide where each value comes from.

    Collective over the mesh's data axes. The outcome is the same on all ranks, errors included.

    Args:
        local: What this rank could provide.
        mesh: The mesh.
        is_broadcast: Whether the first data rank decides; otherwise each rank takes its own.
        is_initialized: Whether parameters that aren't real get values now.

    Raises:
        SpecError: A value is nowhere to be found; names it and says what to do.
    """
    everyone = gather_objects(mesh.data_axis, (local.parameters, local.buffers))
    deciding = everyone[:1] if is_broadcast else everyone
    for rank, (_, buffers) in enumerate(deciding):
        for name, kind in buffers.items():
            if kind == _NOTHING:
                raise SpecError(
                    f"buffer {name!r} is on the meta device on data rank {rank} and has no values; "
                    f"build the model there on {str(mesh.device)!r}, or inside "
                    "`with sw.meta_init():`, which keeps buffers real"
                )
    sources = {}
    for name in local.parameters:
        kinds = [parameters[name] for parameters, _ in everyone]
        if is_initialized:
            for rank in range(len(deciding)):
                _require_values(name, kinds[rank], rank, mesh)
        if (kinds if is_broadcast else [local.parameters[name]])[0] != _REAL and not is_initialized:
            sources[name] = _Source.LATER
        elif not is_broadcast:
            sources[name] = _Source.OWN
        elif kinds[0] == _REAL or any(kind != kinds[0] for kind in kinds):
            sources[name] = _Source.BROADCAST
        else:
            sources[name] = _Source.REPLAY
    return FirstValues(sources, local.recordings, mesh, is_broadcast=is_broadcast)


def _require_values(name: str, kind: str, rank: int, mesh: Mesh) -> None:
    if kind == _NOTHING:
        raise SpecError(
            f"{name!r} is on the meta device on data rank {rank}, and how to initialise it wasn't "
            f"recorded. Build the model there on {str(mesh.device)!r}, or inside `with "
            "sw.meta_init():`; or pass initialize=False and call sw.load_safetensors() next."
        )


class FirstValues:
    """Brings first values into shards and buffers, one at a time.

    Args:
        sources: Where each parameter's values come from, by name.
        recordings: This rank's recordings, by name.
        mesh: The mesh.
        is_broadcast: Whether buffers come from the first data rank.
    """

    def __init__(
        self,
        sources: dict[str, _Source],
        recordings: dict[str, Recording],
        mesh: Mesh,
        *,
        is_broadcast: bool,
    ) -> None:
        self._sources = sources
        self._recordings = recordings
        self._axis = mesh.data_axis
        self._device = mesh.device
        self._is_broadcast = is_broadcast

    def store(self, unit: ShardedUnit, position: int) -> None:
        """Store a parameter's first values in its shard, and let the parameter be the shard.

        Collective over the data axes, for parameters whose values are broadcast.

        Args:
            unit: A unit with its shards allocated.
            position: The parameter's position in it.
        """
        owned = unit.modules.owned[position]
        source = self._sources[owned.name]
        recording = self._recordings.pop(owned.name, None)
        if source is _Source.LATER:
            unit.shards[position].fill_(float("nan"))
        elif source is _Source.BROADCAST:
            value = self._whole(owned, recording)
            broadcast_(value, self._axis)
            unit.store(position, value)
        elif recording is None:
            unit.store(position, owned.parameter.detach())
        else:
            start, stop = unit.rows(position)
            if stop > start:
                value = recording.value()
                rows = value[start:stop] if value.dim() else value
                unit.store_rows(position, rows.to(recording.dtype))
        adopt(owned.parameter, unit.shards[position])
        forget_recording(owned.parameter)

    def _whole(self, owned: OwnedParameter, recording: Recording | None) -> torch.Tensor:
        """A whole parameter to broadcast, or room for it where the first data rank has it."""
        parameter = owned.parameter
        if not parameter.is_meta:
            return parameter.detach().contiguous()
        if recording is not None and self._axis.rank == 0:
            return recording.value().to(self._device, recording.dtype).contiguous()
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)

    def fill_buffers(self, model: nn.Module) -> None:
        """Take all buffers from the first data rank, making room for those on the meta device.

        Collective over the data axes. Shared buffers stay shared.
        """
        if not self._is_broadcast:
            return
        filled: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in filled:
                    filled[id(buffer)] = (buffer, self._first_buffer(buffer))
                module._buffers[name] = filled[id(buffer)][1]

    def _first_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        if buffer.is_meta:
            buffer = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
        value = buffer.contiguous()
        broadcast_(value, self._axis)
        return value
