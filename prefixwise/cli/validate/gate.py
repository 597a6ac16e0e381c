"""`prefixwise validate gate`: what `validate combine` wrote, against the bounds. Exits with 1 where a gate fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.bench.options import GateBounds
from prefixwise.cli.bench_common import last_line
from prefixwise.cli.failures import FAILED
from prefixwise.cli.output import say, visible
from prefixwise.cli.validate.options import with_gate_options

if TYPE_CHECKING:
    from prefixwise.bench.kinds.gate_report import GateReport


@with_gate_options
def validate_gate(
    multi_vs_serial_json: Annotated[Path, typer.Option(metavar="FILE", help="The first half of `validate combine`.")],
    parity_json: Annotated[Path, typer.Option(metavar="FILE", help="The second half.")],
    output_json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the judgement goes.")] = None,
    *,
    bounds: GateBounds,
) -> None:
    """Judge a validation: isolation, equivalence, speed-up and parity, each against its bound.

    What is judged is computed again from the scores and times in the files. A file whose metrics do not follow from
    them, or contradict each other, is refused.
    """
    from prefixwise.bench.files import write_artifact
    from prefixwise.bench.kinds.gate_report import judge
    from prefixwise.bench.kinds.multi_vs_serial import MultiVsSerial
    from prefixwise.bench.kinds.parity import Parity
    from prefixwise.bench.run.check import read_checked

    combined = read_checked(multi_vs_serial_json, "multi-vs-serial", MultiVsSerial).recomputed()
    parity = read_checked(parity_json, "parity", Parity).recomputed()
    report = judge(combined.model_dump(), parity.model_dump(), bounds)
    if output_json is not None:
        write_artifact(output_json, report)
    report_gates(report)
    last_line(report.model_dump(by_alias=True))
    if not report.all_pass:
        raise typer.Exit(FAILED)


def report_gates(report: GateReport) -> None:
    """The table on stderr, with the details of failed gates below."""
    from prefixwise.bench.kinds.gate_report import gates_of, gates_table
    from prefixwise.bench.render.terminal import terminal_lines

    for line in terminal_lines(gates_table("", gates_of(report.checks))):
        say(line)
    for name, check in report.checks.items():
        if check.detail is not None:
            say(visible(f"{name}: {check.detail}"), style="red")
