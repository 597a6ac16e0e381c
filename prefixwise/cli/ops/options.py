"""What the verbs of `ops` share: the target, its interpreter, the folder of the run, and checks of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from prefixwise.cli.engine_options import DtypeName
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.output import say
from prefixwise.cli.validate.options import split_server_flags

if TYPE_CHECKING:
    from prefixwise.bench.remote.targets.base import Target

TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        envvar="PREFIXWISE_TARGET",
        metavar="TARGET",
        help="local, ssh://user@host:port, gcloud-tpu://NAME or gcloud-gpu://NAME. "
        "Default: gcloud-tpu://$TPU_NAME if set, else local.",
    ),
]
ProjectOption = Annotated[
    str | None, typer.Option("--project", metavar="NAME", help="Project of a gcloud target; default: $PROJECT.")
]
ZoneOption = Annotated[
    str | None,
    typer.Option("--zone", metavar="NAME", help="Zone of a gcloud target; default: $TPU_ZONE or $GPU_ZONE."),
]
PythonOption = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="PATH",
        help="The interpreter on the target that has prefixwise; default: the one of `ops install`.",
    ),
]
ArtifactRoot = Annotated[
    str, typer.Option("--artifact-root", metavar="DIR", help="The folder of all runs on the target.")
]
ArtifactSubdir = Annotated[
    str | None,
    typer.Option(
        "--artifact-subdir",
        envvar="ARTIFACT_SUBDIR",
        metavar="NAME",
        help="The run's folder; an existing one is resumed. Default: a new one with a time stamp.",
    ),
]
TakeOver = Annotated[
    bool, typer.Option("--take-over", metavar="", help="Stop a run that is still active on the target.")
]


def open_target(text: str | None, project: str | None = None, zone: str | None = None) -> Target:
    """Open the named or the default target; print a default that is not local. Raises TargetError, CommandError."""
    from prefixwise.bench.remote.targets.choose import default_target
    from prefixwise.bench.remote.targets.choose import open_target as choose

    chosen = text or default_target()
    for option, value in (("--project", project), ("--zone", zone)):
        if value is not None and not chosen.startswith("gcloud-"):
            expected = "gcloud-tpu:// and gcloud-gpu:// targets"
            raise CommandError(f"{option} is for {expected}, got the target {chosen}", status=MISUSED)
    if not text and chosen != "local":
        say(f"TPU_NAME is set and --target is not: the target is {chosen}")
    return choose(chosen, project=project, zone=zone)


def checked_root(root: str) -> str:
    """The folder of runs; an empty name would be the root of the disk. Raises CommandError."""
    if not root.strip():
        raise CommandError("--artifact-root must be a folder, got nothing", status=MISUSED)
    return root


def checked_dtype(dtype: str) -> str:
    """The dtype of all servers of a run. Raises CommandError."""
    if dtype not in get_args(DtypeName):
        raise CommandError(f"--dtype must be one of {', '.join(get_args(DtypeName))}, got {dtype!r}", status=MISUSED)
    return dtype


def checked_server_flags(flags: Sequence[str] | None) -> tuple[str, ...]:
    """The flags split like a shell does. Raises CommandError for a key: artifacts and process lists would show it."""
    split = split_server_flags(flags)
    if any(flag == "--api-key" or flag.startswith("--api-key=") for flag in split):
        message = "--api-key cannot be a server flag: the servers that ops starts have no key"
        raise CommandError(message, status=MISUSED)
    return split
