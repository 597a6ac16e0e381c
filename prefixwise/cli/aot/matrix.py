"""`prefixwise aot matrix`: the programs of the contract workload, for many models and slices, as one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixwise.aot.options import AotOptions
from prefixwise.cli.aot.as_json import program_json, slice_json, versions
from prefixwise.cli.aot.cases import CASES, MODELS, TOPOLOGIES, Case
from prefixwise.cli.aot.matrix_file import MatrixFile, Row
from prefixwise.cli.aot.matrix_table import matrix_markdown, matrix_text
from prefixwise.cli.aot.programs import check_compiler
from prefixwise.cli.failures import FAILED, MISUSED, CommandError
from prefixwise.cli.harness_common import step_progress
from prefixwise.cli.output import write_data

if TYPE_CHECKING:
    from prefixwise.aot.ahead_of_time import AotRun
    from prefixwise.backends.jax.aot.report import NeededProgram


def matrix(
    output_json: Annotated[
        Path, typer.Option(metavar="FILE", help="Where every row goes as it comes; rows that are there stay.")
    ],
    models: Annotated[str, typer.Option(metavar="NAME,NAME,...", help="As --model of aot.")] = ",".join(MODELS),
    topologies: Annotated[str, typer.Option(metavar="NAME,NAME,...", help="Slices.")] = ",".join(TOPOLOGIES),
    output_markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="The table, as Markdown.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="No progress on stderr.")] = False,
) -> None:
    """Compile packed, prefill and extend programs of 2000 + 500 x 20 tokens for many models and slices.

    A program takes about 20 s. The same command again goes on where it was cut short. The status is 1 where a program
    fails for another reason than memory.
    """
    check_compiler()
    file = MatrixFile.open(output_json)
    wanted = [
        (model, topology, case)
        for model in _names(models, "--models")
        for topology in _names(topologies, "--topologies")
        for case in CASES
    ]
    missing = [each for each in wanted if file.find(*each) is None]
    with step_progress(len(missing), "compiling", quiet=quiet) as tell:
        for model, topology, case in missing:
            tell(f"{model} on {topology}, {case.name}")
            file.add(_row(model, topology, case), versions())
    rows = [row for row in (file.find(*each) for each in wanted) if row is not None]
    if output_markdown is not None:
        output_markdown.write_text(matrix_markdown(rows), encoding="utf-8")
    write_data(matrix_text(rows))
    if any(row["outcome"] == "fails" for row in rows):
        raise typer.Exit(FAILED)


def _names(text: str, option: str) -> Sequence[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise CommandError(f"{option} must be names like a,b,c, got {json.dumps(text)}", status=MISUSED)
    return found


def _row(model: str, topology: str, case: Case) -> Row:
    from prefixwise.aot.ahead_of_time import record

    run = record(AotOptions(model=model, topology=topology, **case.options))
    report = run.compile([_largest(run, case)], lambda done, total, title: None)[0]
    named: dict[str, Any] = {"model": model, "topology": topology, "case": case.name}
    return {**named, **program_json(report), "slice": slice_json(run)}


def _largest(run: AotRun, case: Case) -> NeededProgram:
    """Of the trunks of this kind."""
    found = [each for each in run.programs() if each.title.startswith(f"{case.kind},")]
    return max(found, key=lambda each: each.num_tokens)
