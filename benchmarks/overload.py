"""Overload: what a server makes of three times more requests than it can compute, within their deadlines.

First the capacity, with some requests in flight all the time. Then requests arrive at random (Poisson), `--load` times
as many, each with `--deadline` seconds as its X-Request-Timeout; a request that is refused is not sent again. Then the
capacity again: a machine with other work may have become slower or faster.

10 % of the tokens are of small requests, 90 % of large ones. A large one has a twentieth of the tokens that the device
computes within a deadline, at most 5,000; a small one has a twelfth of a large one's. So a device of any speed gets
hundreds of requests in two minutes, and one request more or less does not decide. Were a request as long as its
deadline, no server could keep its device busy with requests that end in time.

    capacity   tokens of all requests that were scored, per second until the last answer, before and after
    goodput    the same under overload, only of requests that were scored within their deadline
    late       answers with scores after the deadline
    busy       seconds of forward passes, of the seconds until the last answer
    in time    tokens of requests that were scored within their deadline, of all that the device computed
    device     both together: what requests that were scored in time had of the device. A machine that has other work
               changes its speed from minute to minute, and the capacity before and after is not that of the overload;
               this share is measured in the very time of the overload, by the server's own counters.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.request import urlopen

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
LARGEST = 5000  # tokens of a large request
LARGE_SHARE = 0.05  # a large request, of what the device computes within a deadline
SMALL = "small"
_OK = 200
_ITEM_TOKENS = 20
_LEAST_QUERY = 8
_VOCABULARY = 40_000  # no more than the embedded model's


@dataclass(frozen=True)
class Kind:
    """Requests of one size, and their share of the tokens."""

    name: str
    query_tokens: int
    num_items: int
    share: float

    @property
    def num_tokens(self) -> int:
        return self.query_tokens + self.num_items * _ITEM_TOKENS

    def maker(self) -> RequestMaker:
        geometry = LoadGeometry(
            query_tokens=self.query_tokens,
            num_items=self.num_items,
            item_tokens=_ITEM_TOKENS,
            label_token_ids=[1, 2],
            vocab_size=_VOCABULARY,
            distinct_queries=0,
        )
        return RequestMaker(geometry, seed=self.num_items)


Kinds = tuple[Kind, Kind]


def kinds_of(large_tokens: float) -> Kinds:
    """Small and large requests, where a large one has about so many tokens: a 25th of them are its query, and a small
    one has as many tokens of items."""
    query_tokens = max(_LEAST_QUERY, round(min(large_tokens, LARGEST) / 25))
    return (
        Kind(SMALL, query_tokens, max(1, query_tokens // _ITEM_TOKENS), 0.1),
        Kind("large", query_tokens, 24 * query_tokens // _ITEM_TOKENS, 0.9),
    )


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
    """Sends requests of some kinds to one server, one phase after the other. No two have the same query."""

    def __init__(self, url: str, kinds: Sequence[Kind]) -> None:
        self._url = url
        self._kinds = kinds
        self._makers = {kind: kind.maker() for kind in kinds}
        self._numbers = Counter[Kind]()
        self._rng = random.Random(0)
        # A kind's share is of the tokens, so there are more requests of a small kind.
        self._weights = [kind.share / kind.num_tokens for kind in kinds]

    async def closed(self, seconds: float) -> list[Call]:
        """So many requests in flight all the time."""
        pool, begin, calls = self._pool(), perf_counter(), list[Call]()

        async def keep_sending() -> None:
            while perf_counter() - begin < seconds:
                calls.append(await self._send(pool, self._any_kind(), begin))

        await asyncio.gather(*(keep_sending() for _ in range(IN_FLIGHT)))
        await pool.close()
        return calls

    async def open(self, seconds: float, tokens_per_second: float, deadline: float) -> list[Call]:
        """Arrivals at random, whatever becomes of those before."""
        requests_per_second = tokens_per_second * sum(self._weights) / sum(kind.share for kind in self._kinds)
        pool = self._pool({"X-Request-Timeout": str(deadline)})
        begin, arrival, tasks = perf_counter(), 0.0, list[asyncio.Task[Call]]()
        while (arrival := arrival + self._rng.expovariate(requests_per_second)) < seconds:
            await asyncio.sleep(max(0.0, begin + arrival - perf_counter()))
            tasks.append(asyncio.create_task(self._send(pool, self._any_kind(), begin)))
        calls = await asyncio.gather(*tasks)
        await pool.close()
        return list(calls)

    def _pool(self, headers: Mapping[str, str] | None = None) -> ConnectionPool:
        return ConnectionPool(self._url, {"Content-Type": "application/json", **(headers or {})})

    def _any_kind(self) -> Kind:
        return self._rng.choices(self._kinds, self._weights)[0]

    async def _send(self, pool: ConnectionPool, kind: Kind, begin: float) -> Call:
        self._numbers[kind] += 1
        request = pool.request(SCORE_PATH, self._makers[kind].body(self._numbers[kind]))
        sent = perf_counter()
        answer = await pool.send(request)
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
    small = [call.latency for call in scored if call.kind.name == SMALL]
    goodput = tokens_per_second(calls, deadline)
    p99 = percentile(small, 99) if small else None
    late = sum(call.latency > deadline for call in scored)
    return {
        "offered_tokens_per_second": round(sum(call.kind.num_tokens for call in calls) / seconds),
        "goodput_tokens_per_second": round(goodput),
        "goodput_share": round(goodput / capacity, 3),
        "small_p99_seconds": None if p99 is None else round(p99, 3),
        "late": late,
        "outcomes": {
            name: dict(Counter(call.outcome for call in calls if call.kind.name == name).most_common())
            for name in dict.fromkeys(call.kind.name for call in calls)
        },
        "passed": goodput >= LEAST_GOODPUT * capacity and not late and p99 is not None and p99 <= MOST_P99 * deadline,
    }


def device_of(url: str) -> tuple[float, int]:
    """Seconds of forward passes, and the tokens that they computed, since the server's start."""
    with urlopen(f"{url}/server_info") as answer:
        stats = json.load(answer)["stats"]
    return stats["device_seconds"], stats["tokens_computed"]


