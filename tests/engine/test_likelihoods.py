"""Log-likelihoods through the scheduler, on the fake backend, whose logits can be computed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend, fake_logits
from prefixwise.contract.errors import InvalidValueError, VocabularyError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.likelihoods import Likelihoods, TokenLogprobs
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.forward.batch import ForwardBatch, RunningForward
from prefixwise.plan.likelihoods import TokenSequence
from tests.engine.step_runner import StepRunner

VOCABULARY = 40


@contextmanager
def likelihoods_of(**options: Any) -> Iterator[tuple[FakeBackend, Likelihoods]]:
    backend = FakeBackend(VOCABULARY, **options)
    engine = ScoringEngine(EngineConfig("fake"), Scheduler(backend, SchedulerOptions()), None)
    try:
        yield backend, Likelihoods(engine)
    finally:
        engine.close()


def sequences_of(seed: int, lens: Sequence[int]) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCABULARY, 200)
    rows = []
    for number, size in enumerate(lens):
        ids = np.concatenate([shared[: rng.integers(1, 200)], rng.integers(0, VOCABULARY, size)]).astype(np.int32)
        rows.append(TokenSequence(ids, int(rng.integers(1, len(ids))), reads_next=bool(number % 2)))
    return rows


def check(sequence: TokenSequence, found: TokenLogprobs, top_k: int) -> None:
    ids, every = sequence.token_ids, np.arange(VOCABULARY, dtype=np.int32)
    for row, place in enumerate(range(sequence.first, len(ids) + sequence.reads_next)):
        logits = fake_logits(ids[:place], every).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        token = int(ids[place]) if place < len(ids) else 0
        assert found.logprobs[row] == pytest.approx(logprobs[token], abs=1e-5)
        assert found.is_greedy[row] == (logits[token] == logits.max())
        best = np.argsort(-logits, kind="stable")[:top_k]
        assert found.top_ids[row].tolist() == best.tolist()
        assert found.top_logprobs[row] == pytest.approx(logprobs[best], abs=1e-5)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("kv", [4, 10, 1000])
@pytest.mark.parametrize("short", [False, True])
def test_they_are_those_of_each_token_s_own_context(joins: bool, kv: int, short: bool) -> None:
    asked = sequences_of(1, [1, 2, 5, 130, 300, 1, 40])
    options = {"joins_prefill": joins, "num_kv_blocks": kv, "reads_short_blocks": short}
    with likelihoods_of(step_tokens=64, **options) as (_, likelihoods):
        results = likelihoods.read(asked, top_k=3)
        for sequence, found in zip(asked, results, strict=True):
            check(sequence, found, 3)
        alone = [likelihoods.read([each], top_k=1)[0] for each in asked]
    for found, single in zip(results, alone, strict=True):
        assert found.logprobs.tolist() == single.logprobs.tolist()
        assert found.total == single.total
        assert found.is_all_greedy == single.is_all_greedy


@pytest.mark.parametrize(("short", "most"), [(False, 128), (True, 32)])
def test_a_prefix_is_computed_once_across_calls(short: bool, most: int) -> None:
    context = np.arange(1, 301, dtype=np.int32) % VOCABULARY
    asked = [TokenSequence(np.append(context, np.int32(last)), 300) for last in range(5)]
    other = TokenSequence(np.append(context[:-5], np.int32(7)), 295)  # ends within a block
    with likelihoods_of(reads_short_blocks=short) as (backend, likelihoods):
        likelihoods.read(asked)
        first = sum(each.num_tokens for each in backend.forwards)
        likelihoods.read([*asked, other])
        second = sum(each.num_tokens for each in backend.forwards) - first
    assert first == 299 + 1  # the next tokens are read in one row each, after one segment
    assert second <= 1 + most


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_a_whole_prompt_is_computed_once(joins: bool, short: bool) -> None:
    """Its KV blocks are read while they are computed; in the next call those that are cached are computed again."""
    ids = np.random.default_rng(5).integers(0, VOCABULARY, 600).astype(np.int32)
    with likelihoods_of(joins_prefill=joins, step_tokens=300, reads_short_blocks=short) as (backend, likelihoods):
        (found,) = likelihoods.read([TokenSequence(ids, 1)])
        assert sum(each.num_tokens for each in backend.forwards) == 599
        (again,) = likelihoods.read([TokenSequence(ids, 1)])
        assert sum(each.num_tokens for each in backend.forwards) == 2 * 599
    check(TokenSequence(ids, 1), found, 1)
    assert again.logprobs.tolist() == found.logprobs.tolist()


class FailingAt(FakeBackend):
    """The forwards with these numbers do not start."""

    def __init__(self, *failing: int, **options: Any) -> None:
        super().__init__(VOCABULARY, **options)
        self._failing = failing
        self._num_starts = 0

    def start(self, batch: ForwardBatch) -> RunningForward:
        self._num_starts += 1
        if self._num_starts in self._failing:
            raise RuntimeError("the device has failed")
        return super().start(batch)


@pytest.mark.parametrize("failing", range(1, 6))
def test_after_a_failed_step_nothing_is_missing(failing: int) -> None:
    """The device fails once: blocks that were scored with it, and segments, are computed again."""
    asked = sequences_of(7, [300, 5, 200])
    backend = FailingAt(failing, step_tokens=128, joins_prefill=bool(failing % 2), reads_short_blocks=failing > 3)
    engine = ScoringEngine(EngineConfig("fake"), Scheduler(backend, SchedulerOptions()), None)
    try:
        found = Likelihoods(engine).read(asked, top_k=2)
    finally:
        engine.close()
    for sequence, each in zip(asked, found, strict=True):
        check(sequence, each, 2)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("failing", [(2,), (5,), (6,), (3, 9)])
def test_after_a_failed_step_no_unit_counts_twice(
    failing: tuple[int, ...], joins: bool, async_scheduling: bool
) -> None:
    """Also where a KV block is scored, delivered, and computed again."""
    asked = sequences_of(7, [600])
    backend = FailingAt(*failing, step_tokens=128, joins_prefill=joins, async_scheduling=async_scheduling)
    scheduler = Scheduler(backend, SchedulerOptions())
    try:
        likelihoods = Likelihoods(ScoringEngine(EngineConfig("fake"), scheduler, None))
        num_units = sum(len(group.tokens) for group in likelihoods.prepare(asked).plan.groups)
        (found,) = likelihoods.read(asked, top_k=2)
        stats = scheduler.stats()
    finally:
        scheduler.close()
    check(asked[0], found, 2)
    assert (stats.failed_steps, stats.items_scored) == (len(failing), num_units)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_requests_that_share_blocks_and_fail_again_and_again_count_every_unit_once(seed: int, short: bool) -> None:
    """Units are scored as KV blocks, or as segments where the other request computes the block."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, 700).astype(np.int32)
    asked = [TokenSequence(ids, 300), TokenSequence(ids[:-40], 1), TokenSequence(ids[:-5], 650)]
    runner = StepRunner(256, backend=FakeBackend(VOCABULARY), joins_prefill=bool(seed % 2))
    with likelihoods_of(reads_short_blocks=short) as (_, likelihoods):
        prepared = [likelihoods.prepare(each) for each in (asked, asked[:2])]
        states = [[likelihoods._engine.state_of(each) for each in call.requests] for call in prepared]
        everyone = [state for call in states for state in call]
        live, num_failures = everyone.copy(), 0
        while live:
            if num_failures < 20 and rng.random() < 0.4:
                num_failures += 1
                runner.fail(*live)
            else:
                runner.run(*live)
            for state in [state for state in live if state.is_launched]:
                live.remove(state)
                state.release_prefix(runner.cache)
        for call, of_call in zip(prepared, states, strict=True):
            for sequence, found in zip(asked, likelihoods.finish(call, of_call), strict=False):
                check(sequence, found, 1)
    assert num_failures
    for state in everyone:
        assert state.task.plan is not None
        assert state.num_items_done == len(state.task.plan.segments.tokens)
        assert 0 <= state.tokens_left <= state.cached_tokens


