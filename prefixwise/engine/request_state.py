"""One request in the scheduler: what was asked (`ScoringTask`, immutable) and how far it has come (`RequestState`).

A request is computed in *units*: segments (the tokens of an item and a label stem) for prefill_extend, whole sequences
(the prefix and segments behind it) for serial and packed. Units run in their order, after the KV blocks of the prefix.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.embed_overrides import Vectors
from prefixwise.contract.ragged import Int32Array
from prefixwise.engine.prefix_cache import CacheEntry, PinnedPrefix, PrefixCache, block_keys
from prefixwise.forward.batch import KV_BLOCK_SIZE, KVBlock
from prefixwise.plan.algorithms import ScorePlan

log = logging.getLogger("prefixwise")

OnChange = Callable[[], None]


@dataclass(frozen=True, eq=False)
class ScoringTask:
    """What one request asks of the device: a prefix in the KV cache, then (`plan`) items to score."""

    prefix_ids: Int32Array  # to be cached; empty if the plan needs no prefill
    plan: ScorePlan | None  # None: compute the prefix only
    need_logsumexp: bool = False  # also the logsumexp over the vocabulary
    need_hidden: bool = False  # also the hidden states at the scored positions
    is_timed: bool = False  # run and wait for the prefill by itself, so that its seconds are exact
    deadline: float | None = None  # a value of time.monotonic()
    pin_seconds: float | None = None  # pin the prefix for this long
    priority: int = 0  # lower values run first
    vectors: Vectors | None = None  # of ids below 0 in the prefix, as in the plan's segments

    @cached_property
    def num_tokens(self) -> int:
        return self.plan.num_tokens if self.plan is not None else len(self.prefix_ids)

    @property
    def num_units(self) -> int:
        return 0 if self.plan is None else len(self.plan.sequences) or len(self.plan.segments.tokens)

    @cached_property
    def max_unit_tokens(self) -> int:
        """Tokens of the largest unit: it is never split."""
        if self.plan is None:
            return 0
        if self.plan.sequences:
            return max(sequence.num_tokens for sequence in self.plan.sequences)
        return int(np.diff(self.plan.segments.tokens.starts).max(initial=0))

    def block_tokens(self, first: int, stop: int) -> int:
        """Tokens of the prefix blocks first..stop."""
        return min(stop * KV_BLOCK_SIZE, len(self.prefix_ids)) - first * KV_BLOCK_SIZE

    def unit_tokens(self, first: int, stop: int) -> int:
        assert self.plan is not None
        if self.plan.sequences:
            return sum(sequence.num_tokens for sequence in self.plan.sequences[first:stop])
        starts = self.plan.segments.tokens.starts
        return int(starts[stop] - starts[first])

    def segments_of(self, first: int, stop: int) -> tuple[int, int]:
        """The segments of units first..stop."""
        assert self.plan is not None
        sequences = self.plan.sequences
        return (sequences[first].first, sequences[stop - 1].stop) if sequences else (first, stop)

    def logit_rows(self, segments: tuple[int, int]) -> tuple[int, int]:
        """The rows of the request's label logits that these segments give."""
        assert self.plan is not None
        rows = self.plan.segments.rows_of_segment
        return int(rows[segments[0]]), int(rows[segments[1]])

    def last_unit_that_fits(self, first: int, max_tokens: int) -> int:
        """The end of the run of units from `first` on that has at most `max_tokens`."""
        assert self.plan is not None, "a prefix request has no units"
        plan = self.plan
        if plan.sequences:
            return self._last_sequence_that_fits(first, max_tokens)
        starts = plan.segments.tokens.starts
        stop = int(starts.searchsorted(starts[first] + max_tokens, "right")) - 1
        return min(stop, first + plan.max_segments) if plan.max_segments else stop

    def _last_sequence_that_fits(self, first: int, max_tokens: int) -> int:
        assert self.plan is not None
        sequences, stop, num_tokens = self.plan.sequences, first, 0
        while stop < len(sequences):
            num_tokens += sequences[stop].num_tokens
            num_segments = sequences[stop].stop - sequences[first].first
            if num_tokens > max_tokens or 0 < self.plan.max_segments < num_segments:
                break
            stop += 1
        return stop


