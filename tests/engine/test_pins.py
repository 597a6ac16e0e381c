"""Pinned prefixes: computed before any request needs them, and cached until they expire."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Any

import numpy as np
import pytest

from prefixwise.contract.errors import (
    BackendError,
    CancelledError,
    DeadlineExceededError,
    InvalidValueError,
    RequestError,
)
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prefix_cache import Pins, PrefixCache, block_keys
from prefixwise.engine.request_state import RequestState
from prefixwise.forward.batch import KV_BLOCK_SIZE, KVBlock
from tests.engine.live import SECONDS, VOCAB_SIZE, GatedBackend, Ticket, body_of, live_engine, pin

QUERY = [k % 40 for k in range(300)]  # three blocks


def small_backend(**options: Any) -> GatedBackend:
    """Room for six blocks, of which the longest prefix has three, so that three can be pinned."""
    fields = {"is_open": True, "num_kv_blocks": 6, "max_context_len": 3 * KV_BLOCK_SIZE, **options}
    return GatedBackend(**fields)


def crowd_out(engine: ScoringEngine) -> None:
    """Enough other prefixes that nothing stays which could go."""
    for number in range(6):
        Ticket(engine, body_of([41 + number] * 300, [[1]])).check()


def cached_tokens(engine: ScoringEngine, query: list[int] = QUERY) -> int:
    return Ticket(engine, body_of(query, [[1], [2, 3]])).check().usage.cached_tokens


def submit_pin(engine: ScoringEngine, query: list[int], **fields: Any) -> RequestState:
    return engine.submit_prefix(engine.prepare_prefix(np.array(query, np.int32)), **{"ttl_seconds": 1000.0, **fields})


def refusal(engine: ScoringEngine, query: list[int]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        pin(engine, query)
    return caught.value


class TestPin:
    def test_a_later_request_finds_its_whole_prefix_and_has_the_same_scores(self) -> None:
        backend = small_backend()
        with live_engine(backend) as engine:
            pinned = pin(engine, QUERY, ttl_seconds=60)
            assert (pinned.num_tokens, pinned.cached_tokens, pinned.ttl_seconds) == (300, 0, 60)
            assert pinned.num_bytes == 3 * backend.info.kv_block_bytes
            assert len(backend.forwards) == 1
            assert cached_tokens(engine) == 300
            assert len(backend.forwards) == 2, "items only"

    def test_it_stays_however_many_others_come(self) -> None:
        with live_engine(small_backend()) as engine:
            pin(engine, QUERY)
            crowd_out(engine)
            assert cached_tokens(engine) == 300

    def test_a_prefix_that_is_not_pinned_does_not(self) -> None:
        with live_engine(small_backend()) as engine:
            assert cached_tokens(engine) == 0
            crowd_out(engine)
            assert cached_tokens(engine) == 0

    def test_one_that_is_there_already_is_pinned_without_a_forward(self) -> None:
        backend = small_backend()
        with live_engine(backend) as engine:
            assert cached_tokens(engine) == 0
            before = len(backend.forwards)
            assert pin(engine, QUERY).cached_tokens == 300
            assert len(backend.forwards) == before
            crowd_out(engine)
            assert cached_tokens(engine) == 300
            stats = engine.scheduler.stats()
            assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (300 * 9, 600)

    def test_one_that_a_request_is_just_computing_is_pinned_when_it_is_done(self) -> None:
        backend = small_backend(is_open=False)
        with live_engine(backend) as engine:
            ticket = Ticket(engine, body_of(QUERY, [[1]] * 500))
            backend.next_forward()
            state = submit_pin(engine, QUERY)
            backend.open()
            ticket.check()
            Ticket(engine, body_of([1], [[2]])).check()
            assert state.is_done
            assert engine.finish_prefix(state).cached_tokens == 300

    def test_the_beginning_of_a_pinned_prefix_serves_others_too(self) -> None:
        with live_engine(small_backend()) as engine:
            pin(engine, QUERY[:KV_BLOCK_SIZE])
            crowd_out(engine)
            assert cached_tokens(engine) == KV_BLOCK_SIZE

    def test_it_does_not_hold_up_requests(self) -> None:
        backend = small_backend(is_open=False, step_tokens=512)
        with live_engine(backend) as engine:
            large = Ticket(engine, body_of([7], [[2, 3]] * 1000, algorithm="prefill_extend"))
            backend.next_forward()
            state, small = submit_pin(engine, QUERY), Ticket(engine, body_of([5], [[2]]))
            backend.open()
            small.check()
            large.check()
            assert state.is_done
            assert engine.finish_prefix(state).num_tokens == 300


class TestEnd:
    def test_it_can_be_released_by_its_id_once(self) -> None:
        with live_engine(small_backend()) as engine:
            pinned = pin(engine, QUERY)
            assert engine.release_prefix(pinned.id)
            assert not engine.release_prefix(pinned.id)
            assert not engine.release_prefix("unknown")
            crowd_out(engine)
            assert engine.scheduler.stats().pinned_blocks == 0
            assert cached_tokens(engine) == 0

    def test_of_two_pins_on_one_prefix_each_holds_it(self) -> None:
        with live_engine(small_backend(num_kv_blocks=9)) as engine:
            first, second = pin(engine, QUERY), pin(engine, QUERY)
            assert first.id != second.id
            engine.release_prefix(first.id)
            for _ in range(2):
                crowd_out(engine)
            assert cached_tokens(engine) == 300
            engine.release_prefix(second.id)
            for _ in range(2):
                crowd_out(engine)
            assert cached_tokens(engine) == 0

    def test_the_list_has_those_that_are_held(self) -> None:
        with live_engine(small_backend()) as engine:
            assert engine.pinned_prefixes() == []
            first, second = pin(engine, [1, 2]), pin(engine, [3, 4])
            assert engine.pinned_prefixes() == [first, second]
            engine.release_prefix(first.id)
            assert engine.pinned_prefixes() == [second], "at once, whatever the scheduler is at"

    def test_it_ends_when_its_time_is_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        monkeypatch.setattr("prefixwise.engine.prefix_cache.monotonic", lambda: now[0])
        with live_engine(small_backend()) as engine:
            pin(engine, QUERY, ttl_seconds=60.0)
            now[0] += 59.0
            crowd_out(engine)
            assert cached_tokens(engine) == 300
            now[0] += 2.0
            crowd_out(engine)
            assert engine.pinned_prefixes() == []
            assert cached_tokens(engine) == 0

    def test_it_ends_also_where_no_request_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with live_engine(small_backend()) as engine:
            pins, gone = engine.scheduler.pins, threading.Event()
            expire = pins.release_expired

            def watched() -> float | None:
                had, left = pins.num_blocks, expire()
                if had and not pins.num_blocks:
                    gone.set()
                return left

            monkeypatch.setattr(pins, "release_expired", watched)
            pin(engine, QUERY, ttl_seconds=0.01)
            assert gone.wait(SECONDS)
            assert (engine.pinned_prefixes(), engine.scheduler.stats().used_blocks) == ([], 0)

    def test_the_closing_engine_lets_go_of_it(self) -> None:
        with live_engine(small_backend()) as engine:
            pin(engine, QUERY)
            engine.close()
            assert engine.pinned_prefixes() == []
            with pytest.raises(BackendError, match="closed"):
                submit_pin(engine, QUERY)

    def test_a_failure_of_the_device_loses_it(self, caplog: pytest.LogCaptureFixture) -> None:
        backend = small_backend()
        mark = VOCAB_SIZE - 1
        with live_engine(backend) as engine:
            pinned = pin(engine, QUERY)
            backend.fails = lambda batch: mark in batch.token_ids
            with pytest.raises(RuntimeError, match="the device has failed"):
                Ticket(engine, body_of([mark], [[1]])).result()
            assert engine.pinned_prefixes() == []
            assert not engine.release_prefix(pinned.id)
            assert cached_tokens(engine) == 0
            assert pin(engine, QUERY).cached_tokens == 300
        assert caplog.messages == ["a forward pass failed"] * 2


class TestEviction:
    """Six blocks, and a prefix may have as many. Half of them can be pinned, until a request needs them."""

    def backend(self, **options: Any) -> GatedBackend:
        return small_backend(max_context_len=6 * KV_BLOCK_SIZE, **options)

    def test_where_the_longest_prefix_takes_all_half_can_be_pinned(self) -> None:
        with live_engine(self.backend()) as engine:
            pin(engine, QUERY)
            assert "at most 3 blocks, 3 are pinned and this prefix has 1" in refusal(engine, [1]).message

    def test_a_request_that_needs_the_room_of_a_pin_gets_it(self, caplog: pytest.LogCaptureFixture) -> None:
        with live_engine(self.backend()) as engine:
            pinned = pin(engine, QUERY)
            assert cached_tokens(engine, [41] * 5 * KV_BLOCK_SIZE) == 0
            assert engine.pinned_prefixes() == []
            assert not engine.release_prefix(pinned.id)
            assert cached_tokens(engine, [41] * 5 * KV_BLOCK_SIZE) == 5 * KV_BLOCK_SIZE
            assert engine.scheduler.stats().pinned_blocks == 0
            assert pin(engine, [1]).num_tokens == 1, "there is room for another"
        assert caplog.messages == ["a pinned prefix was evicted before it expired, as a request needed its KV blocks"]

    def test_the_oldest_go_first_and_no_more_than_must(self) -> None:
        with live_engine(self.backend()) as engine:
            pinned = [pin(engine, [number]) for number in range(3)]
            cached_tokens(engine, [41] * 5 * KV_BLOCK_SIZE)
            assert engine.pinned_prefixes() == pinned[2:]
            last = Ticket(engine, body_of([2], [[1]], algorithm="prefill_extend"))
            assert last.check().usage.cached_tokens == 1

    def test_one_that_reads_the_pinned_prefix_leaves_it(self) -> None:
        with live_engine(self.backend()) as engine:
            pinned = pin(engine, QUERY[: 2 * KV_BLOCK_SIZE])
            assert cached_tokens(engine, [*QUERY, *QUERY]) == 2 * KV_BLOCK_SIZE
            assert engine.pinned_prefixes() == [pinned]

    def test_it_stays_where_another_request_makes_the_room(self) -> None:
        backend = self.backend(is_open=False)
        with live_engine(backend) as engine:
            backend.let_pass()
            pinned = pin(engine, [1])
            holder = Ticket(engine, body_of(QUERY, [[1]] * 5000, algorithm="prefill_extend"))
            for _ in range(2):
                backend.next_forward()
            waiting = Ticket(engine, body_of([41] * 300, [[2]], algorithm="prefill_extend"))
            backend.open()
            holder.check()
            waiting.check()
            assert engine.pinned_prefixes() == [pinned]


class TestSynchronization:
    """A forward that only keeps a prefix is waited for, too."""

    @pytest.mark.parametrize("is_async", [False, True])
    def test_the_prefix_is_there_before_the_pin_is_answered(self, is_async: bool) -> None:
        backend = small_backend(is_open=False, async_scheduling=is_async)
        with live_engine(backend) as engine:
            answered: SimpleQueue[int] = SimpleQueue()
            state = submit_pin(engine, QUERY, on_change=lambda: answered.put(backend.num_running))
            backend.until_waited_for(1)
            assert not state.is_done
            backend.open()
            assert answered.get(timeout=SECONDS) == 0
            assert state.is_done

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_failure_that_shows_only_then_is_the_pins(self, is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
        backend = small_backend(async_scheduling=is_async)
        with live_engine(backend) as engine:
            backend.fails = lambda batch: bool(batch.cache_segments)
            with pytest.raises(RuntimeError, match="the device has failed"):
                pin(engine, QUERY)
            backend.fails = lambda batch: False
            assert engine.pinned_prefixes() == []
            assert cached_tokens(engine) == 0
        assert caplog.messages == ["a forward pass failed"] * 2


class TestRefusals:
    def test_room_for_the_longest_prefix_stays(self) -> None:
        backend = small_backend()
        with live_engine(backend) as engine:
            pin(engine, [1])
            pin(engine, [2])
            error = refusal(engine, QUERY[:200])
            assert (error.code, error.status, error.param) == ("prefix_cache_full", 400, "query")
            assert error.message == (
                "pinned prefixes may take at most 3 blocks, 2 are pinned and this prefix has 2; "
                "release one, or give prefixes more memory (prefix_cache_bytes)"
            )
            assert len(backend.forwards) == 2, "it was not even computed"
            pin(engine, [3])
            assert cached_tokens(engine) == 0, "the longest prefix can still be had"

    def test_where_two_come_at_once_for_the_last_room_one_gets_it(self) -> None:
        backend = small_backend(is_open=False)
        with live_engine(backend) as engine:
            ticket = Ticket(engine, body_of([1], [[2]]))
            backend.next_forward()
            states = [submit_pin(engine, query) for query in (QUERY[:200], QUERY[50:250])]
            backend.open()
            ticket.check()
            Ticket(engine, body_of([2], [[2]] * 100)).check()
            assert engine.finish_prefix(states[0]).num_tokens == 200
            with pytest.raises(InvalidValueError, match="2 are pinned and this prefix has 2"):
                engine.finish_prefix(states[1])

    def test_where_prefixes_are_not_cached_none_is_pinned(self) -> None:
        with live_engine(GatedBackend(is_open=True), scheduler={"prefix_cache": False}) as engine:
            assert refusal(engine, QUERY).code == "prefix_cache_disabled"
            assert [cached_tokens(engine) for _ in range(2)] == [0, 0]

    @pytest.mark.parametrize(
        ("query", "code", "message"),
        [
            ([1] * 384, "context_too_long", "query must have at most 384 tokens, got 385"),
            ([1, VOCAB_SIZE], "token_id_exceeds_vocab", f"below {VOCAB_SIZE}"),
            ([], "empty_query", "at least one token"),
            ([1, 48], "delimiter_collision", "query must not hold the delimiter token 48"),
        ],
    )
    def test_a_prefix_that_no_request_could_have(self, query: list[int], code: str, message: str) -> None:
        backend = small_backend()
        with live_engine(backend, delimiter=48) as engine:
            error = refusal(engine, query)
        assert error.code == code
        assert message in error.message
        assert backend.forwards == []

    def test_one_longer_than_all_that_can_be_cached(self) -> None:
        with live_engine(GatedBackend(is_open=True, num_kv_blocks=2)) as engine:
            assert refusal(engine, [1] * 257).message == "query must have at most 256 tokens, got 257"

    def test_the_delimiter_belongs_to_it(self) -> None:
        with live_engine(small_backend(), delimiter=48) as engine:
            assert pin(engine, QUERY[:200]).num_tokens == 201
            assert Ticket(engine, body_of(QUERY[:200], [[1]])).result().usage.cached_tokens == 201

    def test_one_that_is_given_up_pins_nothing(self) -> None:
        backend = small_backend(is_open=False)
        with live_engine(backend) as engine:
            ticket = Ticket(engine, body_of([1], [[2]]))
            backend.next_forward()
            cancelled, late = submit_pin(engine, QUERY), submit_pin(engine, QUERY[:9], deadline=monotonic())
            cancelled.cancel()
            backend.open()
            ticket.check()
            Ticket(engine, body_of([2], [[2]])).check()
            for state, error in ((cancelled, CancelledError), (late, DeadlineExceededError)):
                with pytest.raises(error):
                    engine.finish_prefix(state)
            assert engine.pinned_prefixes() == []

    def test_one_that_is_given_up_in_its_last_step_pins_nothing_either(self) -> None:
        """Nobody would be there to learn its id."""
        backend = small_backend(is_open=False)
        with live_engine(backend) as engine:
            state = submit_pin(engine, QUERY)
            backend.until_waited_for(1)
            state.cancel()
            backend.open()
            assert cached_tokens(engine) == 300, "computed it is"
            with pytest.raises(CancelledError):
                engine.finish_prefix(state)
            assert engine.pinned_prefixes() == []


@dataclass(frozen=True, eq=False)
class EndingBlock(KVBlock):
    """Ends a pin while another one is being let go."""

    pins: Pins
    ended: list[str]

    def release(self) -> None:
        assert all(map(self.pins.unpin, self.ended))


def test_a_pin_that_is_ended_while_another_expires_leaves_no_time_to_wait() -> None:
    """`end` may come from any thread at any moment, and a wait of less than nothing is an error."""
    cache = PrefixCache(9, reuse=False)
    pins = Pins(cache, 1)
    ended: list[str] = []
    for query, ttl in (([1], 0.0), ([2], 1000.0)):
        entries = cache.acquire(block_keys(np.array(query, np.int32), (0, 1)), None)
        assert entries is not None
        entries[0].block = EndingBlock(1, pins, ended) if not ttl else None
        pinned = pins.add(entries, (1, 0), 1, ttl)
        cache.release(entries, None)
    ended.append(pinned.id)
    assert pins.release_expired() == 0.0
    ended.clear()
    assert pins.release_expired() is None
    assert cache.num_used == 0
