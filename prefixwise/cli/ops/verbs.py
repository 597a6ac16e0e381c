"""The group `ops`. `doctor`, `install` and `collect` are here; sweeps and the comparison have files of their own.

doctor   checks what a target lacks, before anything runs there
install  puts this prefixwise onto a target
collect  lists or fetches the artifacts of runs
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from prefixwise.bench.remote.spec import ARTIFACT_ROOT
from prefixwise.bench.remote.targets.base import VENV
from prefixwise.cli.bench_common import last_line
from prefixwise.cli.bench_verbs import as_verb
from prefixwise.cli.commands import Verbs
from prefixwise.cli.engine_options import BackendName
from prefixwise.cli.failures import FAILED, MISUSED, CommandError
from prefixwise.cli.flags import is_typed
from prefixwise.cli.ops.compare_backends import compare_backends
from prefixwise.cli.ops.options import (
    ArtifactRoot,
    ProjectOption,
    PythonOption,
    TargetOption,
    ZoneOption,
    checked_root,
    open_target,
)
from prefixwise.cli.ops.sweep import matrix, smoke
from prefixwise.cli.output import Column, render_table, say, stdout_width, visible
from prefixwise.cli.progress import step_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefixwise.bench.remote.collect import RunFolder
    from prefixwise.bench.remote.doctor import Check


def doctor(
    target: TargetOption = None,
    project: ProjectOption = None,
    zone: ZoneOption = None,
    python: PythonOption = None,
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="The model on the target: a folder, a .gguf file, a hub id, or embedded."),
    ] = "",
    backend: Annotated[
        BackendName,
        typer.Option(metavar="NAME", help="The backend that a server there needs: auto, jax, torch or fake."),
    ] = "auto",
    require_accelerator: Annotated[
        str, typer.Option(metavar="NAME", help="Required accelerator, by a part of its name: H100 or TPU v6.")
    ] = "",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="The server's port; 0: any free one.")] = 0,
    artifact_root: ArtifactRoot = ARTIFACT_ROOT,
    min_free_gb: Annotated[
        float, typer.Option(metavar="X", min=0, help="Free disk space in the folder of runs.")
    ] = 5.0,
) -> None:
    """Check what a target lacks before anything runs there: Python, prefixwise, device, disk, port, model."""
    from prefixwise.bench.remote.doctor import Requirements, diagnose

    opened = open_target(target, project, zone)
    wanted = Requirements(python, model, backend, require_accelerator, port, artifact_root, min_free_gb)
    say(f"target {opened.name}: querying {python or opened.default_python}")
    checks = diagnose(opened, wanted)
    _print_checks(checks)
    lacks = [check.name for check in checks if check.state == "lacks"]
    unknown = [check.name for check in checks if check.state == "unknown"]
    found = [asdict(check) for check in checks]
    last_line({"target": opened.name, "ready": not lacks, "lacks": lacks, "unknown": unknown, "checks": found})
    if lacks:
        raise typer.Exit(FAILED)


def _print_checks(checks: Sequence[Check]) -> None:
    columns = [
        Column("check", [check.name for check in checks]),
        Column("state", [check.state for check in checks]),
        Column("found", [visible(check.found) for check in checks]),
        Column("what to do", [visible(check.remedy) for check in checks]),
    ]
    for line in render_table(columns, stdout_width()).splitlines():
        say(line)


BackendExtra = Literal["auto", "torch", "jax", "jax-cuda", "jax-tpu"]


def install(
    target: TargetOption = None,
    project: ProjectOption = None,
    zone: ZoneOption = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The Python 3.11 to 3.13 that creates the venv; default: the first found."),
    ] = None,
    venv: Annotated[str, typer.Option(metavar="DIR", help="The venv on the target, created or upgraded.")] = VENV,
    backend: Annotated[
        BackendExtra,
        typer.Option(metavar="NAME", help="auto (jax-tpu on a TPU, else torch), torch, jax, jax-cuda or jax-tpu."),
    ] = "auto",
    extras: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME,...", help="Install only these extras instead: server,harness,torch,jax-cuda."),
    ] = None,
    system_site_packages: Annotated[
        bool,
        typer.Option(
            "--system-site-packages", metavar="", help="Let the venv see the packages of the target's Python."
        ),
    ] = False,
    pip_args: Annotated[
        str, typer.Option(metavar="ARGS", help='Arguments for pip, as "--index-url URL" for a CPU build of PyTorch.')
    ] = "",
) -> None:
    """Install this prefixwise on a target: a wheel built here, in a venv there. A second call upgrades it."""
    from prefixwise.bench.remote.install import InstallPlan, install_on

    if not venv.strip():
        raise CommandError(f"--venv must be a folder on the target, got {venv!r}", status=MISUSED)
    plan = InstallPlan(python, venv, backend, _extras(extras), system_site_packages, _split(pip_args))
    opened = open_target(target, project, zone)
    say(f"target {opened.name}: {plan.venv}")
    installed = install_on(opened, plan, lambda line: say(f"  {visible(line)}"))
    say(f"prefixwise {installed.version} on {opened.name}: {installed.python}")
    if plan.venv_python != opened.default_python:
        say(f"use it with: --target {opened.name} --python {installed.python}")
    last_line({"target": opened.name, **asdict(installed)})


def _extras(text: str | None) -> tuple[str, ...]:
    """Raises CommandError."""
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    if text is not None and not names:
        raise CommandError(f"--extras must be names like server,harness,torch, got {text!r}", status=MISUSED)
    return names


def _split(text: str) -> tuple[str, ...]:
    """Split like a shell does. Raises CommandError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise CommandError(f"--pip-args cannot be split: {error}", status=MISUSED) from None


