"""A proxy on this machine before an HTTP server, which fails as a test tells it: errors 500, and cut connections."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["500", "cut", "half"]  # "half": the response breaks off
Plan = Callable[[str, str], Fault | None]  # of method and path


class FlakyProxy(ThreadingHTTPServer):
    """Passes requests on, unless `plan` names a fault."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = port
        self.plan: Plan = lambda method, path: None
        self.faults: list[Fault] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        pass  # clients that the test has killed


@contextmanager
def flaky_proxy(port: int) -> Iterator[FlakyProxy]:
    server = FlakyProxy(port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FlakyProxy
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            fault = self.server.plan(self.command, self.path)
            if fault is not None:
                self.server.faults.append(fault)
        if fault == "cut":
            self.close_connection = True
            return
        if fault == "500":
            self._answer(500, [], b"<Error><Code>InternalError</Code><Message>We broke</Message></Error>")
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        self._answer(response.status, response.getheaders(), response.read(), is_half=fault == "half")
        connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, *, is_half: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        given = next((value for name, value in headers if name.lower() == "content-length"), "0")
        self.send_header("Content-Length", given if self.command == "HEAD" else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if is_half else content)
        self.close_connection = self.close_connection or is_half

    def log_message(self, *_: object) -> None:
        pass
