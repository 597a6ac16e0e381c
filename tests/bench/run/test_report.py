"""The report viewer's folder: what it lists, what it shows, and what it leaves alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.files import read_artifact, write_artifact
from prefixwise.bench.kinds.gate_report import GateReport
from prefixwise.bench.kinds.model_matrix import MODEL_MATRIX_VERSION, ModelMatrix, ModelRow
from prefixwise.bench.kinds.ops import (
    OPS_MATRIX_VERSION,
    OpsMatrix,
    OpsRow,
    OpsRunMetadata,
    OpsServerConfig,
    OpsSummary,
)
from prefixwise.bench.kinds.self_check import SELF_CHECK_VERSION, SelfCheck, SelfCheckStep
from prefixwise.bench.run.report import SAMPLE_FOLDER, ReportFolder, report_of
from prefixwise.contract.errors import ArtifactError
from tests.bench.evaluations import MULTI_SCORES, evaluation, took
from tests.bench.kinds.samples import SAMPLES, edited
from tests.bench.kinds.test_extras import ab_result, load_result
from tests.bench.report_samples import multi_vs_serial, parity, write_comparison

DATE = "2026-02-11T12:00:00Z"
BENCHMARK = {
    "date": "2026-11-15",
    "command": "python -m benchmarks.contract",
    "rows": [{"name": "cold", "items/s": 1234.5, "met": True, "parts": {"queue": 1}, "geometry": [2000, 500, 20]}],
}


def ops_row(size: int, speed: float | None, error: str | None = None) -> OpsRow:
    return OpsRow(
        chunk_size=size,
        throughput_items_per_sec=speed,
        latency_p50_ms=None if speed is None else 1000 / speed,
        latency_p99_ms=None,
        memory_peak_mb=None,
        status="ok" if error is None else "failed",
        error=error,
    )


def ops_matrix(*rows: OpsRow, best: OpsRow | None) -> OpsMatrix:
    speed = None if best is None else best.throughput_items_per_sec
    return OpsMatrix(
        schema_version=OPS_MATRIX_VERSION,
        backend="jax",
        hardware="a TPU",
        server_config=OpsServerConfig(
            model="a-model", multi_item_mask_impl="segment", multi_item_segment_fallback_threshold=32
        ),
        workload_ref="workload.json",
        results=list(rows),
        summary=OpsSummary(
            best_chunk_size=None if best is None else best.chunk_size,
            best_throughput=speed,
            total_configs_tested=len(rows),
            successful_configs=sum(row.status == "ok" for row in rows),
        ),
    )


def self_check(*statuses: int, complete: bool = True) -> SelfCheck:
    return SelfCheck(
        schema_version=SELF_CHECK_VERSION,
        generated_at_utc=DATE,
        model="a-model",
        backends=["torch"],
        steps=[
            SelfCheckStep(title=f"step {number}", command="prefixwise bench", status=status, seconds=1.5, detail=None)
            for number, status in enumerate(statuses)
        ],
        all_pass=all(status in (0, 3) for status in statuses),
        complete=complete,
    )


def models() -> ModelMatrix:
    rows = [ModelRow(model="lost", status="error", reason="no such file")]
    return ModelMatrix(
        schema_version=MODEL_MATRIX_VERSION, generated_at_utc=DATE, models=["lost"], rows=rows, all_pass=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reports")
    run = root / "run-1"
    run.mkdir()
    write_comparison(run)
    write_artifact(root / "evaluation.json", evaluation("multi", MULTI_SCORES, {"1": took(0.5), "10": took(2.0)}))
    write_artifact(root / "multi_vs_serial.json", multi_vs_serial())
    write_artifact(root / "parity.json", parity())
    write_artifact(root / "gate.json", GateReport(checks={}, all_pass=True))
    write_artifact(root / "ab.json", ab_result())
    write_artifact(root / "load.json", load_result())
    write_artifact(root / "models.json", models())
    write_artifact(root / "self_check.json", self_check(0, 3))
    sweep = root / "dense-matrix"
    sweep.mkdir()
    best = ops_row(64, 200.0)
    write_artifact(sweep / "matrix_results.json", ops_matrix(best, ops_row(128, None, "no memory"), best=best))
    write_artifact(sweep / "chunk_64.json", best)
    write_artifact(sweep / "run_metadata.json", OpsRunMetadata(spec={"chunk_sizes": [64]}, timestamp_start=DATE))
    (root / "benchmark.json").write_text(json.dumps(BENCHMARK))
    (root / "other.json").write_text('{"something": "else"}')
    (root / "broken.json").write_text("{")
    return root


def test_it_lists_artifacts_by_kind_and_nothing_else(folder: Path) -> None:
    found = {each["name"]: each["kind"] for each in ReportFolder(folder).artifacts() if each["note"] is None}
    assert found == {
        "ab.json": "variants",
        "benchmark.json": "benchmark",
        "dense-matrix/matrix_results.json": "ops matrix",
        "evaluation.json": "evaluation",
        "gate.json": "gates",
        "load.json": "load",
        "models.json": "models",
        "multi_vs_serial.json": "multi vs serial",
        "parity.json": "parity",
        "run-1/comparison.json": "comparison",
        "run-1/jax_matrix.json": "matrix",
        "run-1/pytorch_matrix.json": "matrix",
        "self_check.json": "self-check",
    }


def test_what_has_no_report_of_its_own_says_what_it_is_for(folder: Path) -> None:
    viewer = ReportFolder(folder)
    parts = {str(each["name"]): each["kind"] for each in viewer.artifacts() if each["note"] is not None}
    assert parts == {
        "dense-matrix/chunk_64.json": "ops row",
        "dense-matrix/run_metadata.json": "ops run",
        "run-1/jax_matrix.workload.json": "workload",
        "run-1/pytorch_matrix.workload.json": "workload",
    }
    for name in parts:
        with pytest.raises(ArtifactError, match="has no report of its own"):
            viewer.page(name)


def test_without_a_folder_it_has_a_sample_with_the_plots_of_a_whole_run() -> None:
    viewer = ReportFolder(None)
    first, *others = viewer.artifacts()
    assert first["name"] == "comparison.json", "the page opens with it"
    report = viewer.page("comparison.json")
    assert report.count("<svg") >= 6
    assert "was not found" not in report
    assert "has changed since" not in report
    assert [each["kind"] for each in others] == ["matrix"] * 4 + ["self-check", "workload"]
    verdict = read_artifact(SAMPLE_FOLDER / "self_check.json", SelfCheck)
    assert verdict.complete
    assert verdict.all_pass
    assert sum(path.stat().st_size for path in SAMPLE_FOLDER.iterdir()) < 250_000


def test_all_that_it_lists_can_be_shown(folder: Path) -> None:
    viewer = ReportFolder(folder)
    names = [str(each["name"]) for each in viewer.artifacts() if each["note"] is None]
    pages = {name: viewer.page(name) for name in names}
    assert all(page.startswith("<!DOCTYPE html>") and "<script" not in page for page in pages.values())
    plotted = ("run-1/comparison.json", "run-1/jax_matrix.json", "evaluation.json", "dense-matrix/matrix_results.json")
    for name in plotted:
        assert "<svg" in pages[name], f"{name} has no plot"


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("ab.json", ["dense", "segment", "a note"]),
        ("load.json", ["Under load", "few answers"]),
        ("models.json", ["Models FAILED: lost", "no such file"]),
        ("dense-matrix/matrix_results.json", ["The fastest is 64, with 200.0 items/s.", "failed: no memory", "a TPU"]),
        (
            "self_check.json",
            ["Not run, for lack of something: step 1.", "Every step that was run is done.", "1,500 ms"],
        ),
        ("benchmark.json", ["cold", "1,234", "yes", "2000, 500, 20", "python -m benchmarks.contract"]),
    ],
)
def test_a_report_says_what_is_in_its_file(folder: Path, name: str, phrase: list[str]) -> None:
    page = ReportFolder(folder).page(name)
    assert [each for each in phrase if each not in page] == []


@pytest.mark.parametrize(
    ("statuses", "complete", "passed"),
    [((0,), True, True), ((0, 1), True, False), ((0, 3), True, None), ((0,), False, None)],
)
def test_a_self_check_passes_where_every_step_is_done(
    statuses: tuple[int, ...], complete: bool, passed: bool | None
) -> None:
    assert report_of(self_check(*statuses, complete=complete), "x").passed is passed


def test_a_sweep_in_which_nothing_answered_has_no_figure() -> None:
    report = report_of(ops_matrix(ops_row(64, None, "no memory"), best=None), "x")
    assert (report.passed, report.cards) == (None, ())
    assert "None of them answered." in report.verdict


@pytest.mark.parametrize("name", ["other.json", "broken.json", "../x.json", "/etc/passwd", "run-1", ""])
def test_nothing_else_can(folder: Path, name: str) -> None:
    with pytest.raises(ArtifactError):
        ReportFolder(folder).page(name)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link.json").symlink_to(folder / "evaluation.json")
    assert ReportFolder(inside).artifacts() == []


@pytest.mark.parametrize("name", ["run-1/comparison.json", "run-1/jax_matrix.json", "evaluation.json", "parity.json"])
def test_what_is_sent_is_shown_and_no_file_is_read_for_it(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    assert ReportFolder(None).page_of(content, "sent.json").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"checks": 1, "all_pass": 2}', b"[" * 100_000])
def test_what_is_no_artifact_is_said_so(content: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"sent\.json"):
        ReportFolder(None).page_of(content, "sent.json")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("score-matrix", {"results__1__p95_total_e2e_ms": 1e308}),
        ("comparison", {"portable_view__rows__0__correctness__max_abs_diff": 1e308}),
        ("comparison", {"portable_view__guardrail_ratio": 1e308}),
        ("ab", {"variants": []}),
    ],
)
def test_values_that_no_report_can_show_are_errors_of_the_artifact(kind: str, changes: dict[str, object]) -> None:
    content = json.dumps(edited(SAMPLES[kind][1](), **changes)).encode()
    with pytest.raises(ArtifactError, match=r"sent\.json"):
        ReportFolder(None).page_of(content, "sent.json")


@pytest.mark.parametrize("rows", [1.5, True, "x", {"a": 1}, [1, None, []]])
def test_a_benchmark_without_rows_is_shown(rows: object) -> None:
    content = json.dumps({**BENCHMARK, "rows": rows, "notes": rows}).encode()
    assert "The 0 rows of sent.json" in ReportFolder(None).page_of(content, "sent.json")


def _places(value: Any, place: tuple[str, ...] = ()) -> Iterator[str]:
    if place:
        yield "__".join(place)
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        yield from _places(entry, (*place, str(name)))


def test_whatever_a_field_holds_there_is_a_report_or_an_error_of_the_artifact() -> None:
    """One field of a valid artifact has another value: 600 of 30,000 changes, always the same."""
    values: tuple[object, ...] = (
        None,
        True,
        -1,
        10**400,
        1e308,
        1e-320,
        "",
        "\ud800",
        [],
        {},
        [None],
        [{}],
        {"a": None},
        2**63,
    )
    chosen = random.Random(24)
    documents = {**{kind: make() for kind, (_, make) in SAMPLES.items()}, "benchmark": BENCHMARK}
    places = {kind: list(_places(document)) for kind, document in documents.items()}
    viewer = ReportFolder(None)
    for _ in range(600):
        kind = chosen.choice(list(documents))
        change = {chosen.choice(places[kind]): chosen.choice(values)}
        try:
            viewer.page_of(json.dumps(edited(documents[kind], **change)).encode(), f"{kind}.json")
        except ArtifactError:
            pass
        except Exception as error:
            pytest.fail(f"{kind} with {change}: {error!r}")
