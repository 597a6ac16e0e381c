"""What the verbs of `ops` share: where they run, and with which interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from itemwise.ops.targets.base import Target

TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        envvar="ITEMWISE_TARGET",
        metavar="TARGET",
        help="local, ssh://user@host:port, gcloud-tpu://NAME or gcloud-gpu://NAME.",
    ),
]
PythonOption = Annotated[
    str | None,
    typer.Option(
        "--python", metavar="PATH", help="The interpreter on the target that has itemwise; as `ops install` left it."
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


def open_target(text: str) -> Target:
    """Raises TargetError."""
    from itemwise.ops.targets.choose import open_target as choose

    return choose(text)
