"""The front around a stand-in for Serve's handle: what it retries, what it joins, what it says when nothing helps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from ray.exceptions import ActorDiedError, ObjectLostError
from starlette.requests import Request
from starlette.responses import Response

from prefixwise.cluster import front as front_module
from prefixwise.cluster.exchange import REPLICA_HEADER, HttpRequest, HttpResponse
from prefixwise.cluster.front import MAX_ATTEMPTS, Front
from prefixwise.cluster.tickets import Ticket

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

BODY = {"query": [1, 2], "items": [[3]], "label_token_ids": [4]}
Answer = HttpResponse | Exception
Replica = Callable[[HttpRequest, Ticket], Answer]


def said(name: str, status: int = 200, body: Any = None) -> HttpResponse:
    return HttpResponse(status, ((REPLICA_HEADER, name.encode()),), orjson.dumps(body or {"by": name}))


class Handle:
    """Answers as `replica` says, and remembers what it was asked."""

    def __init__(self, replica: Replica, seconds: float = 0.0) -> None:
        self.asked: list[tuple[HttpRequest, Ticket]] = []
        self._replica = replica
        self._seconds = seconds
        self.answer = SimpleNamespace(remote=self._remote)

    async def _remote(self, request: HttpRequest, ticket: Ticket) -> HttpResponse:
        self.asked.append((request, ticket))
        await asyncio.sleep(self._seconds)
        found = self._replica(request, ticket)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "known_replicas", lambda: ["a", "b"])
    monkeypatch.setattr(front_module, "_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(front_module, "_GRACE_SECONDS", 0.0)


def ask(
    handle: Handle,
    path: str = "/v1/score",
    method: str = "POST",
    body: Any = BODY,
    headers: Sequence[tuple[bytes, bytes]] = (),
    timeout: float = 60.0,
) -> Response:
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": list(headers)}
    message = {"type": "http.request", "body": body if isinstance(body, bytes) else orjson.dumps(body)}

    async def receive() -> dict[str, Any]:
        return message

    return asyncio.run(Front(handle, 1000, timeout)(Request(scope, receive)))


def error_of(response: Response) -> Any:
    return orjson.loads(response.body)["error"]


@pytest.mark.parametrize("gone", [ActorDiedError(), ObjectLostError("ref", "owner", "site")])
def test_a_replica_that_goes_is_replaced_by_another(gone: Exception) -> None:
    answers: list[Answer] = [gone, gone, said("b")]
    handle = Handle(lambda request, ticket: answers.pop(0))
    assert orjson.loads(ask(handle).body) == {"by": "b"}
    assert len(handle.asked) == 3


def test_where_all_go_the_client_is_told_in_the_usual_shape() -> None:
    handle = Handle(lambda request, ticket: ActorDiedError())
    response = ask(handle)
    assert response.status_code == 503
    assert "send it again" in error_of(response)["message"]
    assert len(handle.asked) == MAX_ATTEMPTS


def test_a_full_replica_is_avoided() -> None:
    handle = Handle(lambda request, ticket: said("b") if "a" in ticket.avoid else said("a", 429))
    assert ask(handle).status_code == 200
    assert [ticket.avoid for _, ticket in handle.asked] == [frozenset(), frozenset({"a"})]


def test_where_all_are_full_the_last_one_s_answer_counts() -> None:
    handle = Handle(lambda request, ticket: said("b" if ticket.avoid else "a", 429))
    assert ask(handle).status_code == 429
    assert len(handle.asked) == 2


def test_a_request_that_takes_too_long_is_ended() -> None:
    response = ask(Handle(lambda request, ticket: said("a"), seconds=5.0), headers=[(b"x-request-timeout", b"0.05")])
    assert response.status_code == 504
    assert "within 0.05 seconds" in error_of(response)["message"]
    assert ask(Handle(lambda request, ticket: said("a"), seconds=5.0), timeout=0.05).status_code == 504


def test_another_attempt_gets_the_time_that_is_left() -> None:
    answers: list[Answer] = [ActorDiedError(), said("b")]
    handle = Handle(lambda request, ticket: answers.pop(0), seconds=0.05)
    assert ask(handle, headers=[(b"x-request-timeout", b"10")]).status_code == 200
    first, second = (float(request.header(b"x-request-timeout") or 0) for request, _ in handle.asked)
    assert first == 10
    assert 9 < second < 9.96


def test_what_nobody_foresaw_is_an_error_in_the_usual_shape() -> None:
    response = ask(Handle(lambda request, ticket: ZeroDivisionError("oh")))
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"


def test_a_query_nested_too_deeply_goes_to_a_replica_which_refuses_it() -> None:
    body = b'{"query": ' + b"[" * 300 + b"]" * 300 + b"}"
    assert ask(Handle(lambda request, ticket: said("a", 400)), body=body).status_code == 400


def test_no_more_of_a_body_is_kept_than_is_needed_to_refuse_it() -> None:
    handle = Handle(lambda request, ticket: said("a", 413))
    ask(handle, body=b"x" * 5000)
    assert len(handle.asked[0][0].body) == 1001


def test_prefixes_are_those_of_all_replicas() -> None:
    def replica(request: HttpRequest, ticket: Ticket) -> HttpResponse:
        name = ticket.only or "a"
        return said(name, body={"object": "list", "data": [{"id": f"of {name}"}]})

    found = orjson.loads(ask(Handle(replica), "/v1/prefix", "GET").body)
    assert found["data"] == [{"id": "of a", "replica": "a"}, {"id": "of b", "replica": "b"}]


def test_a_prefix_is_released_by_its_replica() -> None:
    def replica(request: HttpRequest, ticket: Ticket) -> HttpResponse:
        return said("b") if ticket.only == "b" else said("a", 404)

    assert ask(Handle(replica), "/v1/prefix/7", "DELETE").status_code == 200


def test_health_waits_for_a_replica_no_longer_than_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "_HEALTH_SECONDS", 0.05)
    response = ask(Handle(lambda request, ticket: said("a"), seconds=5.0), "/health", "GET")
    assert response.status_code == 503
    assert error_of(response)["code"] == "not_ready"
