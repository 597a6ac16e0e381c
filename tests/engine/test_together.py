"""Many requests at a time: right to the last bit, and what one computes serves all."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.contract.errors import CancelledError
from prefixwise.engine.step_filler import MAX_SKIPPED
from prefixwise.forward.batch import KV_BLOCK_SIZE
from tests.engine.live import (
    ALGORITHMS,
    SECONDS,
    VOCAB_SIZE,
    GatedBackend,
    Ticket,
    body_of,
    live_engine,
    num_prefills,
    query_of,
)


@dataclass(frozen=True)
class Geometry:
    """How the device is cut; none of it may show."""

    step_tokens: int
    num_kv_blocks: int
    max_kv_blocks_read: int | None
    prefix_cache: bool
    chunked_prefill_size: int | None
    chunk_size: int | None
    token_budget: int | None
    joins_prefill: bool
    async_scheduling: bool

    def backend(self) -> GatedBackend:
        return GatedBackend(
            step_tokens=self.step_tokens,
            num_kv_blocks=self.num_kv_blocks,
            max_kv_blocks_read=self.max_kv_blocks_read,
            joins_prefill=self.joins_prefill,
            async_scheduling=self.async_scheduling,
        )

    @property
    def options(self) -> dict[str, Any]:
        scheduler = {"prefix_cache": self.prefix_cache, "chunked_prefill_size": self.chunked_prefill_size}
        return {"scheduler": scheduler, "chunk_size": self.chunk_size, "token_budget": self.token_budget}


geometries = st.builds(
    Geometry,
    step_tokens=st.sampled_from([8, 100, 300, 2048]),
    num_kv_blocks=st.sampled_from([2, 4, 100]),
    max_kv_blocks_read=st.sampled_from([None, 3, 5]),  # at least those of the longest prefix
    prefix_cache=st.booleans(),
    chunked_prefill_size=st.sampled_from([None, 1, 256]),
    chunk_size=st.sampled_from([None, 0, 2]),
    token_budget=st.sampled_from([None, 50, 400]),
    joins_prefill=st.booleans(),
    async_scheduling=st.booleans(),
)
MODES = {1: ["logit", "prob", "sigmoid"], 2: ["softmax", "logprob", "sigmoid"], 3: ["softmax"], 18: ["softmax"]}
tokens = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Queries that are equal, or equal up to some place; labels of all numbers and lengths."""
    query = query_of(draw(st.sampled_from([1, 20, 127, 128, 129, 300])), draw(st.sampled_from([0, 5])))
    query[-1] = draw(st.sampled_from([query[-1], 41]))
    items = draw(st.lists(st.lists(tokens, max_size=9), min_size=1, max_size=6))
    labels: list[Any] = draw(st.sampled_from([[3], [5, 3], [7, 8, 9], list(range(18))]))
    mode = draw(st.sampled_from(MODES[len(labels)]))
    algorithm = draw(st.sampled_from([*ALGORITHMS, "auto"]))
    body = body_of(query, items, label_token_ids=labels, score_mode=mode, algorithm=algorithm)
    if draw(st.integers(0, 4)) == 0:
        labels = [[3], [5, 6], [7, 8, 9]][: draw(st.integers(2, 3))]
        return {**body, "label_token_ids": labels, "label_scoring": "sequence", "score_mode": "logprob"}
    return {**body, "item_first": draw(st.integers(0, 5)) == 0}


@settings(max_examples=120, deadline=None)
@given(bodies=st.lists(requests(), min_size=2, max_size=7), geometry=geometries, late=st.integers(0, 3))
def test_requests_together_get_exactly_what_they_get_alone(
    bodies: list[dict[str, Any]], geometry: Geometry, late: int
) -> None:
    """The first is running when the others come, all at once; some come when a few steps are done."""
    backend = geometry.backend()
    with live_engine(backend, **geometry.options) as engine:
        tickets = [Ticket(engine, bodies[0])]
        backend.next_forward()
        tickets += [Ticket(engine, body) for body in bodies[1 : len(bodies) - late]]
        backend.let_pass(2)
        tickets += [Ticket(engine, body) for body in bodies[len(tickets) :]]
        backend.open()
        for ticket in tickets:
            result = ticket.check()
            assert 0 <= result.usage.cached_tokens <= len(ticket.body["query"])
            assert geometry.prefix_cache or not result.usage.cached_tokens


def scores_of_those_that_stay(
    bodies: list[dict[str, Any]], geometry: Geometry, leaving: set[int]
) -> dict[int, list[list[float] | None]]:
    """By number. All come while the first is running, and then some of them leave."""
    backend = geometry.backend()
    scores = {}
    with live_engine(backend, **geometry.options) as engine:
        tickets = [Ticket(engine, bodies[0])]
        backend.next_forward()
        tickets += [Ticket(engine, body) for body in bodies[1:]]
        backend.let_pass(2)
        for number in leaving & set(range(len(tickets))):
            tickets[number].state.cancel()
        backend.open()
        for number, ticket in enumerate(tickets):
            ticket.wait()
            if not isinstance(ticket.state.error, CancelledError):  # some are done before they can leave
                scores[number] = ticket.check().scores
    assert set(scores) >= set(range(len(bodies))) - leaving
    return scores


