from __future__ import annotations

from pathlib import Path

from itemwise.harness.artifacts import (
    AB_VERSION,
    LOAD_VERSION,
    AbResult,
    AbVariant,
    CorrectnessThresholds,
    LoadGeometry,
    LoadResult,
    ScoreDifferences,
    SpeedRatio,
    Spread,
)
from itemwise.harness.files import write_artifact
from itemwise.harness.load.stats import Call, summarise
from itemwise.harness.report.inputs import ReportPaths, read_report_inputs
from itemwise.harness.report.make import make_report
from itemwise.harness.report.markdown import report_markdown
from tests.harness.report_samples import write_comparison

GEOMETRY = LoadGeometry(
    query_tokens=300, num_items=10, item_tokens=20, label_token_ids=[3, 5], vocab_size=512, distinct_queries=0
)


def ab_variant(name: str, median_ms: float, speed: float, max_diff: float) -> AbVariant:
    return AbVariant(
        name=name,
        server_flags=[],
        request_fields={},
        server_config={},
        status="ok",
        failure=None,
        median_ms=median_ms,
        p95_ms=median_ms,
        items_per_sec=10_000 / median_ms,
        speed_vs_first=SpeedRatio(ratio=speed, low=speed - 0.1, high=speed + 0.1, confidence=0.95, num_rounds=3),
        scores_vs_first=ScoreDifferences(max_abs_diff=max_diff, mean_abs_diff=max_diff, num_compared=20),
        scores_agree=max_diff <= 0.01,
        runs=[],
    )


def ab_result() -> AbResult:
    return AbResult(
        schema_version=AB_VERSION,
        generated_at_utc="2026-02-11T12:00:00Z",
        model=None,
        compare="mask",
        geometry=GEOMETRY,
        cached=False,
        rounds=3,
        runs_per_round=2,
        warmup_runs=1,
        seed=0,
        correctness_thresholds=CorrectnessThresholds(max_abs_diff=0.02, mean_abs_diff=0.01),
        variants=[ab_variant("dense", 100.0, 1.0, 0.0), ab_variant("segment", 50.0, 2.0, 0.5)],
        notes=["a note"],
    )


def load_result() -> LoadResult:
    calls = [Call(intended=index, sent=index, done=index + 0.1) for index in range(4)]
    overhead = Spread(p50_ms=1.0, p95_ms=1.0, p99_ms=1.0, max_ms=1.0, mean_ms=1.0)
    return LoadResult(
        schema_version=LOAD_VERSION,
        generated_at_utc="2026-02-11T12:00:00Z",
        url="http://127.0.0.1:30000",
        server_config={},
        geometry=GEOMETRY,
        mode="open",
        rate_qps=120.0,
        concurrency=None,
        seed=0,
        timeout_sec=1.0,
        max_in_flight=8,
        client_overhead=overhead,
        warmup=None,
        measured=summarise(calls, num_items=10, send_sec=4.0, bound_ms=200.0),
        rate_search=[],
        notes=["few answers"],
    )


def test_variants_and_load_have_a_section_each(tmp_path: Path) -> None:
    ab, load = tmp_path / "ab.json", tmp_path / "load.json"
    write_artifact(ab, ab_result())
    write_artifact(load, load_result())
    inputs = read_report_inputs(ReportPaths(write_comparison(tmp_path), ab=(ab, ab), load=(load,)))
    report = make_report(inputs, "2026-02-11")
    assert [section.title for section in report.sections][5:8] == [
        "Variants: dense vs segment",
        "Variants: dense vs segment",
        "Under load: 120.0 requests/s",
    ]
    page = report_markdown(report)
    assert "3 rounds of 2 runs in turns; 300 query tokens, 10 items of 20 tokens; model embedded." in page
    segment = next(line for line in page.splitlines() if line.startswith("| segment"))
    assert segment.endswith("| **DIFFER** |")
    assert "2.000x" in segment
    assert "- the scores of segment are not those of dense" in page
    assert "| answered | 1.00 requests/s: 4 in 4.0 s |" in page.splitlines()
    assert "- few answers" in page.splitlines()
    assert f"--ab-json {ab}" in page


def test_without_them_there_are_no_sections(tmp_path: Path) -> None:
    report = make_report(read_report_inputs(ReportPaths(write_comparison(tmp_path))), "2026-02-11")
    assert [section.title for section in report.sections] == [
        "Same client, side by side",
        "Each at its best",
        "Where JAX is better and worse, and by how much",
        "Do the scores agree?",
        "Stability",
        "Notes",
        "Set-up",
        "Run it again",
    ]
