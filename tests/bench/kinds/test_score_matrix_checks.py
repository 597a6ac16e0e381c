from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixwise.bench.files import sha256_of
from tests.bench.kinds.samples import GONE, WORKLOAD_NAME, check, reported, score_matrix, warned


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"results__0__num_chunks": 3}, "results[0].num_chunks: expected 2 (by its records), got 3"),
        ({"results__0__timed_runs": 5}, "results[0].run_records length: expected 5 (timed_runs), got 3"),
        ({"results__0__successful_runs": 2}, "results[0].successful_runs: expected 3 (by its records), got 2"),
        ({"results__1__success_rate": 1.0}, "results[1].success_rate: expected 0.5 (by its records), got 1"),
        ({"results__1__status": "ok"}, "results[1].status: expected partial_failure (by its records), got ok"),
        ({"results__0__status": "failed"}, "results[0].status: expected ok (by its records), got failed"),
        ({"results__0__p50_total_e2e_ms": 120.0}, "p50_total_e2e_ms: expected 110 (by its records), got 120"),
        ({"results__0__p95_total_e2e_ms": 150.0}, "p95_total_e2e_ms: expected 146 (by its records), got 150"),
        ({"results__0__mean_total_e2e_ms": 110.0}, "mean_total_e2e_ms: expected 120 (by its records), got 110"),
        ({"results__0__p95_total_e2e_ms": None}, "p95_total_e2e_ms: expected 146.0 (by its records), got None"),
        ({"results__0__mean_chunk_call_ms": 61.0}, "mean_chunk_call_ms: expected 60 (by its records), got 61"),
        ({"results__0__p95_chunk_call_ms": 81.0}, "p95_chunk_call_ms: expected 80 (by its records), got 81"),
        # 2 items / 120 ms, the mean; by the median it would be 2 / 110 ms
        ({"results__0__throughput_items_sec": 2 / 0.110}, "expected 16.66666667 (by its records), got 18.18181818"),
        ({"results__0__first_run_penalty_ratio": 1.0}, "expected 0.7692307692 (by its records), got 1"),
        ({"results__1__failure_reason_counts": {}}, "expected {'timeout': 1} (by its records), got {}"),
        ({"results__0__items_per_usd": 5.0}, "results[0].items_per_usd: expected 4 (by usd_per_run), got 5"),
        ({"results__0__reference_scores": [[0.5, 0.5]]}, "reference_scores length: expected 2 (num_items), got 1"),
        (
            {"results__0__reference_scores": [[0.5, 0.5], [1.0]]},
            "results[0].reference_scores[1] length: expected 2 (label_token_ids), got 1",
        ),
        (
            {"results__0__run_records__1__call_latencies_ms": [110.0]},
            "results[0].run_records[1].call_latencies_ms length: expected 2 (num_chunks), got 1",
        ),
        (
            {"results__0__run_records__1__total_e2e_ms": None},
            "results[0].run_records[1].total_e2e_ms: expected a time, as the run is ok, got None",
        ),
        (
            {"results__0__run_records__1__failure_reason": "oom"},
            "results[0].run_records[1].failure_reason: expected None (the run is ok), got oom",
        ),
        (
            {"results__1__run_records__1__failure_reason": None},
            "results[1].run_records[1].failure_reason: expected a reason, as the run is not ok, got None",
        ),
        (
            {"results__1__client_chunk_size": 1},
            "results[1].client_chunk_size: expected a size that no other row has, got 1",
        ),
        (
            {"confirm_results__0__p95_total_e2e_ms": 1.0},
            "confirm_results[0].p95_total_e2e_ms: expected 146 (by its records), got 1",
        ),
        (
            {"summary__sweep_recommendation__selected__client_chunk_size": 2},
            "summary.sweep_recommendation.selected.client_chunk_size: expected 1 (by its rows), got 2",
        ),
        (
            {"summary__confirm_recommendation__selected__client_chunk_size": 64},
            "summary.confirm_recommendation.selected.client_chunk_size: expected 1 (by its rows), got 64",
        ),
        (
            {"summary__sweep_recommendation__selected__throughput_items_sec": 99.0},
            "summary.sweep_recommendation.selected.throughput_items_sec: expected 16.66666667 (of its row), got 99",
        ),
        (
            {"summary__final_recommendation__selected__client_chunk_size": 64},
            "summary.final_recommendation.selected.client_chunk_size: expected 1 (by its rows), got 64",
        ),
        (
            {"summary__confirm_chunk_sizes": [2, 4]},
            "summary.confirm_chunk_sizes: expected the sizes of confirm_results, 1 among them, got [2, 4]",
        ),
        ({"workload__num_items": 3}, "workload.num_items: expected 2 (in "),
        ({"workload__label_token_ids": [2]}, "workload.label_token_ids: expected [2, 3] (in "),
        ({"workload_ref__sha256": "0" * 64}, "workload_ref.sha256: expected "),
        (
            {"workload_ref__request_id": "another"},
            "workload_ref.request_id: expected one of canonical_score_request_000 in ",
        ),
    ],
)
def test_what_does_not_follow_is_told_with_its_field(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    assert any(error in each for each in reported(check(tmp_path, "score-matrix", **changes)))


def test_one_wrong_figure_is_one_error(tmp_path: Path) -> None:
    report = check(tmp_path, "score-matrix", results__0__p50_total_e2e_ms=110.001)
    assert reported(report) == ["results[0].p50_total_e2e_ms: expected 110 (by its records), got 110.001"]


def test_the_last_digits_of_a_figure_may_differ(tmp_path: Path) -> None:
    assert check(tmp_path, "score-matrix", results__0__p50_total_e2e_ms=110.00005).is_valid  # 4.5e-7 of it


def test_the_workload_is_known_by_its_bytes_or_by_its_request(tmp_path: Path) -> None:
    (tmp_path / WORKLOAD_NAME).write_text("{}")
    check(tmp_path, "workload")  # writes it
    of_bytes = sha256_of(tmp_path / WORKLOAD_NAME)
    assert check(tmp_path, "score-matrix", workload_ref__sha256=of_bytes).is_valid
    of_request = score_matrix()["workload_ref"]["sha256"]
    made_again = {"workload_ref__sha256": "0" * 64, "workload_ref__request_sha256": of_request}
    assert check(tmp_path, "score-matrix", **made_again).is_valid


def test_a_workload_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]")
    report = check(tmp_path, "score-matrix", workload_ref__path="other.json")
    assert reported(report) == [f"workload_ref.path: expected a workload, got {tmp_path / 'other.json'}"]


