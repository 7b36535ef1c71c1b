"""What all measurements share: alternating runs, medians with spread, the machine, result files."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

__all__ = [
    "MIB",
    "ResourceMeter",
    "Spread",
    "alternate",
    "capture_environment",
    "markdown_table",
    "write_results",
]

T = TypeVar("T")
MIB = 2**20
RESULTS = Path(__file__).parent / "results"


def alternate(arms: Sequence[str], *, rounds: int, run: Callable[[str], T]) -> dict[str, list[T]]:
    """Run every arm once per round, so that a change of the machine meets all of them.

    Args:
        arms: Names.
        rounds: How many runs each gets; every other round goes backwards.
        run: Runs one arm in fresh processes.

    Returns:
        The runs of each arm, in order.
    """
    runs: dict[str, list[T]] = {arm: [] for arm in arms}
    for index in range(rounds):
        for arm in arms if index % 2 == 0 else list(reversed(arms)):
            print(f"round {index + 1} of {rounds}: {arm}", file=sys.stderr, flush=True)
            runs[arm].append(run(arm))
    return runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """The middle and the ends of some runs.

    Attributes:
        median: The middle.
        low: The least.
        high: The greatest.
        runs: All, in order.
    """

    median: float
    low: float
    high: float
    runs: list[float]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise values.

        Args:
            values: At least one.

        Returns:
            The summary, rounded to four digits after the point.
        """
        runs = [round(value, 4) for value in values]
        return cls(
            median=round(statistics.median(runs), 4), low=min(runs), high=max(runs), runs=runs
        )


class ResourceMeter:
    """This process's memory, page faults and processor time, from when it was made.

    Make it after the imports: memory is counted over what they take. On Linux the peak can be
    restarted, to tell steps from the building of the model.
    """

    def __init__(self) -> None:
        self._base_bytes = _status_bytes("VmRSS")
        self.restart()

    def restart(self) -> None:
        """Count faults and time, and where possible the peak, from now."""
        if sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")
        self._start = resource.getrusage(resource.RUSAGE_SELF)

    def peak_mib(self) -> float:
        """Peak resident memory since the last restart, over the imports, in MiB."""
        return (_status_bytes("VmHWM") - self._base_bytes) / MIB

    def since_restart(self, *, num_steps: int) -> dict[str, float]:
        """Divide what was used since the last restart by a number of steps.

        Args:
            num_steps: How many were done.

        Returns:
            ``faults``, and ``user_ms`` and ``system_ms`` of processor time, per step.
        """
        now = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "faults": (now.ru_minflt - self._start.ru_minflt) / num_steps,
            "user_ms": 1e3 * (now.ru_utime - self._start.ru_utime) / num_steps,
            "system_ms": 1e3 * (now.ru_stime - self._start.ru_stime) / num_steps,
        }


def _status_bytes(field: str) -> int:
    """Read a size from Linux's /proc/self/status; elsewhere the peak since the start."""
    status = Path("/proc/self/status")
    if not status.exists():
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    found = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


def capture_environment() -> dict[str, Any]:
    """Say what was measured and where.

    Returns:
        Processor, cores, memory, versions, commit, and how busy the machine was.
    """
    cpu_info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", cpu_info.read_text()) if cpu_info.exists() else []
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "devices": devices,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("OMP_", "MKL_", "GLOO_", "MALLOC_", "NCCL_"))
            or name == "LD_PRELOAD"
        },
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=10", "HEAD") or "unknown"
    is_changed = git("status", "--porcelain", "--", "../src", "../benchmarks", ":!results")
    return f"{commit}-changed" if is_changed else commit


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lay out a table.

    Args:
        header: Titles of the columns.
        rows: Cells, as many as titles.

    Yields:
        Lines.
    """
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def write_results(theme: str, content: dict[str, Any], markdown: Iterable[str]) -> list[Path]:
    """Write a measurement as ``results/<theme>_<hardware>_<date>_<commit>``, .json and .md.

    Args:
        theme: What was measured.
        content: JSON, with ``environment`` from `capture_environment`.
        markdown: Lines for a reader.

    Returns:
        The two files.
    """
    environment = content["environment"]
    hardware = environment["devices"][0] if environment["devices"] else environment["processor"]
    slug = re.sub(r"[^a-z0-9]+", "-", f"{environment['cores']}x-{hardware}".lower()).strip("-")
    today = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d")
    stem = f"{theme}_{slug[:40].rstrip('-')}_{today}_{environment['commit']}"
    RESULTS.mkdir(exist_ok=True)
    data, text = RESULTS / f"{stem}.json", RESULTS / f"{stem}.md"
    data.write_text(json.dumps(content, indent=1) + "\n")
    text.write_text("\n".join(markdown) + "\n")
    return [data, text]