@dataclass(frozen=True)
class BatchRecord:
    """A forward that scored some segments of the request, for the debug block."""

    segments: int  # of this request
    num_tokens: int  # of this request's units; prefix blocks in the same forward are not counted
    forward_tokens: int  # of all requests
    bucket: int  # tokens after padding

    @property
    def fill(self) -> float:
        return round(self.forward_tokens / self.bucket, 4)


class RequestState:
    """How far a request has come, and its outcome.

    The scheduler's thread owns it. Any thread may call `cancel()`, and read the outcome once `is_done`. While a step is
    in flight, the device thread reads and writes the KV blocks in `entries`. The scheduler fills the next step
    meanwhile, and only needs to know which blocks have been launched.
    """

    def __init__(self, task: ScoringTask, on_change: OnChange | None = None) -> None:
        self.task = task
        self.keys = block_keys(task.prefix_ids, task.vectors)
        self._on_change = on_change  # called by the scheduler's thread; must be quick
        # Progress
        self.entries: list[CacheEntry] | None = None  # one per prefix block, once the cache has room for all of them
        self.tokens_left = task.num_tokens
        self._expected_hit_tokens = 0  # of `tokens_left`: those of the prefix that were cached when it was submitted
        self._prefilled_tokens = 0  # by this request
        self._next_unit = 0  # to be launched
        self._num_segments_scored = 0
        self.turn_tokens = 0  # of a turn that the end of a step has cut short (`step_filler.py`)
        self.num_in_flight = 0  # in-flight steps with parts of this request
        self.is_suspect = False  # a step with a part of it has failed: until items of it are scored, it runs alone
        self.is_finite = True  # all logits so far
        self.batches: list[BatchRecord] = []
        self.cached_tokens = 0
        self.submitted = monotonic()
        self.started: float | None = None
        self.prefill_seconds = 0.0
        self.extend_seconds = 0.0
        # Outcome
        self.is_cancelled = False
        self.is_done = False
        self.error: BaseException | None = None
        self.pinned: PinnedPrefix | None = None
        self.label_logits, self.logsumexp = _allocate_outputs(task)
        self.hidden: NDArray[np.float32] | None = None  # [R, D], where the task needs it

    def cancel(self) -> None:
        """Drop the request before the next step; one that is done stays as it is. Any thread may call this."""
        self.is_cancelled = True

    def has_expired(self, now: float) -> bool:
        return self.task.deadline is not None and now >= self.task.deadline

    # The prefix

    def expect_hits(self, cache: PrefixCache) -> None:
        """Look the prefix up, to estimate what the device will have to compute. Any thread may call this."""
        self._expected_hit_tokens = min(cache.num_found(self.keys) * KV_BLOCK_SIZE, len(self.task.prefix_ids))

    def reserve_prefix(self, cache: PrefixCache) -> bool:
        """Reserve KV blocks for the whole prefix. False if the cache has no room for them now."""
        if self.entries is not None or not self.keys:
            return True
        self.entries = cache.acquire(self.keys, self)
        if self.entries is None:
            return False
        num_hits = next((i for i, entry in enumerate(self.entries) if entry.owner is self), len(self.entries))
        self.cached_tokens = min(num_hits * KV_BLOCK_SIZE, len(self.task.prefix_ids))
        return True

    def release_prefix(self, cache: PrefixCache) -> None:
        if self.entries is not None:
            cache.release(self.entries, self)
            self.entries = None

    def invalidate_prefix(self, cache: PrefixCache) -> int:
        """Release the prefix, which must be computed again. Returns how many tokens of it this request had computed."""
        self.release_prefix(cache)
        lost, self._prefilled_tokens = self._prefilled_tokens, 0
        self._expected_hit_tokens = 0
        self.tokens_left += lost
        return lost

    def blocks_to_compute(self, max_tokens: int) -> tuple[int, int]:
        """first..stop of the blocks to compute next, within `max_tokens`. Empty if another request computes them."""
        entries = self.entries or []
        first = next((i for i, entry in enumerate(entries) if not entry.is_launched), len(entries))
        stop = first
        num_tokens = 0
        while stop < len(entries) and entries[stop].owner in (self, None):
            num_tokens += self.task.block_tokens(stop, stop + 1)
            if num_tokens > max_tokens:
                break
            stop += 1
        return first, stop

    def count_prefill(self, first: int, stop: int) -> None:
        """The device has computed blocks first..stop."""
        num_tokens = self.task.block_tokens(first, stop)
        self.tokens_left -= num_tokens
        self._prefilled_tokens += num_tokens

    def cached_blocks(self, stop: int | None = None) -> tuple[KVBlock, ...]:
        """The KV blocks of the prefix, up to `stop`."""
        blocks = [entry.block for entry in (self.entries or [])[:stop]]
        assert None not in blocks, "a block is read before it is computed"
        return tuple(block for block in blocks if block is not None)

    # Units

    def units_to_score(self, max_tokens: int, *, at_least_one: bool) -> tuple[int, int]:
        """first..stop of the units to launch next, within `max_tokens`."""
        first = self._next_unit
        stop = self.task.last_unit_that_fits(first, max_tokens)
        return first, max(stop, first + 1) if at_least_one else max(stop, first)

    def advance(self, stop: int) -> None:
        """Units up to `stop` have been launched."""
        self._next_unit = stop

    def roll_back(self, first: int) -> None:
        """Units from `first` on must be launched again, and their last batch does not count."""
        self._next_unit = first
        self.batches.pop()

    def receive(
        self,
        segments: tuple[int, int],
        logits: NDArray[np.float32],
        logsumexp: NDArray[np.float32] | None,
        hidden: NDArray[np.float32] | None = None,
    ) -> None:
        """Store the outputs of some segments. `logits` may have more columns than this request has labels."""
        begin, end = self.task.logit_rows(segments)
        self.label_logits[begin:end] = logits[:, : self.label_logits.shape[1]]
        self._num_segments_scored = segments[1]
        self.is_suspect = False
        if self.logsumexp is not None and logsumexp is not None:
            self.logsumexp[begin:end] = logsumexp
        if self.task.need_hidden and hidden is not None:
            if self.hidden is None:
                self.hidden = np.empty((len(self.label_logits), hidden.shape[1]), np.float32)
            self.hidden[begin:end] = hidden

    def check_finite(self, segments: tuple[int, int]) -> None:
        """Remember whether the outputs of these segments have NaN or infinity."""
        begin, end = self.task.logit_rows(segments)
        self.is_finite = self.is_finite and bool(np.isfinite(self.label_logits[begin:end]).all())

    # How far it has come

    @property
    def work_left(self) -> int:
        """Tokens that the device will probably compute for it."""
        return max(0, self.tokens_left - self._expected_hit_tokens)

    @property
    def is_prefix_launched(self) -> bool:
        """The device has been given every block of the prefix."""
        return not self.keys or (self.entries is not None and all(entry.is_launched for entry in self.entries))

    @property
    def are_units_launched(self) -> bool:
        return self._next_unit == self.task.num_units

    @property
    def is_launched(self) -> bool:
        """The device has been given the whole request."""
        return self.are_units_launched and self.is_prefix_launched

    @property
    def is_computed(self) -> bool:
        """The device has computed the whole request."""
        return self.is_launched and not self.num_in_flight and all(entry.is_computed for entry in self.entries or ())

    @property
    def num_items_done(self) -> int:
        plan = self.task.plan
        return 0 if plan is None else self._num_segments_scored // plan.segments.segments_per_item

    @property
    def queue_seconds(self) -> float:
        return (self.started or monotonic()) - self.submitted

    @property
    def device_seconds(self) -> float:
        return self.prefill_seconds + self.extend_seconds

    # The outcome

    def notify(self) -> None:
        """Call `on_change`. An exception in it is logged and does not reach the scheduler."""
        if self._on_change is None:
            return
        try:
            self._on_change()
        except Exception:
            log.exception("a request's on_change failed")

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self.is_done = True
        self.notify()
        self._on_change = None  # the caller holds this object, so a reference back would be a cycle


def _allocate_outputs(task: ScoringTask) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Label logits [R, L], and logsumexp [R] if the task needs it."""
    if task.plan is None:
        return np.zeros((0, 0), np.float32), None
    segments = task.plan.segments
    num_rows = len(segments.score_offsets)
    logits = np.empty((num_rows, segments.label_ids.shape[1]), np.float32)
    return logits, np.empty(num_rows, np.float32) if task.need_logsumexp else None
