"""The table for a reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.harness import markdown_table

__all__ = ["counts", "page", "table"]

_SHOWN = {
    "right": "right",
    "wrong (silent)": "**wrong (silent)**",
    "error": "error",
    "hang": "**hang**",
    "abort": "**abort**",
    "not applicable": "n/a",
}


def table(content: dict[str, Any], *, is_summary: bool = False) -> Iterator[str]:
    """Lay out rows of scenarios and columns of engines.

    Args:
        content: As written to JSON.
        is_summary: Leave out rows that are right wherever they apply.

    Yields:
        Lines.
    """
    engines = content["engines"]
    yield from markdown_table(
        ["", "scenario", "ranks", *(engine["name"] for engine in engines.values())],
        (
            [key, scenario["title"], str(scenario["ranks"])]
            + [_cell(content["results"][key][engine]) for engine in engines]
            for key, scenario in content["scenarios"].items()
            if not is_summary or _is_notable(content["results"][key])
        ),
    )


def _is_notable(row: dict[str, Any]) -> bool:
    return any(
        cell["outcome"] in ("wrong (silent)", "error", "hang", "abort") for cell in row.values()
    )


def _cell(cell: dict[str, Any]) -> str:
    shown = _SHOWN[cell["outcome"]]
    if cell["outcome"] == "wrong (silent)" and cell["difference"] is not None:
        return f"{shown} {float(cell['difference']):.1g}"
    return shown


def page(content: dict[str, Any]) -> Iterator[str]:
    """Write the whole page.

    Args:
        content: As written to JSON.

    Yields:
        Lines.
    """
    environment, engines = content["environment"], content["engines"]
    yield "# Awkward scenarios, beside one process"
    yield ""
    yield f"`{content['command']}`"
    yield ""
    yield (
        f"{environment['processor']}, {environment['cores']} cores; torch {environment['torch']}, "
        f"Python {environment['python']}; commit {environment['commit']}; gloo, fresh processes of "
        f"one thread each. The truth is one process, plain torch, on all ranks' rows."
        + (" The run was stopped and taken up again." if content["was_interrupted"] else "")
    )
    yield ""
    yield from markdown_table(
        ["column", "version", "judged in", "tolerance"],
        ([e["name"], e["version"], e["dtype"], f"{e['tolerance']:g}"] for e in engines.values()),
    )
    yield ""
    yield from table(content)
    yield ""
    yield from counts(content)
    yield ""
    for key, scenario in content["scenarios"].items():
        yield f"## {key}: {scenario['title']}"
        yield ""
        yield f"{scenario['does']} {scenario['ranks']} ranks."
        yield ""
        for engine, cell in content["results"][key].items():
            if cell["detail"] or cell["outcome"] != "right":
                yield f"- {engines[engine]['name']}: {cell['outcome']}. {_plain(cell['detail'])}"
        yield ""


def counts(content: dict[str, Any]) -> Iterator[str]:
    """Count outcomes by engine.

    Args:
        content: As written to JSON.

    Yields:
        Lines.
    """
    outcomes = list(_SHOWN)
    yield from markdown_table(
        ["outcome", *(engine["name"] for engine in content["engines"].values())],
        (
            [outcome]
            + [
                str(sum(row[engine]["outcome"] == outcome for row in content["results"].values()))
                for engine in content["engines"]
            ]
            for outcome in outcomes
        ),
    )


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
