"""Engines on a backend whose forwards end when the test says so, and requests on their way through them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic
from typing import Any

import numpy as np

from prefixwise.backends.fake import FakeBackend, FakeBlock
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.result import ScoreResult
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prefix_cache import PinnedPrefix
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.engine.step import Step
from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import ForwardBatch, ForwardOutput, KVBlock, RunningForward
from prefixwise.plan.algorithms import PlanOptions
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.engine.naive import Limits, expect
from tests.faults import FaultyBackend

SECONDS = 20  # until a test that waits for something that does not come gives up
VOCAB_SIZE = 50
ALGORITHMS = ("serial", "packed", "prefill_extend")
MARK = VOCAB_SIZE - 1  # a token that only the request under test has


@dataclass(frozen=True, eq=False)
class WatchedBlock(FakeBlock):
    """Knows whether it was released, and complains the second time."""

    released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        assert not self.released.is_set(), "a block is released twice"
        self.released.set()


class GatedBackend(FakeBackend):
    """Forwards wait at a gate. Holds its users to what a device asks of them: no more blocks than there is room for,
    none read after its release, all from one thread, but for waiting with async scheduling."""

    def __init__(self, *, is_open: bool = False, **options: Any) -> None:
        super().__init__(**{"vocab_size": VOCAB_SIZE, **options})
        self.started: SimpleQueue[ForwardBatch] = SimpleQueue()
        self.num_running = 0
        self.made: list[WatchedBlock] = []
        self.num_closed = 0
        self.num_synchronized = 0
        self.fails: Callable[[ForwardBatch], bool] = lambda batch: False  # while it is waited for
        self.fails_to_start: Callable[[ForwardBatch], bool] = lambda batch: False
        self._gate = threading.Condition()
        self._is_open = is_open
        self._num_permits = 0
        self._num_arrived = 0
        self._thread: threading.Thread | None = None

    def start(self, batch: ForwardBatch) -> RunningForward:
        self._check_thread()
        if self.fails_to_start(batch):
            raise RuntimeError("the device does not start")
        read = [block for prefix in batch.prefixes for block in prefix.blocks]
        assert not any(block.released.is_set() for block in read if isinstance(block, WatchedBlock)), "read too late"
        running = super().start(batch)
        blocks = tuple(self._watch(block) for block in running.blocks)
        assert self.num_blocks_held <= self.info.num_kv_blocks, "more blocks than there is room for"
        self.num_running += 1
        self.started.put(batch)
        return RunningForward(blocks, lambda: self._finish_at_the_gate(batch, running))

    def synchronize(self) -> None:
        self._check_thread()
        self.num_synchronized += 1

    def close(self) -> None:
        self._check_thread()
        assert self.num_blocks_held == 0, "blocks outlive their device"
        self.num_closed += 1

    @property
    def num_blocks_held(self) -> int:
        return sum(not block.released.is_set() for block in self.made)

    def next_forward(self) -> ForwardBatch:
        """The next one that is given to the device, perhaps after a while."""
        return self.started.get(timeout=SECONDS)

    def let_pass(self, num_forwards: int = 1) -> None:
        with self._gate:
            self._num_permits += num_forwards
            self._gate.notify_all()

    def until_waited_for(self, num_forwards: int) -> None:
        """Return when so many have come to the gate, in all."""
        with self._gate:
            assert self._gate.wait_for(lambda: self._num_arrived >= num_forwards, SECONDS), "nobody comes to the gate"

    def open(self) -> None:
        with self._gate:
            self._is_open = True
            self._gate.notify_all()

    def _check_thread(self) -> None:
        self._thread = self._thread or threading.current_thread()
        assert threading.current_thread() is self._thread, "a device belongs to one thread"

    def _watch(self, block: KVBlock) -> WatchedBlock:
        assert isinstance(block, FakeBlock)
        self.made.append(WatchedBlock(block.num_tokens, block.token_ids))
        return self.made[-1]

    def _finish_at_the_gate(self, batch: ForwardBatch, running: RunningForward) -> ForwardOutput:
        if not self.info.async_scheduling:
            self._check_thread()
        with self._gate:
            self._num_arrived += 1
            self._gate.notify_all()
            assert self._gate.wait_for(lambda: self._is_open or self._num_permits, SECONDS), "nobody opens the gate"
            self._num_permits -= not self._is_open
        self.num_running -= 1
        if self.fails(batch):
            raise RuntimeError("the device has failed")
        return running.wait()


def engine_on(
    backend: Backend,
    *,
    delimiter: int | None = None,
    max_items: int = 100_000,
    tokenizer: TextTokenizer | None = None,
    scheduler: dict[str, Any] | None = None,
    **plan: Any,
) -> ScoringEngine:
    config = EngineConfig("fake", delimiter, max_items, PlanOptions(**plan))
    with ExitStack() as on_failure:
        owner = Scheduler(backend, SchedulerOptions(**(scheduler or {})))
        on_failure.callback(owner.close)
        engine = ScoringEngine(config, owner, tokenizer)
        on_failure.pop_all()
    return engine


@contextmanager
def live_engine(
    backend: GatedBackend, *, faults: FaultyBackend | None = None, **options: Any
) -> Iterator[ScoringEngine]:
    """An engine that is closed at the end, and whose backend is left with nothing that is held. `faults` wraps it."""
    engine = engine_on(faults or backend, **options)
    try:
        yield engine
    finally:
        backend.open()
        if faults is not None:
            faults.clear()
        engine.close()
    stats = engine.scheduler.stats()
    assert (stats.running_requests, stats.used_blocks, stats.pinned_blocks) == (0, 0, 0)
    assert engine.scheduler.admission.tokens == 0
    assert backend.num_blocks_held == stats.cached_blocks == 0
    assert backend.num_closed == 1


def body_of(query: list[int], items: list[list[int]], **fields: Any) -> dict[str, Any]:
    return {"query": query, "items": items, "label_token_ids": [3, 5], "score_mode": "softmax", **fields}


class Ticket:
    """A request that has been submitted."""

    def __init__(
        self, engine: ScoringEngine, body: dict[str, Any], *, deadline: float | None = None, priority: int = 0
    ) -> None:
        self.body = body
        self._engine = engine
        self._changes: SimpleQueue[None] = SimpleQueue()
        self._prepared = engine.prepare(parse_score_request(body))
        self.state = engine.submit(
            self._prepared, deadline=deadline, on_change=lambda: self._changes.put(None), priority=priority
        )

    def wait(self) -> None:
        while not self.state.is_done:
            self._changes.get(timeout=SECONDS)

    def result(self) -> ScoreResult:
        """Raises what went wrong."""
        self.wait()
        return self._engine.finish(self._prepared, self.state)

    def check(self) -> ScoreResult:
        """The scores are exactly those of the plain contexts."""
        result = self.result()
        backend = self._engine.backend
        limits = Limits(backend.config.vocab_size, backend.config.max_context_len, delimiter=None, bos=False)
        assert result.scores == expect(self.body, limits).scores
        return result


def pin(engine: ScoringEngine, query: list[int], *, ttl_seconds: float = 1000.0) -> PinnedPrefix:
    """Pin a prefix, and wait until it is done. Raises what went wrong."""
    changes: SimpleQueue[None] = SimpleQueue()
    prefix_ids = engine.prepare_prefix(np.array(query, np.int32))
    state = engine.submit_prefix(prefix_ids, ttl_seconds=ttl_seconds, on_change=lambda: changes.put(None))
    while not state.is_done:
        changes.get(timeout=SECONDS)
    return engine.finish_prefix(state)


def query_of(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + k) % 40 for k in range(num_tokens)]


def has(token: int) -> Callable[[ForwardBatch], bool]:
    return lambda batch: token in batch.token_ids


def num_prefills(backend: GatedBackend, token: int | None = None) -> int:
    return sum(bool(batch.cache_segments) and (token is None or has(token)(batch)) for batch in backend.forwards)


class Seen:
    """Looks at every forward that is waited for, and lets none fail."""

    def __init__(self, look: Callable[[ForwardBatch], int]) -> None:
        self.what: list[int] = []
        self._look = look

    def __call__(self, batch: ForwardBatch) -> bool:
        self.what.append(self._look(batch))
        return False


def next_prepared_step(engine: ScoringEngine) -> Step:
    """The step that is filled while the device is busy with the one before."""
    deadline = monotonic() + SECONDS
    while engine.scheduler._next_step is None:
        assert monotonic() < deadline, "nothing is prepared while the device runs"
    return engine.scheduler._next_step
