"""`prefixwise validate models`: the whole validation for a list of models, as one table and one JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.bench.options import EvaluationShape, GateBounds
from prefixwise.cli.bench_common import ApiKey, OutputJson, OutputMarkdown, Timeout, last_line, print_server_info
from prefixwise.cli.failures import FAILED, MISUSED, CommandError
from prefixwise.cli.output import say, visible
from prefixwise.cli.progress import step_progress
from prefixwise.cli.validate.combine import INSTALL_HINT
from prefixwise.cli.validate.options import (
    DEFAULT_ITEM_COUNTS,
    Delimiter,
    ItemCounts,
    Labels,
    ServerFlag,
    read_labels,
    split_server_flags,
    with_gate_options,
    with_item_counts,
    with_shape_options,
)

if TYPE_CHECKING:
    from prefixwise.bench.kinds.model_matrix import ModelMatrix
    from prefixwise.bench.run.model_matrix import MatrixPlan


@with_gate_options
@with_shape_options
def validate_models(
    models: Annotated[
        str,
        typer.Option(
            metavar="MODEL,MODEL,...", help="Folders, .gguf files, hub ids, embedded; with commas between them."
        ),
    ],
    output_json: OutputJson,
    output_markdown: OutputMarkdown = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where each model's artifacts go; a folder beside --output-json."),
    ] = None,
    labels: Labels = None,
    delimiter: Delimiter = None,
    item_counts: ItemCounts = DEFAULT_ITEM_COUNTS,
    server_flag: ServerFlag = None,
    timeout_sec: Timeout = 180.0,
    api_key: ApiKey = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Keep the valid artifacts that are there already.")
    ] = False,
    *,
    shape: EvaluationShape,
    bounds: GateBounds,
) -> None:
    """Validate models, one after the other: a serial and a multi-item server each, evaluated, compared and judged."""
    names = _names(models)
    shape, asked = with_item_counts(shape, item_counts), read_labels(labels)
    from prefixwise.bench.run.model_matrix import MatrixPlan

    plan = MatrixPlan(
        output_dir=output_dir or output_json.with_suffix(""),
        shape=shape,
        bounds=bounds,
        labels=None if asked is None else tuple(asked),
        delimiter=delimiter,
        server_flags=split_server_flags(server_flag),
        timeout_sec=timeout_sec,
        api_key=api_key,
        resume=resume,
    )
    _check_reference()
    matrix = _run(names, plan, output_json, output_markdown)
    _report(matrix)
    last_line(
        {
            "output_json": str(output_json),
            "rows": [{"model": row.model, "status": row.status, "reason": row.reason} for row in matrix.rows],
            "all_pass": matrix.all_pass,
        }
    )
    if not matrix.all_pass:
        raise typer.Exit(FAILED)


def _names(models: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in models.split(",") if name.strip()))
    if not names:
        raise CommandError("--models must name at least one model, got none", status=MISUSED)
    return names


def _check_reference() -> None:
    """Fail on a missing package before the first server starts."""
    from prefixwise.bench.run.parity import ReferenceMissingError, import_transformers

    try:
        import_transformers()
    except ReferenceMissingError as error:
        raise CommandError(str(error), hint=INSTALL_HINT) from None


def _run(names: list[str], plan: MatrixPlan, output_json: Path, output_markdown: Path | None) -> ModelMatrix:
    """Written after every model, so that an interrupt loses no finished row."""
    from prefixwise.bench.files import now_utc, write_artifact, write_text
    from prefixwise.bench.kinds.model_matrix import MODEL_MATRIX_VERSION, ModelMatrix
    from prefixwise.bench.render.markdown import report_markdown
    from prefixwise.bench.run.model_matrix import STEPS_PER_MODEL, ModelRun, Watcher
    from prefixwise.bench.run.report import report_of

    matrix = ModelMatrix(
        schema_version=MODEL_MATRIX_VERSION, generated_at_utc=now_utc(), models=names, rows=[], all_pass=False
    )
    with step_progress(STEPS_PER_MODEL * len(names), "validate models") as step:
        watcher = Watcher(step, print_server_info, lambda note: say(f"note: {note}"))
        for name in names:
            matrix.rows.append(ModelRun(name, plan, watcher).row())
            matrix.all_pass = len(matrix.rows) == len(names) and all(row.status == "pass" for row in matrix.rows)
            write_artifact(output_json, matrix)
            if output_markdown is not None:
                write_text(output_markdown, report_markdown(report_of(matrix, output_markdown.name)))
    return matrix


def _report(matrix: ModelMatrix) -> None:
    from prefixwise.bench.kinds.model_matrix import models_table
    from prefixwise.bench.render.terminal import terminal_lines

    for line in terminal_lines(models_table(matrix)):
        say(line)
    for row in matrix.rows:
        if row.reason is not None:
            say(visible(f"{row.model}: {row.status}: {row.reason}"), style="red")
