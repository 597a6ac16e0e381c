"""What the verbs of `bench`, `validate` and `ops` share: options, the server line, the last line on stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixwise.bench.options import check_api_key, check_timeout
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.output import say, write_data

if TYPE_CHECKING:
    from prefixwise.bench.client import ScoreClient


def _checked_key(key: str | None) -> str | None:
    """Check the key before a verb starts servers or reads files."""
    check_api_key(key)
    return key


def _checked_timeout(seconds: float) -> float:
    check_timeout(seconds)
    return seconds


ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar="PREFIXWISE_API_KEY",
        callback=_checked_key,
        help="The server's API key.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout-sec",
        "--timeout",
        metavar="SECONDS",
        callback=_checked_timeout,
        help="Timeout of one call, from its first byte to the last byte of the response.",
        min=0.001,
    ),
]
OutputJson = Annotated[Path, typer.Option("--output-json", metavar="FILE", help="Write the artifact here.")]
OutputMarkdown = Annotated[
    Path | None, typer.Option("--output-markdown", metavar="FILE", help="Write the artifact as Markdown, too.")
]


def last_line(result: Mapping[str, Any]) -> None:
    """Write one JSON object, the last line on stdout, for calling programs."""
    write_data(json.dumps(result) + "\n")


def print_server_info(client: ScoreClient) -> dict[str, Any]:
    """Print the server's own description on stderr, and return it for the artifact."""
    info = client.server_info()
    say(f"server {client.base_url}: {json.dumps(info)}" if info else f"server {client.base_url}: no /server_info")
    return info


def integers(text: str, option: str) -> list[int]:
    """Parse a list like `1,2,4`. Raises CommandError."""
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values:
        raise CommandError(f"{option} must be integers like 1,2,4, got {text!r}", status=MISUSED)
    return values
