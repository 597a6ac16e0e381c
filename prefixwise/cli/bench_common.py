"""What the verbs of `bench`, `validate` and `ops` share: options, the server line, the last line on stdout."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.flags import Verb
from prefixwise.cli.output import is_read_by_program, say, write_data
from prefixwise.cli.server_address import checked_key, checked_timeout

if TYPE_CHECKING:
    from prefixwise.bench.client import ScoreClient


ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar="PREFIXWISE_API_KEY",
        callback=checked_key,
        help="The server's API key.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout-sec",
        "--timeout",
        metavar="SECONDS",
        callback=checked_timeout,
        help="Timeout of one call, from its first byte to the last byte of the response.",
        min=0.001,
    ),
]
OutputJson = Annotated[Path, typer.Option("--output-json", metavar="FILE", help="Write the artifact here.")]
OutputMarkdown = Annotated[
    Path | None, typer.Option("--output-markdown", metavar="FILE", help="Write the artifact as Markdown, too.")
]


_json_asked: ContextVar[bool] = ContextVar("json_asked", default=False)  # --json of the verb that runs
_AsJson = Annotated[
    bool,
    typer.Option("--json", help="One line of JSON on stdout, on a terminal too; elsewhere it is always written."),
]


def with_json_line(verb: Verb) -> Verb:
    """Give a verb the option --json, for `last_line`; one that has it already is unchanged."""
    signature = inspect.signature(verb, eval_str=True)
    if "as_json" in signature.parameters:
        return verb

    @wraps(verb)
    def run(*, as_json: bool = False, **given: Any) -> None:
        token = _json_asked.set(as_json)
        try:
            verb(**given)
        finally:
            _json_asked.reset(token)

    option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_AsJson)
    parameters = [*signature.parameters.values(), option]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def last_line(result: Mapping[str, Any], *, asked: bool = False) -> None:
    """Write one JSON object, the last line on stdout, for calling programs: with --json, or if stdout is no terminal.

    `asked`: --json of a verb that has the option itself.
    """
    if asked or _json_asked.get() or is_read_by_program():
        write_data(json.dumps(result) + "\n")


def print_server_info(client: ScoreClient) -> dict[str, Any]:
    """Print what the server is on stderr, and return its whole description for the artifact."""
    from prefixwise.bench.server_facts import server_summary

    info = client.server_info()
    shown = server_summary(info) if info else f"no /server_info: {client.why_no_info()}"
    say(f"server {client.base_url}: {shown}")
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
