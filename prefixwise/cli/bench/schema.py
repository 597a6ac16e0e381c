"""`prefixwise bench schema`: the JSON Schema of an artifact, for tools that read or write one."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from prefixwise.cli.bench_common import last_line
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.output import say, write_data

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Of an artifact; all names when left out.")]


def bench_schema(name: Name = None) -> None:
    """Print the JSON Schema (2020-12) of an artifact, or list the artifacts."""
    from prefixwise.bench.kinds.registry import MODELED_KINDS, json_schema, kind_named
    from prefixwise.contract.errors import ArtifactError

    if name is None:
        for kind in MODELED_KINDS:
            say(f"{kind.name:20} {kind.title}")
        last_line({"schemas": [kind.name for kind in MODELED_KINDS]})
        return
    try:
        found = kind_named(name)
    except ArtifactError as error:
        raise CommandError(str(error), status=MISUSED) from None
    write_data(json.dumps(json_schema(found)) + "\n")
