"""What the verbs of `ops` share: where they run, and with which interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.output import say

if TYPE_CHECKING:
    from prefixwise.bench.remote.targets.base import Target

TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        envvar="PREFIXWISE_TARGET",
        metavar="TARGET",
        help="local, ssh://user@host:port, gcloud-tpu://NAME or gcloud-gpu://NAME. "
        "When left out: gcloud-tpu://$TPU_NAME where that is set, else local.",
    ),
]
ProjectOption = Annotated[
    str | None, typer.Option("--project", metavar="NAME", help="Of a gcloud target; $PROJECT when left out.")
]
ZoneOption = Annotated[
    str | None,
    typer.Option("--zone", metavar="NAME", help="Of a gcloud target; $TPU_ZONE or $GPU_ZONE when left out."),
]
PythonOption = Annotated[
    str | None,
    typer.Option(
        "--python", metavar="PATH", help="The interpreter on the target that has prefixwise; as `ops install` left it."
    ),
]
ArtifactRoot = Annotated[
    str, typer.Option("--artifact-root", metavar="DIR", help="On the target: where the folders of runs are.")
]
ArtifactSubdir = Annotated[
    str | None,
    typer.Option(
        "--artifact-subdir",
        envvar="ARTIFACT_SUBDIR",
        metavar="NAME",
        help="The folder of the run; one that is there is gone on with. A new one with a time stamp when left out.",
    ),
]
TakeOver = Annotated[
    bool, typer.Option("--take-over", metavar="", help="End a run that is still under way on the target.")
]


def open_target(text: str | None, project: str | None = None, zone: str | None = None) -> Target:
    """One that nobody has named, and is not this machine, is said. Raises TargetError, CommandError."""
    from prefixwise.bench.remote.targets.choose import default_target
    from prefixwise.bench.remote.targets.choose import open_target as choose

    chosen = text or default_target()
    for option, value in (("--project", project), ("--zone", zone)):
        if value is not None and not chosen.startswith("gcloud-"):
            expected = "gcloud-tpu:// and gcloud-gpu:// targets"
            raise CommandError(f"{option} is for {expected}, got the target {chosen}", status=MISUSED)
    if not text and chosen != "local":
        say(f"TPU_NAME is set, and no --target given: the target is {chosen}")
    return choose(chosen, project=project, zone=zone)
