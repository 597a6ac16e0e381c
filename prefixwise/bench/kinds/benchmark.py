"""The result of a script under `benchmarks/`: facts about it, and its rows as tables. Nothing is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefixwise.bench.render.document import NONE, Block, Bullets, Code, Report, Section, table
from prefixwise.bench.render.numbers import short_number

_MAX_COLUMNS = 12


_MAX_TEXT = 200  # characters of a cell


def benchmark_report(content: Mapping[str, Any], name: str) -> Report:
    """`content`: with its rows under `rows` or `runs`."""
    rows = [row for row in _list(content.get("rows") or content.get("runs")) if isinstance(row, Mapping)]
    facts = [(key, _shown(value)) for key, value in content.items() if not isinstance(value, list | Mapping)]
    notes = tuple(_shown(note) for note in _list(content.get("notes")))
    command = content.get("command")
    sections = (
        Section("Rows", _rows(rows)),
        *([Section("Notes", (Bullets(notes),))] if notes else []),
        Section("About it", table("As the file says", ("what", "value"), facts, numeric=False)),
        *([Section("Run it again", (Code(command),))] if isinstance(command, str) else []),
    )
    phrase = f"The {len(rows)} rows of {name}, as they are; nested values are in the file alone."
    date = str(content.get("date") or NONE)[:10]
    return Report("Result of a benchmark", date, None, (phrase,), (), sections)


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _rows(rows: Sequence[Mapping[str, Any]]) -> tuple[Block, ...]:
    """A table of the columns with plain values, in their order."""
    seen: dict[str, None] = {}
    for row in rows:
        seen.update(dict.fromkeys(key for key, value in row.items() if _is_plain(value)))
    columns = list(seen)[:_MAX_COLUMNS]
    cells = [[_shown(row.get(column)) for column in columns] for row in rows]
    return table("Every row", columns, cells, numeric=False) if columns else ()


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, str | int | float) for each in value)
    return value is not None and not isinstance(value, Mapping)


def _shown(value: object) -> str:
    if value is None or isinstance(value, Mapping):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_shown, value))[:_MAX_TEXT]
    return short_number(value) if isinstance(value, float) else str(value)[:_MAX_TEXT]
