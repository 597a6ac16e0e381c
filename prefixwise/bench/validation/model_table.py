"""The model matrix as a table: the columns of the earlier system's report, and what came of every model."""

from __future__ import annotations

from collections.abc import Sequence

from prefixwise.bench.artifacts import ModelMatrix, ModelRow

_SHOWN_COUNTS = ("8", "32", "128")  # of the report; where none of them was measured, whatever was
_NOTHING = "-"


def table_headers(rows: Sequence[ModelRow]) -> list[str]:
    """The first is of words, the last too; those between are of figures."""
    return [
        "Model",
        "Same-len isolation max",
        "Changed-len isolation max",
        "Delimiter-aligned equiv max",
        "JAX serial vs torch serial max",
        "JAX multi vs torch multi-sem max",
        *(f"Speedup N={count}" for count in _counts(rows)),
        "Result",
    ]


def table_cells(rows: Sequence[ModelRow]) -> list[list[str]]:
    """A list for each model."""
    counts = _counts(rows)
    return [[row.model, *_figures(row), *_speedups(row, counts), row.status] for row in rows]


def render_markdown(matrix: ModelMatrix) -> str:
    """A page of its own; why a model failed stands below the table."""
    headers = table_headers(matrix.rows)
    rule = ["---", *("---:" for _ in headers[2:]), "---"]
    cells = [[f"`{_escaped(name)}`", *others] for name, *others in table_cells(matrix.rows)]
    lines = ["# Model matrix", "", f"Made {matrix.generated_at_utc} by `prefixwise validate models`.", ""]
    lines += [f"| {' | '.join(row)} |" for row in (headers, rule, *cells)]
    reasons = [f"- `{_escaped(row.model)}`: {row.status}: {_escaped(row.reason)}" for row in matrix.rows if row.reason]
    return "\n".join([*lines, *(["", *reasons] if reasons else []), ""])


def _counts(rows: Sequence[ModelRow]) -> list[str]:
    measured = sorted({count for row in rows for count in row.speedups}, key=int)
    return [count for count in measured if count in _SHOWN_COUNTS] or measured


def _figures(row: ModelRow) -> list[str]:
    figures = (
        row.same_length_isolation_max,
        row.changed_length_isolation_max,
        row.delimiter_aligned_equivalence_max,
        row.jax_serial_vs_torch_serial_max,
        row.jax_multi_vs_torch_multi_semantic_max,
    )
    return [_NOTHING if figure is None else _difference(figure) for figure in figures]


def _difference(figure: float) -> str:
    """Four digits as the report has them; one that would look like none is spelled by its exponent."""
    return f"{figure:.1e}" if 0 < figure < 0.00005 else f"{figure:.4f}"


def _speedups(row: ModelRow, counts: Sequence[str]) -> list[str]:
    return [f"{row.speedups[count]:.2f}x" if count in row.speedups else _NOTHING for count in counts]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")
