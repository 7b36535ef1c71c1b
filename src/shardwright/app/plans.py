"""What `sw.plan` returns: layouts compared, as a table, as plain data, and as a plan file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.planner.advice import seconds
from shardwright.planner.checks import require_positive, require_type
from shardwright.planner.cluster import ClusterSpec
from shardwright.planner.plan_file import as_document, write_plan
from shardwright.planner.predict import Prediction
from shardwright.planner.search import Candidate, SearchResult

__all__ = ["Plans"]

_UNITS = (
    "Memory in GiB (2^30 bytes): what a device must have. Sent bytes in GB (1e9) per rank and\n"
    "step, over all axes; links in GB/s (1e9 bytes per second, one direction)."
)

_COLUMNS = (
    "layout",
    "micro_batch",
    "accumulation",
    "checkpointing",
    "step_s",
    "tokens_per_s_per_device",
    "mfu",
    "peak_gib",
    "needed_gib",
    "sent_gb",
    "exposed_share",
    "limit",
    "needs",
    "is_recommended",
)


@dataclass(frozen=True, kw_only=True)
class Plans:
    """Layouts compared, fastest first.

    Attributes:
        result: The search.
        reasons: Why the best is the best, in words.
        changes: What would change that, in words.
    """

    result: SearchResult
    reasons: tuple[str, ...]
    changes: tuple[str, ...]

    @property
    def best(self) -> Prediction:
        """The recommended layout's prediction."""
        assert self.result.best.prediction is not None, "the best was replayed"
        return self.result.best.prediction

    def rows(self, most: int | None = None) -> list[dict[str, Any]]:
        """One row per strategy and mesh, fastest first: what is recommended, else its fastest.

        Args:
            most: Rows to return, and the recommended one where it isn't among them; None for all.

        Raises:
            SpecError: That is no whole number above 0.
        """
        if most is not None:
            require_type("plans", "the number of layouts to show", most, "int")
            require_positive("plans", **{"the number of layouts to show": most})
        best = self.result.best
        seen = {best.job.layout}
        shown = []
        for candidate in self.result.candidates:
            layout = candidate.job.layout
            if candidate is best or layout not in seen:
                seen.add(layout)
                shown.append(candidate)
        kept = shown[:most]
        if best not in kept:
            kept.append(best)
        return [_row(candidate) | {"is_recommended": candidate is best} for candidate in kept]

    def table(self, most: int = 12) -> str:
        """The comparison as text."""
        job, rows = self.best.job, self.rows(most)
        width = max(len(row["layout"]) for row in rows) + 2
        lines = [
            f"{job.model.name}, {job.model.num_parameters / 1e9:.2f} G parameters, on "
            f"{job.cluster.name}; {_links(job.cluster)}.",
            _UNITS,
            "",
            f"  {'layout':{width}s} {'mb x acc':>9s} {'recompute':>10s} {'step s':>8s} "
            f"{'tok/s/dev':>10s} {'MFU':>6s} {'GiB':>6s} {'sent GB':>8s} {'exposed':>8s}  "
            "largest part",
        ]
        for row in rows:
            mark = "*" if row["needs"] else " "
            sign = ">" if row["is_recommended"] else " "
            size = f"{row['micro_batch']} x {row['accumulation']}"
            step = seconds(row["step_s"])
            lines.append(
                f"{sign} {row['layout'] + mark:{width}s} {size:>9s} {row['checkpointing']:>10s} "
                f"{step:>8s} {row['tokens_per_s_per_device']:10.0f} {row['mfu']:6.1%} "
                f"{row['needed_gib']:6.1f} {row['sent_gb']:8.1f} {row['exposed_share']:8.1%}  "
                f"{row['limit']}"
            )
        if any(row["needs"] for row in rows):
            lines.append("* the engine doesn't run this yet: " + _all_missing(rows))
        lines.extend(
            f"{candidate.strategy} does not fit: at least {candidate.memory.needed_gib:.1f} GiB "
            f"({candidate.job.layout.describe()})"
            for candidate in self.result.unfit
        )
        lines.extend(["", f"Take {_described(self.best)}:"])
        lines.extend(f"  - {reason}" for reason in self.reasons)
        lines.extend(f"  - {change}" for change in self.changes)
        lines.extend(f"  ! {warning}" for warning in self.best.warnings)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "units": _UNITS,
            "best": as_document(self.best),
            "layouts": self.rows(),
            "pareto_front": [_row(candidate) for candidate in self.result.front],
            "unfit": [
                {
                    "layout": candidate.job.layout.describe(),
                    "needed_gib": candidate.memory.needed_gib,
                }
                for candidate in self.result.unfit
            ],
            "reasons": list(self.reasons),
            "what_would_change_it": list(self.changes),
            "considered": self.result.num_considered,
            "fitting": self.result.num_fitting,
        }

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def to_csv(self) -> str:
        """The comparison as CSV."""
        text = io.StringIO()
        writer = csv.DictWriter(text, _COLUMNS)
        writer.writeheader()
        writer.writerows(self.rows())
        return text.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the recommended layout as a plan file.

        Args:
            path: Where.

        Raises:
            SpecError: The engine can't run that layout yet, or the file can't be written.
        """
        write_plan(self.best, Path(path), why_not=self.result.why_not_today)


def _row(candidate: Candidate) -> dict[str, Any]:
    predicted = candidate.prediction
    assert predicted is not None, "only replayed candidates are listed"
    return {
        "layout": candidate.job.layout.describe(),
        "micro_batch": candidate.job.workload.micro_batch,
        "accumulation": candidate.job.workload.accumulation,
        "checkpointing": candidate.job.workload.checkpointing,
        "step_s": predicted.step_s,
        "tokens_per_s_per_device": predicted.tokens_per_s_per_device,
        "mfu": predicted.mfu,
        "peak_gib": candidate.memory.peak_gib,
        "needed_gib": candidate.memory.needed_gib,
        "sent_gb": sum(predicted.sent_bytes.values()) / 1e9,
        "exposed_share": predicted.exposed_share,
        "limit": predicted.limit,
        "needs": ", ".join(candidate.missing),
    }


def _described(prediction: Prediction) -> str:
    job = prediction.job
    kind = job.workload.checkpointing
    recomputing = "no recomputation" if kind == "none" else f"{kind} recomputation"
    count = job.workload.accumulation
    batches = "one micro-batch" if count == 1 else f"{count} micro-batches"
    return (
        f"{job.layout.describe()}, {batches} of {job.workload.micro_batch} per rank and step, "
        f"{recomputing}"
    )


def _links(cluster: ClusterSpec) -> str:
    inside = f"{cluster.inner.bandwidth_gbps:g} GB/s between devices of a node"
    if cluster.num_nodes == 1:
        return inside
    return f"{inside}, {cluster.node_gbps:g} GB/s out of each of {cluster.num_nodes} nodes"


def _all_missing(rows: Sequence[Mapping[str, Any]]) -> str:
    names = {name for row in rows for name in row["needs"].split(", ") if name}
    return ", ".join(sorted(names))
