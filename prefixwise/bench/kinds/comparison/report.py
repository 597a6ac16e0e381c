"""The report of a comparison: its sections in order, the set-up, and the commands that measure it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixwise.bench.kinds.base import BACKEND_NAMES, VIEW_NAMES, date_of
from prefixwise.bench.kinds.comparison.charts import (
    item_chart,
    latency_charts,
    p95_chart,
    size_chart,
    throughput_chart,
)
from prefixwise.bench.kinds.comparison.inputs import ReportInputs, ReportPaths, read_report_inputs
from prefixwise.bench.kinds.comparison.model import Comparison
from prefixwise.bench.kinds.comparison.tables import (
    better_and_worse,
    cards,
    correctness_gates,
    native_table,
    portable_table,
    stability,
    statements,
    unsteady,
)
from prefixwise.bench.kinds.comparison.verdict import agreement, thresholds
from prefixwise.bench.kinds.extras import extra_sections, gate_failures, gates_card
from prefixwise.bench.kinds.score_matrix import MatrixSummary, ScoreMatrix
from prefixwise.bench.kinds.workload import Workload
from prefixwise.bench.render.document import (
    NONE,
    Block,
    Cell,
    Chart,
    Charts,
    Code,
    Paragraph,
    Report,
    Section,
    bullets,
    table,
)
from prefixwise.bench.rules import DEFAULT_BOUNDS
from prefixwise.bench.run.comparison import MatrixFile
from prefixwise.bench.server_facts import MATRIX_FLAGS, OWN_NAMES, lasting_config

TITLE = "JAX vs PyTorch: multi-item scoring"


def make_report(inputs: ReportInputs, title_date: str) -> Report:
    """The whole report; sections appear only for given inputs."""
    comparison = inputs.comparison
    notes = (*comparison.notes, *inputs.notes)
    sections = (
        Section(
            "Same client, side by side",
            (*_charts(throughput_chart(comparison), p95_chart(comparison)), *portable_table(comparison)),
        ),
        Section("Each at its best", (*_charts(*latency_charts(inputs)), *native_table(comparison))),
        Section(
            "Where JAX is better and worse, and by how much",
            (*better_and_worse(comparison), *_recommendations(comparison)),
        ),
        Section(
            "Do the scores agree?",
            (*_charts(item_chart(inputs), size_chart(comparison)), *correctness_gates(comparison)),
        ),
        Section("Stability", stability(inputs)),
        *extra_sections(inputs),
        *((Section("Notes", bullets(notes)),) if notes else ()),
        Section("Set-up", setup(inputs)),
        Section("Run it again", commands(inputs, title_date)),
    )
    return Report(
        title=TITLE,
        date=title_date,
        passed=_passed(inputs),
        statements=_statements(inputs),
        cards=(*cards(inputs), *gates_card(inputs)),
        sections=sections,
    )


def _recommendations(comparison: Comparison) -> tuple[Block, ...]:
    found = comparison.recommendations.items()
    return bullets([f"Recommendation, {view.replace('_', ' ')}: {text}" for view, text in found])


def _passed(inputs: ReportInputs) -> bool | None:
    """None: nothing failed, but the scores were not compared."""
    state = agreement(inputs.comparison)
    if state == "differ" or gate_failures(inputs):
        return False
    return True if state == "agree" else None


def _statements(inputs: ReportInputs) -> tuple[str, ...]:
    found = (*statements(inputs), *gate_failures(inputs), unsteady(inputs.distinct_matrices()))
    return tuple(filter(None, found))


def _charts(*found: Chart | None) -> tuple[Block, ...]:
    there = tuple(each for each in found if each is not None)
    return (Charts(there),) if there else ()


_LONGEST = 120  # letters of one value; the artifact has all of it


_DECLARED_FLAGS = dict(zip(OWN_NAMES, MATRIX_FLAGS, strict=True))


def setup(inputs: ReportInputs) -> tuple[Block, ...]:
    """Tables of the workload, hardware and servers, with a column per matrix."""
    files = inputs.distinct_matrices()
    if not files:
        unknown = "None of the matrices could be read: the workload, the hardware and the servers are not known here."
        return (Paragraph(unknown), *_inputs_table(inputs.comparison))
    names = [f"{BACKEND_NAMES[each.matrix.backend]} {VIEW_NAMES[each.matrix.evaluation_view]}" for each in files]
    hardware = [dict(flatten(each.matrix.hardware)) for each in files]
    config = [dict(flatten(lasting_config(each.matrix.server_config))) for each in files]
    return (
        *_workload_table(files[0].matrix),
        *table("Hardware and versions", ("fact", *names), _fact_rows(hardware), numeric=False),
        *table("Server configuration", ("setting", *names), _fact_rows(config), numeric=False),
        *_notes_table(files, names),
        *_inputs_table(inputs.comparison),
    )


def _inputs_table(comparison: Comparison) -> tuple[Block, ...]:
    """The compared files; the earlier system's comparisons have no checksums."""
    rows = [
        (name, Cell(file.path, "code"), NONE if file.sha256 is None else Cell(file.sha256, "code"))
        for name, file in comparison.input_files().items()
    ]
    return table("Compared matrices", ("matrix", "file", "sha256"), rows, numeric=False)


