"""The units of a model as the engine would find them, laid out over a layout's ranks.

The repeated blocks are units, and so are the embedding and the head where they are large beside
them; what is small, or shared between modules, is the root's, with the final norm. Shapes are those
of one tensor rank; layouts come from the engine's own `lay_out`, so that padded sizes agree to the
element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from shardwright.core.errors import SpecError
from shardwright.core.layout import ParameterSpec, UnitLayout, lay_out
from shardwright.core.memory import UnitNeeds
from shardwright.core.strategy import Gathered
from shardwright.planner.layout import LayoutSpec
from shardwright.planner.model import ModelSpec
from shardwright.planner.traced import TracedModel, UnitTrace
from shardwright.planner.workload import PrecisionSpec

__all__ = ["TORCH_DTYPE", "PlannedUnit", "find_units", "tensor_rank_numel"]

TORCH_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_COLUMN_DIVIDED = ("attention.out.weight", "ffn.down.weight")
"""Matrices divided along their input over the tensor axis; other matrices along their output."""

Kind = Literal["root", "end", "block", "model"]
End = Literal["embedding", "head"]

_LARGE_LEAF = 1 / 8
"""Share of the largest unit from which a lone module is one: as in `runtime/units.py`."""


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """One unit.

    Attributes:
        name: Its name.
        kind: Root, block, a lone end, or the whole model.
        layout: Who owns which rows; None for a root without parameters.
        gathered: How long it stays gathered.
        ends: Which ends of the model it computes.
        parent: Index of the unit that encloses it; the root's own is not read.
        depth: Units that enclose it.
        trace: What it does, where the model was traced.
    """

    name: str
    kind: Kind
    layout: UnitLayout | None
    gathered: Gathered
    ends: tuple[End, ...] = ()
    parent: int = 0
    depth: int = 1
    trace: UnitTrace | None = None

    @property
    def numel(self) -> int:
        """Elements of its gathered space."""
        return self.layout.numel if self.layout else 0

    @property
    def trainable_numel(self) -> int:
        """Elements that receive gradients, padding included."""
        if self.layout is None:
            return 0
        return sum(segment.numel for segment in self.layout.segments if segment.trainable)

    def needs(self, precision: PrecisionSpec) -> UnitNeeds:
        """What the engine's memory formula wants to know."""
        return UnitNeeds(
            layout=self.layout,
            depth=self.depth,
            gathered=self.gathered,
            master_dtype=TORCH_DTYPE[precision.master],
            reduce_dtype=TORCH_DTYPE[precision.reduce],
        )


