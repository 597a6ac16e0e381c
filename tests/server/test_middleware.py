"""The middleware: request ids, API key, CORS, readiness, and one error body."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from prefixwise.server.config import ServerOptions
from prefixwise.server.routes import info
from prefixwise.server.service import Phase
from tests.server.app_client import IDS_REQUEST, AppClient, BrokenBackend, app_client, error_of

KEY = "sesame-5f0c"
WORK = [("POST", "/v1/score"), ("POST", "/v1/prefix"), ("GET", "/v1/prefix"), ("POST", "/tokenize")]
WORK += [("DELETE", "/v1/prefix/x"), ("GET", "/health"), ("GET", "/health_generate")]
WORK += [("GET", "/ping"), ("POST", "/ping")]
ALWAYS_WITH_KEY = ["/metrics", "/server_info", "/v1/models"]
ALWAYS_OPEN = ["/", "/reports", "/page/look.css", "/docs", "/openapi.json"]
ALWAYS = [*ALWAYS_WITH_KEY, "/", "/docs", "/openapi.json"]


class TestRequestId:
    @pytest.mark.parametrize("sent", ["abc", "x" * 128, "a b!~", "0"])
    def test_a_printable_one_is_returned(self, client: AppClient, sent: str) -> None:
        assert client.get("/health", headers={"X-Request-Id": sent}).headers["x-request-id"] == sent

    @pytest.mark.parametrize("sent", [b"x" * 129, b"\xe9t\xe9", b"a\tb", b""])
    def test_an_unprintable_or_long_one_is_replaced(self, client: AppClient, sent: bytes) -> None:
        got = client.get("/health", headers={"X-Request-Id": sent}).headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{16}", got)

    def test_new_ones_differ(self, client: AppClient) -> None:
        assert len({client.get("/health").headers["x-request-id"] for _ in range(20)}) == 20

    @pytest.mark.parametrize(
        ("method", "path"), [("GET", "/none"), ("PUT", "/v1/score"), ("POST", "/v1/score"), ("GET", "/docs")]
    )
    def test_errors_have_it_too(self, client: AppClient, method: str, path: str) -> None:
        assert client.request(method, path, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"


class TestRouting:
    @pytest.mark.parametrize("path", ["/none", "/v1", "/v1/score//", "/v1/score/x", "/%00", "/v1/prefix/a/b"])
    def test_an_unknown_path_is_not_found(self, client: AppClient, path: str) -> None:
        assert error_of(client.get(path)) == (404, "invalid_request_error", "not_found", None)

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("GET", "/v1/score", "POST"),
            ("DELETE", "/v1/prefix", "GET, POST, HEAD"),
            ("GET", "/v1/prefix/x", "DELETE"),
            ("POST", "/health", "GET, HEAD"),
            ("OPTIONS", "/v1/score", "POST"),
        ],
    )
    def test_a_wrong_method_gets_405_with_the_allowed_ones(
        self, client: AppClient, method: str, path: str, allowed: str
    ) -> None:
        response = client.request(method, path)
        assert error_of(response) == (405, "invalid_request_error", "method_not_allowed", None)
        assert response.headers["allow"] == allowed

    def test_head_works_where_get_does(self, client: AppClient) -> None:
        assert client.request("HEAD", "/health").status_code == 200


class TestUnforeseen:
    def test_the_answer_says_no_more_than_where_to_look(self, caplog: pytest.LogCaptureFixture) -> None:
        with app_client(backend=BrokenBackend()) as client:
            response = client.post("/v1/score", IDS_REQUEST, headers={"X-Request-Id": "look-for-me"})
        assert error_of(response) == (500, "server_error", "internal_error", None)
        assert "look-for-me" in response.json()["detail"]
        for word in ("secret", "RuntimeError", "Traceback", ".py"):
            assert word not in response.text
        records = [record for record in caplog.records if record.__dict__.get("fields", {}).get("id") == "look-for-me"]
        assert any(record.exc_info is not None for record in records)

    def test_a_route_may_raise_anything(self, client: AppClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(info, "json_reply", lambda body: 1 / 0)
        response = client.get("/health")
        assert error_of(response)[2] == "internal_error"
        assert "zero" not in response.text


class TestKey:
    @pytest.fixture
    def guarded(self) -> Iterator[AppClient]:
        with app_client(ServerOptions(api_key=KEY)) as made:
            yield made

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": KEY},
            {"Authorization": f"Basic {KEY}"},
            {"Authorization": "Bearer"},
            {"Authorization": f"Bearer {KEY}x"},
            {"X-API-Key": KEY[:-1]},
            {"Authorization": b"Bearer \xff\xfe"},
        ],
    )
    @pytest.mark.parametrize("path", [*ALWAYS_WITH_KEY, "/v1/prefix", "/none"])
    def test_without_it_a_request_gets_401(self, guarded: AppClient, path: str, headers: dict[str, str]) -> None:
        response = guarded.get(path, headers=headers)
        assert error_of(response) == (401, "authentication_error", "invalid_api_key", None)
        assert KEY not in response.text

    def test_metrics_name_the_route_of_a_request_without_it(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "prefixwise")
        with app_client(ServerOptions(api_key=KEY)) as client:
            for path in ("/v1/score", "/v1/prefix/7", "/none"):
                client.post(path)
            shown = client.get("/metrics", headers={"X-API-Key": KEY}).text
        routes = [record.__dict__["fields"]["route"] for record in caplog.records]
        assert routes == ["/v1/score", "/v1/prefix/{prefix_id}", "other"]
        assert all(f'prefixwise:requests_total{{route="{route}",status="401"}} 1.0' in shown for route in routes)

    @pytest.mark.parametrize(
        "headers",
        [{"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer  {KEY}"}, {"X-API-Key": KEY}],
    )
    def test_with_it_a_request_is_answered(self, guarded: AppClient, headers: dict[str, str]) -> None:
        assert guarded.post("/v1/score", IDS_REQUEST, headers=headers).status_code == 200
        assert guarded.get("/metrics", headers=headers).status_code == 200

    @pytest.mark.parametrize("path", ["/health", "/ping", "/health_generate", *ALWAYS_OPEN])
    def test_health_and_the_pages_need_none(self, guarded: AppClient, path: str) -> None:
        assert guarded.get(path).status_code == 200

    def test_no_response_and_no_log_line_shows_it(self, guarded: AppClient, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        headers = {"Authorization": f"Bearer {KEY}"}
        shown = guarded.get("/server_info", headers=headers)
        assert shown.json()["api_key_set"] is True
        assert KEY not in shown.text
        assert KEY not in guarded.get("/metrics", headers=headers).text
        assert KEY not in caplog.text
        assert all(KEY not in str(record.__dict__) for record in caplog.records)


class TestOrigins:
    def ask(self, client: AppClient, origin: str, method: str = "OPTIONS") -> dict[str, str]:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Headers"] = "authorization, content-type"
        response = client.request(method, "/v1/score", headers=headers)
        return {"status": str(response.status_code), **response.headers}

    def test_none_is_allowed_unless_said(self, client: AppClient) -> None:
        answer = self.ask(client, "https://a.example")
        assert answer["status"] == "403"
        assert not any(name.startswith("access-control") for name in answer)

    def test_one_may_be(self) -> None:
        with app_client(ServerOptions(cors_origins=("https://a.example",), api_key=KEY)) as client:
            answer = self.ask(client, "https://a.example")
            assert answer["status"] == "204"
            assert answer["access-control-allow-origin"] == "https://a.example"
            assert answer["access-control-allow-headers"] == "authorization, content-type"
            assert "POST" in answer["access-control-allow-methods"]
            assert answer["vary"] == "Origin"
            assert answer["x-request-id"]
            # A page may read an error as well: the key is missing here.
            refusal = self.ask(client, "https://a.example", "POST")
            assert (refusal["status"], refusal["access-control-allow-origin"]) == ("401", "https://a.example")
            assert "X-Request-Id" in refusal["access-control-expose-headers"]
            stranger = self.ask(client, "https://b.example")
            assert stranger["status"] == "401"
            assert "access-control-allow-origin" not in stranger

    def test_all_may_be(self) -> None:
        with app_client(ServerOptions(cors_origins=("*",))) as client:
            assert self.ask(client, "https://b.example")["access-control-allow-origin"] == "*"


def navigate(mode: str, **more: str) -> dict[str, str]:
    return {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode, **more}


OTHER_PAGES = {
    "fetch": {"Origin": "https://evil.example"},
    "sandbox": {"Origin": "null"},
    "same host, other port": {"Origin": "http://server:3000", "Sec-Fetch-Site": "same-site"},
    "image": navigate("no-cors"),
    "form": navigate("navigate", Origin="https://evil.example"),
    "old form": {"Content-Type": "text/plain"},
    "old upload": {"Content-Type": "multipart/form-data; boundary=x"},
}
PROGRAMS_AND_OWN_PAGES = {
    "curl": {"Content-Type": "application/x-www-form-urlencoded"},
    "none": {},
    "own page": {"Origin": "http://server", "Content-Type": "text/plain;charset=UTF-8"},
    "own page behind a proxy": {"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"},
}


class TestWebPages:
    """On a server without a key. `server` is its name in these tests."""

    @pytest.fixture
    def local(self) -> Iterator[AppClient]:
        with app_client() as made:
            made.service.is_local = True
            yield made

    @pytest.mark.parametrize("name", OTHER_PAGES)
    def test_other_pages_are_refused(self, client: AppClient, name: str) -> None:
        headers = {"Content-Type": "application/json", **OTHER_PAGES[name]}
        expected = "content_type_not_allowed" if name.startswith("old") else "origin_not_allowed"
        response = client.post("/v1/score", IDS_REQUEST, headers=headers)
        assert error_of(response) == (403, "permission_error", expected, None)
        assert "access-control-allow-origin" not in response.headers

    @pytest.mark.parametrize("name", PROGRAMS_AND_OWN_PAGES)
    def test_programs_and_our_pages_are_not(self, client: AppClient, name: str) -> None:
        assert client.post("/v1/score", IDS_REQUEST, headers=PROGRAMS_AND_OWN_PAGES[name]).status_code == 200

    def test_reading_is_checked_too_but_not_links_and_health(self, client: AppClient) -> None:
        assert error_of(client.get("/health_generate", headers=navigate("no-cors")))[2] == "origin_not_allowed"
        assert client.get("/docs", headers=navigate("navigate")).status_code == 200
        assert client.get("/health", headers=navigate("no-cors")).status_code == 200
        assert client.post("/ping", headers=navigate("no-cors")).status_code == 200

    def test_an_origin_or_a_key_opens_it(self) -> None:
        headers = {"Origin": "https://a.example", "Sec-Fetch-Site": "cross-site"}
        for origins in (("https://a.example",), ("*",)):
            with app_client(ServerOptions(cors_origins=origins)) as client:
                assert client.post("/v1/score", IDS_REQUEST, headers=headers).status_code == 200
        with app_client(ServerOptions(api_key=KEY)) as client:
            assert client.post("/v1/score", IDS_REQUEST, headers={**headers, "X-API-Key": KEY}).status_code == 200

    @pytest.mark.parametrize("host", ["evil.example:30000", "evil.example", "localhost.evil.example", "127.0.0.1.evil"])
    def test_another_name_is_refused_where_only_this_machine_connects(
        self, local: AppClient, client: AppClient, host: str
    ) -> None:
        headers = {"Host": host, "Origin": f"http://{host}"}  # a page whose name was pointed here
        assert error_of(local.post("/v1/score", IDS_REQUEST, headers=headers))[2] == "host_not_allowed"
        assert error_of(local.get("/server_info", headers={"Host": host}))[2] == "host_not_allowed"
        assert local.get("/health", headers={"Host": host}).status_code == 200
        assert client.post("/v1/score", IDS_REQUEST, headers=headers).status_code == 200

    @pytest.mark.parametrize(
        "host", ["localhost:30000", "LOCALHOST.", "127.0.0.1:1", "[::1]:30000", "x.localhost", "10.0.0.7", ""]
    )
    def test_our_names_and_addresses_are_not(self, local: AppClient, host: str) -> None:
        assert local.post("/v1/score", IDS_REQUEST, headers={"Host": host}).status_code == 200

    def test_the_name_of_an_origin_is_ours(self) -> None:
        with app_client(ServerOptions(cors_origins=("https://proxy.example",))) as client:
            client.service.is_local = True
            assert client.post("/v1/score", IDS_REQUEST, headers={"Host": "proxy.example"}).status_code == 200
            assert client.post("/v1/score", IDS_REQUEST, headers={"Host": "evil.example"}).status_code == 403


class TestReadiness:
    @pytest.mark.parametrize(("method", "path"), WORK)
    def test_before_the_engine_is_warm_work_gets_503(self, method: str, path: str) -> None:
        with app_client(is_ready=False) as client:
            response = client.request(method, path)
            assert error_of(response) == (503, "server_error", "not_ready", None)
            assert int(response.headers["retry-after"]) > 0

    @pytest.mark.parametrize("path", ALWAYS)
    def test_routes_without_engine_answer(self, path: str) -> None:
        with app_client(is_ready=False) as client:
            assert client.get(path).status_code in (200, 307)

    @pytest.mark.parametrize(("method", "path"), WORK)
    def test_while_the_server_stops_work_gets_503(self, method: str, path: str) -> None:
        with app_client() as client:
            client.service.lifecycle.phase = Phase.DRAINING
            response = client.request(method, path)
            assert error_of(response) == (503, "server_error", "shutting_down", None)
            assert int(response.headers["retry-after"]) > 0
            assert response.headers["connection"] == "close"
            assert client.get("/server_info").json()["status"] == "draining"

    def test_a_stopping_server_does_not_become_ready(self) -> None:
        with app_client(is_ready=False) as client, app_client() as other:
            client.service.lifecycle.phase = Phase.DRAINING
            client.service.open(other.engine)
            assert error_of(client.get("/health"))[2] == "shutting_down"


def test_web_sockets_are_closed(client: AppClient) -> None:
    import asyncio

    sent: list[object] = []

    async def receive() -> dict[str, object]:
        return {}

    async def send(message: object) -> None:
        sent.append(message)

    asyncio.run(client.app({"type": "websocket"}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1000}]
    asyncio.run(client.app({"type": "lifespan"}, receive, send))
    assert sent[1:] == [{"type": "lifespan.startup.complete"}, {"type": "lifespan.shutdown.complete"}]
