"""The Ray Serve application: `build_app` for a Serve configuration, `deploy` for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from prefixwise.cluster.front import Front
from prefixwise.cluster.options import ClusterOptions, ScaleOptions, Secret
from prefixwise.cluster.proxy import PROXY_GRACE
from prefixwise.cluster.replica import EngineReplica
from prefixwise.server.config import ServerOptions

APP_NAME = "prefixwise"
REPLICAS = "replica"  # the deployments' names, as Serve's dashboard shows them
FRONTS = "front"

_ROUTER = "prefixwise.cluster.router.PrefixRouter"
_POLICY = "prefixwise.cluster.routing:QueuedTokensPolicy"
_STATS_SECONDS = 0.5  # between a replica's reports to the routers
_REPORT_SECONDS = 1.0  # between a replica's reports to the autoscaler
_LOOK_BACK_SECONDS = 5.0  # over which queued tokens are averaged
_UPSCALE_SECONDS = 10.0  # of too many queued tokens before replicas are added: loading takes a while
_DOWNSCALE_SECONDS = 300.0  # of few queued tokens before a replica is removed, with its KV cache
_HEALTH_SECONDS = 5.0
_FRONT_CPUS = 0  # a front mostly waits, and must fit on a machine that replicas fill


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """From a configuration's `args`, which are those of `ClusterOptions`. Raises PrefixwiseError."""
    return make_app(ClusterOptions.from_json(args))


def make_app(options: ClusterOptions, api_key: str | None = None) -> serve.Application:
    """Without a key, replicas use the key of their own environment, if there is one."""
    scale, server = options.scale, options.server
    replicas = serve.deployment(EngineReplica).options(
        name=REPLICAS,
        ray_actor_options=_resources(scale),
        max_ongoing_requests=scale.max_ongoing_requests,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER,
            request_router_kwargs={"max_wait_steps": scale.max_wait_steps, "share": scale.share},
            request_routing_stats_period_s=_STATS_SECONDS,
        ),
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=server.shutdown_grace,
        **_count(scale),
    )
    fronts = serve.deployment(Front).options(
        name=FRONTS,
        num_replicas=scale.fronts,
        ray_actor_options={"num_cpus": _FRONT_CPUS},
        max_ongoing_requests=scale.max_ongoing_requests * (scale.max_replicas or scale.replicas),
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=max(server.shutdown_grace, server.request_timeout),  # only it has its requests
    )
    arguments = (options.to_json(), Secret(api_key))
    return fronts.bind(replicas.bind(*arguments), *arguments)


def _resources(scale: ScaleOptions) -> dict[str, Any]:
    chips = {"resources": {"TPU": scale.tpu_chips_per_replica}} if scale.tpu_chips_per_replica else {}
    return {"num_cpus": scale.cpus_per_replica, "num_gpus": scale.gpus_per_replica, **chips}


def _count(scale: ScaleOptions) -> dict[str, Any]:
    if not scale.scales:
        return {"num_replicas": scale.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scale.replicas,
            max_replicas=scale.max_replicas,
            metrics_interval_s=_REPORT_SECONDS,
            look_back_period_s=_LOOK_BACK_SECONDS,
            upscale_delay_s=_UPSCALE_SECONDS,
            downscale_delay_s=_DOWNSCALE_SECONDS,
            policy=AutoscalingPolicy(
                policy_function=_POLICY, policy_kwargs={"target_queued_tokens": scale.target_queued_tokens}
            ),
        )
    }


def deploy(options: ClusterOptions) -> None:
    """Start Serve where it does not run, and start or update the application. Returns when the application is ready."""
    server = options.server
    serve.start(proxy_location="EveryNode", http_options=_http_options(server))
    serve.run(make_app(options, server.api_key), name=APP_NAME, route_prefix="/")


def _http_options(server: ServerOptions) -> dict[str, Any]:
    """With a time limit for proxies whose front does not answer."""
    limit = {"request_timeout_s": server.request_timeout + PROXY_GRACE} if server.request_timeout else {}
    return {"host": server.host, "port": server.port, **limit}


def is_deployed() -> bool:
    """Whether this cluster has the application, in any state."""
    return APP_NAME in serve.status().applications


def remove() -> None:
    """End the application; requests in flight are answered first."""
    serve.delete(APP_NAME)


def serve_configuration(options: ClusterOptions) -> dict[str, Any]:
    """The configuration for `serve deploy` and for a RayService of KubeRay."""
    return {
        "proxy_location": "EveryNode",
        "http_options": _http_options(options.server),
        "applications": [
            {
                "name": APP_NAME,
                "route_prefix": "/",
                "import_path": f"{__name__}:build_app",
                "args": options.to_json(),
            }
        ],
    }
