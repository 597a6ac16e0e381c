"""`prefixwise bench matrix`: how fast a server scores one workload, in chunks of which size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefixwise.cli.bench_common import (
    ApiKey,
    OutputJson,
    OutputMarkdown,
    Timeout,
    integers,
    last_line,
    print_server_info,
)
from prefixwise.cli.failures import FAILED, MISUSED, CommandError, print_warning
from prefixwise.cli.flags import finite
from prefixwise.cli.output import say
from prefixwise.cli.progress import step_progress

if TYPE_CHECKING:
    from prefixwise.bench.kinds.score_matrix import ScoreMatrix
    from prefixwise.bench.run.matrix import MatrixSweep, SweepOptions

DEFAULT_URL = "http://127.0.0.1:30000"


@dataclass(frozen=True)
class Target:
    """The server and the request."""

    url: str
    api_key: str | None
    workload_json: Path
    request_id: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Output:
    """The output files."""

    json: Path
    markdown: Path | None
    resume: bool
    overwrite: bool

    def check(self) -> None:
        """Refuse to overwrite measured rows by repeating a command. Raises CommandError."""
        from prefixwise.bench.run.matrix import rows_in

        if self.resume and self.overwrite:
            raise CommandError("--resume and --overwrite do not go together: give one of them", status=MISUSED)
        held = None if self.resume or self.overwrite else rows_in(self.json)
        if held is not None:
            hint = "--resume goes on with it, --overwrite begins anew"
            raise CommandError(f"{self.json} is there already and holds {held}", hint=hint, status=MISUSED)

    def save(self, matrix: ScoreMatrix) -> None:
        """Both files, after every row."""
        from prefixwise.bench.files import write_artifact, write_text
        from prefixwise.bench.kinds.score_matrix import matrix_report
        from prefixwise.bench.render.markdown import report_markdown

        write_artifact(self.json, matrix)
        if self.markdown is not None:
            write_text(self.markdown, report_markdown(matrix_report(matrix)))


def matrix(
    workload_json: Annotated[Path, typer.Option(metavar="FILE", help="What `prefixwise bench workload` wrote.")],
    backend_name: Annotated[
        Literal["jax", "pytorch"], typer.Option(metavar="NAME", help="What the server runs on: jax or pytorch.")
    ],
    output_json: OutputJson,
    url: Annotated[str, typer.Option(metavar="URL", help="The server: any that speaks /v1/score.")] = DEFAULT_URL,
    evaluation_view: Annotated[
        Literal["portable", "best_native"],
        typer.Option(metavar="NAME", help="portable: the server as all have it; best_native: with its best settings."),
    ] = "portable",
    client_chunk_sizes: Annotated[
        str, typer.Option(metavar="N,N,...", help="Items in one call.")
    ] = "1,2,4,8,16,32,64,128,256,500",
    warmup_runs: Annotated[int, typer.Option(metavar="N", min=0, help="Before each chunk size, not counted.")] = 1,
    timed_runs: Annotated[int, typer.Option(metavar="N", min=1, help="Of each chunk size.")] = 5,
    timed_runs_confirm: Annotated[
        int, typer.Option(metavar="N", min=0, help="Of the best ones and their neighbours, again; 0: not again.")
    ] = 7,
    timeout_sec: Timeout = 180.0,
    server_config_note: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="For the notes; may be repeated.")
    ] = None,
    jax_server_chunk_size: Annotated[
        int | None, typer.Option(metavar="N", help="How the server was started, if it does not say so itself.")
    ] = None,
    jax_mask_impl: Annotated[str | None, typer.Option(metavar="NAME", help="Likewise.")] = None,
    jax_segment_fallback_threshold: Annotated[int | None, typer.Option(metavar="N", help="Likewise.")] = None,
    delimiter_token_id: Annotated[
        int | None,
        typer.Option(
            metavar="ID", min=0, help="Likewise, of either backend. A note says where the workload has another one."
        ),
    ] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help="What people call the machine.")] = None,
    usd_per_hour: Annotated[
        float | None,
        typer.Option(
            "--usd-per-hour", "--cost-per-hour", metavar="USD", min=0.0, callback=finite, help="What it costs."
        ),
    ] = None,
    guardrail_ratio: Annotated[
        float,
        typer.Option(
            metavar="X", min=1.0, callback=finite, help="How far above the best p95 a recommended chunk size's may be."
        ),
    ] = 1.25,
    correctness_threshold_max_abs: Annotated[
        float,
        typer.Option(
            metavar="X",
            min=0.0,
            callback=finite,
            help="For the artifact; a note says where the scores of two runs are further apart.",
        ),
    ] = 0.02,
    correctness_threshold_mean_abs: Annotated[
        float, typer.Option(metavar="X", min=0.0, callback=finite, help="Likewise, on average.")
    ] = 0.01,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Which request of the workload; the first when left out.")
    ] = None,
    output_markdown: OutputMarkdown = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            metavar="",
            help="Go on from the rows that the artifact has; those with a run that failed are measured again.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar="", help="Begin anew where the artifact has rows already.")
    ] = False,
    api_key: ApiKey = None,
) -> None:
    """Measure one workload against a server, in chunks of several sizes, and say which size is best.

    A chunk size that fails is recorded, and the sweep goes on with the next. The status is 1 where none worked
    or no server can be reached.
    """
    from prefixwise.bench.rules import Bounds
    from prefixwise.bench.run.matrix import SweepOptions

    options = SweepOptions(
        backend_name,
        evaluation_view,
        _chunk_sizes(client_chunk_sizes),
        warmup_runs,
        timed_runs,
        timed_runs_confirm,
        timeout_sec,
        hardware,
        usd_per_hour,
        _declared(
            backend_name,
            (jax_server_chunk_size, jax_mask_impl, jax_segment_fallback_threshold, delimiter_token_id),
        ),
        Bounds(correctness_threshold_max_abs, correctness_threshold_mean_abs, guardrail_ratio),
    )
    _measure(
        options,
        Target(url, api_key, workload_json, request_id, tuple(server_config_note or ())),
        Output(output_json, output_markdown, resume, overwrite),
    )


def _declared(backend: str, values: tuple[int | str | None, ...]) -> dict[str, Any]:
    """By the names of the server's flags."""
    from prefixwise.bench.server_facts import MATRIX_FLAGS, OWN_NAMES

    for flag, value in zip(MATRIX_FLAGS, values, strict=True):
        if value is not None and flag.startswith("--jax") and backend != "jax":
            raise CommandError(f"{flag} is for --backend-name jax, got {backend}", status=MISUSED)
    return {name: value for name, value in zip(OWN_NAMES, values, strict=True) if value is not None}


