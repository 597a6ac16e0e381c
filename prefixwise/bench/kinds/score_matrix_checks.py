"""Checks of a score matrix: rows follow from their records, the summary from the rows; the workload fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefixwise.bench.files import sha256_of
from prefixwise.bench.kinds.findings import Findings, find_file, is_close, is_number, parse_json
from prefixwise.bench.kinds.score_matrix import (
    MatrixRow,
    Recommendation,
    RunRecord,
    ScoreMatrix,
    SelectedRow,
    WorkloadRef,
    WorkloadShape,
    confirm_sizes,
    make_row,
    select_winner,
)
from prefixwise.bench.kinds.workload import request_checksum
from prefixwise.bench.rules import MAX_ABS_DIFF, MEAN_ABS_DIFF

_MOST_PENALTY = 2.0


_COUNTS = ("num_chunks", "timed_runs", "successful_runs", "status", "failure_reason_counts")


_METRICS = ("success_rate", "p50_total_e2e_ms", "p95_total_e2e_ms", "mean_total_e2e_ms", "throughput_items_sec")


# Tools differ in what they do with the calls of a run that failed: these are looked at where none did.
_CALL_METRICS = ("mean_chunk_call_ms", "p95_chunk_call_ms", "first_run_penalty_ratio")


_WORKLOAD_FIELDS = ("model", "query_tokens", "num_items", "item_tokens", "label_token_ids")


def check_score_matrix(matrix: ScoreMatrix, found: Findings) -> None:
    """Check the rows of both phases, the summary and the workload."""
    usd_per_hour = _price(matrix, found)
    for part, rows in (("results", matrix.results), ("confirm_results", matrix.confirm_results)):
        sizes = [row.client_chunk_size for row in rows]
        for index, row in enumerate(rows):
            where = f"{part}[{index}]"
            if sizes.index(row.client_chunk_size) != index:
                found.fail(f"{where}.client_chunk_size", "a size that no other row has", row.client_chunk_size)
            _check_row(row, where, matrix.workload, usd_per_hour, found)
    check_summary(matrix, found)
    _check_workload_ref(matrix, found)
    _warn_of_gaps(matrix, found)


def _price(matrix: ScoreMatrix, found: Findings) -> float | None:
    """The price per hour; None where it is not given: then costs are not checked."""
    reported = matrix.hardware.get("usd_per_hour")
    if reported is None:
        return None
    if not is_number(reported) or reported < 0:
        found.fail("hardware.usd_per_hour", "a price, 0 or more", reported)
        return None
    return reported


def _check_row(row: MatrixRow, where: str, shape: WorkloadShape, usd_per_hour: float | None, found: Findings) -> None:
    _check_scores(row, where, shape, found)
    if len(row.run_records) != row.timed_runs:
        found.same(f"{where}.run_records length", row.timed_runs, len(row.run_records), "timed_runs")
        return  # nothing can be computed from half of them
    for index, record in enumerate(row.run_records):
        _check_record(record, f"{where}.run_records[{index}]", row.num_chunks, found)
    expected = make_row(row.client_chunk_size, shape.num_items, row.run_records, None, usd_per_hour)
    for name in _COUNTS:
        found.same(f"{where}.{name}", getattr(expected, name), getattr(row, name), "by its records")
    for name in (*_METRICS, *(_CALL_METRICS if row.status == "ok" else ())):
        found.close(f"{where}.{name}", getattr(expected, name), getattr(row, name), "by its records")
    if usd_per_hour is not None:
        found.close(f"{where}.usd_per_run", expected.usd_per_run, row.usd_per_run, "by hardware.usd_per_hour")
    if row.usd_per_run and row.items_per_usd is not None:
        found.close(f"{where}.items_per_usd", shape.num_items / row.usd_per_run, row.items_per_usd, "by usd_per_run")
    _warn_of_row(row, where, found)


def _check_scores(row: MatrixRow, where: str, shape: WorkloadShape, found: Findings) -> None:
    if row.reference_scores is None:
        if row.successful_runs:
            found.warn(f"{where}.reference_scores", "the scores, without which nothing can be compared", None)
        return
    found.same(f"{where}.reference_scores length", shape.num_items, len(row.reference_scores), "num_items")
    for index, scores in enumerate(row.reference_scores):
        if len(scores) != len(shape.label_token_ids):
            place = f"{where}.reference_scores[{index}] length"
            found.same(place, len(shape.label_token_ids), len(scores), "label_token_ids")
            return


def _check_record(record: RunRecord, where: str, num_chunks: int, found: Findings) -> None:
    if record.ok:
        if record.total_e2e_ms is None:
            found.fail(f"{where}.total_e2e_ms", "a time, as the run is ok", None)
        found.same(f"{where}.failure_reason", None, record.failure_reason, "the run is ok")
        found.same(f"{where}.call_latencies_ms length", num_chunks, len(record.call_latencies_ms), "num_chunks")
    elif record.failure_reason is None:
        found.fail(f"{where}.failure_reason", "a reason, as the run is not ok", None)


def _warn_of_row(row: MatrixRow, where: str, found: Findings) -> None:
    if row.timed_runs == 1:
        found.warn(f"{where}.timed_runs", "several runs, for a p95 with a meaning", 1)
    if row.status != "ok":
        found.warn(f"{where}.status", "ok", f"{row.status} {row.failure_reason_counts}")
    if row.first_run_penalty_ratio is not None and row.first_run_penalty_ratio > _MOST_PENALTY:
        expected = f"at most {_MOST_PENALTY:g}: the first run seems to have compiled or loaded something"
        found.warn(f"{where}.first_run_penalty_ratio", expected, f"{row.first_run_penalty_ratio:.3g}")


def _check_workload_ref(matrix: ScoreMatrix, found: Findings) -> None:
    """Check the workload file, at the recorded path or beside the matrix."""
    ref = matrix.workload_ref
    file = find_file(ref.path, found.path)
    if file is None:
        found.warn("workload_ref.path", "the workload, to check the rest of workload_ref", f"no file {ref.path}")
        return
    try:
        workload = parse_json(file.read_bytes())
        named = {request["request_id"]: request for request in workload["requests"]}
    except (ValueError, KeyError, TypeError, OSError):
        found.fail("workload_ref.path", "a workload", file)
        return
    if ref.request_id not in named:
        found.fail("workload_ref.request_id", f"one of {', '.join(named)} in {file}", ref.request_id)
        return
    _check_checksums(ref, file, request_checksum(named[ref.request_id]), found)
    for name in _WORKLOAD_FIELDS:
        found.same(f"workload.{name}", workload.get(name), getattr(matrix.workload, name), f"in {file}")


def _check_checksums(ref: WorkloadRef, file: Path, of_request: str, found: Findings) -> None:
    """The request's checksum decides: a regenerated file has another date and the same requests."""
    if ref.request_sha256 is not None:
        found.same("workload_ref.request_sha256", of_request, ref.request_sha256, f"of {ref.request_id} in {file}")
    of_file = sha256_of(file)
    if ref.sha256 not in (of_file, of_request):  # the earlier system may mean either
        add = found.warn if ref.request_sha256 == of_request else found.fail
        add("workload_ref.sha256", f"{of_file}, of {file}", ref.sha256)


