"""`prefixwise cluster config`: the application as a Serve configuration, for `serve deploy` and for KubeRay."""

from __future__ import annotations

import typer

from prefixwise.cli.cluster.options import cluster_options, needing_ray
from prefixwise.cli.output import say, write_data
from prefixwise.cluster.options import API_KEY_VARIABLE, ScaleOptions
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions


def config(context: typer.Context, *, engine: EngineOptions, server: ServerOptions, scale: ScaleOptions) -> None:
    """Print the Serve configuration (YAML) of what `prefixwise cluster serve` would start with the same options.

    `serve deploy FILE` starts it, and starts it anew where only the model has changed, without a failed request.
    """
    options = cluster_options(context, engine, server, scale)
    with needing_ray():
        import yaml

        from prefixwise.cluster.serve_app import serve_configuration
    write_data(yaml.safe_dump(serve_configuration(options), sort_keys=False, allow_unicode=True))
    if server.api_key is not None:
        say(f"the key is not printed: replicas read {API_KEY_VARIABLE} from their own environment")
