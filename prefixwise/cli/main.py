"""The program `prefixwise`: its verbs, its global options, and what its exit status means.

    0    done
    1    it cannot be done: a request, a model, a device or a file is at fault
    2    the command line itself is wrong
    130  interrupted from the keyboard
    141  whoever read the output stopped reading

Nothing heavy is imported before a verb runs, so that `--help` answers at once.
"""

from __future__ import annotations

import gc
import io
import logging
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from prefixwise._version import __version__
from prefixwise.cli.batch import batch
from prefixwise.cli.failures import CommandError, report_failure
from prefixwise.cli.late_groups import late_group
from prefixwise.cli.models import models
from prefixwise.cli.output import write_data
from prefixwise.cli.profiles import profiles
from prefixwise.cli.rerank import rerank
from prefixwise.cli.score import score
from prefixwise.cli.serve import serve
from prefixwise.cli.serve_options import first_spelling
from prefixwise.contract.errors import PrefixwiseError

INTERRUPTED = 130
_OBJECTS_PER_COLLECTION = 100_000  # imports make so many that stay: searching them for garbage costs 0.3 s of a start

_GROUPS = {  # where each is, and what it is for
    "bench": (
        "prefixwise.cli.harness_verbs",
        "Benchmarks of any /v1/score server; their artifacts, comparisons and reports.",
    ),
    "validate": (
        "prefixwise.cli.harness_verbs",
        "Does a server keep items apart, and say what others say? Evaluated, combined, judged.",
    ),
    "aot": (  # by itself a verb, too
        "prefixwise.cli.aot.verbs",
        "Compile a request's programs for TPUs that are not there, and say what they need and cost.",
    ),
    "cluster": (
        "prefixwise.cli.cluster.verbs",
        "Serve on a Ray cluster: many replicas behind one address, or their configuration as YAML.",
    ),
    "ops": (
        "prefixwise.cli.ops.verbs",
        "Benchmark runs on this machine, over ssh, or on Google Cloud: start, measure, stop, fetch.",
    ),
}

app = typer.Typer(name="prefixwise", add_completion=False, pretty_exceptions_enable=False)
app.command()(score)
app.command()(rerank)
app.command()(batch)
app.command(context_settings={"token_normalize_func": first_spelling})(serve)
app.command()(models)
app.command()(profiles)
for _name, (_module, _help) in _GROUPS.items():
    app.add_typer(late_group(_module, _name, _help, no_args_is_help=_name != "aot"), name=_name)


def _print_version(wanted: bool) -> None:
    if wanted:
        write_data(f"prefixwise {__version__}\n")
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
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    status = _run(args)
    gc.freeze()  # else Python searches all that PyTorch made for garbage, for half a second, when the process ends
    sys.exit(status)


def _run(args: Sequence[str] | None) -> int:
    try:
        # Typer gives back the code of a `typer.Exit`, and None from a verb that ran to its end.
        status: int | None = app(args, prog_name="prefixwise", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (PrefixwiseError, CommandError, typer.TyperException) as error:
        return report_failure(error)
    return status or 0
