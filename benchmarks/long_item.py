"""What a small request waits beside a long one: 10 short items beside one item, or one query, of 2,500 tokens.

Measured: the seconds of the small request alone and, a step after the long one has begun, beside it, in turns on one
engine; no query comes twice. Then the long request is cancelled: what is left is the step in flight. The goal is 3 x
the small one's time alone plus one step, in the median of the turns; the exit status is 1 if it is missed. Other
programs on the machine make every figure larger. The last line is JSON.

    python -m benchmarks.long_item [--tokens 2500] [--turns 5] [--long item|query] [--model FOLDER] [--backend NAME]
"""

from __future__ import annotations

import argparse
import json
import sys
from queue import SimpleQueue
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from prefixwise import Scorer
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.request_state import RequestState

SMALL_QUERY, SMALL_ITEMS, SMALL_ITEM = 20, 10, 10  # tokens, items, tokens
GOAL = 3.0  # times alone, plus one step


class Requests:
    """Bodies of random tokens, each different."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)

    def small(self) -> dict[str, Any]:
        return self._body(SMALL_QUERY, [SMALL_ITEM] * SMALL_ITEMS)

    def long(self, kind: str, num_tokens: int) -> dict[str, Any]:
        return self._body(SMALL_QUERY, [num_tokens]) if kind == "item" else self._body(num_tokens, [SMALL_ITEM])

    def _body(self, query: int, items: list[int]) -> dict[str, Any]:
        return {"query": self._ids(query), "items": [self._ids(length) for length in items], "label_token_ids": [1, 2]}

    def _ids(self, length: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._vocab_size, length).tolist()
        return ids


class Running:
    """A request that was submitted."""

    def __init__(self, engine: ScoringEngine, body: dict[str, Any]) -> None:
        self._changes: SimpleQueue[None] = SimpleQueue()
        self._begin = perf_counter()
        prepared = engine.prepare(parse_score_request(body))
        self.state: RequestState = engine.submit(prepared, on_change=lambda: self._changes.put(None))

    def wait_for_step(self) -> None:
        """Until a step with a part of it is done."""
        self._changes.get()

    def seconds(self) -> float:
        """Until it is done."""
        while not self.state.is_done:
            self._changes.get()
        return perf_counter() - self._begin


def turn(engine: ScoringEngine, requests: Requests, kind: str, num_tokens: int) -> dict[str, float]:
    """Seconds of the small request alone and beside, of a step beside, and from the cancellation to the end."""
    alone = Running(engine, requests.small()).seconds()
    long = Running(engine, requests.long(kind, num_tokens))
    long.wait_for_step()
    before = engine.scheduler.stats()
    beside = Running(engine, requests.small()).seconds()
    after = engine.scheduler.stats()
    was_done = long.state.is_done
    long.state.cancel()
    begin = perf_counter()
    long.seconds()
    step = (after.device_seconds - before.device_seconds) / max(1, after.steps - before.steps)
    cancelled = 0.0 if was_done else perf_counter() - begin
    return {"alone": alone, "beside": beside, "step": step, "cancelled": cancelled}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2500)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--long", choices=["item", "query"], default="item")
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    with Scorer(args.model, backend=args.backend) as scorer:
        engine = scorer.engine
        requests = Requests(engine.backend.config.vocab_size)
        Running(engine, requests.small()).seconds()
        turns = [turn(engine, requests, args.long, args.tokens) for _ in range(args.turns)]
    figures = {name: round(median(each[name] for each in turns), 4) for name in turns[0]}
    allowed = round(GOAL * figures["alone"] + figures["step"], 4)
    for name, seconds in figures.items():
        print(f"{name:>10} {seconds:8.3f} s")
    is_met = figures["beside"] <= allowed
    print(f"{'allowed':>10} {allowed:8.3f} s: {'met' if is_met else 'missed'}")
    print(json.dumps({"long": args.long, "tokens": args.tokens, "turns": args.turns, **figures, "allowed": allowed}))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
