"""What the fronts and the routers in their processes share: a request's ticket, and who can be sent to."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from itemwise.cluster.request_key import RequestKey

STEP_TOKENS = "step_tokens"  # what replicas call the size of their steps


@dataclass(frozen=True)
class Ticket:
    """What a request says to the router."""

    request: RequestKey
    only: str | None = None  # a replica's name: this one or none
    avoid: frozenset[str] = frozenset()  # replicas that have refused it: any other first


class KnowsReplicas(Protocol):
    """A router."""

    @property
    def replica_names(self) -> list[str]: ...


_routers: weakref.WeakSet[Any] = weakref.WeakSet()


def register_router(router: KnowsReplicas) -> None:
    """Of this process."""
    _routers.add(router)


def known_replicas() -> list[str]:
    """The names of all replicas that this process may send to."""
    return sorted({name for router in list(_routers) for name in router.replica_names})


def ticket_of(pending_request: Any) -> Ticket:
    """The one that `front.py` puts beside every request; none where Serve asks on its own behalf."""
    values = () if pending_request is None else (*pending_request.args, *pending_request.kwargs.values())
    return next((value for value in values if isinstance(value, Ticket)), Ticket(RequestKey()))
