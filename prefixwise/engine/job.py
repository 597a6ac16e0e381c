"""A job: one request on its way through the scheduler, from its submission to its last logit.

It says what is left to compute, and takes in what comes back. Everything but `cancel()` and the outcome belongs to the
scheduler's thread. The device's thread reads and fills the blocks of its prefix while a step is in flight; the
scheduler, which fills the next one meanwhile, needs to know of a block no more than that it was started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.ragged import Int32Array
from prefixwise.engine.pins import PinnedPrefix
from prefixwise.engine.prefix_cache import CacheEntry, PrefixCache, block_keys
from prefixwise.forward.batch import KV_BLOCK_SIZE, KVBlock
from prefixwise.plan.algorithms import ScorePlan

log = logging.getLogger("prefixwise")

OnChange = Callable[[], None]


@dataclass(frozen=True)
class BatchRecord:
    """A forward that scored some of the request."""

    segments: int  # its own
    num_tokens: int  # its own, but for blocks of its prefix that the same forward may keep
    forward_tokens: int  # all requests'
    bucket: int  # what the forward was padded to

    @property
    def fill(self) -> float:
        return round(self.forward_tokens / self.bucket, 4)


class Job:
    """What one request asks of the device: a prefix to be kept, and then (`plan`) tails or rows to be scored."""

    def __init__(
        self,
        prefix_ids: Int32Array,  # to be kept; empty where the plan needs none
        plan: ScorePlan | None,  # None: the prefix is all
        *,
        normalize: bool = False,  # also the log-sum-exp over the vocabulary?
        timed: bool = False,  # a prefill by itself, that is waited for, so that its seconds are its own?
        deadline: float | None = None,  # of time.monotonic()
        pin_seconds: float | None = None,  # keep the prefix for so long
        on_change: OnChange | None = None,  # called by the scheduler's thread; must be quick
        priority: int = 0,  # lower ones are served first
    ) -> None:
        self.prefix_ids = prefix_ids
        self.plan = plan
        self.normalize = normalize
        self.timed = timed
        self.deadline = deadline
        self.pin_seconds = pin_seconds
        self.priority = priority
        self.keys = block_keys(prefix_ids)
        self._on_change = on_change
        self.num_tokens = plan.num_tokens if plan is not None else len(prefix_ids)
        self.tokens_left = self.num_tokens
        self._tokens_prefilled = 0  # by this job
        # Its way through the scheduler
        self.entries: list[CacheEntry] | None = None  # of all blocks of the prefix, once there was room for them
        self._next = 0  # segment, or row, that is to be started
        self._num_answered = 0  # segments
        self.num_in_flight = 0  # steps with parts of it
        self.batches: list[BatchRecord] = []
        self.cached_tokens = 0
        self.submitted = monotonic()
        self.started: float | None = None
        self.prefill_seconds = 0.0
        self.extend_seconds = 0.0
        # The outcome
        self.is_cancelled = False
        self.is_done = False
        self.error: BaseException | None = None
        self.pinned: PinnedPrefix | None = None
        self.label_logits, self.logsumexp = self._make_room()

    def _make_room(self) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        if self.plan is None:
            return np.zeros((0, 0), np.float32), None
        segments = self.plan.segments
        num_rows = len(segments.score_offsets)
        logits = np.empty((num_rows, segments.label_ids.shape[1]), np.float32)
        return logits, np.empty(num_rows, np.float32) if self.normalize else None

    def cancel(self) -> None:
        """Give up its place before the next step. For any thread; after the end it does nothing."""
        self.is_cancelled = True

    # The prefix

    def find_prefix(self, cache: PrefixCache) -> bool:
        """Take places for all blocks of the prefix; False where there is no room for them now."""
        if self.entries is not None or not self.keys:
            return True
        self.entries = cache.acquire(self.keys, self)
        if self.entries is None:
            return False
        num_found = next((i for i, entry in enumerate(self.entries) if entry.owner is self), len(self.entries))
        self.cached_tokens = min(num_found * KV_BLOCK_SIZE, len(self.prefix_ids))
        return True

    def drop_prefix(self, cache: PrefixCache) -> None:
        if self.entries is not None:
            cache.release(self.entries, self)
            self.entries = None

    def count_blocks(self, first: int, stop: int) -> None:
        """So much of the prefix is done."""
        num_tokens = self.block_tokens(first, stop)
        self.tokens_left -= num_tokens
        self._tokens_prefilled += num_tokens

    def lose_prefix(self, cache: PrefixCache) -> int:
        """The prefix is to be found or computed again; how many tokens of it this job had computed."""
        self.drop_prefix(cache)
        lost, self._tokens_prefilled = self._tokens_prefilled, 0
        self.tokens_left += lost
        return lost

    def blocks_to_compute(self, max_tokens: int) -> tuple[int, int]:
        """first..stop of the blocks that this job may compute next, as many as fit; none where another job is at it."""
        entries = self.entries or []
        first = next((i for i, entry in enumerate(entries) if not entry.is_started), len(entries))
        stop = first
        num_tokens = 0
        while stop < len(entries) and entries[stop].owner in (self, None):
            num_tokens += self.block_tokens(stop, stop + 1)
            if num_tokens > max_tokens:
                break
            stop += 1
        return first, stop

    def block_tokens(self, first: int, stop: int) -> int:
        return min(stop * KV_BLOCK_SIZE, len(self.prefix_ids)) - first * KV_BLOCK_SIZE

    def kept_blocks(self, stop: int | None = None) -> tuple[KVBlock, ...]:
        blocks = [entry.block for entry in (self.entries or [])[:stop]]
        assert None not in blocks, "a block is read before it is computed"
        return tuple(block for block in blocks if block is not None)

    # Tails and rows

    @property
    def is_scored(self) -> bool:
        """Has every tail or row been started?"""
        if self.plan is None:
            return True
        return self._next == (len(self.plan.rows) or len(self.plan.segments.tails))

    @property
    def is_complete(self) -> bool:
        """Has everything been started?"""
        return self.is_scored and self.has_prefix

    @property
    def is_answered(self) -> bool:
        """Has the device done everything?"""
        return self.is_complete and not self.num_in_flight and all(entry.is_computed for entry in self.entries or ())

    @property
    def has_prefix(self) -> bool:
        """Is every block of the prefix computed, or being?"""
        return not self.keys or (self.entries is not None and all(entry.is_started for entry in self.entries))

    def units_to_score(self, max_tokens: int, *, at_least_one: bool) -> tuple[int, int]:
        """first..stop of the segments (or rows, where the plan has them) that fit, in their order."""
        assert self.plan is not None, "a prefix has no tails"
        plan, first = self.plan, self._next
        if plan.rows:
            stop = self._rows_that_fit(max_tokens)
        else:
            starts = plan.segments.tails.starts
            stop = int(starts.searchsorted(starts[first] + max_tokens, "right")) - 1
            if plan.max_segments:
                stop = min(stop, first + plan.max_segments)
        return first, max(stop, first + 1) if at_least_one else max(stop, first)

    def _rows_that_fit(self, max_tokens: int) -> int:
        assert self.plan is not None
        rows, stop, num_tokens = self.plan.rows, self._next, 0
        while stop < len(rows):
            num_tokens += rows[stop].num_tokens
            num_segments = rows[stop].stop - rows[self._next].first
            if num_tokens > max_tokens or 0 < self.plan.max_segments < num_segments:
                break
            stop += 1
        return stop

    def segments_of(self, first: int, stop: int) -> tuple[int, int]:
        """Of rows, or of segments themselves."""
        assert self.plan is not None
        rows = self.plan.rows
        return (rows[first].first, rows[stop - 1].stop) if rows else (first, stop)

    def unit_tokens(self, first: int, stop: int) -> int:
        assert self.plan is not None
        if self.plan.rows:
            return sum(row.num_tokens for row in self.plan.rows[first:stop])
        starts = self.plan.segments.tails.starts
        return int(starts[stop] - starts[first])

    def advance(self, stop: int) -> None:
        """Segments, or rows, up to `stop` have been started."""
        self._next = stop

    def go_back(self, first: int) -> None:
        """Segments, or rows, from `first` on are to be started again; the last batch is of no account."""
        self._next = first
        self.batches.pop()

    def take_in(
        self, segments: tuple[int, int], logits: NDArray[np.float32], normalizers: NDArray[np.float32] | None
    ) -> None:
        """The answers of some segments, and perhaps of more labels than this request has."""
        assert self.plan is not None
        rows = self.plan.segments.rows_of_segment
        begin, end = rows[segments[0]], rows[segments[1]]
        self.label_logits[begin:end] = logits[:, : self.label_logits.shape[1]]
        self._num_answered = segments[1]
        if self.logsumexp is not None and normalizers is not None:
            self.logsumexp[begin:end] = normalizers

    def num_score_rows(self, segments: tuple[int, int]) -> int:
        assert self.plan is not None
        rows = self.plan.segments.rows_of_segment
        return int(rows[segments[1]] - rows[segments[0]])

    @property
    def num_items_done(self) -> int:
        """Items that were answered."""
        return 0 if self.plan is None else self._num_answered // self.plan.segments.segments_per_item

    # The end

    def changed(self) -> None:
        """Tell whoever waits. A fault of theirs is not the scheduler's."""
        if self._on_change is None:
            return
        try:
            self._on_change()
        except Exception:
            log.exception("a request's on_change failed")

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self.is_done = True
        self.changed()
        self._on_change = None  # whoever waits has the job, which need not have them any more: no circle is left behind

    @property
    def queue_seconds(self) -> float:
        return (self.started or monotonic()) - self.submitted

    @property
    def device_seconds(self) -> float:
        return self.prefill_seconds + self.extend_seconds
