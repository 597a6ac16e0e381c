"""`prefixwise aot`: does a request's every program compile for a slice of TPUs, and what does it need there?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from prefixwise.aot.options import AotOptions
from prefixwise.cli.aot.as_json import run_json
from prefixwise.cli.aot.table import run_text
from prefixwise.cli.failures import FAILED, MISUSED, CommandError
from prefixwise.cli.flags import Flag, with_flags
from prefixwise.cli.output import write_data
from prefixwise.cli.progress import compile_progress
from prefixwise.contract.errors import RequestError
from prefixwise.contract.request import Algorithm
from prefixwise.host import install_command
from prefixwise.plan.options import MaskOption

if TYPE_CHECKING:
    from prefixwise.aot.ahead_of_time import AotRun
    from prefixwise.backends.jax.aot.report import ProgramReport

_HINT = "prefixwise aot --help lists the options"
TpuDtype = Literal["bfloat16", "float32"]

FLAGS = {
    "model": Flag(str, "A known model like Qwen3-0.6B, a folder with config.json, or a .gguf file.", "MODEL"),
    "topology": Flag(str, "The slice: a generation (v5e or v6e) and its grid of chips, as in v6e:2x4.", "NAME"),
    "dtype": Flag(TpuDtype, f"Of weights and activations: {' or '.join(get_args(TpuDtype))}.", "NAME"),
    "tp_size": Flag(int | None, "Chips that share every layer; all that the copies leave, when left out.", least=1),
    "dp_size": Flag(int, "Copies of the model.", least=1),
    "prefix_tokens": Flag(int, "Tokens that the items share.", least=1),
    "items": Flag(int, "Items of the request.", least=1),
    "item_tokens": Flag(int, "Tokens of an item.", least=1),
    "algorithm": Flag(Algorithm, f"How the items share their prefix: {', '.join(get_args(Algorithm))}.", "NAME"),
    "mask": Flag(MaskOption, f"How packed rows are masked: {', '.join(get_args(MaskOption))}.", "NAME"),
    "chunk_size": Flag(int | None, "Most items in one packed row or one forward; chosen when left out.", least=0),
    "prefix_cache_bytes": Flag(int | None, "Memory for prefixes on each chip; a fifth when left out.", least=1),
    "attention": Flag(str | None, "An attention implementation; what a server would choose when left out.", "NAME"),
}


@with_flags("options", AotOptions, FLAGS, panel="Slice, model and request")
def aot(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One line of JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="No progress on stderr.")] = False,
    largest_chunk: Annotated[
        bool,
        typer.Option(
            help="Also search the largest chunk that fits, which compiles some more programs.",
        ),
    ] = True,
    *,
    options: AotOptions,
) -> None:
    """Compile a request's programs for TPUs that are not there, and say what they need and cost.

    Neither weights nor a TPU are needed, and none that is there is touched. The status is 1 where a program does not
    compile. `prefixwise aot matrix` does so for many models and slices.
    """
    if context.invoked_subcommand is not None:
        return
    if not options.model:
        raise CommandError("Missing option '--model'.", hint=_HINT, status=MISUSED)
    check_compiler()
    from prefixwise.aot.ahead_of_time import find_largest_chunk

    run = _record(options)
    with compile_progress(quiet=quiet) as on_program:
        reports = run.compile(run.programs(), on_program)
        largest = find_largest_chunk(run, on_program) if largest_chunk else None
    body: dict[str, Any] = run_json(run, reports, largest)
    write_data(json.dumps(body) + "\n" if as_json else run_text(run, body))
    if not all_compile(reports):
        raise typer.Exit(FAILED)


def _record(options: AotOptions) -> AotRun:
    from prefixwise.aot.ahead_of_time import record

    try:
        return record(options)
    except RequestError as error:  # whose own hint would name options of verbs that score
        raise CommandError(str(error), hint=_HINT) from None


def check_compiler() -> None:
    """Raises CommandError where something has to be installed first."""
    from prefixwise.backends.jax.aot.environment import missing_packages

    missing = missing_packages()
    if missing:
        names, are = " and ".join(missing), "are" if len(missing) > 1 else "is"
        hint = f"install what compiles for TPUs with: {install_command('tpu-aot')}"
        raise CommandError(f"{names} {are} not installed", hint=hint)


def all_compile(reports: list[ProgramReport]) -> bool:
    """Is there no program that does not?"""
    return all(report.compilation.outcome == "compiles" for report in reports)
