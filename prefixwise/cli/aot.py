"""`prefixwise aot`: compile a request's programs for TPUs that are not attached; `aot matrix`: for many models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from prefixwise.aot.matrix import LEGEND, MatrixFile, matrix_failures, matrix_markdown, matrix_row, matrix_table
from prefixwise.aot.options import MATRIX_CASES, MATRIX_MODELS, MATRIX_TOPOLOGIES, AotOptions
from prefixwise.aot.report import (
    TEXT_COLUMNS,
    Json,
    Table,
    estimate_line,
    failure_lines,
    largest_chunk_line,
    programs_table,
    run_json,
    run_title,
    versions,
)
from prefixwise.aot.run import AotRun, find_largest_chunk, missing_packages, record
from prefixwise.cli.commands import Verbs
from prefixwise.cli.failures import FAILED, MISUSED, CommandError
from prefixwise.cli.flags import Flag, with_flags
from prefixwise.cli.output import Column, render_table, stdout_width, styled, visible, write_data
from prefixwise.cli.progress import compile_progress, step_progress
from prefixwise.contract.errors import RequestError
from prefixwise.contract.request import Algorithm
from prefixwise.host import install_command
from prefixwise.plan.algorithms import MaskOption

_HINT = "prefixwise aot --help lists the options"
TpuDtype = Literal["bfloat16", "float32"]

FLAGS = {
    "model": Flag(str, "A known model like Qwen3-0.6B, a folder with config.json, or a .gguf file.", "MODEL"),
    "topology": Flag(str, "The slice: a generation (v5e or v6e) and its grid of chips, as in v6e:2x4.", "NAME"),
    "dtype": Flag(TpuDtype, f"Dtype of weights and activations: {' or '.join(get_args(TpuDtype))}.", "NAME"),
    "tp_size": Flag(int | None, "Chips that share every layer. Default: all chips of one copy.", least=1),
    "dp_size": Flag(int, "Copies of the model.", least=1),
    "prefix_tokens": Flag(int, "Tokens that the items share.", least=1),
    "items": Flag(int, "Items of the request.", least=1, name="--num-items", other_names=("--items",)),
    "item_tokens": Flag(int, "Tokens of an item.", least=1),
    "algorithm": Flag(Algorithm, f"How the items share their prefix: {', '.join(get_args(Algorithm))}.", "NAME"),
    "mask": Flag(MaskOption, f"How packed sequences are masked: {', '.join(get_args(MaskOption))}.", "NAME"),
    "chunk_size": Flag(int | None, "Most items in one packed sequence or one forward. Default: chosen.", least=0),
    "prefix_cache_bytes": Flag(int | None, "Memory for the KV cache on each chip. Default: a fifth.", least=1),
    "attention": Flag(str | None, "An attention implementation. Default: the one that a server chooses.", "NAME"),
    "logprobs": Flag(
        int | None, "Read log-likelihoods of items, and so many of the likeliest tokens. Default: two labels.", least=1
    ),
}

aot = Verbs()


@aot.callback(invoke_without_command=True)
@with_flags("options", AotOptions, FLAGS, panel="Slice, model and request")
def compile_request(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One line of JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="No progress on stderr.")] = False,
    largest_chunk: Annotated[
        bool, typer.Option(help="Also search the largest chunk that fits, which compiles some more programs.")
    ] = True,
    *,
    options: AotOptions,
) -> None:
    """Compile a request's programs for TPUs that are not attached, and report what they need and cost.

    It needs neither weights nor a TPU, and uses no TPU that is attached. The status is 1 where a program does not
    compile. `prefixwise aot matrix` compiles for many models and slices.
    """
    if context.invoked_subcommand is not None:
        return
    if not options.model:
        raise CommandError("Missing option '--model'.", hint=_HINT, status=MISUSED)
    check_compiler()
    run = _record(options)
    with compile_progress(quiet=quiet) as on_program:
        reports = run.compile(run.programs(), on_program)
        largest = find_largest_chunk(run, on_program) if largest_chunk else None
    body = run_json(run, reports, largest)
    write_data(json.dumps(body) + "\n" if as_json else _run_text(body))
    if any(report.compilation.outcome != "compiles" for report in reports):
        raise typer.Exit(FAILED)


@aot.command()
def matrix(
    output_json: Annotated[
        Path, typer.Option(metavar="FILE", help="The file for the rows, written after each; its rows are not redone.")
    ],
    models: Annotated[str, typer.Option(metavar="NAME,NAME,...", help="As --model of aot.")] = ",".join(MATRIX_MODELS),
    topologies: Annotated[str, typer.Option(metavar="NAME,NAME,...", help="Slices.")] = ",".join(MATRIX_TOPOLOGIES),
    output_markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="The table, as Markdown.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="No progress on stderr.")] = False,
) -> None:
    """Compile packed, prefill and extend programs of 2000 + 500 x 20 tokens for many models and slices.

    A program takes about 20 s. The same command resumes an interrupted run. The status is 1 where a program fails for
    another reason than memory.
    """
    check_compiler()
    file = MatrixFile.open(output_json)
    wanted = [
        (model, topology, case)
        for model in _names(models, "--models")
        for topology in _names(topologies, "--topologies")
        for case in MATRIX_CASES
    ]
    missing = [each for each in wanted if file.find(*each) is None]
    with step_progress(len(missing), "compiling", quiet=quiet) as report_step:
        for model, topology, case in missing:
            report_step(f"{model} on {topology}, {case.name}")
            file.add(matrix_row(model, topology, case), versions())
    rows = [row for row in (file.find(*each) for each in wanted) if row is not None]
    if output_markdown is not None:
        output_markdown.write_text(matrix_markdown(rows), encoding="utf-8")
    failures = "".join(f"{visible(line)}\n" for line in matrix_failures(rows))
    write_data(f"{LEGEND}\n{_render(matrix_table(rows))}{failures}")
    if any(row["outcome"] == "fails" for row in rows):
        raise typer.Exit(FAILED)


def check_compiler() -> None:
    """Raises CommandError where a package is missing."""
    missing = missing_packages()
    if missing:
        names, are = " and ".join(missing), "are" if len(missing) > 1 else "is"
        hint = f"install what compiles for TPUs with: {install_command('tpu-aot')}"
        raise CommandError(f"{names} {are} not installed", hint=hint)


def _record(options: AotOptions) -> AotRun:
    try:
        return record(options)
    except RequestError as error:  # its own hint would name options of other verbs
        raise CommandError(str(error), hint=_HINT) from None


def _run_text(body: Json) -> str:
    programs = body["programs"]
    right = [name for name in programs_table([], 0)[0] if name not in TEXT_COLUMNS]
    lines = [
        styled(run_title(body), "bold cyan"),
        _render(programs_table(programs, body["slice"]["hbm_bytes"]), align_right=right),
        *(f"{visible(line)}\n" for line in failure_lines(programs)),
    ]
    if body["largest_chunk"] is not None:
        lines.append(visible(largest_chunk_line(body["largest_chunk"])))
    return "\n".join([*lines, f"{estimate_line(body['estimate'])}\n"])


def _render(table: Table, align_right: Sequence[str] = ()) -> str:
    header, *rows = table
    columns = [
        Column(name, [row[place] for row in rows], align_right=name in align_right) for place, name in enumerate(header)
    ]
    return render_table(columns, stdout_width())


def _names(text: str, option: str) -> Sequence[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise CommandError(f"{option} must be names like a,b,c, got {json.dumps(text)}", status=MISUSED)
    return found
