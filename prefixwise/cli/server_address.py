"""`--url` of `score`, `rerank` and `batch`: a server that is running scores, in place of a model in this process."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.flags import Flag, is_typed
from prefixwise.contract.client_settings import check_api_key, check_timeout
from prefixwise.contract.errors import PrefixwiseWarning

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prefixwise.client.client import Client

server_option = partial(typer.Option, rich_help_panel="Server")


def checked_key(key: str | None) -> str | None:
    """Check the key before a verb reads files or starts servers."""
    check_api_key(key)
    return key


def checked_timeout(seconds: float) -> float:
    """Check the time limit before a verb reads files or starts servers."""
    check_timeout(seconds)
    return seconds


Url = Annotated[
    str | None,
    server_option(
        "--url", metavar="URL", help="Ask the server at this address, as http://127.0.0.1:30000; no model is loaded."
    ),
]
ApiKey = Annotated[
    str | None,
    server_option(
        "--api-key", metavar="KEY", envvar="PREFIXWISE_API_KEY", callback=checked_key, help="The server's API key."
    ),
]
Timeout = Annotated[
    float,
    server_option(
        "--timeout-sec",
        "--timeout",
        metavar="SECONDS",
        callback=checked_timeout,
        help="Timeout of one request to the server, with its retries.",
        min=0.001,
    ),
]


@dataclass(frozen=True)
class ServerAddress:
    """A server, the key that it wants, and the time that it has for a request."""

    url: str
    api_key: str | None
    timeout_sec: float

    def open(self, *, max_connections: int = 1, max_retries: int = 3) -> Client:
        """A client of the server. Raises ClientSettingError for a wrong address."""
        from prefixwise.client.client import Client

        warnings.simplefilter("ignore", PrefixwiseWarning)  # the verbs print what results warn of
        return Client(
            self.url,
            api_key=self.api_key,
            timeout=self.timeout_sec,
            max_connections=max_connections,
            max_retries=max_retries,
        )


def server_address(
    context: typer.Context,
    url: str | None,
    api_key: str | None,
    timeout_sec: float,
    local: Mapping[str, Flag],
    also: Iterable[str] = (),
) -> ServerAddress | None:
    """The server that was asked for; None: this process scores. Raises CommandError.

    `local`: the options, by field, that only a model in this process has; `also`: names of other such options.
    """
    if url is None:
        for name in ("api_key", "timeout_sec"):
            if is_typed(context, name):
                option = f"--{name.replace('_', '-')}"
                raise CommandError(f"{option} is for --url, which was not given", status=MISUSED)
        return None
    names = {field: flag.name or f"--{field.replace('_', '-')}" for field, flag in local.items()}
    names = {field: name.partition("/")[0] for field, name in names.items()}  # of a switch for on and off, the first
    names |= {name: f"--{name.replace('_', '-')}" for name in also}
    typed = [name for field, name in names.items() if is_typed(context, field)]
    if typed:
        message = f"expected --url without {', '.join(typed)}: the server has its own model and engine"
        raise CommandError(message, status=MISUSED)
    return ServerAddress(url, api_key, timeout_sec)