def test_one_that_fails_after_its_blocks_are_scored_gets_the_error() -> None:
    """Blocks that are computed again are no progress, so the second failure is known to be its own."""
    ids = np.arange(500, dtype=np.int32) % (VOCABULARY - 1)
    ids[450] = VOCABULARY - 1
    num_failures = 0

    class Failing(FakeBackend):
        def start(self, batch: ForwardBatch) -> RunningForward:
            nonlocal num_failures
            if VOCABULARY - 1 in batch.token_ids and num_failures < 10:
                num_failures += 1
                raise RuntimeError("the device has failed")
            return super().start(batch)

    engine = ScoringEngine(
        EngineConfig("fake"), Scheduler(Failing(VOCABULARY, step_tokens=128), SchedulerOptions()), None
    )
    try:
        with pytest.raises(RuntimeError, match="the device has failed"):
            Likelihoods(engine).read([TokenSequence(ids, 1)])
    finally:
        engine.close()
    assert num_failures == 2


def test_a_step_that_is_filled_and_dropped_has_scored_nothing() -> None:
    """Another request computes its KV blocks then, after a failure has taken them away from both."""
    ids = np.random.default_rng(5).integers(0, VOCABULARY, 600).astype(np.int32)
    runner = StepRunner(256, backend=FakeBackend(VOCABULARY))
    with likelihoods_of() as (_, likelihoods):
        prepared = likelihoods.prepare([TokenSequence(ids, 1)])
        first, second = (likelihoods._engine.state_of(prepared.requests[0]) for _ in range(2))
        assert runner.fill(first) is not None
        for state in (first, second):
            state.invalidate_prefix(runner.cache)
        for state in (second, first):
            while not state.is_launched:
                runner.run(state)
            (found,) = likelihoods.finish(prepared, [state])
            check(TokenSequence(ids, 1), found, 1)


