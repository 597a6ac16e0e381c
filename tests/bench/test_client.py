"""Every failure of a call has its reason, against a real little HTTP server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from prefixwise.bench.client import CallError, ScoreClient, UnreachableError
from prefixwise.cli.bench_common import print_server_info
from prefixwise.contract.errors import ClientSettingError

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
        assert answer.seconds > 0

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

    def test_an_answer_that_comes_byte_by_byte_is_not_waited_for(self, little: LittleServer) -> None:
        """Every byte is in time, and all of them are not."""
        gone = threading.Event()

        def reply(handler: BaseHTTPRequestHandler) -> tuple[int, str]:
            handler.send_response(200)
            handler.end_headers()
            for byte in json.dumps(GOOD).encode():
                if gone.wait(0.05):
                    break
                handler.wfile.write(bytes([byte]))
            raise ConnectionAbortedError

        little.reply = reply
        with ScoreClient(little.url, timeout_sec=0.3) as client:
            with pytest.raises(CallError, match=r"timeout: no whole answer within 0\.3 s") as raised:
                client.score(REQUEST)
            gone.set()
        assert raised.value.seconds >= 0.3

    def test_a_large_answer_is_read_whole(self, little: LittleServer) -> None:
        little.reply = always(200, {**GOOD, "padding": "x" * 5_000_000})
        assert little.client.score(REQUEST).scores == GOOD["scores"]

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
        "phrase",
        [
            "CUDA out of memory. Tried to allocate 2.00 GiB",
            "RESOURCE_EXHAUSTED: Attempting to reserve 4.2G",
            "worker killed: OOM",
        ],
    )
    def test_a_server_error_that_speaks_of_memory(self, little: LittleServer, phrase: str) -> None:
        assert little.failure(always(500, {"error": {"message": phrase}})).reason == "oom"

    def test_memory_is_no_matter_where_the_word_only_contains_it(self, little: LittleServer) -> None:
        assert little.failure(always(500, "a room with a view, and BOOM")).reason == "http_error"

    def test_no_json(self, little: LittleServer) -> None:
        error = little.failure(always(200, "<html>hello</html>"))
        assert error.reason == "bad_json"
        assert "<html>" in error.detail

    def test_a_long_body_is_cut_short(self, little: LittleServer) -> None:
        assert len(little.failure(always(500, "x" * 10_000)).detail) < 400

    @pytest.mark.parametrize(
        ("body", "phrase"),
        [
            ([1, 2], "expected an object"),
            ({}, "expected 2 rows of scores, got None"),
            ({"scores": "high"}, r'expected 2 rows of scores, got "high" \(str\)'),
            ({"scores": [[0.5, 0.5]]}, "expected 2 rows of scores, got 1 rows"),
            ({"scores": [[0.5, 0.5]] * 3}, "expected 2 rows of scores, got 3 rows"),
            ({"scores": [[0.5, 0.5], [0.5]]}, r"expected 2 finite numbers in scores\[1\]"),
            ({"scores": [[0.5, 0.5], None]}, r"in scores\[1\], got None"),
            ({"scores": [[float("nan"), 0.5], [0.5, 0.5]]}, r"in scores\[0\], got \[nan"),
            ({"scores": [[0.5, float("inf")], [0.5, 0.5]]}, r"in scores\[0\]"),
            ({"scores": [[0.5, 10**400], [0.5, 0.5]]}, r"in scores\[0\], got \[0\.5, 10000"),
            ({"scores": [[0.5, True], [0.5, 0.5]]}, r"in scores\[0\]"),
            ({"scores": [[0.5, "0.5"], [0.5, 0.5]]}, r"in scores\[0\]"),
        ],
    )
    def test_json_that_is_no_answer(self, little: LittleServer, body: Any, phrase: str) -> None:
        error = little.failure(always(200, body))
        assert error.reason == "bad_response"
        with pytest.raises(CallError, match=phrase):
            raise error

    @pytest.mark.parametrize("status", [200, 500])
    def test_json_that_is_nested_too_deeply(self, little: LittleServer, status: int) -> None:
        error = little.failure(always(status, "[" * 100_000 + "]" * 100_000))
        assert error.reason == ("bad_json" if status == 200 else "http_error")


class TestOtherRoutes:
    def test_what_it_tells_has_no_secrets_and_no_numbers_that_json_has_not(self, little: LittleServer) -> None:
        reported = {"api_key": "hush", "rate": float("nan"), "deep": [{"hf_token": "hush", "most": float("inf")}]}
        little.reply = always(200, reported)
        assert little.client.server_info() == {"rate": None, "deep": [{"most": None}]}

    def test_one_that_is_nested_too_deeply_tells_nothing(self, little: LittleServer) -> None:
        little.reply = always(200, '{"a": ' * 100_000 + "1" + "}" * 100_000)
        assert little.client.server_info() == {}

    def test_the_second_name_of_the_server_info_is_tried(self, little: LittleServer) -> None:
        def reply(handler: BaseHTTPRequestHandler) -> tuple[int, str]:
            return (200, '{"model_path": "m"}') if handler.path == "/get_server_info" else (404, "{}")

        little.reply = reply
        assert little.client.server_info() == {"model_path": "m"}

    @pytest.mark.parametrize("reply", [always(404, "{}"), always(200, "no JSON"), always(200, "[1]")])
    def test_a_server_without_it_tells_nothing(self, little: LittleServer, reply: Reply) -> None:
        little.reply = reply
        assert little.client.server_info() == {}

    def test_its_status_says_why(self, little: LittleServer, capsys: pytest.CaptureFixture[str]) -> None:
        little.reply = always(401, {"error": {"code": "invalid_api_key"}})
        assert print_server_info(little.client) == {}
        assert "no /server_info: HTTP 401" in capsys.readouterr().err


class TestReach:
    @pytest.mark.parametrize("status", [200, 401, 404, 503])
    def test_any_answer_will_do(self, little: LittleServer, status: int) -> None:
        little.reply = always(status, "{}")
        little.client.check_reachable()

    def test_a_server_that_is_silent_may_be_busy(self, little: LittleServer) -> None:
        gone = threading.Event()

        def reply(handler: BaseHTTPRequestHandler) -> tuple[int, str]:
            gone.wait(30)
            return 200, "{}"

        little.reply = reply
        with ScoreClient(little.url, timeout_sec=0.1) as client:
            client.check_reachable()
            gone.set()

    def test_nobody_there(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))  # and does not listen
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
            with ScoreClient(url) as client, pytest.raises(UnreachableError, match=f"^cannot reach {url}: .*refused"):
                client.check_reachable()

    def test_no_such_name(self) -> None:
        client = ScoreClient("http://nowhere.invalid")
        with client, pytest.raises(UnreachableError, match=r"^cannot reach http://nowhere\.invalid: "):
            client.check_reachable()


class TestSettings:
    @pytest.mark.parametrize(
        ("url", "phrase"),
        [
            ("127.0.0.1:31910", "expected an address like http://127.0.0.1:30000, got '127.0.0.1:31910'"),
            ("localhost:80", "expected an address like"),
            ("ftp://here", "expected an address like"),
            ("http://", "expected an address like"),
            ("", "expected an address like"),
            ("http://127.0.0.1:notaport", "Invalid port: 'notaport'"),
            ("http://127.0.0.1:99999", "expected a port from 1 to 65535, got 99999"),
            ("http://here..there", "expected an address like"),
            ("http://here?x=1", "scheme, host, port and path alone"),
            ("http://me:hush@here", "scheme, host, port and path alone"),
        ],
    )
    def test_an_address_that_is_none(self, url: str, phrase: str) -> None:
        with pytest.raises(ClientSettingError) as raised:
            ScoreClient(url)
        assert phrase in str(raised.value)
        assert "hush" not in str(raised.value)

    @pytest.mark.parametrize("url", ["http://h", "https://h/", "http://[::1]:8000", "http://h:80/under/v1/score"])
    def test_an_address_that_is_one(self, url: str) -> None:
        with ScoreClient(url) as client:
            assert client.url.endswith("/v1/score")

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e7])
    def test_a_time_limit_that_is_none(self, seconds: float) -> None:
        with pytest.raises(ClientSettingError, match="expected a time limit above 0"):
            ScoreClient("http://here", timeout_sec=seconds)

    @pytest.mark.parametrize("key", ["h\u00fbsh", "hu\nsh", "hush\x00"])
    def test_a_key_that_no_header_takes_is_not_told(self, key: str) -> None:
        with pytest.raises(ClientSettingError, match="printable ASCII") as raised:
            ScoreClient("http://here", api_key=key)
        assert key not in str(raised.value)