def test_a_workload_that_is_elsewhere_is_only_odd(tmp_path: Path) -> None:
    report = check(tmp_path, "score-matrix", workload_ref__path="absent.json", workload_ref__sha256="0")
    assert report.is_valid
    assert any("workload_ref.path: expected the workload" in each for each in warned(report))


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"hardware": {}}, "hardware: expected what it ran on, without which metrics cannot be compared, got nothing"),
        ({"server_config": {}}, "server_config: expected how the server was started, got nothing"),
        ({"complete": False}, "complete: expected all rows of the sweep; --resume goes on with it, got False"),
        ({"results__0__reference_scores": None}, "results[0].reference_scores: expected the scores"),
        ({"summary__confirm_chunk_sizes": [1, 2]}, "summary.confirm_chunk_sizes: expected [1]: 1, the winner and its"),
    ],
)
def test_what_is_odd_is_a_warning(tmp_path: Path, changes: dict[str, object], warning: str) -> None:
    report = check(tmp_path, "score-matrix", **changes)
    assert report.is_valid
    assert any(warning in each for each in warned(report))


def test_a_row_that_failed_is_a_warning_and_no_error(tmp_path: Path) -> None:
    report = check(tmp_path, "score-matrix")
    assert report.is_valid
    assert warned(report) == ["results[1].status: expected ok, got partial_failure {'timeout': 1}"]


def test_a_slow_first_run_and_a_single_run_are_odd(tmp_path: Path) -> None:
    """Runs of 300, 100 and 100 ms: three times the others; then the first alone."""
    row = score_matrix()["results"][0]
    for record, total in zip(row["run_records"], (300.0, 100.0, 100.0), strict=True):
        record["total_e2e_ms"] = total
    row |= {"p50_total_e2e_ms": 100.0, "p95_total_e2e_ms": 280.0, "mean_total_e2e_ms": 500 / 3}
    row |= {"throughput_items_sec": 12.0, "first_run_penalty_ratio": 3.0}
    slow = check(
        tmp_path, "score-matrix", results=[row], summary__sweep_recommendation__selected={"client_chunk_size": 1}
    )
    assert slow.is_valid, reported(slow)
    assert any("results[0].first_run_penalty_ratio: expected at most 2: the first" in each for each in warned(slow))
    row |= {"p50_total_e2e_ms": 300.0, "p95_total_e2e_ms": 300.0, "mean_total_e2e_ms": 300.0}
    row |= {"throughput_items_sec": 2 / 0.3, "first_run_penalty_ratio": None, "timed_runs": 1, "successful_runs": 1}
    row |= {"run_records": row["run_records"][:1], "mean_chunk_call_ms": 50.0, "p95_chunk_call_ms": 50.0}
    single = check(
        tmp_path, "score-matrix", results=[row], summary__sweep_recommendation__selected={"client_chunk_size": 1}
    )
    assert single.is_valid, reported(single)
    assert "results[0].timed_runs: expected several runs, for a p95 with a meaning, got 1" in warned(single)


def test_types_are_told_with_what_came(tmp_path: Path) -> None:
    report = check(tmp_path, "score-matrix", results__0__status="fine", backend=GONE, results__1__timed_runs="2")
    assert reported(report) == [
        "backend: expected the field, got nothing",
        "results[0].status: expected 'ok', 'partial_failure' or 'failed', got \"fine\" (str)",
        'results[1].timed_runs: expected a valid integer, got "2" (str)',
    ]


def test_a_file_without_records_is_no_crash(tmp_path: Path) -> None:
    report = check(tmp_path, "score-matrix", results__0__run_records=[], results__0__reference_scores=[])
    assert len(reported(report)) == 2
    assert json.loads((tmp_path / "jax_portable_matrix.json").read_text())["results"][0]["run_records"] == []
