"""The program `prefixwise`: its verbs, its global options, and its exit statuses.

    0    success
    1    failure: a request, a model, a device or a file is at fault
    2    the command line itself is wrong
    130  interrupted from the keyboard
    141  the reader of the output has closed the pipe

No verb imports anything heavy before it runs, and a group is imported when it is entered, so `--help` is fast.
"""

from __future__ import annotations

import gc
import io
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Literal

import typer
from typer.main import get_group

from prefixwise._version import __version__
from prefixwise.cli.batch import batch
from prefixwise.cli.commands import VerbGroup, Verbs
from prefixwise.cli.completion import completion, register_shells
from prefixwise.cli.failures import CommandError, report_failure
from prefixwise.cli.lm_eval import PASSED_ON, lm_eval
from prefixwise.cli.models import models
from prefixwise.cli.output import write_data
from prefixwise.cli.profiles import profiles
from prefixwise.cli.rerank import rerank
from prefixwise.cli.score import score
from prefixwise.cli.serve import first_spelling, serve
from prefixwise.cli.sglang_flags import ServeCommand
from prefixwise.contract.errors import PrefixwiseError
from prefixwise.host import NO_THREAD, lacks_threads

INTERRUPTED = 130
_OBJECTS_PER_COLLECTION = 100_000  # imported objects are permanent: collecting garbage among them costs 0.3 s at start

_GROUPS = {  # module and help text
    "bench": (
        "prefixwise.cli.bench_verbs",
        "Benchmarks of any /v1/score server; their artifacts, comparisons and reports.",
    ),
    "validate": (
        "prefixwise.cli.bench_verbs",
        "Check that a server isolates items and agrees with a reference: evaluate, combine, gate.",
    ),
    "aot": (  # by itself a verb, too
        "prefixwise.cli.aot",
        "Compile a request's programs for TPUs that are not attached, and report what they need and cost.",
    ),
    "cluster": (
        "prefixwise.cli.cluster",
        "Serve on a Ray cluster: many replicas behind one address, or their configuration as YAML.",
    ),
    "ops": (
        "prefixwise.cli.ops.verbs",
        "Run benchmarks on this machine, over ssh, or on Google Cloud: start, measure, stop, fetch.",
    ),
}


def late_group(module: str, name: str, help_text: str, *, no_args_is_help: bool) -> typer.Typer:
    """A placeholder for the `typer.Typer` called `name` in `module`, which is imported when the group is entered."""

    class LateGroup(VerbGroup):
        def make_context(self, *args: Any, **kwargs: Any) -> Any:
            group = get_group(getattr(import_module(module), name))
            group.help = group.help or self.help
            group.no_args_is_help = self.no_args_is_help
            return group.make_context(*args, **kwargs)

    return Verbs(cls=LateGroup, help=help_text, no_args_is_help=no_args_is_help)


app = Verbs(name="prefixwise")
app.command()(score)
app.command()(rerank)
app.command()(batch)
app.command(cls=ServeCommand, context_settings={"token_normalize_func": first_spelling})(serve)
app.command("lm-eval", context_settings=PASSED_ON)(lm_eval)
app.command()(models)
app.command()(profiles)
for _name, (_module, _help) in _GROUPS.items():
    app.add_typer(late_group(_module, _name, _help, no_args_is_help=_name != "aot"), name=_name)
app.command()(completion)


def _print_version(wanted: bool) -> None:
    if wanted:
        write_data(f"prefixwise {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(metavar="NAME", help="How much to log on stderr: debug, info, warning or error."),
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
    # A terminal that cannot show a character of an item must not fail the request.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    register_shells()
    status = _run(args)
    gc.freeze()  # otherwise the exit takes half a second longer, to collect garbage among PyTorch's objects
    sys.exit(status)


def _run(args: Sequence[str] | None) -> int:
    try:
        # Typer returns the code of a `typer.Exit`, and None for a verb that has run to its end.
        status: int | None = app(args, prog_name="prefixwise", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (PrefixwiseError, CommandError, typer.TyperException) as error:
        return report_failure(error)
    except RuntimeError as error:
        if not lacks_threads(error):
            raise
        return report_failure(CommandError(NO_THREAD))
    return status or 0
