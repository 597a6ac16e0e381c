"""Blocks of prefixes and items that read them, in one forward: which are joined, and that nothing else shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prefixwise.contract.errors import CancelledError
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.step import BlockPart, Step, StepForward, UnitPart
from prefixwise.engine.step_filler import MANY_LABELS
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, Prefix
from tests.engine.live import GatedBackend, Ticket, body_of, live_engine
from tests.engine.step_runner import StepRunner, check, kind_of, prefix_of, state_of, trunk_of

QUERY = [k % 40 for k in range(300)]
MANY = tuple((k,) for k in range(1, 2 + MANY_LABELS))


def joining(num_tokens: int = 4096, **limits: Any) -> StepRunner:
    return StepRunner(num_tokens, joins_prefill=True, **limits)


def kinds(step: Step) -> list[str]:
    return [kind_of(forward) for forward in step.forwards]


def batch_of(forward: StepForward) -> ForwardBatch:
    assert forward.batch is not None
    return forward.batch


class TestOneForward:
    def test_the_prefix_and_the_items_of_a_request(self) -> None:
        runner, state = joining(), state_of(300, [10, 20])
        step = runner.run(state)
        (forward,) = step.forwards
        (batch,) = runner.fake.forwards
        assert kind_of(forward) == "joined"
        assert batch.segment_starts.tolist() == [0, 128, 256, 300, 310, 330]
        assert batch.prefix_index.tolist() == [-1, 0, 0, 0, 0]
        assert batch.prefix_lens.tolist() == [0, 128, 256, 300, 300]
        assert (batch.prefixes, batch.cache_segments) == ((Prefix(segment=0),), (0, 1, 2))
        assert batch.score_tokens.tolist() == [309, 329]
        assert batch.positions.tolist() == [*range(300), *range(300, 310), *range(300, 320)]
        assert (state.is_launched, state.tokens_left) == (True, 0)
        check(state)

    def test_items_whose_prefix_was_cached_before_ride_along(self) -> None:
        runner = joining()
        warm, cold, without = state_of(300, [10] * 500), state_of(200, [10]), state_of(0, [7])
        runner.run(warm)
        step = runner.run(warm, cold, without)
        (forward,) = step.forwards
        assert [part.request for part in forward.block_parts] == [cold]
        assert [part.request for part in forward.scored_parts] == [warm, cold, without]
        batch = runner.fake.forwards[-1]
        assert [len(prefix.blocks) for prefix in batch.prefixes] == [0, 3], "first the one being computed"
        items = batch.prefix_index[2:]
        assert items.tolist() == [1] * (len(items) - 2) + [0, -1]
        check(cold)
        check(without)

    def test_the_last_blocks_of_a_long_prefix_and_its_items(self) -> None:
        """The items read blocks of the steps before, then those of this one."""
        runner, state = joining(1024), state_of(1300, [10] * 5)
        steps = runner.finish(state)
        assert [kinds(step) for step in steps] == [["prefill"], ["joined"]]
        (prefix,) = runner.fake.forwards[-1].prefixes
        assert (len(prefix.blocks), prefix.segment) == (8, 0)

    def test_one_that_computes_a_prefix_and_one_that_reads_it_too(self) -> None:
        runner = joining()
        first, second = state_of(prefix_of(300), [10] * 3), state_of(prefix_of(300), [11] * 3)
        (forward,) = runner.run(first, second).forwards
        assert [part.request for part in forward.block_parts] == [first]
        assert batch_of(forward).prefix_index.tolist() == [-1, 0, 0] + [0] * 6
        assert (first.cached_tokens, second.cached_tokens) == (0, 300)
        check(first)
        check(second)

    def test_one_whose_prefix_ends_before_that_which_another_computes(self) -> None:
        runner = joining()
        long, short = state_of(prefix_of(400), [10]), state_of(prefix_of(2 * KV_BLOCK_SIZE), [11])
        (forward,) = runner.run(long, short).forwards
        assert [part.request for part in forward.block_parts] == [long]
        assert batch_of(forward).prefix_index.tolist() == [-1, 0, 0, 0, 0, 0]
        assert batch_of(forward).prefix_lens[-2:].tolist() == [400, 256]
        check(long)
        check(short)

    def test_an_item_that_reads_a_token_less_than_the_prefix(self) -> None:
        """An empty one computes the prefix's last token again; the last block may be that token alone."""
        for num_tokens in (1, 2, KV_BLOCK_SIZE, KV_BLOCK_SIZE + 1, 300):
            backend = GatedBackend(is_open=True, joins_prefill=True)
            query = [k % 40 for k in range(num_tokens)]
            with live_engine(backend) as engine:
                Ticket(engine, body_of(query, [[], [1, 2], []], algorithm="prefill_extend")).check()
            (batch,) = backend.forwards
            assert batch.cache_segments == tuple(range(-(-num_tokens // KV_BLOCK_SIZE)))

    def test_blocks_are_counted_once_for_every_prefix_that_has_them(self) -> None:
        runner = joining(max_kv_blocks_read=6)
        warm = state_of(prefix_of(300), [10] * 500)
        runner.run(warm)
        (forward,) = runner.run(warm, state_of(300, [10])).forwards
        assert forward.num_blocks_read == 3 + 3


class TestSeparate:
    def test_where_the_device_does_not_ask_for_it(self) -> None:
        assert kinds(StepRunner().run(state_of(300, [10]))) == ["prefill", "extend"]

    def test_where_there_is_only_one_of_the_two(self) -> None:
        runner, state = joining(256), state_of(prefix_of(384), [10])
        assert kinds(runner.run(state)) == ["prefill"]
        runner.finish(state)
        assert kinds(runner.run(state_of(prefix_of(384), [10]))) == ["extend"]

    def test_where_together_they_read_more_blocks_than_a_forward_may(self) -> None:
        runner = joining(max_kv_blocks_read=5)
        warm, cold = state_of(300, [10] * 500), state_of(300, [10])
        runner.run(warm)
        step = runner.run(warm, cold)
        assert kinds(step) == ["prefill", "extend"]
        assert [forward.num_blocks_read for forward in step.forwards] == [3, 3], "the new prefix must wait"

    def test_a_request_with_many_labels_behind_a_joined_forward(self) -> None:
        runner = joining()
        many, few = state_of(200, [10], labels=MANY), state_of(300, [10])
        step = runner.run(many, few)
        assert kinds(step) == ["joined", "extend"]
        assert [part.request for part in step.forwards[0].block_parts] == [many, few]
        assert [forward.scored_parts[0].request for forward in step.forwards] == [few, many]
        check(many)
        check(few)

    def test_a_request_with_many_labels_behind_its_prefill(self) -> None:
        assert kinds(joining().run(state_of(200, [10], labels=MANY))) == ["prefill", "extend"]

    def test_sequences(self) -> None:
        step = joining().run(state_of(9, [10], "packed"), state_of(200, [10]), state_of(9, [10], "serial"))
        assert kinds(step) == ["joined", "sequences", "sequences"]

    def test_where_the_seconds_of_a_prefill_are_asked_for(self) -> None:
        timed = state_of(200, [10], is_timed=True)
        assert kinds(joining().run(timed, state_of(300, [10]))) == ["prefill", "extend"]

    def test_not_where_those_of_items_alone_are(self) -> None:
        """They have no prefill whose seconds could be told."""
        runner, timed = joining(), state_of(200, [10] * 500, is_timed=True)
        runner.run(timed)
        assert kinds(runner.run(timed, state_of(300, [10]))) == ["joined"]


class TestSeconds:
    """Of a step that took 10, of which the device had the prefill after 3."""

    def step_of(self, *forwards: StepForward) -> Step:
        for forward in forwards:
            forward.start_seconds = 3.0
        return Step(list(forwards), 0)

    def states(self, num_jobs: int) -> list[RequestState]:
        return [state_of(300, [10]) for _ in range(num_jobs)]

    def seconds(self, *states: RequestState) -> list[tuple[float, float]]:
        return [(state.prefill_seconds, state.extend_seconds) for state in states]

    def test_a_prefill_by_itself_has_its_own(self) -> None:
        both, blocks, items = self.states(3)
        prefill = StepForward(block_parts=[BlockPart(trunk_of(both), 0, 3), BlockPart(trunk_of(blocks), 0, 2)])
        scored = StepForward(scored_parts=[UnitPart(trunk_of(both), 0, 1), UnitPart(trunk_of(items), 0, 1)])
        self.step_of(prefill, scored).count(10.0)
        assert self.seconds(both, blocks, items) == [(3, 7), (3, 0), (0, 7)]

    def test_those_of_a_joined_forward_are_of_the_items_or_of_blocks_alone(self) -> None:
        both, blocks, items, many = self.states(4)
        joined = StepForward(
            block_parts=[
                BlockPart(trunk_of(both), 0, 3),
                BlockPart(trunk_of(blocks), 0, 2),
                BlockPart(trunk_of(many), 0, 3),
            ],
            scored_parts=[UnitPart(trunk_of(both), 0, 1), UnitPart(trunk_of(items), 0, 1)],
        )
        self.step_of(joined, StepForward(scored_parts=[UnitPart(trunk_of(many), 0, 1)])).count(10.0)
        assert self.seconds(both, blocks, items, many) == [(0, 10), (10, 0), (0, 10), (0, 10)], "each of them once"
        assert [state.tokens_left for state in (both, blocks, items, many)] == [0, 54, 300, 0]

    def test_debug_separates_the_two(self) -> None:
        backend = GatedBackend(is_open=True, joins_prefill=True, seconds_per_forward=0.001)
        with live_engine(backend) as engine:
            debug = Ticket(engine, body_of(QUERY, [[1], [2]], return_debug=True)).check().debug or {}
            assert [len(batch.cache_segments) for batch in backend.forwards] == [3, 0]
            assert backend.num_synchronized == 1
            plain = Ticket(engine, body_of([*QUERY, 1], [[1], [2]]))
            plain.check()
            assert engine.scheduler.stats().forwards == 3
        assert debug["batches"] == [{"segments": 2, "num_tokens": 2, "forward_tokens": 2, "bucket": 2, "fill": 1.0}]
        assert debug["milliseconds"]["prefill"] > 0  # type: ignore[index]
        assert (plain.state.prefill_seconds, plain.state.extend_seconds > 0) == (0, True)
        assert [(record.num_tokens, record.forward_tokens) for record in plain.state.batches] == [(2, 45 + 2)]


# The same as in separate forwards


@dataclass(frozen=True)
class Request:
    """A request, when it comes, and after how many steps it is given up, if it is."""

    prefix_len: int
    prefix_start: int
    item_lens: list[int]
    algorithm: str
    labels: tuple[tuple[int, ...], ...]
    comes: int
    stays: int | None

    def state(self) -> RequestState:
        prefix = prefix_of(self.prefix_len, self.prefix_start)
        return state_of(prefix, self.item_lens, self.algorithm, labels=self.labels, need_logsumexp=self.comes == 1)


@dataclass(frozen=True)
class Bounds:
    """Of the room in which they are computed."""

    num_tokens: int
    num_blocks: int
    max_prefill_tokens: int | None
    max_kv_blocks_read: int | None

    def runner(self, *, joins_prefill: bool) -> StepRunner:
        return StepRunner(**vars(self), joins_prefill=joins_prefill)


mixes = st.lists(
    st.builds(
        Request,
        prefix_len=st.sampled_from([0, 1, 5, 128, 129, 256, 256, 300, 384, 384]),
        prefix_start=st.sampled_from([0, 0, 0, 1]),
        item_lens=st.lists(st.integers(1, 60), min_size=1, max_size=12),
        algorithm=st.sampled_from(["prefill_extend"] * 5 + ["packed"]),
        labels=st.sampled_from([((3,), (5,)), ((7,),), MANY]),
        comes=st.integers(0, 4),
        stays=st.sampled_from([None, None, None, 1, 2]),
    ),
    min_size=1,
    max_size=14,
)
all_bounds = st.builds(
    Bounds,
    num_tokens=st.sampled_from([64, 300, 1000, 4096, 4096]),
    num_blocks=st.sampled_from([4, 10, 100]),
    max_prefill_tokens=st.sampled_from([None, None, 1, 256]),
    max_kv_blocks_read=st.sampled_from([None, None, 4, 8]),
)


@dataclass
class _Live:
    state: RequestState
    steps_left: int


def run_all(runner: StepRunner, requests: list[Request]) -> tuple[list[RequestState | None], list[Step]]:
    """The requests that ended, with their logits checked (None for those that were given up), and all steps."""
    states = [request.state() for request in requests]
    waiting = list(zip(requests, states, strict=True))
    live: list[_Live] = []
    ended: set[RequestState] = set()
    steps: list[Step] = []
    for turn in range(1000):
        live += [_Live(state, request.stays or 1000) for request, state in waiting if request.comes == turn]
        if live:
            steps.append(runner.run(*(each.state for each in live)))
        for each in live:
            each.steps_left -= 1
            if each.state.is_launched:
                check(each.state)
                ended.add(each.state)
            if each.state.is_launched or not each.steps_left:
                each.state.release_prefix(runner.cache)
        live = [each for each in live if each.steps_left and each.state not in ended]
        if not live and turn > max(request.comes for request in requests):
            break
    assert runner.cache.num_used == 0
    return [state if state in ended else None for state in states], steps


def logits_of(state: RequestState) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return state.label_logits, np.zeros(0, np.float32) if state.logsumexp is None else state.logsumexp


@settings(max_examples=60)
@given(requests=mixes, bounds=all_bounds)
def test_requests_that_come_and_go_get_the_same_logits_joined_and_separately(
    requests: list[Request], bounds: Bounds
) -> None:
    """And in the same steps, which have as many forwards or fewer."""
    joined, joined_steps = run_all(bounds.runner(joins_prefill=True), requests)
    separate, separate_steps = run_all(bounds.runner(joins_prefill=False), requests)
    for one, other in zip(joined, separate, strict=True):
        if one is not None and other is not None:
            for found, expected in zip(logits_of(one), logits_of(other), strict=True):
                assert np.array_equal(found, expected)
    assert not any("joined" in kinds(step) for step in separate_steps)
    for step in joined_steps:
        has_many = any(forward.batch and forward.batch.label_ids.shape[1] > MANY_LABELS for forward in step.forwards)
        if bounds.max_kv_blocks_read is None and not has_many:
            assert not {"prefill", "extend"} <= set(kinds(step))


def test_the_property_meets_every_kind_of_joined_forward() -> None:
    seen: set[str] = set()

    @settings(max_examples=300, derandomize=True, database=None)
    @given(requests=mixes, bounds=all_bounds)
    def look(requests: list[Request], bounds: Bounds) -> None:
        _, steps = run_all(bounds.runner(joins_prefill=True), requests)
        for step in steps:
            seen.add("+".join(sorted(set(kinds(step)))))
            for forward in step.forwards:
                if kind_of(forward) == "joined":
                    seen.update(what_is_read(forward))

    look()
    expected = {"joined", "extend+joined", "joined+sequences", "extend+prefill"}
    expected |= {"cached before", "behind cached blocks", "blocks alone", "computed by another", "not to its end"}
    assert expected <= seen


def what_is_read(forward: StepForward) -> Iterator[str]:
    """By the items of a joined forward."""
    batch, blocks = batch_of(forward), forward.block_parts
    if {part.request for part in blocks} - {part.request for part in forward.scored_parts}:
        yield "blocks alone"
    segment = len(batch.cache_segments)
    for part in forward.scored_parts:
        number = int(batch.prefix_index[segment])
        if number >= len(blocks):
            yield "cached before"
        elif number >= 0:
            if blocks[number].first:
                yield "behind cached blocks"
            if blocks[number].request is not part.request:
                yield "computed by another"
            if batch.prefix_lens[segment] <= KV_BLOCK_SIZE * (blocks[number].stop - 1):
                yield "not to its end"
        segment += part.stop - part.first


class TestEnds:
    """A joined forward that fails, or whose requests leave."""

    @pytest.mark.parametrize("is_waited_for", [True, False])
    def test_a_failure_ends_all_that_have_a_part_in_it_and_nothing_of_it_is_cached(self, is_waited_for: bool) -> None:
        backend = GatedBackend(joins_prefill=True)
        failing = [True]

        def fails(batch: ForwardBatch) -> bool:
            return failing[0] and bool(batch.cache_segments) and len(batch.score_tokens) > 0

        if is_waited_for:
            backend.fails = fails
        else:
            backend.fails_to_start = fails
        with live_engine(backend) as engine:
            first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
            backend.next_forward()
            pair = [Ticket(engine, body_of(QUERY, [[n]], algorithm="prefill_extend")) for n in range(2)]
            backend.open()
            first.check()
            for ticket in pair:
                with pytest.raises(RuntimeError, match="the device"):
                    ticket.result()
            failing[0] = False
            assert engine.scheduler.stats().cached_blocks == 0
            assert Ticket(engine, body_of(QUERY, [[1]])).check().usage.cached_tokens == 0
            assert Ticket(engine, body_of(QUERY, [[1]])).check().usage.cached_tokens == 300

    def test_a_failure_of_items_behind_it_takes_its_blocks_along(self) -> None:
        """The items of one with many labels run in the next forward of the same step."""
        backend = GatedBackend(joins_prefill=True)
        backend.fails_to_start = lambda batch: batch.label_ids.shape[1] > MANY_LABELS
        with live_engine(backend) as engine:
            first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
            backend.next_forward()
            labels = list(range(1, 2 + MANY_LABELS))
            pair = [
                Ticket(engine, body_of(QUERY, [[1]], algorithm="prefill_extend")),
                Ticket(engine, body_of(QUERY, [[1]], algorithm="prefill_extend", label_token_ids=labels)),
            ]
            backend.open()
            first.check()
            pair[0].check()
            with pytest.raises(RuntimeError, match="does not start"):
                pair[1].result()
            # Those of the first one, if it ran again after the second.
            assert engine.scheduler.stats().cached_blocks == backend.num_blocks_held
            assert backend.num_blocks_held in (0, 3)
            Ticket(engine, body_of(QUERY, [[1]])).check()

    @pytest.mark.parametrize("leaves", [0, 1])
    def test_one_that_leaves_while_it_runs_takes_nothing_from_the_other(self, leaves: int) -> None:
        """Whether it computed the prefix, or only read it."""
        backend = GatedBackend(joins_prefill=True)
        with live_engine(backend) as engine:
            first = Ticket(engine, body_of([1], [[2]], algorithm="packed"))
            backend.next_forward()
            pair = [Ticket(engine, body_of(QUERY, [[n]], algorithm="prefill_extend")) for n in range(2)]
            backend.let_pass()
            assert len(backend.next_forward().cache_segments) == 3
            pair[leaves].state.cancel()
            backend.open()
            with pytest.raises(CancelledError):
                pair[leaves].result()
            pair[1 - leaves].check()
            first.check()
            assert Ticket(engine, body_of(QUERY, [[9]])).check().usage.cached_tokens == 300
        assert len(backend.made) == 3
