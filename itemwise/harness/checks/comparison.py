"""What must hold in a comparison: gates agree with their bounds, and the best rows are rows of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from itemwise.harness.artifacts import Comparison, Correctness, PortableRow
from itemwise.harness.checks.findings import Findings

_BACKENDS = ("jax", "pytorch")
_VIEWS = ("portable", "best_native", "overall")
_BOUNDS = ("max_abs_diff", "mean_abs_diff")


def check_comparison(comparison: Comparison, found: Findings) -> None:
    """Both views, and what they recommend."""
    bounds = _bounds(comparison, found)
    rows = comparison.portable_view.rows
    sizes = [row.client_chunk_size for row in rows]
    for index, row in enumerate(rows):
        where = f"portable_view.rows[{index}]"
        if sizes.index(row.client_chunk_size) != index:
            found.fail(f"{where}.client_chunk_size", "a size that no other row has", row.client_chunk_size)
        _check_row(row, where, found)
        _check_gate(row.correctness, f"{where}.correctness", bounds, found)
    _check_best(comparison, found)
    native = comparison.best_native_view
    _check_winner("portable_view", comparison.portable_view.winner, comparison.portable_view.backend_best, found)
    selected = {"jax": native.jax_selected, "pytorch": native.pytorch_selected}
    _check_winner("best_native_view", native.winner, selected, found)
    _check_gate(native.correctness, "best_native_view.correctness", bounds, found)
    for name in _VIEWS:
        if name not in comparison.recommendations:
            found.fail(f"recommendations.{name}", "the field", "nothing")
    if not comparison.inputs:
        found.warn("inputs", "the matrices that were compared", "nothing")


def _bounds(comparison: Comparison, found: Findings) -> dict[str, float]:
    """Empty where they are not there: then no gate can be held to them."""
    thresholds = comparison.correctness.get("thresholds")
    if not isinstance(thresholds, Mapping) or not all(isinstance(thresholds.get(key), int | float) for key in _BOUNDS):
        found.fail("correctness.thresholds", f"numbers for {' and '.join(_BOUNDS)}", thresholds)
        return {}
    return {key: float(thresholds[key]) for key in _BOUNDS}


def _check_row(row: PortableRow, where: str, found: Findings) -> None:
    for name, side in (("jax", row.jax), ("pytorch", row.pytorch)):
        if side is None:
            found.warn(f"{where}.{name}", "a row of this backend", None)
        elif "client_chunk_size" in side:
            got = side["client_chunk_size"]
            found.same(f"{where}.{name}.client_chunk_size", row.client_chunk_size, got, "of the row")


def _check_gate(gate: Correctness, where: str, bounds: Mapping[str, float], found: Findings) -> None:
    largest, average = gate.max_abs_diff, gate.mean_abs_diff
    if largest is None or average is None:
        found.same(f"{where}.pass", False, gate.passed, "nothing was compared")
        return
    if average > largest * (1 + 1e-9):
        found.fail(f"{where}.mean_abs_diff", f"at most max_abs_diff, {largest:.6g}", f"{average:.6g}")
    if gate.num_compared < 1:
        found.fail(f"{where}.num_compared", "at least 1, as there are differences", gate.num_compared)
    if bounds:
        is_within = largest <= bounds["max_abs_diff"] and average <= bounds["mean_abs_diff"]
        found.same(f"{where}.pass", is_within, gate.passed, f"by its differences {largest:.6g} and {average:.6g}")
    if not gate.passed:
        found.warn(f"{where}.pass", "true", f"false: {gate.detail}")


def _check_best(comparison: Comparison, found: Findings) -> None:
    view = comparison.portable_view
    for name in _BACKENDS:
        best: Any = view.backend_best.get(name)
        if not isinstance(best, Mapping) or "client_chunk_size" not in best:
            continue  # no row was eligible
        sides = {row.client_chunk_size: getattr(row, name) for row in view.rows}
        if sides.get(best["client_chunk_size"]) is None:
            expected = f"one of its chunk sizes, {[size for size, side in sides.items() if side is not None]}"
            found.fail(f"portable_view.backend_best.{name}.client_chunk_size", expected, best["client_chunk_size"])


def _check_winner(where: str, winner: Mapping[str, Any], best: Mapping[str, Any], found: Findings) -> None:
    """A backend that wins has a row to win with, and it is this one."""
    backend = winner.get("backend")
    if backend not in _BACKENDS:
        return  # neither, or both
    row = best.get(backend)
    if not isinstance(row, Mapping):
        found.fail(f"{where}.winner.backend", "a backend that has a best row", backend)
    elif "client_chunk_size" in winner and "client_chunk_size" in row:
        got = winner["client_chunk_size"]
        found.same(f"{where}.winner.client_chunk_size", row["client_chunk_size"], got, f"the best of {backend}")