@settings(max_examples=60)
@given(
    bodies=st.lists(requests(), min_size=2, max_size=7),
    geometry=geometries,
    leaving=st.sets(st.integers(0, 6), max_size=3),
)
def test_prefixes_and_items_in_one_forward_give_what_they_give_in_two(
    bodies: list[dict[str, Any]], geometry: Geometry, leaving: set[int]
) -> None:
    joined, separate = (
        scores_of_those_that_stay(bodies, replace(geometry, joins_prefill=joins), leaving) for joins in (True, False)
    )
    for number in joined.keys() & separate.keys():
        assert joined[number] == separate[number]


@pytest.mark.parametrize("joins", [False, True])
def test_threads_that_score_at_the_same_time_get_what_they_get_alone(joins: bool) -> None:
    backend = GatedBackend(is_open=True, step_tokens=200, num_kv_blocks=8, max_context_len=900, joins_prefill=joins)
    bodies = [
        body_of(query_of(100 + 30 * (n % 5)), [[n % 7, k] for k in range(n % 11 + 1)], algorithm=ALGORITHMS[n % 3])
        for n in range(60)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with live_engine(backend) as engine, ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda body: Ticket(engine, body).check(), bodies):
                pass
    finally:
        sys.setswitchinterval(interval)


def test_requests_that_wait_share_the_next_forward() -> None:
    backend = GatedBackend()
    with live_engine(backend) as engine:
        first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
        backend.next_forward()
        others = [Ticket(engine, body_of([1, n], [[2]], algorithm="packed")) for n in range(10, 15)]
        backend.let_pass()
        assert len(backend.next_forward().sequence_starts) - 1 == 5
        backend.open()
        for ticket in (first, *others):
            ticket.check()
    assert len(backend.forwards) == 2


def test_requests_with_one_new_prefix_compute_it_once() -> None:
    backend = GatedBackend()
    with live_engine(backend) as engine:
        first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
        backend.next_forward()
        others = [Ticket(engine, body_of(query_of(300), [[n]])) for n in range(4)]
        backend.open()
        assert [ticket.check().usage.cached_tokens for ticket in others] == [0, 300, 300, 300]
        first.check()
    assert num_prefills(backend) == 1


class TestCrowds:
    """More requests at once than a step looks at, all of which wait for something. They come while one runs."""

    NUM_REQUESTS = 2 * MAX_SKIPPED + 4

    def check_all(self, backend: GatedBackend, bodies: list[dict[str, Any]]) -> list[int]:
        """Cached tokens of each."""
        with live_engine(backend) as engine:
            first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
            backend.next_forward()
            deadline = monotonic() + SECONDS / 2
            tickets = [Ticket(engine, {**body, "algorithm": "prefill_extend"}, deadline=deadline) for body in bodies]
            backend.open()
            first.check()
            return [ticket.check().usage.cached_tokens for ticket in tickets]

    def test_all_with_one_new_prefix_that_is_longer_than_a_share(self) -> None:
        backend = GatedBackend(step_tokens=512)
        query = query_of(5 * KV_BLOCK_SIZE)
        cached = self.check_all(backend, [body_of(query, [[n]]) for n in range(self.NUM_REQUESTS)])
        assert cached == [0] + [len(query)] * (self.NUM_REQUESTS - 1)
        assert len(backend.made) == 5

    def test_all_with_a_prefix_of_their_own_and_room_for_two_of_them(self) -> None:
        backend = GatedBackend(step_tokens=512, num_kv_blocks=9)
        queries = [[n, *query_of(4 * KV_BLOCK_SIZE - 1)] for n in range(self.NUM_REQUESTS)]
        cached = self.check_all(backend, [body_of(query, [[k, 1, 2] for k in range(40)]) for query in queries])
        assert cached == [0] * self.NUM_REQUESTS

    def test_prefixes_with_a_common_beginning_in_no_more_blocks_than_a_forward_may_list(self) -> None:
        """The backend counts them: a block for every prefix that has it."""
        backend = GatedBackend(step_tokens=2048, num_kv_blocks=24, max_kv_blocks_read=48)
        base = query_of(16 * KV_BLOCK_SIZE)
        queries = [[*base, *query_of(100, n)] for n in range(self.NUM_REQUESTS)]
        cached = self.check_all(backend, [body_of(query, [[1]]) for query in queries])
        assert cached == [0] + [len(base)] * (self.NUM_REQUESTS - 1)
