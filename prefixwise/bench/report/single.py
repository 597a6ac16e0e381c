"""The report of one artifact: a matrix, an evaluation, gates, variants, load, models; or of a comparison alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefixwise.bench.artifacts import (
    AbResult,
    Artifact,
    Comparison,
    EndpointEvaluation,
    GateReport,
    LoadResult,
    MatrixRow,
    ModelMatrix,
    MultiVsSerial,
    OpsMatrix,
    Parity,
    ScoreMatrix,
    SelfCheck,
)
from prefixwise.bench.report.comparison import P95
from prefixwise.bench.report.document import NONE, Block, Bullets, Card, Figure, Figures, Report, Section, table
from prefixwise.bench.report.extras import extra_sections
from prefixwise.bench.report.figures import matrix_points, p95_of, throughput_of
from prefixwise.bench.report.gates import gate_failures
from prefixwise.bench.report.inputs import BACKEND_NAMES, VIEW_NAMES, ExtraInputs, ReportInputs, ReportPaths
from prefixwise.bench.report.line_figure import line_figure
from prefixwise.bench.report.make import make_report
from prefixwise.bench.report.named import Named
from prefixwise.bench.report.numbers import difference, figure, milliseconds, ratio
from prefixwise.bench.report.ops_runs import ops_matrix_report, self_check_report
from prefixwise.bench.report.races import THROUGHPUT

_ROW_HEADER = ("chunk size", "chunks", "runs ok", "items/s", "p50 (ms)", "p95 (ms)", "a call (ms)", "first run")


def report_of(artifact: Artifact, name: str) -> Report:
    """`name`: of its file."""
    match artifact:
        case ScoreMatrix():
            return _matrix_report(artifact)
        case EndpointEvaluation():
            return _evaluation_report(artifact)
        case Comparison():
            return _comparison_report(artifact, name)
        case OpsMatrix():
            return ops_matrix_report(artifact)
        case SelfCheck():
            return self_check_report(artifact)
        case _:
            return _extras_report(artifact, name)


def date_of(artifact: Artifact) -> str:
    """The day on which it was made, where it says so."""
    return str(getattr(artifact, "generated_at_utc", None) or NONE)[:10]


def _comparison_report(comparison: Comparison, name: str) -> Report:
    """Without the files that it names: whoever sends it need not be allowed to read them."""
    note = "only the comparison itself is shown: its matrices were not looked for"
    paths = ReportPaths(Path(name))
    inputs = ReportInputs(paths=paths, comparison=comparison, matrices={}, notes=[note])
    return make_report(inputs, date_of(comparison))


def _matrix_report(matrix: ScoreMatrix) -> Report:
    shape, backend = matrix.workload, matrix.backend
    points = {metric: {backend: matrix_points(matrix.results, metric)} for metric in (THROUGHPUT, P95)}
    best = [point.value for point in points[P95][backend] if point.value is not None and point.complete]
    guardrail = matrix.summary.guardrail_ratio
    rails = {backend: guardrail * min(best) if best else None}
    figures = Figures((throughput_of(points[THROUGHPUT]), p95_of(points[P95], rails, guardrail)))
    facts = [(key, str(value)) for key, value in {**matrix.hardware, **matrix.server_config}.items()]
    sections = [
        Section("Sweep", (figures, *_rows("Every chunk size", matrix.results))),
        *([Section("Confirmed", _rows("Measured again", matrix.confirm_results))] if matrix.confirm_results else []),
        *([Section("Notes", (Bullets(tuple(matrix.notes)),))] if matrix.notes else []),
        Section("Server", table("As it was started", ("setting", "value"), facts, numeric=False)),
    ]
    title = f"Score matrix: {BACKEND_NAMES[backend]}, {VIEW_NAMES[matrix.evaluation_view]} view"
    words = (
        f"{shape.num_items:,} items of {shape.item_tokens:,} tokens after {shape.query_tokens:,} query tokens, "
        f"model {shape.model}."
    )
    unfinished = () if matrix.complete else ("The sweep is not finished.",)
    passed = None if matrix.summary.final_recommendation is None else True
    statements = (words, *unfinished, _recommendation(matrix))
    return Report(title, date_of(matrix), passed, statements, _cards(matrix), tuple(sections))


def _recommendation(matrix: ScoreMatrix) -> str:
    row = matrix.summary.final_recommendation
    if row is None:
        return "No chunk size can be recommended."
    return f"Chunks of {row['client_chunk_size']} are recommended."


def _cards(matrix: ScoreMatrix) -> tuple[Card, ...]:
    row = matrix.summary.final_recommendation
    if row is None:
        return ()
    chunk = f"in chunks of {row['client_chunk_size']}"
    return (
        Card("Throughput", f"{figure(row[THROUGHPUT])} items/s", chunk),
        Card("p95 latency", milliseconds(row[P95]), chunk),
    )


def _rows(caption: str, rows: Sequence[MatrixRow]) -> tuple[Block, ...]:
    return table(caption, _ROW_HEADER, [_row(row) for row in rows])


def _row(row: MatrixRow) -> tuple[str, ...]:
    times = (row.p50_total_e2e_ms, row.p95_total_e2e_ms, row.mean_chunk_call_ms)
    return (
        str(row.client_chunk_size),
        str(row.num_chunks),
        f"{row.successful_runs}/{row.timed_runs}",
        figure(row.throughput_items_sec),
        *map(figure, times),
        ratio(row.first_run_penalty_ratio),
    )


def _evaluation_report(evaluation: EndpointEvaluation) -> Report:
    found, counts = evaluation.isolation, evaluation.performance
    mutations = {"same length": found.same_length_mutation, "another length": found.changed_length_mutation}
    moved = max(each.max_abs_diff_unchanged for each in mutations.values())
    isolation = table(
        "One item changed: how far the others moved",
        ("replaced by an item of", "largest", "mean"),
        [
            (name, difference(each.max_abs_diff_unchanged), difference(each.mean_abs_diff_unchanged))
            for name, each in mutations.items()
        ],
    )
    speed = table(
        "By the number of items",
        ("items", "p50 (ms)", "p95 (ms)", "items/s (p50)"),
        [
            (count, figure(1000 * each.p50_sec), figure(1000 * each.p95_sec), figure(each.items_per_sec_p50))
            for count, each in counts.items()
        ],
    )
    failures = tuple(f"{count} items: {why}" for count, why in evaluation.failures.items())
    plots: tuple[Block, ...] = (Figures((_speed_figure(evaluation),)),) if counts else ()
    sections = (
        Section("Speed", (*plots, *speed, *((Bullets(failures),) if failures else ()))),
        Section("Isolation", isolation),
    )
    return Report(
        title=f"Evaluation of a {evaluation.mode} endpoint",
        date=date_of(evaluation),
        passed=None,
        statements=(
            f"Model {evaluation.model} at {evaluation.url}.",
            f"Changing one item moved the others by at most {difference(moved)}.",
        ),
        cards=(Card("Largest move of an unchanged item", difference(moved), "of a score"),),
        sections=sections,
    )


def _speed_figure(evaluation: EndpointEvaluation) -> Figure:
    return line_figure(
        "speed",
        "Throughput by number of items",
        {int(count): each.items_per_sec_p50 for count, each in evaluation.performance.items()},
        across="items in a request",
        up="items per second (p50)",
        unit="items/s",
        caption="Higher is better.",
    )


def _extras_report(artifact: Artifact, name: str) -> Report:
    title, inputs = _as_extra(artifact, Path(name).stem)
    failures = tuple(gate_failures(inputs))
    statements = failures or (f"{title}: nothing in it failed.",)
    return Report(title, date_of(artifact), not failures, statements, (), extra_sections(inputs))


def _as_extra(artifact: Artifact, name: str) -> tuple[str, ExtraInputs]:
    match artifact:
        case MultiVsSerial():
            return "Multi-item against one by one", ExtraInputs(multi_vs_serial=[Named(name, artifact)])
        case Parity():
            return "Parity with transformers", ExtraInputs(parity=[Named(name, artifact)])
        case GateReport():
            return "Validation gates", ExtraInputs(gate=[Named(name, artifact)])
        case AbResult():
            return "Variants", ExtraInputs(ab=[Named(name, artifact)])
        case LoadResult():
            return "Under load", ExtraInputs(load=[Named(name, artifact)])
        case ModelMatrix():
            return "Models", ExtraInputs(model_matrix=[Named(name, artifact)])
        case _:
            raise AssertionError(f"no report is made of {type(artifact).__name__}")
