"""Checks of a comparison: gates agree with their bounds, winners with the rows, rows with the compared matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixwise.bench.files import sha256_of
from prefixwise.bench.kinds.base import BACKENDS, BackendName
from prefixwise.bench.kinds.comparison.model import (
    BestNativeView,
    Comparison,
    Correctness,
    InputFile,
    PortableRow,
    PortableView,
    Winner,
    WinningRow,
)
from prefixwise.bench.kinds.comparison.rules import deltas_of, winner_of
from prefixwise.bench.kinds.findings import Findings, find_files, is_number
from prefixwise.bench.kinds.score_matrix import MatrixRow, select_winner
from prefixwise.bench.rules import Bounds
from prefixwise.bench.run.comparison import compare, read_inputs
from prefixwise.contract.errors import ArtifactError

Quote = Mapping[str, Any]


# What the choice is made by.
_NEEDED = ("success_rate", "p95_total_e2e_ms", "throughput_items_sec")


def check_portable(view: PortableView, found: Findings) -> None:
    """The best row of each backend, then the best row of both."""
    for index, row in enumerate(view.rows):
        _check_deltas(f"portable_view.rows[{index}].deltas", row.deltas, row.jax, row.pytorch, found)
    quotes = {name: [(row, side) for row in view.rows if (side := row.side(name)) is not None] for name in BACKENDS}
    if not _are_whole(side for sides in quotes.values() for _, side in sides):
        return
    ratio = view.guardrail_ratio
    jax = [_row_of(row, side) for row, side in quotes["jax"] if row.correctness.passed]
    pytorch = [_row_of(row, side) for row, side in quotes["pytorch"]]
    # The earlier system gates PyTorch's rows, too; here they are the reference.
    gated = [_row_of(row, side) for row, side in quotes["pytorch"] if row.correctness.passed]
    legal: dict[BackendName, list[list[MatrixRow]]] = {"jax": [jax], "pytorch": [pytorch, gated]}
    for name, choices in legal.items():
        if name in view.backend_best:
            best = [select_winner(rows, ratio) for rows in choices]
            _check_best_row(f"portable_view.backend_best.{name}.winner", best, view.backend_best[name].winner, found)
    # prefixwise 0.1 took the best row of each backend first, and then the better of the two.
    finalists = [[winner] if (winner := select_winner(rows, ratio)) else [] for rows in (jax, pytorch)]
    winners = [
        winner_of(*pair, guardrail_ratio=ratio) for pair in ((jax, pytorch), (jax, gated), (finalists[0], finalists[1]))
    ]
    _check_winner("portable_view.winner", winners, view.winner, found)


def check_native(view: BestNativeView, guardrail_ratio: float, found: Findings) -> None:
    """Check the winner: JAX's row counts only where its scores agree with PyTorch's."""
    jax, pytorch = view.jax_selected, view.pytorch_selected
    _check_deltas("best_native_view.deltas", view.deltas, jax, pytorch, found)
    if not _are_whole((row for row in (jax, pytorch) if row is not None), "client_chunk_size"):
        return
    ratio = view.guardrail_ratio or guardrail_ratio
    trusted, reference = ([] if row is None else [_row_of(None, row)] for row in (jax, pytorch))
    legal = [winner_of(trusted if view.correctness.passed else [], reference, ratio)]
    if not view.correctness.passed:
        legal.append(winner_of([], [], ratio))  # the earlier system's
    _check_winner("best_native_view.winner", legal, view.winner, found)


def _are_whole(quotes: Iterable[Quote], *more: str) -> bool:
    return all(name in quote for quote in quotes for name in (*_NEEDED, *more))


def _row_of(row: PortableRow | None, quote: Quote) -> MatrixRow:
    """A row with the quoted metrics; others are None. The earlier system quotes a portable row without its size."""
    metrics: dict[str, Any] = {name: quote.get(name) for name in MatrixRow.model_fields}
    size = metrics.pop("client_chunk_size") if row is None else row.client_chunk_size
    return MatrixRow.model_construct(**{**metrics, "client_chunk_size": size})


def _check_best_row(where: str, legal: Sequence[MatrixRow | None], got: WinningRow | None, found: Findings) -> None:
    """`legal`: the rows that may be the best, the first by our own rule."""
    own = None if got is None else got.client_chunk_size
    sizes = [None if row is None else row.client_chunk_size for row in legal]
    if own not in sizes:
        found.fail(f"{where}.client_chunk_size", f"{sizes[0]} (by the rows)", own)
        return
    best = legal[sizes.index(own)]
    if best is not None and got is not None:
        _check_choice(where, best, got, found)


def _check_choice(where: str, expected: MatrixRow | WinningRow, got: WinningRow, found: Findings) -> None:
    for name in ("throughput_items_sec", "p95_total_e2e_ms"):
        if name in got.model_fields_set:
            found.close(f"{where}.{name}", getattr(expected, name), getattr(got, name), "of its row")


def _check_winner(where: str, legal: Sequence[Winner], got: Winner, found: Findings) -> None:
    """`legal`: the winners by the rules of ours and of the earlier system, ours first."""
    expected = next((each for each in legal if _is_same(each, got)), legal[0])
    if not _is_same(expected, got):
        found.same(f"{where}.winner.backend", expected.backend, got.backend, "by the rows")
        if expected.place and got.place and expected.place[0] == got.place[0]:
            found.same(f"{where}.winner.client_chunk_size", expected.place[1], got.place[1], "by the rows")
        return
    if expected.winner is not None and got.winner is not None:
        _check_choice(f"{where}.winner", expected.winner, got.winner, found)
    if "ratio" in got.model_fields_set:
        found.close(f"{where}.ratio", expected.ratio, got.ratio, "by the rows")
    _check_metrics(f"{where}.deltas", expected.deltas, got.deltas, found)


def _is_same(expected: Winner, got: Winner) -> bool:
    """The same row wins; the earlier system does not mark a tie."""
    return expected.place == got.place and ("tie" not in got.model_fields_set or expected.tie == got.tie)


def _check_deltas(where: str, got: object, jax: Quote | None, pytorch: Quote | None, found: Findings) -> None:
    if jax is None or pytorch is None:
        expected = None
    else:
        both = jax.keys() & pytorch.keys()
        every = deltas_of(_row_of(None, jax), _row_of(None, pytorch)) or {}
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
    files = {name: _find(name, entry, found) for name, entry in comparison.input_files().items()}
    jax, pytorch = (files.get(name) for name in _PORTABLE)
    if jax is None or pytorch is None or not bounds:
        return
    native = [files.get(name) for name in _NATIVE]
    options = Bounds(**bounds, guardrail_ratio=comparison.portable_view.guardrail_ratio)
    try:
        expected = compare(read_inputs(jax, pytorch, *native), options)
    except ArtifactError as error:
        found.fail("inputs", "matrices that can be compared", error)
        return
    _check_row_inputs(expected, comparison, found)
    if all(native):
        _check_native_inputs(expected, comparison, found)


def _find(name: str, entry: InputFile, found: Findings) -> Path | None:
    """The file with that checksum; None for an entry without one."""
    if entry.sha256 is None:
        return None
    places = find_files(entry.path, found.path)
    sums = {sha256_of(place): place for place in places}
    if not places:
        found.warn(f"inputs.{name}_json", "the matrix, to compare it again", f"no file {entry.path}")
    elif entry.sha256 not in sums:
        expected = " or ".join(f"{each}, of {place}" for each, place in sums.items())
        found.fail(f"inputs_sha256.{name}_json", expected, entry.sha256)
    return sums.get(entry.sha256)


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