def _chunk_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(integers(text, "--client-chunk-sizes")))
    if min(sizes) < 1:
        raise CommandError(f"--client-chunk-sizes must be 1 or more, got {min(sizes)}", status=MISUSED)
    return sizes


def _measure(options: SweepOptions, target: Target, output: Output) -> None:
    from prefixwise.bench.client import ScoreClient
    from prefixwise.bench.files import read_artifact
    from prefixwise.bench.kinds.workload import Workload
    from prefixwise.bench.run.matrix import MatrixSweep, choose_request, describe_server, new_matrix, resume_matrix

    output.check()
    workload = read_artifact(target.workload_json, Workload)
    request = choose_request(workload, target.request_id)
    begun = new_matrix(target.workload_json, workload, request, options)
    with ScoreClient(target.url, timeout_sec=options.timeout_sec, api_key=target.api_key) as client:
        client.check_reachable()
        model = describe_server(begun, options, client, print_server_info(client))
        for note in begun.notes:
            say(f"note: {note}", style="yellow")
        begun.notes.extend(target.notes)
        begun.server_config["note"] = "; ".join(target.notes)
        if output.resume:
            begun = resume_matrix(output.json, begun)
        sweep = MatrixSweep(client, request, begun, options, output.save, model)
        failed = sweep.forget_failed() if output.resume else []
        if failed:
            say(f"measured again, as runs of it failed: {', '.join(failed)}")
        _run(sweep)
    _report(sweep.matrix, output.json)


def _run(sweep: MatrixSweep) -> None:
    sweep.update()  # whether the file can be written is known before hours of measuring
    with step_progress(len(sweep.missing_sizes()), "sweep") as on_progress:
        sweep.sweep(on_progress)
    with step_progress(len(sweep.missing_confirm_sizes()), "confirm") as on_progress:
        sweep.confirm(on_progress)
    memory = sweep.client.server_info().get("memory")
    if memory is not None:  # its peak is known only now
        sweep.matrix.hardware["memory"] = memory
        sweep.update()


def _report(done: ScoreMatrix, output_json: Path) -> None:
    """The tables, the last line, and the status."""
    from prefixwise.bench.kinds.score_matrix import failure_lines, rows_table
    from prefixwise.bench.render.terminal import terminal_lines

    tables = (*rows_table("sweep", done.results), *rows_table("confirmed", done.confirm_results))
    for line in terminal_lines(tables):
        say(line)
    final = done.summary.final_recommendation.selected
    rows = [*done.results, *done.confirm_results]
    for failure in failure_lines(rows)[:1]:
        print_warning(failure)
    if any(row.status != "ok" for row in rows):
        say("hint: the same command with --resume measures the rows that failed again, and no others")
    last_line(
        {
            "output_json": str(output_json),
            "backend": done.backend,
            "evaluation_view": done.evaluation_view,
            "rows": len(done.results),
            "rows_not_ok": [row.client_chunk_size for row in done.results if row.status != "ok"],
            "final_recommendation": final and final.model_dump(exclude={"success_rate"}),
        }
    )
    if not any(row.status == "ok" for row in rows):
        raise typer.Exit(FAILED)
