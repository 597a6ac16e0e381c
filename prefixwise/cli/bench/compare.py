"""`prefixwise bench compare`: two backends side by side, from the score matrices of both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.cli.bench_common import OutputJson, OutputMarkdown, last_line
from prefixwise.cli.failures import FAILED
from prefixwise.cli.flags import finite
from prefixwise.cli.output import say

if TYPE_CHECKING:
    from prefixwise.bench.kinds.comparison.model import Comparison


def compare(
    jax_portable_json: Annotated[Path, typer.Option(metavar="FILE", help="What `prefixwise bench matrix` wrote.")],
    pytorch_portable_json: Annotated[Path, typer.Option(metavar="FILE", help="Likewise: the reference.")],
    output_json: OutputJson,
    jax_best_native_json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Likewise; the portable one when left out.")
    ] = None,
    pytorch_best_native_json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Likewise; the portable one when left out.")
    ] = None,
    correctness_threshold_max_abs: Annotated[
        float, typer.Option(metavar="X", min=0.0, callback=finite, help="How far one score may be from PyTorch's.")
    ] = 0.02,
    correctness_threshold_mean_abs: Annotated[
        float, typer.Option(metavar="X", min=0.0, callback=finite, help="How far all may be, on average.")
    ] = 0.01,
    guardrail_ratio: Annotated[
        float, typer.Option(metavar="X", min=1.0, callback=finite, help="How far above the best p95 a winner's may be.")
    ] = 1.25,
    output_markdown: OutputMarkdown = None,
) -> None:
    """Compare JAX with PyTorch on the same workload: speed at each chunk size, at its best, and whether scores agree.

    The status is 1 where scores do not agree; the artifact is written all the same.
    """
    from prefixwise.bench.files import write_artifact, write_text
    from prefixwise.bench.kinds.comparison.report import comparison_report
    from prefixwise.bench.render.markdown import report_markdown
    from prefixwise.bench.rules import Bounds
    from prefixwise.bench.run.comparison import compare as compare_inputs
    from prefixwise.bench.run.comparison import read_inputs

    inputs = read_inputs(jax_portable_json, pytorch_portable_json, jax_best_native_json, pytorch_best_native_json)
    options = Bounds(correctness_threshold_max_abs, correctness_threshold_mean_abs, guardrail_ratio)
    comparison = compare_inputs(inputs, options)
    write_artifact(output_json, comparison)
    if output_markdown is not None:
        write_text(output_markdown, report_markdown(comparison_report(comparison, str(output_json))))
    _report(comparison, output_json)


def _report(comparison: Comparison, output_json: Path) -> None:
    from prefixwise.bench.kinds.comparison.tables import portable_table
    from prefixwise.bench.kinds.score_matrix import P95, THROUGHPUT
    from prefixwise.bench.render.terminal import terminal_lines

    for line in terminal_lines(portable_table(comparison, (THROUGHPUT, P95))):
        say(line)
    for note in comparison.notes:
        say(f"note: {note}", style="yellow")
    for view, phrase in comparison.recommendations.items():
        say(f"{view}: {phrase}")
    passed = comparison.correctness["pass"]
    last_line(
        {
            "output_json": str(output_json),
            "pass": passed,
            "portable_winner": comparison.portable_view.winner.backend,
            "best_native_winner": comparison.best_native_view.winner.backend,
            "recommendations": comparison.recommendations,
        }
    )
    if not passed:
        say("the correctness gate failed", style="red")
        raise typer.Exit(FAILED)
