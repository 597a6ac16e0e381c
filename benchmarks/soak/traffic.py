"""The clients: each sends one request after the other, of a kind drawn by its weight, and records how it ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson

from benchmarks.soak.cases import WORDS, WRONG_REQUESTS, Case
from benchmarks.soak.recording import Ending, Exchange, Recording
from benchmarks.soak.wire import Connection, LostError, UnreachableError, ask_slowly, hang_up, http_request
from tests.server.real_requests import tokens

PATIENCE_SECONDS = 120.0  # no request may take longer, whatever happens to the server
_DOWN_SECONDS = 1.5  # mean pause while the server is down
_BURST = 24  # requests at once: more tokens than the queue takes
_INFO_ROUTES = ("/health", "/health", "/health_generate", "/v1/models", "/server_info", "/metrics", "/v1/prefix")

Reply = tuple[int, bytes]
Check = Callable[[int, Any], str]  # status and JSON of a response -> what is wrong with it


class Traffic:
    """Clients of one server, which may stop and come back while they run."""

    def __init__(
        self, port: int, cases: Sequence[Case], recording: Recording, clock: Callable[[], float], *, max_body: int
    ) -> None:
        self._port = port
        self._cases = cases
        self._by_kind = {kind: [each for each in cases if each.kind == kind] for kind in {each.kind for each in cases}}
        self._recording = recording
        self._clock = clock
        self._max_body = max_body  # bytes that the server takes
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._num_busy = 0
        self._connections: list[Connection] = []
        self._pins: set[str] = set()
        self._kinds: dict[Callable[[random.Random, Connection], Awaitable[None]], float] = {
            self._score: 52,
            self._many: 7,
            self._pin: 6,
            self._info: 8,
            self._wrong: 8,
            self._deadline: 5,
            self._hang_up: 6,
            self._slow: 4,
            self._burst: 0.7,
            self._oversized: 1.5,
            self._long_text: 1.5,
        }

    async def run(self, seed: str, pause: float) -> None:
        """One client, until it is cancelled; `pause`: mean seconds between its requests."""
        rng, connection = random.Random(seed), Connection(self._port)
        self._connections.append(connection)
        kinds, weights = list(self._kinds), list(self._kinds.values())
        while True:
            await self._may_send.wait()
            self._num_busy += 1
            try:
                await (self._score if self._is_down else rng.choices(kinds, weights)[0])(rng, connection)
            finally:
                self._num_busy -= 1
            await asyncio.sleep(rng.expovariate(1 / (max(pause, _DOWN_SECONDS) if self._is_down else pause)))

    @property
    def _is_down(self) -> bool:
        last = self._recording.exchanges[-1:]
        return any(each.ending == "unreachable" or each.status == 503 for each in last)

    async def stop(self) -> None:
        """Return when no client has a request or a connection, and every pin is released."""
        self._may_send.clear()
        while self._num_busy:
            await asyncio.sleep(0.01)
        while self._pins:
            await self._release(self._connections[0], self._pins.pop())
        for connection in self._connections:
            await connection.close()

    def resume(self) -> None:
        """Send again."""
        self._may_send.set()

    # Kinds of requests

    async def _score(self, rng: random.Random, connection: Connection) -> None:
        case = rng.choice(self._by_kind[rng.choice(sorted(self._by_kind))])
        await self._record(case.kind, connection.ask(_post(case)), _scores(case))

    async def _many(self, rng: random.Random, connection: Connection) -> None:
        """Several requests in one call, and one that is wrong."""
        drawn = [each for each in rng.sample(self._cases, min(12, len(self._cases))) if each.path == "/v1/score"][:4]
        body = {"requests": [*(each.body for each in drawn), {"query": [1]}]}

        def check(status: int, answer: Any) -> str:
            if status != 200:
                return f"expected status 200, got {status}"
            *scored, wrong = answer["data"]
            problems = [case.problem(each) for case, each in zip(drawn, scored, strict=True)]
            code = wrong["error"]["code"]
            return "; ".join(filter(None, problems)) or ("" if code == "missing_items" else f"got error {code}")

        reply = _worst_of(connection.ask(http_request("POST", "/v1/score", _json(body))))
        await self._record("score requests", reply, check)

    async def _pin(self, rng: random.Random, connection: Connection) -> None:
        """Pin a prefix that others use; release one, perhaps of a process that is gone."""
        if len(self._pins) >= 3 or (self._pins and rng.random() < 0.5):
            await self._release(connection, self._pins.pop())
            return
        query = rng.choice(self._by_kind["score ids"]).body["query"]
        request = http_request("POST", "/v1/prefix", _json({"query": query, "ttl_seconds": 600}))

        def check(status: int, answer: Any) -> str:
            if status == 200:
                self._pins.add(answer["id"])
            return "" if status == 200 else f"expected status 200, got {status}"

        await self._record("pin", connection.ask(request), check)

    async def _release(self, connection: Connection, pin: str) -> None:
        request = http_request("DELETE", f"/v1/prefix/{pin}")
        await self._record("unpin", connection.ask(request), _one_of(200, 404))

    async def _info(self, rng: random.Random, connection: Connection) -> None:
        path = rng.choice(_INFO_ROUTES)
        await self._record(f"GET {path}", connection.ask(http_request("GET", path)), _one_of(200))

    async def _wrong(self, rng: random.Random, connection: Connection) -> None:
        wrong = rng.choice(WRONG_REQUESTS)
        request = http_request(wrong.method, wrong.path, wrong.body)
        await self._record("wrong request", connection.ask(request), _error(wrong.status, wrong.code))

    async def _deadline(self, rng: random.Random, connection: Connection) -> None:
        """The scores in time, or an error that says that there was no time."""
        case = rng.choice(self._cases)
        headers = {"X-Request-Timeout": f"{rng.choice([0.001, 0.01, 0.05, 0.2, 1.0]):g}"}
        scores = _scores(case)

        def check(status: int, answer: Any) -> str:
            return "" if status in (413, 429, 504) else scores(status, answer)

        await self._record("deadline", connection.ask(_post(case, headers)), check)

    async def _slow(self, rng: random.Random, connection: Connection) -> None:
        """A body that arrives in pieces, or a response that is read in pieces."""
        slow = rng.choice(["writer", "reader"])
        cases = self._by_kind["score hidden states" if slow == "reader" else "score many items"]
        case = rng.choice(cases)
        reply = ask_slowly(self._port, _post(case), slow=slow, pause=rng.uniform(0, 0.05))
        await self._record(f"slow {slow}", reply, _scores(case))

    async def _burst(self, rng: random.Random, connection: Connection) -> None:
        """More than the queue takes: each gets its scores or 429."""
        case = rng.choice(self._by_kind["score many items"])
        requests = [Connection(self._port) for _ in range(_BURST)]
        replies = (self._record("burst", each.ask(_post(case)), _scores(case)) for each in requests)
        await asyncio.gather(*replies)
        await asyncio.gather(*(each.close() for each in requests))

    async def _oversized(self, rng: random.Random, connection: Connection) -> None:
        """A body beyond the limit, whose length is announced."""
        body = b'{"query": "' + b"x" * self._max_body + b'"}'
        reply = connection.ask(http_request("POST", "/v1/score", body))
        await self._record("oversized body", reply, _error(413, "request_too_large"))

    async def _long_text(self, rng: random.Random, connection: Connection) -> None:
        """A text of half a body's limit, which cannot fit the context."""
        word = f"{rng.choice(WORDS)} "
        query = word * (self._max_body // 2 // len(word.encode()))
        body = _json({"query": query, "items": ["a"], "labels": ["a"]})
        reply = connection.ask(http_request("POST", "/v1/score", body))
        await self._record("long text", reply, _error(400, "context_too_long"))

    async def _hang_up(self, rng: random.Random, connection: Connection) -> None:
        """Go while the request is sent, while it waits or is computed, or when the response begins."""
        query, items = tokens(rng, rng.choice([40, 300])), [tokens(rng, 10) for _ in range(40)]
        request = http_request("POST", "/v1/score", _json({"query": query, "items": items, "label_token_ids": [3, 5]}))
        sent = rng.choice([rng.randrange(len(request)), len(request), len(request)])
        leaving = hang_up(
            self._port,
            request,
            sent,
            rng.uniform(0, 0.3),
            reads=sent == len(request) and rng.random() < 0.3,
            aborts=rng.random() < 0.5,
        )
        await self._record("hang up", leaving, _one_of(0))

    # Their ends

    async def _record(self, kind: str, reply: Awaitable[Reply | None], check: Check) -> None:
        """Wait for the response, judge and record it. `reply` is None where the client went."""
        begin = self._clock()
        self._recording.num_begun += 1
        ending: Ending = "answered"
        status, content, problem = 0, None, ""
        try:
            found = await asyncio.wait_for(reply, PATIENCE_SECONDS)
            ending = "hung_up" if found is None else "answered"
            status, content = (0, None) if found is None else (found[0], _content(found[1]))
            problem = check(status, content)
        except UnreachableError as error:
            ending, problem = "unreachable", str(error)
        except LostError as error:
            ending, problem = "lost", str(error)
        except TimeoutError:
            ending, problem = "unanswered", f"no response within {PATIENCE_SECONDS:g} s"
        except (KeyError, TypeError, ValueError, StopIteration) as error:  # of a response in another form
            problem = f"{type(error).__name__} {error} in {str(content)[:200]}"
        code = error_code(content) if status >= 400 else ""
        if problem and code:
            problem = f"{problem}: {code}"
        exchange = Exchange(kind, begin, self._clock(), ending, status, code, not problem, problem)
        self._recording.exchanges.append(exchange)


def error_code(content: Any) -> str:
    """The code of an error; TEI's and SGLang's forms have its type alone."""
    if not isinstance(content, dict):
        return ""
    error = content.get("error")
    return str(error["code"] if isinstance(error, dict) else content.get("error_type") or content.get("type") or "")


def _json(body: Any) -> bytes:
    return orjson.dumps(body)


def _content(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body  # /metrics


async def _worst_of(reply: Awaitable[Reply]) -> Reply:
    """The response to several requests; if one of them has an error of the server, that error."""
    status, body = await reply
    found = _content(body)["data"] if status == 200 else []
    failed = [each for each in found if each.get("error", {}).get("type") == "server_error"]
    return (500, _json(failed[0])) if failed else (status, body)


def _post(case: Case, headers: dict[str, str] | None = None) -> bytes:
    return http_request("POST", case.path, _json(case.body), headers)


def _scores(case: Case) -> Check:
    """Status 200, and every bit."""
    return lambda status, answer: case.problem(answer) if status == 200 else f"expected status 200, got {status}"


def _one_of(*statuses: int) -> Check:
    expected = " or ".join(map(str, statuses))
    return lambda status, _: "" if status in statuses else f"expected status {expected}, got {status}"


def _error(status: int, code: str) -> Check:
    def check(got: int, answer: Any) -> str:
        found = error_code(answer)
        return "" if (got, found) == (status, code) else f"expected {status} {code}, got {got} {found}"

    return check
