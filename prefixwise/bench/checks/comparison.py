"""What must hold in a comparison: gates agree with their bounds, and the best rows are rows of it."""

from __future__ import annotations

from collections.abc import Mapping

from prefixwise.bench.artifacts import Comparison, Correctness, PortableRow
from prefixwise.bench.checks.comparison_inputs import check_inputs
from prefixwise.bench.checks.comparison_winners import BACKENDS, check_native, check_portable
from prefixwise.bench.checks.findings import Findings
from prefixwise.bench.checks.reading import is_number

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
    _check_gate(comparison.best_native_view.correctness, "best_native_view.correctness", bounds, found)
    _check_pass(comparison, found)
    _check_best(comparison, found)
    check_portable(comparison.portable_view, found)
    check_native(comparison.best_native_view, comparison.portable_view.guardrail_ratio, found)
    for name in _VIEWS:
        if name not in comparison.recommendations:
            found.fail(f"recommendations.{name}", "the field", "nothing")
    check_inputs(comparison, bounds, found)


def _bounds(comparison: Comparison, found: Findings) -> dict[str, float]:
    """Empty where they are not there: then no gate can be held to them."""
    thresholds = comparison.correctness.get("thresholds")
    if not isinstance(thresholds, Mapping) or not all(_is_bound(thresholds.get(key)) for key in _BOUNDS):
        found.fail("correctness.thresholds", f"numbers for {' and '.join(_BOUNDS)}", thresholds)
        return {}
    return {key: float(thresholds[key]) for key in _BOUNDS}


def _is_bound(value: object) -> bool:
    return is_number(value) and value >= 0


def _check_pass(comparison: Comparison, found: Findings) -> None:
    """The verdict on all of it can be no better than one of its gates."""
    if comparison.correctness.get("pass") is not True:
        return
    gates = {f"portable_view.rows[{index}]": row.correctness for index, row in enumerate(comparison.portable_view.rows)}
    gates["best_native_view"] = comparison.best_native_view.correctness
    failed = [where for where, gate in gates.items() if gate.max_abs_diff is not None and not gate.passed]
    if failed:
        found.fail("correctness.pass", f"false, as it is at {', '.join(failed)}", True)


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
    """What is called the best is one of the rows."""
    view = comparison.portable_view
    for name in BACKENDS:
        best = view.backend_best.get(name)
        if best is None or "client_chunk_size" not in best:
            continue  # no row was eligible
        sizes = [row.client_chunk_size for row in view.rows if getattr(row, name) is not None]
        if best["client_chunk_size"] not in sizes:
            where = f"portable_view.backend_best.{name}.client_chunk_size"
            found.fail(where, f"one of its chunk sizes, {sizes}", best["client_chunk_size"])
