"""Requests made by hand, and a runner that fills steps from them and runs them, without a thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixwise.backends.fake import FakeBackend, fake_logits
from prefixwise.contract.ragged import Int32Array, Ragged
from prefixwise.engine.branch import Branch
from prefixwise.engine.prefix_cache import PrefixCache
from prefixwise.engine.request_state import RequestState, ScoringTask
from prefixwise.engine.step import Step, StepForward
from prefixwise.engine.step_filler import StepFiller
from prefixwise.engine.step_limits import SHARES, StepLimits
from prefixwise.forward.backend import Backend
from prefixwise.plan.segments import SplitItems, lay_out_segments, plan_labels
from tests.plan.planning import planner_of

STEP = 1024
SHARE = STEP // SHARES


def prefix_of(num_tokens: int, start: int = 0) -> Int32Array:
    return (np.arange(num_tokens, dtype=np.int32) + start) % 500


def state_of(
    prefix: Int32Array | int,
    item_lens: list[int],
    algorithm: str = "prefill_extend",
    *,
    labels: tuple[tuple[int, ...], ...] = ((3,), (5,)),
    need_logsumexp: bool = False,
    is_timed: bool = False,
    **options: Any,
) -> RequestState:
    """Every item has its own tokens; a prefix of so many tokens is nobody else's."""
    global _num_made
    _num_made += 1
    prefix_ids = prefix_of(prefix, 7 * _num_made) if isinstance(prefix, int) else prefix
    items = Ragged.from_sequences([[(i + k) % 97 for k in range(length)] for i, length in enumerate(item_lens)])
    split = SplitItems(prefix_ids, np.full(len(item_lens), len(prefix_ids)), items)
    plan = planner_of(**options).plan(lay_out_segments(split, plan_labels(labels)), algorithm)
    cached = prefix_ids if plan.needs_prefill else prefix_ids[:0]
    return RequestState(ScoringTask(cached, plan, need_logsumexp=need_logsumexp, is_timed=is_timed))


_num_made = 0


def trunk_of(state: RequestState) -> Branch:
    """The branch of the query and of the items that are computed in one piece."""
    return next(state.branches())


class StepRunner:
    """A KV cache, limits and a device: fills and runs steps one after the other."""

    def __init__(
        self, num_tokens: int = STEP, *, num_blocks: int = 100, backend: Backend | None = None, **limits: Any
    ) -> None:
        self.limits = StepLimits(num_tokens, **limits)
        self.cache = PrefixCache(num_blocks)
        self.fake = FakeBackend()
        self.backend = backend or self.fake
        self._order: dict[RequestState, None] = {}  # as in the scheduler: the longest unserved first

    def fill(self, *states: RequestState) -> Step | None:
        self._order.update(dict.fromkeys(states))
        return StepFiller(self.limits, self.cache).fill([state for state in self._order if state in states])

    def run(self, *states: RequestState) -> Step:
        """The next step, filled and run as the scheduler does it."""
        step = self.fill(*states)
        assert step is not None, "there is something to do"
        for state in step.requests:
            state.line.turn_tokens = step.cut.get(state.line, 0)
            if not state.line.turn_tokens:
                del self._order[state]
                self._order[state] = None
        running = []
        for forward in step.forwards:
            forward.advance_requests()
        for forward in step.forwards:
            batch = forward.batch_with_prefixes()
            assert batch.num_tokens == forward.num_tokens
            num_listed = sum(len(prefix.blocks) for prefix in batch.prefixes) + len(batch.cache_segments)
            assert num_listed == forward.num_blocks_read
            running.append(self.backend.start(batch))
            forward.cache_blocks(running[-1].blocks)
        for forward, each in zip(step.forwards, running, strict=True):
            forward.deliver(each.wait())
        step.count(0.0)
        return step

    def fail(self, *states: RequestState) -> None:
        """The next step, filled, launched, and lost with all KV blocks as the scheduler recovers from its failure."""
        step = self.fill(*states)
        assert step is not None, "there is something to do"
        for forward in step.forwards:
            forward.advance_requests()
        for forward in step.forwards:
            forward.land()
        step.roll_back()
        for state in states:
            state.invalidate_prefix(self.cache)
        self.cache.clear()

    def finish(self, *states: RequestState) -> list[Step]:
        """All steps until the last request is done; each request goes as soon as it is."""
        live, steps = list(states), []
        while live:
            steps.append(self.run(*live))
            for state in [state for state in live if state.is_launched]:
                live.remove(state)
                state.release_prefix(self.cache)
                if self.backend is self.fake:
                    check(state)
        return steps


def check(state: RequestState) -> None:
    """All logits of a request that is done, against its plain contexts."""
    assert state.task.plan is not None
    segments, targets = state.task.plan.segments, state.task.plan.segments.label_ids[0]
    for number, item in enumerate(segments.tokens):
        context = np.concatenate([segments.prefix_ids[: segments.prefix_lens[number]], item])
        assert np.array_equal(state.label_logits[number], fake_logits(context, targets))


def tokens_of(step: Step | None, state: RequestState) -> int:
    """What the request has of the step."""
    assert step is not None
    return sum(part.num_tokens for forward in step.forwards for part in forward.parts if part.request is state)


def kind_of(forward: StepForward) -> str:
    if forward.has_sequences:
        return "sequences"
    if not forward.block_parts:
        return "extend"
    return "joined" if forward.scored_parts else "prefill"


def forward_of(step: Step | None, kind: str) -> StepForward:
    assert step is not None
    (found,) = [forward for forward in step.forwards if kind_of(forward) == kind]
    return found
