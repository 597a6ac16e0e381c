"""The matrix for people: one line for a model and a slice, one column for a program."""

from __future__ import annotations

from collections.abc import Sequence

from prefixwise.cli.aot.cases import CASES
from prefixwise.cli.aot.matrix_file import Row
from prefixwise.cli.output import stdout_width
from prefixwise.cli.text_table import Column, render_table

LEGEND = "HBM of one chip in GiB and estimated ms: what a program takes there, and what its FLOPs and bytes allow"


def matrix_text(rows: Sequence[Row]) -> str:
    """With a legend, and the reasons of what does not compile."""
    lines = _lines(rows)
    names = ["model", "slice", *(case.name for case in CASES)]
    columns = [Column(name, [line[place] for line in lines]) for place, name in enumerate(names)]
    reasons = [f"{row['model']} on {row['topology']}, {row['case']}: {row['reason']}\n" for row in _failed(rows)]
    return f"{LEGEND}\n{render_table(columns, stdout_width())}{''.join(reasons)}"


def matrix_markdown(rows: Sequence[Row]) -> str:
    """The table alone."""
    header = ["model", "slice", *(case.name for case in CASES)]
    lines = [header, ["---"] * len(header), *_lines(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _failed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["outcome"] != "compiles"]


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    places = {(row["model"], row["topology"], row["case"]): row for row in rows}
    pairs = dict.fromkeys((row["model"], row["topology"]) for row in rows)
    return [[*pair, *(_cell(places.get((*pair, case.name))) for case in CASES)] for pair in pairs]


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["outcome"] != "compiles":
        return str(row["outcome"])
    return f"{row['hbm_bytes']['total'] / 2**30:.1f}, {1000 * row['estimated_seconds'] / row['runs']:.1f} ms"
