"""`prefixwise ops doctor`: what a target lacks, and what to do about it, before anything runs there."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.bench.remote.spec import ARTIFACT_ROOT
from prefixwise.cli.engine_options import BackendName
from prefixwise.cli.failures import FAILED
from prefixwise.cli.harness_common import last_line
from prefixwise.cli.ops.options import ArtifactRoot, ProjectOption, PythonOption, TargetOption, ZoneOption, open_target
from prefixwise.cli.output import say, stdout_width
from prefixwise.cli.text_table import Column, render_table, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefixwise.bench.remote.doctor.checkup import Check


def doctor(
    target: TargetOption = None,
    project: ProjectOption = None,
    zone: ZoneOption = None,
    python: PythonOption = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="On the target: a folder, a .gguf file, a hub id, or embedded.")
    ] = "",
    backend: Annotated[BackendName, typer.Option(help="What a server there is to run on.")] = "auto",
    require_accelerator: Annotated[
        str, typer.Option(metavar="NAME", help="A part of a device's name, like H100 or TPU v6.")
    ] = "",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Of the server; 0: any that is free.")] = 0,
    artifact_root: ArtifactRoot = ARTIFACT_ROOT,
    min_free_gb: Annotated[float, typer.Option(metavar="X", min=0, help="Where the folders of runs are.")] = 5.0,
) -> None:
    """Say what a target lacks before anything runs there: Python, prefixwise, device, disk, port, model."""
    from prefixwise.bench.remote.doctor.diagnosis import Wanted, diagnose

    opened = open_target(target, project, zone)
    wanted = Wanted(python, model, backend, require_accelerator, port, artifact_root, min_free_gb)
    say(f"target {opened.name}: asking {python or opened.default_python}")
    checks = diagnose(opened, wanted)
    _tell(checks)
    lacks = [check.name for check in checks if check.state == "lacks"]
    unknown = [check.name for check in checks if check.state == "unknown"]
    found = [asdict(check) for check in checks]
    last_line({"target": opened.name, "ready": not lacks, "lacks": lacks, "unknown": unknown, "checks": found})
    if lacks:
        raise typer.Exit(FAILED)


def _tell(checks: Sequence[Check]) -> None:
    columns = [
        Column("check", [check.name for check in checks]),
        Column("state", [check.state for check in checks]),
        Column("found", [visible(check.found) for check in checks]),
        Column("what to do", [visible(check.remedy) for check in checks]),
    ]
    for line in render_table(columns, stdout_width()).splitlines():
        say(line)
