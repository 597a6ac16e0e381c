"""`prefixwise validate quantization`: a quantised model against a reference, with bounds. Exits with 1 beyond one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.bench.options import QuantizationBounds
from prefixwise.cli.bench_common import OutputMarkdown, Timeout, last_line, print_server_info
from prefixwise.cli.failures import FAILED, MISUSED, CommandError
from prefixwise.cli.flags import Flag, with_flags
from prefixwise.cli.output import say, visible
from prefixwise.cli.progress import step_progress
from prefixwise.cli.validate.options import Labels, ServerFlag, read_labels, split_server_flags

if TYPE_CHECKING:
    from prefixwise.bench.kinds.quantization import QuantizationCheck
    from prefixwise.bench.run.quantization import NamedRequests

_BOUND_FLAGS = {
    "max_abs_diff": Flag(float, "Of any score.", "DIFF", least=0),
    "mean_abs_diff": Flag(float, "Of all scores.", "DIFF", least=0),
    "min_rank_correlation": Flag(float, "Spearman's, of a request's items by their first score; mean.", "R"),
    "min_top_1_agreement": Flag(float, "Share of requests whose best item stays the same.", "SHARE", least=0),
    "min_top_10_agreement": Flag(float, "Share of their ten best items that stay among them; mean.", "SHARE", least=0),
    "max_changed_labels": Flag(float, "Share of items whose best label is another.", "SHARE", least=0),
}
_NUM_STEPS = 4


@with_flags("bounds", QuantizationBounds, _BOUND_FLAGS, panel="Gates")
def validate_quantization(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file, a hub id, or embedded.")],
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="What to compare with; MODEL itself, with other flags.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Your requests: bodies of /v1/score, one per line, or a .json file of `bench workload`. "
            "Without it, the canonical workload of the size below.",
        ),
    ] = None,
    num_requests: Annotated[int, typer.Option(metavar="N", min=1, help="Requests of the workload.")] = 8,
    query_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a query.")] = 128,
    num_items: Annotated[int, typer.Option(metavar="N", min=1, help="Items of a request.")] = 50,
    item_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of an item.")] = 20,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Another seed, other tokens.")] = 0,
    labels: Labels = None,
    server_flag: ServerFlag = None,
    model_flag: Annotated[
        list[str] | None, typer.Option(metavar="FLAG", help="The same for MODEL's server alone.")
    ] = None,
    reference_flag: Annotated[
        list[str] | None, typer.Option(metavar="FLAG", help="The same for the reference's server alone.")
    ] = None,
    output_json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the artifact here.")] = None,
    output_markdown: OutputMarkdown = None,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the servers' logs go; beside --output-json, else here.")
    ] = None,
    timeout_sec: Timeout = 180.0,
    *,
    bounds: QuantizationBounds,
) -> None:
    """Judge a quantised model by its scores: differences, ranks and labels against a reference, each with its bound.

    Random weights prove nothing about quality, and random tokens little: judge on requests of your own.
    """
    from prefixwise.bench.run.quantization import QuantizationRun, Side

    common, asked = split_server_flags(server_flag), read_labels(labels)
    sides = (
        Side(model, (*common, *split_server_flags(model_flag))),
        Side(reference or model, (*common, *split_server_flags(reference_flag))),
    )
    if sides[0] == sides[1]:
        message = "expected --reference MODEL, or other flags for one of both servers: they are the same"
        raise CommandError(message, status=MISUSED)
    geometry = (query_tokens, num_items, item_tokens, num_requests, seed)
    chosen = _requests(requests, model, geometry, None if asked is None else tuple(asked))
    folder = log_dir or (output_json.parent if output_json is not None else Path())
    with step_progress(_NUM_STEPS, "validate quantization") as step:
        run = QuantizationRun(*sides, chosen, bounds, folder, step, print_server_info, timeout_sec)
        check = run()
    _write(check, output_json, output_markdown)
    _report(check)
    last_line(
        {
            "output_json": None if output_json is None else str(output_json),
            "metrics": check.metrics.model_dump(),
            "failed": [name for name, gate in check.checks.items() if not gate.passed],
            "all_pass": check.all_pass,
        }
    )
    if not check.all_pass:
        raise typer.Exit(FAILED)


def _requests(
    path: Path | None, model: str, geometry: tuple[int, int, int, int, int], labels: tuple[int, ...] | None
) -> NamedRequests:
    from prefixwise.bench.run.quantization import make_requests, read_requests
    from prefixwise.bench.run.workload import WorkloadOptions

    return make_requests(model, WorkloadOptions(*geometry, labels)) if path is None else read_requests(path)


def _write(check: QuantizationCheck, output_json: Path | None, output_markdown: Path | None) -> None:
    from prefixwise.bench.files import write_artifact, write_text
    from prefixwise.bench.render.markdown import report_markdown
    from prefixwise.bench.run.report import report_of

    if output_json is not None:
        write_artifact(output_json, check)
    if output_markdown is not None:
        write_text(output_markdown, report_markdown(report_of(check, output_markdown.name)))


def _report(check: QuantizationCheck) -> None:
    from prefixwise.bench.kinds.gate_report import gates_of, gates_table
    from prefixwise.bench.render.terminal import terminal_lines

    for line in terminal_lines(gates_table("", gates_of(check.checks))):
        say(line)
    for name, gate in check.checks.items():
        if gate.detail is not None:
            say(visible(f"{name}: {gate.detail}"), style="red")
    least = f"the least of {len(check.requests)} requests is {check.metrics.least_rank_correlation:.4f}"
    say(f"{check.workload}: rank correlation, {least}")
