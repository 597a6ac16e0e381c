"""`prefixwise cluster`: `serve` starts the application on a Ray cluster, `config` prints it as a Serve configuration.

Both take the options of `prefixwise serve` and those of a cluster.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from prefixwise.cli.commands import Verbs
from prefixwise.cli.failures import CommandError, needing
from prefixwise.cli.flags import Flag, with_flags
from prefixwise.cli.output import say, write_data
from prefixwise.cli.serve import (
    CONNECTION_FLAGS,
    ENGINE_PANEL,
    SERVE_DEFAULTS,
    SERVE_ENGINE_FLAGS,
    SERVER_FLAGS,
    SERVER_PANEL,
    chosen_log_level,
    first_spelling,
    needing_server,
    normalize_synonyms,
    warn_without_effect,
    warn_without_key,
)
from prefixwise.cli.sglang_flags import ServeCommand, without_effect
from prefixwise.cluster.connection import check_reachable, connected
from prefixwise.cluster.options import API_KEY_VARIABLE, ClusterOptions, ScaleOptions
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions

CLUSTER_PANEL = "Cluster"

SCALE_FLAGS = {
    "replicas": Flag(int, "Engines, each with a copy of the model and devices of its own.", least=1),
    "max_replicas": Flag(
        int | None, "More than --replicas: the number of replicas follows the queued tokens, between the two.", least=1
    ),
    "target_queued_tokens": Flag(int, "Queued tokens per replica that autoscaling aims for.", least=1),
    "fronts": Flag(int, "Processes that receive HTTP requests and send them to replicas.", least=1),
    "gpus_per_replica": Flag(float, "GPUs of each replica; a fraction: several replicas share one.", least=0),
    "tpu_chips_per_replica": Flag(int, "TPU chips of each replica.", least=0),
    "cpus_per_replica": Flag(float, "CPU cores that Ray reserves for each replica.", least=0),
    "max_ongoing_requests": Flag(int, "Most requests on one replica; its queue also has a bound in tokens.", least=1),
    "max_wait_steps": Flag(
        float, "Steps that a request waits for the replica with its cached prefix, before it goes elsewhere.", least=0
    ),
    "share": Flag(float, "Times the average load that a replica carries before its requests go elsewhere.", least=1),
}

# Replicas run on other machines, which have no folder of reports. Serve's proxies own the connections.
# A LoRA adapter that a client loads would reach one replica; those of --lora are loaded by all.
_NOT_OF_REPLICAS = ("reports_dir", "http_workers", "allow_runtime_lora_updating", *CONNECTION_FLAGS)
CLUSTER_SERVER_FLAGS = {name: flag for name, flag in SERVER_FLAGS.items() if name not in _NOT_OF_REPLICAS}


def cluster_options(
    context: typer.Context, engine: EngineOptions, server: ServerOptions, scale: ScaleOptions
) -> ClusterOptions:
    """The cluster's options, with synonyms of options resolved. Raises CommandError."""
    if server.port == 0:
        raise CommandError("--port must be from 1 to 65535, the same on all nodes, got 0")
    warn_without_effect(engine, trust_remote_code=False, others=without_effect(context))
    warn_without_key(server)
    engine = normalize_synonyms(engine)
    level = chosen_log_level(context, server.log_level)
    return ClusterOptions(engine, replace(server, served_model_names=engine.served_names, log_level=level), scale)


needing_ray = partial(needing, ("ray", "yaml"), "a cluster", "cluster")

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

    Where the application runs already, its replicas are replaced one after another: a new model without a failed
    request. Ctrl-C ends an application that this command started, not one that it updated.
    """
    options = cluster_options(context, engine, server, scale)
    with needing_ray(), needing_server():
        from prefixwise.cluster import serve_app
    with connected(address) as is_new:
        if is_new:
            say("started a new Ray cluster, which ends with this command")
        if detach and is_new:
            raise CommandError("--detach needs a running Ray cluster", hint="start one with: ray start --head")
        is_ours = _deploy(serve_app, options)
        if not address.startswith("ray://"):  # else the cluster's addresses are not this machine's
            _check_answers(options.server)
        say(f"ready on http://{server.host}:{server.port}: {scale.replicas} replicas; Ray's dashboard shows them")
        if not detach:
            _wait_for_signal()
            if is_ours:
                serve_app.remove()


def _deploy(serve_app: Any, options: ClusterOptions) -> bool:
    """Deploy; returns whether the application is new. A new one that does not come up is removed again."""
    existed = serve_app.is_deployed()
    try:
        serve_app.deploy(options)
    except RuntimeError as error:  # Serve raises it where the application does not come up
        raise CommandError(f"the application could not be started: {error}") from None
    except BaseException:
        if not existed:
            serve_app.remove()
        raise
    return not existed


def _check_answers(server: ServerOptions) -> None:
    """Raises CommandError where nothing answers: a running Serve keeps its address, whatever --host and --port say."""
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    try:
        check_reachable(f"{host}:{server.port}")
    except ConnectionError as error:
        message = f"the application runs, but nothing answers on {host} port {server.port}: {error}"
        hint = (
            "Serve runs on this cluster with another --host or --port: ask for that one, or end it with: serve shutdown"
        )
        raise CommandError(message, hint=hint) from None


def _wait_for_signal() -> None:
    """Wait for the first signal. A second one ends the process in the usual way."""
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


def config(context: typer.Context, *, engine: EngineOptions, server: ServerOptions, scale: ScaleOptions) -> None:
    """Print the Serve configuration (YAML) of what `prefixwise cluster serve` would start with the same options.

    `serve deploy FILE` starts it, and replaces a running one without a failed request where only the model differs.
    """
    options = cluster_options(context, engine, server, scale)
    with needing_ray(), needing_server():
        import yaml

        from prefixwise.cluster.serve_app import serve_configuration
    write_data(yaml.safe_dump(serve_configuration(options), sort_keys=False, allow_unicode=True))
    if server.api_key is not None:
        say(f"the key is not printed: replicas read {API_KEY_VARIABLE} from their own environment")


cluster = Verbs()


def _with_all_options(verb: Callable[..., None]) -> Callable[..., Any]:
    verb = with_flags("engine", EngineOptions, SERVE_ENGINE_FLAGS, panel=ENGINE_PANEL, **SERVE_DEFAULTS)(verb)
    verb = with_flags("server", ServerOptions, CLUSTER_SERVER_FLAGS, panel=SERVER_PANEL)(verb)
    return with_flags("scale", ScaleOptions, SCALE_FLAGS, panel=CLUSTER_PANEL)(verb)


for _name, _verb in {"serve": serve, "config": config}.items():
    cluster.command(_name, cls=ServeCommand, context_settings={"token_normalize_func": first_spelling})(
        _with_all_options(_verb)
    )
