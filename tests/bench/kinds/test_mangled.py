"""Good artifacts with one thing changed that nobody would change by chance: each is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.run.check import check_file
from tests.bench.kinds.samples import GONE, Document, check, edited, gate_report, reported, score_matrix, warned
from tests.bench.report_samples import write_comparison

Changes = dict[str, object]
FIRST = "portable_view__rows__0"


def quoted_of(path: Path, size: int, backend: str) -> Document:
    rows = json.loads(path.read_text())["portable_view"]["rows"]
    quote: Document = next(row[backend] for row in rows if row["client_chunk_size"] == size)
    return quote


def mangled(path: Path, **changes: object) -> list[str]:
    path.write_text(json.dumps(edited(json.loads(path.read_text()), **changes)))
    return reported(check_file(path))


def test_a_comparison_as_we_make_it_is_valid_and_was_compared_again(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    report = check_file(path)
    assert reported(report) == []
    assert not any("inputs" in each for each in warned(report))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"portable_view__winner__winner__backend": "pytorch", "portable_view__winner__ratio": 9.0},
            "portable_view.winner.winner.backend: expected jax (by the rows), got pytorch",
        ),
        ({"portable_view__winner__ratio": 10**400}, "portable_view.winner.ratio: expected a "),
        ({"portable_view__winner__ratio": 9.0}, "portable_view.winner.ratio: expected 2 (by the rows), got 9"),
        ({"best_native_view__winner__ratio": 9.0}, "best_native_view.winner.ratio: expected 2 (by the rows), got 9"),
        (
            {"best_native_view__winner__winner__backend": "pytorch"},
            "best_native_view.winner.winner.backend: expected jax (by the row",
        ),
        (
            {f"{FIRST}__deltas__throughput_items_sec": 1e9},
            "portable_view.rows[0].deltas.throughput_items_sec: expected 20 (by the rows), got 1000000000",
        ),
        ({"portable_view__winner__deltas__p95_total_e2e_ms": 1e9}, "portable_view.winner.deltas.p95_total_e2e_ms: exp"),
        ({"portable_view__winner__deltas": "many"}, "portable_view.winner.deltas: expected an object"),
        ({"portable_view__rows__1__deltas": {}}, "portable_view.rows[1].deltas: expected metrics where both backends"),
        (
            {"portable_view__backend_best__jax__winner__throughput_items_sec": 1e9},
            "portable_view.backend_best.jax.winner.throughput_items_sec: expected 40 (of its row), got 1000000000",
        ),
        (
            {"portable_view__backend_best__jax__winner": None},
            "portable_view.backend_best.jax.winner.client_chunk_size: expected 1 (by the rows), got None",
        ),
        (
            {
                f"{FIRST}__correctness__max_abs_diff": 0.5,
                f"{FIRST}__correctness__pass": False,
                "correctness__pass": True,
            },
            "correctness.pass: expected false, as it is at portable_view.rows[0], got True",
        ),
        ({"portable_view__guardrail_ratio": 0.1}, "portable_view.guardrail_ratio: expected greater than or equal to 1"),
        (
            {"portable_view__backend_best__jax__winner__client_chunk_size": [1]},
            "portable_view.backend_best.jax.winner.client_chunk_si",
        ),
        ({"correctness__thresholds__max_abs_diff": True}, "correctness.thresholds: expected numbers for max_abs_diff"),
        ({"correctness__thresholds__max_abs_diff": -1}, "correctness.thresholds: expected numbers for max_abs_diff"),
    ],
)
def test_a_comparison_is_made_again_from_its_rows(tmp_path: Path, changes: Changes, error: str) -> None:
    assert any(error in each for each in reported(check(tmp_path, "comparison", **changes)))


def test_the_best_of_a_backend_is_the_winner_of_its_rows(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    worse = {"portable_view__backend_best__pytorch__winner": {**quoted_of(path, 1, "pytorch"), "backend": "pytorch"}}
    assert mangled(path, **worse) == [
        "portable_view.backend_best.pytorch.winner.client_chunk_size: expected 2 (by the rows), got 1"
    ]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"portable_view__rows__0": GONE},
            "portable_view.rows: expected the chunk sizes of the inputs, [1, 2, 6], got",
        ),
        ({"correctness__pass": None}, "correctness.pass: expected "),
        ({"correctness__rows_compared": 7}, "correctness.rows_compared: expected 2 (by the inputs), got 7"),
        (
            {f"{FIRST}__jax__mean_total_e2e_ms": 1.0},
            "portable_view.rows[0].jax.mean_total_e2e_ms: expected 120 (in the inputs), got 1",
        ),
        ({f"{FIRST}__jax": None}, "portable_view.rows[0].jax: expected a row, as in the inputs, got None"),
        (
            {f"{FIRST}__correctness__max_abs_diff": 0.0019},
            "portable_view.rows[0].correctness.max_abs_diff: expected 0.001 (by the scores of the inputs), got 0.0019",
        ),
        ({"inputs_sha256__jax_portable_json": "0" * 64}, "inputs_sha256.jax_portable_json: expected "),
        ({"inputs_sha256__pytorch_best_native_json": "0" * 64}, "inputs_sha256.pytorch_best_native_json: expected "),
        ({"best_native_view__pytorch_selected__client_chunk_size": 6}, "best_native_view.pytorch_selected.client_chu"),
    ],
)
def test_a_comparison_is_held_to_its_inputs(tmp_path: Path, changes: Changes, error: str) -> None:
    assert any(each.startswith(error) for each in mangled(write_comparison(tmp_path), **changes))


def test_a_verdict_that_was_turned_is_told(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    was = json.loads(path.read_text())["correctness"]["pass"]
    assert f"correctness.pass: expected {was} (by the inputs), got {not was}" in mangled(
        path, correctness__pass=not was
    )


def test_inputs_that_are_gone_are_odd(tmp_path: Path) -> None:
    path = write_comparison(tmp_path)
    (tmp_path / "jax_matrix.json").unlink()
    report = check_file(path)
    assert report.is_valid
    assert any(each.startswith("inputs.jax_portable_json: expected the matrix") for each in warned(report))


def test_inputs_that_moved_along_with_the_comparison_are_found(tmp_path: Path) -> None:
    write_comparison(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    report = check_file(tmp_path / "after" / "comparison.json")
    assert reported(report) == []
    assert not any("inputs" in each for each in warned(report))


def two_rows() -> Changes:
    """A complete sweep over chunk sizes 1 and 2, of our own making; the second size failed once."""
    arguments = {"client_chunk_sizes": [1, 2], "timed_runs_confirm": 3}
    return {"arguments": arguments, "complete": True}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"results__1": GONE},
            "results: expected a row for each of arguments.client_chunk_sizes, [1, 2], got none for",
        ),
        (
            {"confirm_results": [], "summary__confirm_recommendation": None},
            "confirm_results: expected a row for each of summary.confirm_chunk_sizes, [1], got none for [1]",
        ),
        (
            {"confirm_results": [], "summary__confirm_recommendation": None, "summary__confirm_chunk_sizes": []},
            "summary.confirm_chunk_sizes: expected [1]: 1, the winner and its neighbours, as the arguments ask",
        ),
        (
            {"summary__final_recommendation__selected": None},
            "summary.final_recommendation.selected: expected chunk size 1, by its rows",
        ),
        (
            {"summary__final_recommendation__selected__throughput_items_sec": 1e9},
            "summary.final_recommendation.selected.throughput_items_sec: expected 16.66666667 (of its row), got 1",
        ),
        (
            {"summary__sweep_recommendation__selected__throughput_items_sec": "fast"},
            "summary.sweep_recommendation.selected.throughput_items_sec: expected a valid number",
        ),
        (
            {"summary__sweep_recommendation__selected": None},
            "summary.sweep_recommendation.selected: expected chunk size 1, by its rows",
        ),
        (
            {"summary__confirm_recommendation__selected": None},
            "summary.confirm_recommendation.selected: expected chunk size 1, by its row",
        ),
        (
            {"summary__sweep_recommendation__selected": GONE},
            "summary.sweep_recommendation.selected: expected the field, got nothing",
        ),
        (
            {"summary__sweep_recommendation__selected__client_chunk_size": [1]},
            "summary.sweep_recommendation.selected.client_chunk_size: e",
        ),
        ({"summary__guardrail_ratio": 0}, "summary.guardrail_ratio: expected greater than or equal to 1"),
        ({"summary__correctness_thresholds__max_abs_diff": -1.0}, "summary.correctness_thresholds.max_abs_diff: expec"),
        ({"workload_ref__sha256": "0" * 64}, "workload_ref.sha256: expected "),
        ({"workload_ref__request_sha256": "0" * 64}, "workload_ref.request_sha256: expected "),
        (
            {"hardware__usd_per_hour": 3.0},
            "results[0].usd_per_run: expected 0.0001 (by hardware.usd_per_hour), got 0.5",
        ),
        ({"hardware__usd_per_hour": "cheap"}, "hardware.usd_per_hour: expected a price, 0 or more, got cheap"),
        (
            {"results__0__run_records__0__total_e2e_ms": -1.0},
            "results[0].run_records[0].total_e2e_ms: expected greater",
        ),
        ({"workload__num_items": 0}, "workload.num_items: expected greater than or equal to 1"),
    ],
)
def test_a_score_matrix_is_held_to_its_rows(tmp_path: Path, changes: Changes, error: str) -> None:
    assert reported(check(tmp_path, "score-matrix", **two_rows())) == []
    assert any(each.startswith(error) for each in reported(check(tmp_path, "score-matrix", **two_rows(), **changes)))


def test_a_request_that_is_right_excuses_a_workload_that_was_made_again(tmp_path: Path) -> None:
    right = score_matrix()["workload_ref"]["sha256"]
    ref = {"workload_ref__sha256": "0" * 64, "workload_ref__request_sha256": right}
    report = check(tmp_path, "score-matrix", **ref)
    assert report.is_valid
    assert any(each.startswith("workload_ref.sha256: expected ") for each in warned(report))


def test_bounds_that_are_not_the_usual_ones_are_odd(tmp_path: Path) -> None:
    report = check(tmp_path, "score-matrix", summary__correctness_thresholds__max_abs_diff=1e9)
    assert report.is_valid
    expected = "summary.correctness_thresholds.max_abs_diff: expected 0.02, the usual bound, got 1000000000.0"
    assert expected in warned(report)


def test_while_sizes_are_still_to_be_confirmed_the_sweep_decides(tmp_path: Path) -> None:
    begun: Changes = {"confirm_results": [], "summary__confirm_recommendation": None}
    unfinished = check(tmp_path, "score-matrix", **begun, complete=False)
    assert reported(unfinished) == []
    others = check(tmp_path, "score-matrix", **begun)  # they do not say whether they are complete
    assert others.is_valid
    assert any(each.startswith("confirm_results: expected a row for each of") for each in warned(others))


def test_nothing_is_recommended_where_the_confirm_phase_failed(tmp_path: Path) -> None:
    failed = {**score_matrix()["results"][1], "client_chunk_size": 1, "num_chunks": 2}
    failed["run_records"][0]["call_latencies_ms"] = [25.0, 25.0]
    changes = {"confirm_results": [failed], "summary__confirm_recommendation": None}
    assert reported(check(tmp_path, "score-matrix", **changes, summary__final_recommendation=None)) == []
    claimed = reported(check(tmp_path, "score-matrix", **changes, complete=True))
    assert claimed == ["summary.final_recommendation.selected.client_chunk_size: expected None (by its rows), got 1"]
    # The earlier system, whose files do not say whether they are complete, goes by the sweep then.
    assert reported(check(tmp_path, "score-matrix", **changes)) == []


@pytest.mark.parametrize(
    ("kind", "changes", "error"),
    [
        ("endpoint-evaluation", {"isolation__base_scores__1": [0.5]}, "isolation.base_scores[1] length: expected 2"),
        ("endpoint-evaluation", {"isolation__item_ids": [[4]]}, "isolation.item_ids: expected at least two items"),
        ("endpoint-evaluation", {"labels": []}, "labels: expected at least one id, got none"),
        (
            "endpoint-evaluation",
            {"isolation__same_length_mutation__unchanged_item_abs_diffs": [0.125]},
            "isolation.same_length_mutation.unchanged_item_abs_diffs: expected a difference for each unchanged item, 2",
        ),
        (
            "multi-vs-serial",
            {"isolation__same_length_mutation_max_abs_diff": -0.5},
            "isolation.same_length_mutation_max_abs_diff: expected 0 or more, as it is a difference, got -0.5",
        ),
        ("multi-vs-serial", {"performance__32__serial_p50_sec": -2.0}, "performance.32.serial_p50_sec: expected more"),
        ("gate-report", {"checks": {}}, "checks.speedup_n32_ge_3x: expected the gate: a metric that is missing fails"),
        ("gate-report", {"checks__speedup_n32_ge_3x": GONE}, "checks.speedup_n32_ge_3x: expected the gate"),
        ("gate-report", {"checks__speedup_n32_ge_3x": GONE}, "all_pass: expected False (by its checks), got True"),
        (
            "gate-report",
            {"checks__speedup_n32_ge_3x__comparison": "<="},
            "checks.speedup_n32_ge_3x.comparison: expecte",
        ),
        ("model-matrix", {"rows__0__gate": {"checks": {}, "all_pass": True}}, "rows[0].gate.checks.speedup_n32_ge_3x:"),
        ("quantization", {"metrics__rank_correlation": 0.9}, "metrics.rank_correlation: expected 0.5 (by the scores)"),
        ("quantization", {"checks__max_abs_diff": GONE}, "checks.max_abs_diff: expected the gate, got nothing"),
        ("quantization", {"checks__max_abs_diff": GONE}, "all_pass: expected False (by its checks), got True"),
        ("quantization", {"checks__max_abs_diff__bound": 0.1}, "checks.max_abs_diff.pass: expected False"),
        ("quantization", {"checks__max_abs_diff__value": 0.1}, "checks.max_abs_diff.value: expected 0.25 (the metric)"),
        ("quantization", {"requests__0__scores": [[0.5]]}, "requests: expected scores of both models in one shape"),
    ],
)
def test_what_validation_found_is_held_to_its_rules(tmp_path: Path, kind: str, changes: Changes, error: str) -> None:
    assert any(each.startswith(error) for each in reported(check(tmp_path, kind, **changes)))


def test_gates_that_we_do_not_know_are_allowed(tmp_path: Path) -> None:
    more: Any = gate_report()["checks"]["speedup_n32_ge_3x"]
    assert check(tmp_path, "gate-report", checks__speedup_n64_ge_3x=more).is_valid


@pytest.mark.parametrize(
    ("kind", "field", "labels"),
    [
        ("workload", "label_token_ids", [2]),
        ("workload", "label_token_ids", [2, 2]),
        ("endpoint-evaluation", "labels", [3, 3]),
        ("multi-vs-serial", "labels", [2]),
    ],
)
def test_scores_of_one_label_mean_nothing(tmp_path: Path, kind: str, field: str, labels: list[int]) -> None:
    expected = f"{field}: expected at least two different ids, as every score of one label is 1.0, got {labels}"
    assert expected in warned(check(tmp_path, kind, **{field: labels}))


def test_a_workload_at_a_path_that_cannot_be_is_one_that_is_not_there(tmp_path: Path) -> None:
    report = check(tmp_path, "score-matrix", workload_ref__path="w" * 5000)
    assert report.is_valid
    assert any(each.startswith("workload_ref.path: expected the workload") for each in warned(report))
    assert check(tmp_path, "score-matrix", workload_ref__path="w\0w").is_valid
