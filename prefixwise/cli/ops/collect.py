"""`prefixwise ops collect`: what runs have left on a target, named or fetched."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.bench.remote.spec import ARTIFACT_ROOT
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.harness_common import last_line, step_progress
from prefixwise.cli.ops.checks import checked_root
from prefixwise.cli.ops.options import ArtifactRoot, ProjectOption, PythonOption, TargetOption, ZoneOption, open_target
from prefixwise.cli.output import say, stdout_width
from prefixwise.cli.text_table import Column, render_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefixwise.bench.remote.collect import RunFolder


def collect(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", envvar="ARTIFACT_SUBDIR", help="The run to fetch.")
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", metavar="", help="Name the runs, fetch nothing.")] = False,
    everything: Annotated[bool, typer.Option("--all", metavar="", help="Fetch every run.")] = False,
    target: TargetOption = None,
    project: ProjectOption = None,
    zone: ZoneOption = None,
    python: PythonOption = None,
    artifact_root: ArtifactRoot = ARTIFACT_ROOT,
    destination: Annotated[Path, typer.Option(metavar="DIR", help="Here: where the folders of runs go.")] = Path(
        ARTIFACT_ROOT
    ),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar="", help="Replace a folder of the same name here, whatever it holds.")
    ] = False,
) -> None:
    """Fetch the artifacts of runs from a target: one by its name, or all."""
    _check_one(context, name, only_list=only_list, everything=everything)
    checked_root(artifact_root)
    from prefixwise.bench.remote.collect import collect as fetch
    from prefixwise.bench.remote.collect import list_runs
    from prefixwise.bench.remote.remote_agent import RemoteAgent

    agent = RemoteAgent.on(open_target(target, project, zone), python)
    agent.target.check_reachable()
    if only_list:
        runs = list_runs(agent, artifact_root)
        _tell(runs)
        last_line({"target": agent.target.name, "runs": [asdict(run) for run in runs]})
        return
    wanted = [run.name for run in list_runs(agent, artifact_root)] if everything else [str(name)]
    with step_progress(len(wanted), "collect") as step:
        fetched = fetch(agent, artifact_root, wanted, destination, step, overwrite=overwrite)
    for folder in fetched:
        say(f"{folder}")
    last_line({"target": agent.target.name, "fetched": [str(folder) for folder in fetched]})


def _check_one(context: typer.Context, name: str | None, *, only_list: bool, everything: bool) -> None:
    """A name from the environment gives way; two of the command line contradict each other. Raises CommandError."""
    source = context.get_parameter_source("name")
    is_typed = name is not None and source is not None and source.name == "COMMANDLINE"
    if is_typed + only_list + everything > 1:
        raise CommandError("NAME, --all and --list exclude each other: give one of them", status=MISUSED)
    if not (only_list or everything or name):
        raise CommandError("which run? give its NAME, --all, or --list to see them", status=MISUSED)


def _tell(runs: Sequence[RunFolder]) -> None:
    columns = [
        Column("run", [run.name for run in runs]),
        Column("files", [str(run.files) for run in runs], align_right=True),
        Column("KB", [f"{run.bytes / 1000:,.1f}" for run in runs], align_right=True),
        Column("result", ["yes" if run.finished else "not yet" for run in runs]),
    ]
    for line in render_table(columns, stdout_width()).splitlines() if runs else ["there are no runs"]:
        say(line)
