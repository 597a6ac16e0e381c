"""What the verbs of `bench` and `validate` share: options, the first words, the last line, the progress bar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixwise.bench.client_settings import check_api_key, check_timeout
from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.output import say, write_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefixwise.bench.client import ScoreClient


def _checked_key(key: str | None) -> str | None:
    """Before a verb starts servers or reads files for it."""
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
        help="The server's key, where it asks for one.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout-sec",
        metavar="SECONDS",
        callback=_checked_timeout,
        help="For one call, from its first byte to its answer's last.",
        min=0.001,
    ),
]
OutputJson = Annotated[Path, typer.Option("--output-json", metavar="FILE", help="Where the artifact goes.")]
OutputMarkdown = Annotated[
    Path | None, typer.Option("--output-markdown", metavar="FILE", help="The same for people, as Markdown.")
]


def last_line(result: Mapping[str, Any]) -> None:
    """One JSON object, the last line on stdout: for programs that call this one."""
    write_data(json.dumps(result) + "\n")


def tell_server(client: ScoreClient) -> dict[str, Any]:
    """Say on stderr which server this is, in its own words; what it says is in the artifact, too."""
    info = client.server_info()
    say(f"server {client.base_url}: {json.dumps(info)}" if info else f"server {client.base_url}: it tells nothing")
    return info


def integers(text: str, option: str) -> list[int]:
    """`1,2,4` as the origin's command lines spell lists. Raises CommandError."""
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values:
        raise CommandError(f"{option} must be integers like 1,2,4, got {text!r}", status=MISUSED)
    return values


@contextmanager
def step_progress(total: int, what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, plain lines elsewhere: call it with a title when the next of `total` steps begins."""
    import sys

    done = 0
    if quiet:
        yield lambda title: None
        return
    if not sys.stderr.isatty():

        def tell(title: str) -> None:
            nonlocal done
            done += 1
            say(f"[{done}/{total}] {what}: {title}")

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)

        def advance(title: str) -> None:
            nonlocal done
            progress.update(task, completed=done, description=f"{what}: {title}")
            done += 1

        yield advance
