"""Ray Serve's request router for engine replicas: it collects the loads, and `routing.py` decides.

There is one in every process with a handle to the replicas, which are the fronts. It knows the tokens that its front
has in flight on each replica, and about every second each replica reports all its tokens. The first number is current
but of one front, the second is old but of all: `estimate_tokens` combines them.

Serve sends this class to every process by value, with a copy of everything defined in this file. Objects that a process
must share are therefore in `tickets.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import sample
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from prefixwise.cluster.routing import QUEUED_TOKENS, ReplicaLoad, RoutingOptions, estimate_tokens, order_replicas
from prefixwise.cluster.tickets import STEP_TOKENS, ledger, register_router, ticket_of

_DEFAULT_STEP_TOKENS = 2048  # until a replica has reported its own


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the query's home, unless it is overloaded."""

    def initialize_state(self, **options: Any) -> None:
        """With the `request_router_kwargs` of the deployment."""
        self._options = RoutingOptions(**options)
        register_router(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank: Serve tries the next one where a replica accepts no more requests."""
        # Shuffled: among equals the first wins, and it must not be the same one for all fronts.
        shuffled = sample(candidate_replicas, len(candidate_replicas))
        by_name = {name_of(replica.replica_id): replica for replica in shuffled}
        ticket = ticket_of(pending_request)
        if ticket.only is not None:
            return [[by_name[ticket.only]]] if ticket.only in by_name else [candidate_replicas]  # any other refuses it
        ledger().assign(ticket, None)  # on a second call the request's own tokens must not count
        ordered = order_replicas(ticket.request.key, self._loads(by_name), self._options)
        ordered.sort(key=lambda name: name in ticket.avoid)  # stable
        if ordered:
            ledger().assign(ticket, ordered[0])
        return [[by_name[name]] for name in ordered]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve may have chosen another replica than the first."""
        ledger().assign(ticket_of(pending_request), name_of(replica_id))

    @property
    def replica_names(self) -> list[str]:
        return [name_of(replica_id) for replica_id in list(self.curr_replicas)]  # another thread may change it

    def _loads(self, replicas: Mapping[str, RunningReplica]) -> dict[str, ReplicaLoad]:
        reports: dict[str, Mapping[str, Any]] = {name: each.routing_stats or {} for name, each in replicas.items()}
        queued = {name: int(stats.get(QUEUED_TOKENS, 0)) for name, stats in reports.items()}
        tokens = estimate_tokens(ledger().tokens(), queued)
        return {
            name: ReplicaLoad(tokens[name], int(stats.get(STEP_TOKENS, _DEFAULT_STEP_TOKENS)))
            for name, stats in reports.items()
        }


def name_of(replica_id: ReplicaID) -> str:
    """The name in metrics and headers."""
    name: str = replica_id.unique_id
    return name
