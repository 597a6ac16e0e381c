"""What a router counts. What it chooses is `routing.py`'s, and on a real cluster `test_on_ray.py`'s."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from prefixwise.cluster.router import PrefixRouter
from prefixwise.cluster.routing import RequestKey
from prefixwise.cluster.tickets import Ticket, known_replicas, ledger, register_router, ticket_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture
def router() -> PrefixRouter:
    router = PrefixRouter.__new__(PrefixRouter)  # Serve makes it, with much that counting does not need
    router.initialize_state(max_wait_steps=2.0, share=1.25)
    router._replicas = {}
    return router


def a_ticket(tokens: int = 10, key: bytes = b"key") -> Ticket:
    return Ticket(RequestKey(key, tokens))


def pending(ticket: Ticket) -> Any:
    return SimpleNamespace(args=("request", ticket), kwargs={})


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={"step_tokens": 10})


def choose(router: PrefixRouter, ticket: Ticket) -> list[str]:
    ranks = asyncio.run(router.choose_replicas([replica("a"), replica("b")], pending(ticket)))
    return [each.replica_id.unique_id for rank in ranks for each in rank]


def test_tokens_count_from_the_choice_until_they_come_back(router: PrefixRouter) -> None:
    first, second = a_ticket(10), a_ticket(5)
    with ledger().open(first):
        home = choose(router, first)[0]
        with ledger().open(second):
            choose(router, second)
            assert ledger().tokens() == {home: 15}
        assert ledger().tokens() == {home: 10}
    assert ledger().tokens() == {}


def test_an_overloaded_home_is_left_and_found_again(router: PrefixRouter) -> None:
    ticket = a_ticket()
    large = a_ticket(21)  # more than two steps of ten
    with ledger().open(large):
        home, other = choose(router, large)
        assert choose(router, large) == [home, other]  # what it weighs itself is no reason
        assert choose(router, ticket) == [other, home]
    assert choose(router, ticket) == [home, other]


def test_the_replica_that_took_it_counts(router: PrefixRouter) -> None:
    ticket = a_ticket()
    with ledger().open(ticket):
        home, other = choose(router, ticket)
        router.on_request_routed(pending(ticket), SimpleNamespace(unique_id=other), None)
        assert ledger().tokens() == {other: 10}
    router.on_request_routed(pending(ticket), SimpleNamespace(unique_id=home), None)  # too late to count
    assert ledger().tokens() == {}


def test_a_request_that_fails_comes_back_too(router: PrefixRouter) -> None:
    ticket = a_ticket()
    with pytest.raises(KeyError), ledger().open(ticket):
        choose(router, ticket)
        raise KeyError
    assert ledger().tokens() == {}


def test_a_request_that_weighs_nothing_is_nobodys_business(router: PrefixRouter) -> None:
    """A look at the health of a replica, beside which its last request comes back."""
    light, heavy = a_ticket(0), a_ticket(10)
    with ledger().open(light):
        choose(router, light)
        with ledger().open(heavy):
            choose(router, heavy)
        assert ledger().tokens() == {}
        choose(router, light)
    assert ledger().tokens() == {}


def test_what_serve_asks_on_its_own_behalf_has_no_key() -> None:
    assert ticket_of(None) == Ticket(RequestKey())
    assert ticket_of(pending(a_ticket())).request.key == b"key"


def test_known_replicas_are_those_of_all_routers_of_the_process() -> None:
    class Router:
        replica_names = ("b", "a")

    kept = Router()
    register_router(kept)  # type: ignore[arg-type]
    assert {"a", "b"} <= set(known_replicas())