def _of_tensor_rank(spec: ParameterSpec, tensor: int) -> ParameterSpec:
    """The part of a parameter one tensor rank holds; norms and output biases are whole."""
    if tensor == 1 or "norm" in spec.name or spec.name.startswith("positions"):
        return spec
    if spec.name in _COLUMN_DIVIDED:
        return replace(
            spec, shape=(spec.shape[0], spec.shape[1] // tensor), global_shape=(), global_offset=()
        )
    if spec.name in ("attention.out.bias", "ffn.down.bias"):
        return spec
    rows = -(-spec.shape[0] // tensor)
    return replace(spec, shape=(rows, *spec.shape[1:]), global_shape=(), global_offset=())


def tensor_rank_numel(model: ModelSpec, tensor: int) -> int:
    """Elements of the whole model on one tensor rank."""
    block = sum(_of_tensor_rank(p, tensor).numel for p in model.block_parameters)
    ends = (*model.embedding_parameters, *model.final_norm_parameters, *model.head_parameters)
    return model.layers * block + sum(_of_tensor_rank(p, tensor).numel for p in ends)


@lru_cache(maxsize=2048)
def _lay_out(
    parameters: tuple[ParameterSpec, ...], name: str, shard: int, owners: int, multiple: int
) -> UnitLayout:
    return lay_out(name, parameters, shard_size=shard, owners_per_shard=owners, multiple=multiple)


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """Which unit holds the embedding and the head of a stage: one of their own, or the root."""

    own: tuple[End, ...]
    in_root: tuple[End, ...]


def _divide_ends(model: ModelSpec, *, has_embedding: bool, has_head: bool) -> _Ends:
    """Divide the ends as the engine does.

    A lone module is a unit from an eighth of the largest one upwards, and a matrix that two modules
    share belongs to what encloses both.
    """
    present: list[tuple[End, int]] = []
    if has_embedding:
        present.append(("embedding", model.embedding_numel))
    if has_head:
        present.append(("head", model.head_numel or model.embedding_numel))
    is_shared = model.tied and has_embedding and has_head
    own = tuple(
        end for end, numel in present if not is_shared and numel >= _LARGE_LEAF * model.block_numel
    )
    return _Ends(own=own, in_root=tuple(end for end, _ in present if end not in own))


@lru_cache(maxsize=2048)
def _parameters(
    model: ModelSpec, kind: Kind, ends: tuple[End, ...], dtype: str, tensor: int
) -> tuple[ParameterSpec, ...]:
    found: list[ParameterSpec] = []
    if kind == "block":
        found.extend(model.block_parameters)
    if kind == "root":
        found.extend(model.final_norm_parameters)
    if "embedding" in ends:
        found.extend(model.embedding_parameters)
    if "head" in ends and not (model.tied and "embedding" in ends):
        found.extend(model.head_parameters or model.embedding_parameters[:1])
    return tuple(replace(_of_tensor_rank(spec, tensor), dtype=dtype) for spec in found)


@lru_cache(maxsize=1024)
def find_units(
    model: ModelSpec | TracedModel,
    layout: LayoutSpec,
    param_dtype: str,
    *,
    layers: int,
    has_embedding: bool = True,
    has_head: bool = True,
) -> tuple[PlannedUnit, ...]:
    """Units of one pipeline stage, in module order, the root first.

    Args:
        model: Shape.
        layout: Strategy and mesh.
        param_dtype: Key of `TORCH_DTYPE`.
        layers: Blocks of the stage.
        has_embedding: Whether the stage looks tokens up.
        has_head: Whether it ends in the loss.
    """
    if isinstance(model, TracedModel):
        return _traced_units(model, layout)
    dtype = TORCH_DTYPE[param_dtype]
    if not layout.wraps_blocks:
        return _one_unit(model, layout, dtype, layers)
    gathered = layout.gathered
    owners = layout.replicate if layout.resolved.optimizer_over_replicas else 1
    multiple = 1 if owners > 1 else layout.replicas
    ends = _divide_ends(model, has_embedding=has_embedding, has_head=has_head)

    def unit(
        name: str, kind: Kind, ends: tuple[End, ...] = (), keeps: Gathered = gathered
    ) -> PlannedUnit:
        parameters = _parameters(model, kind, ends, dtype, layout.tensor)
        laid_out = _lay_out(parameters, kind, layout.shard_degree, owners, multiple)
        return PlannedUnit(
            name=name,
            kind=kind,
            layout=laid_out,
            gathered=keeps,
            ends=ends,
            depth=0 if kind == "root" else 1,
        )

    found = [unit("(root)", "root", ends.in_root)]
    if "embedding" in ends.own:
        found.append(unit("embedding", "end", ("embedding",)))
    for index in range(layers):
        is_resident = gathered is Gathered.USE and index >= layers - layout.resident_units
        found.append(
            unit(f"layers.{index}", "block", (), Gathered.BACKWARD if is_resident else gathered)
        )
    if "head" in ends.own:
        found.append(unit("head", "end", ("head",)))
    return tuple(found)


def _one_unit(
    model: ModelSpec, layout: LayoutSpec, dtype: str, layers: int
) -> tuple[PlannedUnit, ...]:
    """The whole model as one unit: what wrapping only the outermost module makes of it."""
    parameters = [*model.embedding_parameters, *model.final_norm_parameters]
    parameters.extend(model.head_parameters)
    for i in range(layers):
        parameters.extend(replace(p, name=f"{i}.{p.name}") for p in model.block_parameters)
    specs = tuple(replace(_of_tensor_rank(p, layout.tensor), dtype=dtype) for p in parameters)
    owners = layout.replicate if layout.resolved.optimizer_over_replicas else 1
    multiple = 1 if owners > 1 else layout.replicas
    laid_out = _lay_out(specs, "model", layout.shard_degree, owners, multiple)
    return (
        PlannedUnit(
            name="(root)",
            kind="model",
            layout=laid_out,
            gathered=layout.gathered,
            depth=0,
            ends=("embedding", "head"),
        ),
    )


def _traced_units(model: TracedModel, layout: LayoutSpec) -> tuple[PlannedUnit, ...]:
    """Units of a traced model, laid out as the engine lays them out."""
    if not layout.wraps_blocks:
        raise SpecError(
            f"{model.name} was traced unit by unit; trace it with units=None to plan it as one unit"
        )
    owners = layout.replicate if layout.resolved.optimizer_over_replicas else 1
    multiple = 1 if owners > 1 else layout.replicas
    first_resident = model.layers - layout.resident_units
    found = []
    block = 0
    for unit in model.units:
        gathered = layout.gathered
        if unit.is_block:
            if gathered is Gathered.USE and block >= first_resident:
                gathered = Gathered.BACKWARD
            block += 1
        laid_out = None
        if unit.parameters:
            # Names are left out, so that units alike are laid out once.
            alike = tuple(replace(p, name=str(i)) for i, p in enumerate(unit.parameters))
            laid_out = _lay_out(alike, "unit", layout.shard_degree, owners, multiple)
        kind: Kind = "root" if unit.parent is None else "block" if unit.is_block else "end"
        found.append(
            PlannedUnit(
                name=unit.name,
                kind=kind,
                layout=laid_out,
                gathered=gathered,
                parent=unit.parent or 0,
                depth=unit.depth,
                trace=unit.trace,
            )
        )
    return tuple(found)
