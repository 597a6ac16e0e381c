"""Long items: computed in pieces, beside other requests, with KV blocks that are released at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, product
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import fake_logits
from prefixwise.contract.classify import parse_classify_request
from prefixwise.contract.errors import CancelledError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.classifier import Classifier
from prefixwise.engine.engine import ScoringEngine
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch
from tests.engine.live import (
    ALGORITHMS,
    MARK,
    GatedBackend,
    Ticket,
    body_of,
    engine_on,
    has,
    live_engine,
    pin,
    query_of,
)

STEP = 256  # tokens: two KV blocks
QUERY = query_of(200)  # a full block, and a part of one
LENGTHS = (7, 300, 0, 129, 640, 128, 257, 20)
ITEMS = [query_of(length, 3 * number) for number, length in enumerate(LENGTHS)]
WAYS = [(False, False, True), (False, True, False), (True, False, False), (True, True, True)]  # each pair of options
SEQUENCE_LABELS: dict[str, Any] = {
    "label_token_ids": [[3], [5, 6, 7], [5, 8]],
    "label_scoring": "sequence",
    "score_mode": "logprob",
}


def cutting_backend(**options: Any) -> GatedBackend:
    """Items of more than a block are long."""
    return GatedBackend(**{"is_open": True, "max_whole_item": KV_BLOCK_SIZE, "step_tokens": STEP, **options})


def block_tokens(batch: ForwardBatch) -> int:
    return int(batch.segment_starts[len(batch.cache_segments)])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("labels", [{}, SEQUENCE_LABELS], ids=["single", "sequence"])
def test_every_way_gives_what_the_plain_contexts_give(algorithm: str, labels: dict[str, Any]) -> None:
    for ragged, joins, prefix_cache in WAYS:
        backend = cutting_backend(reads_short_blocks=ragged, joins_prefill=joins, async_scheduling=joins)
        with live_engine(backend, scheduler={"prefix_cache": prefix_cache}) as engine:
            for query in (QUERY, query_of(3), query_of(700, 5))[: 1 if labels else 3]:
                Ticket(engine, body_of(query, ITEMS, algorithm=algorithm, **labels)).check()
                Ticket(engine, body_of(query, ITEMS[3:5], algorithm=algorithm, **labels)).check()
        assert max(batch.num_tokens for batch in backend.forwards) <= STEP + 2, "with a stem of two tokens"


def test_items_first_and_joined_text_are_cut_too() -> None:
    for ragged in (False, True):
        with live_engine(cutting_backend(reads_short_blocks=ragged)) as engine:
            Ticket(engine, body_of(QUERY, ITEMS, item_first=True)).check()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_query_is_computed_once_and_the_blocks_of_items_are_gone(prefix_cache: bool) -> None:
    backend = cutting_backend(reads_short_blocks=True)
    with live_engine(backend, scheduler={"prefix_cache": prefix_cache}) as engine:
        ticket = Ticket(engine, body_of(QUERY, [ITEMS[4], ITEMS[0], ITEMS[4]]))
        ticket.check()
        computed = sum(batch.num_tokens for batch in backend.forwards)
        assert computed == len(QUERY) + 2 * len(ITEMS[4]) + len(ITEMS[0])
        assert engine.scheduler.stats().used_blocks == 0
        assert backend.num_blocks_held == (2 if prefix_cache else 0), "the query's"
        assert (ticket.state.tokens_left, ticket.state.num_items_done) == (0, 3)


def test_aligned_blocks_compute_the_end_of_the_query_again() -> None:
    backend = cutting_backend()
    with live_engine(backend) as engine:
        Ticket(engine, body_of(QUERY, [ITEMS[4], ITEMS[0], ITEMS[4]])).check()
    num_again = len(QUERY) % KV_BLOCK_SIZE
    computed = sum(batch.num_tokens for batch in backend.forwards)
    assert computed == len(QUERY) + 2 * (len(ITEMS[4]) + num_again) + len(ITEMS[0])


def test_a_request_of_long_items_alone_finds_its_query_in_the_cache() -> None:
    for ragged, cached in ((False, KV_BLOCK_SIZE), (True, len(QUERY))):
        backend = cutting_backend(reads_short_blocks=ragged)
        with live_engine(backend) as engine:
            first, second = (Ticket(engine, body_of(QUERY, [ITEMS[4]])).check() for _ in range(2))
            assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, cached)
            assert Ticket(engine, body_of(QUERY, [[1]])).check().usage.cached_tokens == cached


def test_several_long_items_share_a_step() -> None:
    backend = cutting_backend(step_tokens=4096, joins_prefill=True)
    with live_engine(backend) as engine:
        Ticket(engine, body_of(QUERY, [[1]])).check()
        Ticket(engine, body_of(QUERY, [ITEMS[1], ITEMS[4]])).check()
    assert len(backend.forwards[-1].score_tokens) == 2


@pytest.mark.parametrize("algorithm", ["prefill_extend", "serial"])
def test_a_forward_has_no_more_items_of_a_request_than_a_chunk(algorithm: str) -> None:
    backend = cutting_backend(step_tokens=4096, joins_prefill=True)
    with live_engine(backend, chunk_size=1) as engine:
        Ticket(engine, body_of(QUERY, ITEMS[:5], algorithm=algorithm)).check()
    assert max(len(batch.score_tokens) for batch in backend.forwards) == 1


def test_the_heads_of_all_items_count_as_prefix_of_the_request() -> None:
    backend = cutting_backend(step_tokens=4096)
    with live_engine(backend, scheduler={"chunked_prefill_size": 300}) as engine:
        Ticket(engine, body_of(QUERY, ITEMS)).check()
    assert max(block_tokens(batch) for batch in backend.forwards) <= 300


class TestOthers:
    def test_a_small_request_joins_the_step_after_the_one_in_flight(self) -> None:
        backend = cutting_backend(is_open=False, joins_prefill=True)
        with live_engine(backend) as engine:
            long = Ticket(engine, body_of(QUERY, [query_of(2500)]))
            assert backend.next_forward().num_tokens <= STEP
            small = Ticket(engine, body_of([MARK, 1], [[2], [3]]))
            backend.let_pass()
            while not has(MARK)(batch := backend.next_forward()):
                assert not small.state.is_done
                backend.let_pass()
            assert len(backend.forwards) <= 3, "one step may be filled ahead"
            assert batch.num_tokens <= STEP
            backend.let_pass()
            small.check()
            assert not long.state.is_done
            backend.open()
            long.check()

    def test_a_cancelled_one_stops_after_the_step_in_flight(self) -> None:
        backend = cutting_backend(is_open=False)
        with live_engine(backend) as engine:
            ticket = Ticket(engine, body_of(QUERY, [query_of(2500)] * 3))
            backend.next_forward()
            backend.let_pass()
            backend.next_forward()
            ticket.state.cancel()
            backend.open()
            with pytest.raises(CancelledError):
                ticket.result()
            assert len(backend.forwards) == 2
            assert engine.scheduler.stats().used_blocks == 0

    def test_a_failed_step_moves_no_score_and_what_is_left_stays_right(self) -> None:
        """Each forward of the request fails once, the first time that it is run."""
        for number in range(12):
            backend = cutting_backend(reads_short_blocks=number % 2 == 0, joins_prefill=number % 3 == 0)
            calls: list[ForwardBatch] = []

            def fails(batch: ForwardBatch, calls: list[ForwardBatch] = calls, number: int = number) -> bool:
                calls.append(batch)
                return len(calls) == number + 1

            backend.fails = fails
            with live_engine(backend) as engine:
                beside = Ticket(engine, body_of(query_of(140, 9), [ITEMS[1], [4]]))
                ticket = Ticket(engine, body_of(QUERY, ITEMS))
                ticket.check()
                beside.check()
                assert engine.scheduler.stats().failed_steps == 1
                assert (beside.state.tokens_left, ticket.state.tokens_left) == (0, 0)


class TestRoom:
    """In a KV cache that is too small for two long items at once."""

    @pytest.mark.parametrize(("prefix_cache", "ragged"), list(product((True, False), repeat=2)))
    def test_requests_that_wait_for_blocks_hold_none(self, prefix_cache: bool, ragged: bool) -> None:
        backend = cutting_backend(num_kv_blocks=8, reads_short_blocks=ragged)
        with live_engine(backend, scheduler={"prefix_cache": prefix_cache}) as engine:
            tickets = [
                Ticket(engine, body_of(query_of(200, start), [[start], ITEMS[4], [1, 2], ITEMS[4], ITEMS[1]]))
                for start in range(6)
            ]
            for ticket in tickets:
                ticket.check()

    def test_a_pinned_prefix_makes_room(self) -> None:
        backend = cutting_backend(num_kv_blocks=8)
        with live_engine(backend) as engine:
            pin(engine, query_of(300, 7))
            Ticket(engine, body_of(QUERY, [[1], ITEMS[4]])).check()

    def test_an_item_that_fits_no_cache_is_computed_whole(self) -> None:
        backend = cutting_backend(num_kv_blocks=3)
        with live_engine(backend) as engine:
            Ticket(engine, body_of(QUERY, [ITEMS[4], ITEMS[3]])).check()
        assert max(batch.num_tokens for batch in backend.forwards) == len(ITEMS[4])

    def test_other_prefixes_stay_cached_where_there_is_room(self) -> None:
        backend = cutting_backend(num_kv_blocks=32)
        with live_engine(backend) as engine:
            for start in range(4):
                Ticket(engine, body_of(query_of(300, start), [[1]])).check()
            for _ in range(10):
                Ticket(engine, body_of(QUERY, [ITEMS[4]])).check()
            for start in range(4):
                assert Ticket(engine, body_of(query_of(300, start), [[1]])).check().usage.cached_tokens == 300


class TestMixed:
    """Requests of all kinds at once, in a KV cache that hardly holds one of them."""

    @pytest.mark.parametrize("seed", range(3))
    def test_all_of_them_end(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        ragged, joins, prefix_cache = WAYS[seed]
        backend = cutting_backend(
            is_open=False,
            num_kv_blocks=9,
            reads_short_blocks=ragged,
            joins_prefill=joins,
            async_scheduling=joins,
            step_tokens=int(random.choice([128, 256, 512])),
        )
        failing, numbers = int(random.integers(2, 40)), count()
        backend.fails = lambda batch: next(numbers) == failing
        with live_engine(backend, scheduler={"prefix_cache": prefix_cache}) as engine:
            tickets = [self.submit(engine, random) for _ in range(24)]
            cancelled = [ticket for ticket in tickets if random.random() < 0.2]
            backend.next_forward()
            for ticket in cancelled:
                ticket.state.cancel()
            backend.open()
            for ticket in tickets:
                if ticket in cancelled:
                    with pytest.raises(CancelledError):
                        ticket.result()
                else:
                    ticket.check()

    @staticmethod
    def submit(engine: ScoringEngine, random: np.random.Generator) -> Ticket:
        """Few different queries, so that requests wait for blocks of each other; at most nine blocks."""
        query = query_of(int(random.choice([3, 128, 200, 300])), int(random.integers(2)))
        lengths = random.choice([1, 0, 20, 128, 129, 300, 640], int(random.integers(1, 5)))
        items = [query_of(int(length), int(random.integers(9))) for length in lengths]
        algorithm = str(random.choice(ALGORITHMS))
        return Ticket(engine, body_of(query, items, algorithm=algorithm), priority=int(random.integers(2)))


class TestLongPrefixes:
    """Serial and packed behind a prefix that is longer than an item may be."""

    @pytest.mark.parametrize("algorithm", ["serial", "packed"])
    def test_no_forward_is_larger_than_a_step_and_nothing_stays_cached(self, algorithm: str) -> None:
        backend = cutting_backend(num_kv_blocks=12)
        with live_engine(backend) as engine:
            result = Ticket(engine, body_of(query_of(700), [[1], [2, 3], ITEMS[1], []], algorithm=algorithm)).check()
            assert (result.usage.cached_tokens, backend.num_blocks_held) == (0, 0)
        assert max(batch.num_tokens for batch in backend.forwards) <= STEP


class TestInputs:
    """What else may be in a long item."""

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_vectors_stay_with_their_tokens(self, algorithm: str) -> None:
        """On this backend the vector (c, 0, ...) is token c."""
        places = (0, 127, 130, 300, 639)  # in the blocks of the head, and in the tail
        item = [MARK if place in places else token for place, token in enumerate(ITEMS[4])]
        query = [*QUERY[:150], MARK, *QUERY[151:]]
        fields = {
            "embed_override_token_id": MARK,
            "query_embed_overrides": [[float(QUERY[150]), *[0.0] * 7]],
            "item_embed_overrides": [[[float(ITEMS[4][place]), *[0.0] * 7] for place in places], None],
        }
        for ragged in (False, True):
            with live_engine(cutting_backend(reads_short_blocks=ragged)) as engine:
                plain = Ticket(engine, body_of(QUERY, [ITEMS[4], ITEMS[1]], algorithm=algorithm)).check()
                body = body_of(query, [item, ITEMS[1]], algorithm=algorithm, **fields)
                assert engine.score(parse_score_request(body)).scores == plain.scores

    def test_classes_of_a_long_input_are_those_after_all_of_it(self) -> None:
        backend = cutting_backend()
        backend.config = replace(backend.config, num_classes=3, id2label=("good", "bad", "ugly"))
        with live_engine(backend) as engine:
            request = parse_classify_request({"input": [ITEMS[4], [5]], "use_activation": False})
            found = [each.probs for each in Classifier(engine).classify(request).results]
        classes = np.arange(3, dtype=np.int32)
        assert found == [fake_logits(np.array(ids, np.int32), classes).tolist() for ids in (ITEMS[4], [5])]
        assert len(backend.forwards) > 2


class TestOutputs:
    def outputs(self, max_whole_item: int, **fields: Any) -> Any:
        backend = cutting_backend(max_whole_item=max_whole_item)
        with live_engine(backend) as engine:
            return engine.score(parse_score_request(body_of(QUERY, ITEMS, **fields)))

    def test_hidden_states_are_in_the_order_of_items(self) -> None:
        cut, whole = (self.outputs(most, return_pooled_hidden_states=True) for most in (KV_BLOCK_SIZE, 1 << 20))
        assert np.array_equal(cut.pooled_hidden_states, whole.pooled_hidden_states)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_the_layout_has_every_item(self, algorithm: str) -> None:
        debug = self.outputs(KV_BLOCK_SIZE, return_debug=True, algorithm=algorithm).debug
        layout = debug["layout"]
        assert layout["tail_lens"] == [max(1, length) for length in LENGTHS]
        rows = {"serial": [[i, i + 1] for i in range(8)], "prefill_extend": []}
        packed = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7], [7, 8]]
        assert layout["rows"] == rows.get(algorithm, packed)
        assert sum(batch["segments"] for batch in debug["batches"]) == len(ITEMS)

    def test_a_long_item_is_inspected(self) -> None:
        engines = [engine_on(cutting_backend(max_whole_item=most)) for most in (KV_BLOCK_SIZE, 1 << 20)]
        fields = {"debug_top_k": 3, "return_debug": True}
        seen = [self.inspected(engine, fields) for engine in engines]
        assert seen[0] == seen[1]

    def inspected(self, engine: ScoringEngine, fields: dict[str, Any]) -> object:
        try:
            return (engine.score(parse_score_request(body_of(QUERY, [ITEMS[4]], **fields))).debug or {})["item"]
        finally:
            engine.close()

    def test_progress_counts_items(self) -> None:
        seen: list[tuple[int, int]] = []
        backend = cutting_backend()
        with live_engine(backend) as engine:
            prepared = engine.prepare(parse_score_request(body_of(QUERY, ITEMS)))
            engine.run(prepared, lambda done, total: seen.append((done, total)))
        assert seen == sorted(seen)
        assert seen[-1] == (len(ITEMS), len(ITEMS))
        assert len({done for done, _ in seen}) > 2