def _workload_table(matrix: ScoreMatrix) -> tuple[Block, ...]:
    shape, ref = matrix.workload, matrix.workload_ref
    rows: list[tuple[str, Cell | str]] = [
        ("model", Cell(shape.model, "code")),
        ("query", f"{shape.query_tokens:,} tokens"),
        ("items", f"{shape.num_items:,} of {shape.item_tokens:,} tokens each"),
        ("label tokens", ", ".join(map(str, shape.label_token_ids))),
        ("request", Cell(ref.request_id, "code")),
        ("sha256 of the request", Cell(ref.request_sha256 or NONE, "code")),
        ("sha256 of the file", Cell(ref.sha256, "code")),
    ]
    return table("Workload", ("fact", "value"), rows, numeric=False)


def flatten(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Flatten nested facts by path: `versions.jax`."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{before}{key}.")
        elif value is not None:
            is_size = key.endswith("bytes") and isinstance(value, int)
            yield f"{before}{key}", f"{value / 2**20:,.0f} MiB" if is_size else _shown(value)


def _shown(value: Any) -> str:
    phrase = value if isinstance(value, str) else json.dumps(value)
    return phrase if len(phrase) <= _LONGEST else phrase[: _LONGEST - 3] + "..."


def _fact_rows(columns: Sequence[Mapping[str, str]]) -> list[list[Cell | str]]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return [[key, *(Cell(column[key], "code") if key in column else NONE for column in columns)] for key in keys]


def _notes_table(files: Sequence[MatrixFile], names: Sequence[str]) -> tuple[Block, ...]:
    rows = [[name, note] for file, name in zip(files, names, strict=True) for note in file.matrix.notes]
    return table("Notes of the matrices", ("matrix", "note"), rows, numeric=False)


def commands(inputs: ReportInputs, title_date: str) -> tuple[Block, ...]:
    """The commands, in the order of their execution."""
    files = inputs.distinct_matrices()
    lines = [
        *([_workload_command(files[0], inputs.workload)] if files else []),
        *map(_matrix_command, files),
        _compare_command(inputs),
        _report_command(inputs, title_date),
    ]
    return (
        Paragraph("Start each server with the configuration above, then run:"),
        Code("\n\n".join(lines)),
    )


def command(verb: str, options: Sequence[tuple[str, Any]]) -> str:
    """One option on a line, quoted for a shell; options without a value are left out."""
    given = [f"--{name} {shlex.quote(str(value))}" for name, value in options if value is not None]
    return " \\\n  ".join([f"prefixwise bench {verb}", *given])


