"""A server made wrong on purpose: a proxy before a good one that spoils its answers to `/v1/score`.

    python -m tests.bench.wrong_server --url http://127.0.0.1:8000 --fault drift --port 0
    with wrong_server(good.url, "leak") as url: ...

    leak     an item's scores depend on the other items of the request; an item alone is right
    drift    every score is 0.03 too high
    error    HTTP 500
    oom      HTTP 500 that speaks of memory
    garbage  200, and no JSON
    short    the last row of scores is missing
    nan      the first score is no number
    huge     the first score is an integer that no float can be
    deep     200, and JSON that is nested deeper than anybody reads
    late     the right answer, after `seconds`
    trickle  the right answer in ten pieces, `seconds` apart

`only_items` spoils requests of so many items only, which is one chunk size; `times` the first so many of these only.
All other routes are the good server's own.
"""

from __future__ import annotations

import argparse
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, get_args

import httpx

Fault = Literal["leak", "drift", "error", "oom", "garbage", "short", "nan", "huge", "deep", "late", "trickle"]
DRIFT = 0.03
PIECES = 10
Reply = tuple[int, bytes]


@dataclass
class WrongServer:
    """What is wrong, and how often it may still be."""

    url: str
    fault: Fault
    only_items: int | None = None
    times: int | None = None
    seconds: float = 5.0

    def __post_init__(self) -> None:
        self.closing = threading.Event()  # a late answer waits no longer than this
        self.http = httpx.Client(base_url=self.url, timeout=120.0)
        self._lock = threading.Lock()

    def takes(self, path: str, body: dict[str, Any]) -> bool:
        """Is this request to be spoilt?"""
        if path != "/v1/score" or self.only_items not in (None, len(body["items"])):
            return False
        with self._lock:
            if self.times is not None:
                self.times -= 1
            return self.times is None or self.times >= 0

    def spoil(self, body: dict[str, Any], good: Reply) -> Reply:
        """The wrong answer, made of the right one."""
        if self.fault == "late":
            self.closing.wait(self.seconds)
        if self.fault in ("late", "trickle"):
            return good
        if self.fault == "deep":
            return 200, b"[" * 100_000 + b"]" * 100_000
        if self.fault == "error":
            return 500, b'{"error": {"message": "made wrong on purpose", "code": "internal_error"}}'
        if self.fault == "oom":
            return 500, b'{"error": {"message": "CUDA out of memory", "code": "internal_error"}}'
        if self.fault == "garbage" or good[0] != 200:
            return good[0], b"<html>no JSON</html>"
        answer = json.loads(good[1])
        answer["scores"] = self._wrong_scores(answer["scores"], body["items"])
        return 200, json.dumps(answer).encode()

    def _wrong_scores(self, scores: list[list[float]], items: list[Any]) -> list[list[float]]:
        if self.fault == "short":
            return scores[:-1]
        if self.fault == "nan":
            return [[float("nan"), *scores[0][1:]], *scores[1:]]
        if self.fault == "huge":
            return [[10**400, *scores[0][1:]], *scores[1:]]
        if self.fault == "drift":
            return [[score + DRIFT for score in row] for row in scores]
        return [[score + _leaked(items, index) for score in row] for index, row in enumerate(scores)]


def _leaked(items: list[Any], index: int) -> float:
    """From 0.03 to 0.06, by what the others are; nothing where there are none."""
    others = [item for place, item in enumerate(items) if place != index]
    return DRIFT * (1 + zlib.crc32(json.dumps(others).encode()) / 2**32) if others else 0.0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else headers and body are 40 ms apart
    wrong: WrongServer

    def do_GET(self) -> None:
        self._answer(self._ask(None))

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        reply = self._ask(content)
        body = json.loads(content)
        if not self.wrong.takes(self.path, body):
            self._answer(reply)
            return
        pieces = PIECES if self.wrong.fault == "trickle" else 1
        self._answer(self.wrong.spoil(body, reply), pieces)

    def _ask(self, content: bytes | None) -> Reply:
        kept = {name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers}
        response = self.wrong.http.request(self.command, self.path, content=content, headers=kept)
        return response.status_code, response.content

    def _answer(self, reply: Reply, pieces: int = 1) -> None:
        with suppress(ConnectionError):  # whoever asked a late server has gone
            self.send_response(reply[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply[1])))
            self.end_headers()
            size = -(-len(reply[1]) // pieces)
            for start in range(0, len(reply[1]), size or 1):
                if start:
                    self.wrong.closing.wait(self.wrong.seconds)
                self.wfile.write(reply[1][start : start + size])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def wrong_server(
    url: str,
    fault: Fault,
    *,
    only_items: int | None = None,
    times: int | None = None,
    seconds: float = 5.0,
    port: int = 0,
) -> Iterator[str]:
    """Its address, until the block is left."""
    wrong = WrongServer(url, fault, only_items, times, seconds)
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"wrong": wrong}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        wrong.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
        wrong.http.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--fault", required=True, choices=get_args(Fault))
    parser.add_argument("--only-items", type=int)
    parser.add_argument("--times", type=int)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    options = {"only_items": args.only_items, "times": args.times, "seconds": args.seconds, "port": args.port}
    with wrong_server(args.url, args.fault, **options) as url, suppress(KeyboardInterrupt):
        print(f"ready on {url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
