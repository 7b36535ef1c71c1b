"""Settings of the engine, with their meaning and their checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from shardwright.core.errors import SpecError, nearest

__all__ = ["EngineSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Settings of the engine, final once the model is sharded.

    Attributes:
        forward_prefetch: Units gathered ahead in forward.
        backward_prefetch: Units gathered ahead in backward.
        backward_prefetch_at: ``"pre"``: the next unit's gather starts before a unit's backward
            and hides behind it; ``"post"``: after it, which needs no second slot.
        max_in_flight: Bound on gathers started and not yet used.
        reduce_in_flight: Reductions left unfinished while another unit computes; each costs one
            more gradient buffer.
        residency: Names of units that stay gathered between forward and backward.
        reshard_after_backward: False keeps parameters gathered until the optimizer step, so that
            they are gathered once per step; None leaves it to the strategy.
        accumulation: ``"whole"`` or ``"sharded"`` gradients between micro-batches; None leaves
            it to the strategy.
        memory_budget_gib: What parameters, gradients and slots may take per rank, without optimizer
            state and activations. Where `accumulation` is None, gradients are kept whole between
            micro-batches if that fits, which reduces them once per step, and sharded otherwise.
        direct_gradients: Let Linear layers write weight gradients into the reduce buffer.
        transport: ``"auto"``, ``"pairwise"`` or ``"collective"``.
        poison_released: For finding faults: overwrite what a unit leaves in its slot with NaN, so
            that a use of its weights after its forward or backward shows. Costs a gather more
            where the slot still held the unit.
        broadcast_init: Take first values of parameters and buffers from the first data rank.
    """

    forward_prefetch: int = 1
    backward_prefetch: int = 1
    backward_prefetch_at: Literal["pre", "post"] = "pre"
    max_in_flight: int = 2
    reduce_in_flight: int = 1
    residency: tuple[str, ...] = ()
    reshard_after_backward: bool | None = None
    accumulation: Literal["whole", "sharded"] | None = None
    memory_budget_gib: float | None = None
    direct_gradients: bool = True
    transport: Literal["auto", "pairwise", "collective"] = "auto"
    poison_released: bool = False
    broadcast_init: bool = True

    def __post_init__(self) -> None:
        choices = {
            "backward_prefetch_at": ("pre", "post"),
            "transport": ("auto", "pairwise", "collective"),
            "accumulation": ("whole", "sharded", None),
        }
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise SpecError(
                    f"{name} must be one of {', '.join(map(repr, valid))}, found "
                    f"{getattr(self, name)!r}"
                )
        for name, least in (
            ("forward_prefetch", 0),
            ("backward_prefetch", 0),
            ("max_in_flight", 1),
            ("reduce_in_flight", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SpecError(f"{name} must be a whole number from {least}, found {value!r}")
        if self.memory_budget_gib is not None and not self.memory_budget_gib > 0:
            raise SpecError(
                f"memory_budget_gib must be more than 0, found {self.memory_budget_gib!r}"
            )

    @classmethod
    def from_options(cls, options: dict[str, object]) -> EngineSettings:
        """Build from keyword arguments, naming the nearest valid one for a wrong one."""
        valid = [f.name for f in fields(cls)]
        for name in options:
            if name not in valid:
                raise SpecError(f"shard() has no setting {name!r}; {nearest(name, valid)}")
        if "residency" in options:
            residency = options["residency"]
            if isinstance(residency, str) or not isinstance(residency, Iterable):
                raise SpecError(f"residency must be a list of unit names, found {residency!r}")
            options = {**options, "residency": tuple(residency)}
        return cls(**options)  # type: ignore[arg-type]
