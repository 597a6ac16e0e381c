"""`prefixwise bench report`: a comparison as people like to read it, in Markdown and in one HTML file with plots."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.cli.bench_common import last_line
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.output import say

if TYPE_CHECKING:
    from prefixwise.bench.render.document import Report


def report(
    comparison_json: Annotated[Path, typer.Option(metavar="FILE", help="What `prefixwise bench compare` wrote.")],
    output_report: Annotated[Path | None, typer.Option(metavar="FILE", help="The report as Markdown.")] = None,
    output_html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The report as one HTML file, with plots.")
    ] = None,
    title_date: Annotated[
        str | None, typer.Option(metavar="YYYY-MM-DD", help="The date in its title; today when left out.")
    ] = None,
    multi_vs_serial_json: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Of `prefixwise validate combine`: adds its gates. May be repeated."),
    ] = None,
    parity_json: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Likewise.")] = None,
    gate_json: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Of `prefixwise validate gate`: its bounds, not the default ones. May be repeated; files are matched "
            "by name, as jax_gate.json and jax_parity.json.",
        ),
    ] = None,
    ab_json: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Of `prefixwise bench ab`; may be repeated.")
    ] = None,
    load_json: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Of `prefixwise bench load`; may be repeated.")
    ] = None,
    model_matrix_json: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Of `prefixwise validate models`; may be repeated.")
    ] = None,
    quantization_json: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Of `prefixwise validate quantization`; may be repeated.")
    ] = None,
) -> None:
    """Write the report of a comparison: who is faster, where, by how much, and whether the scores agree.

    The matrices are found through the comparison; where one is missing, the report says what it lacks.
    """
    if output_report is None and output_html is None:
        raise CommandError("expected --output-report or --output-html or both, got neither", status=MISUSED)
    when = _title_date(title_date)
    from prefixwise.bench.kinds.comparison.inputs import ReportPaths, read_report_inputs
    from prefixwise.bench.kinds.comparison.report import make_report

    paths = ReportPaths(
        comparison_json,
        multi_vs_serial=tuple(multi_vs_serial_json or ()),
        parity=tuple(parity_json or ()),
        gate=tuple(gate_json or ()),
        ab=tuple(ab_json or ()),
        load=tuple(load_json or ()),
        model_matrix=tuple(model_matrix_json or ()),
        quantization=tuple(quantization_json or ()),
        output_report=output_report,
        output_html=output_html,
    )
    inputs = read_report_inputs(paths)
    for note in inputs.notes:
        say(f"note: {note}", style="yellow")
    made = make_report(inputs, when)
    _write(made, output_report, output_html)
    say(made.verdict)
    last_line(
        {
            "output_report": None if output_report is None else str(output_report),
            "output_html": None if output_html is None else str(output_html),
            "title_date": when,
            "pass": made.passed,
            "sections": [section.title for section in made.sections],
            "notes": inputs.notes,
        }
    )


def _title_date(text: str | None) -> str:
    if text is None:
        return datetime.now(UTC).date().isoformat()
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise CommandError(f"--title-date must be a date like 2026-02-11, got {text!r}", status=MISUSED) from None


def _write(made: Report, markdown: Path | None, html: Path | None) -> None:
    from prefixwise.bench.files import write_text
    from prefixwise.bench.render.html import report_html
    from prefixwise.bench.render.markdown import report_markdown

    if markdown is not None:
        write_text(markdown, report_markdown(made))
    if html is not None:
        write_text(html, report_html(made))
