"""The comparison of two backends: row by row, then each backend's best, then which of the two.

PyTorch's scores are the reference: a row of JAX counts only where its scores are near enough to them, and a row of
PyTorch counts as it is. Deltas are JAX's figures less PyTorch's.
"""

from __future__ import annotations

from typing import Any, cast

from prefixwise.bench.artifacts import (
    COMPARISON_VERSION,
    BestNativeView,
    Comparison,
    MatrixRow,
    PortableRow,
    PortableView,
    QuotedRow,
)
from prefixwise.bench.comparison.inputs import ComparisonInputs
from prefixwise.bench.comparison.rows import CompareOptions, correctness_of, deltas_of, winner_of
from prefixwise.bench.comparison.words import recommendations
from prefixwise.bench.files import now_utc
from prefixwise.bench.matrix.rows import quoted
from prefixwise.bench.rules import select_winner


def compare(inputs: ComparisonInputs, options: CompareOptions) -> Comparison:
    """Raises ArtifactError where a matrix recommends a row that it does not have."""
    portable = _portable_view(inputs, options)
    native = _best_native_view(inputs, options)
    return Comparison(
        schema_version=COMPARISON_VERSION,
        generated_at_utc=now_utc(),
        portable_view=portable,
        best_native_view=native,
        correctness=_all_correctness(portable, native, options),
        recommendations=recommendations(portable, native),
        notes=[*inputs.notes, *_correctness_notes(portable, native)],
        inputs={name: file.describe() for name, file in inputs.files.items()},
    )


def _portable_view(inputs: ComparisonInputs, options: CompareOptions) -> PortableView:
    jax, pytorch = inputs.jax_portable, inputs.pytorch_portable
    sizes = sorted({row.client_chunk_size for file in (jax, pytorch) for row in file.matrix.results})
    rows = [_portable_row(size, jax.row(size), pytorch.row(size), options) for size in sizes]
    correct = {row.client_chunk_size for row in rows if row.correctness.passed}
    ratio = options.guardrail_ratio
    best_jax = select_winner(jax.matrix.results, ratio, lambda row: row.client_chunk_size in correct)
    best_pytorch = select_winner(pytorch.matrix.results, ratio)
    return PortableView(
        guardrail_ratio=ratio,
        rows=rows,
        backend_best={"jax": _cited(best_jax), "pytorch": _cited(best_pytorch)},
        winner=winner_of(best_jax, best_pytorch, ratio),
    )


def _portable_row(size: int, jax: MatrixRow | None, pytorch: MatrixRow | None, options: CompareOptions) -> PortableRow:
    return PortableRow(
        client_chunk_size=size,
        jax=_cited(jax),
        pytorch=_cited(pytorch),
        correctness=correctness_of(jax, pytorch, options),
        deltas=deltas_of(jax, pytorch),
    )


def _cited(row: MatrixRow | None) -> QuotedRow | None:
    return cast("QuotedRow | None", quoted(row))


def _best_native_view(inputs: ComparisonInputs, options: CompareOptions) -> BestNativeView:
    """The chunk sizes may differ: each backend as it is best."""
    jax, pytorch = inputs.jax_best_native.selected(), inputs.pytorch_best_native.selected()
    correctness = correctness_of(jax, pytorch, options)
    trusted = jax if correctness.passed else None
    return BestNativeView(
        jax_selected=_cited(jax),
        pytorch_selected=_cited(pytorch),
        correctness=correctness,
        deltas=deltas_of(jax, pytorch),
        winner=winner_of(trusted, pytorch, options.guardrail_ratio),
    )


def _all_correctness(portable: PortableView, native: BestNativeView, options: CompareOptions) -> dict[str, Any]:
    """Of all rows that both backends have, of which there must be some, and of the best-native ones."""
    judged = [row.correctness for row in portable.rows if row.correctness.status != "missing"]
    return {
        "thresholds": {"max_abs_diff": options.max_abs_diff, "mean_abs_diff": options.mean_abs_diff},
        "rows_compared": len(judged),
        "rows_passed": sum(each.passed for each in judged),
        "pass": bool(judged) and all(each.passed for each in judged) and native.correctness.passed,
    }


def _correctness_notes(portable: PortableView, native: BestNativeView) -> list[str]:
    found = [(f"chunk size {row.client_chunk_size}", row.correctness) for row in portable.rows]
    found.append(("best native", native.correctness))
    return [f"correctness, {where}: {each.status}, {each.detail}" for where, each in found if not each.passed]
