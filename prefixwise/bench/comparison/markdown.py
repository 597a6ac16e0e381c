"""A comparison for people, as Markdown: side by side, with deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixwise.bench.artifacts import Comparison, Correctness
from prefixwise.bench.matrix.markdown import number, table

_HEADER = (
    "chunk size",
    "jax items/s",
    "pytorch items/s",
    "delta",
    "jax p95 ms",
    "pytorch p95 ms",
    "delta",
    "max abs diff",
    "correct",
)


def comparison_markdown(comparison: Comparison) -> str:
    """Recommendations first: they are what is asked for."""
    correctness, words = comparison.correctness, comparison.recommendations
    thresholds = correctness["thresholds"]
    parts = [
        "# JAX and PyTorch, compared",
        "\n".join(f"- **{name}**: {words[key]}" for name, key in _VIEWS.items()),
        f"Correctness gate: **{'passed' if correctness['pass'] else 'FAILED'}**, {correctness['rows_passed']} of "
        f"{correctness['rows_compared']} rows (max abs diff at most {thresholds['max_abs_diff']:g}, mean at most "
        f"{thresholds['mean_abs_diff']:g}, PyTorch is the reference). {comparison.generated_at_utc}.",
        "## The same client",
        table(_HEADER, map(_portable_cells, comparison.portable_view.model_dump(by_alias=True)["rows"])),
        "## Each with its own settings",
        _native_table(comparison),
    ]
    if comparison.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in comparison.notes)]
    inputs = ([name, f"`{file['path']}`", f"`{file['sha256']}`"] for name, file in comparison.inputs.items())
    parts += ["## Inputs", table(("matrix", "file", "sha256"), inputs)]
    return "\n\n".join(parts) + "\n"


_VIEWS = {"Portable": "portable", "Best native": "best_native", "Overall": "overall"}


def _portable_cells(row: Mapping[str, Any]) -> list[str]:
    jax, pytorch, deltas = row["jax"] or {}, row["pytorch"] or {}, row["deltas"] or {}
    cells = [str(row["client_chunk_size"])]
    for figure in ("throughput_items_sec", "p95_total_e2e_ms"):
        cells += [number(jax.get(figure)), number(pytorch.get(figure)), percent(deltas.get(f"{figure}_pct"))]
    return [*cells, scientific(row["correctness"]["max_abs_diff"]), verdict(row["correctness"])]


def _native_table(comparison: Comparison) -> str:
    view = comparison.best_native_view
    jax: Mapping[str, Any] = view.jax_selected or {}
    pytorch: Mapping[str, Any] = view.pytorch_selected or {}
    deltas = view.deltas or {}
    rows = [["chunk size", *(str(row.get("client_chunk_size", "-")) for row in (jax, pytorch)), "-"]]
    for title, figure in (
        ("items/s", "throughput_items_sec"),
        ("p50 ms", "p50_total_e2e_ms"),
        ("p95 ms", "p95_total_e2e_ms"),
    ):
        change = percent(deltas.get(f"{figure}_pct"))
        rows.append([title, number(jax.get(figure)), number(pytorch.get(figure)), change])
    correctness = view.correctness.model_dump(by_alias=True)
    return (
        table(("", "jax", "pytorch", "delta"), rows)
        + f"\n\nCorrect: {verdict(correctness)}, {_words(view.correctness)}."
    )


def percent(value: float | None) -> str:
    """Of JAX against PyTorch, with its sign."""
    return "-" if value is None else f"{value:+.1f}%"


def scientific(value: float | None) -> str:
    """Differences of scores are small."""
    return "-" if value is None else f"{value:.1e}"


def verdict(correctness: Mapping[str, Any]) -> str:
    """In one word, or the reason why there is none."""
    if correctness["status"] != "compared":
        return str(correctness["status"])
    return "yes" if correctness["pass"] else "NO"


def _words(correctness: Correctness) -> str:
    return correctness.detail or correctness.status
