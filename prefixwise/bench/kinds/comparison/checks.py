"""Checks of a comparison: gates agree with their bounds, winners with the rows, rows with the compared matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prefixwise.bench.files import sha256_of
from prefixwise.bench.kinds.comparison.model import BestNativeView, Comparison, Correctness, PortableRow, PortableView
from prefixwise.bench.kinds.comparison.rules import CompareOptions, deltas_of, winner_of
from prefixwise.bench.kinds.findings import Findings, find_files, is_number
from prefixwise.bench.kinds.score_matrix import MatrixRow, select_winner
from prefixwise.bench.run.comparison import compare, read_inputs
from prefixwise.contract.errors import ArtifactError

BACKENDS = ("jax", "pytorch")


Quote = Mapping[str, Any]


# What the choice is made by.
_NEEDED = ("client_chunk_size", "success_rate", "p95_total_e2e_ms", "throughput_items_sec")


def check_portable(view: PortableView, found: Findings) -> None:
    """The best row of each backend, then the better of the two."""
    for index, row in enumerate(view.rows):
        _check_deltas(f"portable_view.rows[{index}].deltas", row.deltas, row.jax, row.pytorch, found)
    jax, pytorch = ([getattr(row, name) for row in view.rows if getattr(row, name) is not None] for name in BACKENDS)
    if not _are_whole([*jax, *pytorch]):
        return
    correct = {row.client_chunk_size for row in view.rows if row.correctness.passed}
    best_jax = select_winner(map(_row_of, jax), view.guardrail_ratio, lambda row: row.client_chunk_size in correct)
    best_pytorch = select_winner(map(_row_of, pytorch), view.guardrail_ratio)
    for name, best in (("jax", best_jax), ("pytorch", best_pytorch)):
        if name in view.backend_best:
            _check_best_row(f"portable_view.backend_best.{name}", best, view.backend_best[name], found)
    expected = winner_of(best_jax, best_pytorch, view.guardrail_ratio)
    _check_winner("portable_view.winner", expected, view.winner, found)


def check_native(view: BestNativeView, guardrail_ratio: float, found: Findings) -> None:
    """Check the winner: JAX's row counts only where its scores agree with PyTorch's."""
    jax, pytorch = view.jax_selected, view.pytorch_selected
    _check_deltas("best_native_view.deltas", view.deltas, jax, pytorch, found)
    if not _are_whole([row for row in (jax, pytorch) if row is not None]):
        return
    trusted = _row_of(jax) if jax is not None and view.correctness.passed else None
    expected = winner_of(trusted, None if pytorch is None else _row_of(pytorch), guardrail_ratio)
    _check_winner("best_native_view.winner", expected, view.winner, found)


def _are_whole(quotes: Iterable[Quote]) -> bool:
    return all(name in quote for quote in quotes for name in _NEEDED)


def _row_of(quote: Quote) -> MatrixRow:
    """A row with the quoted metrics; others are None."""
    return MatrixRow.model_construct(**{name: quote.get(name) for name in MatrixRow.model_fields})


def _check_best_row(where: str, best: MatrixRow | None, got: Quote | None, found: Findings) -> None:
    size = None if best is None else best.client_chunk_size
    own = None if got is None else got.get("client_chunk_size")
    found.same(f"{where}.client_chunk_size", size, own, "by the rows")
    if best is None or got is None or own != size:
        return
    for name in ("throughput_items_sec", "p95_total_e2e_ms"):
        if name in got:
            found.close(f"{where}.{name}", getattr(best, name), got[name], "of its row")


def _check_winner(where: str, expected: Quote, got: Quote, found: Findings) -> None:
    """Check the winner; other tools have other names for a tie or no winner."""
    if "backend" in got and (expected["backend"] in BACKENDS or got["backend"] in BACKENDS):
        found.same(f"{where}.backend", expected["backend"], got["backend"], "by the rows")
        if got["backend"] != expected["backend"]:
            return  # the rest is the other's
    if "client_chunk_size" in got:
        found.same(f"{where}.client_chunk_size", expected["client_chunk_size"], got["client_chunk_size"], "by the rows")
    if "ratio" in got:
        found.close(f"{where}.ratio", expected["ratio"], got["ratio"], "by the rows")
    _check_metrics(f"{where}.deltas", expected["deltas"], got.get("deltas"), found)


def _check_deltas(where: str, got: object, jax: Quote | None, pytorch: Quote | None, found: Findings) -> None:
    if jax is None or pytorch is None:
        expected = None
    else:
        both = jax.keys() & pytorch.keys()
        every = deltas_of(_row_of(jax), _row_of(pytorch)) or {}
        expected = {name: value for name, value in every.items() if name.removesuffix("_pct") in both}
    _check_metrics(where, expected, got, found)


def _check_metrics(where: str, expected: Mapping[str, float | None] | None, got: object, found: Findings) -> None:
    if got is None:
        return
    if expected is None or not isinstance(got, Mapping):
        found.fail(where, "metrics where both backends have a row, and only there", got)
        return
    for name, value in expected.items():
        if name in got:
            found.close(f"{where}.{name}", value, got[name], "by the rows")


_PORTABLE = ("jax_portable", "pytorch_portable")


_NATIVE = ("jax_best_native", "pytorch_best_native")


_QUOTED_METRICS = ("success_rate", "throughput_items_sec", "p50_total_e2e_ms", "p95_total_e2e_ms", "mean_total_e2e_ms")


def check_inputs(comparison: Comparison, bounds: Mapping[str, float], found: Findings) -> None:
    """Compare the input matrices again. `bounds`: of the correctness gate; without them nothing is compared."""
    if not comparison.inputs:
        found.warn("inputs", "the matrices that were compared", "nothing")
    files = {name: _find(f"inputs.{name}", entry, found) for name, entry in comparison.inputs.items()}
    jax, pytorch = (files.get(name) for name in _PORTABLE)
    if jax is None or pytorch is None or not bounds:
        return
    native = [files.get(name) for name in _NATIVE]
    options = CompareOptions(**bounds, guardrail_ratio=comparison.portable_view.guardrail_ratio)
    try:
        expected = compare(read_inputs(jax, pytorch, *native), options)
    except ArtifactError as error:
        found.fail("inputs", "matrices that can be compared", error)
        return
    _check_row_inputs(expected, comparison, found)
    if all(native):
        _check_native_inputs(expected, comparison, found)


def _find(where: str, entry: object, found: Findings) -> Path | None:
    """The file with that checksum; entries of other tools without one are skipped."""
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("path", "sha256")):
        return None
    places = find_files(entry["path"], found.path)
    sums = {sha256_of(place): place for place in places}
    if not places:
        found.warn(f"{where}.path", "the matrix, to compare it again", f"no file {entry['path']}")
    elif entry["sha256"] not in sums:
        found.fail(
            f"{where}.sha256", " or ".join(f"{each}, of {place}" for each, place in sums.items()), entry["sha256"]
        )
    return sums.get(entry["sha256"])


def _check_row_inputs(expected: Comparison, got: Comparison, found: Findings) -> None:
    sizes, own = ([row.client_chunk_size for row in each.portable_view.rows] for each in (expected, got))
    if sorted(own) != sizes:
        found.fail("portable_view.rows", f"the chunk sizes of the inputs, {sizes}", own)
        return
    rows = {row.client_chunk_size: row for row in expected.portable_view.rows}
    for index, row in enumerate(got.portable_view.rows):
        where, again = f"portable_view.rows[{index}]", rows[row.client_chunk_size]
        _check_quote(f"{where}.jax", again.jax, row.jax, found)
        _check_quote(f"{where}.pytorch", again.pytorch, row.pytorch, found)
        _check_same_gate(f"{where}.correctness", again.correctness, row.correctness, found)


def _check_native_inputs(expected: Comparison, got: Comparison, found: Findings) -> None:
    again, view = expected.best_native_view, got.best_native_view
    _check_quote("best_native_view.jax_selected", again.jax_selected, view.jax_selected, found)
    _check_quote("best_native_view.pytorch_selected", again.pytorch_selected, view.pytorch_selected, found)
    _check_same_gate("best_native_view.correctness", again.correctness, view.correctness, found)
    for name in ("rows_compared", "rows_passed", "pass"):
        if name in got.correctness:
            found.same(f"correctness.{name}", expected.correctness[name], got.correctness[name], "by the inputs")


def _check_quote(where: str, expected: Quote | None, got: Quote | None, found: Findings) -> None:
    if expected is None or got is None:
        if expected is not got:
            found.fail(where, f"{'no' if expected is None else 'a'} row, as in the inputs", got)
        return
    for name in ("client_chunk_size", *_QUOTED_METRICS):
        if name in got:
            found.close(f"{where}.{name}", expected.get(name), got[name], "in the inputs")


def _check_same_gate(where: str, expected: Correctness, got: Correctness, found: Findings) -> None:
    for name in ("max_abs_diff", "mean_abs_diff"):
        found.close(f"{where}.{name}", getattr(expected, name), getattr(got, name), "by the scores of the inputs")


_VIEWS = ("portable", "best_native", "overall")


_BOUNDS = ("max_abs_diff", "mean_abs_diff")


def check_comparison(comparison: Comparison, found: Findings) -> None:
    """Check both views and the recommendations."""
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
    """The bounds of the gate; empty where the file has none."""
    thresholds = comparison.correctness.get("thresholds")
    if not isinstance(thresholds, Mapping) or not all(_is_bound(thresholds.get(key)) for key in _BOUNDS):
        found.fail("correctness.thresholds", f"numbers for {' and '.join(_BOUNDS)}", thresholds)
        return {}
    return {key: float(thresholds[key]) for key in _BOUNDS}


def _is_bound(value: object) -> bool:
    return is_number(value) and value >= 0


def _check_pass(comparison: Comparison, found: Findings) -> None:
    """The overall verdict cannot pass where a gate fails."""
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
    """The best row of a backend is one of its rows."""
    view = comparison.portable_view
    for name in BACKENDS:
        best = view.backend_best.get(name)
        if best is None or "client_chunk_size" not in best:
            continue  # no row was eligible
        sizes = [row.client_chunk_size for row in view.rows if getattr(row, name) is not None]
        if best["client_chunk_size"] not in sizes:
            where = f"portable_view.backend_best.{name}.client_chunk_size"
            found.fail(where, f"one of its chunk sizes, {sizes}", best["client_chunk_size"])
