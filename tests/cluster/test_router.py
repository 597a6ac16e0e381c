"""What a router counts. What it chooses is `routing.py`'s, and on a real cluster `test_on_ray.py`'s."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from itemwise.cluster.request_key import RequestKey
from itemwise.cluster.router import PrefixRouter
from itemwise.cluster.tickets import Ticket, known_replicas, register_router, ticket_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture
def router() -> PrefixRouter:
    router = PrefixRouter.__new__(PrefixRouter)  # Serve makes it, with much that counting does not need
    router.initialize_state(patience=2.0, share=1.25)
    return router


def pending(request_id: str, tokens: int = 10) -> Any:
    ticket = Ticket(RequestKey(b"key", tokens))
    return SimpleNamespace(
        args=("request", ticket), kwargs={}, metadata=SimpleNamespace(internal_request_id=request_id)
    )


def replica(name: str) -> Any:
    return SimpleNamespace(unique_id=name)


def test_tokens_count_until_they_come_back(router: PrefixRouter) -> None:
    router.on_request_routed(pending("1", 10), replica("a"), None)
    router.on_request_routed(pending("2", 5), replica("a"), None)
    assert router._sent_tokens == {"a": 15}
    router.on_request_completed(replica("a"), "1")
    assert router._sent_tokens == {"a": 5}


def test_attempts_on_two_replicas_are_told_apart_in_any_order(router: PrefixRouter) -> None:
    """All attempts of one request have one id, and the end of the first may be heard of after the second began."""
    router.on_request_routed(pending("1"), replica("a"), None)
    router.on_request_routed(pending("1"), replica("b"), None)
    router.on_request_completed(replica("a"), "1")
    assert router._sent_tokens == {"a": 0, "b": 10}
    router.on_request_completed(replica("b"), "1")
    assert router._sent_tokens == {"a": 0, "b": 0}
    assert router._sent == {}


def test_what_serve_asks_on_its_own_behalf_has_no_key() -> None:
    assert ticket_of(None) == Ticket(RequestKey())
    assert ticket_of(pending("1")).request.key == b"key"


def test_known_replicas_are_those_of_all_routers_of_the_process() -> None:
    class Router:
        replica_names = ("b", "a")

    kept = Router()
    register_router(kept)  # type: ignore[arg-type]
    assert {"a", "b"} <= set(known_replicas())
