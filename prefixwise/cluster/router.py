"""Ray Serve's request router for engine replicas: `routing.py` decides, from what this process sees and replicas say.

One lives in every process that has a handle to the replicas, which are the fronts. It knows the tokens that its front
has sent to each replica and that have not come back; every second or so it hears from each how many it has in all. The
first is of this moment and sees one front, the second is old and sees all: `estimate_tokens` makes one of the two.

Serve sends this class to every process by value, with a copy of all that is defined in this file: what must be the same
object for others stands in `tickets.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import sample
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from prefixwise.cluster.routing import ReplicaLoad, RoutingOptions, estimate_tokens, order_replicas
from prefixwise.cluster.scaling import QUEUED_TOKENS
from prefixwise.cluster.tickets import STEP_TOKENS, ledger, register_router, ticket_of

_UNKNOWN_STEP = 2048  # until a replica has told its own


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """The home of the query first, unless it is overloaded."""

    def initialize_state(self, **options: Any) -> None:
        """With the `request_router_kwargs` of the deployment."""
        self._options = RoutingOptions(**options)
        register_router(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica is a rank of its own: the next one is tried where one takes no more requests at all."""
        # In another order each time: among equals the first is taken, which must not be the same one for all fronts.
        shuffled = sample(candidate_replicas, len(candidate_replicas))
        by_name = {name_of(replica.replica_id): replica for replica in shuffled}
        ticket = ticket_of(pending_request)
        if ticket.only is not None:
            return [[by_name[ticket.only]]] if ticket.only in by_name else [candidate_replicas]  # any refuses it
        ledger().assign(ticket, None)  # asked again, it must not see its own tokens
        ordered = order_replicas(ticket.request.key, self._loads(by_name), self._options)
        ordered.sort(key=lambda name: name in ticket.avoid)  # stable
        if ordered:
            ledger().assign(ticket, ordered[0])
        return [[by_name[name]] for name in ordered]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It may be another one than the first."""
        ledger().assign(ticket_of(pending_request), name_of(replica_id))

    @property
    def replica_names(self) -> list[str]:
        return [name_of(replica_id) for replica_id in list(self.curr_replicas)]  # another thread may change it

    def _loads(self, replicas: Mapping[str, RunningReplica]) -> dict[str, ReplicaLoad]:
        said: dict[str, Mapping[str, Any]] = {name: each.routing_stats or {} for name, each in replicas.items()}
        queued = {name: int(stats.get(QUEUED_TOKENS, 0)) for name, stats in said.items()}
        tokens = estimate_tokens(ledger().tokens(), queued)
        return {
            name: ReplicaLoad(tokens[name], int(stats.get(STEP_TOKENS, _UNKNOWN_STEP))) for name, stats in said.items()
        }


def name_of(replica_id: ReplicaID) -> str:
    """As metrics and headers show it."""
    name: str = replica_id.unique_id
    return name
