"""Three times more than the device can compute, for two minutes of simulated time.

The scheduler and its threads are real, the device is a formula, and time passes only while it computes.
`python -m benchmarks.overload` does the same over HTTP, in real time.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.bench.rules import percentile
from prefixwise.contract.errors import DeadlineExceededError, QueueFullError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import PreparedRequest
from prefixwise.engine.request_state import RequestState
from tests.engine.live import SECONDS, body_of, engine_on

STEP_TOKENS = 2048
STEP_SECONDS, TOKEN_SECONDS = 0.01, 2e-4
CAPACITY = STEP_TOKENS / (STEP_SECONDS + STEP_TOKENS * TOKEN_SECONDS)  # tokens per second
MINUTES = 2
TIMEOUT = 20.0


@dataclass(frozen=True)
class Kind:
    """Requests of one size, and their share of the traffic in tokens."""

    name: str
    num_items: int  # of 20 tokens
    share: float

    @property
    def num_tokens(self) -> int:
        return 20 * self.num_items


SMALL, LARGE = 20, 250  # a turn, and a second of the device
TRAFFIC = {
    "small ones among large ones": (Kind("small", SMALL, 0.1), Kind("large", LARGE, 0.9)),
    "small ones that fill most of the device": (Kind("small", SMALL, 0.25), Kind("large", LARGE, 0.75)),
    "small ones alone": (Kind("small", SMALL, 1.0),),
    "large ones alone": (Kind("large", LARGE, 1.0),),
    "large ones that take a third of their time": (Kind("small", SMALL, 0.1), Kind("large", 1700, 0.9)),
    "of all sizes": (Kind("small", SMALL, 0.2), Kind("medium", 80, 0.3), Kind("large", LARGE, 0.5)),
}


class Traffic:
    """Arrivals at random, and what becomes of them. `now` is the time; `compute` is what the device does with it."""

    def __init__(self, kinds: tuple[Kind, ...], load: float) -> None:
        self.now = 1000.0
        self.end = self.now + 60 * MINUTES
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.latencies: dict[str, list[float]] = {kind.name: [] for kind in kinds}
        self.good_tokens = self.num_too_late = 0
        self.retry_after: set[int] = set()
        self._arrivals = deque(sorted(self._arrivals_of(kinds, load), key=lambda arrival: arrival[0]))
        self._lock = threading.Lock()
        self._num_live = 0
        self._idle: SimpleQueue[None] = SimpleQueue()

    def _arrivals_of(self, kinds: tuple[Kind, ...], load: float) -> Iterator[tuple[float, Kind]]:
        rng = random.Random(0)
        for kind in kinds:
            time = self.now
            while (time := time + rng.expovariate(load * CAPACITY * kind.share / kind.num_tokens)) < self.end:
                yield time, kind

    def run(self, engine: ScoringEngine) -> None:
        self._engine = engine
        self._prepared: dict[Kind, PreparedRequest] = {}
        while self._arrivals:
            self.now = max(self.now, self._arrivals[0][0])
            if self._submit_next():
                self._idle.get(timeout=3 * SECONDS)

    def compute(self, seconds: float) -> None:
        """The device is busy, and requests come meanwhile."""
        end = self.now + seconds
        while self._arrivals and self._arrivals[0][0] <= end:
            self.now = self._arrivals[0][0]
            self._submit_next()
        self.now = end

    def _submit_next(self) -> bool:
        """True if it was admitted."""
        begin, kind = self._arrivals.popleft()
        if kind not in self._prepared:
            body = body_of([1], [[2] * 20] * kind.num_items, algorithm="prefill_extend")
            self._prepared[kind] = self._engine.prepare(parse_score_request(body))
        state = self._engine.state_of(
            self._prepared[kind], deadline=begin + TIMEOUT, on_change=lambda: self._change(state, kind, begin)
        )
        with self._lock:
            self._num_live += 1
        try:
            self._engine.submit_all([state])
        except QueueFullError as error:
            self.retry_after.add(error.retry_after)
            self.outcomes[kind.name, error.code] += 1
            self._leave()
            return False
        return True

    def _change(self, state: RequestState, kind: Kind, begin: float) -> None:
        if not state.is_done:
            return
        if state.error is None:
            self.num_too_late += self.now > begin + TIMEOUT
            self.outcomes[kind.name, "scored"] += 1
            self.latencies[kind.name].append(self.now - begin)
            self.good_tokens += kind.num_tokens if self.now <= self.end else 0
        else:
            self.outcomes[kind.name, type(state.error).__name__] += 1
        self._leave()
        if not self._num_live:
            self._idle.put(None)

    def _leave(self) -> None:
        with self._lock:
            self._num_live -= 1

    @property
    def goodput(self) -> float:
        """Of the capacity: tokens of requests that were scored in time."""
        return self.good_tokens / (60 * MINUTES) / CAPACITY


def run(monkeypatch: pytest.MonkeyPatch, name: str, load: float) -> Traffic:
    traffic = Traffic(TRAFFIC[name], load)
    for module in ("admission", "in_flight", "live_requests", "request_state", "scheduler"):
        monkeypatch.setattr(f"prefixwise.engine.{module}.monotonic", lambda: traffic.now)
    monkeypatch.setattr("prefixwise.backends.fake.sleep", traffic.compute)
    backend = FakeBackend(step_tokens=STEP_TOKENS, seconds_per_forward=STEP_SECONDS, seconds_per_token=TOKEN_SECONDS)
    engine = engine_on(backend)
    try:
        traffic.run(engine)
    finally:
        engine.close()
    return traffic


@pytest.mark.parametrize("name", TRAFFIC)
def test_at_three_times_the_capacity_the_device_works_for_answers_in_time(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    traffic = run(monkeypatch, name, load=3.0)
    assert traffic.goodput >= 0.9, traffic.outcomes
    assert {outcome for _, outcome in traffic.outcomes} <= {"scored", "queue_too_long", DeadlineExceededError.__name__}
    late = sum(traffic.outcomes[kind, DeadlineExceededError.__name__] for kind in traffic.latencies)
    assert late <= 0.01 * traffic.outcomes.total(), traffic.outcomes
    assert traffic.num_too_late == 0
    assert 1 <= min(traffic.retry_after) <= max(traffic.retry_after) <= 60
    if "small" in traffic.latencies:
        assert percentile(traffic.latencies["small"], 99) <= TIMEOUT / 2


def test_below_the_capacity_small_requests_are_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = run(monkeypatch, "small ones among large ones", load=0.8)
    small = {outcome for kind, outcome in traffic.outcomes if kind == "small"}
    assert small == {"scored"}
    assert traffic.outcomes["large", "scored"] >= 0.95 * sum(
        number for (kind, _), number in traffic.outcomes.items() if kind == "large"
    )
