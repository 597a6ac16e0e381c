"""State that a front and the routers of its process share: tickets of requests, tokens in flight, known replicas."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from prefixwise.cluster.routing import RequestKey

STEP_TOKENS = "step_tokens"  # the key of a replica's report: tokens that one step computes
_numbers = count()


@dataclass(frozen=True)
class Ticket:
    """A request, as the router sees it."""

    request: RequestKey
    only: str | None = None  # the only replica that may answer
    avoid: frozenset[str] = frozenset()  # replicas that have refused it: tried last
    number: int = field(default_factory=lambda: next(_numbers), compare=False)  # of all tickets of this process


class Ledger:
    """Tokens that this process has in flight on each replica.

    The front opens a ticket before it sends the request and closes it when it has the response; in between the router
    assigns it to a replica. (Serve's own hooks do not suffice: over gRPC a router learns that a request was accepted
    only once it is answered, so a request that the first choice had no room for would count there until then.) Front
    and router may run in two threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replicas: dict[int, str | None] = {}  # by the number of each open ticket
        self._tokens: dict[str, int] = {}  # by replica

    @contextmanager
    def open(self, ticket: Ticket) -> Iterator[None]:
        with self._lock:
            self._replicas[ticket.number] = None
        try:
            yield
        finally:
            with self._lock:
                self._add(self._replicas.pop(ticket.number), -ticket.request.tokens)

    def assign(self, ticket: Ticket, replica: str | None) -> None:
        """Move the ticket to this replica, or to none. Closed tickets are ignored."""
        tokens = ticket.request.tokens
        with self._lock:
            if ticket.number in self._replicas:
                self._add(self._replicas[ticket.number], -tokens)
                self._replicas[ticket.number] = replica
                self._add(replica, tokens)

    def _add(self, replica: str | None, tokens: int) -> None:
        if replica is None:
            return
        self._tokens[replica] = self._tokens.get(replica, 0) + tokens
        if not self._tokens[replica]:  # replicas come and go
            del self._tokens[replica]

    def tokens(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._tokens)


_ledger = Ledger()


def ledger() -> Ledger:
    """The ledger of this process."""
    return _ledger


class KnowsReplicas(Protocol):
    """A router."""

    @property
    def replica_names(self) -> list[str]: ...


_routers: weakref.WeakSet[Any] = weakref.WeakSet()


def register_router(router: KnowsReplicas) -> None:
    """Register a router of this process."""
    _routers.add(router)


def known_replicas() -> list[str]:
    """The names of all replicas that this process may send to."""
    return sorted({name for router in list(_routers) for name in router.replica_names})


def ticket_of(pending_request: Any) -> Ticket:
    """The ticket that `front.py` sends with every request; an empty one for Serve's own calls."""
    values = () if pending_request is None else (*pending_request.args, *pending_request.kwargs.values())
    return next((value for value in values if isinstance(value, Ticket)), Ticket(RequestKey()))
