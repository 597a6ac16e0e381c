"""The program `itemwise`: its verbs, its global options, and what its exit status means.

    0    done
    1    it cannot be done: a request, a model, a device or a file is at fault
    2    the command line itself is wrong
    130  interrupted from the keyboard
    141  whoever read the output stopped reading

Nothing heavy is imported before a verb runs, so that `--help` answers at once.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from itemwise._version import __version__
from itemwise.cli.aot.verbs import aot
from itemwise.cli.failures import CommandError, report_failure
from itemwise.cli.harness_verbs import bench, validate
from itemwise.cli.models import models
from itemwise.cli.ops.verbs import ops
from itemwise.cli.output import write_data
from itemwise.cli.profiles import profiles
from itemwise.cli.rerank import rerank
from itemwise.cli.score import score
from itemwise.cli.serve import serve
from itemwise.cli.serve_options import first_spelling
from itemwise.contract.errors import ItemwiseError

INTERRUPTED = 130

app = typer.Typer(name="itemwise", add_completion=False, pretty_exceptions_enable=False)
app.command()(score)
app.command()(rerank)
app.command(context_settings={"token_normalize_func": first_spelling})(serve)
app.command()(models)
app.command()(profiles)
app.add_typer(bench, name="bench", no_args_is_help=True)
app.add_typer(validate, name="validate", no_args_is_help=True)
app.add_typer(aot, name="aot")
app.add_typer(ops, name="ops", no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        write_data(f"itemwise {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="How much to log on stderr.")
    ] = "warning",
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            metavar="",
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Score many items against one query with a language model, each exactly as if it were alone."""
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if context.invoked_subcommand is None:
        write_data(context.get_help() + "\n")


def main(args: Sequence[str] | None = None) -> None:
    """Run the program and exit with its status; `args` are `sys.argv[1:]` unless given."""
    # A terminal that cannot show a character of an item must not make the whole answer fail.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(_run(args))


def _run(args: Sequence[str] | None) -> int:
    try:
        # Typer gives back the code of a `typer.Exit`, and None from a verb that ran to its end.
        status: int | None = app(args, prog_name="itemwise", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (ItemwiseError, CommandError, typer.TyperException) as error:
        return report_failure(error)
    return status or 0
