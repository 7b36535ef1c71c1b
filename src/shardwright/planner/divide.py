"""Which batches divide over which meshes, and what to say of one that divides over none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.planner.layout import LayoutSpec

__all__ = ["divides", "why_none_divides"]

_MOST_LISTED = 4


def divides(per_rank: int, micro_batch: int, layout: LayoutSpec) -> bool:
    """Whether a data rank's sequences of a step divide into micro-batches of a size.

    A pipeline wants at least as many micro-batches as it has stages, an interleaved one a multiple
    of them, since it runs groups of as many.

    Args:
        per_rank: Sequences of a data rank and step.
        micro_batch: Sequences of a micro-batch.
        layout: The mesh.
    """
    num_micro_batches, rest = divmod(per_rank, micro_batch)
    if rest:
        return False
    if layout.chunks_per_stage > 1:
        return num_micro_batches % layout.pipeline == 0
    return num_micro_batches >= layout.pipeline or micro_batch == 1


def why_none_divides(
    global_batch: int, micro_batches: Sequence[int], layouts: Sequence[LayoutSpec], num_devices: int
) -> str:
    """Say why no layout takes a batch, and which nearest values some layout does take.

    Args:
        global_batch: Sequences per step over all ranks.
        micro_batches: Sizes that were asked for; empty for any.
        layouts: All that were compared.
        num_devices: Of the cluster.
    """
    if not layouts:
        return (
            f"no mesh of {num_devices} devices suits the strategies asked for: hybrid ones shard "
            "over one or more whole nodes and replicate over others; use more nodes, or zero3"
        )
    data_ranks = {layout.num_data_ranks for layout in layouts}
    fitting = [layout for layout in layouts if global_batch % layout.num_data_ranks == 0]
    if not fitting:
        below = [global_batch // size * size for size in data_ranks]
        above = [(global_batch // size + 1) * size for size in data_ranks]
        return (
            f"a global batch of {global_batch} sequences divides over no mesh of {num_devices} "
            f"devices: they have {_listed(sorted(data_ranks))} data ranks; the nearest that "
            f"{_nearest(global_batch, [*below, *above])}"
        )
    sizes = {
        size
        for layout in fitting
        for size in _divisors(global_batch // layout.num_data_ranks)
        if divides(global_batch // layout.num_data_ranks, size, layout)
    }
    shares = sorted({global_batch // layout.num_data_ranks for layout in fitting})
    return (
        f"a micro-batch of {_listed(micro_batches)} divides no rank's share of the global batch of "
        f"{global_batch} sequences ({_listed(shares)} per data rank); the nearest that "
        f"{_nearest(micro_batches[0], sizes)}"
    )


def _divisors(number: int) -> Iterable[int]:
    low = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return {*low, *(number // size for size in low)}


def _nearest(wanted: int, workable: Iterable[int]) -> str:
    positive = {value for value in workable if value > 0}
    below = max((value for value in positive if value < wanted), default=None)
    above = min((value for value in positive if value > wanted), default=None)
    found = [str(value) for value in (below, above) if value is not None]
    return f"{'do' if len(found) > 1 else 'does'}: {' and '.join(found)}"


def _listed(values: Sequence[int]) -> str:
    if len(values) > _MOST_LISTED:
        return f"{min(values)} to {max(values)}"
    return " or ".join(map(str, values))