def test_the_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    asked = sequences_of(2, [20, 30, 150])
    with likelihoods_of() as (_, likelihoods):
        likelihoods.read(asked, on_progress=lambda done, of: seen.append((done, of)))
    assert seen[-1][0] == seen[-1][1] == sum(each.num_rows for each in asked)
    assert seen == sorted(seen)


def test_few_are_queued_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of a request are freed when it is done, however many there are."""
    rng = np.random.default_rng(0)
    asked = [TokenSequence(rng.integers(0, VOCABULARY, 100).astype(np.int32), 60) for _ in range(200)]
    most = 0
    with likelihoods_of(step_tokens=64) as (_, likelihoods):
        submit = likelihoods._engine.submit_all
        live: list[RequestState] = []
        calls: list[int] = []

        def counted(states: Sequence[RequestState]) -> None:
            nonlocal most
            submit(states)
            live.extend(states)
            calls.append(len(states))
            most = max(most, sum(not each.is_done for each in live))

        monkeypatch.setattr(likelihoods._engine, "submit_all", counted)
        likelihoods.read(asked)
    assert len(live) == 200
    assert most <= 8
    assert calls[0] > 1  # together: steps of one request each would waste a GPU


def test_what_cannot_be_read_is_an_error() -> None:
    with likelihoods_of(max_context_len=10) as (_, likelihoods):
        with pytest.raises(InvalidValueError, match=r"prompt\[1\] must have at most 10 tokens.*got 11"):
            likelihoods.prepare([sequence(5), sequence(12)])
        with pytest.raises(VocabularyError, match="40"):
            likelihoods.prepare([TokenSequence(np.array([1, 40], np.int32), 1)])


def sequence(num_tokens: int) -> TokenSequence:
    return TokenSequence(np.ones(num_tokens, np.int32), 1)