def device_shares(
    calls: Sequence[Call], deadline: float, busy_seconds: float, computed_tokens: int
) -> dict[str, float]:
    """What requests that were scored in time had of the device."""
    seconds = max(call.done for call in calls)
    busy, in_time = busy_seconds / seconds, tokens_per_second(calls, deadline) * seconds / computed_tokens
    return {"busy_share": round(busy, 3), "in_time_share": round(in_time, 3), "device_share": round(busy * in_time, 3)}


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The capacity of the server, and what it makes of the overload."""
    kinds = kinds_of(LARGE_SHARE * options.deadline * warm_up(url, options.capacity_seconds / 4))
    client = Client(url, kinds)

    def closed() -> list[Call]:
        return asyncio.run(client.closed(options.capacity_seconds))

    before = tokens_per_second(closed())
    sizes = " and ".join(f"{kind.num_tokens:,}" for kind in kinds)
    message = f"capacity: {before:,.0f} tokens/s; sending {options.load:g} times that, in requests of {sizes} tokens"
    print(message, file=sys.stderr, flush=True)
    begin_seconds, begin_tokens = device_of(url)
    calls = asyncio.run(client.open(options.seconds, options.load * before, options.deadline))
    end_seconds, end_tokens = device_of(url)
    after = tokens_per_second(closed())
    return {
        "seconds": options.seconds,
        "load": options.load,
        "deadline_seconds": options.deadline,
        "request_tokens": {kind.name: kind.num_tokens for kind in kinds},
        "capacity_tokens_per_second": {"before": round(before), "after": round(after)},
        **judge(calls, (before + after) / 2, options.seconds, options.deadline),
        **device_shares(calls, options.deadline, end_seconds - begin_seconds, end_tokens - begin_tokens),
    }


def warm_up(url: str, seconds: float) -> float:
    """The first requests are slower. Returns about how many tokens the server computes in a second."""
    small, _ = kinds_of(LARGEST)
    client = Client(url, [small])
    asyncio.run(client.closed(seconds / 2))
    return tokens_per_second(asyncio.run(client.closed(seconds / 2)))


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
    parser.add_argument(
        "--capacity-seconds", type=float, default=20.0, help="to measure the capacity, before and after"
    )
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
