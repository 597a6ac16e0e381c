"""`prefixwise cluster serve`: the application on a Ray cluster, a new one on this machine where there is none."""

from __future__ import annotations

import signal
import threading
from typing import Annotated, Any

import typer

from prefixwise.cli.cluster.options import CLUSTER_PANEL, cluster_options, needing_ray
from prefixwise.cli.failures import CommandError
from prefixwise.cli.output import say
from prefixwise.cluster.addresses import check_reachable
from prefixwise.cluster.options import ClusterOptions, ScaleOptions
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Address = Annotated[
    str,
    typer.Option(
        help="The Ray cluster: auto (the one that runs here, else a new one on this machine), local (a new one), "
        "or an address like ray://head:10001.",
        metavar="ADDRESS",
        rich_help_panel=CLUSTER_PANEL,
    ),
]
Detach = Annotated[
    bool,
    typer.Option(
        "--detach",
        help="Return when it is ready, and leave it running; only on a cluster that runs without this command.",
        metavar="",
        rich_help_panel=CLUSTER_PANEL,
    ),
]


def serve(
    context: typer.Context,
    address: Address = "auto",
    detach: Detach = False,
    *,
    engine: EngineOptions,
    server: ServerOptions,
    scale: ScaleOptions,
) -> None:
    """Serve on a Ray cluster: replicas of the engine behind one address, with the HTTP API of `prefixwise serve`.

    On a cluster where it runs already, replicas are replaced one after the other: another model without a failed
    request. Ctrl-C ends what this command began, not what it changed.
    """
    options = cluster_options(context, engine, server, scale)
    with needing_ray():
        from prefixwise.cluster import serve_app
        from prefixwise.cluster.connection import connected
    with connected(address) as is_new:
        if is_new:
            say("no Ray cluster is used that runs already: this one is new, and ends with this command")
        if detach and is_new:
            raise CommandError(
                "--detach needs a Ray cluster that runs already", hint="start one with: ray start --head"
            )
        is_ours = _deploy(serve_app, options)
        if not address.startswith("ray://"):  # else the cluster's addresses are not this machine's
            _check_answers(options.server)
        say(f"ready on http://{server.host}:{server.port}: {scale.replicas} replicas; Ray's dashboard shows them")
        if not detach:
            _wait_for_signal()
            if is_ours:
                serve_app.remove()


def _deploy(serve_app: Any, options: ClusterOptions) -> bool:
    """Whether it was not there before. What this command began and did not finish is removed again."""
    was_there = serve_app.is_deployed()
    try:
        serve_app.deploy(options)
    except RuntimeError as error:  # how Serve says that an application did not come up
        raise CommandError(f"the application could not be started: {error}") from None
    except BaseException:
        if not was_there:
            serve_app.remove()
        raise
    return not was_there


def _check_answers(server: ServerOptions) -> None:
    """Where Serve runs already it keeps the address that it has, whatever is asked for."""
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    try:
        check_reachable(f"{host}:{server.port}")
    except ConnectionError as error:
        message = f"the application runs, and nothing answers on {host} port {server.port}: {error}"
        hint = (
            "Serve runs on this cluster with another --host or --port: ask for that one, or end it with: serve shutdown"
        )
        raise CommandError(message, hint=hint) from None


def _wait_for_signal() -> None:
    """Until the first one. A second is anybody's: it ends the process in the usual way."""
    stopped = threading.Event()
    previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def stop(number: int, frame: object) -> None:
        stopped.set()

    for number in _SIGNALS:
        signal.signal(number, stop)
    try:
        stopped.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
