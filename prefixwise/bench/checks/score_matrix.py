"""What must hold in a score matrix: rows follow from their records, the summary from the rows; the workload fits."""

from __future__ import annotations

from pathlib import Path

from prefixwise.bench.artifacts import MatrixRow, RunRecord, ScoreMatrix, WorkloadRef, WorkloadShape
from prefixwise.bench.checks.findings import Findings
from prefixwise.bench.checks.matrix_summary import check_summary
from prefixwise.bench.checks.reading import find_file, is_number, parse_json
from prefixwise.bench.files import sha256_of
from prefixwise.bench.matrix.rows import make_row
from prefixwise.bench.workload import request_checksum

_MOST_PENALTY = 2.0
_COUNTS = ("num_chunks", "timed_runs", "successful_runs", "status", "failure_reason_counts")
_FIGURES = ("success_rate", "p50_total_e2e_ms", "p95_total_e2e_ms", "mean_total_e2e_ms", "throughput_items_sec")
# Tools differ in what they do with the calls of a run that failed: these are looked at where none did.
_CALL_FIGURES = ("mean_chunk_call_ms", "p95_chunk_call_ms", "first_run_penalty_ratio")
_WORKLOAD_FIELDS = ("model", "query_tokens", "num_items", "item_tokens", "label_token_ids")


def check_score_matrix(matrix: ScoreMatrix, found: Findings) -> None:
    """Rows of both phases, the summary, the workload."""
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
    """None where it is not told; then costs are not judged."""
    told = matrix.hardware.get("usd_per_hour")
    if told is None:
        return None
    if not is_number(told) or told < 0:
        found.fail("hardware.usd_per_hour", "a price, 0 or more", told)
        return None
    return told


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
    for name in (*_FIGURES, *(_CALL_FIGURES if row.status == "ok" else ())):
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
    """The file is looked for where the matrix says, and beside the matrix."""
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
    """The request decides: made again by the same arguments, a file has another date and the same requests."""
    if ref.request_sha256 is not None:
        found.same("workload_ref.request_sha256", of_request, ref.request_sha256, f"of {ref.request_id} in {file}")
    of_file = sha256_of(file)
    if ref.sha256 not in (of_file, of_request):  # the earlier system may mean either
        tell = found.warn if ref.request_sha256 == of_request else found.fail
        tell("workload_ref.sha256", f"{of_file}, of {file}", ref.sha256)


def _warn_of_gaps(matrix: ScoreMatrix, found: Findings) -> None:
    found.warn_of_few_labels("workload.label_token_ids", matrix.workload.label_token_ids)
    if not matrix.hardware:
        found.warn("hardware", "what it ran on, without which figures cannot be compared", "nothing")
    if not matrix.server_config:
        found.warn("server_config", "how the server was started", "nothing")
