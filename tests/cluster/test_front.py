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
from prefixwise.cluster.options import Secret
from prefixwise.cluster.tickets import Ticket

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

BODY = {"query": [1, 2], "items": [[3]], "label_token_ids": [4]}
Answer = HttpResponse | Exception | object
Replica = Callable[[HttpRequest, Ticket], Answer]


def said(name: str, status: int = 200, body: Any = None) -> HttpResponse:
    return HttpResponse(status, ((REPLICA_HEADER, name.encode()),), orjson.dumps(body or {"by": name}))


class Handle:
    """Answers as `replica` says, and remembers what it was asked."""

    def __init__(self, replica: Replica, seconds: float = 0.0, slow: str | None = None) -> None:
        """`seconds`: of every response, or of those of one replica."""
        self._slow = slow
        self.asked: list[tuple[HttpRequest, Ticket]] = []
        self.unread = 0  # messages of the body that the front has not read
        self._replica = replica
        self._seconds = seconds
        self.answer = SimpleNamespace(remote=self._remote)

    async def _remote(self, request: HttpRequest, ticket: Ticket) -> object:
        self.asked.append((request, ticket))
        await asyncio.sleep(self._seconds if self._slow in (None, ticket.only) else 0)
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
    key: str | None = None,
    front: Front | None = None,
) -> Response:
    """`body`: JSON, or bytes as they are; a list of them: parts."""
    front = front or make_front(handle, timeout=timeout, key=key)
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": list(headers)}
    parts = body if isinstance(body, list) else [body if isinstance(body, bytes) else orjson.dumps(body)]
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    taken = front._body_memory.taken
    response = asyncio.run(front(Request(scope, receive)))
    assert front._body_memory.taken == taken
    handle.unread = len(messages)
    return response


def make_front(handle: Handle, *, timeout: float = 60.0, key: str | None = None, **options: Any) -> Front:
    server = {"max_request_bytes": 1000, "request_timeout": timeout, **options}
    return Front(handle, {"server": server}, Secret(key))


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


def test_one_that_does_not_score_is_avoided() -> None:
    """Its device has failed, it drains, or bodies fill its memory: another one may be well."""
    handle = Handle(lambda request, ticket: said("b") if "a" in ticket.avoid else said("a", 503))
    assert ask(handle).status_code == 200
    assert ask(Handle(lambda request, ticket: said("a", 503))).status_code == 503


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


NONSENSE = [
    None,
    {"status": 200},
    HttpResponse("200", (), b""),  # type: ignore[arg-type]
    HttpResponse(99, (), b""),
    HttpResponse(200, (), "text"),  # type: ignore[arg-type]
    HttpResponse(200, None, b""),  # type: ignore[arg-type]
    HttpResponse(200, ((b"name",),), b""),  # type: ignore[arg-type]
    HttpResponse(200, ((b"name", b"a\r\nset-cookie: b"),), b""),
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=repr)
def test_a_replica_that_returns_nonsense_is_replaced_by_another(nonsense: object) -> None:
    answers = [nonsense, said("b")]
    assert orjson.loads(ask(Handle(lambda request, ticket: answers.pop(0))).body) == {"by": "b"}
    handle = Handle(lambda request, ticket: nonsense)
    assert error_of(ask(handle))["code"] == "replicas_gone"
    assert len(handle.asked) == MAX_ATTEMPTS


class TestUnreadBodies:
    """What a replica refuses by the headers alone, the front does not read; the replica's error is the response."""

    @pytest.mark.parametrize("sent", [None, b"wrong", b"Bearer sesame2"])
    def test_of_a_client_without_the_key(self, sent: bytes | None) -> None:
        handle = Handle(lambda request, ticket: said("a", 401))
        headers = [] if sent is None else [(b"x-api-key", sent)]
        assert ask(handle, body=[b"x" * 500] * 3, headers=headers, key="sesame").status_code == 401
        assert (handle.unread, handle.asked[0][0].body) == (3, b"")

    def test_with_the_key_it_is_read(self) -> None:
        handle = Handle(lambda request, ticket: said("a"))
        ask(handle, headers=[(b"authorization", b"Bearer sesame")], key="sesame")
        assert orjson.loads(handle.asked[0][0].body) == BODY
        ask(handle, "/health", "GET", key="sesame")
        assert handle.asked[1][0].path == "/health"

    def test_of_one_that_announces_too_much(self) -> None:
        handle = Handle(lambda request, ticket: said("a", 413))
        assert ask(handle, body=[b"x" * 500] * 3, headers=[(b"content-length", b"1500")]).status_code == 413
        assert (handle.unread, handle.asked[0][0].header(b"content-length")) == (3, b"1500")

    @pytest.mark.parametrize("announced", [b"900000", b""])
    def test_beyond_the_memory_for_bodies_it_is_refused(self, announced: bytes) -> None:
        handle = Handle(lambda request, ticket: said("a"))
        front = make_front(handle, max_request_bytes=10**6, max_response_bytes=1, max_body_memory=10**6 + 1)
        others = front._body_memory.share()
        others.take(500_000)
        headers = [(b"content-length", announced)] if announced else []
        response = ask(handle, body=[b" " * 300_000] * 3, headers=headers, front=front)
        assert (response.status_code, error_of(response)["code"]) == (503, "body_memory_full")
        assert response.headers["retry-after"] == "1"
        assert handle.asked == []


def test_a_body_that_costs_too_much_to_read_goes_to_any_replica() -> None:
    handle = Handle(lambda request, ticket: said("a", 400))
    front = make_front(handle, max_request_bytes=20_000_000, max_body_memory=200_000_000)
    body = b'{"query": [' + b"[]," * 5_000_000 + b"[]]}"
    assert ask(handle, body=body, front=front).status_code == 400
    assert handle.asked[0][1].request.key is None


def test_a_replica_that_hangs_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "_HEALTH_SECONDS", 0.05)

    def replica(request: HttpRequest, ticket: Ticket) -> HttpResponse:
        return HttpResponse(200, ((REPLICA_HEADER, (ticket.only or "a").encode()),), b"# TYPE x gauge\nx 1\n")

    page = bytes(ask(Handle(replica, seconds=60.0, slow="b"), "/metrics", "GET").body)
    assert page == b'# TYPE x gauge\nx{replica="a"} 1\n'


def test_one_that_returns_no_prefixes_does_not_hide_those_of_others() -> None:
    def replica(request: HttpRequest, ticket: Ticket) -> HttpResponse:
        return said("b", body=[1]) if ticket.only == "b" else said("a", body={"data": [{"id": "of a"}]})

    found = orjson.loads(ask(Handle(replica), "/v1/prefix", "GET").body)
    assert found["data"] == [{"id": "of a", "replica": "a"}]


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
    assert response.headers["retry-after"] == "1"
