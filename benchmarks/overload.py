"""Overload: what a server makes of three times more requests than it can compute, within their deadlines.

First the capacity, with some requests in flight all the time. Then requests arrive at random (Poisson), `--load` times
as many, each with `--deadline` seconds as its X-Request-Timeout; a request that is refused is not sent again. 10 % of
the tokens are of small requests (400 tokens), 90 % of large ones (5,000).

    capacity   tokens of all requests that were scored, per second until the last answer
    goodput    the same under overload, only of requests that were scored within their deadline
    late       answers with scores after the deadline

The run passes, and exits with 0, if the goodput is at least 90 % of the capacity, no answer is late and 99 % of the
small requests that are scored take at most half of the deadline. The last line is JSON.

    python -m benchmarks.overload [--seconds 120] [--load 3] [--deadline 20] [--url URL | -- FLAGS OF prefixwise serve]

Without `--url` and flags, the server runs on the fake backend, whose forwards take 10 ms and 0.2 ms for every token, so
that the client costs it nothing. `-- --device cpu` is the embedded model, which shares the cores with the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.text_rows import aligned
from prefixwise.backends.load import FAKE_STEP_VARIABLE, FAKE_TOKEN_VARIABLE
from prefixwise.bench.client import SCORE_PATH
from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import LoadGeometry
from prefixwise.bench.processes import ended_by_signals, local_server
from prefixwise.bench.rules import percentile
from prefixwise.bench.run.load_http import ConnectionPool

LEAST_GOODPUT = 0.9
MOST_P99 = 0.5  # of the deadline
FAKE_SERVER = ("--backend", "fake")
FAKE_SECONDS = {FAKE_STEP_VARIABLE: "0.01", FAKE_TOKEN_VARIABLE: "0.0002"}
IN_FLIGHT = 12  # while the capacity is measured
_OK = 200
_QUERY_TOKENS = 200
_ITEM_TOKENS = 20
_VOCABULARY = 40_000  # no more than the embedded model's


@dataclass(frozen=True)
class Kind:
    """Requests of one size, and their share of the tokens."""

    name: str
    num_items: int
    share: float

    @property
    def num_tokens(self) -> int:
        return _QUERY_TOKENS + self.num_items * _ITEM_TOKENS

    def maker(self) -> RequestMaker:
        geometry = LoadGeometry(
            query_tokens=_QUERY_TOKENS,
            num_items=self.num_items,
            item_tokens=_ITEM_TOKENS,
            label_token_ids=[1, 2],
            vocab_size=_VOCABULARY,
            distinct_queries=0,
        )
        return RequestMaker(geometry, seed=self.num_items)


SMALL = Kind("small", 10, 0.1)
KINDS = (SMALL, Kind("large", 240, 0.9))


@dataclass(frozen=True)
class Call:
    """A request that was answered. Times are seconds since the phase began."""

    kind: Kind
    sent: float
    done: float
    outcome: str  # "scored", or the status and code of the error

    @property
    def latency(self) -> float:
        return self.done - self.sent


class Client:
    """Sends requests of all kinds to one server."""

    def __init__(self, url: str, *, deadline: float | None = None) -> None:
        timeout = {} if deadline is None else {"X-Request-Timeout": str(deadline)}
        self._pool = ConnectionPool(url, {"Content-Type": "application/json", **timeout})
        self._makers = {kind: kind.maker() for kind in KINDS}
        self._numbers = Counter[Kind]()
        self._rng = random.Random(0)
        # A kind's share is of the tokens, so there are more requests of a small kind.
        self._weights = [kind.share / kind.num_tokens for kind in KINDS]

    async def closed(self, seconds: float) -> list[Call]:
        """So many requests in flight all the time."""
        begin, calls = perf_counter(), list[Call]()

        async def keep_sending() -> None:
            while perf_counter() - begin < seconds:
                calls.append(await self._send(self._any_kind(), begin))

        await asyncio.gather(*(keep_sending() for _ in range(IN_FLIGHT)))
        await self._pool.close()
        return calls

    async def open(self, seconds: float, tokens_per_second: float) -> list[Call]:
        """Arrivals at random, whatever becomes of those before."""
        requests_per_second = tokens_per_second * sum(self._weights)  # as the shares add up to 1
        begin, arrival, tasks = perf_counter(), 0.0, list[asyncio.Task[Call]]()
        while (arrival := arrival + self._rng.expovariate(requests_per_second)) < seconds:
            await asyncio.sleep(max(0.0, begin + arrival - perf_counter()))
            tasks.append(asyncio.create_task(self._send(self._any_kind(), begin)))
        calls = await asyncio.gather(*tasks)
        await self._pool.close()
        return list(calls)

    def _any_kind(self) -> Kind:
        return self._rng.choices(KINDS, self._weights)[0]

    async def _send(self, kind: Kind, begin: float) -> Call:
        self._numbers[kind] += 1
        request = self._pool.request(SCORE_PATH, self._makers[kind].body(self._numbers[kind]))
        sent = perf_counter()
        answer = await self._pool.send(request)
        outcome = "scored"
        if answer.status != _OK:
            outcome = f"{answer.status} {json.loads(answer.body)['error']['code']}"
        return Call(kind, sent - begin, answer.read_at - begin, outcome)


def tokens_per_second(calls: Sequence[Call], deadline: float = math.inf) -> float:
    """Tokens of requests that were scored within their deadline, per second until the last answer."""
    good = [call for call in calls if call.outcome == "scored" and call.latency <= deadline]
    return sum(call.kind.num_tokens for call in good) / max(call.done for call in calls)


def judge(calls: Sequence[Call], capacity: float, seconds: float, deadline: float) -> dict[str, Any]:
    """The metrics of the overload, and whether they pass."""
    scored = [call for call in calls if call.outcome == "scored"]
    small = [call.latency for call in scored if call.kind is SMALL]
    goodput = tokens_per_second(calls, deadline)
    p99 = percentile(small, 99) if small else None
    late = sum(call.latency > deadline for call in scored)
    return {
        "capacity_tokens_per_second": round(capacity),
        "offered_tokens_per_second": round(sum(call.kind.num_tokens for call in calls) / seconds),
        "goodput_tokens_per_second": round(goodput),
        "goodput_share": round(goodput / capacity, 3),
        "small_p99_seconds": None if p99 is None else round(p99, 3),
        "late": late,
        "outcomes": {
            kind.name: dict(Counter(call.outcome for call in calls if call.kind is kind).most_common())
            for kind in KINDS
        },
        "passed": goodput >= LEAST_GOODPUT * capacity and not late and p99 is not None and p99 <= MOST_P99 * deadline,
    }


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The capacity of the server, and what it makes of the overload."""
    asyncio.run(Client(url).closed(options.capacity_seconds / 4))  # the first requests are slower
    capacity = tokens_per_second(asyncio.run(Client(url).closed(options.capacity_seconds)))
    print(f"capacity: {capacity:,.0f} tokens/s; sending {options.load:g} times that", file=sys.stderr, flush=True)
    client = Client(url, deadline=options.deadline)
    calls = asyncio.run(client.open(options.seconds, options.load * capacity))
    return {
        "seconds": options.seconds,
        "load": options.load,
        "deadline_seconds": options.deadline,
        **judge(calls, capacity, options.seconds, options.deadline),
    }


@contextmanager
def server_of(options: argparse.Namespace) -> Iterator[str]:
    """The address of the server under test."""
    if options.url is not None:
        yield options.url
        return
    flags = options.flags or FAKE_SERVER
    variables = {} if options.flags else FAKE_SECONDS
    with (
        tempfile.TemporaryDirectory() as folder,
        ended_by_signals(),
        local_server(flags, Path(folder, "server.log"), env=variables) as server,
    ):
        yield server.url


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of the overload")
    parser.add_argument("--capacity-seconds", type=float, default=20.0, help="to measure the capacity")
    parser.add_argument("--load", type=float, default=3.0, help="times the capacity")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds for each request")
    parser.add_argument("--url", help="a server that is running")
    parser.add_argument("flags", nargs="*", help="of `prefixwise serve`, after --")
    options = parser.parse_args(arguments)
    if options.url is not None and options.flags:
        parser.error("--url is a server that is running, so it takes no flags")
    return options


def main() -> None:
    options = parse_options()
    with server_of(options) as url:
        found = measure(url, options)
    print(aligned([[name.replace("_", " "), str(value)] for name, value in found.items()], left=(0, 1)))
    print(json.dumps(found))
    sys.exit(not found["passed"])


if __name__ == "__main__":
    main()