def _workload_command(file: MatrixFile, workload: Workload | None) -> str:
    shape = file.matrix.workload
    options = [
        ("model", shape.model),
        ("query-tokens", shape.query_tokens),
        ("num-items", shape.num_items),
        ("item-tokens", shape.item_tokens),
        ("label-token-ids", _commas(shape.label_token_ids)),
    ]
    if workload is not None:
        options += [
            ("delimiter-token-id", workload.delimiter_token_id),
            ("num-requests", len(workload.requests) if len(workload.requests) > 1 else None),
            ("seed", workload.seed),
        ]
    return command("workload", [*options, ("output", file.matrix.workload_ref.path)])


def _matrix_command(file: MatrixFile) -> str:
    matrix = file.matrix
    given = matrix.arguments or {}
    sizes = given.get("client_chunk_sizes") or [row.client_chunk_size for row in matrix.results]
    measured = ("warmup_runs", "timed_runs", "timed_runs_confirm", "timeout_sec", "hardware", "usd_per_hour")
    declared = given.get("declared") or matrix.server_config.get("declared") or {}
    return command(
        "matrix",
        [
            ("url", matrix.server_config.get("base_url") or "http://127.0.0.1:30000"),
            ("workload-json", matrix.workload_ref.path),
            ("backend-name", matrix.backend),
            ("evaluation-view", matrix.evaluation_view),
            ("client-chunk-sizes", _commas(sizes)),
            *((name.replace("_", "-"), given.get(name)) for name in measured),
            *((flag.removeprefix("--"), declared.get(name)) for name, flag in _DECLARED_FLAGS.items()),
            *_bounds_given(matrix.summary),
            ("request-id", matrix.workload_ref.request_id),
            ("output-json", file.path),
        ],
    )


def _bounds_given(summary: MatrixSummary) -> list[tuple[str, float | None]]:
    """The bounds that are not the defaults."""
    largest, mean = summary.correctness_thresholds.max_abs_diff, summary.correctness_thresholds.mean_abs_diff
    bounds = {
        "guardrail-ratio": (summary.guardrail_ratio, DEFAULT_BOUNDS.guardrail_ratio),
        "correctness-threshold-max-abs": (largest, DEFAULT_BOUNDS.max_abs_diff),
        "correctness-threshold-mean-abs": (mean, DEFAULT_BOUNDS.mean_abs_diff),
    }
    return [(name, None if given == usual else given) for name, (given, usual) in bounds.items()]


def _compare_command(inputs: ReportInputs) -> str:
    comparison = inputs.comparison
    files = [(f"{name.replace('_', '-')}-json", file.path) for name, file in inputs.matrices.items()]
    largest, mean = thresholds(comparison)
    bounds = [
        ("correctness-threshold-max-abs", largest),
        ("correctness-threshold-mean-abs", mean),
        ("guardrail-ratio", comparison.portable_view.guardrail_ratio),
    ]
    return command("compare", [*files, *bounds, ("output-json", inputs.paths.comparison)])


def _report_command(inputs: ReportInputs, title_date: str) -> str:
    paths = inputs.paths
    given = {
        "multi-vs-serial-json": paths.multi_vs_serial,
        "parity-json": paths.parity,
        "gate-json": paths.gate,
        "ab-json": paths.ab,
        "load-json": paths.load,
        "model-matrix-json": paths.model_matrix,
        "quantization-json": paths.quantization,
    }
    repeated = [(option, path) for option, files in given.items() for path in files]
    outputs = [("title-date", title_date), ("output-report", paths.output_report), ("output-html", paths.output_html)]
    return command("report", [("comparison-json", paths.comparison), *repeated, *outputs])


def _commas(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def comparison_report(comparison: Comparison, name: str) -> Report:
    """Without the files that it names: the sender may not be allowed to read them."""
    note = "only the comparison itself is shown: its matrices were not looked for"
    paths = ReportPaths(Path(name))
    inputs = ReportInputs(paths=paths, comparison=comparison, matrices={}, notes=[note])
    return make_report(inputs, date_of(comparison))


def comparison_report_of(path: Path) -> Report:
    """With the matrices that the comparison names. Raises ArtifactError."""
    inputs = read_report_inputs(ReportPaths(path))
    return make_report(inputs, date_of(inputs.comparison))
