from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.kinds.samples import check, reported, warned


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"summary__total_configs_tested": 10}, "summary.total_configs_tested: expected 3 (the rows), got 10"),
        ({"summary__successful_configs": 3}, "summary.successful_configs: expected 2 (the rows that worked), got 3"),
        ({"summary__best_throughput": 80.0}, "summary.best_throughput: expected 79.5 (the highest of the rows"),
        ({"summary__best_chunk_size": 32}, "summary.best_chunk_size: expected 64 (of the highest throughput), got 32"),
        ({"summary__best_chunk_size": 4}, "summary.best_chunk_size: expected 64 (of the highest throughput), got 4"),
        ({"results__0__chunk_size": 64}, "results[1].chunk_size: expected a size that no other row has, got 64"),
        ({"results__2__status": "ok"}, "results[2].status: expected ok only with a throughput and without an error"),
        ({"results__0__latency_p99_ms": 99.0}, "latency_p99_ms: expected at least latency_p50_ms, 100, got 99"),
        ({"results__0__throughput_items_per_sec": 0.0}, "throughput_items_per_sec: expected more than 0, got 0.0"),
        ({"server_config__model": 5}, "server_config.model: expected a valid string, got 5 (int)"),
    ],
)
def test_what_does_not_follow_is_told_with_its_field(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    assert any(error in each for each in reported(check(tmp_path, "ops-matrix", **changes)))


def test_a_sweep_in_which_nothing_worked_has_no_best(tmp_path: Path) -> None:
    failed = {"throughput_items_per_sec": None, "latency_p50_ms": None, "latency_p99_ms": None, "memory_peak_mb": None}
    rows = [{"chunk_size": 1, **failed, "status": "failed", "error": "out of memory"}]
    summary = {"best_chunk_size": None, "best_throughput": None, "total_configs_tested": 1, "successful_configs": 0}
    report = check(tmp_path, "ops-matrix", results=rows, summary=summary)
    assert reported(report) == []
    assert warned(report) == ["results[0].status: expected ok, got failed: out of memory"]
    named = check(tmp_path, "ops-matrix", results=rows, summary={**summary, "best_chunk_size": 1})
    assert reported(named) == ["summary.best_chunk_size: expected None (of the highest throughput), got 1"]


def test_rows_are_those_of_the_chunk_files_beside_them(tmp_path: Path) -> None:
    assert check(tmp_path, "ops-chunk").is_valid  # writes it
    assert check(tmp_path, "ops-matrix").is_valid
    check(tmp_path, "ops-chunk", throughput_items_per_sec=79.0)
    assert reported(check(tmp_path, "ops-matrix")) == [
        "results[1].throughput_items_per_sec: expected 79.0 (in chunk_64.json), got 79.5"
    ]
    (tmp_path / "chunk_64.json").write_text("{")  # an error of that file, not of this one
    assert check(tmp_path, "ops-matrix").is_valid


def test_a_chunk_file_is_of_the_size_in_its_name(tmp_path: Path) -> None:
    assert reported(check(tmp_path, "ops-chunk", chunk_size=32)) == [
        "chunk_size: expected 64 (by the file's name), got 32"
    ]


def test_metadata_name_a_model_and_every_size_once(tmp_path: Path) -> None:
    assert reported(check(tmp_path, "ops-run-metadata", chunk_sizes=[1, 2, 1])) == [
        "chunk_sizes: expected every size once, got [1, 2, 1]"
    ]
    nameless = check(tmp_path, "ops-run-metadata", model=None)
    assert reported(nameless) == ["model: expected the model that was served, got nothing"]
    assert check(tmp_path, "ops-run-metadata", model=None, server_config={"model": "m"}).is_valid


def test_unknown_hardware_is_odd(tmp_path: Path) -> None:
    assert any(each.startswith("hardware: ") for each in warned(check(tmp_path, "ops-matrix", hardware=" ")))
