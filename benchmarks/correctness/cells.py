"""Run a scenario under an engine in fresh processes, whatever these do, and judge the outcome."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.correctness.engines import ENGINES
from benchmarks.correctness.findings import first_line
from benchmarks.correctness.rank import report_path, serve
from benchmarks.correctness.scenarios import SCENARIOS

__all__ = ["Cell", "judge", "run_cell"]

AFTER_FIRST_S = 12.0
"""How long other ranks may go on after one has failed."""
TO_END_S = 3.0
"""How long a process may take to end after its report."""
POLL_S = 0.02
BUSY_S = 0.05
"""Less processor time than this is waiting."""
CAP = 4.0
"""No cell may run longer than this times its time-out."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What came of one scenario under one engine.

    Attributes:
        outcome: ``right``, ``wrong (silent)``, ``error``, ``hang``, ``abort`` or
            ``not applicable``.
        detail: One line: figures, or the first line of the message.
        difference: The figure that is furthest over its tolerance; of a right cell, the largest.
        tolerance: Of that figure.
        seconds: How long the ranks ran.
    """

    outcome: str
    detail: str
    difference: float | None = None
    tolerance: float | None = None
    seconds: float = 0.0


def run_cell(scenario: str, engine: str, *, timeout_s: float | None = None) -> Cell:
    """Run a cell.

    Args:
        scenario: Key of `SCENARIOS`.
        engine: Key of `ENGINES`.
        timeout_s: Instead of the scenario's.

    Returns:
        Its outcome, also where ranks hang or die; they are ended by their process ids.
    """
    row = SCENARIOS[scenario]
    lacking = ENGINES[engine]().lacks(row.setup)
    if lacking is not None:
        return Cell(outcome="not applicable", detail=lacking)
    context = _context()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
    )
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        ranks = [
            context.Process(
                target=serve,
                args=(scenario, engine, rank, folder, _variables(rank, row.ranks, store.port)),
            )
            for rank in range(row.ranks)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, folder, row.timeout_s if timeout_s is None else timeout_s)
        finally:
            exit_codes = [_end(process) for process in ranks]
        reports = [_read(report_path(folder, rank)) for rank in range(row.ranks)]
    del store  # the ranks used it to the last
    return judge(reports, exit_codes, seconds=time.monotonic() - started_s)


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.correctness.rank"])
    return context


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _wait(ranks: Sequence[ForkServerProcess], folder: Path, timeout_s: float) -> None:
    """Return when all have reported and ended, or have had their time."""
    progress = _Progress(ranks, timeout_s)
    grace_ends: float | None = None
    while not progress.is_over():
        is_alive = [process.is_alive() for process in ranks]
        reports = [_read(report_path(folder, rank)) for rank in range(len(ranks))]
        if not any(is_alive):
            return
        is_failure = any(
            (report is None and not alive) or (report is not None and report["kind"] == "error")
            for report, alive in zip(reports, is_alive, strict=True)
        )
        if grace_ends is None and all(report is not None for report in reports):
            grace_ends = time.monotonic() + TO_END_S
        elif grace_ends is None and is_failure:
            grace_ends = time.monotonic() + AFTER_FIRST_S
        if grace_ends is not None and time.monotonic() > grace_ends:
            return
        time.sleep(POLL_S)


class _Progress:
    """Whether ranks have used no processor time for long, or have run very long.

    Time alone would call ranks of a busy machine hanging.
    """

    def __init__(self, ranks: Sequence[ForkServerProcess], timeout_s: float) -> None:
        self._pids = [process.pid for process in ranks]
        self._timeout_s = timeout_s
        self._ends = time.monotonic() + CAP * timeout_s
        self._used_s, self._since = 0.0, time.monotonic()

    def is_over(self) -> bool:
        """Whether to wait no longer."""
        now, used_s = time.monotonic(), sum(map(_processor_s, self._pids))
        if abs(used_s - self._used_s) > BUSY_S:
            self._used_s, self._since = used_s, now
        return now > self._ends or now - self._since > self._timeout_s


def _processor_s(pid: int | None) -> float:
    """Processor time a process has used; 0 where it is gone or the system doesn't say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end(process: ForkServerProcess) -> int | None:
    """End a process that is still there; returns the exit code of one that had ended."""
    was_alive = process.is_alive()
    if was_alive:
        process.kill()
    process.join()
    code = process.exitcode
    process.close()
    return None if was_alive else code


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def judge(
    reports: Sequence[dict[str, Any] | None],
    exit_codes: Sequence[int | None],
    *,
    seconds: float = 0.0,
) -> Cell:
    """Make one outcome of what the ranks left.

    Args:
        reports: Each rank's, None where it wrote none.
        exit_codes: Each rank's, None where it had to be ended.
        seconds: How long they ran.

    Returns:
        The cell.
    """
    written = [report for report in reports if report is not None]
    for report in written:
        if report["kind"] == "not applicable":
            return Cell(outcome=report["kind"], detail=report["message"], seconds=seconds)
    errors = sorted((r for r in written if r["kind"] == "error"), key=lambda r: float(r["at_s"]))
    silent = [
        rank
        for rank, (report, code) in enumerate(zip(reports, exit_codes, strict=True))
        if report is None and code is None
    ]
    dead = {
        rank: code
        for rank, (report, code) in enumerate(zip(reports, exit_codes, strict=True))
        if report is None and code is not None
    }
    if dead:
        rank, code = next(iter(dead.items()))
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Cell(outcome="abort", detail=f"rank {rank} ended by {how}", seconds=seconds)
    if errors:
        first = errors[0]
        detail = f"{first['type']}: {first_line(first['message'])}"
        if silent:
            detail += f" (ranks {_listed(silent)} went on waiting)"
        return Cell(outcome="error", detail=detail, seconds=seconds)
    if silent:
        detail = f"ranks {_listed(silent)} of {len(reports)} still waited when the time was over"
        return Cell(outcome="hang", detail=detail, seconds=seconds)
    return _judge_findings([f for report in written for f in report["findings"]], seconds)


def _judge_findings(findings: Sequence[dict[str, Any]], seconds: float) -> Cell:
    if not findings:
        return Cell(outcome="error", detail="nothing was compared", seconds=seconds)

    def excess(finding: dict[str, Any]) -> tuple[bool, bool, float]:
        gap, tolerance = finding["difference"], finding["tolerance"]
        is_right = gap <= tolerance
        return not is_right, math.isnan(gap), gap / tolerance if tolerance else gap

    worst = max(findings, key=excess)
    wrong = {f["what"]: f for f in sorted(findings, key=excess) if excess(f)[0]}
    detail = "; ".join(
        f"{what}: off by {f['difference']:.2g}" + (f" ({f['note']})" if f["note"] else "")
        for what, f in reversed(wrong.items())
    )
    return Cell(
        outcome="wrong (silent)" if wrong else "right",
        detail=detail or worst["note"] * (worst["tolerance"] > 1),
        difference=worst["difference"],
        tolerance=worst["tolerance"],
        seconds=seconds,
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
