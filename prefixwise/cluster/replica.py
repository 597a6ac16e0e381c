"""A replica: an engine and the whole server application around it, without a port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray import serve

from prefixwise.cluster.exchange import REPLICA_HEADER, HttpRequest, HttpResponse, answer
from prefixwise.cluster.options import ClusterOptions, Secret
from prefixwise.cluster.routing import QUEUED_TOKENS
from prefixwise.cluster.tickets import STEP_TOKENS, Ticket
from prefixwise.launch.loading import load_engine, resolved_config
from prefixwise.server.app import make_app
from prefixwise.server.logs import set_up_logging
from prefixwise.server.service import Service

log = logging.getLogger("prefixwise")

_MISDIRECTED = 421


class EngineReplica:
    """Serve sends requests once the engine is loaded and warm."""

    async def __init__(self, options: Mapping[str, Any], api_key: Secret) -> None:  # type: ignore[misc]  # Serve awaits it
        chosen = ClusterOptions.from_json(options).with_key(api_key.value)
        set_up_logging(chosen.server)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._service = Service(chosen.server)
        self._engine = await asyncio.to_thread(load_engine, chosen.engine)
        configuration = resolved_config(chosen.engine, self._engine)
        self._service.open(self._engine, {**chosen.server.describe(), **configuration, "replica": self._name})
        self._app = make_app(self._service)
        log.info("replica %s is ready", self._name)

    async def answer(self, request: HttpRequest, ticket: Ticket) -> HttpResponse:
        """The response of a single server, with the replica's name. A request for another replica is refused unread."""
        if ticket.only not in (None, self._name):
            return HttpResponse(_MISDIRECTED, (), b"").with_header(REPLICA_HEADER, self._name.encode())
        response = await answer(self._app, request)
        return response.with_header(REPLICA_HEADER, self._name.encode())

    def record_routing_stats(self) -> dict[str, int]:
        """Serve's hook: sent to the routers."""
        return {
            QUEUED_TOKENS: self._engine.scheduler.admission.tokens,
            STEP_TOKENS: self._engine.backend.info.step_tokens,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: sent to the autoscaler."""
        return {QUEUED_TOKENS: float(self._engine.scheduler.admission.tokens)}

    def check_health(self) -> None:
        """Raises where the device hangs or has failed, or the scheduler has died: Serve then replaces the replica."""
        self._engine.scheduler.health.check()

    def __del__(self) -> None:
        """Serve deletes the replica when nothing is in flight."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()
            self._service.close()
