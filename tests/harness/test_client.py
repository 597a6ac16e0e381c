"""Every failure of a call has its reason, against a real little HTTP server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from itemwise.harness.client import CallError, ScoreClient

REQUEST = {"query": [1], "items": [[2], [3]], "label_token_ids": [4, 5]}
GOOD = {"scores": [[0.25, 0.75], [1, 0]], "usage": {"total_tokens": 4}}
Reply = Callable[[BaseHTTPRequestHandler], tuple[int, str]]


class LittleServer:
    """Answers every request as `reply` says; `client` asks it."""

    def __init__(self, http: ThreadingHTTPServer) -> None:
        self.reply: Reply = always(200, GOOD)
        self.url = f"http://127.0.0.1:{http.server_port}"
        self.client = ScoreClient(self.url)

    def failure(self, reply: Reply) -> CallError:
        self.reply = reply
        with pytest.raises(CallError) as raised:
            self.client.score(REQUEST)
        return raised.value


@pytest.fixture(scope="module")
def little() -> Iterator[LittleServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            status, text = server.reply(self)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = LittleServer(http)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.client.close()
    http.shutdown()
    thread.join()
    http.server_close()


def always(status: int, body: Any) -> Reply:
    text = body if isinstance(body, str) else json.dumps(body)
    return lambda handler: (status, text)


class TestScores:
    def test_an_answer_has_scores_time_and_body(self, little: LittleServer) -> None:
        little.reply = always(200, GOOD)
        answer = little.client.score(REQUEST)
        assert answer.scores == [[0.25, 0.75], [1, 0]]
        assert answer.body == GOOD
        assert 0 < answer.seconds < 10

    @pytest.mark.parametrize("ending", ["", "/", "/v1/score"])
    def test_the_address_may_have_the_path(self, little: LittleServer, ending: str) -> None:
        asked: list[str] = []

        def reply(handler: BaseHTTPRequestHandler) -> tuple[int, str]:
            asked.append(handler.path)
            return 200, json.dumps(GOOD)

        little.reply = reply
        with ScoreClient(little.url + ending) as client:
            client.score(REQUEST)
        assert asked == ["/v1/score"]

    @pytest.mark.parametrize(("key", "sent"), [("hush", "Bearer hush"), (None, None)])
    def test_a_key_goes_with_every_request(self, little: LittleServer, key: str | None, sent: str | None) -> None:
        seen: list[str | None] = []

        def reply(handler: BaseHTTPRequestHandler) -> tuple[int, str]:
            seen.append(handler.headers["Authorization"])
            return 200, json.dumps(GOOD)

        little.reply = reply
        with ScoreClient(little.url, api_key=key) as client:
            client.score(REQUEST)
            client.server_info()
        assert seen == [sent, sent]


class TestFailures:
    def test_no_answer_in_time(self, little: LittleServer) -> None:
        gone = threading.Event()

        def reply(handler: BaseHTTPRequestHandler) -> tuple[int, str]:
            gone.wait(30)
            return 200, json.dumps(GOOD)

        little.reply = reply
        with ScoreClient(little.url, timeout_sec=0.1) as client:
            with pytest.raises(CallError) as raised:
                client.score(REQUEST)
            gone.set()
        assert (raised.value.reason, raised.value.code) == ("timeout", None)
        assert raised.value.seconds >= 0.1

    def test_nobody_there(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))  # and does not listen
            with ScoreClient(f"http://127.0.0.1:{free.getsockname()[1]}") as client, pytest.raises(CallError) as raised:
                client.score(REQUEST)
        assert (raised.value.reason, raised.value.code) == ("http_error", None)
        assert "refused" in raised.value.detail

    def test_a_connection_that_is_cut(self, little: LittleServer) -> None:
        def reply(handler: BaseHTTPRequestHandler) -> tuple[int, str]:
            handler.connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError

        error = little.failure(reply)
        assert (error.reason, error.code) == ("http_error", None)

    def test_a_server_error_with_a_code_of_its_own(self, little: LittleServer) -> None:
        error = little.failure(always(500, {"error": {"message": "broken", "code": "internal_error"}}))
        assert (error.reason, error.code) == ("http_error", "internal_error")
        assert error.detail.startswith("HTTP 500: ")
        assert "broken" in error.detail

    @pytest.mark.parametrize(("status", "body"), [(503, "busy"), (404, {"detail": "Not Found"}), (429, {"error": "x"})])
    def test_without_one_its_code_is_the_status(self, little: LittleServer, status: int, body: Any) -> None:
        error = little.failure(always(status, body))
        assert (error.reason, error.code) == ("http_error", str(status))

    @pytest.mark.parametrize(
        "words",
        [
            "CUDA out of memory. Tried to allocate 2.00 GiB",
            "RESOURCE_EXHAUSTED: Attempting to reserve 4.2G",
            "worker killed: OOM",
        ],
    )
    def test_a_server_error_that_speaks_of_memory(self, little: LittleServer, words: str) -> None:
        assert little.failure(always(500, {"error": {"message": words}})).reason == "oom"

    def test_memory_is_no_matter_where_the_word_only_contains_it(self, little: LittleServer) -> None:
        assert little.failure(always(500, "a room with a view, and BOOM")).reason == "http_error"

    def test_no_json(self, little: LittleServer) -> None:
        error = little.failure(always(200, "<html>hello</html>"))
        assert error.reason == "bad_json"
        assert "<html>" in error.detail

    def test_a_long_body_is_cut_short(self, little: LittleServer) -> None:
        assert len(little.failure(always(500, "x" * 10_000)).detail) < 400

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ([1, 2], "expected an object"),
            ({}, "expected 2 rows of scores, got NoneType"),
            ({"scores": "high"}, "expected 2 rows of scores, got str"),
            ({"scores": [[0.5, 0.5]]}, "expected 2 rows of scores, got 1 rows"),
            ({"scores": [[0.5, 0.5]] * 3}, "expected 2 rows of scores, got 3 rows"),
            ({"scores": [[0.5, 0.5], [0.5]]}, r"expected 2 finite numbers in scores\[1\]"),
            ({"scores": [[0.5, 0.5], None]}, r"in scores\[1\], got None"),
            ({"scores": [[float("nan"), 0.5], [0.5, 0.5]]}, r"in scores\[0\], got \[nan"),
            ({"scores": [[0.5, float("inf")], [0.5, 0.5]]}, r"in scores\[0\]"),
            ({"scores": [[0.5, True], [0.5, 0.5]]}, r"in scores\[0\]"),
            ({"scores": [[0.5, "0.5"], [0.5, 0.5]]}, r"in scores\[0\]"),
        ],
    )
    def test_json_that_is_no_answer(self, little: LittleServer, body: Any, words: str) -> None:
        error = little.failure(always(200, body))
        assert error.reason == "bad_response"
        with pytest.raises(CallError, match=words):
            raise error


class TestOtherRoutes:
    def test_the_second_name_of_the_server_info_is_tried(self, little: LittleServer) -> None:
        def reply(handler: BaseHTTPRequestHandler) -> tuple[int, str]:
            return (200, '{"model_path": "m"}') if handler.path == "/get_server_info" else (404, "{}")

        little.reply = reply
        assert little.client.server_info() == {"model_path": "m"}

    @pytest.mark.parametrize("reply", [always(404, "{}"), always(200, "no JSON"), always(200, "[1]")])
    def test_a_server_without_it_tells_nothing(self, little: LittleServer, reply: Reply) -> None:
        little.reply = reply
        assert little.client.server_info() == {}
