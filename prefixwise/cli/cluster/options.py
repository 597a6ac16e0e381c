"""The options of a cluster, and what its verbs share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import typer

from prefixwise.cli.failures import CommandError
from prefixwise.cli.flags import Flag
from prefixwise.cli.serve import chosen_log_level, settle_synonyms, tell_without_effect
from prefixwise.cli.serve_options import SERVER_FLAGS
from prefixwise.cluster.options import ClusterOptions, ScaleOptions
from prefixwise.host import install_command
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions

CLUSTER_PANEL = "Cluster"

SCALE_FLAGS = {
    "replicas": Flag(int, "Engines, each with a copy of the model and devices of its own.", least=1),
    "max_replicas": Flag(
        int | None, "More than --replicas: their number follows the tokens that wait, between the two.", least=1
    ),
    "target_queued_tokens": Flag(int, "Tokens waiting on each, which the number of replicas is chosen for.", least=1),
    "fronts": Flag(int, "Processes that take HTTP requests and send them to replicas.", least=1),
    "gpus_per_replica": Flag(float, "GPUs of each replica; a fraction: several replicas share one.", least=0),
    "tpu_chips_per_replica": Flag(int, "TPU chips of each replica.", least=0),
    "cpus_per_replica": Flag(float, "CPU cores that Ray keeps for each replica.", least=0),
    "max_ongoing_requests": Flag(int, "Most requests on one replica; its queue is bounded in tokens besides.", least=1),
    "patience": Flag(
        float, "Steps that a request waits for the replica that has its prefix, before it goes elsewhere.", least=0
    ),
    "share": Flag(float, "Times the average load that a replica carries before its requests go elsewhere.", least=1),
}

# Replicas run on machines of their own, where no folder of reports is.
CLUSTER_SERVER_FLAGS = {name: flag for name, flag in SERVER_FLAGS.items() if name != "reports_dir"}


def cluster_options(
    context: typer.Context, engine: EngineOptions, server: ServerOptions, scale: ScaleOptions
) -> ClusterOptions:
    """In our own words, with every name that the model is served under. Raises CommandError."""
    if server.port == 0:
        raise CommandError("--port must be one that all nodes can have, from 1 to 65535, got 0")
    tell_without_effect(engine, trust_remote_code=False)
    engine = settle_synonyms(engine)
    level = chosen_log_level(context, server.log_level)
    return ClusterOptions(engine, replace(server, served_model_names=engine.served_names, log_level=level), scale)


@contextmanager
def needing_ray() -> Iterator[None]:
    """Its absence is one clear line."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("ray", "yaml"):
            raise
        hint = f"install what a cluster needs with: {install_command('cluster')}"
        raise CommandError(f"{package} is not installed", hint=hint) from None