def _warn_of_gaps(matrix: ScoreMatrix, found: Findings) -> None:
    found.warn_of_few_labels("workload.label_token_ids", matrix.workload.label_token_ids)
    if not matrix.hardware:
        found.warn("hardware", "what it ran on, without which metrics cannot be compared", "nothing")
    if not matrix.server_config:
        found.warn("server_config", "how the server was started", "nothing")


_QUOTED = ("throughput_items_sec", "p95_total_e2e_ms")


def check_summary(matrix: ScoreMatrix, found: Findings) -> None:
    """Check the recommendations, the confirmed sizes and the bounds."""
    summary = matrix.summary
    swept, confirmed = (_winner(rows, matrix) for rows in (matrix.results, matrix.confirm_results))
    missing = _missing(summary.confirm_chunk_sizes, matrix.confirm_results)
    _check_choice("sweep_recommendation", summary.sweep_recommendation, [swept], found)
    # While sizes are still to be confirmed, some tools name the best so far and some name none.
    so_far = [confirmed, None] if missing else [confirmed]
    _check_choice("confirm_recommendation", summary.confirm_recommendation, so_far, found)
    finals = _finals(matrix, swept, confirmed, is_ours="complete" in found.document)
    _check_choice("final_recommendation", summary.final_recommendation, finals, found)
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


def _finals(
    matrix: ScoreMatrix, swept: MatrixRow | None, confirmed: MatrixRow | None, *, is_ours: bool
) -> list[MatrixRow | None]:
    """The legal final recommendations. A finished confirm phase decides.

    Where it has no eligible row, there is none here, and in the earlier system it is the sweep's.
    """
    sizes = matrix.summary.confirm_chunk_sizes
    if not sizes and not matrix.confirm_results:
        return [swept]
    if _missing(sizes, matrix.confirm_results):
        return [swept] if confirmed is None else [swept, confirmed]
    return [confirmed] if is_ours or confirmed is not None else [None, swept]


def _check_choice(name: str, given: Recommendation, legal: Sequence[MatrixRow | None], found: Findings) -> None:
    """`legal`: the rows that it may quote; None among them: it may be empty."""
    where, choice = f"summary.{name}.selected", given.selected
    rows = [row for row in legal if row is not None]
    sizes = " or ".join(str(size) for size in dict.fromkeys(row.client_chunk_size for row in rows))
    if choice is None:
        if None not in legal:
            found.fail(where, f"chunk size {sizes}, by its rows", None)
        return
    own = [row for row in rows if row.client_chunk_size == choice.client_chunk_size]
    if not own:
        found.fail(f"{where}.client_chunk_size", f"{sizes or None} (by its rows)", choice.client_chunk_size)
        return
    row = next((row for row in own if _is_quote(choice, row)), own[0])
    for key in _given(choice):
        found.close(f"{where}.{key}", getattr(row, key), getattr(choice, key), "of its row")


def _given(choice: SelectedRow) -> list[str]:
    return [key for key in _QUOTED if key in choice.model_fields_set]


def _is_quote(choice: SelectedRow, row: MatrixRow) -> bool:
    return all(is_close(getattr(row, key), getattr(choice, key)) for key in _given(choice))


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
    """A complete sweep has a row for every size that it names."""
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
        add = found.fail if "complete" in found.document else found.warn
        add("confirm_results", expected, f"none for {unconfirmed}")
