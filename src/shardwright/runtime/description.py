"""How a model is sharded, in words and figures."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.runtime.engine import Engine

__all__ = ["Description", "UnitDescription", "describe_engine"]

_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitDescription:
    """One unit.

    Attributes:
        name: Its module's path.
        parameters: Names of its parameters.
        numel: Elements, without padding.
        padding_numel: Elements of padding.
        gathered_bytes: Bytes while gathered, in compute dtypes.
        gradient_numel: Elements of its gradient space, padding and control segment included.
        gathered: ``step``, ``backward`` or ``use``: how long it stays so.
        slot: Slot it is gathered into; units with the same slot take turns.
        whole: Names of the parameters that one owner has whole.
        rows: Rows of dimension 0 of each parameter held by each owner, ``(start, stop)``.
    """

    name: str
    parameters: tuple[str, ...]
    numel: int
    padding_numel: int
    gathered_bytes: int
    gradient_numel: int
    gathered: str
    slot: int
    whole: tuple[str, ...]
    rows: dict[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A sharded model.

    Attributes:
        strategy: Its strategy.
        mesh: Axis sizes and device.
        transport: How bytes are sent.
        gradients: ``whole`` or ``sharded`` between micro-batches.
        units: Units in module order.
        memory_bytes: Bytes of engine memory on this rank per category.
    """

    strategy: str
    mesh: str
    transport: str
    gradients: str
    units: tuple[UnitDescription, ...]
    memory_bytes: dict[str, int]

    def __str__(self) -> str:
        total = sum(u.numel for u in self.units)
        padding = sum(u.padding_numel for u in self.units)
        lines = [
            f"{self.strategy} on {self.mesh}, {self.transport} transport",
            f"gradients {self.gradients} between micro-batches",
            f"{total:,} parameters in {len(self.units)} units, {padding:,} elements of padding",
            f"{'unit':28}{'parameters':>14}{'padding':>10}{'gathered MiB':>14}  kept for  slot",
        ]
        lines += [
            f"{u.name:28}{u.numel:>14,}{u.padding_numel:>10,}{u.gathered_bytes / _MIB:>14.3f}"
            f"  {u.gathered:<8}  {u.slot}"
            for u in self.units
        ]
        whole = sum(len(u.whole) for u in self.units)
        if whole:
            lines.append(f"{whole} parameters owned whole, each by one rank of those that shard")
        held = ", ".join(
            f"{name.replace('_', ' ')} {size / _MIB:.3f}"
            for name, size in self.memory_bytes.items()
            if size
        )
        lines.append(f"engine memory on this rank, MiB: {held}")
        lines.append(
            "clip with sw.clip_grad_norm_(model, ...): torch's own sees this rank's rows only"
        )
        return "\n".join(lines)


def describe_engine(engine: Engine) -> Description:
    """Read a description off an engine."""
    units = []
    for unit in engine.units:
        if not unit.parameters:
            continue
        layout = unit.layout
        names = tuple(o.name for o in unit.modules.owned)
        units.append(
            UnitDescription(
                name=unit.name,
                parameters=names,
                numel=layout.used_numel,
                padding_numel=layout.padding_numel,
                gathered_bytes=layout.gathered_bytes,
                gradient_numel=layout.gradient_numel,
                gathered=unit.gathered.value,
                slot=unit.slot,
                whole=tuple(
                    n for n, p in zip(names, layout.placements, strict=True) if p.spec.is_whole
                ),
                rows={
                    name: tuple(layout.rows(i, owner) for owner in range(layout.num_owners))
                    for i, name in enumerate(names)
                },
            )
        )
    return Description(
        strategy=engine.strategy.name,
        mesh=repr(engine.mesh),
        transport=engine.transport.name,
        gradients=engine.strategy.gradients.value,
        units=tuple(units),
        memory_bytes=dict(engine.buffers.bytes_by_category),
    )
