"""What must hold in the summary of a score matrix: what it recommends follows from the rows, and none is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixwise.bench.artifacts import MatrixRow, ScoreMatrix
from prefixwise.bench.checks.findings import Findings, is_close
from prefixwise.bench.checks.reading import is_number
from prefixwise.bench.rules import MAX_ABS_DIFF, MEAN_ABS_DIFF, confirm_sizes, select_winner

Choice = dict[str, Any]
_QUOTED = ("throughput_items_sec", "p95_total_e2e_ms")


def check_summary(matrix: ScoreMatrix, found: Findings) -> None:
    """The three recommendations, the sizes that were confirmed, the bounds."""
    summary = matrix.summary
    swept, confirmed = (_winner(rows, matrix) for rows in (matrix.results, matrix.confirm_results))
    missing = _missing(summary.confirm_chunk_sizes, matrix.confirm_results)
    _check_choice("sweep_recommendation", summary.sweep_recommendation, [swept], found)
    # While sizes are still to be confirmed, some tools name the best so far and some name none.
    so_far = [confirmed, None] if missing else [confirmed]
    _check_choice("confirm_recommendation", summary.confirm_recommendation, so_far, found)
    _check_choice("final_recommendation", summary.final_recommendation, _finals(matrix, swept, confirmed), found)
    _check_confirm_sizes(matrix, swept, found)
    _check_that_all_are_there(matrix, missing, found)
    for name, usual in (("max_abs_diff", MAX_ABS_DIFF), ("mean_abs_diff", MEAN_ABS_DIFF)):
        bound = getattr(summary.correctness_thresholds, name)
        if bound != usual:
            found.warn(f"summary.correctness_thresholds.{name}", f"{usual}, the usual bound", bound)


def _winner(rows: Sequence[MatrixRow], matrix: ScoreMatrix) -> MatrixRow | None:
    return select_winner(rows, matrix.summary.guardrail_ratio)


def _missing(sizes: Sequence[int], rows: Sequence[MatrixRow]) -> list[int]:
    there = [row.client_chunk_size for row in rows]
    return [size for size in sizes if size not in there]


def _finals(matrix: ScoreMatrix, swept: MatrixRow | None, confirmed: MatrixRow | None) -> list[MatrixRow | None]:
    """What may stand there. A confirm phase that is done decides, also where nothing of it can be recommended."""
    sizes = matrix.summary.confirm_chunk_sizes
    if not sizes and not matrix.confirm_results:
        return [swept]
    if _missing(sizes, matrix.confirm_results):
        return [swept] if confirmed is None else [swept, confirmed]
    return [confirmed]


def _check_choice(name: str, choice: Choice | None, legal: Sequence[MatrixRow | None], found: Findings) -> None:
    """`legal`: the rows that it may quote; None among them: it may be empty."""
    where = f"summary.{name}"
    rows = [row for row in legal if row is not None]
    sizes = " or ".join(str(size) for size in dict.fromkeys(row.client_chunk_size for row in rows))
    if choice is None:
        if None not in legal:
            found.fail(where, f"chunk size {sizes}, by its rows", None)
        return
    own = [row for row in rows if row.client_chunk_size == choice.get("client_chunk_size")]
    if not own:
        found.fail(f"{where}.client_chunk_size", f"{sizes or None} (by its rows)", choice.get("client_chunk_size"))
        return
    row = next((row for row in own if _is_quote(choice, row)), own[0])
    for key in _QUOTED:
        if key in choice:
            found.close(f"{where}.{key}", getattr(row, key), choice[key], "of its row")


def _is_quote(choice: Choice, row: MatrixRow) -> bool:
    return all(key not in choice or is_close(getattr(row, key), choice[key]) for key in _QUOTED)


def _check_confirm_sizes(matrix: ScoreMatrix, swept: MatrixRow | None, found: Findings) -> None:
    sizes = matrix.summary.confirm_chunk_sizes
    for row in matrix.confirm_results:
        if row.client_chunk_size not in sizes:
            expected = f"the sizes of confirm_results, {row.client_chunk_size} among them"
            found.fail("summary.confirm_chunk_sizes", expected, sizes)
    by_rule = confirm_sizes(matrix.results, swept)
    if sizes == by_rule:
        return
    expected = f"{by_rule}: 1, the winner and its neighbours"
    if sizes:
        found.warn("summary.confirm_chunk_sizes", expected, sizes)
    elif matrix.complete and _asks_to_confirm(matrix):
        found.fail("summary.confirm_chunk_sizes", f"{expected}, as the arguments ask for them", sizes)


def _asks_to_confirm(matrix: ScoreMatrix) -> bool:
    runs = (matrix.arguments or {}).get("timed_runs_confirm")
    return is_number(runs) and runs > 0


def _check_that_all_are_there(matrix: ScoreMatrix, unconfirmed: Sequence[int], found: Findings) -> None:
    """A sweep that is not complete says so; others are held to the sizes that they name."""
    if not matrix.complete:
        found.warn("complete", "all rows of the sweep; --resume goes on with it", False)
        return
    sizes = (matrix.arguments or {}).get("client_chunk_sizes")
    missing = _missing(sizes, matrix.results) if isinstance(sizes, list) else []
    if missing:
        found.fail("results", f"a row for each of arguments.client_chunk_sizes, {sizes}", f"none for {missing}")
    if unconfirmed:
        expected = f"a row for each of summary.confirm_chunk_sizes, {matrix.summary.confirm_chunk_sizes}"
        # The earlier system's matrices do not say whether they are complete.
        tell = found.fail if "complete" in found.document else found.warn
        tell("confirm_results", expected, f"none for {unconfirmed}")
