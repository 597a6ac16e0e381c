from __future__ import annotations

from pathlib import Path

from prefixwise.bench.files import write_artifact
from prefixwise.bench.kinds.ab import AB_VERSION, AbResult, AbVariant, ScoreDifferences, SpeedRatio
from prefixwise.bench.kinds.comparison.inputs import ReportPaths, read_report_inputs
from prefixwise.bench.kinds.comparison.report import make_report
from prefixwise.bench.kinds.load import LOAD_VERSION, LoadGeometry, LoadResult, Spread
from prefixwise.bench.kinds.model_matrix import MODEL_MATRIX_VERSION, ModelMatrix, ModelRow
from prefixwise.bench.kinds.score_matrix import CorrectnessThresholds
from prefixwise.bench.render.markdown import report_markdown
from prefixwise.bench.run.load_stats import Call, summarise
from tests.bench.report_samples import write_comparison

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
    assert [section.title for section in report.sections][5:9] == [
        "Validation gates",
        "Variants: dense vs segment",
        "Variants: dense vs segment",
        "Under load: 120.0 requests/s",
    ]
    page = report_markdown(report)
    assert "3 rounds of 2 runs in turns; 300 query tokens, 10 items of 20 tokens, " in page
    assert "; model embedded. A time is the geometric mean" in page
    segment = next(line for line in page.splitlines() if line.startswith("| segment"))
    assert segment.endswith("| **DIFFER** |")
    assert "2.000x" in segment
    assert "- the scores of segment are not those of dense" in page
    assert "| answered | 1.00 requests/s: 4 in 4.0 s |" in page.splitlines()
    load_row = "| load | open, 120.0 requests/s | 1.00 | 10.0 | 100.0 | 100.0 | 100.0 | 1.00 | none |"
    assert load_row.replace("| load |", f"| {tmp_path.name} |") in page.splitlines()
    assert "- few answers" in page.splitlines()
    assert f"--ab-json {ab}" in page


def test_a_variant_with_other_scores_fails_the_report(tmp_path: Path) -> None:
    ab = tmp_path / "ab.json"
    write_artifact(ab, ab_result())
    report = make_report(read_report_inputs(ReportPaths(write_comparison(tmp_path), ab=(ab,))), "2026-02-11")
    assert report.passed is False
    assert "Variants FAILED: the scores of segment are not those of dense: expected max <= 0.02" in report.verdict
    assert report.cards[-1].value == "1 FAILED"
    page = report_markdown(report)
    assert "1 of 1 gates FAILED." in page
    assert "| scores of segment are those of dense | 0.5000 | \\<= 0.02 | **FAIL** |" in page.splitlines()


def test_a_variant_that_failed_fails_the_report(tmp_path: Path) -> None:
    good, bad = ab_variant("dense", 100.0, 1.0, 0.0), ab_variant("segment", 50.0, 2.0, 0.0)
    gone = {"status": "failed", "failure": "no answer", "scores_vs_first": None, "scores_agree": False}
    result = ab_result().model_copy(update={"variants": [good, bad.model_copy(update=gone)]})
    write_artifact(tmp_path / "ab.json", result)
    paths = ReportPaths(write_comparison(tmp_path), ab=(tmp_path / "ab.json",))
    report = make_report(read_report_inputs(paths), "2026-02-11")
    assert report.passed is False
    assert "Variants FAILED: segment failed: no answer." in report.verdict


def test_variants_of_two_backends_are_told_apart(tmp_path: Path) -> None:
    files = []
    for backend in ("jax", "torch"):
        variants = [
            ab_variant(name, 100.0, 1.0, 0.0).model_copy(update={"server_config": {"devices": {"backend": backend}}})
            for name in ("dense", "segment")
        ]
        files.append(tmp_path / f"{backend}.json")
        write_artifact(files[-1], ab_result().model_copy(update={"variants": variants}))
    paths = ReportPaths(write_comparison(tmp_path), ab=tuple(files))
    report = make_report(read_report_inputs(paths), "2026-02-11")
    assert [section.title for section in report.sections if section.title.startswith("Variants")] == [
        "Variants: dense vs segment (JAX)",
        "Variants: dense vs segment (PyTorch)",
    ]


def test_loads_stand_side_by_side(tmp_path: Path) -> None:
    failed = Call(intended=0.0, sent=0.0, done=0.1, failure="timeout")
    for name, mode, rate, concurrency in (("jax_open", "open", 120.0, None), ("pytorch_closed", "closed", None, 2)):
        measured = summarise([Call(0.0, 0.0, 0.2), failed], num_items=10, send_sec=1.0)
        how = {"mode": mode, "rate_qps": rate, "concurrency": concurrency, "measured": measured}
        write_artifact(tmp_path / f"{name}_load.json", load_result().model_copy(update=how))
    files = tuple(tmp_path / f"{name}_load.json" for name in ("jax_open", "pytorch_closed"))
    report = make_report(read_report_inputs(ReportPaths(write_comparison(tmp_path), load=files)), "2026-02-11")
    assert [section.title for section in report.sections].count("Under load") == 1
    lines = report_markdown(report).splitlines()
    assert any(line.startswith("| JAX | open, 120.0 requests/s |") for line in lines)
    closed = next(line for line in lines if line.startswith("| PyTorch | closed, 2 in flight |"))
    assert closed.endswith("| 200.0 | 200.0 | 200.0 | - | **timeout 1** |")


def test_models_have_their_table_and_one_that_fails_counts(tmp_path: Path) -> None:
    rows = [
        ModelRow(model="good", status="pass", reason=None, same_length_isolation_max=0.0, speedups={"32": 4.0}),
        ModelRow(model="lost", status="error", reason="no such file"),
    ]
    matrix = ModelMatrix(
        schema_version=MODEL_MATRIX_VERSION,
        generated_at_utc="2026-02-11T12:00:00Z",
        models=["good", "lost", "later"],
        rows=rows,
        all_pass=False,
    )
    write_artifact(tmp_path / "models.json", matrix)
    paths = ReportPaths(write_comparison(tmp_path), model_matrix=(tmp_path / "models.json",))
    report = make_report(read_report_inputs(paths), "2026-02-11")
    assert report.passed is False
    assert report.verdict.endswith("Models FAILED: lost, later.")
    page = report_markdown(report)
    assert "| good | 0.0000 | - | - | - | - | 4.00x | pass |" in page.splitlines()
    assert "| lost | - | - | - | - | - | - | **ERROR** |" in page.splitlines()
    assert "- lost: error: no such file\n- later: not run" in page
    assert f"--model-matrix-json {tmp_path / 'models.json'}" in page


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