def collect(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", envvar="ARTIFACT_SUBDIR", help="The run to fetch.")
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", metavar="", help="List the runs, fetch nothing.")] = False,
    everything: Annotated[bool, typer.Option("--all", metavar="", help="Fetch every run.")] = False,
    target: TargetOption = None,
    project: ProjectOption = None,
    zone: ZoneOption = None,
    python: PythonOption = None,
    artifact_root: ArtifactRoot = ARTIFACT_ROOT,
    destination: Annotated[Path, typer.Option(metavar="DIR", help="The local folder for fetched runs.")] = Path(
        ARTIFACT_ROOT
    ),
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", metavar="", help="Replace a local folder of the same name, whatever it contains."),
    ] = False,
) -> None:
    """Fetch the artifacts of runs from a target: one by name, or all."""
    _check_one(context, name, only_list=only_list, everything=everything)
    checked_root(artifact_root)
    from prefixwise.bench.remote.agent_client import RemoteAgent
    from prefixwise.bench.remote.collect import collect as fetch
    from prefixwise.bench.remote.collect import list_runs

    agent = RemoteAgent.on(open_target(target, project, zone), python)
    agent.target.check_reachable()
    if only_list:
        runs = list_runs(agent, artifact_root)
        _print_runs(runs)
        last_line({"target": agent.target.name, "runs": [asdict(run) for run in runs]})
        return
    wanted = [run.name for run in list_runs(agent, artifact_root)] if everything else [str(name)]
    with step_progress(len(wanted), "collect") as step:
        fetched = fetch(agent, artifact_root, wanted, destination, step, overwrite=overwrite)
    for folder in fetched:
        say(f"{folder}")
    last_line({"target": agent.target.name, "fetched": [str(folder) for folder in fetched]})


def _check_one(context: typer.Context, name: str | None, *, only_list: bool, everything: bool) -> None:
    """Check that one of name, --all and --list is given; a name from the environment yields. Raises CommandError."""
    named = name is not None and is_typed(context, "name")
    if named + only_list + everything > 1:
        raise CommandError("NAME, --all and --list exclude each other: give one of them", status=MISUSED)
    if not (only_list or everything or name):
        raise CommandError("expected a run's NAME, --all, or --list to see them", status=MISUSED)


def _print_runs(runs: Sequence[RunFolder]) -> None:
    columns = [
        Column("run", [run.name for run in runs]),
        Column("files", [str(run.files) for run in runs], align_right=True),
        Column("KB", [f"{run.bytes / 1000:,.1f}" for run in runs], align_right=True),
        Column("result", ["yes" if run.finished else "not yet" for run in runs]),
    ]
    for line in render_table(columns, stdout_width()).splitlines() if runs else ["there are no runs"]:
        say(line)


ops = Verbs()

_VERBS: dict[str, Callable[..., None]] = {
    "doctor": doctor,
    "install": install,
    "smoke": smoke,
    "matrix": matrix,
    "collect": collect,
    "compare-backends": compare_backends,
}

for _name, _verb in _VERBS.items():
    ops.command(_name)(as_verb(_verb))
